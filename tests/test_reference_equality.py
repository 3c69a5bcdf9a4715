"""Any sharing map, served any way, equals the cache-less reference.

Hypothesis draws models (1 to 12 layers, random owners, windows, heads, block sizes) and prompts. Each is served alone,
batched, in chunks, with prefix hits, after preemptions and beside requests for prompt logprobs; every logits row that
the engine computes on any of these ways must be the reference's, and every greedy token. The second half watches the
kernels: readers never write, nothing written is ever changed, and behind the cut only rows that are sampled run.
"""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import reference
import torch
from checkpoints import write_llama
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from miniserve import Engine, SamplingParams
from miniserve.ops.reference import ReferenceOps

LIMIT = 1e-3
NUM_TOKENS = 6
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
GREEDY_WITH_PROMPT = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, prompt_logprobs=0)


@dataclass(frozen=True)
class Model:
    """A random model and what it is to be served with."""

    reads: tuple[int, ...]
    windows: tuple[int | None, ...]
    heads: int
    kv_heads: int
    head_dim: int
    seed: int
    ops: str  # kernel set
    block_size: int
    budget: int  # tokens a step, where prompts are computed in chunks
    prompts: tuple[tuple[int, ...], ...]

    def write(self, folder: Path) -> Path:
        shape = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim, "seed": self.seed}
        return write_llama(folder, num_layers=len(self.reads), reads=self.reads, windows=self.windows, **shape)

    def engine(self, folder: Path, budget: int = 4096, **settings) -> Engine:
        usual = {"ops": self.ops, "block_size": self.block_size, "kv_cache_memory": "2MiB", "max_model_len": 128}
        return Engine(folder, dtype="float32", max_num_batched_tokens=budget, **usual | settings)


@st.composite
def maps(draw) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
    """Who reads whom, and how far each layer sees."""
    reads: list[int] = []
    for layer in range(draw(st.integers(1, 12))):
        owners = sorted(set(reads))
        reads.append(draw(st.sampled_from([layer, *owners])))
    if draw(st.integers(0, 3)) == 0:  # LCKV: layers that nobody reads may read an owner above them
        owner = draw(st.sampled_from(sorted(set(reads))))
        lower = [layer for layer in range(owner) if layer not in reads]
        for layer in draw(st.lists(st.sampled_from(lower))) if lower else ():
            reads[layer] = owner
    window = st.sampled_from([None, None, 1, 2, 3, 5, 8, 13, 30])
    return tuple(reads), tuple(draw(window) if read <= layer else None for layer, read in enumerate(reads))


@st.composite
def models(draw) -> Model:
    reads, windows = draw(maps())
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    lengths = draw(st.lists(st.integers(1, 40), min_size=2, max_size=3))
    token = st.integers(0, draw(st.sampled_from([2, 95])))  # few kinds of tokens: many blocks of equal content
    return Model(
        reads=reads,
        windows=windows,
        heads=kv_heads * draw(st.sampled_from([1, 2, 3])),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 4, 6, 8, 10, 16])),
        seed=draw(st.integers(0, 1000)),
        ops=draw(st.sampled_from(["reference", "auto"])),
        block_size=draw(st.sampled_from([1, 2, 3, 4, 7, 16])),
        budget=draw(st.sampled_from([1, 7, 16])),
        prompts=tuple(tuple(draw(st.lists(token, min_size=n, max_size=n))) for n in lengths),
    )


class Expectation:
    """What the reference says about a model's prompts."""

    def __init__(self, model: Model, folder: Path) -> None:
        self.prompts = [list(prompt) for prompt in model.prompts]
        self.tokens = [reference.greedy(folder, p, NUM_TOKENS) for p in self.prompts]
        self.rows: dict[tuple[int, ...], torch.Tensor] = {}
        judge = reference.load(folder)
        for prompt, tokens in zip(self.prompts, self.tokens):
            text = tuple(prompt + tokens)
            self.rows |= {text[: position + 1]: row for position, row in enumerate(judge(text))}

    @property
    def margin(self) -> float:
        """How clearly the closest greedy token won."""
        texts = [tuple(p + t[:n]) for p, t in zip(self.prompts, self.tokens) for n in range(NUM_TOKENS)]
        first, second = torch.stack([self.rows[text] for text in texts]).topk(2).values.T
        return (first - second).min().item()

    def check(self, outputs, seen) -> None:
        """The tokens are right, and so is every row of logits that was computed since the last check."""
        assert [output.outputs[0].token_ids for output in outputs] == self.tokens
        texts = [text for text, rows in seen.items() for _ in rows]
        computed = torch.stack([row for rows in seen.values() for row in rows])
        assert (computed - torch.stack([self.rows[text] for text in texts])).abs().max() <= LIMIT
        seen.clear()


# -------------------------------------------------------------------- any map, any way


examples = settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@examples
@given(model=models())
def test_any_map_served_any_way(serve, watch_logits, poison, model):
    with tempfile.TemporaryDirectory() as name:
        folder = model.write(Path(name))
        expected = Expectation(model, folder)
        assume(expected.margin > 1e-3)
        serve_whole(model, folder, expected, serve, watch_logits)
        serve_in_chunks(model, folder, expected, serve, watch_logits, poison)
        serve_with_preemptions(model, folder, expected, serve, watch_logits, poison)


@examples
@given(model=models(), spare=st.integers(0, 3), forget=st.booleans())
def test_any_map_in_a_pool_too_small(serve, watch_logits, poison, model, spare, forget):
    """The longest request fits alone, with few blocks to spare: the others wait, or give way and are computed anew."""
    with tempfile.TemporaryDirectory() as name:
        folder = model.write(Path(name))
        expected = Expectation(model, folder)
        assume(expected.margin > 1e-3)
        layout = model.engine(folder).layout
        pages = layout.blocks_for(max(map(len, expected.prompts)) + NUM_TOKENS) + spare
        engine = model.engine(folder, model.budget, kv_cache_memory=pages * layout.page_bytes)
        seen = watch_logits(engine)
        expected.check(serve(engine, expected.prompts, GREEDY_WITH_PROMPT, poison if forget else None), seen)
        engine.block_manager.check_integrity()
        assert engine.block_manager.num_used == 0


def serve_whole(model, folder, expected, serve, watch_logits) -> None:
    """One by one, cold; together, all from the prefix cache; together with and without prompt logprobs."""
    engine = model.engine(folder)
    seen = watch_logits(engine)
    expected.check([serve(engine, [prompt], GREEDY)[0] for prompt in expected.prompts], seen)
    warm = serve(engine, expected.prompts, GREEDY)
    expected.check(warm, seen)
    step = engine.layout.alignment
    assert all(out.num_cached_tokens >= (len(out.prompt_token_ids) - 1) // step * step for out in warm)
    both = [GREEDY_WITH_PROMPT, GREEDY, GREEDY_WITH_PROMPT][: len(expected.prompts)]
    expected.check(serve(engine, expected.prompts, both), seen)


def serve_in_chunks(model, folder, expected, serve, watch_logits, poison) -> None:
    """A budget smaller than the prompts; free pages are full of NaN; every prompt row is asked for."""
    engine = model.engine(folder, model.budget)
    seen = watch_logits(engine)
    outputs = serve(engine, expected.prompts, GREEDY_WITH_PROMPT, poison)
    assert all(tuple(prompt[:n]) in seen for prompt in expected.prompts for n in range(1, len(prompt) + 1))
    expected.check(outputs, seen)


def serve_with_preemptions(model, folder, expected, serve, watch_logits, poison) -> None:
    """Before every step someone else loses his blocks, and every other time the prefix cache is lost too. (Not so often
    if prompts go token by token: nobody would get to his end.)
    """
    pace = 60 if any(owner > layer for layer, owner in enumerate(model.reads)) else 1

    def preempt(engine: Engine, step: int) -> None:
        running, turn = engine.scheduler.running, step // pace
        if running and step % pace == 0:
            engine.scheduler.preempt(running[turn % len(running)])
        if turn % 2 and step % pace == 0:
            poison(engine)

    engine = model.engine(folder)
    seen = watch_logits(engine)
    expected.check(serve(engine, expected.prompts, GREEDY, preempt), seen)
    assert engine.scheduler.num_preemptions >= NUM_TOKENS - 1 or pace > 1


def test_a_chain_is_its_root(tmp_path, serve):
    """Layer 3 reads 2, which reads 1, which owns; a reader of a reader gets the owner's K/V."""
    folder = write_llama(tmp_path, num_layers=5)
    prompts = [list(range(20)), [7, 8, 9]]
    outputs = serve(Engine(folder, kv_sharing=[0, 1, 1, 2, 3], kv_cache_memory="1MiB"), prompts, GREEDY)
    expected = [reference.greedy(folder, prompt, NUM_TOKENS, reads=[0, 1, 1, 1, 1]) for prompt in prompts]
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_a_full_reader_of_a_windowed_owner_sees_the_first_token(tmp_path, watch_logits, serve):
    """The group keeps what its widest reader needs: other first tokens give other last rows, as in the reference."""
    folder = write_llama(tmp_path, reads=[0, 0, 0, 0], windows=[4, 4, None, 4])
    engine = Engine(folder, block_size=4, kv_cache_memory="1MiB")
    seen = watch_logits(engine)
    prompts = [[first, *range(30, 60)] for first in (1, 2)]
    serve(engine, prompts, GREEDY)
    last = [seen[tuple(prompt)][0] for prompt in prompts]
    for row, prompt in zip(last, prompts):
        assert (row - reference.logits(folder, prompt)[-1]).abs().max() <= LIMIT
    assert (last[0] - last[1]).abs().max() > 100 * LIMIT


@pytest.mark.parametrize("ops, block_size", [("reference", 4), ("auto", 16)])
def test_equal_blocks_behind_other_beginnings_are_no_prefix(tmp_path, serve, ops, block_size):
    """What a block holds depends on all text before it, and on the salt."""
    folder = write_llama(tmp_path, reads=[0, 0, 2, 2])
    engine = Engine(folder, ops=ops, block_size=block_size, kv_cache_memory="1MiB")
    block, common = block_size, list(range(2 * block_size))
    prompts = [[first] * block + common + [5] for first in (1, 2)] + [common + [5], common * 2 + [5]]
    cached = [0, 0, 0, 2 * block]
    for prompt, expected in zip(prompts, cached):
        (output,) = serve(engine, [prompt], GREEDY)
        assert output.outputs[0].token_ids == reference.greedy(folder, prompt, NUM_TOKENS)
        assert output.num_cached_tokens == expected
    (output,) = serve(engine, prompts[:1], replace(GREEDY, cache_salt="mine"))
    assert output.num_cached_tokens == 0


# -------------------------------------------------------------------- who writes, and which rows run

MAPS = {
    "llama": ([0, 1, 2, 3, 4, 5], None),
    "cla2": ([0, 0, 2, 2, 4, 4], None),
    "yoco": ([0, 1, 2, 2, 2, 2], [6, 6, None, None, None, None]),
    "mixed": ([0, 1, 1, 0, 4, 0], [None, 5, 5, 7, 5, None]),
}


@pytest.fixture(params=[(name, ops) for name in MAPS for ops in ("reference", "auto")], ids="-".join)
def kernels(request, tmp_path) -> Kernels:
    """An engine of six layers with somebody watching its kernels."""
    name, ops = request.param
    reads, windows = MAPS[name]
    write_llama(tmp_path, num_layers=6, reads=reads, windows=windows)
    settings = {"ops": ops, "block_size": 4, "max_num_batched_tokens": 16, "kv_cache_memory": "192KiB"}
    settings["enforce_eager"] = True  # a step that is replayed calls no kernel from Python
    return Kernels(Engine(tmp_path, **settings), reads)


class Kernels:
    """Stands between an engine and its kernel set: checks every write and keeps a record of the calls."""

    def __init__(self, engine: Engine, reads: list[int]) -> None:
        self.engine, self.reads, self.pool = engine, reads, engine.kv_pool
        self.owners = [layer for layer in range(6) if reads[layer] == layer]
        self.first_tokens = itertools.count()  # no prompt begins like another: none is found in the prefix cache
        self.clear()
        self.pool.arena.zero_()  # fresh memory may hold NaN, which equals nothing
        self.before = self.pool.arena.clone()
        for name in ("write_kv", "attend", "gated_linear"):
            setattr(self, f"real_{name}", getattr(engine.ops, name))
            setattr(engine.ops, name, getattr(self, name))

    def clear(self) -> None:
        """Begin a new record."""
        self.written: list = []  # the memory of each write_kv
        self.read: list = []  # the memory of each attend
        self.attend_rows: list[int] = []
        self.mlp_rows: list[int] = []

    def write_kv(self, k, v, memory, batch, rotation) -> None:
        """Only the slots of this step's own rows may change, and only this group's part of them. (How K and V lie
        in a block is a kernel set's own business: where it is not known, the whole block may change.)
        """
        self.check_memory()
        self.real_write_kv(k, v, memory, batch, rotation)
        after, slots = self.pool.arena.clone(), batch.slot_mapping[memory.retention_class]
        block, offset = slots // memory.block_size, slots % memory.block_size
        for part in (memory.k, memory.v):
            part[(block, offset) if isinstance(self.engine.ops, ReferenceOps) else block] = float("nan")
        untouched = ~self.pool.arena.isnan()
        assert torch.equal(after[untouched], self.before[untouched])
        self.before = after
        self.pool.arena.copy_(after)
        self.written.append(memory)

    def attend(self, q, memory, batch, **how):
        self.check_memory()
        out = self.real_attend(q, memory, batch, **how)
        self.check_memory()
        self.read.append(memory)
        self.attend_rows.append(len(q))
        return out

    def gated_linear(self, x, packed, activation, **how):
        self.check_memory()
        self.mlp_rows.append(len(x))
        return self.real_gated_linear(x, packed, activation, **how)

    def check_memory(self) -> None:
        """All memory is byte for byte what the last write left."""
        assert torch.equal(self.pool.arena, self.before)

    def check_calls(self) -> None:
        """In this step every owner wrote once, no reader did, and all layers attended to their owner's memory."""
        assert all(m is self.pool.of_layer(owner) for m, owner in zip(self.written, self.owners, strict=True))
        assert all(m is self.pool.of_layer(owner) for m, owner in zip(self.read, self.reads, strict=True))

    def rows(self, *requests: tuple[int, SamplingParams]) -> list[int]:
        """Add requests (prompt length, params), take a step: the rows that each layer computed."""
        for length, params in requests:
            self.engine.add_request(None, [next(self.first_tokens), *range(length - 1)], params)
        self.clear()
        self.engine.step()
        assert self.attend_rows == self.mlp_rows
        return self.attend_rows

    def cut(self, num_rows: int, num_kept: int) -> list[int]:
        """From the last owner's attention on, only the kept rows run."""
        return [num_rows if layer < self.owners[-1] else num_kept for layer in range(6)]

    def finish(self) -> None:
        while self.engine.has_unfinished_requests():
            self.engine.step()


def test_readers_never_write(kernels, serve):
    """Prefill, chunks and decoding: each step writes every owner's K/V once, and no reader changes a byte of it."""

    def check(engine: Engine, step: int) -> None:
        if step:
            kernels.check_calls()
        kernels.clear()

    prompts = [list(range(21)), [5], list(range(40, 50))]
    outputs = serve(kernels.engine, prompts, GREEDY, check)
    expected = [reference.greedy(Path(kernels.engine.config.model), prompt, NUM_TOKENS) for prompt in prompts]
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_behind_the_cut_only_sampled_rows_run(kernels):
    """For a plain Llama that is half of its last layer."""
    assert kernels.rows((9, GREEDY), (4, GREEDY)) == kernels.cut(13, 2)  # two whole prompts
    assert kernels.rows() == [2] * 6  # decoding
    kernels.finish()
    assert kernels.rows((25, GREEDY)) == kernels.cut(16, 0)  # a chunk in which nothing is sampled
    assert kernels.rows((3, GREEDY)) == kernels.cut(12, 2)  # the rest, and a newcomer
    assert kernels.rows((10, GREEDY)) == kernels.cut(12, 3)  # two decode, one comes


def test_prompt_logprobs_keep_their_rows(kernels):
    """In every chunk; their neighbours' rows are left at the cut."""
    assert kernels.rows((12, GREEDY_WITH_PROMPT)) == [12] * 6
    assert kernels.rows((9, GREEDY)) == kernels.cut(10, 2)  # its prompt is done
    kernels.finish()
    assert kernels.rows((7, GREEDY_WITH_PROMPT), (6, GREEDY)) == kernels.cut(13, 8)
    kernels.finish()
    assert kernels.rows((20, GREEDY_WITH_PROMPT)) == [16] * 6
    assert kernels.rows((5, GREEDY)) == kernels.cut(9, 5)
