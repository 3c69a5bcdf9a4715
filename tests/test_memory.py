"""The saving is real: bytes of tensors, tokens and requests that fit, for whole models and for mixed windows.

Nothing here trusts the engine's own report: bytes are those of the arena, tokens those of requests that were served or
held at once, and both are compared with closed forms written out in the test.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import count
from pathlib import Path
from random import Random

import pytest
import reference
import torch
from checkpoints import write_llama

from miniserve import Engine, SamplingParams
from miniserve.errors import RequestError
from miniserve.kvcache.block_manager import BlockManager
from miniserve.kvcache.layout import KVGeometry, KVLayout
from miniserve.kvcache.sharing import KVSharing
from miniserve.request import Request
from miniserve.scheduler.scheduler import Scheduler

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

# -------------------------------------------------------------------- bytes and tokens of a whole engine

BUDGET = 64 * 1024
HEADS, DIM, FLOAT32 = 2, 8, 4  # of every model below
LAYER_BYTES = 2 * HEADS * DIM * FLOAT32  # one layer's K and V of one token


def open_engine(folder: Path, num_layers: int, reads: list[int] | None, **settings) -> Engine:
    write_llama(folder, num_layers=num_layers, reads=reads, kv_heads=HEADS, head_dim=DIM)
    return Engine(folder, **{"kv_cache_memory": BUDGET, "block_size": 4, "ops": "reference"} | settings)


@pytest.fixture
def twins(tmp_path) -> tuple[Engine, Engine]:
    """Eight layers: without sharing, and CLA-2."""
    cla2 = [layer - layer % 2 for layer in range(8)]
    return open_engine(tmp_path / "unshared", 8, None), open_engine(tmp_path / "cla2", 8, cla2)


def test_cla2_has_twice_the_tokens_in_the_same_bytes(twins):
    unshared, cla2 = twins
    for engine, num_owners in ((unshared, 8), (cla2, 4)):
        arena = engine.kv_pool.arena
        assert arena.untyped_storage().nbytes() == engine.kv_pool.num_bytes == BUDGET
        report = engine.kv_report()
        assert report["kv_cache_bytes"] == BUDGET
        assert report["bytes_per_token"] == num_owners * LAYER_BYTES
        assert report["capacity_tokens"] == BUDGET // (num_owners * LAYER_BYTES)
    assert cla2.kv_report()["capacity_tokens"] == 2 * unshared.kv_report()["capacity_tokens"]


def test_cla2_holds_twice_the_requests_at_once(twins, serve):
    """Prompts of three blocks that end with their first token: as many run in a step as the blocks allow."""
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    most = []
    for engine in twins:
        running: list[int] = []
        prompts = [[first, *range(10)] for first in range(60)]
        serve(
            engine, prompts, params, lambda engine, step, running=running: running.append(len(engine.scheduler.running))
        )
        most.append(max(running))
    assert most == [BUDGET // (8 * LAYER_BYTES) // 12, BUDGET // (4 * LAYER_BYTES) // 12]


def test_cla2_serves_a_prompt_twice_as_long(twins):
    """The longest prompt that is accepted; one token more is refused with the numbers of blocks."""
    unshared, cla2 = twins
    longest = BUDGET // (8 * LAYER_BYTES)
    for engine, fits in ((unshared, longest), (cla2, 2 * longest)):
        prompt = [token % 96 for token in range(fits)]
        (output,) = engine.generate([prompt], GREEDY)
        assert output.outputs[0].finish_reason == "length"
        assert len(output.outputs[0].token_ids) == 1  # there is room for no other
        with pytest.raises(RequestError, match=f"needs {fits // 4 + 1} KV blocks .* the pool has {fits // 4}"):
            engine.generate([[*prompt, 0]], GREEDY)


@pytest.mark.parametrize("factor", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("dtype, itemsize", [("float32", 4), ("bfloat16", 2)])
def test_allocated_bytes_are_the_closed_form(tmp_path, factor, dtype, itemsize):
    """20 layers, each `factor` sharing: ceil(20 / factor) owners pay, to the byte; readers have no tensor."""
    reads = [layer - layer % factor for layer in range(20)]
    engine = open_engine(tmp_path, 20, reads, dtype=dtype, kv_cache_memory="1MB")
    num_owners = -(-20 // factor)
    token_bytes = num_owners * 2 * HEADS * DIM * itemsize
    num_pages = 1_000_000 // (4 * token_bytes)
    assert engine.kv_pool.arena.untyped_storage().nbytes() == num_pages * 4 * token_bytes
    assert engine.kv_report()["capacity_tokens"] == num_pages * 4
    assert Fraction(20, num_owners) == Fraction(engine.kv_report()["reduction"]).limit_denominator(100)
    memories = {id(engine.kv_pool.of_layer(layer)) for layer in range(20)}
    assert len(memories) == num_owners
    assert all(engine.kv_pool.of_layer(i) is engine.kv_pool.of_layer(owner) for i, owner in enumerate(reads))


def test_groups_of_a_class_fill_their_pages_without_overlap(tmp_path):
    """Number every slot of every group's K and V; no number is overwritten and no byte of the arena is left."""
    engine = open_engine(tmp_path, 6, [0, 0, 2, 2, 0, 5])
    pool, numbers = engine.kv_pool, count(1)
    parts = [part for group in range(3) for part in (pool.groups[group].k, pool.groups[group].v)]
    for part in parts:
        part.fill_(next(numbers))
    assert all((part == number).all() for number, part in enumerate(parts, start=1))
    assert (pool.arena > 0).all()


# -------------------------------------------------------------------- full and windowed classes in one budget

MIXED = {
    "one-full-in-six": [512, 512, 512, 512, 512, None],
    "one-windowed-in-six": [None, None, None, None, None, 512],
    "two-windows": [256, 512, None, 512, 512, 256],
}
"""Windows of the owners of a model, which has twelve: the pattern twice."""


class Pool:
    """The real scheduler and block manager of a CLA-2 model, fed with made-up tokens: no model, no tensors."""

    def __init__(self, windows: list[int | None], memory: int, max_model_len: int) -> None:
        sharing = KVSharing.cla(24, 2).with_windows([window for window in windows * 2 for _ in range(2)])
        geometry = [KVGeometry(kv_heads=4, head_dim=64)] * 24
        self.layout = KVLayout.build(sharing, geometry, itemsize=2, block_size=16, max_model_len=max_model_len)
        self.memory = memory
        self.block_manager = BlockManager(self.layout, self.layout.num_pages(memory))
        self.scheduler = Scheduler(
            self.block_manager, max_num_seqs=10**6, max_num_batched_tokens=1024, max_waiting=10**6
        )

    def fill(self, lengths: list[int]) -> None:
        """Add requests of these lengths and step until everybody who fits has computed his prompt and decodes."""
        random = Random(0)
        for key, length in enumerate(lengths):
            prompt = [random.randrange(50_000) for _ in range(length)]
            self.scheduler.add(Request(key, key, prompt, SamplingParams(max_tokens=None), 10**9, frozenset()))
        while True:
            scheduled = self.scheduler.schedule()
            self.scheduler.update(scheduled, [0 for item in scheduled if item.samples])
            if all(item.num_scheduled_tokens == 1 for item in scheduled):
                return

    @property
    def share_of_pages(self) -> float:
        """Pages that somebody holds, of all."""
        return self.block_manager.num_used / self.block_manager.num_pages

    @property
    def useful_share(self) -> float:
        """Bytes of K/V that a later token will see, of the whole budget. Neither the empty slots of last blocks
        count, nor what a block keeps from before the window, nor what the layout leaves of a page.
        """
        useful = sum(
            cls.bytes_per_token * min(request.num_computed_tokens, cls.window or request.num_computed_tokens)
            for request in self.scheduler.running
            for cls in self.layout.classes
        )
        return useful / self.memory


@pytest.mark.parametrize("low, high", [(200, 500), (1500, 2500), (5000, 7000)], ids=["short", "medium", "long"])
@pytest.mark.parametrize("name", MIXED)
def test_requests_of_any_length_can_use_the_budget(name, low, high):
    """Memory is not stranded: until no request fits any more, at least 90 % of it serves those that run."""
    pool = Pool(MIXED[name], memory=256 * 2**20, max_model_len=32_768)
    lengths = Random(1)
    pool.fill([lengths.randrange(low, high) for _ in range(100)])
    assert pool.scheduler.waiting, "there were not enough requests to fill the pool"
    assert pool.share_of_pages >= 0.9
    assert pool.useful_share >= 0.9
    pool.block_manager.check_integrity()


@pytest.mark.parametrize("name", MIXED)
def test_one_very_long_request_can_use_the_budget(name):
    pool = Pool(MIXED[name], memory=256 * 2**20, max_model_len=10**6)
    longest = pool.layout.max_request_tokens(pool.block_manager.num_pages)
    pool.fill([longest - 16])
    assert len(pool.scheduler.running) == 1 and not pool.scheduler.num_preemptions
    assert pool.share_of_pages >= 0.9
    assert pool.useful_share >= 0.9


def test_a_window_gives_back_before_the_full_class_takes(tmp_path, serve):
    """A pool that is full after the prompt: the first decoding step frees a windowed block and needs a full one."""
    folder = write_llama(tmp_path, num_layers=2, windows=[None, 4], kv_heads=1, head_dim=4)
    page = 4 * 2 * 4 * FLOAT32
    settings = {"ops": "reference", "block_size": 4, "max_num_batched_tokens": 8, "max_model_len": 64}
    engine = Engine(folder, kv_cache_memory=9 * page, **settings)
    (output,) = serve(engine, [list(range(24))], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert output.outputs[0].token_ids == reference.greedy(folder, list(range(24)), 5)


# -------------------------------------------------------------------- nobody shares what he should not


def test_two_engines_in_one_process(tmp_path):
    """Step by step in turn, other maps, other block sizes: each gives what the reference says of its model."""
    shapes = ({"reads": [0, 0, 2, 2], "windows": [None, 5, None, 7]}, {"num_layers": 5, "seed": 1, "kv_heads": 1})
    folders = [write_llama(tmp_path / str(number), **shape) for number, shape in enumerate(shapes)]
    engines = [
        Engine(f, block_size=s, kv_cache_memory=BUDGET, max_num_batched_tokens=8) for f, s in zip(folders, (4, 3))
    ]
    prompts = [list(range(20)), [9, 8, 7], list(range(50, 63))]
    answers: list[list] = [[], []]
    for engine, answer in zip(engines, answers):
        for prompt in prompts:
            engine.add_request(None, prompt, GREEDY, on_output=answer.append, final_only=True)
    while any(engine.has_unfinished_requests() for engine in engines):
        for engine in engines:
            engine.step()
    for folder, answer in zip(folders, answers):
        tokens = {tuple(output.prompt_token_ids): output.outputs[0].token_ids for output in answer}
        assert tokens == {tuple(prompt): reference.greedy(folder, prompt, GREEDY.max_tokens) for prompt in prompts}
    assert engines[0].kv_pool.arena.data_ptr() != engines[1].kv_pool.arena.data_ptr()
    assert not torch.equal(engines[0].model.embedding, engines[1].model.embedding)
