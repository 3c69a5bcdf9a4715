"""Recorded decode steps: what they compute is what the model computes, whatever came in between.

That replayed steps give the authors' tokens is held by the goldens (`ops="auto"`); here, the machinery.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import reference
from checkpoints import write_llama

from miniserve import Engine, SamplingParams
from miniserve.errors import EngineError
from miniserve.ops import replay
from miniserve.ops.replay import Workspace

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def test_a_buffer_is_given_out_again_only_when_no_tensor_lies_in_it() -> None:
    workspace = Workspace()
    first = workspace.take((2, 8))
    address, part = first.data_ptr(), first[1:, 4:].flatten()
    del first
    second = workspace.take((2, 8))
    assert second.data_ptr() != address, "a view still lies in it"
    part.fill_(1.0)
    second.fill_(2.0)
    assert part.eq(1.0).all()
    del part
    assert workspace.take((2, 8)).data_ptr() == address
    assert workspace.take((3, 0)).shape == (3, 0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Four layers: an owner and its reader, twice, the second pair windowed."""
    return write_llama(tmp_path, num_layers=4, reads=[0, 0, 2, 2], windows=[None, None, 9, 9])


@pytest.mark.parametrize("most", [1, 32])
def test_groups_of_every_size_come_and_go(model: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """With room for one program each is thrown away and recorded again; the judge is the cache-less reference."""
    monkeypatch.setattr(replay, "MOST_PROGRAMS", most)
    engine = Engine(model, ops="cpu", dtype="float32", kv_cache_memory="1MiB", max_num_seqs=8)
    calls: list[int] = []
    model_call = engine.model

    def counted(batch, kv_pool):
        calls.append(batch.token_ids.shape[0])
        return model_call(batch, kv_pool)

    counted.logits = model_call.logits
    engine.model = counted
    for round_ in range(2):
        for count in (1, 4, 2, 7, 1):
            prompts = [[count, index, round_, 5] for index in range(count)]
            outputs = engine.generate(prompts, GREEDY, use_tqdm=False)
            expected = [reference.greedy(model, prompt, 12) for prompt in prompts]
            assert [output.outputs[0].token_ids for output in outputs] == expected
    assert len(engine.ops._programs) <= most
    # Of 2 x 5 groups x 12 steps, the model's own code ran in each group's prefill, and in the first decode step of a
    # size that is not there: 4 sizes, or every group but the second round's first (1 request, as just before).
    assert len(calls) == 10 + (9 if most == 1 else 4)


def test_a_step_that_fails_while_it_is_recorded_leaves_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(model, ops="cpu", dtype="float32", kv_cache_memory="1MiB")
    attend = engine.ops.attend

    def fail(*arguments, **options):
        raise RuntimeError("out of order")

    monkeypatch.setattr(engine.ops, "attend", fail)
    with pytest.raises(EngineError):
        engine.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    monkeypatch.setattr(engine.ops, "attend", attend)
    assert not engine.ops._programs and engine.ops._recording is None
    output = engine.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0]
    assert output.outputs[0].token_ids == reference.greedy(model, [1, 2, 3], 12)


def test_a_model_that_computes_with_torch_is_never_repeated(model: Path) -> None:
    """Its own arithmetic would be left out. One that only makes views of what the kernels computed is repeated."""
    engine = Engine(model, ops="cpu", dtype="float32", kv_cache_memory="1MiB")
    model_call = engine.model
    for between, recorded in (
        (lambda x: x[:, :].unflatten(0, (-1, 1)).flatten(0, 1), True),
        (lambda x: x * 2.0, False),
    ):

        def changed(batch, kv_pool, between=between):
            return between(model_call(batch, kv_pool))

        changed.logits = model_call.logits
        engine.model = changed
        before = len(engine.ops._programs)
        outputs = engine.generate([[5, 6, 7], [8]], GREEDY, use_tqdm=False)
        assert (len(engine.ops._programs) > before) == recorded
        expected = [reference.greedy(model, prompt, 12) for prompt in ([5, 6, 7], [8])]  # a norm follows: 2 x is x
        assert [output.outputs[0].token_ids for output in outputs] == expected


@pytest.mark.parametrize("name, recorded", [("hunyuan-cla2", True), ("mlkv-neox-2x1", True), ("gemma4-e2b", False)])
def test_which_families_are_repeated(goldens: Path, name: str, recorded: bool) -> None:
    engine = Engine(goldens / name, ops="cpu", dtype="float32", kv_cache_memory="1MiB")
    engine.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    assert bool(engine.ops._programs) == recorded
