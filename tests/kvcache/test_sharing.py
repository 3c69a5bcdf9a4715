"""The sharing map: every constructor against hand-checked vectors, the text form, the refusals, the drawing.

The expected lists are written out, or come from the rule as its paper or config states it, never from the class.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniserve.errors import ConfigError
from miniserve.kvcache import sharing as sharing_module
from miniserve.kvcache.sharing import SCHEMES, KVSharing
from miniserve.models.lckv_llama import lckv_map
from miniserve.report import draw_map

MIXATTENTION = "0_1s_1s_3s_3s_3s_0_7s_7s_9s_9s_9s_12_13s_13s_15s_15s_15s_12_19s_19s_19s"
LCKV_W2 = "_".join(["0"] + ["20"] * 20 + ["21"])
HYMBA_GROUPS = [[i, i + 1] for i in range(1, 15, 2)] + [[16, 17, 18]] + [[i, i + 1] for i in range(19, 31, 2)]


def gemma_types(num_layers, period):
    """Every `period`-th layer is full, the others slide."""
    return ["full" if (layer + 1) % period == 0 else "sliding" for layer in range(num_layers)]


def readers_of(sharing):
    """Reader -> owner, without the owners themselves."""
    return {layer: owner for layer, owner in enumerate(sharing.owners) if layer != owner}


# -------------------------------------------------------------------- schemes


def test_no_sharing():
    assert KVSharing.none(4).owners == (0, 1, 2, 3)
    assert KVSharing.none(4).windows == (None,) * 4


def test_cla_with_a_short_last_group():
    assert KVSharing.cla(5, 2).owners == (0, 0, 2, 2, 4)


def test_cla3_on_20_layers_has_7_owners():
    sharing = KVSharing.cla(20, 3)
    assert sharing.group_owners == (0, 3, 6, 9, 12, 15, 18)
    assert sharing.owners == (0, 0, 0, 3, 3, 3, 6, 6, 6, 9, 9, 9, 12, 12, 12, 15, 15, 15, 18, 18)


@pytest.mark.parametrize(
    ("num_kv_layers", "owners"),
    [
        (6, (0, 2, 4, 6, 8, 10)),
        (5, (0, 2, 4, 7, 9)),
        (1, (0,)),
        (12, tuple(range(12))),
    ],
)
def test_mlkv_owners_of_12_layers(num_kv_layers, owners):
    assert KVSharing.mlkv(12, num_kv_layers).group_owners == owners


def test_mlkv_reads_the_nearest_owner_below():
    assert KVSharing.mlkv(12, 5).owners == (0, 0, 2, 2, 4, 4, 4, 7, 7, 9, 9, 9)


def test_mlkv_follows_the_authors_floating_point_rule():
    # 11 * 30 / 22 is 15, and 11 * (30 / 22) is 14.999999999999998.
    assert KVSharing.mlkv(30, 22).group_owners == (
        (0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 16, 17, 19, 20, 21, 23, 24, 25, 27, 28)
    )


def test_mlkv_differs_from_an_integer_rule_for_42_of_4950_pairs():
    pairs = [(num_layers, m) for num_layers in range(1, 100) for m in range(1, num_layers + 1)]
    floors = {(n, m): (0, *((i + 1) * n // m for i in range(m - 1))) for n, m in pairs}
    different = [pair for pair in pairs if KVSharing.mlkv(*pair).group_owners != floors[pair]]
    assert (len(pairs), len(different)) == (4950, 42)
    assert (30, 22) in different


def test_mlkv_has_as_many_owners_as_asked():
    for num_layers in range(1, 60):
        for m in range(1, num_layers + 1):
            assert len(KVSharing.mlkv(num_layers, m).group_owners) == m


def test_nearest_owner_gives_dense_front_and_back():
    assert KVSharing.nearest_owner(6, [0, 1, 2, 4]).owners == (0, 1, 2, 2, 4, 4)
    assert KVSharing.nearest_owner(6, [4, 0, 5]).owners == (0, 0, 0, 0, 4, 5)


def test_gemma4_e2b():
    sharing = KVSharing.last_of_same_kind(gemma_types(35, 5), 20)
    full = {19: 14, 24: 14, 29: 14, 34: 14}
    assert readers_of(sharing) == {layer: full.get(layer, 13) for layer in range(15, 35)}


def test_gemma4_e4b():
    sharing = KVSharing.last_of_same_kind(gemma_types(42, 6), 18)
    full = {29: 23, 35: 23, 41: 23}
    assert readers_of(sharing) == {layer: full.get(layer, 22) for layer in range(24, 42)}


def test_gemma3n_e2b():
    sharing = KVSharing.last_of_same_kind(gemma_types(30, 5), 10)
    full = {24: 19, 29: 19}
    assert readers_of(sharing) == {layer: full.get(layer, 18) for layer in range(20, 30)}


def test_gemma3n_e4b():
    sharing = KVSharing.last_of_same_kind(gemma_types(35, 5), 15)
    full = {24: 19, 29: 19, 34: 19}
    assert readers_of(sharing) == {layer: full.get(layer, 18) for layer in range(20, 35)}


def test_last_of_same_kind_is_not_a_fixed_distance():
    types = ["full", "sliding", "sliding", "sliding", "full"]
    assert KVSharing.last_of_same_kind(types, 2).owners == (0, 1, 2, 2, 0)
    assert KVSharing.last_of_same_kind(types, 0).owners == (0, 1, 2, 3, 4)


def test_mixattention_groups_interleave():
    sharing = lckv_map(MIXATTENTION, 22, 1024)
    assert sharing.group_owners == (0, 1, 3, 7, 9, 12, 13, 15, 19)
    assert [owner for owner in sharing.group_owners if sharing.retention(owner) is None] == [0, 12]
    assert (sharing.owners[6], sharing.owners[18]) == (0, 12)
    assert [layer for layer in range(22) if sharing.windows[layer] is None] == [0, 6, 12, 18]
    assert set(sharing.windows) == {None, 1024}


def test_apple_afm():
    assert readers_of(KVSharing.suffix(56, 21)) == {layer: 34 for layer in range(35, 56)}
    assert KVSharing.suffix(56, 21).cut == 34


def test_suffix_without_readers_shares_nothing():
    assert KVSharing.suffix(3, 0).owners == (0, 1, 2)


def test_yoco_upper_half_reads_one_group():
    sharing = KVSharing.yoco(26)
    assert sharing.owners == (*range(13), *[13] * 13)
    assert sharing.cut == 13


@pytest.mark.parametrize(("num_layers", "owners"), [(1, (0,)), (2, (0, 1)), (3, (0, 1, 1)), (5, (0, 1, 2, 2, 2))])
def test_yoco_small(num_layers, owners):
    assert KVSharing.yoco(num_layers).owners == owners


def test_hymba_groups():
    sharing = KVSharing.from_groups(32, HYMBA_GROUPS)
    assert [sharing.owners[layer] for layer in (14, 15, 16, 17, 18, 19, 20, 30, 31)] == [
        13,
        15,
        16,
        16,
        16,
        19,
        19,
        29,
        31,
    ]
    assert readers_of(sharing) == {**{i + 1: i for i in (*range(1, 15, 2), *range(19, 31, 2))}, 17: 16, 18: 16}


def test_llm_foundry_chain_ends_at_its_root():
    offsets = [None] * 18
    offsets[6] = offsets[12] = -6
    assert readers_of(KVSharing.relative(offsets)) == {6: 0, 12: 0}


def test_llm_foundry_character_ai_layout():
    block = [None, -1, None, -1, -2, -6]  # own, reuse, own, reuse, reuse, and the first full layer's
    sharing = KVSharing.relative([None, *block, *block])
    assert sharing.owners == (0, 1, 1, 3, 3, 3, 0, 7, 7, 9, 9, 9, 0)


@pytest.mark.parametrize(
    ("group_size", "owners"),
    [(1, (0, 1, 2, 3, 4, 5, 6, 7)), (2, (0, 1, 2, 3, 3, 5, 5, 7)), (3, (0, 1, 2, 3, 3, 3, 6, 6))],
)
def test_acrosskv(group_size, owners):
    assert KVSharing.acrosskv(8, 3, group_size).owners == owners


def test_sambay_attention_layers_behind_the_middle_read_layer_17():
    sharing = KVSharing.sambay(32)  # its attention layers are 1, 3, ..., 31
    assert [2 * owner + 1 for owner in sharing.owners] == [1, 3, 5, 7, 9, 11, 13, 15, 17, *[17] * 7]


def test_lists_follow_chains_to_the_root():
    assert KVSharing.from_list([0, 0, 1, 2, 4, 4, 5]).owners == (0, 0, 0, 0, 4, 4, 4)
    assert KVSharing.from_list([0, 0], [None, 7]).windows == (None, 7)


# -------------------------------------------------------------------- what the engine asks


def test_questions_about_a_map():
    sharing = KVSharing((0, 1, 0, 1, 4), (None, 8, 5, 3, 2))
    assert sharing.num_layers == 5
    assert sharing.group_owners == (0, 1, 4)
    assert [sharing.owns(layer) for layer in range(5)] == [True, True, False, False, True]
    assert [sharing.group_of(layer) for layer in range(5)] == [0, 1, 0, 1, 2]
    assert [sharing.readers(owner) for owner in (0, 1, 4)] == [(0, 2), (1, 3), (4,)]
    assert sharing.cut == 4


def test_retention_is_the_widest_readers():
    assert KVSharing((0, 0, 0), (2, 9, 4)).retention(0) == 9
    assert KVSharing((0, 0, 0), (2, None, 4)).retention(0) is None


def test_other_windows_same_owners():
    sharing = KVSharing.cla(4, 2).with_windows([None, 3, 4, None])
    assert (sharing.owners, sharing.windows) == ((0, 0, 2, 2), (None, 3, 4, None))


def test_drawing_of_a_small_map():
    assert draw_map(KVSharing.parse("0_0_2s_2s", window=128)).split("\n") == [
        "layer    0 1 2 3",
        "group 0  ■ ● · ·",
        "group 1  · · ◧ ○",
    ]


def test_drawing_is_the_one_in_the_module_docstring():
    picture = [line.removeprefix("    ") for line in sharing_module.__doc__.splitlines()]
    drawn = draw_map(KVSharing.parse("0_0_2s_2s", window=128)).splitlines()
    start = picture.index(drawn[0])
    assert [line[: len(drawn[0])] for line in picture[start : start + len(drawn)]] == drawn


def test_drawing_with_two_digit_layers_keeps_its_columns():
    lines = draw_map(KVSharing.suffix(12, 2)).splitlines()
    assert lines[0] == "layer     0  1  2  3  4  5  6  7  8  9 10 11"
    assert lines[-1] == "group 9   ·  ·  ·  ·  ·  ·  ·  ·  ·  ■  ●  ●"
    assert len(lines) == 11 and len(set(map(len, lines))) == 1


# -------------------------------------------------------------------- text


@st.composite
def maps(draw):
    """Random finished maps with random windows."""
    owners = [0]
    for layer in range(1, draw(st.integers(1, 14))):
        owners.append(draw(st.sampled_from([layer, *sorted(set(owners))])))
    windows = draw(st.lists(st.none() | st.integers(1, 300), min_size=len(owners), max_size=len(owners)))
    if draw(st.booleans()):  # one size of window, as most models have
        windows = [None if window is None else 64 for window in windows]
    return tuple(owners), tuple(windows)


@given(maps())
@settings(deadline=None)
def test_text_round_trip(owners_and_windows):
    owners, windows = owners_and_windows
    sharing = KVSharing(owners, windows)
    distinct = {window for window in windows if window is not None}
    window = distinct.pop() if len(distinct) == 1 else None  # several sizes stand in the text itself
    for again in (
        KVSharing.parse(str(sharing), window=window),
        KVSharing.parse(f" lckv:{sharing} ", len(owners), window=window),
    ):
        assert (again.owners, again.windows) == (owners, windows)


@given(maps())
@settings(deadline=None)
def test_lists_of_finished_maps_stay_as_they_are(owners_and_windows):
    owners, windows = owners_and_windows
    sharing = KVSharing.from_list(owners, windows)
    assert (sharing.owners, sharing.windows) == (owners, windows)


@pytest.mark.parametrize(
    ("sharing", "text"),
    [
        (KVSharing((0, 0, 2, 2), (None,) * 4), "0_0_2_2"),
        (KVSharing((0, 0, 2, 2), (None, None, 8, 8)), "0_0_2s_2s"),
        (KVSharing((0, 0, 2, 2), (None, 4, 8, 8)), "0_0s4_2s8_2s8"),
    ],
)
def test_text_form(sharing, text):
    assert str(sharing) == text


@pytest.mark.parametrize(
    ("text", "owners"),
    [
        ("none", (0, 1, 2, 3, 4, 5)),
        ("cla:2", (0, 0, 2, 2, 4, 4)),
        ("cla:4", (0, 0, 0, 0, 4, 4)),
        ("cla:1", (0, 1, 2, 3, 4, 5)),
        ("mlkv:3", (0, 0, 2, 2, 4, 4)),
        ("suffix:4", (0, 1, 1, 1, 1, 1)),
        ("suffix:0", (0, 1, 2, 3, 4, 5)),
        ("yoco", (0, 1, 2, 3, 3, 3)),
        ("0_0_1_3_3_0", (0, 0, 0, 3, 3, 0)),
        ("lckv:0_1_1_1_0_5", (0, 1, 1, 1, 0, 5)),
        ("  cla:3 ", (0, 0, 0, 3, 3, 3)),
    ],
)
def test_text_schemes(text, owners):
    assert KVSharing.parse(text, 6).owners == owners


def test_every_scheme_with_a_name_is_reachable_by_text():
    assert set(SCHEMES) == {"none", "cla", "mlkv", "suffix", "yoco"}


def test_a_map_of_one_layer():
    assert KVSharing.parse("0").owners == (0,)
    assert KVSharing.parse("0s", window=3).windows == (3,)


def test_a_layer_that_reads_above_itself_cannot_see_its_own_token():
    sharing = lckv_map(LCKV_W2, 22, None)
    assert sharing.group_owners == (0, 20, 21) and sharing.cut == 21 and sharing.cyclic
    assert [layer for layer in range(22) if not sharing.sight(layer)["diagonal"]] == list(range(1, 20))
    assert not KVSharing.cla(6, 2).cyclic and all(KVSharing.cla(6, 2).sight(layer)["diagonal"] for layer in range(6))


def test_own_windows_stay_unless_an_entry_says_otherwise():
    own = [None, 16, None, 16]
    assert KVSharing.parse("cla:2", 4, own_windows=own).windows == (None, 16, None, 16)
    assert KVSharing.parse("0_0_2s_2s7", 4, window=9, own_windows=own).windows == (None, 16, 9, 7)
    assert KVSharing.parse("0_0s_0_0", 4, window=9).windows == (None, 9, None, None)


# -------------------------------------------------------------------- refusals

REFUSED = {
    "ring of two": (lambda: KVSharing.from_list([0, 2, 1]), ["layer 1", "1 -> 2 -> 1"]),
    "ring of three": (lambda: KVSharing.from_list([0, 3, 1, 2]), ["layer 1", "1 -> 3 -> 2 -> 1"]),
    "reader of a ring": (lambda: KVSharing.from_list([1, 2, 1]), ["layer 0", "0 -> 1 -> 2 -> 1"]),
    "window and owner above": (lambda: KVSharing.from_list([0, 2, 2], [None, 4, None]), ["layer 1", "window"]),
    "no owner at 0": (lambda: KVSharing.nearest_owner(4, [1, 2]), ["layer 0"]),
    "no owners at all": (lambda: KVSharing.nearest_owner(4, []), ["layer 0"]),
    "empty list": (lambda: KVSharing.from_list([]), ["empty"]),
    "no layers": (lambda: KVSharing.none(0), ["empty"]),
    "layer that does not exist": (lambda: KVSharing.from_list([0, 5]), ["layer 1 reads layer 5", "0 to 1"]),
    "negative entry": (lambda: KVSharing.from_list([0, -1]), ["layer 1 reads layer -1"]),
    "entry that is no number": (lambda: KVSharing.from_list([0, "0"]), ["layer 1", "'0'"]),
    "entry None": (lambda: KVSharing.from_list([0, None]), ["layer 1", "None"]),
    "too few windows": (lambda: KVSharing.from_list([0, 0, 0], [None]), ["1 windows for 3 layers"]),
    "too many windows": (lambda: KVSharing.cla(2, 2).with_windows([1, 2, 3]), ["3 windows for 2 layers"]),
    "window 0": (lambda: KVSharing.from_list([0, 0], [None, 0]), ["layer 1 has window 0"]),
    "negative window": (lambda: KVSharing.from_list([0, 0], [-4, None]), ["layer 0 has window -4"]),
    "unresolved chain": (lambda: KVSharing((0, 0, 1), (None,) * 3), ["layer 2 reads layer 1"]),
    "unresolved chain upwards": (lambda: KVSharing((1, 2, 2), (None,) * 3), ["layer 0 reads layer 1"]),
    "owner out of range": (lambda: KVSharing((0, 3, 2), (None,) * 3), ["layer 1 reads layer 3"]),
    "text: wrong length": (lambda: KVSharing.parse("0_0_2", 4), ["3 entries", "4 layers"]),
    "text: too long": (lambda: KVSharing.parse("0_0_2_2", 3), ["4 entries", "3 layers"]),
    "text: s without window": (lambda: KVSharing.parse("0_0s"), ["layer 1", "'0s'", "sliding_window"]),
    "text: s0": (lambda: KVSharing.parse("0_0s0"), ["layer 1 has window 0"]),
    "text: s with window 0": (lambda: KVSharing.parse("0s_0", window=0), ["layer 0 has window 0"]),
    "text: negative entry": (lambda: KVSharing.parse("0_-1"), ["layer 1", "'-1'"]),
    "text: empty entry": (lambda: KVSharing.parse("0__1"), ["layer 1", "''"]),
    "text: word as an entry": (lambda: KVSharing.parse("0_x_0"), ["layer 1", "'x'"]),
    "text: nothing after lckv": (lambda: KVSharing.parse("lckv:"), ["layer 0"]),
    "text: ring": (lambda: KVSharing.parse("0_2_1"), ["layer 1", "ring"]),
    "text: nothing": (lambda: KVSharing.parse("", 4), ["kv_sharing=''", "cla"]),
    "text: unknown scheme": (lambda: KVSharing.parse("clap:2", 4), ["'clap'", "none, cla, mlkv, suffix, yoco"]),
    "text: number of layers unknown": (lambda: KVSharing.parse("cla:2"), ["cla:2", "number of layers"]),
    "cla:0": (lambda: KVSharing.parse("cla:0", 4), ["cla:0", "at least 1"]),
    "cla:x": (lambda: KVSharing.parse("cla:x", 4), ["cla:x", "whole number"]),
    "cla:-2": (lambda: KVSharing.parse("cla:-2", 4), ["cla:-2", "whole number"]),
    "cla:1.5": (lambda: KVSharing.parse("cla:1.5", 4), ["cla:1.5", "whole number"]),
    "cla without a number": (lambda: KVSharing.parse("cla", 4), ["'cla'", "cla:N"]),
    "cla with nothing": (lambda: KVSharing.parse("cla:", 4), ["'cla:'", "cla:N"]),
    "cla below 1": (lambda: KVSharing.cla(4, -1), ["cla:-1"]),
    "none:3": (lambda: KVSharing.parse("none:3", 4), ["none:3", "just 'none'"]),
    "yoco:x": (lambda: KVSharing.parse("yoco:x", 4), ["yoco:x", "just 'yoco'"]),
    "mlkv:99": (lambda: KVSharing.parse("mlkv:99", 4), ["num_key_value_layers=99", "4 layers"]),
    "mlkv:0": (lambda: KVSharing.parse("mlkv:0", 4), ["num_key_value_layers=0"]),
    "suffix:L": (lambda: KVSharing.parse("suffix:4", 4), ["suffix:4", "0 to 3"]),
    "suffix below 0": (lambda: KVSharing.suffix(4, -1), ["suffix:-1"]),
    "LCKV wrong length": (lambda: lckv_map("0_0", 3, None), ["2 entries", "3 layers"]),
    "LCKV without window": (lambda: lckv_map("0_0s", 2, None), ["layer 1", "sliding_window"]),
    "LCKV chain": (lambda: lckv_map("0_0_1_3", 4, None), ["layer_types", "layer 2 reads layer 1"]),
    "LCKV windowed chain": (lambda: lckv_map("0_0s_1s_3", 4, 8), ["layer_types", "layer 2 reads layer 1"]),
    "Gemma: all shared": (
        lambda: KVSharing.last_of_same_kind(["full"] * 3, 3),
        ["num_kv_shared_layers=3", "0 and 2"],
    ),
    "Gemma: below 0": (lambda: KVSharing.last_of_same_kind(["full"] * 3, -1), ["num_kv_shared_layers=-1"]),
    "Gemma: kind without owner": (
        lambda: KVSharing.last_of_same_kind(["sliding", "sliding", "full"], 1),
        ["num_kv_shared_layers=1", "layer 2", "'full'"],
    ),
    "Hymba: layer that does not exist": (lambda: KVSharing.from_groups(4, [[1, 4]]), ["kv_reuse_group", "layer 4"]),
    "Hymba: negative layer": (lambda: KVSharing.from_groups(4, [[-1, 2]]), ["kv_reuse_group", "layer -1"]),
    "Hymba: owner above its reader": (lambda: KVSharing.from_groups(4, [[2, 1]]), ["layer 1", "below its owner 2"]),
    "Hymba: layer in two groups": (
        lambda: KVSharing.from_groups(4, [[0, 1], [1, 2]]),
        ["kv_reuse_group", "layer 1"],
    ),
    "owner that does not exist": (lambda: KVSharing.nearest_owner(4, [0, 9]), ["layer 9"]),
    "llm-foundry: forward": (lambda: KVSharing.relative([None, 1, None]), ["reuse_kv_layer_idx=1", "layer 1"]),
    "llm-foundry: itself": (lambda: KVSharing.relative([None, 0]), ["reuse_kv_layer_idx=0", "layer 1"]),
    "llm-foundry: below layer 0": (lambda: KVSharing.relative([None, -2]), ["reuse_kv_layer_idx=-2", "layer 1"]),
    "AcrossKV: more owners than layers": (lambda: KVSharing.acrosskv(4, 5, 1), ["num_key_value_layers=5"]),
    "AcrossKV: group of 0": (lambda: KVSharing.acrosskv(4, 2, 0), ["key_value_group_size=0"]),
}


@pytest.mark.parametrize(("build", "named"), REFUSED.values(), ids=REFUSED.keys())
def test_invalid_maps_are_refused_by_name(build, named):
    with pytest.raises(ConfigError) as refusal:
        build()
    for words in named:
        assert words in str(refusal.value)


@given(st.lists(st.integers(-2, 7), min_size=1, max_size=6))
@settings(deadline=None)
def test_a_list_is_a_map_exactly_if_every_chain_ends_at_a_layer_that_reads_itself(reads):
    valid, ends = all(0 <= read < len(reads) for read in reads), list(range(len(reads)))
    for _ in reads:
        ends = [reads[end] for end in ends] if valid else ends
    if valid and all(reads[end] == end for end in ends):
        sharing = KVSharing.from_list(reads)
        assert all(sharing.owners[owner] == owner for owner in sharing.owners)
        assert all(sharing.owners[layer] == sharing.owners[read] for layer, read in enumerate(reads))
    else:
        with pytest.raises(ConfigError, match="layer"):
            KVSharing.from_list(reads)
