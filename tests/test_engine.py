"""The library as its users see it: `generate`, `chat`, `stream`, `add_request` / `step` / `abort`, and what may never
happen to a neighbour. Tokens and logprobs are judged by the cache-less `reference`; texts that stop strings and
characters are tested on come from a model that says what a script tells it. After every test all engines must be idle:
no request, no block in use, all counts right.
"""

from __future__ import annotations

import logging
import math
import re
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import reference
import torch
from checkpoints import write_llama
from tiny_tokenizers import byte_ids, write_byte_level, write_sentencepiece
from torch import Tensor

from miniserve import Engine, RequestOutput, SamplingParams, sampling
from miniserve.errors import EngineError, MiniserveError, QueueFull, RequestError

VOCAB, EOS, MAX_LEN, BLOCK = 256, 2, 64, 4
TOKEN_BYTES = 256  # two groups with 2 KV heads of 8 numbers: K and V in float32
N = 8
GREEDY = SamplingParams(temperature=0, max_tokens=N, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9] * 11, list(range(20, 57)), [200], list(range(100, 116))]
Make = Callable[..., Engine]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine") / "model"
    return write_llama(path, reads=(0, 0, 2, 2), vocab=VOCAB, eos_token_id=EOS, max_position_embeddings=MAX_LEN)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level(tmp_path_factory.mktemp("engine_tokenizer"))


@pytest.fixture
def make(folder: Path, tokenizer: Path) -> Iterator[Make]:
    """`make(blocks=128, **settings)`: an engine; at the end of the test it must be idle.

    It has the reference kernels, which take any block size.
    """
    engines: list[Engine] = []

    def build(blocks: int = 128, **settings: Any) -> Engine:
        size = settings.get("block_size", BLOCK)
        defaults = {"block_size": size, "kv_cache_memory": blocks * size * TOKEN_BYTES, "ops": "reference"}
        engines.append(Engine(folder, **{"tokenizer": str(tokenizer)} | defaults | settings))
        return engines[-1]

    yield build
    for engine in engines:
        assert_idle(engine)


@pytest.fixture
def engine(make: Make) -> Engine:
    return make()


@pytest.fixture(scope="session")
def greedy(folder: Path) -> Callable[[Sequence[int], int], list[int]]:
    """The judge: prompt, n -> the n likeliest tokens one after the other."""
    model, known = reference.load(folder), {}

    def judge(prompt: Sequence[int], n: int = N) -> list[int]:
        said = known.setdefault(tuple(prompt), [])
        while len(said) < n:
            said.append(int(model([*prompt, *said])[-1].argmax()))
        return said[:n]

    return judge


@pytest.fixture(scope="session")
def log_softmax(folder: Path) -> Callable[[Sequence[int]], Tensor]:
    """The judge: token ids -> (T, V), the log probabilities of what comes after each."""
    model = reference.load(folder)
    return lambda ids: model(ids).log_softmax(-1)


def assert_idle(engine: Engine) -> None:
    """Nothing under way and every block free."""
    assert not engine.has_unfinished_requests()
    assert engine.stats() | {"blocks_total": 0, "preemptions": 0} == dict.fromkeys(engine.stats(), 0)
    engine.block_manager.check_integrity()


def finish(engine: Engine, limit: int = 2000) -> dict[str, RequestOutput]:
    """Step until nothing is left; the last output of each request."""
    last: dict[str, RequestOutput] = {}
    for _ in range(limit):
        if not engine.has_unfinished_requests():
            return last
        last |= {output.request_id: output for output in engine.step()}
    raise AssertionError(f"still running after {limit} steps")


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """The tokens of each answer's first sample."""
    return [output.outputs[0].token_ids for output in outputs]


# ---------------------------------------------------------------- prompts and answers


def test_every_prompt_form_means_the_same(engine: Engine, greedy: Callable) -> None:
    ids = engine.tokenizer.encode("the cat sat")
    expected = greedy(ids)
    for prompt, text in (
        ("the cat sat", "the cat sat"),
        ({"prompt": "the cat sat"}, "the cat sat"),
        (ids, None),
        (tuple(ids), None),
        ({"prompt_token_ids": ids}, None),
        ({"prompt_token_ids": tuple(ids)}, None),
    ):
        one, *many = engine.generate(prompt, GREEDY), *engine.generate([prompt, prompt], GREEDY)
        for output in (*one, *many):
            assert output.prompt_token_ids == ids
            assert output.prompt == text
            assert output.outputs[0].token_ids == expected


def test_a_list_may_mix_forms_and_answers_keep_its_order(engine: Engine, greedy: Callable) -> None:
    ids = engine.tokenizer.encode("a dog")
    prompts = [PROMPTS[2], "a dog", {"prompt_token_ids": PROMPTS[0]}, {"prompt": "a dog"}, tuple(PROMPTS[1])]
    outputs = engine.generate(prompts, GREEDY)
    assert tokens(outputs) == [greedy(p) for p in (PROMPTS[2], ids, PROMPTS[0], ids, PROMPTS[1])]
    assert [output.prompt for output in outputs] == [None, "a dog", None, "a dog", None]
    assert len({output.request_id for output in outputs}) == len(prompts)


def test_no_prompts_no_answers(engine: Engine) -> None:
    assert engine.generate([], GREEDY) == []


def test_an_answer_has_the_attributes_of_vllm(engine: Engine, greedy: Callable) -> None:
    (output,) = engine.generate("the cat", replace(GREEDY, logprobs=2, prompt_logprobs=1, max_tokens=3))
    assert isinstance(output, RequestOutput) and isinstance(output.request_id, str)
    assert output.prompt == "the cat" and output.finished and output.num_cached_tokens == 0
    (sample,) = output.outputs
    assert sample.index == 0 and sample.finish_reason == "length" and sample.stop_reason is None
    assert sample.token_ids == greedy(output.prompt_token_ids, 3)
    assert sample.text == engine.tokenizer.decode(sample.token_ids)
    assert len(sample.logprobs) == 3 and len(output.prompt_logprobs) == len(output.prompt_token_ids)
    logprob = sample.logprobs[0][sample.token_ids[0]]
    assert logprob.rank == 1 and logprob.logprob <= 0
    assert logprob.decoded_token == engine.tokenizer.token_text(sample.token_ids[0])
    (plain,) = engine.generate("the cat", GREEDY)
    assert plain.prompt_logprobs is None and plain.outputs[0].logprobs is None


def test_params_may_be_none_one_or_one_each(engine: Engine, greedy: Callable) -> None:
    assert [len(t) for t in tokens(engine.generate(PROMPTS[:2]))] == [16, 16]  # EOS is unlikely to come up
    each = [replace(GREEDY, max_tokens=n) for n in (1, 5, 3)]
    assert tokens(engine.generate(PROMPTS[:3], each)) == [greedy(p, n) for p, n in zip(PROMPTS, (1, 5, 3))]
    assert tokens(engine.generate(PROMPTS[0], [each[0]])) == [greedy(PROMPTS[0], 1)]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_params_is_refused_with_both_numbers(engine: Engine, count: int) -> None:
    with pytest.raises(RequestError, match=rf"{count} .*2 ") as caught:
        engine.generate(PROMPTS[:2], [GREEDY] * count)
    assert caught.value.param == "sampling_params"


@pytest.mark.parametrize("params", [5, "greedy", {"n": 1}, [None], [{"n": 1}], ["x"]], ids=str)
def test_params_of_another_type_are_refused(engine: Engine, params: Any) -> None:
    with pytest.raises(RequestError) as caught:
        engine.generate(PROMPTS[0], params)
    assert caught.value.param == "sampling_params"


def test_params_are_judged_by_validate_wherever_they_come_in(engine: Engine) -> None:
    bad = SamplingParams(n=10**9)
    start = time.thread_time()
    tracemalloc.start()
    for call in (
        lambda: engine.generate(PROMPTS[0], bad),
        lambda: engine.add_request(None, PROMPTS[0], bad),
        lambda: list(engine.stream(PROMPTS[0], bad)),
        lambda: engine.chat([{"role": "user", "content": "x"}], bad),
    ):
        with pytest.raises(RequestError) as caught:
            call()
        assert caught.value.param == "n"
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
    assert time.thread_time() - start < 0.5


def test_ids_that_the_model_has_not_are_refused_everywhere(engine: Engine) -> None:
    for fields in ({"stop_token_ids": [VOCAB]}, {"logit_bias": {VOCAB: 1.0}}):
        with pytest.raises(RequestError, match=str(VOCAB - 1)):
            engine.generate(PROMPTS[0], SamplingParams(**fields))


def test_progress_bar_is_silent_where_stderr_is_no_terminal(engine: Engine, capfd: pytest.CaptureFixture[str]) -> None:
    for use_tqdm in (True, False):
        engine.generate(PROMPTS[0], replace(GREEDY, max_tokens=1), use_tqdm=use_tqdm)
    assert capfd.readouterr() == ("", "")


def test_outputs_are_the_callers_own(engine: Engine, greedy: Callable) -> None:
    """Neither the list given nor the answer got is shared with the engine."""
    prompt = list(PROMPTS[0])
    engine.add_request("a", prompt, GREEDY)
    first = engine.step()[0]
    prompt[0] = 99
    first.outputs[0].token_ids.clear()
    first.prompt_token_ids[0] = 99
    assert finish(engine)["a"].outputs[0].token_ids == greedy(PROMPTS[0])


# ---------------------------------------------------------------- prompts that cannot be served

BAD_PROMPTS: list[Any] = [
    "",
    [],
    (),
    None,
    5,
    1.5,
    True,
    b"bytes",
    {1, 2},
    object(),
    {},
    {"text": "x"},
    {"prompt": None},
    {"prompt": ""},
    {"prompt": 5},
    {"prompt_token_ids": []},
    {"prompt_token_ids": None},
    {"prompt_token_ids": "text"},
    {"prompt_token_ids": 7},
    {"prompt_token_ids": [[1]]},
    [-1],
    [VOCAB],
    [1, 2, VOCAB],
    [2**31],
    [2**63],
    [10**5000],
    [True],
    [1.0],
    ["1"],
    [1, None],
    [1, "a"],
    [1, [2]],
    [float("nan")],
    "\ud800",
    "ok \udfff",
    [7] * MAX_LEN,
    [7] * (MAX_LEN + 1),
    [7] * 10**6,
    "x" * MAX_LEN,
    "x" * 10**7,
]


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=lambda p: f"{p!r:.20}" if p != [10**5000] else "huge")
def test_bad_prompts_name_the_field_and_disturb_nobody(engine: Engine, greedy: Callable, prompt: Any) -> None:
    """B9, B13, B14, B16: in every way in, while a neighbour runs."""
    engine.add_request("neighbour", PROMPTS[1], replace(GREEDY, max_tokens=3))
    engine.step()
    for call in (
        lambda: engine.add_request("bad", prompt, GREEDY),
        lambda: engine.generate([PROMPTS[0], prompt], GREEDY),
        lambda: list(engine.stream(prompt, GREEDY)),
    ):
        with pytest.raises(RequestError) as caught:
            call()
        assert caught.value.param == "prompt"
        assert len(str(caught.value)) < 400
        str(caught.value).encode()
    assert finish(engine)["neighbour"].outputs[0].token_ids == greedy(PROMPTS[1], 3)


@pytest.mark.parametrize(
    "prompts", [None, 5, b"x", {1, 2}, [[]], [""], [None], [[1], []], [[1], None], {"a": 1}], ids=str
)
def test_bad_lists_of_prompts_run_none_of_them(engine: Engine, prompts: Any) -> None:
    with pytest.raises(RequestError) as caught:
        engine.generate(prompts, GREEDY)
    assert caught.value.param == "prompt"


def test_a_prompt_as_long_as_the_context_is_one_too_long(engine: Engine, greedy: Callable) -> None:
    """B14: L - 1 leaves room for one token; L and L + 1 for none, and the message has both numbers."""
    prompt = [7 + i % 90 for i in range(MAX_LEN + 1)]
    (output,) = engine.generate(prompt[: MAX_LEN - 1], GREEDY)
    assert output.outputs[0].token_ids == greedy(prompt[: MAX_LEN - 1], 1)
    assert output.outputs[0].finish_reason == "length"
    for length in (MAX_LEN, MAX_LEN + 1):
        with pytest.raises(RequestError, match=rf"{length} .*maximum context length.* {MAX_LEN} "):
            engine.generate(prompt[:length], GREEDY)


def test_min_tokens_that_no_context_holds_is_refused(engine: Engine, greedy: Callable) -> None:
    """B12: also where max_tokens is not given."""
    room = MAX_LEN - len(PROMPTS[0])
    for too_many in (room + 1, 10**9):
        with pytest.raises(RequestError, match=str(too_many)) as caught:
            engine.generate(PROMPTS[0], replace(GREEDY, min_tokens=too_many, max_tokens=None))
        assert caught.value.param == "min_tokens"
    (output,) = engine.generate(PROMPTS[0], replace(GREEDY, min_tokens=room, max_tokens=None, ignore_eos=False))
    assert len(output.outputs[0].token_ids) == room


def test_a_huge_text_is_refused_before_it_is_tokenised(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.tokenizer, "encode", lambda *_: pytest.fail("tokenised"))
    with pytest.raises(RequestError, match="maximum context length"):
        engine.generate("x" * 10**7, GREEDY)


# ---------------------------------------------------------------- where an answer ends


def test_max_tokens_none_goes_on_to_the_context_limit(engine: Engine, greedy: Callable) -> None:
    for params in (replace(GREEDY, max_tokens=None), replace(GREEDY, max_tokens=10**6)):
        (output,) = engine.generate(PROMPTS[2], params)
        assert output.outputs[0].token_ids == greedy(PROMPTS[2], MAX_LEN - len(PROMPTS[2]))
        assert output.outputs[0].finish_reason == "length"


def test_an_answer_that_outgrows_the_pool_ends_with_length(make: Make, greedy: Callable) -> None:
    """T1: 8 blocks of 4 keep 32 tokens; the last token sampled need not be kept."""
    engine = make(blocks=8)
    outputs = engine.generate([PROMPTS[1], PROMPTS[0]], replace(GREEDY, max_tokens=None))
    assert tokens(outputs) == [greedy(p, 33 - len(p)) for p in (PROMPTS[1], PROMPTS[0])]
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "length"]


def test_a_prompt_that_never_fits_is_refused_and_the_others_finish(make: Make, greedy: Callable) -> None:
    """T1: 40 tokens need 10 blocks of 4, and there are 8."""
    engine = make(blocks=8)
    engine.add_request("before", PROMPTS[0], GREEDY)
    with pytest.raises(RequestError, match=r"10 .*blocks.*8") as caught:
        engine.add_request("never", [7] * 40, GREEDY)
    assert caught.value.param == "prompt" and "layer group" in str(caught.value)
    short = [[i] * 5 for i in (11, 12, 13)]
    for i, prompt in enumerate(short):
        engine.add_request(str(i), prompt, GREEDY)
    last = finish(engine)
    assert [last[str(i)].outputs[0].token_ids for i in range(3)] == [greedy(p) for p in short]
    assert last["before"].outputs[0].token_ids == greedy(PROMPTS[0])


def test_the_tightest_class_decides_what_fits(tmp_path: Path) -> None:
    """T1 with a full and a windowed class: both kinds of blocks are counted and named."""
    folder = write_llama(tmp_path, num_layers=2, windows=(None, 8), vocab=VOCAB, max_position_embeddings=MAX_LEN)
    engine = Engine(folder, block_size=4, kv_cache_memory=8 * 4 * 128, ops="reference")
    assert len(engine.layout.classes) == 2 and engine.block_manager.num_pages == 8
    with pytest.raises(RequestError, match=r"layer groups \[0\].*layer groups \[1\] \(window 8\).* 8;"):
        engine.add_request(None, [7] * 40)
    params = SamplingParams(temperature=0, max_tokens=None)
    for output in engine.generate([[7] * 20, [8] * 5, [9] * 14], params):
        sample = output.outputs[0]
        assert sample.finish_reason == "length"
        assert sample.token_ids == reference.greedy(folder, output.prompt_token_ids, len(sample.token_ids))
        assert len(output.prompt_token_ids) + len(sample.token_ids) >= 20
    assert_idle(engine)


def test_the_models_end_token_ends_the_text(engine: Engine) -> None:
    """EOS is the last of the token ids, not part of the text, and no stop reason (as in vLLM)."""
    bias = {EOS: 100.0}
    params = SamplingParams(temperature=0, max_tokens=20, logit_bias=bias)
    (sample,) = engine.generate(PROMPTS[0], params)[0].outputs
    assert (sample.token_ids, sample.text, sample.finish_reason, sample.stop_reason) == ([EOS], "", "stop", None)
    (sample,) = engine.generate(PROMPTS[0], replace(params, ignore_eos=True))[0].outputs
    assert (sample.token_ids, sample.text, sample.finish_reason) == ([EOS] * 20, "", "length")
    (sample,) = engine.generate(PROMPTS[0], replace(params, min_tokens=4))[0].outputs
    assert len(sample.token_ids) == 5 and sample.token_ids.index(EOS) == 4
    assert sample.text == engine.tokenizer.decode(sample.token_ids[:4])
    (sample,) = engine.generate(PROMPTS[0], replace(params, min_tokens=20))[0].outputs
    assert EOS not in sample.token_ids and len(sample.token_ids) == 20 and sample.finish_reason == "length"


def test_stop_token_ids_end_the_text_and_say_which(engine: Engine, greedy: Callable) -> None:
    expected = greedy(PROMPTS[0])
    third = expected[3]
    first = expected.index(third)
    (sample,) = engine.generate(PROMPTS[0], replace(GREEDY, stop_token_ids=[third, 255]))[0].outputs
    assert sample.token_ids == expected[: first + 1]
    assert sample.text == engine.tokenizer.decode(expected[:first])
    assert (sample.finish_reason, sample.stop_reason) == ("stop", third)
    last = engine.generate(PROMPTS[0], replace(GREEDY, stop_token_ids=[third], max_tokens=first + 1))[0].outputs[0]
    assert (last.finish_reason, last.stop_reason) == ("stop", third), "stop outranks length"


# ---------------------------------------------------------------- scripted texts


class Scripted:
    """Says `script` after a prompt of one token, whatever else happens: the row at position i gives script[i]."""

    def __init__(self, script: Sequence[int]) -> None:
        self.script = [*script, *[EOS] * MAX_LEN]

    def __call__(self, batch: Any, kv_pool: Any) -> Tensor:
        return batch.behind_cut.positions[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        rows = torch.zeros(len(hidden), VOCAB)
        for row, position in enumerate(hidden[:, 0].tolist()):
            rows[row, self.script[position]] = 20.0
        return rows


@pytest.fixture
def say(make: Make) -> Callable[..., list[RequestOutput]]:
    """`say(script, **params)`: all outputs of a stream of this text, checked to agree with `generate`."""
    engine = make(enable_prefix_caching=False)

    def run(script: str | bytes | Sequence[int], **fields: Any) -> list[RequestOutput]:
        script = script.encode() if isinstance(script, str) else script
        engine.model = Scripted(byte_ids(script) if isinstance(script, bytes) else script)
        params = SamplingParams(**{"temperature": 0, "max_tokens": None} | fields)
        outputs = list(engine.stream([7], params))
        (whole,) = engine.generate([[7]], params)
        assert whole.outputs == outputs[-1].outputs, "stream and non-stream agree"
        texts = [output.outputs[0].text for output in outputs]
        assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:])), "nothing is taken back"
        return outputs

    return run


def test_a_stop_string_ends_the_text_before_it(say: Callable) -> None:
    """T7: DEFGHIJ comes letter by letter; none of it is ever sent."""
    outputs = say("ABC DEFGHIJ KLM", stop="DEFGHIJ")
    sample = outputs[-1].outputs[0]
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("ABC ", "stop", "DEFGHIJ")
    assert sample.token_ids == byte_ids(b"ABC DEFGHIJ"), "the tokens are all that were made"
    assert all(len(output.outputs[0].text) <= 4 for output in outputs)


def test_a_near_miss_is_sent_whole(say: Callable) -> None:
    outputs = say("ABC DEFGHIK KLM", stop=["DEFGHIJ"])
    assert outputs[-1].outputs[0].text == "ABC DEFGHIK KLM"
    assert [len(output.outputs[0].text) for output in outputs][:12] == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4, 11, 12]
    assert say("ABC DEF", stop="DEFGHIJ")[-1].outputs[0].text == "ABC DEF", "held back until the end"
    assert say("ABC DEFGH", stop="DEFGHIJ", max_tokens=8)[-1].outputs[0].text == "ABC DEFG"


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        (["x", "DEF"], "ABC ", "DEF"),
        (["DEFG", "DEF"], "ABC ", "DEF"),
        (["C D", "BC"], "A", "BC"),
        ("A", "", "A"),
        ("M", "ABC DEF GHI JKL", "M"),
        (["zzz", "M", "GHI"], "ABC DEF ", "GHI"),
    ],
)
def test_of_several_stops_the_first_to_appear_ends(say: Callable, stop: Any, text: str, reason: str) -> None:
    sample = say("ABC DEF GHI JKLM", stop=stop)[-1].outputs[0]
    assert (sample.text, sample.finish_reason, sample.stop_reason) == (text, "stop", reason)


def test_a_stop_within_tokens_of_several_letters(say: Callable) -> None:
    """Tokens "the" and " the": the stop begins inside one and ends inside the next."""
    the, space_the = 247, 248
    script = [*byte_ids(b"a "), the, space_the, space_the, *byte_ids(b"!")]
    assert say(script)[-1].outputs[0].text == "a the the the!"
    sample = say(script, stop="e t")[-1].outputs[0]
    assert (sample.text, sample.stop_reason) == ("a th", "e t")
    assert sample.token_ids == script[:4]


def test_a_stop_in_the_last_token_outranks_length(say: Callable) -> None:
    sample = say("ABCDEF", stop="DEF", max_tokens=6)[-1].outputs[0]
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("ABC", "stop", "DEF")
    sample = say("ABCDEF", stop="DEF", max_tokens=5)[-1].outputs[0]
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("ABCDE", "length", None)


def test_min_tokens_holds_for_stop_strings_too(say: Callable) -> None:
    sample = say("ab.cd.ef.gh", stop=".", min_tokens=4)[-1].outputs[0]
    assert (sample.text, sample.stop_reason) == ("ab.cd", ".")
    sample = say("ab.cd", stop=".", min_tokens=3)[-1].outputs[0]
    assert sample.text in ("ab", "ab.cd"), "whether the third token may end it is a matter of taste"


def test_a_stop_that_begins_before_min_tokens_and_ends_after_it_counts(say: Callable) -> None:
    sample = say("abSTOPcd", stop="STOP", min_tokens=4)[-1].outputs[0]
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("ab", "stop", "STOP")


def test_characters_of_several_tokens_stream_whole(say: Callable) -> None:
    """E2: each output is valid text; an unfinished character is never shown, unless the text ends in it."""
    outputs = say("a😀日本é!")
    texts = [output.outputs[0].text for output in outputs]
    assert texts[-1] == "a😀日本é!" and not any("\ufffd" in text for text in texts)
    texts = [output.outputs[0].text for output in say("a😀".encode()[:-1], max_tokens=4)]
    assert texts == ["a", "a", "a", "a\ufffd"]
    assert say("日本語。日本", stop="。日")[-1].outputs[0].text == "日本語"


def test_text_that_looks_like_protocol_is_text(say: Callable) -> None:
    """E4."""
    text = "\n\ndata: [DONE]\n\n"
    assert say(text)[-1].outputs[0].text == text


def test_stops_cost_little(say: Callable) -> None:
    """B20: many long stops over a text of near misses."""
    start = time.thread_time()
    assert say("a" * 50, stop=["a" * 1000 + str(i) for i in range(16)])[-1].outputs[0].text == "a" * 50
    assert time.thread_time() - start < 5


def test_streams_equal_whole_answers(make: Make) -> None:
    """E6: real tokens, with stops, n, seeds and logprobs; to the last bit, so without a prefix cache."""
    engine, random = make(enable_prefix_caching=False), Random(0)
    for _ in range(6):
        params = SamplingParams(
            n=random.choice([1, 1, 3]),
            temperature=random.choice([0, 0.8, 1.5]),
            seed=random.randrange(2**32),
            max_tokens=random.randint(1, 12),
            stop=random.choice([None, ["a"], ["\x19", "e"], ["E", "th"]]),
            logprobs=random.choice([None, 0, 2]),
            min_tokens=0,
        )
        prompt = random.choice(PROMPTS)
        *_, last = engine.stream(prompt, params)
        (whole,) = engine.generate([prompt], params)
        assert last.finished and last.outputs == whole.outputs
        for sample in last.outputs:
            assert sample.finish_reason in ("stop", "length")
            assert params.stop is None or not any(stop in sample.text for stop in params.stop)


# ---------------------------------------------------------------- n samples and seeds


@pytest.mark.parametrize("caching", [True, False])
def test_samples_share_the_prompts_blocks(make: Make, caching: bool) -> None:
    """40 tokens in blocks of 4: the siblings hold the first 9 blocks in common and copy nothing."""
    engine = make(enable_prefix_caching=caching, max_num_batched_tokens=16)
    engine.add_request("n", list(range(10, 50)), SamplingParams(n=4, seed=1, max_tokens=4, ignore_eos=True))
    most = 0
    while engine.has_unfinished_requests():
        engine.step()
        held = [engine.block_manager.num_pages_held(request) for request in engine.scheduler.running]
        if len(held) == 4:
            most = max(most, engine.block_manager.num_used)
            assert sum(held) - engine.block_manager.num_used >= 3 * 9
    assert 0 < most <= 9 + 4 * 2
    again = engine.generate([list(range(10, 50))], GREEDY)[0]
    assert again.num_cached_tokens == (36 if caching else 0)


def test_samples_differ_come_in_order_and_are_reproducible(engine: Engine) -> None:
    params = SamplingParams(n=5, temperature=1.2, seed=11, max_tokens=8, ignore_eos=True)
    (first,) = engine.generate([PROMPTS[1]], params)
    assert [sample.index for sample in first.outputs] == [0, 1, 2, 3, 4]
    assert len({tuple(sample.token_ids) for sample in first.outputs}) == 5
    (again,) = engine.generate([PROMPTS[1]], params)
    assert again.outputs == first.outputs
    (single,) = engine.generate([PROMPTS[1]], replace(params, n=1))
    assert single.outputs[0] == first.outputs[0]


def test_greedy_samples_are_all_the_likeliest(engine: Engine, greedy: Callable) -> None:
    (output,) = engine.generate([PROMPTS[2]], replace(GREEDY, n=3))
    assert [sample.token_ids for sample in output.outputs] == [greedy(PROMPTS[2])] * 3


def test_samples_may_end_at_different_times(engine: Engine) -> None:
    """An answer is finished when its last sample is; those that ended stay as they are."""
    params = SamplingParams(n=6, temperature=1.5, seed=3, max_tokens=30, stop_token_ids=list(range(3, 60)))
    seen: dict[int, Any] = {}
    for output in engine.stream(PROMPTS[0], params):
        assert [sample.index for sample in output.outputs] == list(range(6))
        ended = {sample.index: sample for sample in output.outputs if sample.finish_reason}
        assert output.finished == (len(ended) == 6)
        assert all(ended[index] == sample for index, sample in seen.items())
        seen = ended
    assert len({len(sample.token_ids) for sample in seen.values()}) > 1


def test_a_seed_gives_the_same_text_in_any_company(make: Make) -> None:
    params = SamplingParams(temperature=1.0, seed=42, max_tokens=15, ignore_eos=True, top_p=0.9)
    alone = tokens(make().generate([PROMPTS[1]], params))[0]
    others = [SamplingParams(temperature=1.0, max_tokens=n, top_k=3 * n, presence_penalty=0.5) for n in (3, 9, 20)]
    engine = make(max_num_batched_tokens=5, max_num_seqs=3)
    mixed = engine.generate([PROMPTS[0], PROMPTS[2], PROMPTS[1], PROMPTS[3]], [*others[:2], params, others[2]])
    assert tokens(mixed)[2] == alone
    small = make(blocks=16)
    crowd = small.generate([PROMPTS[2], PROMPTS[1], PROMPTS[4]], [replace(GREEDY, max_tokens=None), params, GREEDY])
    assert small.stats()["preemptions"] > 0
    assert tokens(crowd)[1] == alone


def test_without_a_seed_texts_differ_but_engines_of_one_seed_agree(make: Make) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True)
    one, two, other = (make(seed=seed).generate([PROMPTS[0]] * 3, params) for seed in (5, 5, 6))
    assert tokens(one) == tokens(two) != tokens(other)
    assert len({tuple(t) for t in tokens(one)}) == 3


def test_extreme_seeds(engine: Engine) -> None:
    for seed in (0, -1, 2**63 - 1, -(2**63)):
        params = SamplingParams(n=2, seed=seed, max_tokens=4)
        first, again = engine.generate([PROMPTS[0]] * 2, params)
        assert first.outputs == again.outputs


@pytest.mark.parametrize("temperature", [1e-2, 1e-4, 1e-10, 5e-324])
def test_tiny_temperatures_say_what_greedy_says(engine: Engine, temperature: float) -> None:
    """T13: with logits of up to 1e4."""
    logits = engine.model.logits
    engine.model.logits = lambda hidden: logits(hidden) * 1e3
    outputs = engine.generate([PROMPTS[0]] * 2, [GREEDY, replace(GREEDY, temperature=temperature)])
    assert tokens(outputs)[0] == tokens(outputs)[1]
    assert outputs[1].outputs[0].text == outputs[0].outputs[0].text


def test_a_batch_of_temperatures_gives_each_its_own(engine: Engine, greedy: Callable) -> None:
    """T6."""
    each = [replace(GREEDY, temperature=t, seed=i) for i, t in enumerate((0, 1e-7, 0.7, 2.0))]
    together = tokens(engine.generate([PROMPTS[1]] * 4, each))
    assert together[0] == together[1] == greedy(PROMPTS[1])
    assert together == [tokens(engine.generate([PROMPTS[1]], params))[0] for params in each]
    assert together[3] != together[0]


def test_biasing_every_token_ends_and_leaves_the_neighbour_alone(engine: Engine, greedy: Callable) -> None:
    """B11."""
    for fields in (
        {"logit_bias": dict.fromkeys(range(VOCAB), -100.0)},
        {"stop_token_ids": list(range(VOCAB)), "min_tokens": 3},
        {"stop_token_ids": list(range(VOCAB)), "min_tokens": N, "repetition_penalty": 2.0},
        {"logit_bias": dict.fromkeys(range(VOCAB), -100.0) | {EOS: 100.0}, "min_tokens": 3, "ignore_eos": False},
    ):
        for temperature in (0, 1):
            strange = replace(GREEDY, **fields, temperature=temperature, seed=1)
            outputs = engine.generate([PROMPTS[0], PROMPTS[1]], [strange, GREEDY])
            assert tokens(outputs)[1] == greedy(PROMPTS[1])
            assert len(tokens(outputs)[0]) >= 3 and all(0 <= t < VOCAB for t in tokens(outputs)[0])


# ---------------------------------------------------------------- logprobs


def _assert_logprobs(entries: Sequence[Any], rows: Tensor, actual: Sequence[int], num_top: int) -> None:
    """Each entry: the actual token first, then the likeliest in order, values and ranks as in the rows (R, V)."""
    assert len(entries) == len(actual)
    for entry, row, token in zip(entries, rows, actual):
        likeliest = row.topk(num_top).indices.tolist()
        assert list(entry) == [token, *(other for other in likeliest if other != token)]
        for other, found in entry.items():
            assert found.logprob == pytest.approx(row[other].item(), abs=1e-4)
            assert found.rank == 1 + int((row > row[other]).sum())


@pytest.mark.parametrize("num_top", [0, 20])
def test_logprobs_are_those_of_the_raw_distribution(engine: Engine, log_softmax: Callable, num_top: int) -> None:
    """T9: whatever temperature, filters, penalties and bias do to the choice."""
    for fields in (
        {"temperature": 0},
        {"temperature": 1, "top_k": 1},
        {"temperature": 0.01, "top_p": 0.3},
        {"temperature": 1.5, "min_p": 0.3, "seed": 4},
        {"temperature": 1, "seed": 5, "presence_penalty": 2.0, "repetition_penalty": 1.5},
        {"temperature": 0, "logit_bias": {70: 100.0, 71: -100.0}},
        {"temperature": 0, "min_tokens": 6, "stop_token_ids": [7, 8]},
    ):
        params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=num_top, prompt_logprobs=num_top, **fields)
        (output,) = engine.generate([PROMPTS[1]], params)
        sample, prompt = output.outputs[0], output.prompt_token_ids
        rows = log_softmax([*prompt, *sample.token_ids])
        _assert_logprobs(sample.logprobs, rows[len(prompt) - 1 : -1], sample.token_ids, num_top)
        assert output.prompt_logprobs[0] is None, "nothing predicts the first token"
        _assert_logprobs(output.prompt_logprobs[1:], rows[: len(prompt) - 1], prompt[1:], num_top)
        assert all(math.isfinite(p.logprob) for entry in sample.logprobs for p in entry.values())


def test_logprobs_of_the_whole_vocabulary(make: Make, log_softmax: Callable) -> None:
    engine = make(max_logprobs=-1)
    params = replace(GREEDY, max_tokens=2, logprobs=-1, prompt_logprobs=VOCAB)
    (output,) = engine.generate([PROMPTS[0]], params)
    rows = log_softmax([*PROMPTS[0], *output.outputs[0].token_ids])
    _assert_logprobs(output.outputs[0].logprobs, rows[2:4], output.outputs[0].token_ids, VOCAB)
    _assert_logprobs(output.prompt_logprobs[1:], rows[:2], PROMPTS[0][1:], VOCAB)
    with pytest.raises(RequestError, match="max_logprobs"):
        make(max_logprobs=3).generate([PROMPTS[0]], replace(GREEDY, logprobs=4))


def test_prompt_logprobs_of_one_token(engine: Engine) -> None:
    (output,) = engine.generate([[200]], replace(GREEDY, prompt_logprobs=1, max_tokens=1))
    assert output.prompt_logprobs == [None]


@pytest.mark.parametrize("budget", [1, 7, 8, 64])
def test_prompt_logprobs_do_not_depend_on_chunks(
    make: Make, log_softmax: Callable, poison: Callable, serve: Callable, budget: int
) -> None:
    """T5, T8: prompts of 1, 2, 37 and 16 tokens together, recycled blocks poisoned with NaN."""
    engine = make(max_num_batched_tokens=budget)
    prompts = [[200], [5, 6], PROMPTS[2], PROMPTS[4]]
    outputs = serve(engine, prompts, replace(GREEDY, max_tokens=2, prompt_logprobs=1, logprobs=1), poison)
    for prompt, output in zip(prompts, outputs):
        rows = log_softmax([*prompt, *output.outputs[0].token_ids])
        assert len(output.prompt_logprobs) == len(prompt)
        _assert_logprobs(output.prompt_logprobs[1:], rows[: len(prompt) - 1], prompt[1:], 1)
        _assert_logprobs(output.outputs[0].logprobs, rows[len(prompt) - 1 : -1], output.outputs[0].token_ids, 1)


def test_prompt_logprobs_do_not_depend_on_the_prefix_cache(engine: Engine, log_softmax: Callable) -> None:
    params = replace(GREEDY, max_tokens=2, prompt_logprobs=2)
    engine.generate([PROMPTS[2]], GREEDY)
    for prompt in (PROMPTS[2], PROMPTS[2][:17], [*PROMPTS[2], 8, 9]):
        (output,) = engine.generate([prompt], params)
        _assert_logprobs(output.prompt_logprobs[1:], log_softmax(prompt)[:-1], prompt[1:], 2)


def test_logprobs_survive_preemption(make: Make, log_softmax: Callable, greedy: Callable, serve: Callable) -> None:
    """D-9: a request thrown out at every step still tells each logprob once."""
    engine = make(max_num_batched_tokens=9)

    def preempt_all(engine: Engine, step: int) -> None:
        for request in [*engine.scheduler.running] if step % 3 == 2 else []:
            engine.scheduler.preempt(request)

    prompts = [PROMPTS[1], PROMPTS[4][:5], PROMPTS[0]]
    params = replace(GREEDY, max_tokens=4, prompt_logprobs=1, logprobs=2)
    for prompt, output in zip(prompts, serve(engine, prompts, params, preempt_all)):
        sample, rows = output.outputs[0], log_softmax([*prompt, *output.outputs[0].token_ids])
        assert sample.token_ids == greedy(prompt, 4)
        _assert_logprobs(output.prompt_logprobs[1:], rows[: len(prompt) - 1], prompt[1:], 1)
        _assert_logprobs(sample.logprobs, rows[len(prompt) - 1 : -1], sample.token_ids, 2)
    assert engine.stats()["preemptions"] > 2


def test_prompt_logprobs_come_once_for_all_samples(engine: Engine, log_softmax: Callable) -> None:
    (output,) = engine.generate([PROMPTS[1]], SamplingParams(n=3, seed=2, max_tokens=3, prompt_logprobs=1, logprobs=0))
    _assert_logprobs(output.prompt_logprobs[1:], log_softmax(PROMPTS[1])[:-1], PROMPTS[1][1:], 1)
    for sample in output.outputs:
        rows = log_softmax([*PROMPTS[1], *sample.token_ids])[len(PROMPTS[1]) - 1 : -1]
        _assert_logprobs(sample.logprobs, rows, sample.token_ids, 0)


# ---------------------------------------------------------------- prefix cache


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_a_prompt_of_whole_blocks_twice(engine: Engine, greedy: Callable, blocks: int) -> None:
    """T4: at least the last token is computed again."""
    prompt = list(range(30, 30 + blocks * BLOCK))
    for turn, n in enumerate((1, 1, 2)):
        (output,) = engine.generate([prompt], replace(GREEDY, n=n))
        assert [sample.token_ids for sample in output.outputs] == [greedy(prompt)] * n
        assert output.num_cached_tokens == (0 if turn == 0 else (blocks - 1) * BLOCK)


def test_prefixes_are_found_by_what_they_say(engine: Engine, greedy: Callable) -> None:
    engine.generate([PROMPTS[2]], GREEDY)
    for prompt, cached in (
        (PROMPTS[2], 36),
        (PROMPTS[2][:20] + [1, 2, 3], 20),
        (PROMPTS[2][:19] + [1, 2, 3], 16),
        ([1, *PROMPTS[2]], 0),
        (PROMPTS[2] + greedy(PROMPTS[2], 8), 44),
    ):
        (output,) = engine.generate([prompt], GREEDY)
        assert output.num_cached_tokens == cached
        assert output.outputs[0].token_ids == greedy(prompt)


def test_salts_keep_prefixes_apart(engine: Engine, greedy: Callable) -> None:
    """D-1, D-3."""
    for salt, cached in ((None, 0), ("alice", 0), ("bob", 0), ("alice", 36), ("a\x00", 0), ("😀" * 128, 0), (None, 36)):
        (output,) = engine.generate([PROMPTS[2]], replace(GREEDY, cache_salt=salt))
        assert output.num_cached_tokens == cached, salt
        assert output.outputs[0].token_ids == greedy(PROMPTS[2])


def test_without_prefix_caching_nothing_is_found(make: Make, greedy: Callable) -> None:
    engine = make(enable_prefix_caching=False)
    for _ in range(2):
        (output,) = engine.generate([PROMPTS[2]], GREEDY)
        assert output.num_cached_tokens == 0 and output.outputs[0].token_ids == greedy(PROMPTS[2])


# ---------------------------------------------------------------- one step at a time


def test_step_tells_what_each_request_has_so_far(make: Make, greedy: Callable) -> None:
    engine = make(max_num_batched_tokens=16)
    assert engine.step() == [] and not engine.has_unfinished_requests()
    assert engine.add_request("long", PROMPTS[2], replace(GREEDY, max_tokens=3)) == "long"
    assert engine.add_request("short", PROMPTS[0], replace(GREEDY, max_tokens=2)) == "short"
    assert engine.has_unfinished_requests()
    seen: dict[str, list[RequestOutput]] = {"long": [], "short": []}
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen[output.request_id].append(output)
    for name, prompt, n in (("long", PROMPTS[2], 3), ("short", PROMPTS[0], 2)):
        growing = [greedy(prompt, i + 1) for i in range(n)]
        assert tokens(seen[name]) == growing
        assert [output.finished for output in seen[name]] == [False] * (n - 1) + [True]
        assert [output.outputs[0].finish_reason for output in seen[name]] == [None] * (n - 1) + ["length"]


def test_callbacks_get_each_output_or_only_the_last(engine: Engine) -> None:
    every: list[RequestOutput] = []
    last: list[RequestOutput] = []
    engine.add_request("every", PROMPTS[0], replace(GREEDY, max_tokens=4), on_output=every.append)
    engine.add_request("last", PROMPTS[1], replace(GREEDY, max_tokens=4), on_output=last.append, final_only=True)
    finish(engine)
    assert [len(t) for t in tokens(every)] == [1, 2, 3, 4]
    assert [len(t) for t in tokens(last)] == [4] and last[0].finished


def test_a_callback_that_fails_is_its_callers_affair(engine: Engine, greedy: Callable) -> None:
    def fail(output: RequestOutput) -> None:
        raise ZeroDivisionError

    engine.add_request("fails", PROMPTS[0], GREEDY, on_output=fail)
    engine.add_request("works", PROMPTS[1], GREEDY)
    assert finish(engine)["works"].outputs[0].token_ids == greedy(PROMPTS[1])


def test_a_request_id_is_taken_while_it_lives(engine: Engine, greedy: Callable) -> None:
    """T2, D-4: the second of a name is refused, the first goes on; afterwards the name is free again."""
    engine.add_request("id", PROMPTS[0], GREEDY)
    for _ in range(3):
        with pytest.raises(RequestError, match="id") as caught:
            engine.add_request("id", PROMPTS[1], GREEDY)
        assert caught.value.param == "request_id"
        engine.step()
    assert finish(engine)["id"].outputs[0].token_ids == greedy(PROMPTS[0])
    engine.add_request("id", PROMPTS[1], GREEDY)
    engine.abort("id")
    engine.add_request("id", PROMPTS[3], GREEDY)
    assert finish(engine)["id"].outputs[0].token_ids == greedy(PROMPTS[3])


def test_names_of_the_engines_own_making_never_meet_a_callers(engine: Engine, greedy: Callable) -> None:
    """D-4: whatever a caller names its request, `generate` and `add_request(None)` work beside it."""
    made_up = engine.add_request(None, PROMPTS[0], GREEDY)
    numbered = re.fullmatch(r"(.*?)(\d{1,6})", made_up)
    for ahead in (4, 7, 10) if numbered else ():
        engine.add_request(f"{numbered[1]}{int(numbered[2]) + ahead}", PROMPTS[3], GREEDY)
    assert len({engine.add_request(None, PROMPTS[0], GREEDY) for _ in range(3)}) == 3
    assert tokens(engine.generate(PROMPTS[:2], GREEDY)) == [greedy(p) for p in PROMPTS[:2]]
    assert len(list(engine.stream(PROMPTS[0], GREEDY))) == N
    finish(engine)


def test_strange_request_ids_are_only_names(engine: Engine) -> None:
    for name in ("", " ", "😀", "a" * 10_000, "x\ny", "../../etc"):
        assert engine.add_request(name, PROMPTS[0], replace(GREEDY, max_tokens=1)) == name
        assert finish(engine)[name].finished


def test_the_queue_is_bounded_and_nothing_is_lost(make: Make, greedy: Callable) -> None:
    """D-11: two seats and two places to wait."""
    engine = make(max_num_seqs=2, max_waiting=2)
    for name in "abcd":
        engine.add_request(name, PROMPTS[0], GREEDY)
    for _ in range(3):
        with pytest.raises(QueueFull, match=r"max_waiting=2"):
            engine.add_request("e", PROMPTS[0], GREEDY)
        engine.step()
    last = finish(engine)
    assert {name: last[name].outputs[0].token_ids for name in last} == dict.fromkeys("abcd", greedy(PROMPTS[0]))
    engine.add_request("e", PROMPTS[1], GREEDY)
    assert finish(engine)["e"].outputs[0].token_ids == greedy(PROMPTS[1])


def test_samples_count_as_requests_in_the_queue(make: Make) -> None:
    engine = make(max_num_seqs=2, max_waiting=2)
    with pytest.raises(QueueFull):
        engine.add_request("n", PROMPTS[0], SamplingParams(n=5))
    engine.add_request("n", PROMPTS[0], SamplingParams(n=4, max_tokens=3))
    with pytest.raises(QueueFull):
        engine.add_request("m", PROMPTS[0], SamplingParams(n=1))
    assert len(finish(engine)["n"].outputs) == 4


def test_generate_may_bring_more_than_the_queue_holds(make: Make, greedy: Callable) -> None:
    engine = make(max_num_seqs=2, max_waiting=0)
    assert tokens(engine.generate([PROMPTS[0]] * 6, GREEDY)) == [greedy(PROMPTS[0])] * 6


# ---------------------------------------------------------------- abort


def test_abort_of_an_unknown_request_is_ignored(engine: Engine) -> None:
    engine.abort("nobody")
    engine.abort("")
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("state", ["queued", "waiting", "prefill", "decoding", "preempted", "samples", "logprobs"])
def test_abort_in_every_state_frees_the_blocks_at_once(make: Make, greedy: Callable, state: str) -> None:
    """D-12: and the neighbour goes on as if nobody had been there."""
    engine = make(max_num_batched_tokens=8, max_num_seqs=1 if state == "waiting" else 8)
    got: list[RequestOutput] = []
    engine.add_request("neighbour", PROMPTS[1], replace(GREEDY, max_tokens=16))
    engine.step()
    params = replace(
        GREEDY, max_tokens=16, n=3 if state == "samples" else 1, prompt_logprobs=1 if state == "logprobs" else None
    )
    engine.add_request("gone", PROMPTS[2], params, on_output=got.append)
    steps = {"queued": 0, "waiting": 2, "prefill": 3, "decoding": 9, "preempted": 9, "samples": 9, "logprobs": 2}[state]
    for _ in range(steps):
        engine.step()
    if state == "preempted":
        engine.scheduler.preempt(engine.scheduler.running[-1])
    before = len(got)
    engine.abort("gone")
    neighbours = [request for request in engine.scheduler.running if request.prompt_token_ids == PROMPTS[1]]
    assert engine.block_manager.num_used == sum(map(engine.block_manager.num_pages_held, neighbours))
    engine.block_manager.check_integrity()
    assert len(got) == before + 1 and got[-1].finished
    assert {sample.finish_reason for sample in got[-1].outputs} <= {"abort", "length"}
    assert got[-1].outputs[0].finish_reason == "abort"
    assert finish(engine)["neighbour"].outputs[0].token_ids == greedy(PROMPTS[1], 16)
    engine.abort("gone")
    assert len(got) == before + 1, "and it is over"


def test_abort_twice_and_after_the_end(engine: Engine) -> None:
    engine.add_request("a", PROMPTS[0], GREEDY)
    engine.abort("a")
    engine.abort("a")
    assert not engine.has_unfinished_requests()
    engine.add_request("a", PROMPTS[0], replace(GREEDY, max_tokens=1))
    assert engine.step()[0].finished
    engine.abort("a")
    assert not engine.has_unfinished_requests()


def test_an_abort_during_a_step_is_done_when_the_step_is(engine: Engine, greedy: Callable) -> None:
    """From another thread, while the model computes: the step under way ends, and then the blocks are free."""
    inside, go_on = threading.Event(), threading.Event()
    model = engine.model

    class Slow:
        config, logits = model.config, staticmethod(model.logits)

        def __call__(self, *arguments: Any) -> Tensor:
            inside.set()
            assert go_on.wait(10)
            return model(*arguments)

    engine.add_request("gone", PROMPTS[2], GREEDY)
    engine.model = Slow()
    stepping = threading.Thread(target=engine.step)
    stepping.start()
    assert inside.wait(10)
    engine.abort("gone")  # returns at once
    go_on.set()
    stepping.join(10)
    assert not stepping.is_alive()
    assert engine.block_manager.num_used == 0
    engine.model = model
    assert tokens(engine.generate([PROMPTS[2]], GREEDY)) == [greedy(PROMPTS[2])]


def test_an_abort_from_a_callback(engine: Engine, greedy: Callable) -> None:
    engine.add_request("b", PROMPTS[1], replace(GREEDY, max_tokens=None))
    engine.add_request("a", PROMPTS[0], GREEDY, on_output=lambda output: engine.abort("b"))
    last = finish(engine)
    assert last["a"].outputs[0].token_ids == greedy(PROMPTS[0])
    assert last["b"].outputs[0].finish_reason == "abort"
    assert len(last["b"].outputs[0].token_ids) <= 2


def test_random_arrivals_and_aborts_leave_the_others_as_alone(make: Make, greedy: Callable) -> None:
    """D-5, D-8, D-12: a pool for one and a half, greedy and seeded requests with penalties."""
    random, engine = Random(7), make(blocks=14, max_num_batched_tokens=11, max_num_seqs=5)
    alone = make()
    expected: dict[str, Any] = {}
    gone: set[str] = set()
    last: dict[str, RequestOutput] = {}
    for i in range(25):
        prompt = (
            [random.randrange(3, VOCAB) for _ in range(random.randint(1, 30))] if i % 3 else PROMPTS[2][: 9 + i % 7]
        )
        params = SamplingParams(
            temperature=random.choice([0, 0, 1.0]),
            seed=i,
            max_tokens=random.randint(1, 15),
            n=random.choice([1, 1, 1, 2]),
            repetition_penalty=random.choice([1.0, 1.3]),
            ignore_eos=True,
        )
        (expected[str(i)],) = alone.generate([prompt], params)
        engine.add_request(str(i), prompt, params)
        for _ in range(random.randint(0, 3)):
            last |= {output.request_id: output for output in engine.step()}
        if random.random() < 0.3:
            gone.add(name := str(random.randint(0, i)))
            engine.abort(name)
        engine.block_manager.check_integrity()
    last |= finish(engine)
    assert engine.stats()["preemptions"] > 0
    done = {name: output for name, output in last.items() if output.finished}
    for name, output in done.items():
        if output.outputs[0].finish_reason != "abort":
            assert [s.token_ids for s in output.outputs] == [s.token_ids for s in expected[name].outputs]
    assert {str(i) for i in range(25)} - gone <= set(done)


# ---------------------------------------------------------------- stream


def test_a_stream_grows_to_the_whole_answer(engine: Engine, greedy: Callable) -> None:
    outputs = list(engine.stream(PROMPTS[1], GREEDY))
    assert tokens(outputs) == [greedy(PROMPTS[1], n + 1) for n in range(N)]
    assert [output.finished for output in outputs] == [False] * (N - 1) + [True]
    assert outputs[-1].outputs[0].text == engine.tokenizer.decode(greedy(PROMPTS[1]))


def test_leaving_a_stream_frees_its_blocks_at_once(engine: Engine) -> None:
    for output in engine.stream(PROMPTS[2], replace(GREEDY, max_tokens=None)):
        assert engine.block_manager.num_used > 0
        if len(output.outputs[0].token_ids) == 3:
            break
    assert_idle(engine)
    stream = engine.stream(PROMPTS[2], replace(GREEDY, n=4))
    next(stream)
    stream.close()
    assert_idle(engine)
    with pytest.raises(ZeroDivisionError):
        for _ in engine.stream(PROMPTS[2], GREEDY):
            _ = 1 / 0
    assert_idle(engine)


def test_streams_and_whole_answers_share_one_engine(engine: Engine, greedy: Callable) -> None:
    one, two = engine.stream(PROMPTS[0], GREEDY), engine.stream(PROMPTS[1], GREEDY)
    next(one), next(two), next(one)
    assert tokens(engine.generate([PROMPTS[2]], GREEDY)) == [greedy(PROMPTS[2])]
    for stream, prompt in ((one, PROMPTS[0]), (two, PROMPTS[1])):
        *_, last = stream
        assert last.outputs[0].token_ids == greedy(prompt)


def test_a_stream_of_default_params(engine: Engine) -> None:
    *_, last = engine.stream("the cat")
    assert last.finished and last.prompt == "the cat" and len(last.outputs[0].token_ids) <= 16


# ---------------------------------------------------------------- one engine, many calls


def test_call_after_call_answers_in_order(engine: Engine, greedy: Callable) -> None:
    """T12: short answers end first; a call with an error comes between."""
    random = Random(1)
    for count in (5, 3, 7):
        prompts = [random.choice(PROMPTS) for _ in range(count)]
        lengths = [random.randint(1, N) for _ in range(count)]
        params = [replace(GREEDY, max_tokens=n) for n in lengths]
        assert tokens(engine.generate(prompts, params)) == [greedy(p, n) for p, n in zip(prompts, lengths)]
        with pytest.raises(RequestError):
            engine.generate([*prompts, [VOCAB]], GREEDY)
        assert_idle(engine)


def _in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Run calls at the same time; their results, or what they raised."""
    results: list[Any] = [None] * len(calls)
    barrier = threading.Barrier(len(calls))

    def run(index: int) -> None:
        barrier.wait()
        try:
            results[index] = calls[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a call hangs"
    return results


def test_two_threads_get_their_own_answers(make: Make, greedy: Callable) -> None:
    """T12: calls of different lengths on one engine."""
    engine = make(max_num_batched_tokens=16)
    jobs = [(PROMPTS[:3], N), (PROMPTS[3:], 3), (PROMPTS[1:2], 20)]
    calls = [lambda p=p, n=n: tokens(engine.generate(p, replace(GREEDY, max_tokens=n))) for p, n in jobs]
    calls.append(lambda: [output.outputs[0].token_ids for output in engine.stream(PROMPTS[0], GREEDY)][-1:])
    results = _in_threads(*calls)
    assert results[:3] == [[greedy(p, n) for p in prompts] for prompts, n in jobs]
    assert results[3] == [greedy(PROMPTS[0])]


def test_threads_with_the_same_request_id(engine: Engine, greedy: Callable) -> None:
    """T2: one gets the name, the other a clear error, and nobody hangs."""

    def call(prompt: list[int]) -> Any:
        engine.add_request("id", prompt, GREEDY)
        return prompt

    for _ in range(5):
        results = _in_threads(lambda: call(PROMPTS[0]), lambda: call(PROMPTS[1]))
        errors = [result for result in results if isinstance(result, Exception)]
        assert len(errors) == 1 and isinstance(errors[0], RequestError)
        (winner,) = [result for result in results if isinstance(result, list)]
        assert finish(engine)["id"].outputs[0].token_ids == greedy(winner)


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_may_add_while_another_steps(folder: Path, restless: None) -> None:
    """What one thread walks through, another must not change under its feet. (The engines are left as they are.)"""
    for _ in range(5):
        engine, over = Engine(folder, kv_cache_memory=2**16, max_waiting=10**6, max_num_seqs=2), []

        def add(engine: Engine = engine, over: list[Any] = over) -> None:
            try:
                for _ in range(300):
                    engine.add_request(None, PROMPTS[0], replace(GREEDY, max_tokens=1))
            finally:
                over.append(1)

        def step(engine: Engine = engine, over: list[Any] = over) -> None:
            while len(over) < 3:
                engine.step()

        assert _in_threads(step, add, add, add) == [None] * 4


def test_the_queue_stays_bounded_when_many_add_at_once(make: Make, restless: None) -> None:
    engine = make(max_num_seqs=2, max_waiting=30)
    accepted: list[str] = []

    def add() -> None:
        for _ in range(40):
            try:
                accepted.append(engine.add_request(None, PROMPTS[0], replace(GREEDY, max_tokens=1)))
            except QueueFull:
                pass

    assert _in_threads(add, add, add) == [None] * 3
    assert len(accepted) == 32 and set(finish(engine)) == set(accepted)


def test_an_error_in_one_thread_is_not_the_others(engine: Engine, greedy: Callable) -> None:
    results = _in_threads(
        lambda: tokens(engine.generate(PROMPTS[:3], GREEDY)), lambda: engine.generate([PROMPTS[0], [VOCAB]], GREEDY)
    )
    assert results[0] == [greedy(p) for p in PROMPTS[:3]]
    assert isinstance(results[1], RequestError)


def test_two_engines_live_side_by_side(make: Make, greedy: Callable) -> None:
    one, two = make(block_size=1), make(block_size=16)
    for output in one.stream(PROMPTS[1], GREEDY):
        if len(output.outputs[0].token_ids) == 4:
            assert tokens(two.generate([PROMPTS[0]], GREEDY)) == [greedy(PROMPTS[0])]
    assert output.outputs[0].token_ids == greedy(PROMPTS[1])
    assert one.kv_pool.arena.data_ptr() != two.kv_pool.arena.data_ptr()


# ---------------------------------------------------------------- steps that fail


def _fail_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException, at_call: int = 1) -> None:
    """Let the `at_call`-th call of owner.name raise; all others work."""
    original, calls = getattr(owner, name), []

    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        if len(calls) == at_call:
            raise error
        return original(*arguments, **keywords)

    monkeypatch.setattr(owner, name, wrapper)


PLACES = {
    "first owner's write": ("ops", "write_kv", 1),
    "second owner's write": ("ops", "write_kv", 2),
    "first attend": ("ops", "attend", 1),
    "last attend": ("ops", "attend", 4),
    "head": ("ops", "head", 1),
    "a later step": ("ops", "attend", 11),
}


@pytest.mark.parametrize("error", [RuntimeError("boom"), MemoryError()], ids=["RuntimeError", "MemoryError"])
@pytest.mark.parametrize("place", PLACES)
def test_a_failed_step_ends_its_requests_and_nothing_else(
    engine: Engine, greedy: Callable, monkeypatch: pytest.MonkeyPatch, place: str, error: Exception
) -> None:
    """F2: blocks come back, and what the failed step published is never served as a prefix."""
    room, name, at_call = PLACES[place]
    _fail_once(monkeypatch, getattr(engine, room), name, error, at_call)
    with pytest.raises(EngineError) as caught:
        engine.generate([PROMPTS[2], PROMPTS[1]], GREEDY)
    assert caught.value.__cause__ is error and isinstance(caught.value, MiniserveError)
    assert_idle(engine)
    outputs = engine.generate([PROMPTS[2], PROMPTS[1], PROMPTS[2][:21]], GREEDY)
    assert tokens(outputs) == [greedy(PROMPTS[2]), greedy(PROMPTS[1]), greedy(PROMPTS[2][:21])]


def test_a_sampler_that_fails_is_a_failed_step(
    engine: Engine, greedy: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sample", "logprobs"):
        _fail_once(monkeypatch, sampling, name, RuntimeError("boom"))
        with pytest.raises(EngineError):
            engine.generate([PROMPTS[2]], replace(GREEDY, logprobs=1))
        assert_idle(engine)
        assert tokens(engine.generate([PROMPTS[2]], replace(GREEDY, logprobs=1))) == [greedy(PROMPTS[2])]


def test_step_reports_the_failed_and_goes_on_with_the_waiting(
    make: Make, greedy: Callable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(max_num_seqs=1)
    engine.add_request("fails", PROMPTS[0], GREEDY)
    engine.add_request("waits", PROMPTS[1], GREEDY)
    _fail_once(monkeypatch, engine.ops, "attend", RuntimeError("boom"), 6)
    last = finish(engine)
    assert last["fails"].finished and last["fails"].outputs[0].finish_reason == "error"
    assert last["fails"].outputs[0].token_ids == greedy(PROMPTS[0], 1), "what it had is still told"
    assert last["waits"].outputs[0].token_ids == greedy(PROMPTS[1])
    assert "boom" in caplog.text, "the operator can read why"


def test_a_failed_step_ends_all_samples_of_its_answers(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(max_num_seqs=1)
    engine.add_request("n", PROMPTS[0], replace(GREEDY, n=3))
    _fail_once(monkeypatch, engine.ops, "attend", RuntimeError("boom"), 6)
    last = finish(engine)
    assert [sample.finish_reason for sample in last["n"].outputs] == ["error"] * 3


def test_a_stream_raises_what_failed(engine: Engine, greedy: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """E5: after the first outputs."""
    _fail_once(monkeypatch, engine.ops, "attend", RuntimeError("boom"), 10)
    got: list[RequestOutput] = []
    with pytest.raises(EngineError, match="boom"):
        got.extend(engine.stream(PROMPTS[0], GREEDY))
    assert_idle(engine)
    assert len(list(engine.stream(PROMPTS[0], GREEDY))) == N


def test_only_the_thread_whose_request_failed_hears_of_it(
    make: Make, greedy: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever steps the engine, the error goes to the caller whose request it was."""
    engine = make(max_num_seqs=1)
    victim, attend = [*PROMPTS[3], 201], engine.ops.attend

    def fails_for_the_victim(q: Tensor, memory: Any, batch: Any, **keywords: Any) -> Tensor:
        if victim[-1] in batch.token_ids.tolist():
            raise RuntimeError("boom")
        return attend(q, memory, batch, **keywords)

    monkeypatch.setattr(engine.ops, "attend", fails_for_the_victim)
    results = _in_threads(
        lambda: engine.generate([victim], GREEDY), lambda: tokens(engine.generate(PROMPTS[:3], GREEDY))
    )
    assert isinstance(results[0], EngineError)
    assert results[1] == [greedy(p) for p in PROMPTS[:3]]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), SystemExit(1)], ids=["KeyboardInterrupt", "SystemExit"])
@pytest.mark.parametrize("place", ["first owner's write", "last attend", "head"])
def test_an_interrupted_step_leaves_no_wrong_prefixes(
    engine: Engine, greedy: Callable, monkeypatch: pytest.MonkeyPatch, place: str, interrupt: BaseException
) -> None:
    """Ctrl-C in a notebook: the call ends, its blocks come back, and the next call is right."""
    room, name, at_call = PLACES[place]
    _fail_once(monkeypatch, getattr(engine, room), name, interrupt, at_call)
    with pytest.raises(type(interrupt)):
        engine.generate([PROMPTS[2], PROMPTS[1]], GREEDY)
    assert_idle(engine)
    outputs = engine.generate([PROMPTS[2], PROMPTS[1]], GREEDY)
    assert tokens(outputs) == [greedy(PROMPTS[2]), greedy(PROMPTS[1])]


class Panic(BaseException):
    """What the tokenizers' Rust code raises: no `Exception`."""


@pytest.mark.parametrize("error", [RuntimeError("decoder"), Panic("decoder")], ids=["RuntimeError", "Panic"])
@pytest.mark.parametrize("way_in", ["text", "logprobs"])
def test_a_decoder_that_fails_ends_its_request_only(
    engine: Engine, greedy: Callable, monkeypatch: pytest.MonkeyPatch, way_in: str, error: BaseException
) -> None:
    """A7: some ids cannot be decoded; whoever has none of them goes on."""
    bad, name = 201, "decode" if way_in == "text" else "token_text"
    original = getattr(engine.tokenizer, name)

    def fails_on_some(ids: Any) -> str:
        if bad in (ids if isinstance(ids, list) else [ids]):
            raise error
        return original(ids)

    monkeypatch.setattr(engine.tokenizer, name, fails_on_some)
    engine.add_request("fails", [200], replace(GREEDY, logit_bias={bad: 100.0}, logprobs=0))
    engine.add_request("works", PROMPTS[1], replace(GREEDY, logprobs=0))
    last = finish(engine)
    assert last["works"].outputs[0].token_ids == greedy(PROMPTS[1])
    assert last["fails"].outputs[0].finish_reason == "error"


def test_tokens_that_the_tokenizer_has_not_are_no_text(make: Make, tmp_path: Path) -> None:
    """B10: a table wider than the vocabulary, as padded checkpoints have it; logprobs name such tokens too."""
    path = write_sentencepiece(tmp_path, "GPTSw3Tokenizer", vocab_size=40, byte_fallback=False)
    engine = make(tokenizer=str(path), max_logprobs=-1)
    assert len(engine.tokenizer.encode("the cat")) > 0
    strange = replace(GREEDY, logit_bias={VOCAB - 1: 100.0}, logprobs=-1, prompt_logprobs=2)
    outputs = engine.generate([[250, 5], PROMPTS[0]], [strange, replace(GREEDY, max_tokens=3)])
    assert outputs[0].outputs[0].token_ids == [VOCAB - 1] * N
    assert len(outputs[1].outputs[0].token_ids) == 3


def test_text_whose_ids_the_model_has_not_is_refused(folder: Path, tmp_path: Path, make: Make) -> None:
    """B10: a tokenizer wider than the table."""
    pieces = [b"ab%d" % i for i in range(20)]
    path = write_byte_level(
        tmp_path, merges=[("z", str(i)) for i in range(10)] + [("y", str(i)) for i in range(10)], pieces=pieces
    )
    engine = make(tokenizer=str(path))
    assert max(engine.tokenizer.encode("y9")) >= VOCAB
    engine.add_request("neighbour", PROMPTS[0], GREEDY)
    with pytest.raises(RequestError, match=str(VOCAB - 1)) as caught:
        engine.generate("y9", GREEDY)
    assert caught.value.param == "prompt"
    assert finish(engine)["neighbour"].finished


# ---------------------------------------------------------------- chat

HELLO = [{"role": "user", "content": "the cat"}]


def test_chat_renders_the_template_once(engine: Engine, greedy: Callable) -> None:
    """T14: one BOS, and what the model is asked is the template's text."""
    (output,) = engine.chat(HELLO, GREEDY)
    assert output.prompt_token_ids.count(1) == 1 and output.prompt_token_ids[0] == 1
    assert engine.tokenizer.decode(output.prompt_token_ids) == "[user] the cat\n[assistant]"
    assert output.outputs[0].token_ids == greedy(output.prompt_token_ids)
    rendered = "<s>[user] the cat\n[assistant]"
    assert engine.generate(rendered, GREEDY)[0].prompt_token_ids == output.prompt_token_ids


def test_chat_takes_several_conversations(engine: Engine) -> None:
    talk = [*HELLO, {"role": "assistant", "content": "sat"}, {"role": "user", "content": "where?"}]
    outputs = engine.chat([HELLO, talk], [replace(GREEDY, max_tokens=n) for n in (2, 3)])
    assert [len(t) for t in tokens(outputs)] == [2, 3]
    assert engine.tokenizer.decode(outputs[1].prompt_token_ids).count("[user]") == 2


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [[]],
        "hello",
        ["hello"],
        {"role": "user", "content": "x"},
        None,
        5,
        [5],
        [None],
        [HELLO, 5],
        [{"role": "wizard", "content": "x"}],
    ],
    ids=str,
)
def test_messages_of_another_shape_are_refused(engine: Engine, messages: Any) -> None:
    """C4."""
    with pytest.raises(RequestError) as caught:
        engine.chat(messages, GREEDY)
    assert caught.value.param == "messages"


def test_a_conversation_longer_than_the_context_is_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="maximum context length"):
        engine.chat([{"role": "user", "content": "x" * MAX_LEN}], GREEDY)


# ---------------------------------------------------------------- what an engine tells of itself


def test_stats_and_report(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="miniserve"):
        engine = make(blocks=32)
    report = engine.kv_report()
    assert f"{report['bytes_per_token']:,} bytes per token" in caplog.text, "once, at the start"
    assert (report["bytes_per_token"], report["reduction"], report["num_blocks"]) == (TOKEN_BYTES, 2.0, 32)
    assert (report["capacity_tokens"], report["max_full_requests"]) == (32 * BLOCK, 2)
    assert [(group["owner"], group["readers"]) for group in report["groups"]] == [(0, [1]), (2, [3])]
    engine.add_request("a", PROMPTS[1], GREEDY)
    assert engine.stats()["waiting"] == 1
    engine.step()
    assert engine.stats() == {"running": 1, "waiting": 0, "blocks_used": 3, "blocks_total": 32, "preemptions": 0}
    engine.abort("a")


def test_the_kernels_chosen_by_itself_say_the_same(make: Make, greedy: Callable) -> None:
    engine = make(ops="auto", block_size=16)
    assert tokens(engine.generate(PROMPTS, GREEDY)) == [greedy(p) for p in PROMPTS]


def test_a_pool_smaller_than_the_context_is_said_at_the_start(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="miniserve"):
        make(blocks=8)
    assert "32 tokens" in caplog.text and "kv_cache_memory" in caplog.text
