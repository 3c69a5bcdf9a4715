"""What 8-bit weights and 8-bit K/V cost in quality: perplexity of a text, and error of its log-probabilities.

    python benchmarks/quantization.py models/smollm2-135m-instruct [text files; default: this project's own pages]

Each window of 1024 tokens is scored by itself, all positions but the first.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from tqdm import tqdm

from miniserve import Engine, SamplingParams

WINDOW = 1024
SETTINGS = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8 K/V": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "int8 weights": {"quantization": "int8"},
    "int8 both": {"quantization": "int8", "kv_cache_dtype": "int8"},
}
ROOT = Path(__file__).resolve().parent.parent


def log_probabilities(model: str, windows: list[list[int]], **settings: str) -> torch.Tensor:
    """Of every token but each window's first, in order."""
    engine = Engine(model, max_model_len=WINDOW + 1, kv_cache_memory="512MiB", **settings)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    values: list[float] = []
    for window in tqdm(windows, desc=str(settings), leave=False):
        entries = engine.generate(window, params)[0].prompt_logprobs
        values += [entry[token].logprob for token, entry in zip(window[1:], entries[1:])]
    return torch.tensor(values, dtype=torch.float64)


def main() -> None:
    """Score the text under each setting and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument(
        "texts", nargs="*", type=Path, default=[ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    )
    arguments = parser.parse_args()
    tokenizer = Engine(arguments.model, kv_cache_memory="64MiB", max_model_len=64).tokenizer
    ids = tokenizer.encode("\n\n".join(path.read_text(encoding="utf-8") for path in arguments.texts))
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids), WINDOW)]
    exact = log_probabilities(arguments.model, windows, dtype="float32")
    print(f"{len(exact)} tokens of {', '.join(path.name for path in arguments.texts)}")
    print("| | perplexity | mean error against float32 | 99th percentile | mean error against bfloat16 |")
    print("|---|---|---|---|---|")
    print(f"| float32 | {math.exp(-exact.mean()):.4f} | | | |")
    judge = exact
    for name, settings in SETTINGS.items():
        found = log_probabilities(arguments.model, windows, **settings)
        judge = found if name == "bfloat16" else judge
        error, other = (found - exact).abs(), (found - judge).abs().mean()
        perplexity = math.exp(-found.mean())
        print(f"| {name} | {perplexity:.4f} | {error.mean():.4f} | {error.quantile(0.99):.4f} | {other:.4f} |")


if __name__ == "__main__":
    main()
