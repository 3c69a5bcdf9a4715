"""From the map to memory: layer groups, retention classes, bytes. Nothing else in the engine counts layers.

    KVSharing  0_0_2_2_4s_4s            what reads what
       │  + geometry of each owner      heads and head sizes
       ▼
    LayerGroup      0: layers 0 1       ONE K and ONE V memory each
                    1: layers 2 3
                    2: layers 4 5 (last W tokens)
       ▼  grouped by how long they live
    RetentionClass  0: groups 0 1       one block table per request each
                    1: group 2

Blocks of all classes are pages of one size, so that a page can serve any class: what short prompts do
not use, long ones can. A class whose tokens take fewer bytes gets more slots in a page (`block_size`).
Plain arithmetic: no tensors here (see `pool`) and no requests (see `block_manager`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import ceil, lcm

from miniserve.errors import ConfigError
from miniserve.kvcache.sharing import KVSharing

_MAX_WASTE = 1 / 16  # of a page, in any class


@dataclass(frozen=True)
class KVGeometry:
    """What one layer would store of one token: Hkv heads of a key and a value."""

    kv_heads: int
    head_dim: int
    value_dim: int | None = None  # None: as wide as the key
    state_bytes = 0

    def bytes_per_token(self, itemsize: int) -> int:
        """K and V together; numbers of one byte come with a float32 scale for each head's key and value."""
        scales = 8 if itemsize == 1 else 0
        return self.kv_heads * ((self.head_dim + (self.value_dim or self.head_dim)) * itemsize + scales)


@dataclass(frozen=True)
class StateGeometry:
    """What a recurrent layer keeps of a text of any length: a (Dk, Dv) matrix of float32 for each head."""

    kv_heads: int
    head_dim: int
    value_dim: int

    def bytes_per_token(self, itemsize: int) -> int:
        """None: a state does not grow."""
        return 0

    @property
    def state_bytes(self) -> int:
        """Of one state."""
        return 4 * self.kv_heads * self.head_dim * self.value_dim


Geometry = KVGeometry | StateGeometry


@dataclass(frozen=True)
class LayerGroup:
    """An owner with its readers: one K and one V memory, or one state."""

    owner: int
    layers: tuple[int, ...]  # all that attend to this memory, the owner first
    geometry: Geometry
    window: int | None  # tokens kept: the widest reader's window, None for all
    retention_class: int
    bytes_per_token: int
    offset: int  # bytes from the start of a page to this group's K; its V follows, then the scales of int8


@dataclass(frozen=True)
class RetentionClass:
    """The groups whose K/V lives equally long; they share one block table per request.

    A state class (`state_bytes` > 0) is one group with a window of 2: all that the next token needs is the state behind
    the token before it. A block of it is the state behind the block's last token so far, and once that is full, a
    snapshot from which another request can go on.
    """

    window: int | None  # None: kept as long as the request
    groups: tuple[int, ...]
    block_size: int  # P: token slots in a page
    bytes_per_token: int
    state_bytes: int = 0

    def blocks_for(self, num_tokens: int, chunk: int = 1) -> int:
        """The most blocks that a request of `num_tokens` tokens, computed `chunk` at a time, ever holds at once."""
        blocks = ceil(num_tokens / self.block_size)
        if self.window is None:
            return blocks
        # A chunk of n queries sees n + W - 1 tokens; lying anywhere, they touch one block more than aligned.
        span = chunk + self.window - 1
        return min(blocks, ceil((span - 1) / self.block_size) + 1)

    def first_block_needed(self, position: int) -> int:
        """The first logical block that a query at `position`, or any later one, still reads."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.block_size


@dataclass(frozen=True)
class KVLayout:
    """Groups, classes and page size of one model in one engine."""

    sharing: KVSharing
    groups: tuple[LayerGroup, ...]
    classes: tuple[RetentionClass, ...]
    itemsize: int  # bytes per stored number; 1: int8
    page_bytes: int
    unshared_bytes_per_token: int  # what it would be if every layer owned its K/V

    @classmethod
    def build(
        cls,
        sharing: KVSharing,
        geometry: Sequence[Geometry],
        *,
        itemsize: int,
        block_size: int,
        max_model_len: int,
        block_size_multiple: int = 1,
    ) -> KVLayout:
        """Turn a map and the geometry of each layer into groups and classes.

        `block_size` is the number of slots in a block of the class with the largest tokens. A window that
        no request can exceed (`>= max_model_len`) is no window. Blocks are multiples of
        `block_size_multiple` and may be a little larger than asked, so that pages are well used by every class.
        """
        for layer, owner in enumerate(sharing.owners):
            if geometry[layer] != geometry[owner]:
                raise ConfigError(
                    f"kv_sharing: layer {layer} ({geometry[layer]}) cannot read layer {owner} ({geometry[owner]}); "
                    "a reader needs its owner's KV heads and head size"
                )
            if itemsize == 1 and (geometry[layer].head_dim % 4 or (geometry[layer].value_dim or 0) % 4):
                raise ConfigError(f"kv_cache_dtype=int8: needs head sizes in fours, not {geometry[layer]}")
        owners = sharing.group_owners
        states = [geometry[owner].state_bytes for owner in owners]
        windows = [2 if s else _effective_window(sharing.retention(o), max_model_len) for o, s in zip(owners, states)]
        token_bytes = [geometry[owner].bytes_per_token(itemsize) for owner in owners]
        kinds = [(owner if s else -1, w) for owner, s, w in zip(owners, states, windows)]  # a state is its own class
        distinct = sorted(set(kinds), key=lambda kind: (kind[0], kind[1] is not None, kind[1]))
        class_bytes = [sum(b for b, k in zip(token_bytes, kinds) if k == kind) for kind in distinct]
        block_sizes = _block_sizes(class_bytes, block_size, block_size_multiple, max(states))
        members = [tuple(g for g, k in enumerate(kinds) if k == kind) for kind in distinct]
        class_states = [sum(states[g] for g in groups if kind[0] >= 0) for kind, groups in zip(distinct, members)]
        classes = tuple(map(RetentionClass, (w for _, w in distinct), members, block_sizes, class_bytes, class_states))
        groups = [
            LayerGroup(
                owner=owner,
                layers=sharing.readers(owner),
                geometry=geometry[owner],
                window=windows[g],
                retention_class=(index := distinct.index(kinds[g])),
                bytes_per_token=token_bytes[g],
                offset=classes[index].block_size * sum(token_bytes[other] for other in members[index] if other < g),
            )
            for g, owner in enumerate(owners)
        ]
        return cls(
            sharing=sharing,
            groups=tuple(groups),
            classes=classes,
            itemsize=itemsize,
            page_bytes=max(size * b for size, b in zip(block_sizes, class_bytes)),
            unshared_bytes_per_token=sum(layer.bytes_per_token(itemsize) for layer in geometry),
        )

    @cached_property
    def bytes_per_token(self) -> int:
        """Sum over groups of Hkv * (Dk + Dv) * itemsize (and the scales of int8)."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def reduction(self) -> float:
        """How many times smaller a token is than without sharing (20 layers, CLA-3: 20/7)."""
        return self.unshared_bytes_per_token / self.bytes_per_token

    @cached_property
    def alignment(self) -> int:
        """Tokens at which the blocks of all classes begin together: prefix hits are multiples of it."""
        return lcm(*(c.block_size for c in self.classes))

    def num_pages(self, memory_bytes: int) -> int:
        """N: the pages that a budget pays for."""
        return memory_bytes // self.page_bytes

    def blocks_for(self, num_tokens: int, chunk: int = 1) -> int:
        """Pages that a request of `num_tokens` tokens holds at most, over all classes."""
        return sum(c.blocks_for(num_tokens, chunk) for c in self.classes)

    def max_request_tokens(self, num_pages: int) -> int | None:
        """The most tokens that one request alone can keep in `num_pages` pages; None if there is no limit."""
        if all(c.window is not None for c in self.classes) and num_pages >= self.blocks_for(1 << 62):
            return None
        return bisect_right(range(1 << 60), num_pages, key=self.blocks_for) - 1


def _effective_window(window: int | None, max_model_len: int) -> int | None:
    return None if window is None or window >= max_model_len else window


def _block_sizes(class_bytes: list[int], block_size: int, multiple: int, state_bytes: int) -> list[int]:
    """Slots per page of each class: little waste in every class, and block boundaries that often coincide.

    A page is `base` slots of the class with the largest tokens, and holds the largest state. Among the sizes that leave
    at most 1/16 of it unused in the others, those of the smallest common multiple are taken: prefix hits end at one.
    """
    largest = max(class_bytes)
    if not largest:
        raise ConfigError("kv_sharing: no layer keeps K/V; models with states alone are not supported")
    start = ceil(max(block_size, state_bytes / largest) / multiple) * multiple
    best: list[int] = []
    for base in range(start, start + 32 * multiple, multiple):
        page, sizes = base * largest, [base]
        for b in class_bytes:
            smallest = ceil(page * (1 - _MAX_WASTE) / max(b, 1) / multiple) * multiple
            fitting = [base] if b in (0, largest) else range(smallest, page // b + 1, multiple)
            sizes.append(min(fitting, key=partial(lcm, *sizes), default=0))
        if 0 not in sizes and (not best or lcm(*sizes) < lcm(*best)):
            best = sizes[1:]
    return best or [start * largest // (b or largest) // multiple * multiple for b in class_bytes]
