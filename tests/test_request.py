"""`SamplingParams.validate` is the one judge for library and HTTP: what it lets through has a meaning, and everything
else is a `RequestError` that names the field. `ALLOWED` and `REFUSED` are the table of all limits; `_has_meaning`
says the same once more as predicates, for hypothesis to try values that no table thinks of. Nothing needs torch.
"""

from __future__ import annotations

import dataclasses
import math
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniserve.errors import MiniserveError, RequestError
from miniserve.request import Request, SamplingParams

VOCAB = 256
NAN, INF = float("nan"), float("inf")
SURROGATE = "a\ud800b"
NO_NUMBERS = [None, "1", "", b"1", [], [1], {}, {"a": 1}, 1j, object(), True, False, NAN, INF, -INF]
NO_INTEGERS = [*NO_NUMBERS, 1.0, 0.5, -1e300, 2**63, 2**64, -(2**63) - 1, 10**40, -(10**40), 10**5000, [10**5000]]
NO_STRINGS = [0, 1.5, True, b"stop", {"a"}, {"a": "b"}, object(), SURROGATE]


def _without_none(values: list[Any]) -> list[Any]:
    return [value for value in values if value is not None]


ALLOWED: dict[str, list[Any]] = {
    "n": [1, 2, 128],
    "temperature": [0, 0.0, 5e-324, 1e-10, 1, 0.7, 2, 2.0],
    "top_p": [1, 1.0, 0.5, 1e-9, 5e-324],
    "top_k": [-1, 0, 1, VOCAB, VOCAB + 1, 2**31 - 1],
    "min_p": [0, 0.0, 0.05, 1, 1.0],
    "presence_penalty": [-2, -2.0, 0, 0.5, 2, 2.0],
    "frequency_penalty": [-2, -2.0, 0, 0.5, 2, 2.0],
    "repetition_penalty": [1, 1.0, 0.1, 2, 2.0],
    "seed": [None, 0, 1, -1, 2**63 - 1, -(2**63)],
    "stop": [None, "x", "日本", [], (), ["x"], ("x", "y"), ["s" * 1000] * 4, list("abcdefghijklmnop")],
    "stop_token_ids": [None, [], (), [0], [VOCAB - 1], (1, 2, 2), list(range(VOCAB))],
    "ignore_eos": [True, False],
    "min_tokens": [0, 1, 16],
    "max_tokens": [None, 1, 16, 2**31 - 1],
    "logprobs": [None, 0, 1, 20],
    "prompt_logprobs": [None, 0, 1, 20],
    "logit_bias": [None, {}, {0: 1}, {VOCAB - 1: -100}, {5: 100.0}, {5: -100.0, 6: 0.5}],
    "cache_salt": [None, "a", "é日😀", "x" * 128],
}
REFUSED: dict[str, list[Any]] = {
    "n": [*NO_INTEGERS, 0, -1, 129, 10**6, 10**9],
    "temperature": [*NO_NUMBERS, -1e-9, -1, 10**40, -(10**40), 10**5000, 1e300, [10**5000], SURROGATE],
    "top_p": [*NO_NUMBERS, 0, 0.0, -0.1, 1.0000001, 2, 10**40, 10**5000],
    "top_k": [*NO_INTEGERS, -2, -(10**6)],
    "min_p": [*NO_NUMBERS, -0.1, 1.0000001, 2, 10**40],
    "presence_penalty": [*NO_NUMBERS, -2.0000001, 2.0000001, 10**40, -(10**40)],
    "frequency_penalty": [*NO_NUMBERS, -2.0000001, 2.0000001, 10**40, -(10**40)],
    "repetition_penalty": [*NO_NUMBERS, 0, 0.0, -1, 10**40, 1e300],
    "seed": _without_none(NO_INTEGERS),
    "stop": [*NO_STRINGS, "", [""], ["a", ""], [None], [1], [["a"]], [SURROGATE], "s" * 10**6, ["s"] * 10**5],
    "stop_token_ids": [7, "abc", b"ab", {1}, {1: 1}, 1.0]
    + [[bad] for bad in (-1, VOCAB, 2**31, 2**63, 10**40, 10**5000, True, 1.0, "1", None, NAN, [1])]
    + [[1] * 10**6],
    "ignore_eos": [None, 0, 1, "true", "", 1.0, [], NAN],
    "min_tokens": [*NO_INTEGERS, -1, 17],
    "max_tokens": [*_without_none(NO_INTEGERS), 0, -1, 2**31, "16"],
    "logprobs": [*_without_none(NO_INTEGERS), -2, -1, 21, 1.5, "5", 10**6],
    "prompt_logprobs": [*_without_none(NO_INTEGERS), -2, -1, 21, 1.5, "5", 10**6],
    "logit_bias": [0, "x", [], [1], [(1, 1.0)], {1}]
    + [{bad: 1.0} for bad in (-1, VOCAB, 2**63, 10**40, int("9" * 40), 10**5000, True, 1.0, "1", None, NAN, SURROGATE)]
    + [{1: bad} for bad in (NAN, INF, -INF, 100.0001, -101, 10**40, 10**5000, None, "1", True, [1.0])]
    + [dict.fromkeys(range(10**5), 1.0)],
    "cache_salt": [*NO_STRINGS, "", "x" * 129, "x" * 10**6, ["a"]],
}
RANGES = {
    "n": ("1", "128"),
    "temperature": ("0",),
    "top_p": ("0", "1"),
    "top_k": ("-1",),
    "min_p": ("0", "1"),
    "presence_penalty": ("-2", "2"),
    "frequency_penalty": ("-2", "2"),
    "repetition_penalty": ("0",),
    "seed": (str(-(2**63)), str(2**63 - 1)),
    "ignore_eos": ("true", "false"),
    "min_tokens": ("0",),
    "max_tokens": ("1",),
    "logprobs": ("0", "20"),
    "prompt_logprobs": ("0", "20"),
}
"""What the message about a field that is one number must say."""


def _validate(*, vocab_size: int = VOCAB, max_logprobs: int = 20, **fields: Any) -> None:
    SamplingParams(**fields).validate(vocab_size=vocab_size, max_logprobs=max_logprobs)


def test_the_tables_cover_every_field() -> None:
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(ALLOWED) == set(REFUSED) == names


def test_defaults_are_those_of_vllm() -> None:
    expected = dict(n=1, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, max_tokens=16)
    expected |= dict(presence_penalty=0.0, frequency_penalty=0.0, min_tokens=0, ignore_eos=False)
    params = SamplingParams()
    for field in dataclasses.fields(params):
        assert getattr(params, field.name) == expected.get(field.name), field.name
    _validate()


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(name: str) -> None:
    for value in ALLOWED[name]:
        _validate(**{name: value})


@pytest.mark.parametrize("name", REFUSED)
def test_refused_naming_the_field(name: str) -> None:
    wrong = [(i, problem) for i, value in enumerate(REFUSED[name]) if (problem := _problem(name, value))]
    assert not wrong


def _problem(name: str, value: Any) -> str | None:
    """What is wrong with the refusal of this value."""
    try:
        _validate(**{name: value})
    except RequestError as error:
        message = str(error)
        if error.param != name or name not in message:
            return f"does not name the field: {message}"
        if len(message) > 400 or not message.isprintable():
            return "echoes the value as it is"
        if name in RANGES and value != 17 and not all(bound in message for bound in RANGES[name]):
            return f"does not name the range: {message}"
        if name in RANGES and _is_short(value) and repr(value) not in message:
            return f"does not name the value: {message}"
        return None
    except Exception as error:
        return f"raises {type(error).__name__}: {str(error)[:100]}"
    return "is accepted"


def _is_short(value: Any) -> bool:
    is_huge = isinstance(value, int) and abs(value) >= 10**39
    return isinstance(value, (bool, int, float, str)) and not is_huge


def test_message_about_an_id_names_it_and_the_last_one() -> None:
    for fields in ({"stop_token_ids": [3, 256]}, {"logit_bias": {256: 1.0}}):
        with pytest.raises(RequestError, match=r"256.* 0 .* 255"):
            _validate(**fields)


def test_ids_are_judged_by_the_width_of_the_logits() -> None:
    _validate(vocab_size=10, stop_token_ids=[9], logit_bias={9: 1.0})
    for fields in ({"stop_token_ids": [10]}, {"logit_bias": {10: 1.0}}):
        with pytest.raises(RequestError):
            _validate(vocab_size=10, **fields)


def test_min_tokens_beyond_max_tokens_names_both() -> None:
    _validate(min_tokens=5, max_tokens=5)
    with pytest.raises(RequestError, match=r"min_tokens=6.*max_tokens=5") as caught:
        _validate(min_tokens=6, max_tokens=5)
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_max_logprobs_is_the_cap(name: str) -> None:
    _validate(max_logprobs=3, **{name: 3})
    _validate(max_logprobs=-1, **{name: -1})
    _validate(max_logprobs=-1, **{name: VOCAB})
    for cap, value in ((3, 4), (3, -1), (0, 1), (-1, -2), (-1, VOCAB + 1)):
        with pytest.raises(RequestError, match="max_logprobs") as caught:
            _validate(max_logprobs=cap, **{name: value})
        assert caught.value.param == name


def test_error_belongs_to_the_tree_and_is_a_value_error() -> None:
    with pytest.raises(MiniserveError):
        _validate(n=0)
    with pytest.raises(ValueError, match="n must be"):
        _validate(n=0)


def test_params_cannot_change_after_validation() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 10**9  # type: ignore[misc]


# ---------------------------------------------------------------- bounded cost


def _nested(depth: int) -> list[Any]:
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner]
    return inner


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 10**9),
        ("n", 2**70),
        ("n", [0] * 10**6),
        ("temperature", "9" * 10**7),
        ("temperature", {i: i for i in range(10**5)}),
        ("temperature", _nested(10**4)),
        ("stop", ["x"] * 10**6),
        ("stop", "x" * 10**7),
        ("stop", [["x"] * 10**6]),
        ("stop_token_ids", [0] * 10**6),
        ("stop_token_ids", [[0] * 10**6]),
        ("logit_bias", dict.fromkeys(range(10**6), 0.0)),
        ("logit_bias", {0: [0] * 10**6}),
        ("cache_salt", "x" * 10**7),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else type(value).__name__,
)
def test_refusal_costs_neither_time_nor_memory(name: str, value: Any) -> None:
    """A big value is refused for its size, not printed, copied or walked through first."""
    params = SamplingParams(**{name: value})
    start = time.thread_time()
    _refuse(params, name)
    assert time.thread_time() - start < 0.05
    tracemalloc.start()
    try:
        _refuse(params, name)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def _refuse(params: SamplingParams, name: str) -> None:
    with pytest.raises(RequestError) as caught:
        params.validate(vocab_size=VOCAB, max_logprobs=20)
    assert caught.value.param == name


# ---------------------------------------------------------------- the whole box

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-2, -1, 0, 1, 2, 16, 20, 21, 128, 129, 255, 256, 2**31, 2**63, 2**64, -(2**63), 10**40])
    | st.floats()
    | st.sampled_from([0.0, -0.0, 5e-324, 1e-5, 1.0, 2.0, -2.0, 100.0, -100.0, NAN, INF])
    | st.text(st.characters(exclude_categories=()), max_size=5)
    | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.integers() | st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
GOOD = {name: st.sampled_from(values) for name, values in ALLOWED.items()}


def _whole(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _finite(value: Any, low: float, high: float) -> bool:
    return (
        type(value) is int
        and low <= value <= high
        or type(value) is float
        and math.isfinite(value * 1.0)
        and low <= value <= high
    )


def _is_text(value: Any, longest: int) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= longest and not any(0xD800 <= ord(c) < 0xE000 for c in value)


def _is_id(value: Any) -> bool:
    return _whole(value, 0, VOCAB - 1)


def _has_meaning(name: str, value: Any) -> bool:
    """The limits, as predicates; other fields have their defaults (max_tokens 16)."""
    if value is None:
        return name in (
            "seed",
            "stop",
            "stop_token_ids",
            "max_tokens",
            "logprobs",
            "prompt_logprobs",
            "logit_bias",
            "cache_salt",
        )
    return {
        "n": lambda: _whole(value, 1, 128),
        "temperature": lambda: _finite(value, 0, 100),
        "top_p": lambda: _finite(value, 0, 1) and value > 0,
        "top_k": lambda: _whole(value, -1, 2**31 - 1),
        "min_p": lambda: _finite(value, 0, 1),
        "presence_penalty": lambda: _finite(value, -2, 2),
        "frequency_penalty": lambda: _finite(value, -2, 2),
        "repetition_penalty": lambda: _finite(value, 0, 100) and value > 0,
        "seed": lambda: _whole(value, -(2**63), 2**63 - 1),
        "stop": lambda: (
            _is_text(value, 1024)
            or isinstance(value, (list, tuple))
            and len(value) <= 64
            and all(_is_text(s, 1024) for s in value)
        ),
        "stop_token_ids": lambda: isinstance(value, (list, tuple)) and all(map(_is_id, value)),
        "ignore_eos": lambda: type(value) is bool,
        "min_tokens": lambda: _whole(value, 0, 16),
        "max_tokens": lambda: _whole(value, 1, 2**31 - 1),
        "logprobs": lambda: _whole(value, 0, 20),
        "prompt_logprobs": lambda: _whole(value, 0, 20),
        "logit_bias": lambda: (
            isinstance(value, dict) and all(_is_id(k) and _finite(v, -100, 100) for k, v in value.items())
        ),
        "cache_salt": lambda: _is_text(value, 128),
    }[name]()


@settings(deadline=None)
@given(name=st.sampled_from(sorted(ALLOWED)), value=ANYTHING)
def test_any_value_of_one_field_is_judged_as_the_limits_say(name: str, value: Any) -> None:
    try:
        _validate(**{name: value})
        passed = True
    except RequestError as error:
        assert error.param == name
        passed = False
    assert passed == _has_meaning(name, value)


@settings(deadline=None)
@given(st.fixed_dictionaries({}, optional={name: GOOD[name] | ANYTHING for name in ALLOWED}))
def test_any_combination_passes_or_is_a_request_error(fields: dict[str, Any]) -> None:
    try:
        _validate(**fields)
    except RequestError as error:
        assert error.param in fields


# ---------------------------------------------------------------- Request


def _request(prompt: list[int], output: list[int], **fields: Any) -> Request:
    return Request(
        key=0,
        parent_key=0,
        prompt_token_ids=prompt,
        params=SamplingParams(**fields),
        max_total_tokens=100,
        stop_token_ids=frozenset(),
        output_token_ids=output,
    )


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.lists(st.integers(0, 9), max_size=8), st.data())
def test_tokens_reads_prompt_and_output_as_one(prompt: list[int], output: list[int], data: st.DataObject) -> None:
    request, whole = _request(prompt, output), prompt + output
    stop = data.draw(st.integers(0, len(whole)))
    start = data.draw(st.integers(0, stop))
    assert request.num_tokens == len(whole)
    assert request.tokens(start, stop) == whole[start:stop]


def test_greedy_and_penalized_say_what_the_sampler_may_skip() -> None:
    assert SamplingParams(temperature=0).greedy and SamplingParams(temperature=5e-324).greedy
    assert not SamplingParams(temperature=0.01).greedy and not SamplingParams().greedy
    assert not SamplingParams().penalized
    for name, value in (("presence_penalty", -0.1), ("frequency_penalty", 0.1), ("repetition_penalty", 0.9)):
        assert SamplingParams(**{name: value}).penalized
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()
