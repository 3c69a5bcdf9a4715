"""Logits to tokens and logprobs, held against plain Python: one row at a time, lists and floats, written from vLLM's
definitions. Distributions are checked by sampling one row with many seeds at once; all seeds are fixed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from miniserve import sampling
from miniserve.request import Request, SamplingParams

LOGITS = [2.0, 1.5, 1.1, 0.6, 0.0, -0.3, -1.0, -1.7, -2.2, -4.0, -9.0]
NUM_DRAWS = 2_000
ALMOST_ONE = 1 - 2**-53
"""The largest number that a uniform draw can be."""


def _request(
    prompt: Sequence[int] = (0,), output: Sequence[int] = (), stop_ids: Sequence[int] = (), seed: int = 0, **fields: Any
) -> Request:
    return Request(
        key=0,
        parent_key=0,
        prompt_token_ids=list(prompt),
        params=SamplingParams(**fields),
        max_total_tokens=1 << 20,
        stop_token_ids=frozenset(stop_ids),
        seed=seed,
        output_token_ids=list(output),
    )


def _sample(logits: Sequence[float] | Tensor, request: Request) -> int:
    row = torch.as_tensor(logits, dtype=torch.float32)[None]
    return sampling.sample(row, [request])[0]


def _many(logits: Sequence[float], num_seeds: int, **how: Any) -> Counter[int]:
    """How often each token comes up over this many seeds."""
    requests = [_request(seed=seed, **how) for seed in range(num_seeds)]
    rows = torch.tensor(logits, dtype=torch.float32).repeat(num_seeds, 1)
    return Counter(sampling.sample(rows, requests))


# ---------------------------------------------------------------- the definitions, in plain Python


def _adjusted(logits: Sequence[float], request: Request) -> list[float]:
    """Bias, min_tokens, then repetition, frequency and presence penalty."""
    params, row = request.params, list(logits)
    for token, bias in (params.logit_bias or {}).items():
        row[token] += bias
    if len(request.output_token_ids) < params.min_tokens:
        for token in request.stop_token_ids:
            row[token] = -math.inf
    for token in set(request.prompt_token_ids) | set(request.output_token_ids):
        row[token] = (
            row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
        )
    for token, times in Counter(request.output_token_ids).items():
        row[token] -= params.frequency_penalty * times + params.presence_penalty
    return row


def _softmax(row: Sequence[float], temperature: float = 1.0) -> list[float]:
    peak = max(row)
    weights = [math.exp((x - peak) / temperature) for x in row]
    return [w / sum(weights) for w in weights]


def _probabilities(logits: Sequence[float], request: Request) -> list[float]:
    """What each token is drawn with: temperature, then min_p, top_k, top_p, each renormalised."""
    params = request.params
    probs = _softmax(_adjusted(logits, request), params.temperature)
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    kept = [token for token in order if probs[token] >= params.min_p * probs[order[0]]]
    if params.top_k > 0:
        kept = kept[: params.top_k]
    total, mass, nucleus = sum(probs[token] for token in kept), 0.0, []
    for token in kept:
        if mass < params.top_p or not nucleus:
            nucleus.append(token)
        mass += probs[token] / total
    whole = sum(probs[token] for token in nucleus)
    return [probs[token] / whole if token in nucleus else 0.0 for token in range(len(probs))]


def _assert_drawn_from(counts: Counter[int], probabilities: Sequence[float]) -> None:
    """Nothing outside the support, and every frequency within five standard deviations of its expectation."""
    num_draws = sum(counts.values())
    for token, p in enumerate(probabilities):
        if p == 0:
            assert counts[token] == 0, f"token {token} was drawn and must not be"
        expected, deviation = num_draws * p, math.sqrt(num_draws * p * (1 - p))
        assert abs(counts[token] - expected) <= 5 * deviation + 1, (token, counts[token], expected)


# ---------------------------------------------------------------- greedy


def test_greedy_takes_the_likeliest_and_of_equals_the_lowest_id() -> None:
    assert _sample([0.0, 3.0, 1.0], _request(temperature=0)) == 1
    assert _sample([0.0, 3.0, 3.0, 3.0], _request(temperature=0)) == 1
    assert _sample([-2.0] * 7, _request(temperature=0)) == 0


def test_ties_go_to_the_lowest_id_also_where_logits_are_adjusted() -> None:
    assert _sample([0.0, 3.0, 3.0, 3.0], _request(temperature=0, logit_bias={0: 3.0})) == 0
    assert _sample([0.0, 3.0, 3.0, 3.0], _request(temperature=0, presence_penalty=1.0, output=[1])) == 2
    rows = torch.tensor([[1.0, 5.0, 5.0], [5.0, 5.0, 0.0]])
    assert sampling.sample(rows, [_request(temperature=0), _request(temperature=0.7, top_k=1)]) == [1, 0]


@pytest.mark.parametrize("temperature", [1e-2, 1e-4, 1e-7, 1e-10, 5e-324])
@pytest.mark.parametrize("scale", [20.0, 1e4])
def test_tiny_temperatures_equal_greedy(temperature: float, scale: float) -> None:
    """T13: the logits are 0.8 apart at least, which is 80 temperatures."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.stack([torch.linspace(-scale, scale, 51)[torch.randperm(51, generator=generator)] for _ in range(20)])
    requests = [_request(temperature=temperature, seed=row) for row in range(20)]
    assert sampling.sample(rows, requests) == rows.argmax(-1).tolist()


def test_extreme_logits_stay_a_distribution() -> None:
    for temperature in (1e-5, 1e-4, 1.0, 100.0):
        for row in ([1e4, -1e4, 9e3], [-1e4, -1e4, -1e4], [3e38, -3e38, 0.0]):
            request = _request(temperature=temperature, top_p=0.9, min_p=0.1, top_k=2, seed=3)
            assert row[_sample(row, request)] == max(row) or temperature > 1


def test_a_batch_of_temperatures() -> None:
    """T6: rows at 0 are the argmax, others what they are alone; nothing else changes."""
    rows = torch.randn(4, 30, generator=torch.Generator().manual_seed(2))
    before = rows.clone()
    requests = [_request(temperature=t, seed=i) for i, t in enumerate((0, 1e-7, 0.7, 2.0))]
    together = sampling.sample(rows, requests)
    assert together == [_sample(row, request) for row, request in zip(rows, requests)]
    assert together[:2] == rows[:2].argmax(-1).tolist()
    assert torch.equal(rows, before)


# ---------------------------------------------------------------- drawing


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7, 100.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    counts = _many(LOGITS, NUM_DRAWS, temperature=temperature)
    expected = _softmax(LOGITS, temperature)
    _assert_drawn_from(counts, expected)
    wide = [token for token, p in enumerate(expected) if p * NUM_DRAWS >= 10]
    chi_square = sum((counts[t] - NUM_DRAWS * expected[t]) ** 2 / (NUM_DRAWS * expected[t]) for t in wide)
    assert chi_square < len(wide) + 6 * math.sqrt(2 * len(wide))


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 1},
        {"top_k": 3},
        {"top_k": 100},
        {"top_k": -1},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"top_p": 1e-9},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"min_p": 0.05, "top_k": 4},
        {"top_k": 5, "top_p": 0.7},
        {"min_p": 0.1, "top_k": 6, "top_p": 0.8, "temperature": 1.5},
        {"temperature": 0.5, "top_p": 0.9},
    ],
    ids=str,
)
def test_filters_leave_exactly_the_tokens_of_their_definition(filters: dict[str, float]) -> None:
    _assert_drawn_from(_many(LOGITS, NUM_DRAWS, **filters), _probabilities(LOGITS, _request(**filters)))


@settings(deadline=None, max_examples=40)
@given(
    logits=st.lists(st.integers(-40, 40), min_size=2, max_size=9, unique=True),
    temperature=st.sampled_from([0.2, 1.0, 3.0]),
    top_k=st.integers(-1, 10),
    top_p=st.sampled_from([0.05, 0.31, 0.73, 0.97, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.27, 0.9]),
)
def test_no_filter_combination_draws_what_it_removes(
    logits: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    row = [x / 10 for x in logits]
    fields = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    expected = _probabilities(row, _request(**fields))
    assume(_is_clear_cut(row, temperature, top_p, min_p))
    _assert_drawn_from(_many(row, 400, **fields), expected)


def _is_clear_cut(row: Sequence[float], temperature: float, top_p: float, min_p: float) -> bool:
    """No token lies so close to a limit that float32 and float64 may differ about it."""
    probs = sorted(_softmax(row, temperature), reverse=True)
    sums = [sum(probs[a:b]) for a in (0,) for b in range(len(probs))]
    near_mass = any(abs(s / total - top_p) < 1e-4 for total in sums[1:] + [1.0] for s in sums)
    return not near_mass and all(abs(p / probs[0] - min_p) > 1e-4 for p in probs)


MIXED: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"top_k": 2},
    {"top_p": 0.6},
    {"min_p": 0.3},
    {"temperature": 1.9, "top_k": 7, "top_p": 0.9},
    {"presence_penalty": 2.0, "output": [0, 0, 1]},
    {"repetition_penalty": 1.5, "prompt": [0, 1, 2]},
    {"logit_bias": {5: 4.0}},
    {"min_tokens": 3, "stop_ids": [0, 1], "output": [4]},
    {"temperature": 0, "frequency_penalty": 1.0, "output": [0, 0]},
]


@pytest.mark.parametrize("drawn", [None, 0.0, 0.5, ALMOST_ONE], ids=["seeded", "lowest", "middle", "highest"])
def test_rows_do_not_influence_each_other(monkeypatch: pytest.MonkeyPatch, drawn: float | None) -> None:
    """A mixed batch gives each request what it gets alone, whatever its random number."""
    if drawn is not None:
        monkeypatch.setattr(sampling, "uniform", lambda seed, index: drawn)
    rows = torch.randn(len(MIXED), 20_000, generator=torch.Generator().manual_seed(3))
    rows[:, 8:] -= 20  # a long tail of tokens that hardly ever come up
    requests = [_request(seed=i, **how) for i, how in enumerate(MIXED)]
    alone = [_sample(row, request) for row, request in zip(rows, requests)]
    assert sampling.sample(rows, requests) == alone
    assert sampling.sample(rows.flip(0), requests[::-1]) == alone[::-1]


@pytest.mark.parametrize("drawn", [0.0, 0.3, ALMOST_ONE])
@pytest.mark.parametrize("how", MIXED, ids=str)
def test_extreme_random_numbers_draw_nothing_impossible(
    monkeypatch: pytest.MonkeyPatch, drawn: float, how: dict[str, Any]
) -> None:
    monkeypatch.setattr(sampling, "uniform", lambda seed, index: drawn)
    request = _request(**how)
    token = _sample(LOGITS, request)
    if request.params.greedy:
        assert token == max(range(len(LOGITS)), key=_adjusted(LOGITS, request).__getitem__)
    else:
        assert _probabilities(LOGITS, request)[token] > 0


# ---------------------------------------------------------------- bias, bans, penalties


@settings(deadline=None, max_examples=100)
@given(
    logits=st.lists(st.integers(-50, 50), min_size=8, max_size=8),
    prompt=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    output=st.lists(st.integers(0, 7), max_size=6),
    stop_ids=st.sets(st.integers(0, 7), max_size=4),
    fields=st.fixed_dictionaries(
        {},
        optional={
            "presence_penalty": st.sampled_from([-2.0, -0.7, 0.4, 2.0]),
            "frequency_penalty": st.sampled_from([-2.0, -0.3, 0.9, 2.0]),
            "repetition_penalty": st.sampled_from([0.5, 1.1, 1.7, 10.0]),
            "logit_bias": st.dictionaries(st.integers(0, 7), st.sampled_from([-100.0, -1.3, 2.9, 100.0]), max_size=4),
            "min_tokens": st.integers(0, 4),
        },
    ),
)
def test_greedy_choice_is_that_of_the_adjusted_logits(
    logits: list[int], prompt: list[int], output: list[int], stop_ids: set[int], fields: dict[str, Any]
) -> None:
    row = [x / 10 for x in logits]
    request = _request(prompt, output, tuple(stop_ids), temperature=0, **fields)
    adjusted = _adjusted(row, request)
    first, second = sorted(adjusted, reverse=True)[:2]
    assume(first - second > 1e-3)
    assert _sample(row, request) == adjusted.index(first)


@pytest.mark.parametrize(
    "how",
    [
        {"presence_penalty": 1.2, "output": [0, 0, 3]},
        {"presence_penalty": -1.2, "output": [4, 4]},
        {"frequency_penalty": 0.6, "output": [0, 0, 0, 1]},
        {"repetition_penalty": 2.0, "prompt": [0, 8], "output": [1, 7]},
        {"repetition_penalty": 0.5, "prompt": [3, 6]},
        {"logit_bias": {9: 3.0, 0: -2.0}},
        {"min_tokens": 2, "stop_ids": [0, 2], "output": [5]},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3, "output": [0, 1], "top_k": 4},
    ],
    ids=str,
)
def test_adjustments_move_probabilities_as_defined(how: dict[str, Any]) -> None:
    _assert_drawn_from(_many(LOGITS, NUM_DRAWS, **how), _probabilities(LOGITS, _request(**how)))


def test_penalties_count_the_output_and_repetition_the_prompt_too() -> None:
    row = [5.0, 4.9, 0.0]
    assert _sample(row, _request([0], [], temperature=0, presence_penalty=2.0, frequency_penalty=2.0)) == 0
    assert _sample(row, _request([0], [], temperature=0, repetition_penalty=1.5)) == 1


def test_min_tokens_bans_every_end_until_it_is_reached() -> None:
    row = [5.0, 4.0, 3.0]
    for length, expected in ((0, 2), (1, 2), (2, 0), (3, 0)):
        request = _request(output=[2] * length, stop_ids=[0, 1], temperature=0, min_tokens=2)
        assert _sample(row, request) == expected


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize(
    "how",
    [
        {"stop_ids": range(11), "min_tokens": 5},
        {"logit_bias": dict.fromkeys(range(11), -100.0)},
        {"logit_bias": dict.fromkeys(range(11), 100.0)},
        {"stop_ids": range(11), "min_tokens": 5, "logit_bias": dict.fromkeys(range(11), -100.0)},
        {"stop_ids": range(11), "min_tokens": 50, "repetition_penalty": 2.0, "prompt": range(11)},
        {"stop_ids": range(11), "min_tokens": 50, "frequency_penalty": 2.0, "output": [*range(11)] * 3},
        {"stop_ids": range(10), "min_tokens": 5},
    ],
    ids=str,
)
def test_banning_or_biasing_every_token_still_gives_one(how: dict[str, Any], temperature: float) -> None:
    """B11: and a neighbour in the batch is not disturbed."""
    neighbour = _request(seed=1, top_p=0.9)
    rows = torch.tensor([LOGITS, LOGITS])
    tokens = sampling.sample(rows, [_request(temperature=temperature, **how), neighbour])
    assert 0 <= tokens[0] < 11
    assert tokens[1] == _sample(LOGITS, neighbour)
    if how["stop_ids" if "stop_ids" in how else "logit_bias"] == range(10):
        assert tokens[0] == 10, "the only token that is not banned"


@pytest.mark.parametrize("penalty", [5e-324, 1e-40, 1e-30, 1e-6])
def test_a_tiny_repetition_penalty_prefers_what_was_said(penalty: float) -> None:
    """Positive logits of seen tokens are divided by it and outgrow all others; no NaN comes of it."""
    row = [3.0, 1.0, 2.0, -1.0]
    for temperature in (0.0, 1.0):
        for seed in range(20):
            request = _request([0, 2], seed=seed, repetition_penalty=penalty, temperature=temperature)
            assert _sample(row, request) in (0, 2)


# ---------------------------------------------------------------- seeds


def test_the_same_seed_gives_the_same_token_in_any_company() -> None:
    row = torch.tensor(LOGITS)
    alone = _sample(row, _request(seed=77))
    for size in (2, 5, 16):
        others = [_request(seed=i, temperature=i / 4, top_k=i) for i in range(size)]
        rows = torch.randn(size + 1, len(LOGITS), generator=torch.Generator().manual_seed(size))
        for place in (0, size):
            rows[place] = row
            requests = others[:place] + [_request(seed=77)] + others[place:]
            assert sampling.sample(rows, requests)[place] == alone


def test_randomness_depends_on_seed_and_index_only() -> None:
    """A request that is computed anew after preemption goes on where it was: there is no state to lose."""
    flat = [0.0] * 1000
    first = [_sample(flat, _request(seed=5, output=[1] * index)) for index in range(50)]
    again = [_sample(flat, _request(seed=5, output=[2] * index, prompt=[3, 4])) for index in reversed(range(50))]
    assert first == again[::-1]
    assert len(set(first)) > 40, "each token has a number of its own"
    other = [_sample(flat, _request(seed=6, output=[1] * index)) for index in range(50)]
    assert sum(a == b for a, b in zip(first, other)) < 5


@settings(deadline=None)
@given(seed=st.integers(-(2**63), 2**63 + 128), index=st.integers(0, 2**31))
def test_uniform_lies_in_the_unit_interval(seed: int, index: int) -> None:
    assert 0.0 <= sampling.uniform(seed, index) < 1.0
    assert sampling.uniform(seed, index) == sampling.uniform(seed, index)


def test_uniform_fills_the_unit_interval_evenly() -> None:
    for numbers in ([sampling.uniform(s, 0) for s in range(10_000)], [sampling.uniform(0, i) for i in range(10_000)]):
        tenths = Counter(int(10 * u) for u in numbers)
        assert all(abs(tenths[tenth] - 1000) < 150 for tenth in range(10))


# ---------------------------------------------------------------- logprobs


def _log_softmax(row: Sequence[float]) -> list[float]:
    total = math.log(sum(math.exp(x - max(row)) for x in row)) + max(row)
    return [x - total for x in row]


@settings(deadline=None)
@given(rows=st.lists(st.lists(st.integers(-200, 200), min_size=7, max_size=7), min_size=1, max_size=4), data=st.data())
def test_logprobs_are_log_softmax_with_ranks(rows: list[list[int]], data: st.DataObject) -> None:
    logits = [[x / 10 for x in row] for row in rows]
    tokens = [data.draw(st.integers(0, 6)) for _ in rows]
    num_top = [data.draw(st.integers(-1, 7)) for _ in rows]
    entries = sampling.logprobs(torch.tensor(logits), tokens, num_top)
    assert len(entries) == len(rows)
    for row, token, wanted, entry in zip(logits, tokens, num_top, entries):
        expected, count = _log_softmax(row), len(row) if wanted == -1 else wanted
        assert next(iter(entry)) == token, "the actual token comes first"
        assert len(entry) in (max(count, 1), count + 1)
        for other, found in entry.items():
            assert found.logprob == pytest.approx(expected[other], abs=1e-5)
        assert entry[token].rank == 1 + sum(x > row[token] for x in row)
        top = sorted(entry, key=lambda other: entry[other].rank)[:count]
        values = [row[other] for other in top]
        assert values == sorted(row, reverse=True)[:count], "the likeliest, in order"
        others = [row[other] for other in list(entry)[1:]]
        assert others == sorted(others, reverse=True)


def test_num_top_zero_is_the_actual_token_alone_and_minus_one_the_vocabulary() -> None:
    rows = torch.tensor([LOGITS, LOGITS, LOGITS])
    none, everything, both = sampling.logprobs(rows, [4, 4, 0], [0, -1, 2])
    assert list(none) == [4] and none[4].rank == 5
    assert list(everything) == [4, 0, 1, 2, 3, 5, 6, 7, 8, 9, 10]
    assert [everything[t].rank for t in sorted(everything)] == list(range(1, 12))
    assert list(both) == [0, 1]
    assert sum(math.exp(p.logprob) for p in everything.values()) == pytest.approx(1.0, abs=1e-5)


def test_logprobs_of_the_greedy_token_print_the_same_float_as_the_top() -> None:
    """lm-eval compares them for equality."""
    rows = torch.randn(8, 50, generator=torch.Generator().manual_seed(4)) * 5
    rows[0, 3] = rows[0, 7] = 30.0  # a tie
    tokens = rows.argmax(-1).tolist()
    for token, entry in zip(tokens, sampling.logprobs(rows, tokens, [1] * 8)):
        assert entry[token].logprob == max(p.logprob for p in entry.values())
        assert entry[token].rank == 1


def test_logprobs_are_finite_numbers_at_extremes() -> None:
    """T9: a JSON encoder refuses inf and NaN."""
    for row in ([1e4, -1e4, 0.0], [-1e4] * 3, [-1e4, 1e4, 1e4]):
        (entry,) = sampling.logprobs(torch.tensor([row]), [1], [-1])
        assert all(math.isfinite(p.logprob) and p.logprob <= 0 for p in entry.values())
