"""Each operation of the `cpu` set equals the reference set: random shapes, views, windows and block tables.

Both sets do the same: inputs are views of wider tensors, the memory is NaN wherever nobody wrote, blocks that a window
has passed are given back (table entry 0, NaN inside). Bounds:

* float32: each set rounds every one of n additions by at most 2^-24. Such errors are independent, so their sum is
  bounded by `drift(n)`, four standard deviations and some for the rest, times the sum of the magnitudes.
* int8 keys and values: the judge gets what the stored numbers are worth, and computes in float32.
* bfloat16: the judge gets the values as stored (rounded to bfloat16) and computes in float32; builds that keep
  activations in float32 must then meet the same bound. With AVX512-BF16 products round their activations too: by at
  most 2^-8 (`BF16`) of each term.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Build
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from miniserve.batch import ForwardBatch
from miniserve.kvcache.pool import GroupMemory
from miniserve.ops import Norm, Ops, RotaryEmbedding
from miniserve.ops.cpu import CpuOps
from miniserve.ops.reference import ReferenceOps

FP32, BF16 = 2.0**-24, 2.0**-8  # the most that one rounding changes, relatively
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
DTYPES = (torch.float32, torch.bfloat16)

reference = ReferenceOps()
checked = settings(max_examples=40, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
rows = st.sampled_from((0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 24, 25, 65))


def drift(additions: int) -> float:
    """Relative rounding error of a sum in float32."""
    return (8 + 4 * additions**0.5) * FP32


def view(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    """Random numbers whose rows lie apart: columns of a wider tensor that is NaN elsewhere."""
    width = torch.Size(shape[1:]).numel()
    wide = torch.full((shape[0], width + 5), torch.nan)
    wide[:, 2 : 2 + width] = torch.randn(shape[0], width, generator=generator) * scale
    return wide[:, 2 : 2 + width].unflatten(1, shape[1:])


def assert_close(actual: Tensor, expected: Tensor, bound: Tensor | float) -> None:
    """Equal within the bound, element by element. NaN equals nothing."""
    assert actual.dtype == torch.float32 and actual.shape == expected.shape
    excess = (actual.double() - expected).abs() - bound
    assert not excess.isnan().any(), "NaN"
    assert (excess <= 0).all(), f"{excess.max().item()} beyond the bound"


# --- Products -------------------------------------------------------------------------------------------------------


def product(build: Build, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """x W^T + b in float64, and how far the kernels may be off."""
    rounds = build.rounds_activations and weight.dtype == torch.bfloat16
    magnitude = x.double().abs() @ weight.double().abs().T
    exact, bound = x.double() @ weight.double().T, magnitude * (drift(x.shape[1]) + rounds * BF16)
    if bias is not None:
        exact, bound = exact + bias, bound + bias.abs() * drift(1)
    return exact, bound + exact.abs() * FP32


def activation_of(name: str, x: Tensor) -> Tensor:
    """The activation, in x's dtype."""
    return reference.activated_linear(x, reference.pack(torch.eye(x.shape[1], dtype=x.dtype)), name)


@given(
    rows=rows,
    outputs=st.integers(1, 150),
    inputs=st.integers(1, 200),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    activation=st.sampled_from((None, *ACTIVATIONS)),
    has_residual=st.booleans(),
    seed=seeds,
)
@example(300, 70, 45, torch.float32, True, None, True, 0)
@example(300, 70, 45, torch.bfloat16, True, None, True, 0)
@example(1100, 33, 501, torch.bfloat16, False, None, False, 0)  # more rows than one chunk of activations
@checked
def test_linear(
    build: Build,
    rows: int,
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
    has_bias: bool,
    activation: str | None,
    has_residual: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = view(generator, rows, inputs)
    weight = view(generator, outputs, inputs).to(dtype)
    bias = view(generator, 1, outputs).flatten().to(dtype) if has_bias else None
    packed = build.ops.pack(weight, bias)
    expected, bound = product(build, x, weight, bias)
    if activation is not None:
        expected = activation_of(activation, expected)
        bound = 1.13 * bound + 1e-6 * (1 + expected.abs())  # no activation is steeper
        assert_close(build.ops.activated_linear(x, packed, activation), expected, bound)
    elif has_residual:
        residual = view(generator, rows, outputs)
        bound = bound + drift(1) * (residual.abs() + expected.abs())
        assert_close(build.ops.linear(x, packed, residual), expected + residual, bound)
    else:
        assert_close(build.ops.linear(x, packed), expected, bound)
        assert torch.equal(build.ops.head(x, packed), build.ops.linear(x, packed))


@given(
    rows=rows,
    outputs=st.integers(1, 80),
    inputs=st.integers(1, 100),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    activation=st.sampled_from(ACTIVATIONS),
    seed=seeds,
)
@checked
def test_gated_linear(
    build: Build,
    rows: int,
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
    has_bias: bool,
    activation: str,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = view(generator, rows, inputs)
    weight = view(generator, 2 * outputs, inputs).to(dtype)
    bias = view(generator, 1, 2 * outputs).flatten().to(dtype) if has_bias else None
    (gate, up), (gate_bound, up_bound) = (pair.chunk(2, dim=-1) for pair in product(build, x, weight, bias))
    activated = activation_of(activation, gate)
    gate_bound = 1.13 * gate_bound + 1e-6 * (1 + activated.abs())
    bound = gate_bound * (up.abs() + up_bound) + activated.abs() * up_bound
    packed = build.ops.pack_gated(weight, bias)
    assert_close(build.ops.gated_linear(x, packed, activation), activated * up, bound + 1e-30)


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as whole numbers up to 127, and each row's scale (2208.07339, section 2, with one scale per row)."""
    largest = x.float().abs().amax(-1, keepdim=True)  # (rows, 1)
    inverse = torch.tensor(127.0) / largest  # `127 / largest` would round twice
    return (x.float() * inverse).nan_to_num().round().double(), largest / 127


@given(
    rows=rows,
    outputs=st.integers(1, 150),
    inputs=st.integers(1, 200),
    dtype=st.sampled_from(DTYPES),
    gated=st.booleans(),
    has_bias=st.booleans(),
    seed=seeds,
)
@example(1100, 33, 1501, torch.bfloat16, False, False, 0)
@checked
def test_int8_linear(
    build: Build, rows: int, outputs: int, inputs: int, dtype: torch.dtype, gated: bool, has_bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = view(generator, rows, inputs)
    weight = view(generator, outputs * (1 + gated), inputs).to(dtype)
    weight[::7] = 0  # an output without a scale
    bias = view(generator, 1, weight.shape[0]).flatten() if has_bias else None
    (whole_x, x_scale), (whole_w, w_scale) = quantised(x), quantised(weight)
    expected = (whole_x @ whole_w.T) * x_scale * w_scale.T
    bound = (whole_x.abs() @ whole_w.abs().T) * x_scale * w_scale.T * drift(inputs)
    if bias is not None:
        expected, bound = expected + bias, bound + (bias.abs() + expected.abs()) * drift(1)
    if gated:
        gate, up = expected.chunk(2, dim=-1)
        gate_bound, up_bound = bound.chunk(2, dim=-1)
        activated = activation_of("silu", gate)
        bound = (1.13 * gate_bound + 1e-6 * (1 + activated.abs())) * (up.abs() + up_bound) + activated.abs() * up_bound
        packed = build.int8_ops.pack_gated(weight, bias)
        assert_close(build.int8_ops.gated_linear(x, packed, "silu"), activated * up, bound + 1e-30)
    else:
        packed = build.int8_ops.pack(weight, bias)
        assert_close(build.int8_ops.linear(x, packed), expected, bound)


def test_int8_rows_that_are_no_numbers_spoil_only_themselves(build: Build) -> None:
    x = torch.tensor([[1.0, -2.0], [torch.nan, 1.0], [torch.inf, 1.0], [0.0, 0.0]])
    y = build.int8_ops.linear(x, build.int8_ops.pack(torch.tensor([[1.0, 1.0]])))
    assert_close(y[[0, 3]], torch.tensor([[-1.0], [0.0]]), 2 / 127)
    assert y[1:3].isnan().all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_stay_right_far_from_zero(build: Build, activation: str) -> None:
    sizes = torch.tensor([0.0, 1e-30, 1e-3, 1.0, 9.0, 20.0, 87.0, 88.0, 89.0, 90.0, 104.0, 200.0, 1e4, 1e9, 1e30])
    x = torch.cat([sizes, -sizes])[:, None]
    actual = build.ops.activated_linear(x, build.ops.pack(torch.ones(1, 1)), activation)
    assert_close(actual, activation_of(activation, x.double()), 1e-6 * x.clamp(min=0) + 1e-6)


def test_a_product_does_not_depend_on_the_batch_or_the_threads(build: Build) -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual = view(generator, 67, 77), view(generator, 67, 133)
    for dtype in DTYPES:
        weight = view(generator, 133, 77).to(dtype)
        packed, gated = build.ops.pack(weight), build.ops.pack_gated(weight[:90])
        whole, whole_gated = build.ops.linear(x, packed, residual), build.ops.gated_linear(x, gated, "silu")
        for threads in (1, 2, 3):
            ops = CpuOps(num_threads=threads, flags=build.flags)
            for first, stop in chain([(0, 67), (0, 13), (5, 29)], ((row, row + 1) for row in range(0, 67, 5))):
                part, part_residual = x[first:stop], residual[first:stop]
                assert torch.equal(ops.linear(part, packed, part_residual), whole[first:stop])
                assert torch.equal(ops.gated_linear(part, gated, "silu"), whole_gated[first:stop])


# --- Rows -----------------------------------------------------------------------------------------------------------


@given(
    rows=rows, heads=st.sampled_from((None, 1, 3)), dim=st.integers(1, 300), mean=st.sampled_from((0, 9)), seed=seeds
)
@checked
def test_norms(build: Build, rows: int, heads: int | None, dim: int, mean: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = view(generator, *((rows, dim) if heads is None else (rows, heads, dim))).add_(mean)
    weight, bias, eps = torch.randn(dim, generator=generator), torch.randn(dim, generator=generator), 1e-5
    wide = x.double()

    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    expected = wide * scale * weight
    assert_close(build.ops.rms_norm(x, weight, eps), expected, expected.abs() * drift(dim) + 1e-30)

    centred = wide - wide.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    expected = centred * scale * weight + bias
    bound = drift(1) * (wide.abs().amax(-1, keepdim=True) * scale * weight.abs() + bias.abs())
    assert_close(build.ops.layer_norm(x, weight, bias, eps), expected, bound)


@given(rows=rows, inputs=st.integers(1, 200), outputs=st.integers(1, 40), dtype=st.sampled_from(DTYPES), seed=seeds)
@checked
def test_a_norm_before_a_product_is_the_norm_and_the_product(
    build: Build, rows: int, inputs: int, outputs: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, residual = view(generator, rows, inputs), view(generator, rows, outputs)
    norm, weight = Norm(torch.randn(inputs, generator=generator), 1e-5), view(generator, 2 * outputs, inputs).to(dtype)
    for ops in (build.ops, build.int8_ops):
        normed = ops.rms_norm(x, *norm)
        packed, gated = ops.pack(weight[:outputs]), ops.pack_gated(weight)
        assert torch.equal(ops.linear(x, packed, residual, norm=norm), ops.linear(normed, packed, residual))
        assert torch.equal(ops.gated_linear(x, gated, "silu", norm=norm), ops.gated_linear(normed, gated, "silu"))
        assert torch.equal(ops.head(x, packed, norm=norm), ops.head(normed, packed))


@given(rows=rows, heads=st.integers(1, 5), dim=st.integers(2, 130), data=st.data(), seed=seeds)
@checked
def test_rotate(build: Build, rows: int, heads: int, dim: int, data: st.DataObject, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    half = data.draw(st.integers(1, dim // 2), label="half")
    x = view(generator, rows, heads, dim)
    rotation = rotary(half, attention_factor=1.25)(torch.randint(5000, (rows,), generator=generator))
    expected = reference.rotate(x.double(), rotation)
    bound = reference.rotate(x.double().abs(), replace(rotation, cos=rotation.cos.abs(), sin=-rotation.sin.abs()))
    bound[..., half : 2 * half] += 2 * x[..., :half].abs() * rotation.sin.abs()[:, None]
    assert_close(build.ops.rotate(x, rotation), expected, bound.abs() * drift(2))


def test_embed(build: Build) -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        table = torch.randn(50, 12, generator=generator).to(dtype)
        for count in (0, 1, 7):
            tokens = torch.randint(50, (count,), generator=generator)
            assert_close(build.ops.embed(tokens, table), reference.embed(tokens, table).double(), 0.0)


@given(rows=rows, vocabulary=st.integers(1, 500), levels=st.sampled_from((2, 10, 10**6)), seed=seeds)
@checked
def test_argmax_takes_the_lowest_of_equals(build: Build, rows: int, vocabulary: int, levels: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = view(generator, rows, vocabulary)
    logits.copy_(torch.randint(-levels, levels, (rows, vocabulary), generator=generator).float())
    logits[torch.rand(rows, vocabulary, generator=generator) < 0.3] = -torch.inf
    logits[::3] = -torch.inf
    tokens = build.ops.argmax(logits)
    assert tokens.dtype == torch.int64 and torch.equal(tokens, reference.argmax(logits))
    assert torch.equal(tokens, (logits == logits.amax(-1, keepdim=True)).int().argmax(-1))


# --- Attention ------------------------------------------------------------------------------------------------------


def rotary(half: int, attention_factor: float = 1.0) -> RotaryEmbedding:
    """RoPE on the first 2 * half dimensions."""
    return RotaryEmbedding(1.0 / 100.0 ** (torch.arange(half) / half), attention_factor)


@dataclass(frozen=True)
class Case:
    """What attention is asked: memory geometry, requests, options."""

    requests: tuple[tuple[int, int], ...]  # (tokens in memory before the step, rows of the step) of each
    kv_heads: int = 2
    queries_per_kv_head: int = 3
    key_dim: int = 24
    value_dim: int = 24
    block_size: int = 16
    shared_blocks: int = 0  # of the first request, that the others begin with as far as they are long enough
    dtype: torch.dtype = torch.float32
    scale: float = 0.3
    window: int | None = None
    diagonal: bool = True
    softcap: float | None = None
    key_rotary: RotaryEmbedding | None = None
    seed: int = 0

    @property
    def options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("scale", "window", "diagonal", "softcap", "key_rotary")}


class Scene:
    """The case's requests with all their tokens written, in one memory for the kernels and in one for the judge."""

    def __init__(self, case: Case, ops: Ops) -> None:
        self.case = case
        self.generator = torch.Generator().manual_seed(case.seed)
        self.lengths = [computed + new for computed, new in case.requests]
        self._lay_out()
        self.memories = (self._memory(case.dtype), self._memory(torch.float32))  # of ops, of the judge
        self._write(ops)
        if case.window is not None:
            self._give_back()
        num_rows, num_heads = sum(new for _, new in case.requests), case.kv_heads * case.queries_per_kv_head
        self.q = view(self.generator, num_rows, num_heads, case.key_dim)

    def batch(self, spans: Sequence[tuple[int, int, int]]) -> ForwardBatch:
        """Rows for positions start to stop of some requests."""
        block_size = self.case.block_size
        positions = [torch.arange(start, stop) for _, start, stop in spans]
        slots = [self.table[s][p // block_size] * block_size + p % block_size for (s, _, _), p in zip(spans, positions)]
        empty = torch.empty(0, dtype=torch.int64)
        table = self.table[[s for s, _, _ in spans]]
        return ForwardBatch(
            token_ids=torch.zeros(sum(map(len, positions)), dtype=torch.int64),
            positions=torch.cat([empty, *positions]),
            cu_seqlens_q=torch.tensor([0, *accumulate(map(len, positions))], dtype=torch.int32),
            max_seqlen_q=max(map(len, positions), default=0),
            seqused_k=torch.tensor([stop for _, _, stop in spans], dtype=torch.int32),
            max_seqlen_k=max((stop for _, _, stop in spans), default=0),
            block_tables=(table,),
            slot_mapping=(torch.cat([empty, *slots]),),
        )

    def step(self) -> ForwardBatch:
        """The step's rows of all requests."""
        return self.batch([(s, computed, computed + new) for s, (computed, new) in enumerate(self.case.requests)])

    def _lay_out(self) -> None:
        """Shuffled pages; page 0 and some others are nobody's."""
        block_size = self.case.block_size
        counts = [-(-length // block_size) for length in self.lengths]
        self.num_pages = sum(counts) + 4
        pages = (1 + torch.randperm(self.num_pages - 1, generator=self.generator)).int()
        self.table = torch.zeros(len(counts), max(counts, default=0), dtype=torch.int32)
        self.shared = []  # leading tokens of a request that the first one writes
        for s, (count, taken) in enumerate(zip(counts, pages.split([*counts, len(pages) - sum(counts)]))):
            self.table[s, :count] = taken
            shared = 0
            if s:
                first, own = self.lengths[0] // block_size, self.case.requests[s][0] // block_size
                shared = min(self.case.shared_blocks, first, own)
                self.table[s, :shared] = self.table[0, :shared]
            self.shared.append(shared * block_size)

    def _memory(self, dtype: torch.dtype) -> GroupMemory:
        """An arena of NaN with room for others before, between and behind K and V."""
        case = self.case
        k_size, v_size = (case.block_size * case.kv_heads * dim for dim in (case.key_dim, case.value_dim))
        arena = torch.full(
            (self.num_pages, k_size + v_size + 12), 77 if dtype == torch.int8 else torch.nan, dtype=dtype
        )

        def part(first: int, dim: int) -> Tensor:
            return arena[:, first : first + case.block_size * case.kv_heads * dim].unflatten(
                1, (case.block_size, case.kv_heads, dim)
            )

        k, v = part(2, case.key_dim), part(6 + k_size, case.value_dim)
        if dtype != torch.int8:
            return GroupMemory(k, v, retention_class=0)
        scales = torch.full((self.num_pages, 2 * case.block_size * case.kv_heads + 3), torch.nan)
        k_scale, v_scale = (
            scales[:, first : first + case.block_size * case.kv_heads].unflatten(1, (case.block_size, case.kv_heads))
            for first in (1, 2 + case.block_size * case.kv_heads)
        )
        return GroupMemory(k, v, 0, k_scale, v_scale)

    def _write(self, ops: Ops) -> None:
        """History in chunks, request by request; then the rows of the step in one call."""
        for s, (computed, _) in enumerate(self.case.requests):
            start = self.shared[s]
            while start < computed:
                stop = min(computed, start + int(torch.randint(1, 40, (), generator=self.generator)))
                self._write_span(ops, self.batch([(s, start, stop)]))
                start = stop
        self._write_span(ops, self.step())

    def _write_span(self, ops: Ops, batch: ForwardBatch) -> None:
        case = self.case
        k = view(self.generator, batch.token_ids.shape[0], case.kv_heads, case.key_dim)
        v = view(self.generator, batch.token_ids.shape[0], case.kv_heads, case.value_dim)
        ops.write_kv(k, v, self.memories[0], batch, None)
        reference.write_kv(as_stored(k, case.dtype), as_stored(v, case.dtype), self.memories[1], batch, None)

    def _give_back(self) -> None:
        """Blocks that lie wholly before every window of the step: NaN, unless another request has them too."""
        needed = [max(0, computed - self.case.window + 1) // self.case.block_size for computed, _ in self.case.requests]
        kept = set(chain.from_iterable(table[first:].tolist() for table, first in zip(self.table, needed)))
        for table, first in zip(self.table, needed):
            for page in set(table[:first].tolist()) - kept:
                for memory in self.memories:
                    for part in (memory.k, memory.v, memory.k_scale, memory.v_scale):
                        if part is not None:
                            part[page] = torch.nan if part.is_floating_point() else 77
            table[:first] = 0


def as_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What the memory keeps of x."""
    if dtype != torch.int8:
        return x.to(dtype).float()
    whole, scale = quantised(x)
    return whole.float() * scale


def check_attention(build: Build, case: Case) -> None:
    """The kernels' answer equals the judge's, or what bounds it is wrong."""
    scene = Scene(case, build.ops)
    batch, (memory, judged) = scene.step(), scene.memories
    actual = build.ops.attend(scene.q, memory, batch, **case.options)

    is_bfloat16 = case.dtype == torch.bfloat16
    q, options = scene.q * case.scale, case.options | {"scale": 1.0}
    if is_bfloat16 and build.rounds_activations:
        q = q.bfloat16().float()
    judge = _RotatesToBFloat16() if is_bfloat16 else reference
    expected = judge.attend(q, judged, batch, **options).double()

    k, v = (torch.nan_to_num(part).abs() for part in (judged.k, judged.v))
    largest_score = q.abs().sum(-1).max() * k.max() if len(q) else 0.0
    # A score's error; then weights are off by e^(2 error), and each by what the sums over keys add.
    error = largest_score * drift(case.key_dim) + 8 * FP32 * (case.softcap or 0.0)
    if case.dtype == torch.int8 and case.key_rotary is not None:  # rounded once more, in steps sqrt 2 as large
        error += 0.75 / 127 * largest_score
    if is_bfloat16 and case.key_rotary is not None:  # two sets may round a rotated number of a key differently
        error += 2 * BF16 * (q.abs().max() * k.max() if len(q) else 0.0)
    weights_error = torch.expm1(torch.as_tensor(2 * error)) + drift(max(scene.lengths, default=0))
    weights_error += BF16 * (is_bfloat16 and build.rounds_activations)
    assert_close(actual, expected, weights_error * v.max())

    angles = rotary(case.key_dim // 2)(batch.positions)
    rotated = build.ops.attend(build.ops.rotate(scene.q, angles), memory, batch, **case.options)
    assert torch.equal(build.ops.attend(scene.q, memory, batch, rotation=angles, **case.options), rotated)


class _RotatesToBFloat16(ReferenceOps):
    """Rotated keys are bfloat16 again, as keys that were rotated before they were stored."""

    def rotate(self, x: Tensor, rotation: Any) -> Tensor:
        return super().rotate(x, rotation).bfloat16().float()


_KEY_DIMS = (2, 8, 16, 24, 40, 64, 80, 96, 128, 130)  # int8 takes fours


@st.composite
def cases(draw: Callable[[Any], Any]) -> Case:
    dtype = draw(st.sampled_from((*DTYPES, torch.int8)))
    key_dim = draw(st.sampled_from(_KEY_DIMS if dtype != torch.int8 else _KEY_DIMS[1:-1]))
    half = draw(st.none() | st.integers(1, key_dim // 2))
    sharing = draw(st.sampled_from((1, 1, 2, 3, 4, 5, 7, 9, 12, 13, 16, 25)))
    request = st.tuples(st.integers(0, 150), st.sampled_from((1, 1, 1, 2, 3, 5, 13, 40)))
    return Case(
        requests=tuple(draw(st.lists(request, min_size=1, max_size=4))),
        kv_heads=draw(st.integers(1, 3)),
        queries_per_kv_head=sharing,
        key_dim=key_dim,
        value_dim=draw(st.just(key_dim) | st.sampled_from((1, 3, 8, 17, 48, 64, 100))),
        block_size=draw(st.sampled_from((16, 32, 48))),
        shared_blocks=draw(st.integers(0, 4)),
        dtype=dtype,
        scale=draw(st.sampled_from((key_dim**-0.5, 0.05, 1.0))),
        window=draw(st.none() | st.integers(1, 100)),
        diagonal=draw(st.booleans()),
        softcap=draw(st.none() | st.sampled_from((0.5, 5.0, 50.0))),
        key_rotary=None if half is None else rotary(half),
        seed=draw(seeds),
    )


@given(case=cases())
@settings(checked, max_examples=100)
def test_attention(build: Build, case: Case) -> None:
    check_attention(build, case)


@pytest.mark.parametrize("dtype", (*DTYPES, torch.int8))
@pytest.mark.parametrize(
    "case",
    [
        Case(requests=()),
        Case(requests=((0, 300),)),
        Case(requests=((0, 300),), window=33, queries_per_kv_head=4),
        Case(requests=((0, 30), (0, 1), (5, 1)), diagonal=False),
        Case(requests=((304, 1), (303, 1), (16, 1), (256, 1), (250, 20)), diagonal=False, window=1),
        Case(requests=((700, 1), (0, 300), (15, 1), (16, 1), (17, 30), (0, 1)), shared_blocks=2, key_dim=64),
        Case(requests=((200, 1),) * 9, queries_per_kv_head=1, kv_heads=8, window=64, block_size=64, shared_blocks=3),
        Case(requests=((90, 5),), key_dim=512, value_dim=512, scale=512**-0.5, kv_heads=1, queries_per_kv_head=16),
        Case(requests=((90, 5),), key_dim=576, value_dim=1100, scale=576**-0.5, kv_heads=1),
    ],
    ids=(
        "no request",
        "300 rows",
        "300 rows, window",
        "no diagonal",
        "sees nothing",
        "ragged",
        "windows",
        "head size 512",
        "head size 1100",
    ),
)
def test_attention_at_the_edges(build: Build, case: Case, dtype: torch.dtype) -> None:
    check_attention(build, replace(case, dtype=dtype))


@given(half=st.integers(1, 12), seed=seeds)
@checked
def test_keys_rotated_when_written_or_when_read_are_the_same(build: Build, half: int, seed: int) -> None:
    case = Case(requests=((0, 50),), seed=seed)
    scene, generator = Scene(case, build.ops), torch.Generator().manual_seed(seed)
    batch, embedding = scene.step(), rotary(half)
    k, v = view(generator, 50, case.kv_heads, case.key_dim), view(generator, 50, case.kv_heads, case.value_dim)
    answers = []
    for written, read in ((embedding(batch.positions), None), (None, embedding)):
        build.ops.write_kv(k, v, scene.memories[0], batch, written)
        answers.append(build.ops.attend(scene.q, scene.memories[0], batch, scale=case.scale, key_rotary=read))
    reference.write_kv(k, v, scene.memories[1], batch, embedding(batch.positions))
    expected = reference.attend(scene.q, scene.memories[1], batch, scale=case.scale).double()
    for answer in answers:
        assert_close(answer, expected, 1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv_rounds_to_nearest_and_touches_no_other_page(build: Build, dtype: torch.dtype) -> None:
    case = Case(requests=((0, 37), (0, 1)), key_dim=2, value_dim=5, dtype=dtype)
    scene = Scene(case, build.ops)
    memory, judged = scene.memories
    pages = scene.table.flatten().tolist()
    for ours, theirs in ((memory.k, judged.k), (memory.v, judged.v)):
        for page in range(scene.num_pages):
            if page not in pages or page == 0:
                assert ours[page].isnan().all()
            else:  # the order inside a block is the set's own
                values = ours[page].float().flatten()
                expected = theirs[page][~theirs[page].isnan()]
                assert torch.equal(values[~values.isnan() & (values != 0)].sort().values, expected.sort().values)
    arena = memory.k.as_strided((scene.num_pages, memory.k.stride(0)), (memory.k.stride(0), 1), 0)
    assert arena[:, :2].isnan().all() and arena[:, -6:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("sharing", [1, 4, 16])
def test_attention_does_not_depend_on_the_batch_or_the_threads(
    build: Build, sharing: int, window: int | None, dtype: torch.dtype
) -> None:
    requests = ((70, 30), (0, 40), (99, 1))
    scene = Scene(Case(requests=requests, queries_per_kv_head=sharing, window=window, dtype=dtype), build.ops)
    whole = build.ops.attend(scene.q, scene.memories[0], scene.step(), scale=0.3, window=window)
    positions = [(s, computed + i) for s, (computed, new) in enumerate(requests) for i in range(new)]
    for threads in (1, 2, 3):
        ops = CpuOps(num_threads=threads, flags=build.flags)

        def attend(first: int, spans: list[tuple[int, int, int]], ops: CpuOps = ops) -> tuple[Tensor, Tensor]:
            batch = scene.batch(spans)
            part = slice(first, first + batch.token_ids.shape[0])
            return ops.attend(scene.q[part], scene.memories[0], batch, scale=0.3, window=window), whole[part]

        assert torch.equal(*attend(0, [(0, 70, 100), (1, 0, 40), (2, 99, 100)]))
        assert torch.equal(*attend(7, [(0, 77, 100), (1, 0, 11)]))
        for row, (s, position) in enumerate(positions):
            assert torch.equal(*attend(row, [(s, position, position + 1)]))


# --- Threads --------------------------------------------------------------------------------------------------------


@pytest.fixture
def native(builds: dict[str, Build]) -> Iterator[Build]:
    yield builds["native"]


@pytest.mark.parametrize("engines", [1, 2])
def test_two_callers_at_once(native: Build, engines: int) -> None:
    """Each with an engine of its own, or both with the same one."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(16, 64, generator=generator), torch.randn(300, 64, generator=generator)
    sets = [CpuOps(num_threads=3) for _ in range(engines)]
    packed = native.ops.pack(weight)
    expected = native.ops.linear(x, packed)

    def work(caller: int) -> int:
        return sum(torch.equal(sets[caller % engines].linear(x, packed), expected) for _ in range(400))

    with ThreadPoolExecutor(2) as callers:
        assert list(callers.map(work, range(2))) == [400, 400]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_a_set_takes_its_threads_along_when_it_goes(native: Build) -> None:
    """In a process of its own, where nobody else starts threads."""
    script = """
import os, time, torch
from miniserve.ops.cpu import CpuOps

def count(): return len(os.listdir("/proc/self/task"))

x, weight = torch.ones(4, 32), torch.ones(320, 32)
before = count()
for _ in range(30):
    ops = CpuOps(num_threads=4)
    assert ops.linear(x, ops.pack(weight))[3, 319] == 32
    assert count() == before + 3
    del ops
    deadline = time.monotonic() + 10
    while count() > before:
        assert time.monotonic() < deadline, "threads stay behind"
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_an_idle_pool_sleeps(native: Build) -> None:
    ops = CpuOps(num_threads=4)
    packed = ops.pack(torch.ones(3200, 32))
    for _ in range(20):
        ops.linear(torch.ones(4, 32), packed)
    used = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - used < 0.1
