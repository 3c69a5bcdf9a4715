"""In which order the running requests get their share of a step. To add a policy, add a function here and hand it to
`Scheduler`.

A policy only orders. Who is admitted, who fits and who must give way is `scheduler.py`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from miniserve.request import Request

Policy = Callable[[Sequence[Request]], list[Request]]


def first_come_first_served(running: Sequence[Request]) -> list[Request]:
    """Oldest first, but whoever needs a single token goes before whoever needs many.

    A long prompt so takes what the decoding requests leave of the token budget and never stalls them.
    """
    return sorted(running, key=lambda request: (request.num_tokens - request.num_computed_tokens > 1, request.key))
