"""LogTrace: a log of events, cut into requests (paper 5.1)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from mtserve_plugin.errors import ConfigError, InputError
from mtserve_plugin.workload.cap import HistoryCap
from mtserve_plugin.workload.log_reader import Log
from mtserve_plugin.workload.ragged import offsets_of, ranges
from mtserve_plugin.workload.trace import BLOCK_REQUESTS, Events, Int64s, Requests, Trace, check_block_size


class LogTrace(Trace):
    """The requests that a log of events stands for.

    A user's events are cut into intervals: one begins with an event, takes what follows within `interval_s`
    of that first event, and the next begins with the first event after it. Each interval is one request, at
    its first event, whose history is all earlier events of the user; the interval's own events become history
    for the next request. Users keep their ids; items are numbered 0 to `num_items - 1` in ascending order of
    their ids (`item_ids` maps back).

    Args:
        log: the events, in any order; equal times of a user keep the log's order.
        interval_s: length of an interval in seconds, not below 0.001.
        max_history: longest history in tokens (table 4: 20,000); `None` for no limit.
        at_cap: policy at that length, see `HistoryCap`.
        min_history: requests with shorter histories are left out; 1 leaves out each user's first (table 4).
        name: name of the trace.

    Raises:
        ConfigError: an option is out of range.
        InputError: the log leaves no request, or spans too many users and years to be sorted.
    """

    def __init__(
        self,
        log: Log,
        *,
        interval_s: float = 60.0,
        max_history: int | None = 20_000,
        at_cap: str = "stop",
        min_history: int = 1,
        name: str = "log",
    ) -> None:
        if not (math.isfinite(interval_s) and interval_s >= 0.001):
            raise ConfigError(f"interval_s={interval_s} must be at least 0.001 seconds")
        if min_history < 0:
            raise ConfigError(f"min_history={min_history} must be 0 or more")
        self.name = name
        self.interval_s = interval_s
        self.min_history = min_history
        self._cap = HistoryCap(max_history, at_cap)
        self._files, self._actions = log.files, log.actions
        self.num_actions = log.num_actions

        self.users, owner = np.unique(log.user, return_inverse=True)
        self.item_ids, item = np.unique(log.item, return_inverse=True)
        self.num_items = len(self.item_ids)
        order = np.lexsort((log.time_ms, owner))
        owner = owner[order]
        self._offsets = offsets_of(np.bincount(owner, minlength=len(self.users)))
        self._time_ms = log.time_ms[order]
        self._item = item[order].astype(np.int32 if self.num_items < 2**31 else np.int64)
        self._action = log.action[order]
        self._first_event = self._cut(owner)
        self.num_requests = len(self._first_event)
        if not self.num_requests:
            raise InputError(
                f"log: no request has a history of min_history={min_history} events; lower it, lower "
                f"interval_s={interval_s}, or give a longer log"
            )

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "log",
            "name": self.name,
            "files": list(self._files),
            "users": len(self.users),
            "requests": self.num_requests,
            "events": len(self._item),
            "num_items": self.num_items,
            "num_actions": self.num_actions,
            "actions": list(self._actions[:16]),
            "interval_s": self.interval_s,
            "min_history": self.min_history,
            "max_history": self._cap.max_history,
            "at_cap": self._cap.at_cap,
            "cap_policy": self._cap.describe(),
        }

    def blocks(self, max_requests: int = BLOCK_REQUESTS) -> Iterator[Requests]:
        check_block_size(max_requests)
        for begin in range(0, len(self._first_event), max_requests):
            first = self._first_event[begin : begin + max_requests]
            owner = self._owner[begin : begin + max_requests]
            start, end = self._cap.window(first - self._offsets[owner])
            before = self._earlier[begin : begin + max_requests]
            earlier, _ = self._cap.window(np.maximum(before, 0))
            yield Requests(
                self.users[owner],
                self._time_ms[first] // 1000,
                start,
                end,
                (before >= 0) & (start != earlier),
            )

    def events(self, user: int) -> Events:
        at = int(np.searchsorted(self.users, user))
        if at == len(self.users) or self.users[at] != user:
            raise InputError(f"user={user} is not in the trace {self.name!r}; see its attribute `users`")
        return self._events(slice(int(self._offsets[at]), int(self._offsets[at + 1])))

    def histories(self, requests: Requests) -> Events:
        at = np.minimum(np.searchsorted(self.users, requests.user), len(self.users) - 1)
        if (strange := self.users[at] != requests.user).any():
            raise InputError(f"requests: user {requests.user[np.argmax(strange)]} is not in the trace {self.name!r}")
        begin = self._offsets[at] + requests.start
        if (beyond := (self._offsets[at] + requests.end > self._offsets[at + 1])).any():
            user = requests.user[np.argmax(beyond)]
            raise InputError(f"requests: user {user} has fewer events in {self.name!r}; pass requests of this trace")
        return self._events(ranges(begin, requests.history_length))

    def items_at(self, quantile: npt.NDArray[np.float64]) -> Int64s:
        """The item of the event at each quantile of the log: items come as often as in the log."""
        return self._item[(quantile * len(self._item)).astype(np.int64)].astype(np.int64)

    def _events(self, index: slice | Int64s) -> Events:
        item, action, time_ms = self._item[index], self._action[index], self._time_ms[index]
        return Events(item.astype(np.int64), action.astype(np.int64), time_ms // 1000)

    def _cut(self, owner: Int64s) -> Int64s:
        """First events of all intervals that are requests, by time; sets `_owner` and `_earlier` along with
        them.

        `_earlier` is how many events the user had at its previous request, -1 for none.
        """
        first = self._interval_starts(owner)
        count = first - self._offsets[owner[first]]
        first, count = first[count >= self.min_history], count[count >= self.min_history]
        mine = owner[first]
        earlier = np.full(len(first), -1, np.int64)
        same = mine[1:] == mine[:-1]
        earlier[1:][same] = count[:-1][same]
        by_time = np.lexsort((mine, self._time_ms[first]))
        self._owner = mine[by_time].astype(np.int32)
        self._earlier = earlier[by_time]
        return first[by_time]

    def _interval_starts(self, owner: Int64s) -> Int64s:
        """Ascending positions of the events that begin an interval.

        Where an interval begins depends on where the one before began, so all users go forward together, one
        interval per turn.
        """
        span = int(self._time_ms.max() - self._time_ms.min()) + 1
        interval = min(max(1, round(self.interval_s * 1000)), span)
        if len(self.users) * (span + interval) >= 2**63:
            raise InputError(
                f"log: {len(self.users)} users over {span / 3.2e10:.0f} years cannot be sorted together; "
                "look for wrong times, or split the log by users"
            )
        # One ascending key over all users: their times, set apart by more than any time plus an interval.
        key = self._time_ms - self._time_ms.min()
        key += owner * (span + interval)
        at = self._offsets[:-1]
        ends = self._offsets[1:]
        found = []
        while len(at):
            found.append(at)
            at = np.searchsorted(key, key[at] + interval)
            inside = at < ends
            at, ends = at[inside], ends[inside]
        starts = np.concatenate(found)
        starts.sort()
        return starts
