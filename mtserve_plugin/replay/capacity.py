"""What other sizes of the device tier would have found: the replay's batches through the index alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtserve_plugin.config import CacheConfig
from mtserve_plugin.simulate.run import IndexRun
from mtserve_plugin.workload import Requests

_SHARES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
"""Of the pages that all users of the replay need."""


def sweep_pages(
    configs: Mapping[str, CacheConfig], working_set: int, before: Sequence[Requests], timed: Sequence[Requests]
) -> list[dict[str, Any]]:
    """Hit ratios of `timed` by mode and number of pages, among them the replay's own.

    Args:
        configs: the modes' caches.
        working_set: pages that hold all users.
        before: batches that bring the caches into their state.
        timed: batches that count; transfers end between two batches, as in the replay.
    """
    rows = []
    for mode, config in configs.items():
        for pages in sorted({config.num_pages, *(max(1, round(share * working_set)) for share in _SHARES)}):
            index = IndexRun(config.replace(num_pages=pages), max(map(len, [*before, *timed])))
            _serve(index, before)
            start = index.stats()
            _serve(index, timed)
            end = index.stats()
            asked = max(end["history_tokens"] - start["history_tokens"], 1)
            rows.append(
                {"mode": mode, "pages": pages}
                | {
                    ratio: (end[tokens] - start[tokens]) / asked
                    for ratio, tokens in (("device_hit_ratio", "device_hit_tokens"), ("total_hit_ratio", "hit_tokens"))
                }
            )
    return rows


def _serve(index: IndexRun, batches: Sequence[Requests]) -> None:
    for requests in batches:
        index.feed(requests)
        index.finish()
