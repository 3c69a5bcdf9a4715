"""Who runs this step, and how many tokens of each.

There is no prefill phase and no decode phase. Every request has `num_tokens` (known) and
`num_computed_tokens` (in the KV pool); a step hands out one token budget to close the gaps:

    token budget 8      A ▏1      decoding: one token
                        B ▏1      decoding
                        C ▏▏▏▏5   a chunk of a prompt
                        D ▏1      admitted with what is left of the budget, its prefix found in the cache

Requests run in the order they came. When blocks run out the youngest running request gives its
blocks back and is computed anew later (preemption by recompute); it keeps its place in the queue, so an
older request is never stopped for a younger one and every accepted request ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from miniserve.errors import RequestError
from miniserve.kvcache.block_manager import BlockManager
from miniserve.request import Request
from miniserve.scheduler.policy import Policy, first_come_first_served


@dataclass(frozen=True)
class ScheduledRequest:
    """The tokens of a request at positions `start` to `stop` (exclusive)."""

    request: Request
    start: int
    stop: int
    samples: bool  # the step closes the gap, so that a new token is sampled

    @property
    def num_scheduled_tokens(self) -> int:
        """How many tokens of the budget it takes."""
        return self.stop - self.start


@dataclass
class _Step:
    """A step being put together: what is left of the budget, and who has got what."""

    budget: int
    chosen: dict[int, ScheduledRequest] = field(default_factory=dict)

    def add(self, item: ScheduledRequest) -> None:
        self.budget -= item.num_scheduled_tokens
        self.chosen[item.request.key] = item

    def drop(self, request: Request) -> None:
        """Forget a request that has just been preempted, if it was chosen already."""
        if request.key in self.chosen:
            self.budget += self.chosen.pop(request.key).num_scheduled_tokens


class Scheduler:
    """Owns the waiting and running queues. Decides; computes nothing and sees no tensors."""

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_waiting: int,
        max_chunk: int | None = None,
        policy: Policy = first_come_first_served,
    ) -> None:
        self.block_manager = block_manager
        self.policy = policy
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_chunk = min(max_chunk or max_num_batched_tokens, max_num_batched_tokens)  # tokens of one request
        self.max_waiting = max_waiting
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0

    # ---------------------------------------------------------------- in and out

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it could never fit, even alone (`check_fits`).
        """
        self.check_fits(request.prompt_token_ids)
        self.waiting.append(request)

    @property
    def room(self) -> int:
        """How many more requests may come: free seats and places in the queue."""
        return max(0, self.max_num_seqs - len(self.running)) + self.max_waiting - len(self.waiting)

    def check_fits(self, prompt_token_ids: Sequence[int]) -> None:
        """Refuse a prompt that the pool can never hold, even with nobody else running.

        Raises:
            RequestError: names the blocks needed and the blocks there are, per retention class.
        """
        layout, available = self.block_manager.layout, self.block_manager.num_pages
        needed = layout.blocks_for(len(prompt_token_ids))
        if needed > available:
            classes = " + ".join(
                f"{c.blocks_for(len(prompt_token_ids))} for layer groups {list(c.groups)}"
                f"{'' if c.window is None else f' (window {c.window})'}"
                for c in layout.classes
            )
            raise RequestError(
                f"the prompt of {len(prompt_token_ids)} tokens needs {needed} KV blocks ({classes}) but the pool has "
                f"{available}; shorten the prompt or raise kv_cache_memory",
                "prompt",
            )

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """End a request in whatever state it is and give back its blocks. One that has ended stays as it is,
        except that a stop string found in its last token outranks its length.
        """
        if request.finished:
            if reason == "stop":
                request.finish_reason, request.stop_reason = reason, stop_reason
            return
        request.finish_reason, request.stop_reason = reason, stop_reason
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.block_manager.free(request)

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks; it waits, before all younger ones, to be computed anew."""
        self.running.remove(request)
        self.block_manager.free(request)
        request.num_computed_tokens = 0
        self.num_preemptions += 1
        place = next((i for i, other in enumerate(self.waiting) if other.key > request.key), len(self.waiting))
        self.waiting.insert(place, request)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.running or self.waiting)

    # ---------------------------------------------------------------- one step

    def schedule(self) -> list[ScheduledRequest]:
        """Choose this step's requests and tokens; their blocks are theirs when this returns."""
        step = _Step(self.max_num_batched_tokens)
        num_preemptions = self.num_preemptions
        for request in self.policy(self.running):
            if step.budget and (num_tokens := self._make_room(request, step)):
                step.add(self._grow(request, num_tokens))
        for scheduled in step.chosen.values():
            self.block_manager.publish(scheduled.request, scheduled.stop)
        if self.num_preemptions == num_preemptions:
            self._admit(step)
        return list(step.chosen.values())

    def update(self, scheduled: Sequence[ScheduledRequest], tokens: Sequence[int]) -> None:
        """Take in a step's result: `tokens` has one entry for each scheduled request that `samples`, in order."""
        self.block_manager.confirm()
        sampled = iter(tokens)
        for item in scheduled:
            item.request.num_computed_tokens = item.stop
            if item.samples:
                self._append(item.request, next(sampled))

    def fail(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """The step was not computed: end its requests with reason "error"; nothing of it stays in the cache."""
        self.block_manager.retract()
        for item in scheduled:
            self.finish(item.request, "error")

    # ---------------------------------------------------------------- how

    def _make_room(self, request: Request, step: _Step) -> int:
        """How many tokens of a running request can be computed now, preempting younger ones until at least one can."""
        while request in self.running:
            start = request.num_computed_tokens
            want = min(step.budget, self.max_chunk, request.num_tokens - start)
            fits = self.block_manager.num_tokens_that_fit(request, start, start + want)
            if fits:
                return fits
            youngest = max(self.running, key=lambda other: other.key)
            step.drop(youngest)
            self.preempt(youngest)
        return 0

    def _admit(self, step: _Step) -> None:
        """Start waiting requests, in order, while seats, budget and blocks last.

        All known tokens of a request must fit (it would soon be preempted otherwise), unless nobody else runs.
        """
        while self.waiting and step.budget and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            start = self.block_manager.take_prefix(request)
            want = min(step.budget, self.max_chunk, request.num_tokens - start)
            fits = self.block_manager.num_tokens_that_fit(request, start, start + want)
            roomy = self.block_manager.can_hold_all(request, self.max_chunk)
            if not fits or (self.running and not roomy):
                self.block_manager.free(request)
                return
            self.waiting.popleft()
            self.running.append(request)
            request.num_computed_tokens = start
            if request.num_cached_tokens is None:
                request.num_cached_tokens = start
            step.add(self._grow(request, fits))
            self.block_manager.publish(request, start + fits)

    def _grow(self, request: Request, num_tokens: int) -> ScheduledRequest:
        """Give a request the blocks of its next tokens."""
        start = request.num_computed_tokens
        stop = start + num_tokens
        self.block_manager.grow(request, start, stop)
        return ScheduledRequest(request, start, stop, samples=stop == request.num_tokens)

    def _append(self, request: Request, token: int) -> None:
        """Add a sampled token and see whether it ends the request."""
        request.output_token_ids.append(token)
        num_output = len(request.output_token_ids)
        if token in request.stop_token_ids and num_output >= max(1, request.params.min_tokens):
            self.finish(request, "stop", token if token in (request.params.stop_token_ids or ()) else None)
        elif num_output == request.params.max_tokens or request.num_tokens >= request.max_total_tokens:
            self.finish(request, "length")
