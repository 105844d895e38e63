"""Agenda: generated requests that wait until they are due. With millions of users most are due much later."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mtserve_plugin.workload.trace import Bools, Int64s

_NEAR_WINDOWS = 32


class Pending(NamedTuple):
    """Requests, one array per column, int64 `[n]` each: the user, when it is due, and the user's events then and at the
    request before."""

    user: Int64s
    time: Int64s
    events: Int64s
    before: Int64s

    def take(self, index: slice | Int64s | Bools) -> Pending:
        return Pending(*(column[index] for column in self))

    @classmethod
    def concatenate(cls, parts: list[Pending]) -> Pending:
        if not parts:
            return cls(*(np.zeros(0, np.int64) for _ in cls._fields))
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


class Agenda:
    """Files requests under the window of time in which they are due; what is due after the next windows stays in one
    pile, which is looked through once in `_NEAR_WINDOWS` windows.

    Args:
        begin: when the first window begins, in seconds.
        window: seconds per window.

    Attributes:
        horizon: end of the windows that have a file of their own.
    """

    def __init__(self, begin: int, window: int) -> None:
        self._begin = begin
        self._window = window
        self._files: dict[int, list[Pending]] = {}
        self._pile: list[Pending] = []
        self.horizon = begin

    def extend(self) -> None:
        """Moves the horizon by `_NEAR_WINDOWS` windows."""
        self.horizon += self._window * _NEAR_WINDOWS
        pile, self._pile = Pending.concatenate(self._pile), []
        self.add(pile)

    def add(self, made: Pending) -> None:
        near = made.time < self.horizon
        if not near.all():
            self._pile.append(made.take(~near))
            made = made.take(near)
        if not len(made.time):
            return
        number = (made.time - self._begin) // self._window
        order = np.argsort(number, kind="stable")
        made, number = made.take(order), number[order]
        cuts = np.flatnonzero(np.diff(number, prepend=-1))
        for begin, end in zip(cuts.tolist(), [*cuts[1:].tolist(), len(number)], strict=True):
            self._files.setdefault(int(number[begin]), []).append(made.take(slice(begin, end)))

    def take(self, number: int) -> Pending:
        """Removes and returns what is due in this window; the horizon must be behind it."""
        return Pending.concatenate(self._files.pop(number, []))
