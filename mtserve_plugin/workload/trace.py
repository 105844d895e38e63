"""Trace: an ordered stream of requests, and the events behind them.

A trace is read in two ways. A simulation of the cache's index alone streams `blocks()`: columns, no events. A
replay through a model also asks for the events of each request's history (`histories`). Write a trace of your
own by deriving from `Trace`; `check_trace` tells whether it keeps the contract.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mtserve_plugin.errors import InputError

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

BLOCK_REQUESTS = 65_536


@dataclass(frozen=True)
class Requests:
    """A run of requests, in time order, one array per column, `[n]` each.

    Attributes:
        user: int64 user ids, any value.
        time: int64, when the request arrives, in seconds; never decreases.
        start: int64, first event of the request's history, counted in the user's own events.
        end: int64, one past the last event of the history.
        invalidated: bool, the history is no continuation of the history in the user's previous request (its
            start moved), so nothing that was cached for the user is its prefix.
    """

    user: Int64s
    time: Int64s
    start: Int64s
    end: Int64s
    invalidated: Bools

    @property
    def history_length(self) -> Int64s:
        """`[n]` int64, tokens of each request's history."""
        return self.end - self.start

    def __len__(self) -> int:
        return len(self.user)

    def take(self, index: slice | Int64s | Bools) -> Requests:
        """The requests at `index`; a slice copies nothing."""
        return Requests(*(column[index] for column in self.columns))

    @property
    def columns(self) -> tuple[npt.NDArray[Any], ...]:
        return (self.user, self.time, self.start, self.end, self.invalidated)

    @classmethod
    def empty(cls) -> Requests:
        none = np.zeros(0, np.int64)
        return cls(none, none, none, none, np.zeros(0, np.bool_))

    @classmethod
    def concatenate(cls, parts: list[Requests]) -> Requests:
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return cls.empty()
        return cls(*(np.concatenate(columns) for columns in zip(*(p.columns for p in parts), strict=True)))


class Events(NamedTuple):
    """Events of one or several users, oldest first within a user; int64 `[n]` each.

    Attributes:
        item: item ids from 0 to `num_items - 1`.
        action: action codes from 0 to `num_actions - 1`.
        time: seconds; never decreases within a user.
    """

    item: Int64s
    action: Int64s
    time: Int64s


class Trace(ABC):
    """An ordered stream of requests and the events that make up their histories.

    To add one, set the attributes and implement `describe`, `blocks` and `events`. `histories` and `items_at`
    have defaults that are right for every trace and may be replaced by faster ones.

    Attributes:
        name: short name, for reports.
        num_requests: how many requests `blocks` yields in all, or `None` when that is not known beforehand.
        num_items: items are 0 to `num_items - 1`: the rows that an embedding table needs.
        num_actions: actions are 0 to `num_actions - 1`.
    """

    name: str
    num_requests: int | None
    num_items: int
    num_actions: int

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Where the trace comes from and every policy in force, as plain values that JSON can hold."""

    @abstractmethod
    def blocks(self, max_requests: int = BLOCK_REQUESTS) -> Iterator[Requests]:
        """All requests in time order, in blocks of 1 to `max_requests`.

        Each call starts anew and yields the same requests, whatever `max_requests` is; only what is needed
        for one block and per user is held in memory.
        """

    @abstractmethod
    def events(self, user: int) -> Events:
        """All events of one user, oldest first: at least as many as the largest `end` of the user's requests.

        The arrays are shared and not to be written to.

        Raises:
            InputError: the trace has no such user.
        """

    def histories(self, requests: Requests) -> Events:
        """The histories of some requests of this trace, row after row: events `start` to `end` of `user`."""
        rows: list[Events] = []
        for user, start, end in zip(
            requests.user.tolist(), requests.start.tolist(), requests.end.tolist(), strict=True
        ):
            item, action, time = self.events(user)
            if end > len(item):
                raise InputError(
                    f"requests: the history of user {user} ends at event {end}, the trace {self.name!r} has "
                    f"only {len(item)} events of this user; pass requests of this same trace"
                )
            rows.append(Events(item[start:end], action[start:end], time[start:end]))
        if not rows:
            none = np.zeros(0, np.int64)
            return Events(none, none, none)
        return Events(*(np.concatenate(columns) for columns in zip(*rows, strict=True)))

    def items_at(self, quantile: npt.NDArray[np.float64]) -> Int64s:
        """The item at each popularity quantile in [0, 1): uniform quantiles give items as often as users see
        them.

        The default takes all items for equally popular.
        """
        return (quantile * self.num_items).astype(np.int64)

    def head(self, limit: int) -> Trace:
        """The first `limit` requests of this trace, as a trace."""
        return _Head(self, limit)


class _Head(Trace):
    """The first requests of another trace."""

    def __init__(self, trace: Trace, limit: int) -> None:
        if limit < 0:
            raise InputError(f"limit={limit} must be 0 or more requests")
        self._trace = trace
        self._limit = limit
        self.name = trace.name
        self.num_requests = None if trace.num_requests is None else min(trace.num_requests, limit)
        self.num_items = trace.num_items
        self.num_actions = trace.num_actions

    def describe(self) -> dict[str, Any]:
        return {**self._trace.describe(), "limit": self._limit}

    def blocks(self, max_requests: int = BLOCK_REQUESTS) -> Iterator[Requests]:
        check_block_size(max_requests)
        left = self._limit
        if not left:
            return
        for block in self._trace.blocks(min(max_requests, left)):
            yield block.take(slice(0, left)) if len(block) > left else block
            left -= len(block)
            if left <= 0:
                return

    def events(self, user: int) -> Events:
        return self._trace.events(user)

    def histories(self, requests: Requests) -> Events:
        return self._trace.histories(requests)

    def items_at(self, quantile: npt.NDArray[np.float64]) -> Int64s:
        return self._trace.items_at(quantile)


def check_block_size(max_requests: int) -> None:
    if max_requests < 1:
        raise InputError(f"max_requests={max_requests} must be at least 1")
