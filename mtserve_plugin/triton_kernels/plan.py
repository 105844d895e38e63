"""How a batch is cut into the kernels' work, on the host, in numpy: nothing here needs triton or a device.

What the kernels read about a batch is four arrays of int32, packed behind each other: `rows` holds ROW_FIELDS per batch
row (first dense row, dense rows, candidates, paged tokens, first entry in `pages`), `tiles` TILE_FIELDS per program and
head (batch row, first query counted from its first dense row, segment), `split_tiles` the same where segments of keys
have programs of their own, `pages` page ids. A tile of batch row -1 does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ROW_FIELDS = 5
TILE_FIELDS = 3
SEGMENT = 512
_ALIGN = 4  # int32 entries: 16 bytes


class Lengths(NamedTuple):
    """The batch's lengths as numpy arrays on the host; int64 `[B]`, `offsets` `[B + 1]`, the page lists int32."""

    offsets: np.ndarray
    candidates: np.ndarray
    paged: np.ndarray
    pages: np.ndarray
    indptr: np.ndarray


class Cut(NamedTuple):
    """One batch as arrays for the kernels.

    Attributes:
        rows: int64 `[B, ROW_FIELDS]`.
        tiles: int64 `[n, TILE_FIELDS]`.
        split_tiles: int64 `[m, TILE_FIELDS]`; without entries where segments have no programs of their own.
        pages: int32.
        segments: most segments that one tile sees.
        keys: most keys that one tile sees, at least 1.
        split: whether segments have programs of their own.
    """

    rows: np.ndarray
    tiles: np.ndarray
    split_tiles: np.ndarray
    pages: np.ndarray
    segments: int
    keys: int
    split: bool


def cut(lengths: Lengths, *, block_m: int, heads: int, window: int, processors: int, split: bool | None = None) -> Cut:
    """Cuts a batch into tiles of `block_m` queries, the longest first: the short ones fill the gaps at the end.

    Args:
        processors: how many programs the device runs at once, about; decides on splitting where `split` is `None`.
    """
    dense = np.diff(lengths.offsets)
    history = dense - lengths.candidates
    counts = -(-dense // block_m)
    row = np.repeat(np.arange(len(dense)), counts)
    first = (np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)) * block_m
    end = lengths.paged[row] + np.minimum(np.minimum(first + block_m, dense[row]), history[row])
    begin = np.zeros_like(end)
    if window > 0:
        begin = np.maximum(lengths.paged[row] + np.minimum(first, history[row]) - window, 0)
    order = np.argsort(begin - end, kind="stable")
    row, first, begin, end = row[order], first[order], begin[order], end[order]
    low, spans = begin // SEGMENT, -(-end // SEGMENT) - begin // SEGMENT
    segments = int(spans.max(initial=0))
    if split is None:
        split = segments > 1 and len(row) * heads < 2 * processors
    split_tiles = np.zeros((0, TILE_FIELDS), dtype=np.int64)
    if split:
        of = np.repeat(np.arange(len(row)), spans)
        segment = low[of] + np.arange(len(of)) - np.repeat(np.cumsum(spans) - spans, spans)
        split_tiles = np.stack([row[of], first[of], segment], axis=1)
    return Cut(
        rows=np.stack([lengths.offsets[:-1], dense, lengths.candidates, lengths.paged, lengths.indptr[:-1]], axis=1),
        tiles=np.stack([row, first, np.zeros_like(row)], axis=1),
        split_tiles=split_tiles,
        pages=lengths.pages,
        segments=segments,
        keys=int((end - begin).max(initial=1)),
        split=split,
    )


def queries_per_tile(queries: int, many_queries: int, tokens: int, rows: int) -> int:
    """`many_queries` where `rows` batch rows have so many dense tokens that it pays."""
    return many_queries if tokens >= 4 * many_queries * max(1, rows) else queries


def sections(sizes: Sequence[int]) -> list[slice]:
    """Where arrays of these sizes lie in one packed buffer, each at 16 bytes; the last one's stop is its end."""
    starts = np.cumsum([0, *(-(-size // _ALIGN) * _ALIGN for size in sizes)]).tolist()
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]


def tuning_key(programs: int, keys: int) -> int:
    """What the tuning goes by: programs and keys, each to a power of two."""
    return max(1, programs).bit_length() * 64 + max(1, keys).bit_length()
