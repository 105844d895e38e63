"""Index arithmetic for rows of different lengths stored one after another."""

from __future__ import annotations

import numpy as np

from mtserve_plugin.workload.trace import Int64s


def offsets_of(lengths: Int64s) -> Int64s:
    """`[n + 1]` int64: where each row begins, and the end of the last."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def rows_of(lengths: Int64s) -> Int64s:
    """`[sum(lengths)]` int64: the row of each element."""
    return np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)


def ranges(start: Int64s, lengths: Int64s) -> Int64s:
    """`[sum(lengths)]` int64: `start[i], start[i] + 1, ...`, `lengths[i]` of them, row after row."""
    offsets = offsets_of(lengths)
    return np.arange(offsets[-1], dtype=np.int64) + np.repeat(start - offsets[:-1], lengths)
