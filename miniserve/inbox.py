"""Where any thread leaves requests and aborts for the one that steps the engine."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from miniserve.answer import Answer
from miniserve.checks import shorten
from miniserve.errors import QueueFull, RequestError


class Inbox:
    """Owns the answers under way, by request id, and what has been asked since the last step."""

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self._lock = threading.Lock()  # guards the next three
        self._answers: dict[str, Answer] = {}
        self._arrivals: list[Answer] = []
        self._aborts: list[Answer] = []

    @property
    def num_arrivals(self) -> int:
        """Requests that no step has seen yet."""
        return len(self._arrivals)

    @property
    def has_aborts(self) -> bool:
        """Whether somebody wants a request ended."""
        return bool(self._aborts)

    @property
    def request_ids(self) -> list[str]:
        """Of all requests under way."""
        with self._lock:
            return list(self._answers)

    def put(self, answers: Sequence[Answer], *, room: int | None, num_waiting: int) -> None:
        """Leave checked requests, all or none. `room` is how many sequences may come still, None: any number.

        Raises:
            QueueFull: there is no room.
            RequestError: an id is in use.
        """
        with self._lock:
            new, pending = (sum(len(answer.samples) for answer in group) for group in (answers, self._arrivals))
            if room is not None and new + pending > room:
                raise QueueFull(
                    f"{num_waiting + pending} requests are waiting already (max_waiting={self.max_waiting}); "
                    "try again later"
                )
            for answer in answers:
                if answer.request_id in self._answers:
                    raise RequestError(f"request_id {shorten(answer.request_id)} is in use; take another", "request_id")
            self._answers.update({answer.request_id: answer for answer in answers})
            self._arrivals.extend(answers)

    def abort(self, request_id: str) -> bool:
        """Ask for a request's end; returns whether it was under way."""
        with self._lock:
            if request_id not in self._answers:
                return False
            self._aborts.append(self._answers[request_id])
            return True

    def take(self) -> tuple[list[Answer], list[Answer]]:
        """Arrivals and aborts since the last call."""
        with self._lock:
            taken = self._arrivals, self._aborts
            self._arrivals, self._aborts = [], []
        return taken

    def forget(self, answer: Answer) -> None:
        """Its id is free again."""
        with self._lock:
            self._answers.pop(answer.request_id, None)
