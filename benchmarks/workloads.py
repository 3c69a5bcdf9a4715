"""The five workloads: random token ids, greedy, end tokens ignored, so that every engine does exactly the same work.

W1  one request, 128 in, 128 out                     decoding alone: the weights' bytes
W2  64 requests, 64..512 in, 64..256 out             continuous batching
W3  one prompt of 4096, 1 out                        prefill alone: FLOPs
W4  32 requests, 1024 shared + 16..64 own in, 64 out prefix caching
W5  16 requests, 2048 in, 64 out                     long prompts, attention over long contexts
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Item:
    """One request."""

    prompt: list[int]
    max_tokens: int


def workload(name: str, vocab_size: int) -> list[Item]:
    """The requests of W1..W5, the same at every call."""
    random = Random(1234)

    def ids(count: int) -> list[int]:
        return [random.randrange(vocab_size) for _ in range(count)]

    if name == "W1":
        return [Item(ids(128), 128)]
    if name == "W2":
        return [Item(ids(random.randint(64, 512)), random.randint(64, 256)) for _ in range(64)]
    if name == "W3":
        return [Item(ids(4096), 1)]
    if name == "W4":
        shared = ids(1024)
        return [Item(shared + ids(random.randint(16, 64)), 64) for _ in range(32)]
    if name == "W5":
        return [Item(ids(2048), 64) for _ in range(16)]
    raise ValueError(f"no such workload: {name}")
