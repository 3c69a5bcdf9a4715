"""What a caller gets: the answer to one prompt, its samples, their logprobs. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Logprob:
    """One token's log probability, natural logarithm, and its place among all (1 = likeliest)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""Token id -> logprob: the actual token first, then the likeliest."""


@dataclass
class CompletionOutput:
    """One of the `n` continuations of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """The answer to one prompt so far; final when `finished`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = False
