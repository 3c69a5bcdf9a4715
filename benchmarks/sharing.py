"""What a sharing map buys: the same checkpoint under several maps, run by run in turn.

    python benchmarks/sharing.py models/smollm2-135m-instruct --rounds 3 --plot docs/sharing.png

Capacity at a fixed budget (exact), the decode step at equal batch, the prefill of one long prompt (the cut), and
output tokens per second when the KV budget is what limits the batch. Ratios are to the unshared
model of the same round.
The text is nonsense (the checkpoint was not trained to share); the work is the same as a trained model's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from tqdm import tqdm
from workloads import Item, workload

from miniserve import Engine, SamplingParams

MAPS = ("none", "cla:2", "cla:3", "suffix:20")
BATCHES = ((16, 2048), (64, 300), (64, 900))
PROMPT = 2048
BUDGET, TIGHT_BUDGET = "1536MiB", "24MiB"


def place(engine: Engine, num_requests: int, context: int) -> None:
    """Add requests as if their first `context` tokens had been computed (the pool is full of one number)."""
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    for number in range(num_requests):
        answer = engine.intake.prepare([1 + number] + [2] * context, params)
        request = answer.samples[0].request
        engine._sample_of[request.key] = (answer, answer.samples[0])
        engine.block_manager.take_prefix(request)
        engine.block_manager.grow(request, 0, context)
        request.num_computed_tokens = context
        engine.scheduler.running.append(request)
        engine.inbox._answers[answer.request_id] = answer


def decode_seconds(engine: Engine, num_requests: int, context: int) -> float:
    """The median step of a batch that only decodes."""
    engine.block_manager.forget_prefixes()
    place(engine, num_requests, context)
    times = []
    for _ in range(8):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    for request_id in engine.inbox.request_ids:
        engine.abort(request_id)
    return median(times[2:])


def run_seconds(engine: Engine, items: list[Item]) -> float:
    """All requests to the end."""
    engine.block_manager.forget_prefixes()
    start = time.perf_counter()
    params = [SamplingParams(temperature=0, max_tokens=item.max_tokens, ignore_eos=True) for item in items]
    engine.generate([item.prompt for item in items], params, use_tqdm=False)
    return time.perf_counter() - start


def measurements() -> dict[str, tuple[str, Callable[[Engine], float]]]:
    """Name -> (KV budget, what to time)."""
    vocab = 49152
    long_prompt = [Item(workload("W3", vocab)[0].prompt[:PROMPT], 1)]
    tight = workload("W2", vocab)[:12]
    steps = {
        f"decode step, {count} x {context}": (BUDGET, lambda e, c=count, n=context: decode_seconds(e, c, n))
        for count, context in BATCHES
    }
    return steps | {
        f"prefill of {PROMPT} tokens": (BUDGET, lambda engine: run_seconds(engine, long_prompt)),
        f"12 requests in {TIGHT_BUDGET} of KV": (TIGHT_BUDGET, lambda engine: run_seconds(engine, tight)),
    }


def main() -> None:
    """Measure, print the table, draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    engines = {
        (kv_sharing, budget): Engine(arguments.model, kv_sharing=kv_sharing, kv_cache_memory=budget, max_model_len=4352)
        for kv_sharing in MAPS
        for budget in (BUDGET, TIGHT_BUDGET)
    }
    for engine in engines.values():
        engine.kv_pool.arena.fill_(0.01)  # memory that was never written would be read from one page of zeros
    seconds: dict[str, dict[str, list[float]]] = {name: {m: [] for m in MAPS} for name in measurements()}
    with tqdm(total=arguments.rounds * len(seconds) * len(MAPS), unit="run") as bar:
        for _ in range(arguments.rounds):
            for name, (budget, measure) in measurements().items():
                for kv_sharing in MAPS:
                    bar.set_description(f"{kv_sharing} {name}")
                    seconds[name][kv_sharing].append(measure(engines[kv_sharing, budget]))
                    bar.update()
    reports = {m: engines[m, BUDGET].kv_report() for m in MAPS}
    print("| | " + " | ".join(MAPS) + " |\n|---" + "|---" * len(MAPS) + "|")
    print("| bytes per token | " + " | ".join(f"{reports[m]['bytes_per_token']:,}" for m in MAPS) + " |")
    print(f"| tokens in {BUDGET} | " + " | ".join(f"{reports[m]['capacity_tokens']:,}" for m in MAPS) + " |")
    gains = {name: {m: gain(by_map["none"], by_map[m]) for m in MAPS} for name, by_map in seconds.items()}
    for name, by_map in seconds.items():
        cells = [f"{median(by_map[m]) * 1e3:.1f} ms ({gains[name][m]:.2f}x)" for m in MAPS]
        print(f"| {name} | " + " | ".join(cells) + " |")
    if arguments.plot:
        draw(gains | {"tokens that fit": {m: reports[m]["reduction"] for m in MAPS}}, arguments.plot)


def gain(unshared: list[float], shared: list[float]) -> float:
    """Median of the rounds' own ratios."""
    return median(a / b for a, b in zip(unshared, shared))


def draw(gains: dict[str, dict[str, float]], path: Path) -> None:
    """Bars: how many times better than without sharing."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.2))
    width = 0.8 / (len(MAPS) - 1)
    for number, kv_sharing in enumerate(MAPS[1:]):
        places = [i + number * width for i in range(len(gains))]
        bars = axes.bar(places, [by_map[kv_sharing] for by_map in gains.values()], width, label=kv_sharing)
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks([i + width for i in range(len(gains))], [name.replace(", ", ",\n") for name in gains], fontsize=8)
    axes.set_ylabel("times better than no sharing")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
