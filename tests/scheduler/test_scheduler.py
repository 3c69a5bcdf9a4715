"""Who runs a step: rules by hand-made cases, and whole lives of random requests with a model that only pretends.

The pretended model plays the KV memory: it writes into every slot which text its K/V came from, reads what
attention would read, and so notices a block that is missing, stale or somebody else's.
"""

from itertools import count
from random import Random

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

from miniserve.errors import RequestError
from miniserve.kvcache.block_manager import BlockManager
from miniserve.kvcache.layout import KVGeometry, KVLayout
from miniserve.kvcache.sharing import KVSharing
from miniserve.request import Request, SamplingParams
from miniserve.scheduler.policy import first_come_first_served
from miniserve.scheduler.scheduler import Scheduler

UNLIMITED = 1 << 30
LONGEST = 24
NEW_KEYS = count()


def layout_of(*windows, block_size, heads=None):
    """One owner per window; `heads` makes their tokens unequally large."""
    sharing = KVSharing(tuple(range(len(windows))), windows)
    geometry = [KVGeometry(h, 4) for h in heads or [1] * len(windows)]
    return KVLayout.build(sharing, geometry, itemsize=4, block_size=block_size, max_model_len=1000)


class WatchedBlocks(BlockManager):
    """Notes what is announced in a step: only blocks that the step really computes may be."""

    def __init__(self, layout, num_pages):
        super().__init__(layout, num_pages)
        self.published = {}

    def publish(self, request, stop):
        self.published[request] = stop
        super().publish(request, stop)


def scheduler_of(*windows, block_size=4, num_pages=64, seqs=8, budget=UNLIMITED, max_waiting=100):
    blocks = WatchedBlocks(layout_of(*windows or (None,), block_size=block_size), num_pages)
    return Scheduler(blocks, max_num_seqs=seqs, max_num_batched_tokens=budget, max_waiting=max_waiting)


def ask(prompt, *, max_total=1000, stops=(), parent_key=None, **params):
    """A request of its own, by default with a text that nobody else has."""
    key = next(NEW_KEYS)
    prompt = [100 + key] * prompt if isinstance(prompt, int) else list(prompt)
    params.setdefault("max_tokens", 1000)
    parent_key = key if parent_key is None else parent_key
    return Request(key, parent_key, prompt, SamplingParams(**params), max_total, frozenset(stops))


def add(scheduler, *prompts, **params):
    requests = [ask(prompt, **params) for prompt in prompts]
    for request in requests:
        scheduler.add(request)
    return requests


def step(scheduler, token=0):
    """One step of a model that always says `token`; returns request -> (start, stop)."""
    scheduled = scheduler.schedule()
    scheduler.update(scheduled, [token] * sum(item.samples for item in scheduled))
    scheduler.block_manager.check_integrity()
    return {item.request: (item.start, item.stop) for item in scheduled}


def num_tokens(spans):
    return [stop - start for start, stop in spans.values()]


# -------------------------------------------------------------------- the token budget


def test_a_step_closes_all_gaps_if_the_budget_allows():
    scheduler = scheduler_of()
    a, b = add(scheduler, 9, 5)
    assert step(scheduler) == {a: (0, 9), b: (0, 5)}
    assert step(scheduler) == {a: (9, 10), b: (5, 6)}
    assert (a.output_token_ids, b.output_token_ids) == ([0, 0], [0, 0])


def test_prompts_are_cut_to_the_budget_and_mixed_with_decoding():
    scheduler = scheduler_of(budget=8)
    a, b, c = add(scheduler, 6, 20, 3)
    assert step(scheduler) == {a: (0, 6), b: (0, 2)}
    assert step(scheduler) == {a: (6, 7), b: (2, 9)}
    assert step(scheduler) == {a: (7, 8), b: (9, 16)}
    assert step(scheduler) == {a: (8, 9), b: (16, 20), c: (0, 3)}
    assert [len(request.output_token_ids) for request in (a, b, c)] == [4, 1, 1]


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 16])
def test_the_budget_is_never_exceeded_and_never_wasted(budget):
    scheduler = scheduler_of(budget=budget)
    requests = add(scheduler, 17, 5, 30, 1, max_tokens=4)
    while scheduler.has_work:
        gap = sum(r.num_tokens - r.num_computed_tokens for r in requests if not r.finished)
        assert sum(num_tokens(step(scheduler))) == min(budget, gap)
    assert [len(request.output_token_ids) for request in requests] == [4] * 4


def test_no_request_gets_more_than_its_chunk():
    """With maps whose tokens go alone the budget serves many prompts at once, one token of each."""
    blocks = WatchedBlocks(layout_of(None, block_size=4), 64)
    scheduler = Scheduler(blocks, max_num_seqs=8, max_num_batched_tokens=4, max_waiting=10, max_chunk=1)
    first, second, *others = add(scheduler, 3, 2, 2, 2, 2)
    assert list(step(scheduler).values()) == [(0, 1)] * 4
    assert step(scheduler)[second] == (1, 2)
    assert step(scheduler)[first] == (2, 3)
    assert second.output_token_ids and first.output_token_ids


def test_a_long_prompt_does_not_stall_who_is_decoding():
    scheduler = scheduler_of(budget=4)
    decoding = add(scheduler, 1, 1, 1)
    step(scheduler)
    (long,) = add(scheduler, 40)
    for _ in range(40):
        spans = step(scheduler)
        assert set(spans) == {*decoding, long}
        assert num_tokens(spans) == [1, 1, 1, 1]
    assert long.num_computed_tokens == 40


def test_with_too_small_a_budget_the_oldest_goes_first():
    scheduler = scheduler_of(budget=2)
    a, b, c = add(scheduler, 1, 1, 1, max_tokens=3)
    assert step(scheduler) == {a: (0, 1), b: (0, 1)}
    assert step(scheduler) == {a: (1, 2), b: (1, 2)}
    assert step(scheduler) == {a: (2, 3), b: (2, 3)}
    assert step(scheduler) == {c: (0, 1)}


def test_only_who_closes_the_gap_samples():
    scheduler = scheduler_of(budget=5)
    a, b = add(scheduler, 3, 9)
    for a_span, b_span, b_samples in (((0, 3), (0, 2), False), ((3, 4), (2, 6), False), ((4, 5), (6, 9), True)):
        first, second = scheduled = scheduler.schedule()
        assert (first.request, first.start, first.stop, first.samples) == (a, *a_span, True)
        assert (second.request, second.start, second.stop, second.samples) == (b, *b_span, b_samples)
        assert second.num_scheduled_tokens == b_span[1] - b_span[0]
        scheduler.update(scheduled, [0, 0] if b_samples else [0])
    assert (a.output_token_ids, b.output_token_ids) == ([0, 0, 0], [0])


def test_policy_orders_single_tokens_first_and_then_by_arrival():
    long_a, short_b, long_c, short_d = (ask(n) for n in (5, 1, 9, 1))
    assert first_come_first_served([short_d, long_c, short_b, long_a]) == [short_b, short_d, long_a, long_c]


# -------------------------------------------------------------------- who comes in


def test_requests_start_in_the_order_they_came():
    scheduler = scheduler_of(seqs=2)
    a, b, c, d = add(scheduler, 3, 3, 3, 3, max_tokens=2)
    assert list(step(scheduler)) == [a, b]
    assert list(step(scheduler)) == [a, b]
    assert list(step(scheduler)) == [c, d]


def test_nobody_overtakes_a_request_that_waits_for_blocks():
    scheduler = scheduler_of(num_pages=4)
    a, big, small = add(scheduler, 5, 12, 2, max_tokens=3)
    assert list(step(scheduler)) == [a]  # the big one wants 3 blocks of the 2 that are left
    assert list(scheduler.waiting) == [big, small]
    step(scheduler)
    step(scheduler)
    assert a.finished
    assert list(step(scheduler)) == [big, small]


def test_siblings_share_their_prompt_in_the_very_first_step():
    scheduler = scheduler_of()
    (first,) = add(scheduler, range(9))
    (second,) = add(scheduler, range(9), parent_key=first.parent_key)
    assert step(scheduler) == {first: (0, 9), second: (8, 9)}
    assert scheduler.block_manager.num_used == 2 + 1 + 1
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)


def test_cached_tokens_are_counted_when_a_request_first_runs():
    scheduler = scheduler_of()
    (a,) = add(scheduler, range(9))
    step(scheduler)
    scheduler.preempt(a)
    assert step(scheduler) == {a: (8, 10)}
    assert a.num_cached_tokens == 0


def test_room_is_free_seats_and_places_in_the_queue():
    scheduler = scheduler_of(seqs=2, max_waiting=3)
    assert scheduler.room == 5
    a, b, c = add(scheduler, 3, 3, 3)
    assert scheduler.room == 2
    step(scheduler)
    assert scheduler.room == 2
    scheduler.preempt(b)
    assert scheduler.room == 2
    add(scheduler, 3, 3)
    assert scheduler.room == 0
    scheduler.finish(a, "abort")
    assert scheduler.room == 1
    scheduler.finish(c, "abort")
    assert scheduler.room == 2


# -------------------------------------------------------------------- what can never fit


def test_a_prompt_that_can_never_fit_is_refused_and_the_others_finish():
    scheduler = scheduler_of(num_pages=8)
    with pytest.raises(RequestError, match=r"40 tokens needs 10 KV blocks .*has 8") as refusal:
        scheduler.add(ask(40))
    assert refusal.value.param == "prompt"
    requests = add(scheduler, 5, 5, 5, max_tokens=3)
    for _ in range(3):
        step(scheduler)
    assert [request.finish_reason for request in requests] == ["length"] * 3
    assert not scheduler.has_work


def test_a_prompt_of_exactly_the_pool_fits():
    scheduler = scheduler_of(num_pages=8)
    (request,) = add(scheduler, 32, max_total=33)
    step(scheduler)
    assert (request.finish_reason, request.output_token_ids) == ("length", [0])
    with pytest.raises(RequestError, match="needs 9 KV blocks"):
        scheduler.add(ask(33))


def test_the_refusal_names_every_class_and_its_part():
    # A windowed token has 3 heads, a full one 2: blocks of 2 and of 3 slots. 30 tokens are 10 full blocks, and a
    # window of 20 tokens touches 11 of its blocks.
    blocks = BlockManager(layout_of(None, 20, None, block_size=2, heads=[1, 3, 1]), 20)
    scheduler = Scheduler(blocks, max_num_seqs=4, max_num_batched_tokens=8, max_waiting=4)
    assert [(cls.window, cls.block_size) for cls in blocks.layout.classes] == [(None, 3), (20, 2)]
    with pytest.raises(RequestError) as refusal:
        scheduler.add(ask(30))
    message = str(refusal.value)
    assert "needs 21 KV blocks" in message
    assert "10 for layer groups [0, 2]" in message
    assert "11 for layer groups [1] (window 20)" in message
    assert "has 20" in message
    scheduler.add(ask(27))  # 9 and 11


def test_a_request_that_outgrows_the_pool_ends_by_length():
    scheduler = scheduler_of(num_pages=2)
    (request,) = add(scheduler, 5, max_total=9)  # 8 slots, and a last token that nobody reads
    while scheduler.has_work:
        step(scheduler)
    assert request.finish_reason == "length"
    assert len(request.output_token_ids) == 4


@pytest.mark.parametrize("budget", [1, 3, UNLIMITED])
def test_one_request_gets_through_the_smallest_pool_that_holds_it(budget):
    scheduler = scheduler_of(None, 1, block_size=1, num_pages=9, budget=budget)
    (request,) = add(scheduler, 5, max_total=9)  # 8 full blocks and one windowed
    steps = 0
    while scheduler.has_work:
        assert step(scheduler)
        steps += 1
        assert steps <= 8
    assert len(request.output_token_ids) == 4
    assert scheduler.num_preemptions == 0


# -------------------------------------------------------------------- preemption


def test_the_youngest_gives_way_and_comes_back():
    scheduler = scheduler_of(num_pages=4)
    old, young = add(scheduler, 7, 7, max_tokens=6)
    assert step(scheduler) == {old: (0, 7), young: (0, 7)}
    assert step(scheduler) == {old: (7, 8), young: (7, 8)}
    assert step(scheduler) == {old: (8, 9)}
    assert (scheduler.running, list(scheduler.waiting)) == ([old], [young])
    assert (young.num_computed_tokens, young.num_tokens) == (0, 9)
    assert scheduler.num_preemptions == 1
    while not old.finished:
        assert list(step(scheduler)) == [old]
    while not young.finished:
        step(scheduler)
    assert (len(old.output_token_ids), len(young.output_token_ids)) == (6, 6)
    assert scheduler.num_preemptions == 1


def test_the_oldest_is_not_stopped_even_if_the_youngest_asks_first():
    scheduler = scheduler_of(num_pages=4, budget=4)
    old, young = add(scheduler, 12, 1)
    step(scheduler)
    step(scheduler)
    assert step(scheduler) == {old: (8, 12)}
    assert step(scheduler) == {old: (12, 13)}  # takes the last block: the young one never had one
    while old.num_tokens < 16:
        assert list(step(scheduler)) == [old]
    assert list(scheduler.waiting) == [young]


def test_a_young_request_that_finds_no_block_stops_itself():
    scheduler = scheduler_of(num_pages=3, block_size=4)
    old, young = add(scheduler, 5, 3)
    assert step(scheduler) == {old: (0, 5), young: (0, 3)}
    assert step(scheduler) == {old: (5, 6), young: (3, 4)}
    assert step(scheduler) == {old: (6, 7)}
    assert list(scheduler.waiting) == [young]


def test_a_preempted_request_keeps_its_place():
    scheduler = scheduler_of(seqs=3)
    a, b, c, d, e = add(scheduler, 3, 3, 3, 3, 3)
    step(scheduler)
    for request in (b, a, c):
        scheduler.preempt(request)
    assert list(scheduler.waiting) == [a, b, c, d, e]
    assert scheduler.block_manager.num_used == 0
    assert list(step(scheduler)) == [a, b, c]


def test_a_chosen_request_that_is_stopped_in_the_same_step_does_not_run():
    scheduler = scheduler_of(num_pages=5, budget=4)
    old, young = add(scheduler, 8, 7)
    for _ in range(5):
        step(scheduler)
    assert (old.num_computed_tokens, young.num_computed_tokens) == (11, 7)
    scheduler.preempt(old)
    scheduler.block_manager.forget_prefixes()
    assert step(scheduler) == {young: (7, 8), old: (0, 3)}
    assert step(scheduler) == {young: (8, 9), old: (3, 6)}  # the young one takes a third block
    assert step(scheduler) == {young: (9, 10), old: (6, 8)}
    scheduler.block_manager.published.clear()
    # The young one was chosen before the old one found no block; its token of the budget goes to the old one.
    assert step(scheduler) == {old: (8, 12)}
    assert list(scheduler.waiting) == [young]
    assert (young.num_computed_tokens, len(young.output_token_ids)) == (0, 4)
    assert scheduler.block_manager.published == {old: 12}


def test_a_step_that_preempts_admits_nobody():
    scheduler = scheduler_of(num_pages=4)
    old, young = add(scheduler, 7, 7)
    step(scheduler)
    step(scheduler)
    (new,) = add(scheduler, 1)
    assert step(scheduler) == {old: (8, 9)}
    assert list(scheduler.waiting) == [young, new]


# -------------------------------------------------------------------- ends


@pytest.mark.parametrize("state", ["waiting", "in its prompt", "decoding", "preempted", "finished"])
def test_an_abort_in_any_state_frees_everything(state):
    scheduler = scheduler_of(budget=4, seqs=1 if state == "waiting" else 8)
    (other,) = add(scheduler, 3)
    (request,) = add(scheduler, 6, max_tokens=1 if state == "finished" else 9)
    for _ in range({"waiting": 2, "in its prompt": 2}.get(state, 4)):
        step(scheduler)
    if state == "preempted":
        scheduler.preempt(request)
    held = scheduler.block_manager.num_pages_held(request)
    assert (held > 0) == (state in ("in its prompt", "decoding"))
    assert (request in scheduler.waiting) == (state in ("waiting", "preempted"))
    scheduler.finish(request, "abort")
    assert request.finish_reason == ("length" if state == "finished" else "abort")
    assert scheduler.block_manager.num_used == scheduler.block_manager.num_pages_held(other) > 0
    for _ in range(3):
        assert list(step(scheduler)) == [other]
    scheduler.finish(other, "abort")
    assert not scheduler.has_work
    assert scheduler.block_manager.num_used == 0


def test_an_end_is_final_except_that_a_stop_string_outranks_length():
    scheduler = scheduler_of()
    (request,) = add(scheduler, 3, max_tokens=1)
    step(scheduler)
    scheduler.finish(request, "abort")
    scheduler.finish(request, "error")
    assert (request.finish_reason, request.stop_reason) == ("length", None)
    scheduler.finish(request, "stop", "END")
    assert (request.finish_reason, request.stop_reason) == ("stop", "END")


def test_stop_tokens_end_a_request_but_not_before_min_tokens():
    scheduler = scheduler_of()
    requests = [ask(3, stops=[7]), ask(3, stops=[7], min_tokens=3), ask(3, stops=[7], stop_token_ids=[7]), ask(3)]
    for request in requests:
        scheduler.add(request)
    for _ in range(4):
        step(scheduler, token=7)
    assert [len(request.output_token_ids) for request in requests] == [1, 3, 1, 4]
    assert [request.finish_reason for request in requests] == ["stop", "stop", "stop", None]
    assert [request.stop_reason for request in requests] == [None, None, 7, None]  # only what was asked for is named


def test_a_failed_step_ends_its_requests_and_leaves_nothing_behind():
    scheduler = scheduler_of(budget=12, seqs=3)
    (old,) = add(scheduler, range(8))
    step(scheduler)
    scheduler.preempt(old)
    (bad,) = add(scheduler, range(50, 62))
    scheduler.waiting.rotate()  # the bad one alone goes into the step that fails
    scheduled = scheduler.schedule()
    assert [item.request for item in scheduled] == [bad]
    scheduler.fail(scheduled)
    scheduler.block_manager.check_integrity()
    assert (bad.finish_reason, old.finish_reason) == ("error", None)
    assert scheduler.block_manager.num_used == 0
    (again,) = add(scheduler, range(50, 62))
    assert step(scheduler)[old] == (8, 9)
    step(scheduler)
    assert again.num_cached_tokens == 0


# -------------------------------------------------------------------- random lives


class PretendedModel:
    """Computes nothing, but keeps book of what each slot of the pool holds: (class, text that it came from)."""

    def __init__(self, blocks):
        self.blocks = blocks
        self.spans = [(cls.block_size, cls.window) for cls in blocks.layout.classes]
        self.pages = {}  # page -> (class, {slot: text})
        self.numbers = {}  # (text before, token) -> number of the text with it

    def texts(self, request):
        node, nodes = request.params.cache_salt, []
        for token in request.prompt_token_ids + request.output_token_ids:
            node = self.numbers.setdefault((node, token), len(self.numbers))
            nodes.append(node)
        return nodes

    def run(self, scheduled):
        """Every request writes the K/V of its tokens, and then attends."""
        for item in scheduled:
            self.write(item, self.texts(item.request))
        for item in scheduled:
            nodes = self.texts(item.request)
            for position in range(item.start, item.stop):
                self.read(item.request, position, nodes)

    def break_down(self, scheduled):
        """What the step was to write is rubbish now."""
        for item in scheduled:
            self.write(item, ["rubbish"] * item.stop)

    def write(self, item, nodes):
        for index, (size, _) in enumerate(self.spans):
            table = self.blocks.block_table(item.request, index)
            for position in range(item.start, item.stop):
                page = table[position // size]
                if self.pages.get(page, (None,))[0] != index:
                    self.pages[page] = (index, {})  # another class lays other slots over the same bytes
                self.pages[page][1][position % size] = nodes[position]

    def read(self, request, position, nodes):
        for index, (size, window) in enumerate(self.spans):
            table = self.blocks.block_table(request, index)
            for seen in range(0 if window is None else max(0, position - window + 1), position + 1):
                owner, slots = self.pages[table[seen // size]]
                assert (owner, slots.get(seen % size)) == (index, nodes[seen])


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, run, are stopped, aborted and hit by failures; in the end all of them must have ended."""

    def __init__(self, layout, budget):
        super().__init__()
        self.layout, self.budget = layout, budget

    @initialize(
        quarters=st.integers(1, 10), seqs=st.integers(1, 6), max_waiting=st.integers(0, 4), seed=st.integers(0, 999)
    )
    def start(self, quarters, seqs, max_waiting, seed):
        """A pool for 1/4 to 10/4 of the longest request."""
        num_pages = max(self.layout.blocks_for(2), self.layout.blocks_for(LONGEST) * quarters // 4)
        self.blocks = WatchedBlocks(self.layout, num_pages)
        self.scheduler = Scheduler(
            self.blocks, max_num_seqs=seqs, max_num_batched_tokens=self.budget, max_waiting=max_waiting
        )
        fits = self.layout.max_request_tokens(num_pages)
        self.limit = LONGEST if fits is None else min(LONGEST, fits + 1)
        self.model, self.random, self.keys = PretendedModel(self.blocks), Random(seed), count()
        self.accepted = []
        self.history = [[0]]

    # ------------------------------------------------ operations

    @rule(
        requests=st.integers(1, 4),
        max_tokens=st.integers(1, LONGEST),
        min_tokens=st.integers(0, 3),
        salt=st.sampled_from([None, None, "a"]),
        stops=st.sampled_from([(), (), (2,)]),
        logprobs=st.sampled_from([None, None, None, 0]),
        same=st.booleans(),
    )
    def add(self, requests, max_tokens, min_tokens, salt, stops, logprobs, same):
        """Some requests, all with one prompt or each with its own; prompts begin like texts that were there before."""
        params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, cache_salt=salt, prompt_logprobs=logprobs)
        parent, prompt = next(self.keys), self.new_prompt()
        for _ in range(min(requests, self.scheduler.room)):
            request = Request(next(self.keys), parent, prompt, params, self.limit, frozenset(stops))
            request.num_prompt_logprobs = 1  # the first token has none
            self.scheduler.add(request)
            self.accepted.append(request)
            prompt = prompt if same else self.new_prompt()

    def new_prompt(self):
        known = self.random.choice([*self.history[-9:], *[r.tokens(0, r.num_tokens) for r in self.accepted[-5:]]])
        tail = self.random.choices((0, 1), k=self.random.randint(1, 8))
        prompt = (known[: self.random.randrange(len(known) + 1)] + tail)[: self.random.randint(1, self.limit - 1)]
        self.history.append(prompt)
        return prompt

    @rule(extra=st.integers(1, 50))
    def add_what_can_never_fit(self, extra):
        fits = self.layout.max_request_tokens(self.blocks.num_pages)
        if fits is not None:
            waiting = list(self.scheduler.waiting)
            with pytest.raises(RequestError, match=f"pool has {self.blocks.num_pages}"):
                self.scheduler.add(
                    Request(next(self.keys), 0, [0] * (fits + extra), SamplingParams(), 999, frozenset())
                )
            assert list(self.scheduler.waiting) == waiting

    @rule(times=st.integers(1, 9))
    def step(self, times):
        for _ in range(times):
            scheduled = self.schedule()
            self.model.run(scheduled)
            self.note_prompt_rows(scheduled)
            before = {item.request: list(item.request.output_token_ids) for item in scheduled}
            tokens = [self.random.choice((0, 1, 0, 1, 0, 1, 2)) for item in scheduled if item.samples]
            self.scheduler.update(scheduled, tokens)
            for item in scheduled:
                sampled = [tokens.pop(0)] if item.samples else []
                assert item.request.output_token_ids == before[item.request] + sampled
                assert item.request.num_computed_tokens == item.stop

    @rule()
    def step_fails(self):
        scheduled = self.schedule()
        self.model.break_down(scheduled)
        others = [r for r in self.accepted if not r.finished and r not in [item.request for item in scheduled]]
        self.scheduler.fail(scheduled)
        assert all(item.request.finish_reason == "error" for item in scheduled)
        assert not any(request.finished for request in others)

    @rule(which=st.integers(0, 30))
    @precondition(lambda self: self.accepted)
    def abort(self, which):
        request = self.accepted[which % len(self.accepted)]
        reason = request.finish_reason
        self.scheduler.finish(request, "abort")
        assert request.finish_reason == (reason or "abort")

    @rule(which=st.integers(0, 5))
    @precondition(lambda self: self.scheduler.running)
    def preempt(self, which):
        self.scheduler.preempt(self.scheduler.running[which % len(self.scheduler.running)])

    @rule()
    @precondition(lambda self: self.scheduler.running)
    def preempt_all(self):
        for request in list(self.scheduler.running):
            self.scheduler.preempt(request)

    @rule()
    def forget(self):
        """As if all cached text had been overwritten: whoever comes back computes everything anew."""
        self.blocks.forget_prefixes()

    @rule()
    def drain(self):
        """With nobody new, everybody ends.

        The oldest request goes on in every step, unless the budget goes to tokens that younger ones sample or it
        waits for those that ran before it: never longer than all texts together.
        """
        alive = [request for request in self.accepted if not request.finished]
        bound = (len(alive) + 1) * len(alive) * self.limit
        steps = 0
        while self.scheduler.has_work:
            self.step(1)
            self.counts_are_right()
            steps += 1
            assert steps <= bound
        assert all(request.finished for request in self.accepted)
        assert self.blocks.num_used == 0

    def teardown(self):
        if hasattr(self, "scheduler"):
            self.drain()

    # ------------------------------------------------ what must always hold

    @invariant()
    def counts_are_right(self):
        self.blocks.check_integrity()
        assert self.blocks.num_free + self.blocks.num_used == self.blocks.num_pages
        running, waiting = self.scheduler.running, list(self.scheduler.waiting)
        alive = [request for request in self.accepted if not request.finished]
        assert sorted([*running, *waiting], key=lambda request: request.key) == alive
        assert waiting == sorted(waiting, key=lambda request: request.key)
        assert len(running) <= self.scheduler.max_num_seqs
        assert len(alive) <= self.scheduler.max_num_seqs + self.scheduler.max_waiting
        for request in self.accepted:
            assert (self.blocks.num_pages_held(request) > 0) <= (request in running)
        for request in running:
            assert 0 < request.num_computed_tokens < request.num_tokens <= self.limit
        for request in waiting:
            assert request.num_computed_tokens == 0

    @invariant()
    def whoever_ended_has_the_right_length(self):
        for request in self.accepted:
            num_output, allowed = len(request.output_token_ids), self.limit - len(request.prompt_token_ids)
            stops = [
                i + 1
                for i, token in enumerate(request.output_token_ids)
                if token in request.stop_token_ids and i + 1 >= request.params.min_tokens
            ]
            longest = min(request.params.max_tokens, allowed)
            ended = {"stop": stops == [num_output], "length": num_output == longest and not stops}
            assert ended.get(request.finish_reason, num_output < longest and not stops)

    # ------------------------------------------------ a step, watched

    def schedule(self):
        running, waiting = list(self.scheduler.running), list(self.scheduler.waiting)
        ready = sorted((r for r in running if r.num_tokens - r.num_computed_tokens == 1), key=lambda r: r.key)
        computed = {request: request.num_computed_tokens for request in running}
        self.blocks.published.clear()
        scheduled = self.scheduler.schedule()
        assert self.blocks.published == {item.request: item.stop for item in scheduled}
        self.check_shares(scheduled, computed)
        self.check_preempted(running)
        self.check_admitted(running, waiting)
        assert bool(scheduled) == bool(running or waiting)
        chosen = [item.request for item in scheduled]
        assert all(request in chosen for request in ready[: self.budget] if request in self.scheduler.running)
        return scheduled

    def check_shares(self, scheduled, computed):
        assert sum(item.num_scheduled_tokens for item in scheduled) <= self.budget
        assert len({item.request for item in scheduled}) == len(scheduled)
        for item in scheduled:
            assert item.request in self.scheduler.running
            assert item.start == computed.get(item.request, item.request.num_computed_tokens)
            assert item.start < item.stop <= item.request.num_tokens
            assert item.samples == (item.stop == item.request.num_tokens)
            for index, cls in enumerate(self.layout.classes):
                table = self.blocks.block_table(item.request, index)
                first = 0 if cls.window is None else max(0, item.start - cls.window + 1)
                needed = {position // cls.block_size for position in range(first, item.stop)}
                assert all(table[block] is not None for block in needed)

    def check_preempted(self, running):
        stopped = [request for request in running if request not in self.scheduler.running]
        left = [request for request in running if request in self.scheduler.running]
        assert all(request in self.scheduler.waiting for request in stopped)
        assert all(young.key > old.key for young in stopped for old in left)

    def check_admitted(self, running, waiting):
        admitted = [request for request in self.scheduler.running if request not in running]
        assert admitted == waiting[: len(admitted)]
        assert not admitted or all(request in self.scheduler.running for request in running)

    def note_prompt_rows(self, scheduled):
        """Each row of a prompt whose logprobs are wanted is computed, once and in order."""
        for item in scheduled:
            request, first = item.request, item.request.first_logit_needed
            if first is not None:
                assert item.start <= first
                rows = range(first, min(item.stop, len(request.prompt_token_ids) - 1))
                request.num_prompt_logprobs += len(rows)
            if item.samples and request.params.prompt_logprobs is not None:
                assert request.num_prompt_logprobs == len(request.prompt_token_ids)


LAYOUTS = {
    "full": layout_of(None, block_size=4),
    "full and window 1, blocks of 1": layout_of(None, 1, block_size=1),
    "full and window 6": layout_of(None, 6, block_size=4),
    "window 5": layout_of(5, block_size=4),
    "full and two windows, unequal tokens": layout_of(None, 3, 9, block_size=2, heads=[1, 2, 4]),
    "full and window 20, blocks of 16": layout_of(None, 20, block_size=16),
}


@pytest.mark.parametrize("budget", [1, 7, 16, UNLIMITED])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_random_lives(layout, budget):
    run_state_machine_as_test(
        lambda: SchedulerMachine(layout, budget),
        settings=settings(
            max_examples=12, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.parametrize("budget", [1, 7, 16, UNLIMITED])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_long_random_lives(layout, budget):
    """The same operations in long streams, most of them steps: states that short examples do not reach."""
    random = Random(budget)
    for quarters in (2, 4, 6, 8):
        machine = SchedulerMachine(layout, budget)
        machine.start(quarters=quarters, seqs=random.randint(2, 6), max_waiting=4, seed=random.randrange(1000))
        for _ in range(150):
            one_of_many(machine, random)
            machine.counts_are_right()
        machine.whoever_ended_has_the_right_length()
        machine.teardown()


def one_of_many(machine, random):
    operation = random.choices(("step", "add", "preempt", "abort", "step_fails"), (60, 25, 12, 2, 1))[0]
    if operation == "add":
        salt, logprobs = random.choice((None, None, None, "a")), random.choice((None, None, None, 0))
        stops = random.choice(((), (), (), (2,)))
        max_tokens, same = random.randint(1, LONGEST), random.random() < 0.2
        machine.add(random.randint(1, 3), max_tokens, random.randint(0, 3), salt, stops, logprobs, same)
    elif operation == "preempt" and machine.scheduler.running:
        machine.preempt(0 if random.random() < 0.7 else random.randrange(6))  # the oldest, mostly
        if random.random() < 0.7:
            machine.forget()
    elif operation == "abort":
        machine.abort(-1 - random.randrange(6)) if machine.accepted else None
    elif operation == "step_fails":
        machine.step_fails()
    else:
        machine.step(1)
