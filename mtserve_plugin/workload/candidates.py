"""CandidateSampler: the items that each request asks to have ranked."""

from __future__ import annotations

import numpy as np

from mtserve_plugin.errors import ConfigError
from mtserve_plugin.workload import draws
from mtserve_plugin.workload.ragged import ranges, rows_of
from mtserve_plugin.workload.trace import Int64s, Requests, Trace


class CandidateSampler:
    """Draws candidates as a function of (seed, user, time of the request) alone.

    So a request has the same candidates in every run, batch size, mode and limit. Items are drawn with
    replacement: an item may occur twice in a request.

    Args:
        trace: whose items are drawn.
        num_candidates: candidates per request, or the smallest and largest number of a uniform choice.
        by: "popularity" (as often as users see them, `Trace.items_at`) or "uniform".
        seed: all randomness follows from it.

    Raises:
        ConfigError: an option is out of range.
    """

    def __init__(
        self, trace: Trace, num_candidates: int | tuple[int, int], *, by: str = "popularity", seed: int = 0
    ) -> None:
        low, high = (num_candidates, num_candidates) if isinstance(num_candidates, int) else num_candidates
        if not 0 <= low <= high:
            raise ConfigError(f"num_candidates={num_candidates} must be 0 or more, or a range (smallest, largest)")
        if by not in ("popularity", "uniform"):
            raise ConfigError(f"by={by!r} is not known; use 'popularity' or 'uniform'")
        self._trace = trace
        self._low, self._high = low, high
        self._by = by
        self._seed = seed

    def __call__(self, requests: Requests) -> tuple[Int64s, Int64s]:
        """Returns item ids, row after row, and their number per request, `[n]`; int64."""
        key = draws.keys_of(self._seed, "candidates", requests.user, requests.time)
        none = np.zeros(len(key), np.int64)
        spread = draws.uniforms(key, none) * (self._high - self._low + 1)
        lengths = self._low + spread.astype(np.int64)
        quantile = draws.uniforms(key[rows_of(lengths)], ranges(none + 1, lengths))
        if self._by == "popularity":
            return self._trace.items_at(quantile), lengths
        return (quantile * self._trace.num_items).astype(np.int64), lengths
