"""One step's ragged requests laid flat.

    request A  ▏a5                (decoding: 1 token)      token_ids     a5 b0 b1 b2 b3 c7 c8
    request B  ▏b0 b1 b2 b3       (a chunk of a prompt)    cu_seqlens_q  0  1           5     7
    request C  ▏c7 c8             (the end of a prompt)    seqused_k        6  4        9

    behind the cut only rows that are sampled go on:       kept          a5             c8

The names are the attention kernels' argument names. A batch is an argument, never a global.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from miniserve.kvcache.block_manager import BlockManager
from miniserve.request import Request
from miniserve.scheduler.scheduler import ScheduledRequest


@dataclass(frozen=True)
class ForwardBatch:
    """T tokens of S requests. Queries of a request are the last ones of its `seqused_k` keys.

    `block_tables` and `slot_mapping` have one entry per retention class.
    """

    token_ids: Tensor  # (T,) int64
    positions: Tensor  # (T,) int64
    cu_seqlens_q: Tensor  # (S + 1,) int32: request s has rows cu_seqlens_q[s] to cu_seqlens_q[s + 1]
    max_seqlen_q: int
    seqused_k: Tensor  # (S,) int32: keys that request s has after this step
    max_seqlen_k: int
    block_tables: tuple[Tensor, ...]  # each (S, max blocks) int32; 0 where the block was given back
    slot_mapping: tuple[Tensor, ...]  # each (T,) int64: block * P + offset, where a row's K/V goes
    kept: Tensor | None = None  # (T',) int64: the rows that go on behind the cut
    behind_cut: ForwardBatch | None = None  # the batch that they form

    def cut(self, *tensors: Tensor) -> tuple[ForwardBatch, list[Tensor]]:
        """Leave all rows behind that nobody needs any more: the smaller batch, and the tensors' (T, ...) rows of it."""
        if self.kept is None or self.behind_cut is None:
            raise RuntimeError("this batch lies behind the cut already")
        everything = self.kept.shape[0] == self.token_ids.shape[0]
        return self.behind_cut, [tensor if everything else tensor[self.kept] for tensor in tensors]


@dataclass(frozen=True)
class PromptRows:
    """Logits rows `first_row` and on belong to positions `start` to `stop` of a prompt."""

    request: Request
    first_row: int
    start: int
    stop: int


@dataclass(frozen=True)
class LogitsPlan:
    """Which rows behind the cut need logits, and what for."""

    rows: Tensor  # (R,) int64: rows of `behind_cut`
    sampled: list[int]  # of the R rows, those to sample from, in the order of the scheduled requests
    prompt: list[PromptRows]  # of the R rows, those that give prompt logprobs


def build(
    scheduled: Sequence[ScheduledRequest], block_manager: BlockManager, device: torch.device
) -> tuple[ForwardBatch, LogitsPlan]:
    """Lay a step flat. Rows whose logits are wanted are kept, and those behind them, so that queries stay a suffix."""
    needed = [_positions_with_logits(item) for item in scheduled]
    keep_from = [min([*positions, item.stop]) for item, positions in zip(scheduled, needed)]
    cu_seqlens = _offsets([item.num_scheduled_tokens for item in scheduled])
    kept = [
        row
        for first_row, item, keep in zip(cu_seqlens, scheduled, keep_from)
        for row in range(first_row + keep - item.start, first_row + item.stop - item.start)
    ]
    survivors = [(item, keep) for item, keep in zip(scheduled, keep_from) if keep < item.stop]
    behind_cut = _flatten([(item.request, keep, item.stop) for item, keep in survivors], block_manager, device)
    batch = _flatten(
        [(item.request, item.start, item.stop) for item in scheduled],
        block_manager,
        device,
        kept=torch.tensor(kept, dtype=torch.int64, device=device),
        behind_cut=behind_cut,
    )
    return batch, _plan_logits(scheduled, needed, keep_from, device)


def _positions_with_logits(item: ScheduledRequest) -> list[int]:
    """Positions of this chunk whose logits are wanted: for prompt logprobs, and the last one if it is sampled."""
    request, positions = item.request, []
    if request.first_logit_needed is not None:  # the row of position i tells the logprob of token i + 1
        last = min(item.stop, len(request.prompt_token_ids) - 1)
        positions = list(range(max(item.start, request.first_logit_needed), last))
    return positions + [item.stop - 1] * item.samples


def _flatten(
    spans: Sequence[tuple[Request, int, int]],
    block_manager: BlockManager,
    device: torch.device,
    kept: Tensor | None = None,
    behind_cut: ForwardBatch | None = None,
) -> ForwardBatch:
    """The batch of the tokens at positions start to stop of each request."""
    lengths = [stop - start for _, start, stop in spans]
    block_tables, slot_mapping = [], []
    for index, cls in enumerate(block_manager.layout.classes):
        tables = [block_manager.block_table(request, index) for request, _, _ in spans]
        width = max(map(len, tables), default=0)
        padded = [[page or 0 for page in table] + [0] * (width - len(table)) for table in tables]
        block_tables.append(torch.tensor(padded, dtype=torch.int32, device=device).view(len(spans), width))
        slots = [
            (table[position // cls.block_size] or 0) * cls.block_size + position % cls.block_size
            for table, (_, start, stop) in zip(tables, spans)
            for position in range(start, stop)
        ]
        slot_mapping.append(torch.tensor(slots, dtype=torch.int64, device=device))
    token_ids = [token for request, start, stop in spans for token in request.tokens(start, stop)]
    positions = [position for _, start, stop in spans for position in range(start, stop)]
    return ForwardBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        cu_seqlens_q=torch.tensor(_offsets(lengths), dtype=torch.int32, device=device),
        max_seqlen_q=max(lengths, default=0),
        seqused_k=torch.tensor([stop for _, _, stop in spans], dtype=torch.int32, device=device),
        max_seqlen_k=max((stop for _, _, stop in spans), default=0),
        block_tables=tuple(block_tables),
        slot_mapping=tuple(slot_mapping),
        kept=kept,
        behind_cut=behind_cut,
    )


def _plan_logits(
    scheduled: Sequence[ScheduledRequest], needed: list[list[int]], keep_from: list[int], device: torch.device
) -> LogitsPlan:
    rows: list[int] = []
    sampled: list[int] = []
    prompt: list[PromptRows] = []
    first_kept_row = 0
    for item, positions, keep in zip(scheduled, needed, keep_from):
        for_prompt = len(positions) - item.samples
        if for_prompt:
            prompt.append(PromptRows(item.request, len(rows), positions[0], positions[0] + for_prompt))
        if item.samples:
            sampled.append(len(rows) + for_prompt)
        rows.extend(first_kept_row + position - keep for position in positions)
        first_kept_row += item.stop - keep
    return LogitsPlan(torch.tensor(rows, dtype=torch.int64, device=device), sampled, prompt)


def _offsets(lengths: Sequence[int]) -> list[int]:
    """[3, 1, 2] -> [0, 3, 4, 6]."""
    return [0, *accumulate(lengths)]
