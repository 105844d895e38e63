"""check_trace: does a trace keep the contract of `Trace`?"""

from __future__ import annotations

import numpy as np

from mtserve_plugin.errors import InputError
from mtserve_plugin.workload.trace import Events, Requests, Trace


def check_trace(trace: Trace, *, limit: int = 10_000, users: int = 8) -> None:
    """Reads the first requests of a trace, and the events of some users, and compares them with the contract.

    Args:
        trace: a trace of your own.
        limit: requests to look at.
        users: users whose events are looked at.

    Raises:
        InputError: says what is wrong and at which request.
    """
    whole = Requests.concatenate(list(trace.head(limit).blocks(max(1, limit))))
    pieces = Requests.concatenate(list(trace.head(limit).blocks(7)))
    for name, column in _columns(whole).items():
        expected = np.bool_ if name == "invalidated" else np.int64
        if column.dtype != expected or column.shape != (len(whole),):
            raise InputError(f"blocks: {name} is {column.dtype} {column.shape}; expected {np.dtype(expected)} [n]")
        if not np.array_equal(column, _columns(pieces)[name]):
            raise InputError(f"blocks: {name} depends on max_requests, or on the call; make every call yield the same")
    _hold(whole.time[1:] >= whole.time[:-1], "time decreases; yield requests in time order", shift=1)
    _hold((whole.start >= 0) & (whole.start <= whole.end), "0 <= start <= end does not hold")
    _hold(_first_visits(whole) <= ~whole.invalidated, "invalidated is set on a user's first request")
    for user in np.unique(whole.user)[:users].tolist():
        _check_user(trace, whole, user)


def _check_user(trace: Trace, whole: Requests, user: int) -> None:
    mine = np.flatnonzero(whole.user == user)
    requests = whole.take(mine)
    _hold(requests.end[1:] >= requests.end[:-1], f"user {user}: end decreases", at=mine[1:])
    moved = requests.start[1:] != requests.start[:-1]
    _hold(
        requests.invalidated[1:] == moved,
        f"user {user}: invalidated must tell whether start moved",
        at=mine[1:],
    )
    events = trace.events(user)
    for name, column, top in zip(Events._fields, events, (trace.num_items, trace.num_actions, None), strict=True):
        if column.dtype != np.int64 or column.shape != events.item.shape:
            raise InputError(
                f"events({user}): {name} is {column.dtype} {column.shape}; expected int64, all equally long"
            )
        if len(column) and column.min() < 0:
            raise InputError(f"events({user}): {name} is negative somewhere")
        if len(column) and top is not None and column.max() >= top:
            raise InputError(f"events({user}): {name} reaches num_{name}s={top}; raise it")
    if (events.time[1:] < events.time[:-1]).any():
        raise InputError(f"events({user}): time decreases; give events oldest first")
    _hold(requests.end <= len(events.time), f"events({user}) has {len(events.time)} events, too few", at=mine)
    filled = requests.end > 0
    late = np.ones(len(mine), np.bool_)
    late[filled] = events.time[requests.end[filled] - 1] <= requests.time[filled]
    _hold(late, f"events({user}): a history's last event is later than its request", at=mine)
    rows = trace.histories(requests.take(slice(0, 3)))
    spans = [slice(s, e) for s, e in zip(requests.start[:3].tolist(), requests.end[:3].tolist(), strict=True)]
    for name, column, row in zip(Events._fields, events, rows, strict=True):
        if not np.array_equal(np.concatenate([column[span] for span in spans]), row):
            raise InputError(f"histories: {name} of user {user} differs from events({user})")


def _columns(requests: Requests) -> dict[str, np.ndarray]:
    return dict(zip(("user", "time", "start", "end", "invalidated"), requests.columns, strict=True))


def _first_visits(requests: Requests) -> np.ndarray:
    first = np.zeros(len(requests), np.bool_)
    first[np.unique(requests.user, return_index=True)[1]] = True
    return first


def _hold(holds: np.ndarray, problem: str, *, shift: int = 0, at: np.ndarray | None = None) -> None:
    if not holds.all():
        bad = int(np.argmin(holds))
        raise InputError(f"request {int(at[bad]) if at is not None else bad + shift}: {problem}")
