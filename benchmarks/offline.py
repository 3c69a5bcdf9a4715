"""The same requests through miniserve and its peers, alternating between them so that a noisy machine is fair to all.

    python benchmarks/offline.py models/smollm2-135m-instruct --workloads W1,W2 --rounds 3 \\
        --peer vllm:.venv-vllm/bin/python --peer llama-cpp:.venv-llama/bin/python:gguf=models/smollm2-bf16.gguf

Each engine is a process of its own (`engines.py`), loaded once; a round runs a workload on each in turn. Printed are
medians, the ratio of miniserve to each peer (median of the rounds' own ratios), peak memory, and what the machine
itself can do: a bandwidth and a FLOP probe. Each result is also appended to /tmp/miniserve-bench-results.log as it
comes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

HERE = Path(__file__).parent


@dataclass
class Worker:
    """An engine's process and what it has measured: workload -> one result per round."""

    label: str
    process: subprocess.Popen[str]
    ready_seconds: float
    results: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def run(self, workload: str) -> None:
        """Run a workload and keep the result."""
        result = self._ask(workload)
        self.results.setdefault(workload, []).append(result)
        with log_path("results").open("a") as file:
            file.write(json.dumps({"engine": self.label, "workload": workload} | result) + "\n")

    def warm_up(self, workload: str) -> None:
        """Run a workload and forget it."""
        self._ask(workload)

    def _ask(self, workload: str) -> dict[str, Any]:
        if self.process.stdin is None or self.process.stdout is None:
            raise RuntimeError("the worker has no pipes")
        self.process.stdin.write(workload + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.label} ended at {workload}; its log is {log_path(self.label)}")
        return json.loads(line)


def log_path(label: str) -> Path:
    """Where a worker's own output goes."""
    return Path(f"/tmp/miniserve-bench-{label}.log")


def start(label: str, python: str, engine: str, model: str, settings: list[str]) -> Worker:
    """Start an engine and wait until it has loaded."""
    command = [python, str(HERE / "engines.py"), engine, model, *settings]
    log = log_path(label).open("w")
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
    began = time.perf_counter()
    line = process.stdout.readline() if process.stdout else ""
    if not line:
        raise SystemExit(f"{label} did not start; its log is {log_path(label)}")
    return Worker(label, process, time.perf_counter() - began)


def metric(workload: str, result: dict[str, Any]) -> float:
    """The figure of a workload: tokens per second, or seconds for W3 and W5; W1's excludes the first token."""
    if workload == "W1":
        return (result["tokens"] - 1) / (result["seconds"] - result["first_token_seconds"])
    return result["seconds"] if workload in ("W3", "W5") else result["tokens"] / result["seconds"]


def ratio(workload: str, mine: float, other: float) -> float:
    """How many times faster `mine` is."""
    return other / mine if workload in ("W3", "W5") else mine / other


UNITS = {"W1": "tok/s decode", "W2": "tok/s", "W3": "s", "W4": "tok/s", "W5": "s"}


def table(workers: list[Worker], workloads: list[str]) -> str:
    """Medians per engine, and miniserve's lead over each peer."""
    mine = workers[0]
    lines = ["| workload | " + " | ".join(f"{w.label}" for w in workers) + " |", "|---" * (len(workers) + 1) + "|"]
    for name in workloads:
        cells = []
        for worker in workers:
            values = [metric(name, result) for result in worker.results.get(name, [])]
            if not values:
                cells.append("")
                continue
            pairs = zip((metric(name, r) for r in mine.results[name]), values)
            lead = "" if worker is mine else f" ({median(ratio(name, a, b) for a, b in pairs):.2f}x)"
            cells.append(f"{median(values):.4g}{lead}")
        lines.append(f"| {name} {UNITS[name]} | " + " | ".join(cells) + " |")
        if name == "W1":
            firsts = [[r["first_token_seconds"] * 1e3 for r in w.results.get(name, [])] for w in workers]
            cells = [f"{median(values):.0f}" if values else "" for values in firsts]
            lines.append("| W1 first token ms | " + " | ".join(cells) + " |")
    peaks = [max(r["peak_rss"] for rs in w.results.values() for r in rs) / 2**30 for w in workers]
    lines.append("| peak RSS GiB | " + " | ".join(f"{peak:.2f}" for peak in peaks) + " |")
    lines.append("| start to ready s | " + " | ".join(f"{w.ready_seconds:.1f}" for w in workers) + " |")
    return "\n".join(lines)


def floor() -> str:
    """What the machine can do now: memory bandwidth and float32 / bfloat16 products, by torch."""
    import torch

    big = torch.ones(64 * 2**20)
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)

    def best(run: Any, count: int = 7) -> float:
        times = []
        for _ in range(count):
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        return min(times)

    bandwidth = big.numel() * 4 / best(lambda: big.sum()) / 1e9
    flops = [2 * 1024**3 / best(lambda x=x, y=y: x @ y) / 1e9 for x, y in ((a, b), (a.bfloat16(), b.bfloat16()))]
    return f"machine: {bandwidth:.0f} GB/s read, {flops[0]:.0f} GF/s float32, {flops[1]:.0f} GF/s bfloat16 (torch)"


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--workloads", default="W1,W2,W3,W4,W5")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], help="miniserve setting, key=value")
    parser.add_argument("--peer", action="append", default=[], help="engine:python[:key=value,...][@W1+W3]")
    arguments = parser.parse_args()
    workloads = arguments.workloads.split(",")
    workers = [start("miniserve", sys.executable, "miniserve", arguments.model, arguments.set)]
    only: dict[str, set[str]] = {}
    for number, peer in enumerate(arguments.peer, start=1):
        text, _, chosen = peer.partition("@")
        engine, python, *rest = text.split(":")
        settings = rest[0].split(",") if rest else []
        label = engine if engine not in [w.label for w in workers] else f"{engine}-{number}"
        workers.append(start(label, python, engine, arguments.model, settings))
        only[label] = set(chosen.split("+")) if chosen else set(workloads)
    takes_part = {w.label: [name for name in workloads if name in only.get(w.label, workloads)] for w in workers}
    for worker in workers:
        worker.warm_up("W1")
    with tqdm(total=arguments.rounds * sum(map(len, takes_part.values())), unit="run") as bar:
        for _ in range(arguments.rounds):
            for name in workloads:
                for worker in workers:
                    if name in takes_part[worker.label]:
                        bar.set_description(f"{worker.label} {name}")
                        worker.run(name)
                        bar.update()
    for worker in workers:
        worker.process.stdin.close()  # type: ignore[union-attr]
        worker.process.wait(30)
    print(table(workers, workloads))
    print(floor())


if __name__ == "__main__":
    main()
