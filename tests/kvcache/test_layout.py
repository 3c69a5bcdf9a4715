"""Groups, classes and bytes: closed forms and published figures by hand, bounds against brute force.

The brute force plays a request chunk by chunk and counts the blocks that some query still sees or that are
being written; it shares nothing with the formulas under test.
"""

import json
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniserve.errors import ConfigError
from miniserve.kvcache.layout import KVGeometry, KVLayout, RetentionClass, StateGeometry
from miniserve.kvcache.sharing import KVSharing
from miniserve.report import kv_report

MIB = 2**20


def layout_of(sharing, geometry, *, block_size=16, max_model_len=4096, itemsize=2, multiple=1):
    if isinstance(geometry, KVGeometry):
        geometry = [geometry] * sharing.num_layers
    return KVLayout.build(
        sharing,
        geometry,
        itemsize=itemsize,
        block_size=block_size,
        max_model_len=max_model_len,
        block_size_multiple=multiple,
    )


def gemma(num_layers, num_shared, period, kv_heads, full_head_dim, max_model_len=131072, block_size=16):
    """Gemma 3n and 4: every `period`-th layer is full, the others see 512 tokens and have heads of 256."""
    full = [(layer + 1) % period == 0 for layer in range(num_layers)]
    sharing = KVSharing.last_of_same_kind(["full" if f else "sliding" for f in full], num_shared)
    sharing = sharing.with_windows([None if f else 512 for f in full])
    geometry = [KVGeometry(kv_heads, full_head_dim if f else 256) for f in full]
    return layout_of(sharing, geometry, max_model_len=max_model_len, block_size=block_size)


def seen_blocks(block_size, window, start, stop):
    """The logical blocks that a step over positions start to stop writes or reads."""
    first = 0 if window is None else max(0, start - window + 1)
    return {position // block_size for position in range(first, stop)}


def most_blocks(cls, num_tokens, chunk):
    """By trial: the most blocks that any step of at most `chunk` tokens touches."""
    return max(
        (
            len(seen_blocks(cls.block_size, cls.window, start, stop))
            for stop in range(1, num_tokens + 1)
            for start in range(max(0, stop - chunk), stop)
        ),
        default=0,
    )


# -------------------------------------------------------------------- published figures


@pytest.mark.parametrize(
    ("layout", "full_bytes", "window_bytes", "reduction", "mib_8k", "mib_128k"),
    [
        (gemma(30, 10, 5, 2, 256), 8192, 32768, 1.5, 80, 1040),
        (gemma(35, 15, 5, 2, 256), 8192, 32768, 1.75, 80, 1040),
        (gemma(35, 20, 5, 1, 512), 6144, 12288, 7 / 3, 54, 774),
        (gemma(42, 18, 6, 2, 512), 16384, 40960, 1.75, 148, 2068),
    ],
    ids=["gemma-3n-e2b", "gemma-3n-e4b", "gemma-4-e2b", "gemma-4-e4b"],
)
def test_gemma_figures(layout, full_bytes, window_bytes, reduction, mib_8k, mib_128k):
    full, windowed = layout.classes
    assert (full.window, full.bytes_per_token) == (None, full_bytes)
    assert (windowed.window, windowed.bytes_per_token) == (512, window_bytes)
    assert layout.bytes_per_token == full_bytes + window_bytes
    assert layout.reduction == pytest.approx(reduction)
    for num_tokens, mib in ((8192, mib_8k), (131072, mib_128k)):
        assert num_tokens * full.bytes_per_token + 512 * windowed.bytes_per_token == mib * MIB


def test_gemma4_e2b_groups_have_two_head_sizes():
    layout = gemma(35, 20, 5, 1, 512)
    assert [group.owner for group in layout.groups] == list(range(15))
    assert [group.owner for group in layout.groups if group.geometry.head_dim == 512] == [4, 9, 14]
    assert layout.groups[14].layers == (14, 19, 24, 29, 34)
    assert layout.groups[13].layers == (13, *(layer for layer in range(15, 35) if (layer + 1) % 5))
    assert layout.classes[0].groups == (4, 9, 14)
    assert [layout.groups[g].retention_class for g in (3, 4, 5)] == [1, 0, 1]


@pytest.mark.parametrize(
    ("sharing", "kv_heads", "head_dim", "bytes_per_token"),
    [
        (KVSharing.none(20), 16, 128, 163_840),
        (KVSharing.none(20), 4, 128, 40_960),
        (KVSharing.none(20), 1, 128, 10_240),
        (KVSharing.cla(20, 2), 1, 128, 5_120),
        (KVSharing.cla(20, 2), 4, 128, 20_480),
        (KVSharing.cla(20, 3), 1, 128, 3_584),
        (KVSharing.cla(20, 4), 1, 128, 2_560),
        (KVSharing.cla(20, 2), 1, 90, 3_600),
        (KVSharing.none(32), 1, 128, 16_384),
    ],
)
def test_table_of_the_cla_paper(sharing, kv_heads, head_dim, bytes_per_token):
    assert layout_of(sharing, KVGeometry(kv_heads, head_dim)).bytes_per_token == bytes_per_token


def test_20_layers_by_threes_is_20_over_7():
    assert layout_of(KVSharing.cla(20, 3), KVGeometry(1, 128)).reduction == 20 / 7


def test_reduction_counts_bytes_not_layers():
    geometry = [KVGeometry(4, 8), KVGeometry(1, 8), KVGeometry(1, 8)]
    assert layout_of(KVSharing((0, 1, 1), (None,) * 3), geometry).reduction == 6 / 5


# -------------------------------------------------------------------- groups and classes


@st.composite
def models(draw):
    """(owners, windows, geometry per layer): random, with equal geometry inside a group."""
    owners, geometry = [], []
    for layer in range(draw(st.integers(1, 8))):
        owner = draw(st.sampled_from([layer, *sorted(set(owners))])) if owners else 0
        owners.append(owner)
        own = KVGeometry(draw(st.integers(1, 4)), draw(st.integers(1, 9)), draw(st.none() | st.integers(1, 9)))
        geometry.append(geometry[owner] if owner < layer else own)
    windows = draw(st.lists(st.sampled_from([None, 1, 3, 8, 20]), min_size=len(owners), max_size=len(owners)))
    return tuple(owners), tuple(windows), geometry


@given(models(), st.sampled_from([2, 4]), st.integers(1, 20), st.integers(1, 8))
@settings(deadline=None, max_examples=200)
def test_bytes_classes_and_pages_of_any_model(model, itemsize, block_size, multiple):
    owners, windows, geometry = model
    layout = layout_of(
        KVSharing(owners, windows), geometry, itemsize=itemsize, block_size=block_size, multiple=multiple
    )

    per_layer = [g.kv_heads * (g.head_dim + (g.head_dim if g.value_dim is None else g.value_dim)) for g in geometry]
    assert layout.bytes_per_token == itemsize * sum(per_layer[layer] for layer in sorted(set(owners)))
    assert layout.unshared_bytes_per_token == itemsize * sum(per_layer)

    in_classes = sorted(g for cls in layout.classes for g in cls.groups)
    assert in_classes == list(range(len(set(owners))))
    for index, cls in enumerate(layout.classes):
        assert {layout.groups[g].retention_class for g in cls.groups} == {index}
        assert cls.bytes_per_token == sum(layout.groups[g].bytes_per_token for g in cls.groups)
        for g in cls.groups:
            seen = [windows[layer] for layer in layout.groups[g].layers]
            assert cls.window == (None if None in seen else max(seen))

    assert len({cls.window for cls in layout.classes}) == len(layout.classes)
    for cls in layout.classes:
        used = cls.block_size * cls.bytes_per_token
        assert cls.block_size % multiple == 0
        assert 15 * layout.page_bytes <= 16 * used <= 16 * layout.page_bytes
    largest = max(layout.classes, key=lambda cls: cls.bytes_per_token)
    assert largest.block_size >= block_size
    assert all(layout.alignment % cls.block_size == 0 for cls in layout.classes)


def test_block_size_is_as_asked_if_nothing_is_wasted():
    layout = gemma(35, 20, 5, 1, 512, block_size=16)
    assert [cls.block_size for cls in layout.classes] == [32, 16]  # a full token has half the bytes
    assert layout.page_bytes == 16 * 12288
    assert layout.alignment == 32


def test_blocks_grow_until_little_is_wasted():
    sharing = KVSharing((0, 1), (None, 8))
    layout = layout_of(sharing, [KVGeometry(2, 4), KVGeometry(3, 4)], block_size=1)
    # 32 and 48 bytes: one slot of each wastes a third of the page, 3 and 2 slots nothing.
    assert ([cls.block_size for cls in layout.classes], layout.page_bytes) == ([3, 2], 96)


def test_block_sizes_are_multiples_of_what_the_kernels_want():
    assert [
        c.block_size for c in layout_of(KVSharing.none(2), KVGeometry(1, 4), block_size=20, multiple=16).classes
    ] == [32]


def test_block_sizes_of_many_classes_are_found_at_once():
    sharing = KVSharing(tuple(range(8)), (None, None, None, 1, 2, 3, 4, 5))  # one class of 3 groups, 5 of 1
    begin = process_time()
    layout = layout_of(sharing, KVGeometry(1, 4), block_size=16)
    assert process_time() - begin < 0.5
    assert len(layout.classes) == 6
    assert all(15 * layout.page_bytes <= 16 * cls.block_size * cls.bytes_per_token for cls in layout.classes)


def test_a_window_that_nothing_exceeds_is_no_window():
    owners, geometry = (0, 1, 1), KVGeometry(2, 8)
    full = layout_of(KVSharing(owners, (None, None, None)), geometry, max_model_len=64)
    for window in (64, 65, 1000):
        collapsed = layout_of(KVSharing(owners, (None, window, window)), geometry, max_model_len=64)
        assert collapsed.classes == full.classes
        assert collapsed.groups == full.groups
        assert collapsed.page_bytes == full.page_bytes
    assert len(layout_of(KVSharing(owners, (None, 63, 63)), geometry, max_model_len=64).classes) == 2


def test_one_full_reader_keeps_the_whole_group():
    layout = layout_of(KVSharing((0, 0, 2), (8, None, 8)), KVGeometry(1, 4))
    assert [(cls.window, cls.groups) for cls in layout.classes] == [(None, (0,)), (8, (1,))]


@pytest.mark.parametrize("wrong", [KVGeometry(2, 8), KVGeometry(1, 16), KVGeometry(1, 8, 4)])
def test_a_reader_of_another_shape_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"layer 1 .*cannot read layer 0"):
        layout_of(KVSharing.cla(2, 2), [KVGeometry(1, 8), wrong])


# -------------------------------------------------------------------- how many blocks


classes_ = st.builds(
    RetentionClass,
    window=st.none() | st.integers(1, 14),
    groups=st.just((0,)),
    block_size=st.integers(1, 6),
    bytes_per_token=st.just(1),
)


@given(classes_, st.integers(1, 30), st.integers(1, 30))
@settings(deadline=None, max_examples=150)
def test_blocks_for_is_the_worst_step(cls, num_tokens, chunk):
    assert cls.blocks_for(num_tokens, chunk) == most_blocks(cls, num_tokens, chunk)


@given(classes_, st.integers(0, 40))
def test_first_block_needed_is_the_first_that_a_query_sees(cls, position):
    assert cls.first_block_needed(position) == min(seen_blocks(cls.block_size, cls.window, position, position + 1))


@given(models(), st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 5))
@settings(deadline=None, max_examples=150)
def test_blocks_for_bounds_every_way_to_chunk_a_request(model, chunks, block_size):
    owners, windows, geometry = model
    layout = layout_of(KVSharing(owners, windows), geometry, block_size=block_size, max_model_len=200)
    start = 0
    for chunk in chunks:
        stop = start + chunk
        held = sum(len(seen_blocks(cls.block_size, cls.window, start, stop)) for cls in layout.classes)
        assert held <= layout.blocks_for(sum(chunks), max(chunks))
        start = stop


@given(models(), st.integers(0, 40), st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_max_request_tokens_is_exact(model, num_pages, block_size):
    owners, windows, geometry = model
    layout = layout_of(KVSharing(owners, windows), geometry, block_size=block_size, max_model_len=200)
    spans = [(cls.block_size, cls.window) for cls in layout.classes]

    def fits(num_tokens):  # one token at a time
        return (
            sum(
                max(
                    (len(seen_blocks(size, window, i, i + 1)) for i in range(num_tokens)),
                    default=0,
                )
                for size, window in spans
            )
            <= num_pages
        )

    most = layout.max_request_tokens(num_pages)
    if most is None:
        assert None not in [window for _, window in spans]
        assert all(fits(num_tokens) for num_tokens in range(100, 200))
    else:
        assert fits(most)
        assert not fits(most + 1)


def test_max_request_tokens_of_one_class_are_its_slots():
    layout = layout_of(KVSharing.none(3), KVGeometry(1, 4), block_size=16)
    assert [layout.max_request_tokens(n) for n in (0, 1, 7)] == [0, 16, 112]


def test_windowed_classes_alone_have_no_limit_once_the_window_fits():
    layout = layout_of(KVSharing.none(1).with_windows([8]), KVGeometry(1, 4), block_size=4)
    # 8 tokens lie in at most 3 blocks of 4.
    assert [layout.max_request_tokens(n) for n in (1, 2, 3)] == [4, 8, None]


# -------------------------------------------------------------------- budgets


@given(st.integers(1, 10**7), st.integers(1, 8))
@settings(deadline=None)
def test_a_budget_pays_for_whole_pages(budget, block_size):
    layout = layout_of(KVSharing.cla(6, 2), KVGeometry(2, 16), block_size=block_size)
    assert layout.num_pages(budget) * layout.page_bytes <= budget < (layout.num_pages(budget) + 1) * layout.page_bytes


@given(
    st.integers(1, 12), st.integers(1, 4), st.sampled_from([4, 16, 64]), st.sampled_from([1, 4, 16]), st.integers(1, 50)
)
@settings(deadline=None)
def test_cla2_holds_exactly_twice_the_tokens_of_its_unshared_twin(pairs, kv_heads, head_dim, block_size, blocks):
    twin, shared = (
        layout_of(sharing, KVGeometry(kv_heads, head_dim), block_size=block_size)
        for sharing in (KVSharing.none(2 * pairs), KVSharing.cla(2 * pairs, 2))
    )
    budget = blocks * block_size * 2 * pairs * kv_heads * 2 * head_dim * 2  # pays for `blocks` of the twin's
    twin_pages, shared_pages = twin.num_pages(budget), shared.num_pages(budget)
    assert twin.max_request_tokens(twin_pages) == blocks * block_size
    assert shared.max_request_tokens(shared_pages) == 2 * blocks * block_size
    assert kv_report(twin, twin_pages, 1, kv_heads)["capacity_tokens"] == blocks * block_size
    assert kv_report(shared, shared_pages, 1, kv_heads)["capacity_tokens"] == 2 * blocks * block_size


# -------------------------------------------------------------------- 8 bits and states


def test_int8_tokens_carry_a_scale_for_each_head_and_part():
    layout = layout_of(KVSharing.cla(4, 2), KVGeometry(3, 64, 32), itemsize=1)
    assert layout.bytes_per_token == 2 * 3 * (64 + 32 + 2 * 4)
    assert [group.offset for group in layout.groups] == [0, 16 * 3 * (64 + 32 + 8)]
    with pytest.raises(ConfigError, match="kv_cache_dtype=int8.*head_dim=6"):
        layout_of(KVSharing.none(2), KVGeometry(1, 6), itemsize=1)


@pytest.mark.parametrize("block_size", [1, 16, 100])
def test_states_are_classes_of_their_own_in_pages_that_hold_one(block_size):
    """Layers 0 and 1 keep states, 2 and 3 read one K/V of 64 bytes a token."""
    geometry = [StateGeometry(2, 16, 16)] * 2 + [KVGeometry(1, 16)] * 2
    layout = layout_of(KVSharing((0, 1, 2, 2), (None,) * 4), geometry, block_size=block_size)
    full, *states = layout.classes
    assert (full.groups, full.window, full.state_bytes) == ((2,), None, 0)
    assert [(c.groups, c.window, c.state_bytes) for c in states] == [((0,), 2, 2048), ((1,), 2, 2048)]
    assert layout.page_bytes == max(2048, block_size * 64)
    assert {c.block_size for c in layout.classes} == {max(32, block_size)} == {layout.alignment}
    assert layout.bytes_per_token == 64 and layout.unshared_bytes_per_token == 128
    assert [c.blocks_for(10_000) for c in states] == [2, 2]
    assert [group.geometry for group in layout.groups] == [geometry[0], geometry[1], geometry[2]]


def test_states_alone_are_no_kv_cache():
    with pytest.raises(ConfigError, match="states alone"):
        layout_of(KVSharing.none(2), [StateGeometry(1, 4, 4)] * 2)


def test_a_reader_cannot_read_a_state_as_kv():
    with pytest.raises(ConfigError, match="layer 1"):
        layout_of(KVSharing((0, 0), (None,) * 2), [StateGeometry(1, 8, 8), KVGeometry(1, 8)])


# -------------------------------------------------------------------- the report


def test_report_has_the_promised_fields_and_is_json():
    report = kv_report(gemma(35, 20, 5, 1, 512), 100, 131072, 8)
    assert json.loads(json.dumps(report)) == report
    promised = {"bytes_per_token", "capacity_tokens", "max_model_len", "max_full_requests", "reduction", "groups"}
    assert promised <= report.keys()
    for group in report["groups"]:
        assert {"owner", "readers", "kv_heads", "head_dim", "window", "bytes_per_token"} <= group.keys()


def test_report_of_a_plain_model():
    report = kv_report(layout_of(KVSharing.cla(4, 2), KVGeometry(3, 64), block_size=16, itemsize=4), 10, 50, 9)
    assert report["kv_sharing"] == "0_0_2_2"
    assert report["bytes_per_token"] == 2 * 3 * 128 * 4
    assert report["capacity_tokens"] == 10 * 16
    assert report["max_model_len"] == 50
    assert report["max_full_requests"] == 2  # 50 tokens take 4 of the 10 blocks
    assert report["reduction"] == 2
    assert report["num_blocks"] == 10
    assert report["kv_cache_bytes"] == 10 * report["block_bytes"] == 10 * 16 * 2 * 3 * 128 * 4
    group = {"kv_heads": 3, "head_dim": 64, "window": None, "bytes_per_token": 3 * 128 * 4}
    assert report["groups"] == [{"owner": 0, "readers": [1], **group}, {"owner": 2, "readers": [3], **group}]
    assert report["classes"] == [{"window": None, "groups": [0, 1], "block_size": 16, "state_bytes": 0}]
    # 9 query heads in 4 layers and 16 bits, against 3 KV heads in 2 groups and 32 bits
    assert report["multi_head_reduction"] == (9 * 4 * 2) / (3 * 2 * 4)


def test_report_counts_windowed_groups_up_to_their_window():
    sharing = KVSharing((0, 1, 1), (None, 8, 8))
    report = kv_report(layout_of(sharing, KVGeometry(1, 2), block_size=4, max_model_len=32), 40, 32, 1)
    assert [(group["window"], group["readers"]) for group in report["groups"]] == [(None, []), (8, [2])]
    assert report["bytes_per_token"] == 16
    # A request of 32 tokens keeps 32 + 8 tokens of 8 bytes; 40 blocks are 1280 bytes, so 4 of them, of 32 tokens.
    assert report["capacity_tokens"] == 4 * 32
    # In whole blocks it needs 8, and 3 for a window that lies anywhere.
    assert report["max_full_requests"] == 40 // 11


def test_report_names_no_window_that_nothing_exceeds():
    layout = layout_of(KVSharing((0, 1), (None, 64)), KVGeometry(1, 4), max_model_len=64)
    report = kv_report(layout, 8, 64, 1)
    assert [group["window"] for group in report["groups"]] == [None, None]
    assert len(report["classes"]) == 1
