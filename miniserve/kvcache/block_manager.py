"""Block ids and reference counts: who holds which page of the KV pool. It never sees a tensor.

    request 7   class 0 (full)       [ 4][ 9][12]      block table: logical block -> page
                class 1 (window 8)   [ ·][ ·][ 3][ 5]  · given back: wholly older than the window

    page   state              refs   key
    4      in use             2      (class 0, digest)      shared by two requests
    12     in use             1      None                   still filling
    3      in use             1      (class 1, digest)
    8      free, keeps text   0      (class 0, digest)      found again by a later prompt, or reused (LRU)
    6      free               0      None

Prefix cache: a full block is known by the sha256 of (digest of the block before it, its token ids); the
first link is the request's cache salt. A hit is the longest prefix that *every* class can serve, and at
least one token is always left to compute. A request whose prefix may not be shared has a salt of its own;
its own samples (`n > 1`) still share through it. Keys are published when the step that fills a block is
scheduled: every layer writes all K/V of a step before it attends, so requests of one step can share too (not
with maps in which layers read above themselves: there a step's K/V is complete only at its end).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from hashlib import sha256
from weakref import WeakKeyDictionary

from miniserve.kvcache.layout import KVLayout, RetentionClass
from miniserve.request import Request

Key = tuple[int, bytes]
"""(retention class, digest): what a full block contains."""


@dataclass
class _Page:
    ref_count: int = 0
    key: Key | None = None


@dataclass
class _Table:
    """One request's blocks in one class, and the digests of its full blocks so far."""

    blocks: list[int | None] = field(default_factory=list)
    num_given_back: int = 0  # leading blocks that the window has passed
    num_published: int = 0  # leading blocks whose content is in the prefix cache


class BlockManager:
    """Owns page ids, reference counts, block tables and the prefix cache. Knows no tensors, no time, no policy."""

    def __init__(self, layout: KVLayout, num_pages: int, *, enable_prefix_caching: bool = True) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.enable_prefix_caching = enable_prefix_caching
        self._pages = [_Page() for _ in range(num_pages)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))  # next to reuse first
        self._cached: dict[Key, int] = {}
        self._tables: dict[int, list[_Table]] = {}
        self._digests: WeakKeyDictionary[Request, dict[int, list[bytes]]] = WeakKeyDictionary()  # by block size
        self._unconfirmed: list[Key] = []

    # ---------------------------------------------------------------- what the scheduler asks

    @property
    def num_free(self) -> int:
        """Pages that a request could get now (some may still hold cached text)."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages held by live requests."""
        return self.num_pages - len(self._free)

    def take_prefix(self, request: Request) -> int:
        """Give a new request the cached blocks of its prefix; returns the number of tokens they serve."""
        num_tokens, blocks = self._hit(request)
        self._tables[request.key] = tables = []
        for page_ids in blocks:
            for page in page_ids:
                if page is not None:
                    self._hold(page)
            given_back = next((i for i, page in enumerate(page_ids) if page is not None), len(page_ids))
            tables.append(_Table(list(page_ids), given_back, len(page_ids)))
        return num_tokens

    def can_hold_all(self, request: Request, chunk: int) -> bool:
        """Whether the free pages suffice for all its known tokens, computed `chunk` at a time."""
        tables = self._tables[request.key]
        held = [len(table.blocks) - table.num_given_back for table in tables]
        missing = (c.blocks_for(request.num_tokens, chunk) - h for c, h in zip(self.layout.classes, held))
        return sum(max(0, pages) for pages in missing) <= self.num_free

    def num_tokens_that_fit(self, request: Request, start: int, stop: int) -> int:
        """Of the tokens at positions `start` to `stop`, how many `grow` could take now (0: none)."""
        counts = range(1, stop - start + 1)
        return bisect_right(counts, self.num_free, key=lambda n: self._missing(request, start, start + n))

    def grow(self, request: Request, start: int, stop: int) -> None:
        """Make room for the tokens at positions `start` to `stop` (exclusive), giving back what no window still sees.

        The caller has asked `num_tokens_that_fit`.
        """
        tables = list(zip(self.layout.classes, self._tables[request.key]))
        for cls, table in tables:
            self._give_back(table, cls.first_block_needed(start))
        for cls, table in tables:  # only now: one class may need the pages that another has just given back
            while len(table.blocks) * cls.block_size < stop:
                table.blocks.append(self._take_free_page())

    def publish(self, request: Request, stop: int) -> None:
        """Enter the blocks that are full up to position `stop` into the prefix cache.

        Called when the step that computes them is scheduled; `confirm` or `retract` follows the step.
        """
        for index, (cls, table) in enumerate(zip(self.layout.classes, self._tables[request.key])):
            digests = self._chain(request, cls.block_size, stop // cls.block_size)
            while table.num_published < len(digests) and (table.num_published + 1) * cls.block_size <= stop:
                page = table.blocks[table.num_published]
                key = (index, digests[table.num_published])
                if page is not None and key not in self._cached:
                    self._pages[page].key = key
                    self._cached[key] = page
                    self._unconfirmed.append(key)
                table.num_published += 1

    def confirm(self) -> None:
        """The step went well: what it published is really there."""
        self._unconfirmed.clear()

    def retract(self) -> None:
        """The step failed: forget what it published, nobody may find blocks that were never written."""
        for key in self._unconfirmed:
            page = self._cached.pop(key, None)
            if page is not None:
                self._pages[page].key = None
        self._unconfirmed.clear()

    def free(self, request: Request) -> None:
        """Give back everything a request holds. Its full blocks stay findable until their pages are reused."""
        for table in self._tables.pop(request.key, []):
            for page in reversed(table.blocks):  # the end of a text is the least likely to be asked for again
                if page is not None:
                    self._release(page)

    def forget_prefixes(self) -> None:
        """Empty the prefix cache (running requests keep their blocks)."""
        for page in self._cached.values():
            self._pages[page].key = None
        self._cached.clear()
        self._unconfirmed.clear()

    # ---------------------------------------------------------------- what the batch asks

    def block_table(self, request: Request, class_index: int) -> list[int | None]:
        """Logical block -> page id for one class; None where the block was given back."""
        return self._tables[request.key][class_index].blocks

    def num_pages_held(self, request: Request) -> int:
        """Pages in this request's tables, over all classes."""
        tables = self._tables.get(request.key, [])
        return sum(page is not None for table in tables for page in table.blocks)

    def check_integrity(self) -> None:
        """Recount everything from the tables.

        Raises:
            RuntimeError: a count, the free list or the cache index disagrees with the tables.
        """
        refs = Counter(page for tables in self._tables.values() for table in tables for page in table.blocks)
        for page, state in enumerate(self._pages):
            if state.ref_count != refs[page] or (page in self._free) != (refs[page] == 0):
                raise RuntimeError(
                    f"page {page}: {refs[page]} holders, {state.ref_count} counted, {page in self._free=}"
                )
            if state.key is not None and self._cached.get(state.key) != page:
                raise RuntimeError(f"page {page} claims a key that the prefix cache does not map to it")
        if sum(state.key is not None for state in self._pages) != len(self._cached):
            raise RuntimeError("the prefix cache maps keys to pages that do not carry them")

    # ---------------------------------------------------------------- pages

    def _take_free_page(self) -> int:
        page, _ = self._free.popitem(last=False)
        state = self._pages[page]
        if state.key is not None:
            del self._cached[state.key]
            state.key = None
        state.ref_count = 1
        return page

    def _hold(self, page: int) -> None:
        state = self._pages[page]
        if state.ref_count == 0:
            del self._free[page]
        state.ref_count += 1

    def _release(self, page: int) -> None:
        state = self._pages[page]
        state.ref_count -= 1
        if state.ref_count == 0:
            self._free[page] = None
            if state.key is None:  # nothing worth keeping: reuse it first
                self._free.move_to_end(page, last=False)

    def _give_back(self, table: _Table, first_needed: int) -> None:
        for block in range(table.num_given_back, min(first_needed, len(table.blocks))):
            page = table.blocks[block]
            if page is not None:
                self._release(page)
            table.blocks[block] = None
            table.num_given_back = block + 1

    def _missing(self, request: Request, start: int, stop: int) -> int:
        """Pages that `grow` would have to take beyond those it frees."""
        missing = 0
        for cls, table in zip(self.layout.classes, self._tables[request.key]):
            passed = table.blocks[table.num_given_back : cls.first_block_needed(start)]
            missing -= sum(page is not None and self._pages[page].ref_count == 1 for page in passed)
            missing += max(0, -(-stop // cls.block_size) - len(table.blocks))
        return missing

    # ---------------------------------------------------------------- prefixes

    def _chain(self, request: Request, block_size: int, num_blocks: int) -> list[bytes]:
        """Digests of the request's first `num_blocks` blocks of this size (fewer if it has fewer full ones)."""
        chain = self._digests.setdefault(request, {}).setdefault(block_size, [])
        parent = chain[-1] if chain else sha256(self._salt(request).encode()).digest()
        while len(chain) < min(num_blocks, request.num_tokens // block_size):
            first = len(chain) * block_size
            ids = array("i", request.tokens(first, first + block_size))
            parent = sha256(parent + ids.tobytes()).digest()
            chain.append(parent)
        return chain

    def _salt(self, request: Request) -> str:
        if self.enable_prefix_caching:
            return f"salt {request.params.cache_salt or ''}"
        return f"siblings of {request.parent_key}"

    def _hit(self, request: Request) -> tuple[int, list[list[int | None]]]:
        """The longest common hit: (tokens, per class the pages of its logical blocks)."""
        usable = request.num_tokens - 1 if request.first_logit_needed is None else request.first_logit_needed
        found: list[list[int | None]] = []  # per class: the cached page of each logical block, or None
        hidden = self._unconfirmed if self.layout.sharing.cyclic else ()
        for index, cls in enumerate(self.layout.classes):
            num_blocks = usable // cls.block_size
            digests = self._chain(request, cls.block_size, num_blocks)[:num_blocks]
            keys = [(index, digest) for digest in digests]
            found.append([None if key in hidden else self._cached.get(key) for key in keys])
            if cls.window is None and None in found[-1]:
                usable = found[-1].index(None) * cls.block_size
        step = self.layout.alignment
        for num_tokens in range(usable // step * step, 0, -step):
            blocks = [_servable(c, pages, num_tokens) for c, pages in zip(self.layout.classes, found)]
            if all(b is not None for b in blocks):
                return num_tokens, [b for b in blocks if b is not None]
        return 0, [[] for _ in self.layout.classes]


def _servable(cls: RetentionClass, pages: list[int | None], num_tokens: int) -> list[int | None] | None:
    """The blocks with which one class serves a hit of `num_tokens` tokens, or None if one of them is missing."""
    first, stop = cls.first_block_needed(num_tokens), num_tokens // cls.block_size
    needed = pages[first:stop]
    given_back: list[int | None] = [None] * first
    return None if None in needed else given_back + needed
