"""Text to ids and back, token by token. Three kinds of tokenizer, made on the spot: byte-level, byte fallback (Llama
style) and a SentencePiece model through transformers' Python path. The judge of streaming is the text one started
from, or the full decode; the judge of stop strings is a search over the whole text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import (
    BOS,
    SENTENCES,
    UTF8_BYTES,
    byte_ids,
    fallback_ids,
    write_byte_fallback,
    write_byte_level,
    write_sentencepiece,
)

from miniserve.errors import ModelError, RequestError
from miniserve.tokenizer import Detokenizer, StopChecker, Tokenizer

BOS_ID, EOS_ID = 1, 2
KINDS = ("byte_level", "byte_fallback", "sentencepiece")
TEXTS = (
    "the cat sat on the mat",
    "Hello, World!  Two  spaces\n\nand lines\n",
    "😀",
    "😀😀😀😀😀 and 👩‍👩‍👧‍👦 families",
    "日本語のテキストは長い、とても長い文章です。",
    "naïve café — “quoted” ﷽ नमस्ते שלום",
    "a\u0301 e\u0301 \u200b zero\ufeffwidth",
    "mixed 日😀a日😀b",
)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        "byte_level": Tokenizer(write_byte_level(folder / "byte_level")),
        "byte_fallback": Tokenizer(write_byte_fallback(folder / "byte_fallback")),
        "sentencepiece": Tokenizer(write_sentencepiece(folder / "sentencepiece", "GPTSw3Tokenizer")),
    }


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers[request.param]


def _stream(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = (BOS_ID,)) -> list[str]:
    """What each token adds, and at the end what was still waiting."""
    detokenizer = Detokenizer(tokenizer, list(prompt))
    return [*(detokenizer.step(token) for token in ids), detokenizer.flush()]


# ---------------------------------------------------------------- encode and decode


@pytest.mark.parametrize("text", SENTENCES)
def test_plain_text_survives(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("text", TEXTS)
def test_any_text_survives(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    assert tokenizers[kind].decode(tokenizers[kind].encode(text)) == text


def test_special_tokens_are_added_when_asked_for_and_not_shown(tokenizers: dict[str, Tokenizer]) -> None:
    for kind in ("byte_level", "byte_fallback"):
        ids = tokenizers[kind].encode("the cat")
        assert ids[0] == BOS_ID
        assert tokenizers[kind].encode("the cat", add_special_tokens=False) == ids[1:]
        assert tokenizers[kind].decode([*ids, EOS_ID]) == "the cat"
        assert tokenizers[kind].eos_token_id == EOS_ID
        assert tokenizers[kind].token_text(EOS_ID) == "</s>"


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "ok \ud83d"])
def test_lone_surrogates_are_refused(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(RequestError, match="surrogate") as caught:
        tokenizer.encode(text)
    assert caught.value.param == "prompt"
    str(caught.value).encode()


def test_empty_text_is_no_error_here(tokenizer: Tokenizer) -> None:
    assert set(tokenizer.encode("")) <= {BOS_ID}
    assert tokenizer.decode([]) == ""


def test_a_text_that_begins_with_bos_gets_no_second_one(tokenizers: dict[str, Tokenizer]) -> None:
    """T14: a rendered chat sent as a plain completion."""
    for kind in ("byte_level", "byte_fallback"):
        ids = tokenizers[kind].encode(BOS + "hello")
        assert ids.count(BOS_ID) == 1
        assert ids[0] == BOS_ID


def test_a_panic_in_the_tokenizer_fails_that_text_only(tmp_path: Path) -> None:
    """A7: Rust panics are no `Exception`; a regular expression that backtracks without end is one."""
    tokenizer = Tokenizer(write_byte_level(tmp_path, runaway_normalizer=True))
    with pytest.raises(RequestError, match="prompt") as caught:
        tokenizer.encode("a" * 40 + "!")
    assert caught.value.param == "prompt"
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


# ---------------------------------------------------------------- loading


def test_a_folder_without_tokenizer_files_has_none(tmp_path: Path) -> None:
    assert Tokenizer.of_model(tmp_path) is None
    (tmp_path / "config.json").write_text("{}")
    assert Tokenizer.of_model(tmp_path) is None
    with pytest.raises(ModelError, match=str(tmp_path)):
        Tokenizer(tmp_path)


def test_folders_with_tokenizer_files_have_one(tmp_path: Path) -> None:
    assert Tokenizer.of_model(write_byte_level(tmp_path / "a")) is not None
    assert Tokenizer.of_model(write_sentencepiece(tmp_path / "b", "GPTSw3Tokenizer")) is not None


@pytest.mark.parametrize("kind", ["tokenizer.json", "tokenizer.model", "tokenizer_config.json"])
@pytest.mark.parametrize("damage", ["empty", "cut", "garbage"])
def test_damaged_files_are_a_model_error(tmp_path: Path, kind: str, damage: str) -> None:
    """A6: a clear error at start, naming the folder."""
    writer = write_byte_level if kind != "tokenizer.model" else lambda f: write_sentencepiece(f, "GPTSw3Tokenizer")
    path = writer(tmp_path) / kind
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "cut": whole[: len(whole) // 2], "garbage": b"\x00\xff{]" * 50}[damage])
    with pytest.raises(ModelError, match=str(tmp_path)):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "null",
        "{}",
        '{"model": 5}',
        '{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": ["a"]}}',
        '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}',
        '{"version": "1.0", "model": {"type": "WordPiece", "vocab": {"a": -1}}}',
        "[" * 10_000,
    ],
)
def test_nonsense_in_tokenizer_json_is_a_model_error(tmp_path: Path, content: str) -> None:
    (write_byte_level(tmp_path) / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=str(tmp_path)):
        Tokenizer(tmp_path)


def test_a_llama_tokenizer_model_loads_without_tokenizer_json(tmp_path: Path) -> None:
    """What older Llama checkpoints ship; transformers converts it."""
    tokenizer = Tokenizer(write_sentencepiece(tmp_path, "LlamaTokenizer"))
    for text in (*SENTENCES, "😀 日本"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert "".join(_stream(tokenizer, tokenizer.encode(text, add_special_tokens=False))) == text


GOLDENS = Path(__file__).parent / "data" / "goldens"


@pytest.mark.parametrize("golden", sorted(path.name for path in GOLDENS.iterdir()))
def test_a_tokenizer_loads_beside_the_config_of_any_family(tmp_path: Path, golden: str) -> None:
    """A model's config.json speaks of things that transformers does not know, or means otherwise."""
    (tmp_path / "config.json").write_bytes((GOLDENS / golden / "config.json").read_bytes())
    tokenizer = Tokenizer(write_byte_level(tmp_path))
    assert tokenizer.decode(tokenizer.encode("the cat 😀")) == "the cat 😀"


def test_no_code_of_the_folder_runs(tmp_path: Path) -> None:
    """A2: `auto_map` and `trust_remote_code` in the files change nothing."""
    folder, marker = write_byte_level(tmp_path / "model"), tmp_path / "marker"
    code = f"from pathlib import Path\nPath({str(marker)!r}).touch()\nclass Evil:\n    pass\n"
    (folder / "evil.py").write_text(code)
    for name in ("config.json", "tokenizer_config.json"):
        path = folder / name
        fields = json.loads(path.read_text()) if path.exists() else {"model_type": "evil"}
        fields |= {"trust_remote_code": True}
        fields |= {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoConfig": "evil.Evil"}}
        path.write_text(json.dumps(fields))
    try:
        Tokenizer(folder).encode("hello")
    except ModelError:
        pass
    assert not marker.exists()


# ---------------------------------------------------------------- chat

HELLO = [{"role": "user", "content": "the cat"}]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_chat_is_the_template_with_one_bos(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    """T14: the template writes BOS, so nobody else does."""
    ids = tokenizers[kind].render_chat(HELLO)
    assert ids.count(BOS_ID) == 1 and ids[0] == BOS_ID
    assert tokenizers[kind].decode(ids) == "[user] the cat\n[assistant]"
    ids = tokenizers[kind].render_chat([*HELLO, {"role": "assistant", "content": "a mat"}], add_generation_prompt=False)
    assert tokenizers[kind].decode(ids) == "[user] the cat\n[assistant] a mat\n"


def test_a_template_that_refuses_is_a_request_error_with_its_text(tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(RequestError, match="no such role: wizard") as caught:
        tokenizers["byte_level"].render_chat([{"role": "wizard", "content": "x"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("messages", [[], "text", [5], ["text"], [None], [{"role": "user"}, 7]], ids=str)
def test_messages_of_another_shape_are_a_request_error(tokenizers: dict[str, Tokenizer], messages: Any) -> None:
    with pytest.raises(RequestError) as caught:
        tokenizers["byte_level"].render_chat(messages)
    assert caught.value.param == "messages"


def test_no_template_is_a_request_error(tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(RequestError, match="no chat template") as caught:
        tokenizers["sentencepiece"].render_chat(HELLO)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{{ lipsum.__globals__['os'].system('touch MARKER') }}",
        "{{ cycler.__init__.__globals__.os.system('touch MARKER') }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{% for c in ().__class__.__base__.__subclasses__() %}{{ c }}{% endfor %}",
        "{{ messages.append(1) }}",
        "{% include 'tokenizer.json' %}",
        "{{ 1 / 0 }}",
        "{{ messages[0]['content' }}",
        "{{ undefined_function() }}",
        "{% for i in range(10**9) %}x{% endfor %}",
    ],
)
def test_templates_run_in_a_sandbox(tmp_path: Path, template: str) -> None:
    """A5, C4: a template that reaches for Python, or fails, is the request's error and executes nothing."""
    marker = tmp_path / "marker"
    write_byte_level(tmp_path, chat_template=template.replace("MARKER", str(marker)))
    tokenizer = Tokenizer(tmp_path)
    with pytest.raises(RequestError) as caught:
        tokenizer.render_chat(HELLO)
    assert caught.value.param == "messages"
    assert not marker.exists()
    assert tokenizer.decode(tokenizer.encode("still here")) == "still here"


# ---------------------------------------------------------------- token by token


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_is_the_text(tokenizer: Tokenizer, text: str) -> None:
    """E2: characters split over tokens come out whole, in the step that completes them, and nothing is replaced."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    steps = _stream(tokenizer, ids)
    assert "".join(steps) == tokenizer.decode(ids)
    assert "\ufffd" not in "".join(steps)
    assert steps[-1] == "", "complete text leaves nothing to flush"


@pytest.mark.parametrize("prompt", ["x", "the", "the cat ", "日本", "😀", "😀😀😀", "a\n"])
@pytest.mark.parametrize("text", ["the cat", " the cat", "日本語", "😀😀", "\n\n  x"])
def test_streaming_goes_on_after_any_prompt(tokenizers: dict[str, Tokenizer], prompt: str, text: str) -> None:
    for kind in ("byte_level", "byte_fallback"):
        tokenizer = tokenizers[kind]
        ids = tokenizer.encode(prompt + text)
        first = len(tokenizer.encode(prompt))
        if tokenizer.decode(ids[:first]) == prompt:  # no token reaches over the seam
            assert "".join(_stream(tokenizer, ids[first:], ids[:first])) == text


def test_a_character_is_given_out_with_its_last_byte(tokenizers: dict[str, Tokenizer]) -> None:
    for kind, ids in (("byte_level", byte_ids("a😀b".encode())), ("byte_fallback", fallback_ids("a😀b".encode()))):
        assert _stream(tokenizers[kind], ids) == ["a", "", "", "", "😀", "b", ""]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_truncated_tail_gives_one_replacement_at_the_end(tokenizers: dict[str, Tokenizer], cut: int) -> None:
    """E2: the text ended within a character."""
    for kind in ("byte_level", "byte_fallback"):
        ids = tokenizers[kind].encode("ok 😀", add_special_tokens=False)[:-cut]
        steps = _stream(tokenizers[kind], ids)
        assert "".join(steps).lstrip() == "ok \ufffd", kind
        assert steps[-1] == "\ufffd"


def test_a_real_replacement_character_is_text(tokenizers: dict[str, Tokenizer]) -> None:
    for kind, ids in (("byte_level", byte_ids), ("byte_fallback", fallback_ids)):
        for text in ("\ufffd", "a\ufffdb", "\ufffd\ufffd\ufffd\ufffd end", "x" + "\ufffd" * 20):
            assert "".join(_stream(tokenizers[kind], ids(text.encode()))) == text


@settings(deadline=None, max_examples=100)
@given(text=st.text(st.sampled_from("aé日😀 \n\u0301\ufffd"), max_size=24), kind=st.sampled_from(KINDS[:2]))
def test_any_text_as_single_bytes_streams_whole(tokenizers: dict[str, Tokenizer], text: str, kind: str) -> None:
    """Runs of characters that the vocabulary does not know, of any length."""
    ids = (byte_ids if kind == "byte_level" else fallback_ids)(text.encode())
    assert "".join(_stream(tokenizers[kind], ids, [BOS_ID, *fallback_ids(b"q")])) == text


def _crossing_pieces() -> list[bytes]:
    alphabet = "日本é😀".encode()
    pieces = {alphabet[i : i + n] for n in (2, 3, 4) for i in range(len(alphabet) - n + 1)}
    return sorted(pieces | {b"\xa5\xe6", b"\xac\xe6", b"\x80\xf0", b"\x80\xe6", b"\xa9\xc3"})


CROSSING = {piece: 3 + i for i, piece in enumerate([bytes([b]) for b in UTF8_BYTES] + _crossing_pieces())}
"""Tokens that begin and end within characters, as trained byte-level vocabularies have them."""


@pytest.fixture(scope="module")
def crossing(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_byte_level(tmp_path_factory.mktemp("crossing"), merges=(), pieces=_crossing_pieces()))


def test_tokens_that_never_end_on_a_character_stream_whole(crossing: Tokenizer) -> None:
    pieces = [b"\xe6"] + [b"\x97", b"\xa5\xe6"] * 12 + [b"\x97", b"\xa5"]
    ids = [CROSSING[piece] for piece in pieces]
    assert crossing.decode(ids) == "日" * 13
    assert "".join(_stream(crossing, ids)) == "日" * 13


@settings(deadline=None, max_examples=100)
@given(text=st.text(st.sampled_from("日本é😀a"), max_size=16), cuts=st.lists(st.integers(1, 4), max_size=30))
def test_any_segmentation_of_the_bytes_streams_the_text(crossing: Tokenizer, text: str, cuts: list[int]) -> None:
    data, ids = text.encode(), []
    for cut in cuts:
        if data:
            piece = data[:cut] if data[:cut] in CROSSING else data[:1]
            ids, data = [*ids, CROSSING[piece]], data[len(piece) :]
    ids += [CROSSING[bytes([b])] for b in data]
    assert crossing.decode(ids) == text
    assert "".join(_stream(crossing, ids)) == text


@settings(deadline=None, max_examples=100)
@given(
    prompt=st.lists(st.integers(0, 320), min_size=1, max_size=10),
    ids=st.lists(st.integers(0, 320), max_size=40),
    kind=st.sampled_from(KINDS),
)
def test_random_ids_never_raise(tokenizers: dict[str, Tokenizer], prompt: list[int], ids: list[int], kind: str) -> None:
    """E3, B10: also ids that the model has and the tokenizer has not."""
    steps = _stream(tokenizers[kind], ids, prompt)
    assert len(steps) == len(ids) + 1
    for token in prompt:
        assert isinstance(tokenizers[kind].token_text(token), str)


@settings(deadline=None, max_examples=100)
@given(ids=st.lists(st.integers(0, 255), max_size=40))
def test_random_bytes_stream_as_their_full_decode(tokenizers: dict[str, Tokenizer], ids: list[int]) -> None:
    """E3: for a byte-level vocabulary the full decode is Python's own lossy decoding of the bytes."""
    kept = [i for i in ids if i < 3 + len(UTF8_BYTES)]
    expected = bytes(UTF8_BYTES[i - 3] for i in kept if i >= 3).decode(errors="replace")
    assert "".join(_stream(tokenizers["byte_level"], kept)) == expected


@settings(deadline=None, max_examples=100)
@given(ids=st.lists(st.integers(259, 294), min_size=1, max_size=40))
def test_random_pieces_stream_as_their_full_decode(tokenizers: dict[str, Tokenizer], ids: list[int]) -> None:
    """E3: whole pieces only, so that the full decode is defined; the first word has no leading space."""
    tokenizer = tokenizers["byte_fallback"]
    before = fallback_ids(b"q")
    assert "q" + "".join(_stream(tokenizer, ids, before)) == tokenizer.decode([*before, *ids])


def test_two_streams_of_one_tokenizer_do_not_mix(tokenizer: Tokenizer) -> None:
    texts = ["😀 the cat", "日本 a dog"]
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    detokenizers, out = [Detokenizer(tokenizer, [BOS_ID]) for _ in texts], ["", ""]
    for step in range(max(map(len, ids))):
        for i in range(2):
            out[i] += detokenizers[i].step(ids[i][step]) if step < len(ids[i]) else ""
    assert [text + d.flush() for text, d in zip(out, detokenizers)] == [tokenizer.decode(i) for i in ids]


# ---------------------------------------------------------------- stop strings


def _push_all(stops: Sequence[str], chunks: Sequence[str]) -> tuple[list[str], str | None]:
    """What is given out per chunk (the flush last) and the stop string that ended it."""
    checker, given_out = StopChecker(stops), []
    for chunk in chunks:
        text, stop = checker.push(chunk)
        given_out.append(text)
        if stop is not None:
            return given_out, stop
    return [*given_out, checker.flush()], None


def test_a_stop_over_several_tokens_leaks_nothing() -> None:
    """T7: vLLM sent "DEF" before it knew."""
    given_out, stop = _push_all(["DEFGHIJ"], ["ABC ", "DEF", "G", "HI", "J", "more"])
    assert given_out == ["ABC ", "", "", "", ""]
    assert stop == "DEFGHIJ"


def test_a_near_miss_is_delivered_whole_and_once() -> None:
    given_out, stop = _push_all(["DEFGHIJ"], ["ABC ", "DEF", "G", "HI", "K", "!"])
    assert given_out == ["ABC ", "", "", "", "DEFGHIK", "!", ""]
    assert stop is None
    assert _push_all(["DEFGHIJ"], ["ABC DEF", "GH"]) == (["ABC ", "", "DEFGH"], None)


def test_a_stop_may_begin_within_a_token_and_end_in_the_next() -> None:
    assert _push_all(["END"], ["the E", "ND of it"]) == (["the ", ""], "END")
    assert _push_all(["END"], ["the E", "N", "Ergy"]) == (["the ", "", "ENErgy", ""], None)
    assert _push_all(["END"], ["all in ENDone"]) == (["all in "], "END")


def test_a_stop_that_overlaps_itself() -> None:
    assert _push_all(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", ""], "aab")
    assert _push_all(["abab"], ["xab", "abc"]) == (["x", ""], "abab")
    assert _push_all(["\n\n"], ["one\n", "two\n", "\nthree"]) == (["one", "\ntwo", ""], "\n\n")


def test_a_stop_that_is_a_prefix_of_another() -> None:
    for stops in (["AB", "ABC"], ["ABC", "AB"]):
        given_out, stop = _push_all(stops, ["x", "A", "B", "C"])
        assert ("".join(given_out), stop) == ("x", "AB"), "it is complete first"


def test_the_earliest_match_wins() -> None:
    for stops in (["one", "two"], ["two", "one"]):
        assert _push_all(stops, ["a two and one"]) == (["a "], "two")
    for stops in (["bcd", "c"], ["c", "bcd"]):
        assert "".join(_push_all(stops, ["abcde"])[0]) == "a"


def test_without_stops_nothing_is_held_back() -> None:
    assert _push_all([], ["a", "b", ""]) == (["a", "b", "", ""], None)


def _search(stops: Sequence[str], chunks: Sequence[str]) -> tuple[str, str | None]:
    """After each chunk look through the whole text so far; of several matches the first one, of these the longest."""
    for end in range(1, len(chunks) + 1):
        text = "".join(chunks[:end])
        matches = [(at, s) for s in stops for at in range(len(text)) if text.startswith(s, at)]
        if matches:
            at = min(at for at, _ in matches)
            return text[:at], max((s for a, s in matches if a == at), key=len)
    return "".join(chunks), None


LETTERS = st.text(st.sampled_from("ab"), min_size=1, max_size=4)


@settings(deadline=None, max_examples=150)
@given(stops=st.lists(LETTERS, max_size=3), chunks=st.lists(st.text(st.sampled_from("abc"), max_size=4), max_size=12))
def test_stop_checker_equals_a_search_over_the_whole_text(stops: list[str], chunks: list[str]) -> None:
    given_out, stop = _push_all(stops, chunks)
    assert ("".join(given_out), stop) == _search(stops, chunks)


@settings(deadline=None, max_examples=150)
@given(stops=st.lists(LETTERS, min_size=1, max_size=3), text=st.text(st.sampled_from("abc"), max_size=20))
def test_nothing_is_held_back_longer_than_needed(stops: list[str], text: str) -> None:
    """What waits is always the beginning of a stop string, so a stream lags by less than the longest one."""
    checker, out = StopChecker(stops), ""
    for i, letter in enumerate(text):
        safe, stop = checker.push(letter)
        out += safe
        if stop is not None:
            return
        waiting = text[len(out) : i + 1]
        assert text[: i + 1] == out + waiting
        assert not waiting or any(s.startswith(waiting) for s in stops)


def test_long_stops_over_long_texts_are_cheap() -> None:
    """B20: 4 stops of 1,000 characters, 2,000 tokens that are all near misses."""
    stops = ["a" * 999 + end for end in "wxyz"]
    checker, start = StopChecker(stops), time.thread_time()
    out = "".join(checker.push("aaaa")[0] for _ in range(2_000)) + checker.flush()
    assert out == "a" * 8_000
    assert time.thread_time() - start < 2.0
