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

from dataclasses import dataclass

import torch
from torch import Tensor

from miniserve.errors import ConfigError
from miniserve.kvcache.layout import KVLayout


@dataclass(frozen=True)
class GroupMemory:
    """One layer group's K and V. How K and V lie inside a block is the kernel set's business."""

    k: Tensor  # (N, P, Hkv, Dk), strided by page
    v: Tensor  # (N, P, Hkv, Dv), strided by page
    retention_class: int  # whose block tables and slots address it

    @property
    def block_size(self) -> int:
        """P: slots in a block."""
        return self.k.shape[1]


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
        self.groups = tuple(self._view(g) for g in range(len(layout.groups)))
        self._by_layer = tuple(self.groups[layout.sharing.group_of(i)] for i in range(layout.sharing.num_layers))

    def of_layer(self, layer: int) -> GroupMemory:
        """The memory that this layer reads (and, if it owns its group, writes)."""
        return self._by_layer[layer]

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return self.arena.numel() * self.arena.element_size()

    def fill(self, page: int, value: float) -> None:
        """Overwrite a page: tests poison free pages to prove that nobody reads them."""
        self.arena[page].fill_(value)

    def _view(self, index: int) -> GroupMemory:
        group = self.layout.groups[index]
        block_size = self.layout.classes[group.retention_class].block_size
        heads, key_dim = group.geometry.kv_heads, group.geometry.head_dim
        value_dim = group.geometry.value_dim or key_dim
        v_offset = group.offset + block_size * heads * key_dim
        return GroupMemory(
            k=self._block_view(group.offset, block_size, heads, key_dim),
            v=self._block_view(v_offset, block_size, heads, value_dim),
            retention_class=group.retention_class,
        )

    def _block_view(self, offset: int, block_size: int, heads: int, head_dim: int) -> Tensor:
        stride = (self.arena.shape[1], heads * head_dim, head_dim, 1)
        return self.arena.as_strided((self.num_pages, block_size, heads, head_dim), stride, offset)
