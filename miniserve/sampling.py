"""Logits -> token ids and logprobs, all rows of a step at once.

Order, as in vLLM: logit_bias, min_tokens, penalties, temperature, min_p, top_k, top_p. Reported logprobs are
of the raw distribution, before any of these.

Randomness is one uniform number per sampled token, computed from (seed, index of the token): no generator
has a state, so a request samples the same text alone, in a crowd, or recomputed after preemption.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256

import torch
from torch import Tensor

from miniserve.output import Logprob, PositionLogprobs
from miniserve.request import Request


def sample(
    logits: Tensor, requests: Sequence[Request], argmax: Callable[[Tensor], Tensor] = lambda x: x.argmax(dim=-1)
) -> list[int]:
    """logits (S, V) float32 -> one token for each request. Rows do not influence each other.

    `argmax` (S, V) -> (S,) may be a kernel set's own.
    """
    if not all(_takes_argmax(request) for request in requests):
        logits = _adjust(logits, requests)
    tokens = argmax(logits)
    drawn = [row for row, request in enumerate(requests) if not request.params.greedy]
    if drawn:
        tokens[drawn] = _draw(logits[drawn], [requests[row] for row in drawn])
    return tokens.tolist()


def logprobs(logits: Tensor, tokens: Sequence[int], num_top: Sequence[int]) -> list[PositionLogprobs]:
    """logits (R, V), the actual token of each row and how many likeliest to report (-1: all) -> one dict per row.

    The first entry of each dict is the actual token; the others follow in order of likelihood, so a dict has
    `num_top` or `num_top + 1` entries.
    """
    wide = logits.log_softmax(dim=-1)  # (R, V)
    actual = torch.tensor(tokens, device=logits.device)[:, None]
    chosen = wide.gather(1, actual)
    ranks = (wide > chosen).sum(dim=-1) + 1
    widths = [wide.shape[1] if k == -1 else k for k in num_top]
    top_values, top_ids = wide.topk(max(widths), dim=-1)
    rows: list[PositionLogprobs] = []
    for row, token in enumerate(tokens):
        entry = {token: Logprob(chosen[row, 0].item(), int(ranks[row]))}
        values, ids = top_values[row, : widths[row]].tolist(), top_ids[row, : widths[row]].tolist()
        for rank, (other, value) in enumerate(zip(ids, values), start=1):
            entry.setdefault(other, Logprob(value, rank))
        rows.append(entry)
    return rows


def uniform(seed: int, index: int) -> float:
    """The random number in [0, 1) for a request's `index`-th token."""
    digest = sha256(f"{seed} {index}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53  # exact in float64, and below 1


def _takes_argmax(request: Request) -> bool:
    params = request.params
    return params.greedy and not params.penalized and not params.logit_bias and not _below_min_tokens(request)


def _below_min_tokens(request: Request) -> bool:
    return len(request.output_token_ids) < request.params.min_tokens


def _adjust(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Logits after bias, min_tokens and penalties; a new tensor."""
    logits = logits.clone()
    for row, request in enumerate(requests):
        params = request.params
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=logits.device)
            logits[row, ids] += torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device)
        if _below_min_tokens(request) and request.stop_token_ids:
            # Not -inf: with every token banned the row must still be a distribution.
            logits[row, sorted(request.stop_token_ids)] = torch.finfo(logits.dtype).min
        if params.penalized:
            _penalize(logits[row], request)
    return logits


def _penalize(row: Tensor, request: Request) -> None:
    """Repetition (CTRL, 1909.05858), presence and frequency penalties, in place on one row (V,)."""
    params, vocab_size = request.params, row.shape[0]
    output = torch.tensor(request.output_token_ids, dtype=torch.int64, device=row.device)
    counts = torch.bincount(output, minlength=vocab_size)  # (V,)
    if params.repetition_penalty != 1.0:
        seen = counts > 0
        seen[torch.tensor(request.prompt_token_ids, device=row.device)] = True
        penalty = max(params.repetition_penalty, 1e-6)  # dividing by less would overflow float32
        penalized = torch.where(row > 0, row / penalty, row * penalty)
        row.copy_(torch.where(seen, penalized, row))
    row -= params.frequency_penalty * counts
    row -= params.presence_penalty * (counts > 0)


def _draw(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Sample each row (V) by inverting its cumulative distribution at the request's uniform number."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits.device)[:, None]

    params = [request.params for request in requests]
    peak = logits.max(dim=-1, keepdim=True).values
    probs = ((logits - peak) / column([p.temperature for p in params])).softmax(dim=-1)  # (S, V)
    if any(p.min_p > 0 or p.top_p < 1 or p.top_k > 0 for p in params):
        probs = _truncate(
            probs,
            column([p.min_p for p in params]),
            column([float(p.top_k) if p.top_k > 0 else float("inf") for p in params]),
            column([p.top_p for p in params]),
        )
    cumulative = _cumsum(probs.double())
    drawn = [[uniform(request.seed, len(request.output_token_ids))] for request in requests]
    point = torch.tensor(drawn, dtype=torch.float64, device=logits.device) * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, point, right=True)[:, 0]
    last = logits.shape[1] - 1 - (probs > 0).flip(-1).int().argmax(dim=-1)  # rounding must not pick a banned token
    return torch.minimum(token, last)


def _truncate(probs: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """probs (S, V) with everything outside min_p, top_k and top_p set to 0; the likeliest token always stays."""
    sorted_probs, order = probs.sort(dim=-1, descending=True, stable=True)
    keep = sorted_probs >= min_p * sorted_probs[:, :1]
    keep &= torch.arange(probs.shape[1], device=probs.device) < top_k
    kept = sorted_probs * keep
    mass = _cumsum(kept)
    keep &= mass - kept < top_p * mass[:, -1:]  # the likelier tokens' mass, of what is still there
    keep[:, 0] = True
    return torch.zeros_like(probs).scatter(1, order, sorted_probs * keep)


def _cumsum(x: Tensor) -> Tensor:
    """Running sums of each row by itself: torch rounds otherwise if there are several."""
    return torch.stack([row.cumsum(dim=-1) for row in x])
