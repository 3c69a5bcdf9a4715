"""The `cuda` set, held without a GPU: stand-ins with the kernels' own signatures check every argument as strictly as
the kernels do, compute in plain torch, and must give the goldens. With a GPU the same tests run on it as well, with
the stand-ins and with the kernels that are installed.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from miniserve import Engine, SamplingParams
from miniserve.batch import ForwardBatch
from miniserve.errors import ConfigError
from miniserve.kvcache.layout import KVGeometry, KVLayout
from miniserve.kvcache.pool import KVPool
from miniserve.kvcache.sharing import KVSharing
from miniserve.ops import RotaryEmbedding, load_ops
from miniserve.ops.cuda import CudaOps, PagedKernel, flash_attn_kernel, pad_decode, varlen_attn_kernel
from miniserve.ops.reference import ReferenceOps

GOLDENS = Path(__file__).parents[1] / "data/goldens"
NAMES = ("gemma4-e2b", "hunyuan-cla2", "lckv-mixattn", "lckv-yoco", "llama-bias", "mlkv-neox-2x1")
LIMIT = 1e-3
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPT_ROWS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
GPU = torch.cuda.is_available()


# ---------------------------------------------------------------- stand-ins


@dataclass(frozen=True)
class Call:
    """What a stand-in was called with, as far as a CUDA graph would bake it in, and the longest keys there were."""

    storage: int  # of k and of v: where the memory begins
    num_rows: int
    num_requests: int
    table_width: int
    max_seqlen_q: int
    max_seqlen_k: int
    longest: int


class StandIns:
    """Both kernels' functions, under their own signatures. `calls` is what they were called with."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def flash_attn_varlen_func(
        self,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
    ):
        assert (dropout_p, alibi_slopes, deterministic, return_attn_probs) == (0.0, None, False, False)
        assert causal is True and window_size[1] == (-1 if window_size[0] == -1 else 0)
        assert type(softcap) is float and softcap >= 0
        check_offsets(cu_seqlens_k, cu_seqlens_q.shape[0], q.device, shortest=0)  # a first token may see nothing
        lengths_k = cu_seqlens_k.diff()
        self._check(q, k, v, cu_seqlens_q, lengths_k, max_seqlen_q, max_seqlen_k, softmax_scale, block_table)
        left = check_window(window_size)
        return compute(q, k, v, cu_seqlens_q, lengths_k, block_table, softmax_scale, left, softcap)

    def varlen_attn(
        self,
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        *,
        return_aux=None,
        scale=None,
        window_size=(-1, -1),
        enable_gqa=False,
        seqused_k=None,
        block_table=None,
        num_splits=None,
    ):
        assert return_aux is None and num_splits is None
        assert enable_gqa is (query.shape[1] != key.shape[2])
        assert window_size[1] == 0 or (max_q == 1 and window_size == (-1, -1))
        check_offsets(cu_seq_k, cu_seq_q.shape[0], query.device, shortest=0)
        assert torch.equal(cu_seq_k.diff(), seqused_k)
        self._check(query, key, value, cu_seq_q, seqused_k, max_q, max_k, scale, block_table)
        return compute(query, key, value, cu_seq_q, seqused_k, block_table, scale, check_window(window_size), 0.0)

    def _check(self, q, k, v, cu_seqlens_q, seqused_k, max_seqlen_q, max_seqlen_k, scale, block_table) -> None:
        """What the C++ behind both functions checks, and what it relies on unchecked."""
        assert q.dtype == k.dtype == v.dtype
        assert q.device == k.device == v.device == block_table.device
        assert type(max_seqlen_q) is int and type(max_seqlen_k) is int and type(scale) is float
        num_rows, num_heads, head_dim = q.shape
        num_pages, page_size, kv_heads, _ = k.shape
        assert k.shape == v.shape == (num_pages, page_size, kv_heads, head_dim)
        assert head_dim % 8 == 0 and head_dim <= 256 and page_size % 256 == 0 and num_heads % kv_heads == 0
        for tensor in (q, k, v):  # vectors of 16 bytes, whatever the outer strides
            assert tensor.stride(-1) == 1 and tensor.storage_offset() % 8 == 0
            assert all(stride % 8 == 0 for stride in tensor.stride()[:-1])

        check_offsets(cu_seqlens_q, seqused_k.shape[0] + 1, q.device)
        lengths_q = cu_seqlens_q.diff()
        assert cu_seqlens_q[-1] == num_rows and lengths_q.max() == max_seqlen_q and lengths_q.min() > 0
        assert seqused_k.dtype == torch.int32 and seqused_k.is_contiguous() and seqused_k.device == q.device
        assert (seqused_k >= lengths_q - 1).all() and seqused_k.max() <= max_seqlen_k

        assert block_table.dtype == torch.int32 and block_table.stride(-1) == 1
        assert block_table.shape[0] == seqused_k.shape[0] and block_table.shape[1] * page_size >= seqused_k.max()
        assert block_table.min() >= 0 and block_table.max() < num_pages
        storages = {tensor.untyped_storage().data_ptr() for tensor in (k, v)}
        shape = (num_rows, *block_table.shape, max_seqlen_q, max_seqlen_k)
        self.calls.append(Call(storages.pop(), *shape, longest=int(seqused_k.max())))
        assert not storages


def check_offsets(offsets: Tensor, length: int, device: torch.device, shortest: int = 1) -> None:
    assert offsets.dtype == torch.int32 and offsets.is_contiguous() and offsets.shape == (length,)
    assert offsets.device == device and length > 1 and offsets[0] == 0 and (offsets.diff() >= shortest).all()


def check_window(window_size: tuple[int, int]) -> int | None:
    """Keys to the left of the query's own, None for all."""
    assert type(window_size) is tuple and len(window_size) == 2 and all(type(side) is int for side in window_size)
    assert window_size[0] >= -1
    return None if window_size[0] == -1 else window_size[0]


def compute(q, k, v, cu_seqlens_q, seqused_k, block_table, scale, left, softcap) -> Tensor:
    """Attention aligned bottom-right. Like the kernel it reads whole pages from the first one in the window to the end
    of the keys, and multiplies what is masked by 0: NaN in there would show.
    """
    page_size, outputs = k.shape[1], []
    for request, stop in enumerate(seqused_k.tolist()):
        queries = q[cu_seqlens_q[request] : cu_seqlens_q[request + 1]].float()
        rows = torch.arange(stop - len(queries), stop, device=q.device)[:, None]
        first_page = 0 if left is None else max(0, stop - len(queries) - left) // page_size
        pages = block_table[request, first_page : -(-stop // page_size)].long()
        keys, values = (
            memory[pages].flatten(0, 1)[: stop - first_page * page_size].float().repeat_interleave(repeats, dim=1)
            for memory in (k, v)
            for repeats in [q.shape[1] // k.shape[2]]
        )
        positions = torch.arange(first_page * page_size, stop, device=q.device)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        hidden = (positions > rows) if left is None else (positions > rows) | (positions < rows - left)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        weights = weights.masked_fill(hidden.all(-1, keepdim=True), 0)  # a query that sees nothing gets 0
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outputs).to(q.dtype)


# ---------------------------------------------------------------- what is tested, and where


@dataclass(frozen=True)
class Case:
    """A kernel on a device in a dtype."""

    name: str
    device: str
    dtype: torch.dtype
    tolerance: float  # of one attention
    kernel: Callable[[StandIns], PagedKernel]

    def __str__(self) -> str:
        return f"{self.name}-{self.device}-{str(self.dtype).removeprefix('torch.')}"

    @property
    def settings(self) -> dict[str, str]:
        return {"device": self.device, "dtype": str(self.dtype).removeprefix("torch.")}


def stand_in_cases(dtype: torch.dtype, tolerance: float) -> list[Case]:
    forms = {
        "flash": lambda stand_ins: flash_attn_kernel(stand_ins.flash_attn_varlen_func, (dtype,)),
        "varlen": lambda stand_ins: varlen_attn_kernel(stand_ins.varlen_attn, (dtype,)),
    }
    devices = ["cpu", "cuda"] if GPU else ["cpu"]
    return [Case(name, device, dtype, tolerance, form) for name, form in forms.items() for device in devices]


def installed_functions() -> dict[str, Callable]:
    """Of the real functions, those that can be imported here. Only a GPU can run them."""
    found = {}
    if find_spec("torch.nn.attention.varlen"):
        found["varlen_attn"] = import_module("torch.nn.attention.varlen").varlen_attn
    if find_spec("flash_attn"):
        found["flash_attn_varlen_func"] = import_module("flash_attn").flash_attn_varlen_func
    return found


def kernel_cases() -> list[Case]:
    """The real kernels."""
    makers = {"varlen_attn": varlen_attn_kernel, "flash_attn_varlen_func": flash_attn_kernel}
    return [
        Case(name, "cuda", torch.bfloat16, 5e-2, lambda _, make=makers[name], function=function: make(function))
        for name, function in installed_functions().items()
        if GPU
    ]


EXACT = stand_in_cases(torch.float32, 1e-5)
ROUNDED = stand_in_cases(torch.bfloat16, 5e-2) + kernel_cases()


@pytest.fixture
def stand_ins() -> StandIns:
    return StandIns()


@pytest.fixture
def start(monkeypatch, stand_ins) -> Callable[..., Engine]:
    """`start(case, golden)`: an engine with the case's kernel, its memory full of NaN."""

    def start(case: Case, golden: Golden, **settings) -> Engine:
        ops = CudaOps(case.kernel(stand_ins))
        monkeypatch.setattr("miniserve.engine.load_ops", lambda *args: ops)
        engine = Engine(golden.folder, kv_cache_memory="4MiB", max_num_batched_tokens=16, **case.settings, **settings)
        assert engine.ops is ops
        engine.kv_pool.arena.fill_(float("nan"))
        return engine

    return start


class Golden:
    """One golden's prompts, the logits of their rows and 24 greedy tokens, from the authors' code."""

    def __init__(self, name: str) -> None:
        self.folder = GOLDENS / name
        expected = load_file(self.folder / "expected.safetensors")
        self.prompts = [expected[f"input_ids.{i}"].tolist() for i in range(3)]
        self.logits = [expected[f"logits.{i}"] for i in range(3)]  # (T, V) each
        self.tokens = [expected[f"greedy_ids.{i}"].tolist() for i in range(3)]


@pytest.fixture(params=NAMES)
def golden(request) -> Golden:
    return Golden(request.param)


def greedy_tokens(engine: Engine, golden: Golden) -> list[list[int]]:
    """All prompts at once, in chunks, then decoding."""
    return [output.outputs[0].token_ids for output in engine.generate(golden.prompts, GREEDY)]


def prompt_logits(engine: Engine, prompt: list[int]) -> Tensor:
    """The logits rows of one prompt, (T, V)."""
    rows, logits = [], engine.model.logits
    engine.model.logits = lambda hidden: rows.append(logits(hidden)) or rows[-1]
    engine.generate([prompt], PROMPT_ROWS)
    engine.model.logits = logits
    return torch.cat(rows).cpu()


# ---------------------------------------------------------------- goldens through the engine


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_goldens(start, stand_ins, golden, case):
    engine = start(case, golden)
    for prompt, expected in zip(golden.prompts, golden.logits):
        assert (prompt_logits(engine, prompt) - expected).abs().max() <= LIMIT
    assert greedy_tokens(engine, golden) == golden.tokens
    assert {call.storage for call in stand_ins.calls} == {engine.kv_pool.arena.untyped_storage().data_ptr()}
    assert all(call.max_seqlen_k == call.longest for call in stand_ins.calls)
    assert {call.max_seqlen_q for call in stand_ins.calls} >= {1, 16}


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_layers_that_read_above_themselves(start, case):
    """Their queries see one key less; the first sees none. (Their prompts go token by token.)"""
    golden = Golden(GOLDENS / "lckv-w2")
    engine = start(case, golden)
    for prompt, expected in zip(golden.prompts, golden.logits):
        assert (prompt_logits(engine, prompt) - expected).abs().max() <= LIMIT
    assert greedy_tokens(engine, golden) == golden.tokens


@pytest.mark.parametrize("case", ROUNDED, ids=str)
def test_goldens_in_bfloat16(start, golden, case):
    """A smoke test, with the limits of the other kernel sets."""
    engine = start(case, golden)
    rows, expected = torch.cat([prompt_logits(engine, prompt) for prompt in golden.prompts]), torch.cat(golden.logits)
    assert (rows - expected).abs().mean() < 0.15
    assert (rows.argmax(-1) == expected.argmax(-1)).float().mean() >= 0.9


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_readers_write_nothing(start, golden, case):
    """Each step writes each group's memory once, by its owner, and attention leaves all memory as it was."""
    engine = start(case, golden)
    ops, pool, written = engine.ops, engine.kv_pool, []
    write_kv, attend, model = ops.write_kv, ops.attend, engine.model

    def spy_on_write(k, v, memory, batch, rotation):
        written.append(memory)
        write_kv(k, v, memory, batch, rotation)

    def spy_on_attend(q, memory, batch, **options):
        before = pool.arena.clone()
        out = attend(q, memory, batch, **options)
        assert torch.equal(pool.arena.nan_to_num(7.0), before.nan_to_num(7.0))
        return out

    def step(batch, kv_pool):
        written.clear()
        hidden = model(batch, kv_pool)
        owners = engine.layout.sharing.group_owners
        assert len(written) == len(owners)
        assert all(memory is pool.of_layer(owner) for memory, owner in zip(written, owners))
        return hidden

    ops.write_kv, ops.attend = spy_on_write, spy_on_attend
    step.logits = model.logits
    engine.model = step
    engine.generate(golden.prompts[:2], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))


# ---------------------------------------------------------------- one attention against the reference


@dataclass(frozen=True)
class Shape:
    """One attention: requests as (keys before this step, queries in it)."""

    requests: list[tuple[int, int]]
    kv_heads: int = 2
    ratio: int = 2
    head_dim: int = 16
    window: int | None = None
    diagonal: bool = True
    softcap: float | None = None
    block_size: int = 256


def build(shape: Shape, dtype: torch.dtype, device: str, seed: int = 0) -> tuple[Tensor, KVPool, ForwardBatch]:
    """Queries, a pool of two groups, and a batch. Layer 1's memory holds the requests' keys and values; all else, the
    pages that the window has passed included, is NaN. Page 0 is nobody's.
    """
    stops = [before + count for before, count in shape.requests]
    layout = KVLayout.build(
        KVSharing.none(2),
        [KVGeometry(shape.kv_heads, shape.head_dim)] * 2,
        itemsize=dtype.itemsize,
        block_size=shape.block_size,
        max_model_len=1024,
        block_size_multiple=CudaOps.block_size_multiple,
    )
    size, width = layout.classes[0].block_size, max(layout.classes[0].blocks_for(stop) for stop in stops)
    pool = KVPool(layout, 1 + width * len(stops), dtype=dtype, device=torch.device(device))
    pool.arena.fill_(float("nan"))
    generator = torch.Generator().manual_seed(seed)
    pages = (torch.randperm(width * len(stops), generator=generator) + 1).view(len(stops), width)  # (S, width)
    rows = [torch.arange(before, stop) for (before, _), stop in zip(shape.requests, stops)]
    batch = ForwardBatch(
        token_ids=torch.zeros(sum(map(len, rows)), dtype=torch.int64),
        positions=torch.cat(rows),
        cu_seqlens_q=F.pad(torch.tensor([len(r) for r in rows]).cumsum(0), (1, 0)).int(),
        max_seqlen_q=max(map(len, rows)),
        seqused_k=torch.tensor(stops, dtype=torch.int32),
        max_seqlen_k=max(stops),
        block_tables=(pages.int(),),
        slot_mapping=(torch.cat([table[r // size] * size + r % size for table, r in zip(pages, rows)]),),
    )
    shapes = ((len(batch.positions), shape.kv_heads * shape.ratio), *[(sum(stops), shape.kv_heads)] * 2)
    q, k, v = (torch.randn(*s, shape.head_dim, generator=generator).to(dtype) for s in shapes)
    everything = [torch.arange(stop) for stop in stops]
    slots = torch.cat([table[r // size] * size + r % size for table, r in zip(pages, everything)])
    CudaOps(PagedKernel("none", lambda *_: q, softcap=False)).write_kv(
        *(k.to(device), v.to(device)), pool.of_layer(1), replace(batch, slot_mapping=(slots.to(device),)), None
    )
    if shape.window is not None:
        for table, (before, _) in zip(batch.block_tables[0], shape.requests):
            passed = max(0, before - shape.window + 1) // size
            pool.arena[table[:passed].long()] = float("nan")
            table[:passed] = 0
    return q.to(device), pool, on_device(batch, device)


def on_device(batch: ForwardBatch, device: str) -> ForwardBatch:
    def move(value):
        if isinstance(value, tuple):
            return tuple(map(move, value))
        return value.to(device) if isinstance(value, Tensor) else value

    return ForwardBatch(**{name: move(value) for name, value in vars(batch).items()})


def shapes() -> st.SearchStrategy[Shape]:
    chunk, decoding = (st.tuples(st.integers(0, 600), count) for count in (st.integers(1, 9), st.just(1)))
    return st.builds(
        Shape,
        requests=st.lists(chunk, min_size=1, max_size=4) | st.lists(decoding, min_size=1, max_size=4),
        kv_heads=st.integers(1, 3),
        ratio=st.integers(1, 3),
        head_dim=st.sampled_from([8, 24, 64, 256]),
        window=st.none() | st.sampled_from([1, 2, 200, 256, 257]),
        diagonal=st.booleans(),
        softcap=st.sampled_from([None, 3.0]),
        block_size=st.sampled_from([1, 256, 300]),
    )


@pytest.mark.parametrize("case", EXACT + ROUNDED, ids=str)
@settings(max_examples=20, deadline=None)
@given(shape=shapes(), seed=st.integers(0, 100))
def test_attention_is_the_references(case, shape, seed):
    stand_ins = StandIns()
    ops = CudaOps(case.kernel(stand_ins))
    q, pool, batch = build(shape, case.dtype, case.device, seed)
    options = {name: getattr(shape, name) for name in ("window", "diagonal", "softcap")}
    options["scale"] = 1.5 * shape.head_dim**-0.5
    out = ops.attend(q, pool.of_layer(1), batch, **options)
    expected = ReferenceOps().attend(q, pool.of_layer(1), batch, **options)
    assert out.shape == expected.shape and out.dtype == expected.dtype
    assert (out.float() - expected.float()).abs().max() <= case.tolerance


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_no_rows_no_call(case, stand_ins):
    """Behind the cut of a step that samples nothing."""
    q, pool, batch = build(Shape([(3, 1)]), case.dtype, case.device)
    empty = replace(batch, token_ids=batch.token_ids[:0], block_tables=(batch.block_tables[0][:0],))
    out = CudaOps(case.kernel(stand_ins)).attend(q[:0], pool.of_layer(1), empty, scale=1.0)
    assert out.shape == (0, 4, 16) and not stand_ins.calls


@pytest.mark.parametrize("shape", [(5, 64), (5, 3, 16)])
@pytest.mark.parametrize("case", EXACT, ids=str)
def test_rms_norm_is_the_references(case, shape):
    x, weight = torch.randn(shape, device=case.device), torch.randn(shape[-1], device=case.device)
    norms = [ops.rms_norm(x, weight, 1e-5) for ops in (CudaOps(case.kernel(StandIns())), ReferenceOps())]
    torch.testing.assert_close(*norms)


# ---------------------------------------------------------------- what the kernels lack

HALF = torch.bfloat16
LACKING = [
    # what a call needs beyond (bfloat16, head size 64), which kernels do it, and what they say otherwise
    ({}, "flash varlen", None),
    ({"q": torch.float16, "k": torch.float16}, "flash varlen", None),
    ({"head_dim": 8}, "flash varlen", None),
    ({"head_dim": 256}, "flash varlen", None),
    ({"softcap": 50.0}, "flash", "soft cap"),
    ({"q": torch.float32, "k": torch.float32}, "", "float32"),
    ({"q": torch.float32}, "", "queries in torch.float32 on keys in torch.bfloat16"),
    ({"k": torch.float16}, "", "queries in torch.bfloat16 on keys in torch.float16"),
    ({"head_dim": 20}, "", "head size of 20"),
    ({"head_dim": 264}, "", "head size of 264"),
    ({"head_dim": 512}, "", "head size of 512"),
    ({"value_dim": 32}, "", "keys of 64 and values of 32"),
    ({"rotates_keys": True}, "", "rotated"),
]


@pytest.mark.parametrize("form", ["flash", "varlen"])
@pytest.mark.parametrize("needs, done_by, message", LACKING, ids=[str(needs) for needs, _, _ in LACKING])
def test_what_a_kernel_lacks(form, needs, done_by, message):
    kernel = {"flash": flash_attn_kernel, "varlen": varlen_attn_kernel}[form](lambda: None)
    head_dim = needs.get("head_dim", 64)
    q = torch.empty(1, 2, head_dim, dtype=needs.get("q", HALF), device="meta")
    geometry = KVGeometry(2, head_dim, needs.get("value_dim"))
    layout = KVLayout.build(KVSharing.none(1), [geometry], itemsize=2, block_size=256, max_model_len=256)
    memory = KVPool(layout, 1, dtype=needs.get("k", HALF), device=torch.device("meta")).of_layer(0)
    reason = kernel.lacks(q, memory, needs.get("softcap"), needs.get("rotates_keys", False))
    if form in done_by:
        assert reason is None
    else:
        assert message in reason


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_what_is_lacking_is_computed_by_the_reference(case):
    def never(*args, **kwargs):
        raise AssertionError("the kernel was called")

    q, pool, batch = build(Shape([(300, 2), (5, 1)]), case.dtype, case.device)
    rotary = RotaryEmbedding(torch.tensor([1.0, 0.1], device=case.device))
    options = {"scale": 0.3, "window": 4, "softcap": 2.0, "key_rotary": rotary}
    ops = CudaOps(flash_attn_kernel(never, (case.dtype,)))
    outputs = [o.attend(q, pool.of_layer(1), batch, **options) for o in (ops, ReferenceOps())]
    assert torch.equal(*outputs)


# ---------------------------------------------------------------- ready for CUDA graphs


@pytest.mark.parametrize("make", [flash_attn_kernel, varlen_attn_kernel])
@pytest.mark.parametrize("window", [None, 100])
def test_no_operation_asks_the_gpu_for_a_number(make, window):
    """Tensors of the meta device have no elements: whoever needs one fails."""
    ops = CudaOps(make(lambda q, k, v, **options: q.new_empty(q.shape)))
    q, pool, batch = build(Shape([(300, 1), (5, 1)]), HALF, "cpu")
    layout, batch = pool.layout, on_device(batch, "meta")
    memory = KVPool(layout, 4, dtype=HALF, device=torch.device("meta")).of_layer(1)
    batch = replace(batch, kept=batch.positions, behind_cut=batch)
    batch = pad_decode(batch, layout, 8, 1024)
    rotation = RotaryEmbedding(torch.empty(8, device="meta"))(batch.positions)
    weight = torch.empty(64, 64, dtype=HALF, device="meta")
    packed, gated = ops.pack(weight, weight[0]), ops.pack_gated(weight)

    x = ops.rms_norm(ops.embed(batch.token_ids, weight), weight[0], 1e-5)
    q = ops.rotate(ops.linear(x, packed).unflatten(-1, (4, 16)), rotation)  # (T, Hq, D)
    ops.write_kv(q[:, :2], q[:, 2:], memory, batch, rotation)
    behind_cut, (q, x) = batch.cut(q, x)
    x = ops.linear(ops.attend(q, memory, behind_cut, scale=0.25, window=window).flatten(1), packed, residual=x)
    x = x + F.pad(ops.gated_linear(x, gated, "silu"), (0, 32)) + ops.activated_linear(x, packed, "gelu")
    assert ops.argmax(ops.head(ops.layer_norm(x, weight[0], weight[0], 1e-5), packed)).shape == (8,)


BUCKET = (8, 256)  # requests, keys


class PaddedModel:
    """A model whose decode steps are padded to one bucket, as an engine with CUDA graphs would run it."""

    def __init__(self, engine: Engine) -> None:
        self.model, self.layout, self.logits = engine.model, engine.layout, engine.model.logits
        self.num_decode_steps = 0

    def __call__(self, batch: ForwardBatch, kv_pool: KVPool) -> Tensor:
        if batch.max_seqlen_q > 1:
            return self.model(batch, kv_pool)
        self.num_decode_steps += 1
        return self.model(pad_decode(batch, self.layout, *BUCKET), kv_pool)[: batch.token_ids.shape[0]]


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_padded_decode_steps_have_one_shape_and_give_the_goldens(start, stand_ins, golden, case):
    engine = start(case, golden)
    engine.model = model = PaddedModel(engine)
    assert greedy_tokens(engine, golden) == golden.tokens
    decoding = [replace(call, longest=0) for call in stand_ins.calls if call.max_seqlen_q == 1 and call.num_rows > 3]
    assert model.num_decode_steps >= 20 and len(decoding) >= model.num_decode_steps
    assert {(call.num_rows, call.num_requests, call.max_seqlen_k) for call in decoding} == {(8, *BUCKET)}
    assert len({call.table_width for call in decoding}) == 1


def test_padding_repeats_the_last_request():
    _, pool, batch = build(Shape([(300, 1), (5, 1)]), torch.float32, "cpu")
    padded = pad_decode(replace(batch, kept=torch.arange(2), behind_cut=batch), pool.layout, 4, 1024)
    assert padded.positions.tolist() == [300, 5, 5, 5] and padded.seqused_k.tolist() == [301, 6, 6, 6]
    assert padded.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4] and padded.cu_seqlens_q.dtype == torch.int32
    assert padded.block_tables[0].shape == (4, 4) and padded.block_tables[0].dtype == torch.int32
    assert torch.equal(padded.block_tables[0][1], padded.block_tables[0][3])
    assert padded.slot_mapping[0].tolist()[1:] == padded.slot_mapping[0].tolist()[1:2] * 3
    behind_cut, (rows,) = padded.cut(padded.positions)
    assert rows.tolist() == padded.positions.tolist() and behind_cut.kept is None


@pytest.mark.parametrize(
    "requests, kept, bucket, message",
    [
        ([(3, 2)], 2, (4, 256), "only a step in which"),
        ([(3, 1), (4, 1)], 1, (4, 256), "only a step in which"),
        ([(3, 1)] * 5, 5, (4, 256), "exceed the bucket of 4 x 256"),
        ([(300, 1)], 1, (4, 256), "1 requests of up to 301 keys exceed"),
    ],
)
def test_what_cannot_be_padded(requests, kept, bucket, message):
    _, pool, batch = build(Shape(requests), torch.float32, "cpu")
    with pytest.raises(ValueError, match=message):
        pad_decode(replace(batch, kept=torch.arange(kept), behind_cut=batch), pool.layout, *bucket)


# ---------------------------------------------------------------- drift, and the choice


@pytest.mark.parametrize("name, function", installed_functions().items())
def test_stand_ins_have_the_real_signature(name, function):
    def parameters(function: Callable) -> list[tuple]:
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    assert parameters(getattr(StandIns(), name)) == parameters(function)


CUDA = torch.device("cuda", 0)


@pytest.fixture
def pretend_gpu(monkeypatch) -> Callable[[tuple[int, int]], None]:
    def pretend(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.version, "hip", None)

    return pretend


def module(name: str, **members) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(members)
    return made


def varlen_before_paging(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k): ...


FLASH = module("flash_attn", flash_attn_varlen_func=StandIns().flash_attn_varlen_func)
PAGED = module("torch.nn.attention.varlen", varlen_attn=StandIns().varlen_attn)
UNPAGED = module("torch.nn.attention.varlen", varlen_attn=varlen_before_paging)


@pytest.mark.parametrize(
    "flash_attn, varlen, chosen",
    [
        (FLASH, PAGED, "flash-attn"),
        (FLASH, None, "flash-attn"),
        (None, PAGED, "torch varlen_attn"),
        (module("flash_attn"), PAGED, "torch varlen_attn"),  # only FlashAttention 4 is installed under this name
        (None, UNPAGED, None),
        (None, None, None),
    ],
)
def test_the_best_kernel_is_taken(monkeypatch, pretend_gpu, flash_attn, varlen, chosen):
    pretend_gpu((9, 0))
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", varlen)
    if chosen is None:
        for make in (CudaOps, lambda: load_ops("cuda", CUDA)):
            with pytest.raises(ConfigError, match=r"neither flash-attn nor .* install torch>=2.12"):
                make()
        assert type(load_ops("auto", CUDA)) is ReferenceOps
    else:
        for name in ("auto", "cuda"):
            ops = load_ops(name, CUDA)
            assert type(ops) is CudaOps and ops.attention_kernel == chosen


def test_an_old_gpu(pretend_gpu, caplog):
    pretend_gpu((7, 5))
    with pytest.raises(ConfigError, match=r"ops='cuda': .* capability 8.0 \(Ampere\), cuda:0 has 7.5; use ops='ref"):
        load_ops("cuda", CUDA)
    assert type(load_ops("auto", CUDA)) is ReferenceOps
    assert "slower reference kernels are used, not the cuda set" in caplog.text


def test_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"torch finds no NVIDIA GPU; install"):
        load_ops("cuda", CUDA)


def test_not_on_a_cpu():
    with pytest.raises(ConfigError, match=r"ops='cuda': it runs on a CUDA device, not on cpu; use device='cuda'"):
        Engine(GOLDENS / "lckv-cla2", device="cpu", ops="cuda")
