"""A few batches with every stream's work recorded: what overlapped with what.

Runs after the timed batches, on caches of its own, so that recording never disturbs a latency. Unlike there, background
copies are not waited for between the batches.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mtserve_plugin.cache import HierarchicalKVCache, KVCache, Span
from mtserve_plugin.config import CacheConfig
from mtserve_plugin.steps import StepClock

BATCHES = 6

CALLER = "caller"
"""The stream of the model's own steps, in `Overlap.spans`."""

Batch = Callable[[KVCache], None]
"""Runs one batch, its features ready, with the cache that it is given."""


@dataclass(frozen=True)
class Overlap:
    """What ran when during a few consecutive batches; times in milliseconds since the first of them began.

    Attributes:
        mode: the replay's mode whose cache was used.
        strategy: "direct" (host memory straight into pages) or "staged" (through the onload region, which batches
            read before it is scattered).
        batch_size: requests per batch.
        first_batch: which of the timed batches was the first.
        batches: begin and end of each forward pass.
        spans: stream, name, begin and end of every piece of work, in the order of their begin; the stream is `CALLER`
            for the steps of `mtserve_plugin.steps`.
    """

    mode: str
    strategy: str
    batch_size: int
    first_batch: int
    batches: list[tuple[float, float]]
    spans: list[tuple[str, str, float, float]]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def choose_window(onloaded: Sequence[int], batches: int = BATCHES) -> int:
    """Index of the first of `batches` consecutive batches of which most brought something from the host tier."""
    ends = range(batches, len(onloaded) + 1)
    counts = [sum(tokens > 0 for tokens in onloaded[end - batches : end]) for end in ends]
    return counts.index(max(counts)) if counts else 0


def staged(config: CacheConfig, onload_pages: int) -> CacheConfig:
    """The same cache with staged onloads, which batches read in the onload region."""
    return config.replace(onload_strategy="staged", read_onload_region=True, onload_pages=onload_pages)


def record(
    config: CacheConfig,
    before: Iterable[Batch],
    window: Sequence[Batch],
    *,
    mode: str,
    batch_size: int,
    first_batch: int,
) -> Overlap:
    """Runs `before` one by one, then `window` without a pause, and records the latter.

    Args:
        config: of the cache, which is built here.
        before: what brings the cache into its state.
        window: batches whose features are ready, so that they follow each other at once.
        mode, batch_size, first_batch: for the result.
    """
    batches = []
    cache = HierarchicalKVCache(config)
    with cache:
        for run in before:
            run(cache)
            cache.drain()
        with cache.timeline() as spans, StepClock(keep_spans=True) as clock:
            for run in window:
                begin = time.perf_counter()
                run(cache)
                batches.append((begin, time.perf_counter()))
            cache.drain()
    steps = [Span(CALLER, *span) for span in clock.spans or []]
    zero = batches[0][0]
    found = sorted([*spans, *steps], key=lambda span: span.begin)
    return Overlap(
        mode,
        config.onload_strategy,
        batch_size,
        first_batch,
        [((begin - zero) * 1e3, (end - zero) * 1e3) for begin, end in batches],
        [(stream, name, (begin - zero) * 1e3, (end - zero) * 1e3) for stream, name, begin, end in found],
    )
