"""Consecutive requests of a trace, grouped into the batches that a server would run."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mtserve_plugin.errors import InputError
from mtserve_plugin.workload.trace import BLOCK_REQUESTS, Int64s, Requests, Trace


def batches(trace: Trace, batch_size: int, *, distinct_users: bool = False) -> Iterator[Requests]:
    """Batches of `batch_size` consecutive requests, in time order; the last one may be shorter.

    Args:
        trace: where the requests come from; `trace.head(n)` limits them.
        batch_size: requests per batch.
        distinct_users: end a batch early, before a request whose user is in it already, so that no user
            occurs twice in one batch. Order is kept and nothing is left out.

    Raises:
        InputError: `batch_size` is below 1.
    """
    if batch_size < 1:
        raise InputError(f"batch_size={batch_size} must be at least 1")
    rest = Requests.empty()
    for block in trace.blocks(max(batch_size, BLOCK_REQUESTS)):
        requests = Requests.concatenate([rest, block]) if len(rest) else block
        begin = 0
        repeats = _next_repeat(requests.user) if distinct_users else None
        while begin + batch_size <= len(requests):
            end = begin + batch_size
            if repeats is not None:
                end = min(end, int(repeats[begin]))
            yield requests.take(slice(begin, end))
            begin = end
        rest = requests.take(slice(begin, None))
    while len(rest):
        end = min(batch_size, len(rest))
        if distinct_users:
            end = min(end, int(_next_repeat(rest.user)[0]))
        yield rest.take(slice(0, end))
        rest = rest.take(slice(end, None))


def _next_repeat(user: Int64s) -> Int64s:
    """For each position the first later one whose user occurred since then; `len(user)` where none does."""
    size = len(user)
    order = np.argsort(user, kind="stable")
    same = user[order[1:]] == user[order[:-1]]
    first_repeat = np.full(size, size, np.int64)
    first_repeat[order[:-1][same]] = order[1:][same]
    return np.minimum.accumulate(first_repeat[::-1])[::-1]
