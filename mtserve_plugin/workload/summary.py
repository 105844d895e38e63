"""Statistics of a trace: what the paper's table 4 and figure 4 show."""

from __future__ import annotations

from typing import Any

import numpy as np

from mtserve_plugin.workload.trace import BLOCK_REQUESTS, Int64s, Requests, Trace

# Return intervals are counted in bins that grow by this factor, so that quantiles are right within 6 %.
_BIN_RATIO = 10.0 ** (1 / 40)
_BINS = 40 * 12


def statistics(trace: Trace, max_requests: int = BLOCK_REQUESTS) -> dict[str, Any]:
    """One pass over a trace; memory grows with its users, not with its requests.

    Returns:
        users, requests; min_history, max_history, mean_history over the requests; appended_tokens, what
        histories have gained since their users' previous requests, and invalidated, the requests whose prefix
        changed; span_s, first to last request; return_interval_s, quantiles of the time between two requests
        of a user (`None` when nobody returns).
    """
    users = _Users()
    returns = ReturnIntervals()
    requests = invalidated = history = appended = 0
    shortest, longest = None, 0
    begin, end = None, 0
    for block in trace.blocks(max_requests):
        length = block.history_length
        requests += len(block)
        invalidated += int(block.invalidated.sum())
        history += int(length.sum())
        shortest = int(length.min()) if shortest is None else min(shortest, int(length.min()))
        longest = max(longest, int(length.max()))
        begin = int(block.time[0]) if begin is None else begin
        end = int(block.time[-1])
        gaps, grown = users.advance(block)
        appended += int(grown.sum())
        returns.add(gaps)
    return {
        "users": len(users.ids),
        "requests": requests,
        "min_history": shortest or 0,
        "max_history": longest,
        "mean_history": history / max(1, requests),
        "appended_tokens": appended,
        "invalidated": invalidated,
        "span_s": end - (begin or 0),
        "return_interval_s": {name: returns.quantile(q) for name, q in _QUANTILES.items()},
    }


_QUANTILES = {"p10": 0.1, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}


class ReturnIntervals:
    """A histogram of the times between two requests of a user, in bins that grow (figure 4).

    Attributes:
        counts: int64 `[480]`; bin i holds intervals from `10 ** (i / 40)` seconds on.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(_BINS, np.int64)

    @classmethod
    def of(cls, trace: Trace) -> ReturnIntervals:
        """Those of a whole trace; one pass, memory grows with its users."""
        users, made = _Users(), cls()
        for block in trace.blocks():
            made.add(users.advance(block)[0])
        return made

    def add(self, seconds: Int64s) -> None:
        place = np.log(np.maximum(seconds, 1)) / np.log(_BIN_RATIO)
        self.counts += np.bincount(np.minimum(place.astype(np.int64), _BINS - 1), minlength=_BINS)

    def quantile(self, share: float) -> float | None:
        """Seconds that this share of the intervals does not exceed, within 6 %; `None` when there are none."""
        if not (total := int(self.counts.sum())):
            return None
        at = int(np.searchsorted(np.cumsum(self.counts), share * total))
        return float(_BIN_RATIO ** (at + 0.5))


class _Users:
    """Each user's latest request: its time and the end of its history."""

    def __init__(self) -> None:
        self.ids = np.zeros(0, np.int64)
        self._latest = np.zeros((2, 0), np.int64)

    def advance(self, block: Requests) -> tuple[Int64s, Int64s]:
        """Time and events since the previous request, of those requests that have one."""
        fresh = np.setdiff1d(block.user, self.ids)
        if len(fresh):
            ids = np.concatenate([self.ids, fresh])
            order = np.argsort(ids)
            latest = np.concatenate([self._latest, np.full((2, len(fresh)), -1, np.int64)], axis=1)
            self.ids, self._latest = ids[order], latest[:, order]
        at = np.searchsorted(self.ids, block.user)
        order = np.argsort(at, kind="stable")
        at, now = at[order], np.stack([block.time, block.end])[:, order]
        before = np.empty_like(now)
        before[:, 1:] = now[:, :-1]
        first = np.ones(len(at), np.bool_)
        first[1:] = at[1:] != at[:-1]
        before[:, first] = self._latest[:, at[first]]
        last = np.roll(first, -1)
        self._latest[:, at[last]] = now[:, last]
        known = before[1] >= 0
        return (now - before)[0, known], (now - before)[1, known]
