"""What several test files share: where the goldens lie, and how to drive an engine step by step and watch it.

Tests import two modules beside this file: `checkpoints` (writes tiny random models) and `reference` (the
cache-less judge).
"""

from __future__ import annotations

import os

# The models are tiny: threads would only wait for each other. Read when torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

Seen = dict[tuple[int, ...], list[Any]]
"""Text so far (token ids) -> the logits rows (V,) that the engine computed for what comes next."""


@pytest.fixture(scope="session")
def goldens() -> Path:
    """The folder of golden models; see its folders' READMEs."""
    return Path(__file__).parent / "data" / "goldens"


@pytest.fixture(scope="session")
def serve() -> Callable[..., list[Any]]:
    """`serve(engine, prompts, params, before_step)`: answers in prompt order; see `_serve`."""
    return _serve


@pytest.fixture(scope="session")
def watch_logits() -> Callable[[Any], Seen]:
    """`watch_logits(engine)`: from now on collect all raw logits; see `_watch_logits`."""
    return _watch_logits


@pytest.fixture(scope="session")
def poison() -> Callable[..., None]:
    """`poison(engine)`: overwrite what no request holds with NaN, as a `before_step`; see `_poison`."""
    return _poison


def _serve(
    engine: Any, prompts: Sequence[Any], params: Any, before_step: Callable[[Any, int], None] | None = None
) -> list[Any]:
    """Answer prompts together, with `before_step(engine, k)` before step k; `params` is one for all or a list."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    done: dict[str, Any] = {}

    def collect(output: Any) -> None:
        done[output.request_id] = output

    ids = [engine.add_request(None, p, q, on_output=collect, final_only=True) for p, q in zip(prompts, each)]
    for step in range(5000):
        if len(done) == len(ids):
            return [done[request_id] for request_id in ids]
        if before_step is not None:
            before_step(engine, step)
        engine.step()
    raise AssertionError(f"after 5000 steps {len(ids) - len(done)} of {len(ids)} requests are still running")


def _watch_logits(engine: Any) -> Seen:
    """Wrap the engine's scheduler and model: the one tells which rows are due, the other gives them.

    A row is due where a token is sampled and where a prompt token's logprob is still wanted, nowhere else.
    """
    seen: Seen = defaultdict(list)
    due: list[tuple[int, ...]] = []
    schedule, logits = engine.scheduler.schedule, engine.model.logits

    def spy_on_schedule() -> Any:
        scheduled = schedule()
        due[:] = [
            tuple(item.request.tokens(0, position + 1))
            for item in scheduled
            for position in range(item.start, item.stop)
            if _is_due(item, position)
        ]
        return scheduled

    def spy_on_logits(hidden: Any) -> Any:
        rows = logits(hidden)
        assert len(rows) == len(due), f"{len(rows)} rows of logits computed, {len(due)} are due"
        for text, row in zip(due, rows):
            seen[text].append(row.clone())
        return rows

    engine.scheduler.schedule, engine.model.logits = spy_on_schedule, spy_on_logits
    return seen


def _is_due(item: Any, position: int) -> bool:
    request = item.request
    first, num_prompt = request.first_logit_needed, len(request.prompt_token_ids)
    for_prompt = first is not None and first <= position < num_prompt - 1
    return for_prompt or (item.samples and position == item.stop - 1)


def _poison(engine: Any, step: int = 0) -> None:
    """Forget all cached prefixes and fill every free page with NaN: whoever still reads one gives NaN."""
    engine.block_manager.forget_prefixes()
    engine.kv_pool.arena[sorted(set(range(engine.kv_pool.num_pages)) - _pages_held(engine))] = float("nan")


def _pages_held(engine: Any) -> set[int]:
    classes = range(len(engine.layout.classes))
    tables = [engine.block_manager.block_table(r, c) for r in engine.scheduler.running for c in classes]
    return {page for table in tables for page in table if page is not None}
