"""Sizes rounded up, so that few recordings serve many batches."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

from mtserve_plugin.errors import ConfigError
from mtserve_plugin.triton_kernels.plan import ROW_FIELDS, TILE_FIELDS, Cut, queries_per_tile

_LEAST_ROWS = 4
_LEAST_TOKENS = 64
_LEAST_PAGES = 64
_LEAST_SPLIT_TILES = 32
_LEAST_SEGMENTS = 4


@dataclass(frozen=True)
class GraphLimits:
    """Up to which size batches run through recordings, and how many sizes are recorded.

    Args:
        rows: batch rows.
        tokens: dense tokens of a batch, which are its deltas and candidates. Beyond a few thousand a layer computes for
            longer than its kernels take to launch, and rounding up costs more than recording saves.
        pages: entries of a batch's page lists.
        buckets: different sizes (each to a power of two) that are recorded; batches of further ones run eagerly.

    Raises:
        ConfigError: a limit is below 1.
    """

    rows: int = 16
    tokens: int = 4096
    pages: int = 8192
    buckets: int = 32

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ConfigError(f"{field.name}={getattr(self, field.name)} must be at least 1")

    def admit(self, rows: int, tokens: int, pages: int) -> bool:
        """True if a batch of this size may run through a recording; one without tokens has nothing to run."""
        return 0 < rows <= self.rows and 0 < tokens <= self.tokens and pages <= self.pages


class Tiling(NamedTuple):
    """Queries per tile, few and many, and how many programs the device runs at once; on a device as its kernels say."""

    queries: int
    many_queries: int
    processors: int

    def block_m(self, rows: int, tokens: int) -> int:
        """Queries per tile of a bucket."""
        return queries_per_tile(self.queries, self.many_queries, tokens, rows)


class Bucket(NamedTuple):
    """The sizes of one recording: batches that round up to them share it.

    Attributes:
        rows: batch rows.
        tokens: dense tokens, the rows of every activation.
        pages: entries of the page lists.
        block_m: queries per tile.
        split_tiles: tiles under splitting, 0 without it.
        segments: segments of keys that one tile may see; counts under splitting alone.
    """

    rows: int
    tokens: int
    pages: int
    block_m: int
    split_tiles: int
    segments: int

    @property
    def tiles(self) -> int:
        """As many as rows of any lengths can need."""
        return self.tokens // self.block_m + self.rows

    @property
    def plan_sizes(self) -> tuple[int, int, int, int]:
        """int32 entries of rows, tiles, split tiles and pages."""
        return ROW_FIELDS * self.rows, TILE_FIELDS * self.tiles, TILE_FIELDS * self.split_tiles, self.pages


def rounded(size: int, least: int) -> int:
    """The next power of two, at least `least`."""
    return max(least, 1 << max(0, size - 1).bit_length())


def round_dense(rows: int, tokens: int) -> tuple[int, int]:
    """Batch rows and dense tokens of the bucket."""
    return rounded(rows, _LEAST_ROWS), rounded(tokens, _LEAST_TOKENS)


def bucket_of(work: Cut, rows: int, tokens: int, block_m: int) -> Bucket:
    """The bucket of a batch that was cut into tiles of `block_m`; `rows` and `tokens` are rounded."""
    return Bucket(
        rows=rows,
        tokens=tokens,
        pages=rounded(len(work.pages), _LEAST_PAGES),
        block_m=block_m,
        split_tiles=rounded(len(work.split_tiles), _LEAST_SPLIT_TILES) if work.split else 0,
        segments=rounded(work.segments, _LEAST_SEGMENTS) if work.split else 0,
    )
