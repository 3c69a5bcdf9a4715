"""The memory behind the block ids: one arena of equal pages, seen by each layer group as its own K and V.

    arena (N pages)    ┌──────────────────────────────┐
    page 0 ──────────► │ K group 0 │ V group 0 │ K gr…│   used by the full class:     P = 16 slots
    page 1 ──────────► │ K group 2 │ V group 2 │ ···  │   used by a windowed class:   P = 64 slots
    page 2 ──────────► │ ...                          │
                       └──────────────────────────────┘
                         group g: k[N, P, Hkv, Dk] and v[N, P, Hkv, Dv], strided views;
                         the stride between blocks is the page

A page belongs to one class at a time (`BlockManager` says which), so no class can strand memory that
another needs. There is no tensor for a reader: it is handed its owner's views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from miniserve.errors import ConfigError
from miniserve.kvcache.layout import KVLayout, LayerGroup, StateGeometry


@dataclass(frozen=True)
class GroupMemory:
    """One layer group's K and V. How K and V lie inside a block is the kernel set's business."""

    k: Tensor  # (N, P, Hkv, Dk), strided by page
    v: Tensor  # (N, P, Hkv, Dv), strided by page
    retention_class: int  # whose block tables and slots address it
    k_scale: Tensor | None = None  # (N, P, Hkv) float32 of int8 K: what a stored number times it is worth
    v_scale: Tensor | None = None  # the same of V

    @property
    def block_size(self) -> int:
        """P: slots in a block."""
        return self.k.shape[1]


@dataclass(frozen=True)
class StateMemory:
    """One recurrent layer's states, one per page: (N, heads, Dk, Dv) float32, strided by page."""

    states: Tensor
    retention_class: int
    block_size: int  # P: tokens from one snapshot to the next

    def load(self, pages: Sequence[int | None]) -> Tensor:
        """The states in these pages, (len(pages), heads, Dk, Dv); None is the empty state before a text."""
        empty = torch.tensor([page is None for page in pages], device=self.states.device)
        return self.states[[page or 0 for page in pages]].masked_fill_(empty[:, None, None, None], 0)

    def store(self, pages: Sequence[int], states: Tensor) -> None:
        """Write states (len(pages), heads, Dk, Dv) to pages."""
        self.states[list(pages)] = states


class KVPool:
    """Allocates the arena once and hands out views of it. Knows nothing of requests."""

    def __init__(self, layout: KVLayout, num_pages: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.num_pages = num_pages
        page_elements = layout.page_bytes // layout.itemsize
        try:
            # Not zeros: so the system hands out memory only as it is written, and nobody reads before that.
            self.arena = torch.empty(num_pages, page_elements, dtype=dtype, device=device)
        except RuntimeError as error:
            raise ConfigError(f"kv_cache_memory: {num_pages} pages do not fit on {device}; lower it") from error
        self.groups: tuple[Any, ...] = tuple(map(self._view, layout.groups))
        self._by_layer = tuple(self.groups[layout.sharing.group_of(i)] for i in range(layout.sharing.num_layers))

    def of_layer(self, layer: int) -> Any:
        """The `GroupMemory` that this layer reads, and writes if it owns its group; a recurrent one's `StateMemory`."""
        return self._by_layer[layer]

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return self.arena.numel() * self.arena.element_size()

    def fill(self, page: int, value: float) -> None:
        """Overwrite a page: tests poison free pages to prove that nobody reads them."""
        arena = self.arena if self.arena.is_floating_point() else self.arena.view(torch.float32)
        arena[page].fill_(value)

    def _view(self, group: LayerGroup) -> GroupMemory | StateMemory:
        block_size, geometry = self.layout.classes[group.retention_class].block_size, group.geometry
        heads, key_dim, value_dim = geometry.kv_heads, geometry.head_dim, geometry.value_dim or geometry.head_dim
        if isinstance(geometry, StateGeometry):
            states = self._pages(torch.float32, 0, heads, key_dim, value_dim)
            return StateMemory(states, group.retention_class, block_size)
        dtype, itemsize = self.arena.dtype, self.layout.itemsize
        k_size, v_size = block_size * heads * key_dim, block_size * heads * value_dim
        first = group.offset // itemsize
        k = self._pages(dtype, first, block_size, heads, key_dim)
        v = self._pages(dtype, first + k_size, block_size, heads, value_dim)
        if itemsize > 1:
            return GroupMemory(k, v, group.retention_class)
        first, size = (group.offset + k_size + v_size) // 4, block_size * heads
        scales = (self._pages(torch.float32, first + i * size, block_size, heads) for i in range(2))
        return GroupMemory(k, v, group.retention_class, *scales)

    def _pages(self, dtype: torch.dtype, offset: int, *shape: int) -> Tensor:
        """(N, *shape): the same part of every page, `offset` numbers of this dtype from its start."""
        arena = self.arena.view(dtype)
        return arena[:, offset : offset + prod(shape)].unflatten(1, shape)
