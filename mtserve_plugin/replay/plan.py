"""ReplayPlan: which requests of a trace are timed, and what is in the caches before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mtserve_plugin.errors import InputError
from mtserve_plugin.workload import Events, Requests, Trace, batches
from mtserve_plugin.workload.trace import BLOCK_REQUESTS, Int64s, check_block_size


class Excerpt(Trace):
    """Some requests of another trace, in their order, with the events behind them."""

    def __init__(self, trace: Trace, requests: Requests) -> None:
        self._trace = trace
        self.requests = requests
        self.name = trace.name
        self.num_requests = len(requests)
        self.num_items = trace.num_items
        self.num_actions = trace.num_actions

    def describe(self) -> dict[str, Any]:
        return self._trace.describe()

    def blocks(self, max_requests: int = BLOCK_REQUESTS) -> Iterator[Requests]:
        check_block_size(max_requests)
        for begin in range(0, len(self.requests), max_requests):
            yield self.requests.take(slice(begin, begin + max_requests))

    def events(self, user: int) -> Events:
        return self._trace.events(user)

    def histories(self, requests: Requests) -> Events:
        return self._trace.histories(requests)

    def items_at(self, quantile: npt.NDArray[np.float64]) -> Int64s:
        return self._trace.items_at(quantile)


@dataclass(frozen=True)
class ReplayPlan:
    """The end of a trace, cut into three parts that follow each other in time.

    Attributes:
        prefill: of each user of the other parts the latest request before them: what a cache holds of these users
            when the other parts begin. A user without one comes for the first time.
        warmup: run by every mode, not timed.
        timed: run by every mode and timed.
        previous: `[timed]` int64, history length at the user's previous request of this plan; 0 for its first.
        users: users of `warmup` and `timed`.
        longest: `[users]` int64, the longest history of each.
    """

    prefill: Excerpt
    warmup: Excerpt
    timed: Excerpt
    previous: Int64s
    users: Int64s
    longest: Int64s

    @property
    def mean_history(self) -> float:
        """Mean history length of the timed requests, in tokens."""
        return float(self.timed.requests.history_length.mean())

    @property
    def mean_delta(self) -> float:
        """Mean number of history tokens of a timed request that no earlier request of its user can have left."""
        requests = self.timed.requests
        kept = np.where(requests.invalidated, 0, np.minimum(self.previous, requests.history_length))
        return float((requests.history_length - kept).mean())

    def pages(self, page_size: int) -> int:
        """Pages that would hold all users of the plan."""
        return int((-(-self.longest // page_size)).sum())

    def chunks(self, chunk_size: int) -> int:
        """Host chunks that hold all users of the plan, with room for a tail that is rewritten while it grows."""
        return int((-(-self.longest // chunk_size) + 1).sum())


def plan_replay(trace: Trace, requests: int, warmup: int) -> ReplayPlan:
    """Takes the last `requests` of a trace for timing and the `warmup` before them for warming up.

    The end, because there histories are longest and most users have been seen before. One pass, two where the trace
    does not know its length; memory grows with users and `requests`.

    Raises:
        InputError: the trace is shorter than `requests`, or its histories are empty.
    """
    total = trace.num_requests
    if total is None:
        total = sum(len(block) for block in trace.blocks())
    if total < requests:
        raise InputError(
            f"the trace {trace.name!r} has {total} requests; use --requests {max(total, 1)} or fewer, or a longer trace"
        )
    warmup = min(warmup, total - requests)
    begin = total - requests - warmup
    before, parts = Requests.empty(), []
    at = 0
    for block in trace.blocks():
        cut = min(max(begin - at, 0), len(block))
        if cut:
            before = _latest(Requests.concatenate([before, block.take(slice(0, cut))]))
        if cut < len(block):
            parts.append(block.take(slice(cut, None)))
        at += len(block)
    rest = Requests.concatenate(parts)
    users = np.unique(rest.user)
    prefill = before.take(np.isin(before.user, users) & (before.history_length > 0))
    timed = rest.take(slice(warmup, None))
    if not timed.history_length.any():
        raise InputError(
            f"the last {requests} requests of {trace.name!r} have no history at all; there is nothing to cache"
        )
    every = Requests.concatenate([prefill, rest])
    longest = np.zeros(len(users), np.int64)
    np.maximum.at(longest, np.searchsorted(users, every.user), every.history_length)
    return ReplayPlan(
        Excerpt(trace, prefill),
        Excerpt(trace, rest.take(slice(0, warmup))),
        Excerpt(trace, timed),
        _previous_lengths(every)[len(every) - len(timed) :],
        users,
        longest,
    )


def grouped(excerpt: Excerpt, batch_size: int) -> list[Requests]:
    """Batches of an excerpt in which no user occurs twice, so that all of a row's past is committed before it."""
    return list(batches(excerpt, batch_size, distinct_users=True))


def _latest(requests: Requests) -> Requests:
    """Each user's last request, in time order."""
    _, from_end = np.unique(requests.user[::-1], return_index=True)
    return requests.take(np.sort(len(requests) - 1 - from_end))


def _previous_lengths(requests: Requests) -> Int64s:
    """`[n]`: history length at the same user's request before each one, 0 where there is none."""
    order = np.argsort(requests.user, kind="stable")
    user, length = requests.user[order], requests.history_length[order]
    before = np.zeros(len(user), np.int64)
    same = user[1:] == user[:-1]
    before[1:][same] = length[:-1][same]
    previous = np.empty_like(before)
    previous[order] = before
    return previous
