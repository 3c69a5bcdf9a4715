"""The arena: bytes to the byte, views that neither overlap nor leave gaps, no tensor for a reader.

Where two views meet is found by writing a different number into every element through the views and reading
everything back, not by looking at strides.
"""

import pytest
import torch

from miniserve.kvcache.layout import KVGeometry, KVLayout
from miniserve.kvcache.pool import KVPool
from miniserve.kvcache.sharing import KVSharing

EMPTY = -1.0


def pool_of(sharing, geometry, num_pages, *, block_size=4, dtype=torch.float32, max_model_len=1024):
    layout = KVLayout.build(
        sharing, geometry, itemsize=dtype.itemsize, block_size=block_size, max_model_len=max_model_len
    )
    return KVPool(layout, num_pages, dtype=dtype, device=torch.device("cpu"))


def one_class():
    return pool_of(KVSharing.cla(5, 2), [KVGeometry(2, 8)] * 5, 6)


def two_head_sizes():
    """Gemma 4's shape: full layers have heads twice as wide as windowed ones."""
    full = [False, False, True, False, True, False, True]
    sharing = KVSharing((0, 1, 2, 3, 4, 3, 4), tuple(None if f else 6 for f in full))
    return pool_of(sharing, [KVGeometry(1, 16 if f else 8) for f in full], 7)


def narrow_values():
    """Three retention classes whose tokens have unequal sizes, and V narrower than K."""
    sharing = KVSharing((0, 1, 2, 2, 4), (None, 5, 9, 9, 5))
    return pool_of(
        sharing, [KVGeometry(2, 4, 3), KVGeometry(1, 6), KVGeometry(3, 5, 2), KVGeometry(3, 5, 2), KVGeometry(1, 4)], 9
    )


POOLS = pytest.mark.parametrize("pool", [one_class, two_head_sizes, narrow_values], ids=lambda make: make.__name__)


def number(pool, pages_of_class):
    """Write a different number into every element of every group's own pages; returns [(view, pages, numbers)]."""
    pool.arena.fill_(EMPTY)
    written, count = [], 0
    for group, pages in [(g, pages_of_class[g.retention_class]) for g in pool.groups]:
        for view in (group.k, group.v):
            size = (len(pages), *view.shape[1:])
            numbers = torch.arange(count, count + torch.Size(size).numel(), dtype=view.dtype).view(size)
            count += numbers.numel()
            view[pages] = numbers
            written.append((view, pages, numbers))
    return written


@POOLS
def test_views_of_different_groups_never_overlap(pool):
    pool = pool()
    num_classes = len(pool.layout.classes)
    pages_of_class = [list(range(index, pool.num_pages, num_classes)) for index in range(num_classes)]
    for view, pages, numbers in number(pool, pages_of_class):
        assert torch.equal(view[pages], numbers)


@POOLS
def test_a_class_covers_its_pages_and_nothing_else(pool):
    pool = pool()
    for index, cls in enumerate(pool.layout.classes):
        pages = [[], [], []]
        pages[index] = [1, 3]
        number(pool, pages)
        untouched = [(pool.arena[page] == EMPTY).sum().item() for page in range(pool.num_pages)]
        page_elements = pool.arena.shape[1]
        used = cls.block_size * cls.bytes_per_token // pool.layout.itemsize
        assert untouched == [
            page_elements - used if page in (1, 3) else page_elements for page in range(pool.num_pages)
        ]
        assert page_elements - used <= page_elements / 16
        assert cls.bytes_per_token < max(c.bytes_per_token for c in pool.layout.classes) or used == page_elements


@POOLS
def test_of_layer_is_the_owners_memory(pool):
    pool = pool()
    owners = pool.layout.sharing.owners
    for layer, owner in enumerate(owners):
        assert pool.of_layer(layer) is pool.of_layer(owner)
    memories = {id(pool.of_layer(layer)) for layer in range(len(owners))}
    assert len(memories) == len(set(owners)) == len(pool.layout.groups)
    for g, group in enumerate(pool.layout.groups):
        assert pool.groups[g] is pool.of_layer(group.owner)


@POOLS
def test_no_view_has_memory_of_its_own(pool):
    pool = pool()
    arena = pool.arena.untyped_storage().data_ptr()
    for layer in range(pool.layout.sharing.num_layers):
        assert pool.of_layer(layer).k.untyped_storage().data_ptr() == arena
        assert pool.of_layer(layer).v.untyped_storage().data_ptr() == arena


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("sharing", "owners"), [(KVSharing.none(6), 6), (KVSharing.cla(6, 2), 3), (KVSharing.cla(6, 4), 2)]
)
def test_allocated_bytes_are_the_closed_form(sharing, owners, dtype):
    pool = pool_of(sharing, [KVGeometry(3, 8)] * 6, 11, block_size=16, dtype=dtype)
    closed_form = 11 * 16 * owners * 3 * (8 + 8) * dtype.itemsize
    assert pool.num_bytes == closed_form
    assert pool.arena.untyped_storage().nbytes() == closed_form


def test_allocated_bytes_with_two_head_sizes():
    pool = two_head_sizes()
    # Owners 0, 1, 3 are windowed with heads of 8, owners 2 and 4 full with heads of 16: 48 and 64 numbers a token.
    # A page is 4 full tokens of 64; 5 windowed ones of 48 use 240 of its 256 numbers.
    assert [(c.window, c.block_size) for c in pool.layout.classes] == [(None, 4), (6, 5)]
    assert pool.num_bytes == pool.arena.untyped_storage().nbytes() == 7 * 4 * 64 * 4
    assert [tuple(pool.groups[g].k.shape) for g in range(4)] == [
        (7, 5, 1, 8),
        (7, 5, 1, 8),
        (7, 4, 1, 16),
        (7, 5, 1, 8),
    ]
    assert [pool.of_layer(layer).block_size for layer in range(7)] == [5, 5, 4, 5, 4, 5, 4]


def test_k_and_v_may_have_different_widths():
    pool = narrow_values()
    shapes = {
        layer: (tuple(pool.of_layer(layer).k.shape[2:]), tuple(pool.of_layer(layer).v.shape[2:])) for layer in (0, 1, 3)
    }
    assert shapes == {0: ((2, 4), (2, 3)), 1: ((1, 6), (1, 6)), 3: ((3, 5), (3, 2))}
    assert [pool.of_layer(layer).retention_class for layer in range(5)] == [0, 1, 2, 2, 1]


def test_a_cla2_pool_of_the_same_bytes_has_twice_the_slots():
    twin, shared = (
        pool_of(s, [KVGeometry(2, 8)] * 8, 1, block_size=16) for s in (KVSharing.none(8), KVSharing.cla(8, 2))
    )
    budget = 5 * twin.num_bytes
    pages = [pool.layout.num_pages(budget) for pool in (twin, shared)]
    pools = [
        KVPool(pool.layout, n, dtype=torch.float32, device=torch.device("cpu"))
        for pool, n in zip((twin, shared), pages)
    ]
    assert [pool.num_bytes for pool in pools] == [budget, budget]
    slots = [pool.of_layer(0).k.shape[0] * pool.of_layer(0).k.shape[1] for pool in pools]
    assert slots == [80, 160]


def test_a_page_is_filled_whole_and_alone():
    pool = two_head_sizes()
    for page in range(7):
        pool.fill(page, 7.0 if page == 2 else 0.0)
    for g in range(len(pool.layout.groups)):
        for view in (pool.groups[g].k, pool.groups[g].v):
            assert [(view[page] == 7).all().item() for page in range(7)] == [page == 2 for page in range(7)]
            assert (view[[0, 1, 3, 4, 5, 6]] == 0).all()
