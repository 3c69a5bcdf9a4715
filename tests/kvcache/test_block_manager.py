"""Who holds which page: the prefix cache by hand-made cases, and everything together by random operations.

The random part has a judge of its own. It plays the memory: for every slot of every page it knows which text
(salt and all tokens up to there) the K/V in it came from, and so whether what a request reads is really its own.
"""

from itertools import count

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from miniserve.kvcache.block_manager import BlockManager
from miniserve.kvcache.layout import KVGeometry, KVLayout
from miniserve.kvcache.sharing import KVSharing
from miniserve.request import Request, SamplingParams

NEW_KEYS = count()


def layout_of(*windows, block_size, heads=None):
    """One owner per window; `heads` makes their tokens unequally large."""
    sharing = KVSharing(tuple(range(len(windows))), windows)
    geometry = [KVGeometry(h, 4) for h in heads or [1] * len(windows)]
    return KVLayout.build(sharing, geometry, itemsize=4, block_size=block_size, max_model_len=1000)


def manager(*windows, block_size=4, num_pages=32, caching=True):
    return BlockManager(layout_of(*windows, block_size=block_size), num_pages, enable_prefix_caching=caching)


def ask(prompt, parent_key=None, **params):
    key = next(NEW_KEYS)
    parent_key = key if parent_key is None else parent_key
    return Request(key, parent_key, list(prompt), SamplingParams(**params), 1000, frozenset())


def compute(blocks, request, num_tokens=None):
    """One step of one request: its next tokens, by default all of them."""
    start = request.num_computed_tokens
    stop = request.num_tokens if num_tokens is None else start + num_tokens
    assert blocks.num_tokens_that_fit(request, start, stop) == stop - start
    blocks.grow(request, start, stop)
    blocks.publish(request, stop)
    blocks.confirm()
    request.num_computed_tokens = stop


def run(blocks, prompt, **params):
    """Admit a request and compute its whole prompt; returns it and the tokens that the cache served."""
    request = ask(prompt, **params)
    hit = request.num_computed_tokens = blocks.take_prefix(request)
    compute(blocks, request)
    blocks.check_integrity()
    return request, hit


def run_and_free(blocks, prompt, **params):
    request, hit = run(blocks, prompt, **params)
    blocks.free(request)
    blocks.check_integrity()
    return hit


def hit_of(blocks, prompt, **params):
    """What the cache would serve of a prompt now."""
    request = ask(prompt, **params)
    hit = blocks.take_prefix(request)
    blocks.free(request)
    return hit


def tables(blocks, request):
    return [list(blocks.block_table(request, index)) for index in range(len(blocks.layout.classes))]


# -------------------------------------------------------------------- prefix cache


@pytest.mark.parametrize(
    ("length", "served"), [(1, 0), (3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8), (13, 12)]
)
@pytest.mark.parametrize("windows", [(None,), (None, 6), (6,), (None, 3, 9)])
def test_the_same_prompt_again_leaves_a_token_to_compute(length, served, windows):
    blocks = manager(*windows)
    assert run_and_free(blocks, range(length)) == 0
    assert run_and_free(blocks, range(length)) == served


@pytest.mark.parametrize(("common", "served"), [(0, 0), (3, 0), (4, 4), (5, 4), (8, 8), (11, 8)])
def test_a_hit_ends_where_the_texts_part(common, served):
    blocks = manager(None)
    run_and_free(blocks, range(12))
    assert run_and_free(blocks, [*range(common), *range(50, 60)]) == served


def test_a_block_is_found_only_behind_the_same_text():
    blocks = manager(None)
    run_and_free(blocks, [1, 2, 3, 4, 5, 6, 7, 8])
    assert hit_of(blocks, [9, 9, 9, 9, 5, 6, 7, 8, 0]) == 0
    assert hit_of(blocks, [5, 6, 7, 8, 1, 2, 3, 4, 0]) == 0


def test_a_windowed_block_too_is_found_only_behind_the_same_text():
    blocks = manager(2)
    run_and_free(blocks, [1, 2, 3, 4, 5, 6, 7, 8])
    assert hit_of(blocks, [9, 9, 9, 9, 5, 6, 7, 8, 0]) == 0


def test_token_ids_are_told_apart_in_all_their_bits():
    blocks = manager(None)
    run_and_free(blocks, [7, 7, 7, 7, 7])
    assert hit_of(blocks, [7, 7, 7, 7 + (1 << 16), 7]) == 0
    assert hit_of(blocks, [7, 7, 7, 7 + (1 << 24), 7]) == 0


def test_salts_isolate():
    blocks = manager(None)
    run_and_free(blocks, range(9), cache_salt="alice")
    assert hit_of(blocks, range(9), cache_salt="bob") == 0
    assert hit_of(blocks, range(9)) == 0
    assert hit_of(blocks, range(9), cache_salt="alice") == 8


def test_without_prefix_caching_only_siblings_share():
    blocks = manager(None, caching=False)
    first, _ = run(blocks, range(9))
    assert hit_of(blocks, range(9)) == 0
    assert hit_of(blocks, range(9), cache_salt="x") == 0
    assert hit_of(blocks, range(9), parent_key=first.parent_key) == 8


def test_prompt_logprobs_are_computed_and_not_found():
    blocks = manager(None)
    run_and_free(blocks, range(12))
    request = ask(range(12), prompt_logprobs=1)
    assert blocks.take_prefix(request) == 0
    blocks.free(request)
    request.num_prompt_logprobs = 7  # preempted when the caller had 7: the row of token 6 comes next
    assert blocks.take_prefix(request) == 4
    blocks.free(request)
    request.num_prompt_logprobs = 12
    assert blocks.take_prefix(request) == 8


def test_outputs_are_found_by_the_next_turn():
    blocks = manager(None, 6)
    request, _ = run(blocks, range(6))
    for token in (70, 71, 72):
        request.output_token_ids.append(token)
        compute(blocks, request)
    blocks.free(request)
    assert hit_of(blocks, [*range(6), 70, 71, 72, 5, 5]) == 8


def test_a_preempted_request_finds_its_own_blocks():
    blocks = manager(None)
    request, _ = run(blocks, range(10))
    blocks.free(request)
    request.output_token_ids += [90, 91, 92]
    assert blocks.take_prefix(request) == 8


def test_requests_of_one_step_share():
    blocks = manager(None)
    first, second = ask(range(9)), ask(range(9))
    blocks.take_prefix(first)
    blocks.grow(first, 0, 9)
    blocks.publish(first, 9)
    assert blocks.take_prefix(second) == 8
    assert tables(blocks, second)[0] == tables(blocks, first)[0][:2]


def test_requests_of_one_step_do_not_share_where_layers_read_above_themselves():
    """There a block's K/V is complete only when the step is over."""
    layout = KVLayout.build(
        KVSharing((0, 2, 2), (None,) * 3), [KVGeometry(1, 4)] * 3, itemsize=4, block_size=4, max_model_len=1000
    )
    blocks = BlockManager(layout, 8)
    first, second = ask(range(5)), ask(range(5))
    assert blocks.take_prefix(first) == 0
    blocks.grow(first, 0, 4)
    blocks.publish(first, 4)
    assert blocks.take_prefix(second) == 0
    blocks.free(second)
    blocks.confirm()
    assert blocks.take_prefix(second) == 4
    blocks.check_integrity()


def test_half_full_blocks_are_not_found():
    blocks = manager(None)
    request = ask(range(20))
    blocks.take_prefix(request)
    compute(blocks, request, 7)
    assert hit_of(blocks, range(20)) == 4


# -------------------------------------------------------------------- retention classes


def test_a_windowed_class_serves_a_hit_with_its_last_tokens_alone():
    blocks = manager(4, num_pages=6)
    request = ask(range(17))
    blocks.take_prefix(request)
    for num_tokens in (4, 4, 4, 4, 1):
        compute(blocks, request, num_tokens)
    third, fourth = tables(blocks, request)[0][2:4]
    assert third is None  # wholly older than the window of token 17
    blocks.free(request)
    for token in (60, 61, 62, 63):  # reuse two blank pages and those of the first two blocks
        run(blocks, [token])
    assert hit_of(blocks, range(5)) == hit_of(blocks, range(9)) == 0
    assert hit_of(blocks, range(13)) == 12
    again, hit = run(blocks, range(17))
    assert hit == 16
    assert tables(blocks, again)[0][:4] == [None, None, None, fourth]


def test_a_hit_needs_every_class():
    blocks = manager(None, 4, num_pages=8)
    request = ask(range(16))
    blocks.take_prefix(request)
    for _ in range(4):
        compute(blocks, request, 4)
    assert tables(blocks, request)[1][:2] == [None, None]  # given back, and still findable
    assert [hit_of(blocks, [*range(n), 99]) for n in (4, 8, 12, 16)] == [4, 8, 12, 16]
    run(blocks, [60])  # takes their two pages
    assert [hit_of(blocks, [*range(n), 99]) for n in (4, 8, 12, 16)] == [0, 0, 12, 16]


def test_a_window_wider_than_a_block_needs_all_blocks_that_it_touches():
    blocks = manager(None, 6, num_pages=9)
    request = ask(range(17))
    blocks.take_prefix(request)
    for num_tokens in (4, 4, 4, 4, 1):
        compute(blocks, request, num_tokens)
    assert blocks.num_free == 1  # 5 full blocks and windowed blocks 2, 3, 4 (token 16 sees 11 to 16)
    assert [page is None for page in tables(blocks, request)[1]] == [True, True, False, False, False]


def test_windowed_classes_give_back_blocks_while_they_run():
    blocks = manager(8, num_pages=4)  # 8 tokens lie in at most 3 blocks of 4
    request, _ = run(blocks, [0])
    for token in range(1, 200):
        request.output_token_ids.append(token)
        compute(blocks, request)
        blocks.check_integrity()
        position = request.num_tokens - 1
        visible = {p // 4 for p in range(max(0, position - 7), position + 1)}
        held = {block for block, page in enumerate(tables(blocks, request)[0]) if page is not None}
        assert held == visible
        assert blocks.num_used == blocks.num_pages_held(request) == len(visible)


def test_a_page_may_pass_from_one_class_to_another_within_a_step():
    blocks = manager(None, 1, block_size=1, num_pages=6)
    request = ask(range(5))
    blocks.take_prefix(request)
    compute(blocks, request, 3)
    assert blocks.num_free == 0
    assert blocks.num_tokens_that_fit(request, 3, 5) == 1  # three windowed pages come back, a token takes two
    compute(blocks, request, 1)
    assert tables(blocks, request)[1][:3] == [None] * 3
    assert blocks.num_free == 1
    compute(blocks, request)
    blocks.check_integrity()


def test_a_shared_page_that_a_window_passes_is_not_free_yet():
    blocks = manager(2, block_size=1, num_pages=3)
    first, _ = run(blocks, [1, 2])
    second, hit = run(blocks, [1, 2, 3])
    assert hit == 2
    assert blocks.num_free == 0  # [1] and [2] of the first, of which the second shares [2], and its own [3]
    second.output_token_ids.append(4)
    assert blocks.num_tokens_that_fit(second, 3, 4) == 0
    blocks.free(first)
    assert blocks.num_free == 1
    compute(blocks, second)
    blocks.check_integrity()
    assert blocks.num_free == 1  # it took one and gave [2] back


# -------------------------------------------------------------------- least recently used, confirm, retract


@pytest.mark.parametrize(("taken", "older", "newer"), [(2, 8, 8), (3, 4, 8), (4, 0, 8), (5, 0, 4), (6, 0, 0)])
def test_blank_pages_go_first_then_the_end_of_the_oldest_text(taken, older, newer):
    blocks = manager(None, num_pages=6)
    run_and_free(blocks, range(9))
    run_and_free(blocks, range(20, 29))
    for token in range(taken):
        run(blocks, [60 + token])
    assert hit_of(blocks, range(9)) == older
    assert hit_of(blocks, range(20, 29)) == newer


def test_a_text_that_was_found_again_is_the_newest():
    blocks = manager(None, num_pages=6)
    run_and_free(blocks, range(9))
    run_and_free(blocks, range(20, 29))
    assert hit_of(blocks, range(9)) == 8
    for token in range(4):
        run(blocks, [60 + token])
    assert hit_of(blocks, range(9)) == 8
    assert hit_of(blocks, range(20, 29)) == 0


def test_retract_forgets_what_the_failed_step_published_and_no_more():
    blocks = manager(None, 8)
    good, _ = run(blocks, range(9))
    bad = ask([*range(8), *range(30, 39)])
    bad.num_computed_tokens = blocks.take_prefix(bad)
    assert bad.num_computed_tokens == 8
    blocks.grow(bad, 8, 17)
    blocks.publish(bad, 17)
    assert hit_of(blocks, [*range(8), *range(30, 39)]) == 16
    blocks.retract()
    blocks.free(bad)
    blocks.check_integrity()
    assert hit_of(blocks, [*range(8), *range(30, 39)]) == 8
    blocks.free(good)
    assert run_and_free(blocks, range(9)) == 8


def test_a_confirmed_step_is_not_retracted_by_a_later_one():
    blocks = manager(None)
    run_and_free(blocks, range(9))
    blocks.retract()
    blocks.check_integrity()
    assert hit_of(blocks, range(9)) == 8


def test_forgotten_prefixes_are_not_found_and_running_requests_stay():
    blocks = manager(None, 6)
    request, _ = run(blocks, range(9))
    before = tables(blocks, request)
    blocks.forget_prefixes()
    blocks.check_integrity()
    assert hit_of(blocks, range(9)) == 0
    assert tables(blocks, request) == before
    blocks.free(request)
    blocks.check_integrity()
    assert blocks.num_free == blocks.num_pages


# -------------------------------------------------------------------- counts


def test_siblings_share_their_prompt_without_copies():
    blocks = manager(None)
    first, _ = run(blocks, range(9))
    siblings = [first] + [run(blocks, range(9), parent_key=first.parent_key)[0] for _ in range(3)]
    assert blocks.num_used == 2 + 4  # two blocks of the prompt, and each one's own third
    assert all(tables(blocks, sibling)[0][:2] == tables(blocks, first)[0][:2] for sibling in siblings)
    assert len({tables(blocks, sibling)[0][2] for sibling in siblings}) == 4
    for left, sibling in zip((5, 4, 3, 0), siblings):
        blocks.free(sibling)
        blocks.check_integrity()
        assert blocks.num_used == left


def test_free_twice_and_free_of_a_stranger_change_nothing():
    blocks = manager(None)
    request, _ = run(blocks, range(9))
    for _ in range(2):
        blocks.free(request)
        blocks.free(ask([1]))
        blocks.check_integrity()
        assert blocks.num_free == blocks.num_pages
    assert blocks.num_pages_held(request) == 0


def test_as_many_tokens_fit_as_there_are_slots():
    blocks = manager(None, num_pages=3)
    request = ask(range(30))
    blocks.take_prefix(request)
    assert [blocks.num_tokens_that_fit(request, 0, stop) for stop in (0, 1, 11, 12, 13, 30)] == [0, 1, 11, 12, 12, 12]
    compute(blocks, request, 10)
    assert blocks.num_tokens_that_fit(request, 10, 30) == 2
    compute(blocks, request, 2)
    assert blocks.num_tokens_that_fit(request, 12, 30) == 0


def test_whether_all_of_a_request_fits():
    blocks = manager(None, num_pages=4)
    for length, holds in ((16, True), (17, False)):
        request = ask(range(length))
        blocks.take_prefix(request)
        assert blocks.can_hold_all(request, 1000) is holds
        blocks.free(request)
    run(blocks, range(9))  # three blocks, two of them shared with the next
    same, other = ask(range(9)), ask(range(20, 29))
    blocks.take_prefix(same)
    assert blocks.can_hold_all(same, 1000)
    blocks.free(same)
    blocks.take_prefix(other)
    assert not blocks.can_hold_all(other, 1000)


def test_whether_all_of_a_windowed_request_fits_depends_on_the_chunk():
    blocks = manager(4, num_pages=3)
    request = ask(range(100))
    blocks.take_prefix(request)
    assert blocks.can_hold_all(request, 1)  # 4 tokens lie in 2 blocks at most
    assert blocks.can_hold_all(request, 6)  # 9 in 3
    assert not blocks.can_hold_all(request, 7)


def test_what_a_windowed_hit_does_not_hold_is_still_missing():
    blocks = manager(4, num_pages=4)
    request = ask(range(13))
    blocks.take_prefix(request)
    for num_tokens in (4, 4, 4, 1):
        compute(blocks, request, num_tokens)
    blocks.free(request)
    for token in (60, 61):
        run(blocks, [token])
    longer = ask(range(100))
    assert blocks.take_prefix(longer) == 12
    assert tables(blocks, longer)[0][:2] == [None, None]
    assert blocks.num_free == 1
    assert blocks.can_hold_all(longer, 1)  # two blocks at most, and it holds one
    assert not blocks.can_hold_all(longer, 6)  # three


def test_a_wrong_table_is_noticed():
    blocks = manager(None)
    request, _ = run(blocks, range(9))
    table = blocks.block_table(request, 0)
    for wrong in (None, table[1], 30):
        right, table[0] = table[0], wrong
        with pytest.raises(RuntimeError, match="page"):
            blocks.check_integrity()
        table[0] = right
    blocks.check_integrity()


# -------------------------------------------------------------------- no memory is stranded between classes


def gemma4_e2b():
    full = [(layer + 1) % 5 == 0 for layer in range(35)]
    sharing = KVSharing.last_of_same_kind(["full" if f else "sliding" for f in full], 20)
    sharing = sharing.with_windows([None if f else 512 for f in full])
    geometry = [KVGeometry(1, 512 if f else 256) for f in full]
    return KVLayout.build(sharing, geometry, itemsize=2, block_size=16, max_model_len=131072)


def kept_bytes(num_tokens):
    """What one request of Gemma 4 E2B has to keep."""
    return num_tokens * 6144 + min(num_tokens, 512) * 12288


@pytest.mark.parametrize("length", [64, 512])
def test_short_requests_use_nine_tenths_of_the_budget(length):
    blocks = BlockManager(gemma4_e2b(), 1000)
    num_requests = 0
    while True:
        request = ask([num_requests] * length)
        blocks.take_prefix(request)
        if blocks.num_tokens_that_fit(request, 0, length) < length:
            break
        compute(blocks, request)
        num_requests += 1
    assert num_requests * kept_bytes(length) >= 0.9 * 1000 * blocks.layout.page_bytes


def test_one_long_request_uses_nine_tenths_of_the_budget():
    blocks = BlockManager(gemma4_e2b(), 1000)
    request = ask(range(100_000))
    blocks.take_prefix(request)
    while fit := blocks.num_tokens_that_fit(request, request.num_computed_tokens, request.num_computed_tokens + 64):
        compute(blocks, request, fit)
    blocks.check_integrity()
    assert kept_bytes(request.num_computed_tokens) >= 0.9 * 1000 * blocks.layout.page_bytes


# -------------------------------------------------------------------- random operations against a model of the memory


class Text:
    """Numbers every text (salt and tokens so far), so that equal numbers mean equal texts."""

    def __init__(self):
        self.numbers = {}

    def of(self, root, tokens):
        """The number of each prefix: one per token."""
        node, nodes = ("root", root), []
        for token in tokens:
            node = self.numbers.setdefault((node, token), len(self.numbers))
            nodes.append(node)
        return nodes


class Memory:
    """What each page holds: the class that wrote it, and for each slot the text that its K/V was computed from."""

    def __init__(self):
        self.pages = {}

    def blank(self, page):
        self.pages.pop(page, None)

    def write(self, page, index, slot, text):
        owner, slots = self.pages.setdefault(page, (index, {}))
        assert owner == index, "a page changed its class without having been given out anew"
        slots[slot] = text

    def wipe(self, page, slot):
        if page in self.pages:
            self.pages[page][1].pop(slot, None)

    def read(self, page, index, slot):
        owner, slots = self.pages.get(page, (None, {}))
        return slots.get(slot) if owner == index else None


class BlockManagerMachine(RuleBasedStateMachine):
    """Requests come, grow, fail and go in any order; the memory model says after each operation who reads what."""

    def __init__(self, layout, caching):
        super().__init__()
        self.layout, self.caching = layout, caching
        self.spans = [(cls.block_size, cls.window) for cls in layout.classes]

    @initialize(extra=st.integers(0, 12))
    def start(self, extra):
        self.blocks = BlockManager(self.layout, len(self.spans) + 2 + extra, enable_prefix_caching=self.caching)
        self.text, self.memory, self.keys = Text(), Memory(), count()
        self.live = {}  # request -> (start, stop) of its last step
        self.step = []  # requests of the step under way
        self.stopped = []  # preempted, may come back
        self.history = [[0]]
        self.findable = {}  # (class, text of a full block) -> page, as published first
        self.unconfirmed = []
        self.published = {}  # request -> per class, how many leading blocks it has published

    # ------------------------------------------------ operations

    @rule(
        base=st.integers(0, 9),
        cut=st.integers(0, 40),
        tail=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        salt=st.sampled_from([None, None, "a"]),
        child=st.booleans(),
        logprobs=st.sampled_from([None, None, 0]),
        want=st.integers(1, 40),
    )
    @precondition(lambda self: len(self.live) < 6)
    def admit(self, base, cut, tail, salt, child, logprobs, want):
        prompt = self.history[base % len(self.history)][:cut] + tail
        key = next(self.keys)
        parent = next(iter(self.live)).parent_key if child and self.live else key
        params = SamplingParams(cache_salt=salt, prompt_logprobs=logprobs)
        self.history = [*self.history[-9:], prompt]
        self.start_request(Request(key, parent, prompt, params, 1000, frozenset()), want)

    @rule(which=st.integers(0, 9), want=st.integers(1, 40))
    @precondition(lambda self: self.stopped)
    def readmit(self, which, want):
        self.start_request(self.stopped.pop(which % len(self.stopped)), want)

    @rule(which=st.integers(0, 9), want=st.integers(1, 12), stopped=st.sampled_from([False, False, False, True]))
    @precondition(lambda self: self.idle())
    def go_on(self, which, want, stopped):
        request = self.idle()[which % len(self.idle())]
        if not self.grow(request, want):
            return
        if stopped:  # chosen for this step, then preempted for an older request
            self.drop(request)
            self.stopped.append(request)
        else:
            self.publish(request)

    @rule(token=st.integers(0, 1))
    @precondition(lambda self: self.step)
    def confirm(self, token):
        self.blocks.confirm()
        for request in self.step:
            start, stop = self.live[request]
            for position in range(start, stop):
                self.check_reads(request, position)
            request.num_computed_tokens = stop
            if stop == request.num_tokens:
                request.output_token_ids.append(token)
                self.history = [*self.history[-9:], request.tokens(0, request.num_tokens)]
        self.step, self.unconfirmed = [], []

    @rule()
    @precondition(lambda self: self.step)
    def fail(self):
        """The step computed nothing, or only a part: whatever it was to write is rubbish."""
        self.blocks.retract()
        for key in self.unconfirmed:
            self.findable.pop(key, None)
        for request in self.step:
            for (size, _), table in zip(self.spans, tables(self.blocks, request)):
                for position in range(*self.live[request]):
                    self.memory.wipe(table[position // size], position % size)
        for request in self.step:
            self.drop(request)
        self.step, self.unconfirmed = [], []

    @rule(which=st.integers(0, 9), back=st.booleans())
    @precondition(lambda self: self.idle())
    def free(self, which, back):
        request = self.idle()[which % len(self.idle())]
        self.drop(request)
        if back:
            self.stopped.append(request)

    @rule()
    @precondition(lambda self: not self.step)
    def forget_prefixes(self):
        self.blocks.forget_prefixes()
        self.findable = {}

    # ------------------------------------------------ what must always hold

    @invariant()
    def counts_are_right(self):
        self.blocks.check_integrity()
        held = {page for request in self.live for table in tables(self.blocks, request) for page in table}
        assert self.blocks.num_used == len(held - {None})
        assert self.blocks.num_free + self.blocks.num_used == self.blocks.num_pages

    @invariant()
    def tables_hold_just_what_is_needed(self):
        for request, (start, stop) in self.live.items():
            for (size, window), table in zip(self.spans, tables(self.blocks, request)):
                first = 0 if window is None else max(0, start - window + 1)
                assert [page is not None for page in table] == [
                    block >= first // size for block in range(-(-stop // size))
                ]

    @invariant()
    def everybody_reads_his_own_text(self):
        for request, (start, stop) in self.live.items():
            nodes = self.nodes(request)
            for index, ((size, window), table) in enumerate(zip(self.spans, tables(self.blocks, request))):
                first = 0 if window is None else max(0, start - window + 1)
                for position in range(first, stop):
                    page = table[position // size]
                    assert self.memory.read(page, index, position % size) == nodes[position]

    @invariant()
    def shared_pages_are_shared_by_equal_texts(self):
        texts = {}
        for request, (_, stop) in self.live.items():
            nodes = self.nodes(request)
            for index, ((size, _), table) in enumerate(zip(self.spans, tables(self.blocks, request))):
                for block, page in enumerate(table):
                    if page is not None:
                        full = (block + 1) * size <= stop
                        content = (index, nodes[(block + 1) * size - 1]) if full else (index, request.key, block)
                        assert texts.setdefault(page, content) == content

    # ------------------------------------------------ the model

    def idle(self):
        return [request for request in self.live if request not in self.step]

    def nodes(self, request):
        root = request.params.cache_salt if self.caching else ("parent", request.parent_key)
        return self.text.of(root, request.tokens(0, request.num_tokens))

    def start_request(self, request, want):
        """Find its prefix and give it blocks; a request that gets none stays outside, as in the scheduler."""
        hit = self.blocks.take_prefix(request)
        assert hit <= request.num_tokens - 1
        assert hit == 0 or request.params.prompt_logprobs is None
        assert all(hit % size == 0 for size, _ in self.spans)
        assert hit >= self.longest_hit(request)
        request.num_computed_tokens = hit
        self.live[request] = (hit, hit)
        self.published[request] = [hit // size for size, _ in self.spans]
        self.everybody_reads_his_own_text()
        self.tables_hold_just_what_is_needed()
        if self.grow(request, want):
            self.publish(request)
        else:
            self.drop(request)

    def grow(self, request, want):
        """Give blocks to its next tokens, as many as fit; whether there was one."""
        start = request.num_computed_tokens
        stop = min(request.num_tokens, start + want)
        fit = self.blocks.num_tokens_that_fit(request, start, stop)
        assert fit == self.most_that_fit(request, start, stop)
        if fit:
            num_free, gain = self.blocks.num_free, self.given_back(request, start) - self.missing(request, start + fit)
            before = tables(self.blocks, request)
            self.blocks.grow(request, start, start + fit)
            assert self.blocks.num_free == num_free + gain
            self.live[request] = (start, start + fit)
            self.note_new_pages(request, before)
        return fit > 0

    def publish(self, request):
        """Its blocks are in the step: others of the same step may find them."""
        start, stop = self.live[request]
        self.write(request, start, stop)
        self.blocks.publish(request, stop)
        self.note_published(request, stop)
        self.step.append(request)

    def longest_hit(self, request):
        """By trial: the longest prefix whose visible blocks are all findable, in every class."""
        usable = 0 if request.params.prompt_logprobs is not None else request.num_tokens - 1
        nodes = self.nodes(request)
        lengths = [n for n in range(usable + 1) if all(n % size == 0 for size, _ in self.spans)]
        return max(n for n in lengths if all(self.can_serve(index, nodes, n) for index in range(len(self.spans))))

    def can_serve(self, index, nodes, num_tokens):
        size, window = self.spans[index]
        first = 0 if window is None else max(0, num_tokens - window + 1)
        seen = {position // size for position in range(first, num_tokens)}
        return all((index, nodes[(block + 1) * size - 1]) in self.findable for block in seen)

    def holders(self, page):
        return sum(page in table for request in self.live for table in tables(self.blocks, request))

    def given_back(self, request, start):
        """Pages that become free when the request goes on at `start`."""
        passed = [
            page
            for (size, window), table in zip(self.spans, tables(self.blocks, request))
            for block, page in enumerate(table)
            if page is not None and window is not None and (block + 1) * size - 1 < start - window + 1
        ]
        return sum(self.holders(page) == 1 for page in passed)

    def missing(self, request, stop):
        """Pages that it then has to take for its tokens up to `stop`."""
        lengths = [len(table) for table in tables(self.blocks, request)]
        return sum(max(0, -(-stop // size) - length) for (size, _), length in zip(self.spans, lengths))

    def most_that_fit(self, request, start, stop):
        room = self.blocks.num_free + self.given_back(request, start)
        return max(n for n in range(stop - start + 1) if n == 0 or self.missing(request, start + n) <= room)

    def note_new_pages(self, request, before):
        for old, new in zip(before, tables(self.blocks, request)):
            for page in new[len(old) :]:
                assert self.holders(page) == 1
                self.memory.blank(page)
                self.findable = {key: other for key, other in self.findable.items() if other != page}

    def write(self, request, start, stop):
        nodes = self.nodes(request)
        for index, ((size, _), table) in enumerate(zip(self.spans, tables(self.blocks, request))):
            for position in range(start, stop):
                page = table[position // size]
                assert self.holders(page) == 1
                self.memory.write(page, index, position % size, nodes[position])

    def note_published(self, request, stop):
        nodes = self.nodes(request)
        for index, ((size, _), table) in enumerate(zip(self.spans, tables(self.blocks, request))):
            for block in range(self.published[request][index], stop // size):
                key = (index, nodes[(block + 1) * size - 1])
                if key not in self.findable:
                    self.findable[key] = table[block]
                    self.unconfirmed.append(key)
            self.published[request][index] = stop // size

    def check_reads(self, request, position):
        nodes = self.nodes(request)
        for index, ((size, window), table) in enumerate(zip(self.spans, tables(self.blocks, request))):
            first = 0 if window is None else max(0, position - window + 1)
            for seen in range(first, position + 1):
                assert self.memory.read(table[seen // size], index, seen % size) == nodes[seen]

    def drop(self, request):
        self.blocks.free(request)
        del self.live[request], self.published[request]
        request.num_computed_tokens = 0


MACHINES = {
    "full, blocks of 1": (layout_of(None, block_size=1), True),
    "full, blocks of 4": (layout_of(None, block_size=4), True),
    "full, blocks of 16": (layout_of(None, block_size=16), True),
    "window 5, blocks of 4": (layout_of(5, block_size=4), True),
    "full and window 1, blocks of 1": (layout_of(None, 1, block_size=1), True),
    "full and window 6, blocks of 4": (layout_of(None, 6, block_size=4), True),
    "full and window 20, blocks of 16": (layout_of(None, 20, block_size=16), True),
    "full and two windows, unequal tokens": (layout_of(None, 3, 9, block_size=2, heads=[1, 2, 4]), True),
    "the same, no prefix caching": (layout_of(None, 3, 9, block_size=2, heads=[1, 2, 4]), False),
}


@pytest.mark.parametrize(("layout", "caching"), MACHINES.values(), ids=MACHINES.keys())
def test_random_operations(layout, caching):
    run_state_machine_as_test(
        lambda: BlockManagerMachine(layout, caching),
        settings=settings(
            max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
