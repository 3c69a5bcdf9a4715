"""Decode steps without Python: the kernel calls of one step, recorded and run again as a single call.

A step in which each of S requests has one token makes the same calls with the same addresses every time, provided
that its inputs lie where they lay before. So the first such step is recorded while it runs, on a batch of its own, and
later ones are copied into that batch. It is what CUDA graphs do on a GPU; here it saves the time between kernels, which
for one request is a quarter of the step.

Only kernel calls are recorded. A model that also computes with torch in between (experts, states) would be repeated
wrongly, so that is noticed while recording (`TorchWatch`), and its steps are not repeated.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from miniserve.batch import ForwardBatch
from miniserve.ops import abi

MOST_PROGRAMS = 32
_SHORTEST = 256
_LINE = 16  # floats of a cache line, where a tensor begins


class Workspace:
    """Memory for what recorded steps compute on the way: all of them share it, since one runs at a time.

    A buffer is free again when no tensor lies in it any more, as with torch's own allocator, but its address stays.
    """

    def __init__(self) -> None:
        self._buffers: list[Any] = [(ctypes.c_float * _LINE)()]  # the first is never used: it shows what free is

    def take(self, shape: tuple[int, ...]) -> Tensor:
        """An uninitialised float32 tensor of this shape."""
        size = max(1, prod(shape))
        # A tensor in a buffer refers to it. How often a free one is referred to depends on the Python: ask one.
        counts = [sys.getrefcount(buffer) for buffer in self._buffers]
        free = [i for i, count in enumerate(counts) if count == counts[0] and len(self._buffers[i]) >= size + _LINE]
        if not free:
            self._buffers.append((ctypes.c_float * (size + _LINE))())
            free = [len(self._buffers) - 1]
        buffer = self._buffers[min(free, key=lambda i: len(self._buffers[i]))]
        offset = -ctypes.addressof(buffer) % 64
        return torch.frombuffer(buffer, dtype=torch.float32, count=size, offset=offset)[: prod(shape)].view(shape)


class TorchWatch(TorchDispatchMode):
    """Notices whether torch computes anything itself; views of what the kernels made are no computation."""

    has_computed = False
    _off = False

    @contextmanager
    def constants(self) -> Iterator[None]:
        """What is computed in here is the same in every repetition, and held by the program."""
        self._off = True
        yield
        self._off = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each of its operations."""
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, (list, tuple)) else [result]
        sources = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        copies = any(isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in sources for x in made)
        self.has_computed |= not self._off and (copies or not func.is_view)
        return result


@dataclass
class Program:
    """A recorded step: its batch, the calls, and the hidden states that they leave."""

    batch: ForwardBatch
    owners: tuple[Any, ...]  # model and pool: their addresses are in the calls
    calls: list[tuple[int, Any]] = field(default_factory=list)  # function, arguments
    held: list[Any] = field(default_factory=list)  # what the arguments point to
    hidden: Tensor | None = None
    array: Any = None

    def add(self, function: int, arguments: Any, held: tuple[Any, ...]) -> None:
        """Record a call."""
        self.calls.append((function, arguments))
        self.held.append(held)

    def finish(self, hidden: Tensor) -> None:
        """All calls are there."""
        self.hidden = hidden
        self.array = (abi.Call * len(self.calls))(*((f, ctypes.addressof(a)) for f, a in self.calls))

    def result(self) -> Tensor:
        """The hidden states that the calls have left; the next step overwrites them.

        Raises:
            RuntimeError: the program is not recorded yet.
        """
        if self.hidden is None:
            raise RuntimeError("the program is not recorded yet")
        return self.hidden

    def fill(self, batch: ForwardBatch) -> None:
        """Copy a step of the same key into this program's batch."""
        own = self.batch
        for mine, given in (
            *((own.token_ids, batch.token_ids), (own.positions, batch.positions), (own.seqused_k, batch.seqused_k)),
            *zip(own.slot_mapping, batch.slot_mapping),
        ):
            mine.copy_(given)
        for table, given in zip(own.block_tables, batch.block_tables):
            table[:, : given.shape[1]] = given  # what lies behind is not read


def key_of(model: Any, batch: ForwardBatch, kv_pool: Any) -> Hashable | None:
    """What recorded steps must have in common; None if a step is not worth recording."""
    size, kept = batch.token_ids.shape[0], batch.kept
    if batch.max_seqlen_q != 1 or kept is None or kept.shape[0] != size:
        return None
    return id(model), id(kv_pool), size, _reach(batch)


def program_for(model: Any, batch: ForwardBatch, kv_pool: Any) -> Program:
    """An empty program with a batch of its own: the given one's copy, with block tables as far as the key reaches."""
    reach = _reach(batch)
    copy = replace(
        batch,
        token_ids=batch.token_ids.clone(),
        positions=batch.positions.clone(),
        seqused_k=batch.seqused_k.clone(),
        max_seqlen_k=reach,
        block_tables=tuple(torch.zeros(table.shape[0], reach, dtype=torch.int32) for table in batch.block_tables),
        slot_mapping=tuple(slots.clone() for slots in batch.slot_mapping),
        kept=None,
        behind_cut=None,
    )
    program = Program(replace(copy, kept=batch.kept, behind_cut=copy), (model, kv_pool))
    program.fill(batch)
    return program


def _reach(batch: ForwardBatch) -> int:
    """Keys that a recorded step has room for: a power of two."""
    return max(_SHORTEST, 1 << (batch.max_seqlen_k - 1).bit_length())
