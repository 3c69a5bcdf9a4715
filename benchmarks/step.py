"""A decode step's time, and how much of it is spent outside kernels: recorded steps and plain ones, in turns.

python benchmarks/step.py models/smollm2-135m-instruct [--set quantization=int8]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from sharing import place

from miniserve import Engine

BATCHES = ((1, 128), (16, 2048), (64, 300))
STEPS = 15


def watch(engine: Engine) -> list[float]:
    """From now on collect the seconds of each kernel call (a recorded step is one)."""
    seconds: list[float] = []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments)
            seconds.append(time.perf_counter() - start)
            return result

        return call

    ops: Any = engine.ops
    ops._functions = {name: timed(function) for name, function in ops._functions.items()}
    ops._run_calls, ops._argmax = timed(ops._run_calls), timed(ops._argmax)
    return seconds


def main() -> None:
    """Print a line for each batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--set", action="append", default=[], help="setting of both engines, key=value")
    arguments = parser.parse_args()
    settings = dict(setting.split("=", 1) for setting in arguments.set)
    engines = [
        Engine(arguments.model, kv_cache_memory="1GiB", max_model_len=4352, ops="cpu", enforce_eager=eager, **settings)
        for eager in (False, True)
    ]
    inside = [watch(engine) for engine in engines]
    for engine in engines:
        engine.kv_pool.arena.fill_(0.01)  # memory that was never written would be read from one page of zeros
    print("| batch | recorded ms (outside kernels) | plain ms (outside kernels) | ratio |\n|---|---|---|---|")
    for count, context in BATCHES:
        runs: list[list[tuple[float, float]]] = [[], []]  # seconds of a step, and of them in kernels
        for engine in engines:
            engine.block_manager.forget_prefixes()
            place(engine, count, context)
        for _ in range(STEPS):
            for engine, kernels, results in zip(engines, inside, runs):
                kernels.clear()
                start = time.perf_counter()
                engine.step()
                results.append((time.perf_counter() - start, sum(kernels)))
        for engine in engines:
            for request_id in engine.inbox.request_ids:
                engine.abort(request_id)
        warm = [results[2:] for results in runs]
        cells = [
            f"{median(s for s, _ in results) * 1e3:.1f} ({median(1 - k / s for s, k in results):.1%})"
            for results in warm
        ]
        ratio = median(plain / recorded for (recorded, _), (plain, _) in zip(*warm))
        print(f"| {count} x {context} | {' | '.join(cells)} | {ratio:.2f}x |")


if __name__ == "__main__":
    main()
