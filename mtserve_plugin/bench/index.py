"""Micro-benchmarks of single parts; today of the index: what one batch costs, and what millions of users cost."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from mtserve_plugin.cache import HierarchicalKVCache
from mtserve_plugin.config import CacheConfig
from mtserve_plugin.engine import index_config
from mtserve_plugin.errors import CacheError, ConfigError
from mtserve_plugin.machine import describe_machine, resident_bytes
from mtserve_plugin.report import bytes_text

OnStep = Callable[[str, int, int], None]

BATCH = 8
HISTORY = 6_000
NEW_TOKENS = 12
_CANDIDATES = 100
# Users in rotation, so that a batch does not find everything in the processor's nearest cache.
_ACTIVE = 16 * BATCH
_BLOCK = 4_096
_STREAM_PAGES = 100_000
# Of the process: allocators may keep a little of what was freed.
_RSS_ALLOWANCE = 32 << 20


@dataclass(frozen=True)
class IndexBench:
    """What `bench_index` measured.

    Attributes:
        begin_commit_us: median time of begin and commit of a batch of `BATCH` users whose histories of `HISTORY`
            tokens have `NEW_TOKENS` new ones, through the public Python calls, with few users known.
        begin_commit_us_many: the same with `users` more users known.
        begin_commit_us_checked: the first with content checks on: a hash of every history token is read.
        bytes_per_user: of the index, apart from page and slot ids, with `users` known.
        growth_bytes: growth of the index's memory while it streams `ids` distinct ids through a fixed number of
            pages, after the first tenth of them.
        rss_growth_bytes: growth of the process over the same time.
        users, ids: how many.
        machine: see `describe_machine`.
    """

    begin_commit_us: float
    begin_commit_us_many: float
    begin_commit_us_checked: float
    bytes_per_user: float
    growth_bytes: int
    rss_growth_bytes: int
    users: int
    ids: int
    machine: dict[str, Any]

    @property
    def problems(self) -> list[str]:
        """What is not as it has to be, in words."""
        found = []
        if self.growth_bytes > 0:
            found.append(f"the index grew by {bytes_text(self.growth_bytes)} with ids that it had evicted")
        if self.rss_growth_bytes > _RSS_ALLOWANCE:
            found.append(f"the process grew by {bytes_text(self.rss_growth_bytes)} with ids that the index had evicted")
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            "begin_commit_us_batch8": self.begin_commit_us,
            "begin_commit_us_batch8_1m_users": self.begin_commit_us_many,
            "begin_commit_us_batch8_content_check": self.begin_commit_us_checked,
            "bytes_per_user": self.bytes_per_user,
            "growth_after_10m_ids": self.growth_bytes,
            "rss_growth_after_10m_ids": self.rss_growth_bytes,
            "users": self.users,
            "ids": self.ids,
            "batch": BATCH,
            "history": HISTORY,
            "new_tokens": NEW_TOKENS,
            "machine": self.machine,
            "ok": not self.problems,
        }

    def table(self) -> list[tuple[str, str, str]]:
        batch = f"median, {BATCH} users with {HISTORY} tokens, {NEW_TOKENS} of them new"
        return [
            ("begin + commit", f"{self.begin_commit_us:.1f} us", f"{batch}; {_ACTIVE} users known"),
            ("begin + commit", f"{self.begin_commit_us_many:.1f} us", f"the same; {self.users:,} more users known"),
            (
                "begin + commit",
                f"{self.begin_commit_us_checked:.1f} us",
                f"the first, with content checks over {BATCH * HISTORY:,} tokens",
            ),
            ("bytes per user", f"{self.bytes_per_user:.0f}", "of the index, apart from page and slot ids"),
            ("growth, index", f"{self.growth_bytes} B", f"from {self.ids // 10:,} to {self.ids:,} distinct ids"),
            ("growth, process", f"{self.rss_growth_bytes} B", "over the same ids"),
        ]


def bench_index(
    *, ids: int = 10_000_000, users: int = 1_000_000, visits: int = 400, on_step: OnStep | None = None
) -> IndexBench:
    """Measures the index by itself: keys and values are a few bytes per token.

    Args:
        ids: distinct user ids for the measurement of growth, at least 10.
        users: users that count as many.
        visits: batches whose median is taken.
        on_step: told what is being done.

    Raises:
        ConfigError: an argument is out of range.
    """
    for name, value, least in (("ids", ids, 10), ("users", users, 1), ("visits", visits, 1)):
        if value < least:
            raise ConfigError(f"--{name} {value} must be at least {least}")
    step = on_step or (lambda *_: None)
    step("begin and commit", 0, 5)
    few = _begin_commit_us(0, visits)
    step("with content checks", 1, 5)
    checked = _begin_commit_us(0, visits, content_check=True)
    step(f"with {users:,} users", 2, 5)
    many = _begin_commit_us(users, visits)
    step("bytes per user", 3, 5)
    per_user = _bytes_per_user(users)
    step(f"{ids:,} distinct ids", 4, 5)
    growth, rss_growth = _growth(ids)
    return IndexBench(few, many, checked, per_user, growth, rss_growth, users, ids, describe_machine())


def _begin_commit_us(others: int, visits: int, *, content_check: bool = False) -> float:
    """Median microseconds of begin plus commit, with `others` users known besides those that are served."""
    most = HISTORY + NEW_TOKENS * (2 + visits * BATCH // _ACTIVE)
    pages = _ACTIVE * -(-most // 32) + others
    config = CacheConfig(
        num_layers=1, num_heads=1, qk_dim=1, v_dim=1, attn_norm_len=1, dtype="bfloat16", num_pages=pages
    )
    lengths = torch.full((_ACTIVE,), HISTORY)
    with closing(HierarchicalKVCache(config)) as cache:
        for first in range(0, others, _BLOCK):
            known = torch.arange(_ACTIVE + first, _ACTIVE + min(first + _BLOCK, others))
            _store(cache, known, torch.ones_like(known))
        for first in range(0, _ACTIVE, BATCH):
            _store(cache, torch.arange(first, first + BATCH), lengths[first : first + BATCH], content_check)
        seconds = []
        enabled = gc.isenabled()
        gc.collect()
        gc.disable()
        try:
            for visit in range(visits):
                first = visit * BATCH % _ACTIVE
                lengths[first : first + BATCH] += NEW_TOKENS
                now = lengths[first : first + BATCH].clone()
                seconds.append(_visit(cache, torch.arange(first, first + BATCH), now, content_check))
        finally:
            if enabled:
                gc.enable()
    return statistics.median(seconds) * 1e6


def _hashes(lengths: torch.Tensor, content_check: bool) -> torch.Tensor | None:
    return torch.ones(int(lengths.sum()), dtype=torch.int64) if content_check else None


def _store(cache: HierarchicalKVCache, users: torch.Tensor, lengths: torch.Tensor, content_check: bool = False) -> None:
    hashes = _hashes(lengths, content_check)
    with cache.batch(users, lengths, num_candidates=0, token_hashes=hashes) as batch:
        new = torch.zeros(batch.num_rows, 1, 1, dtype=torch.bfloat16)
        batch.append(0, new, new)


def _visit(cache: HierarchicalKVCache, users: torch.Tensor, lengths: torch.Tensor, content_check: bool) -> float:
    """Seconds in begin and commit; what a model does in between is not counted."""
    hashes = _hashes(lengths, content_check)
    begin = time.perf_counter()
    batch = cache.begin(users, lengths, num_candidates=_CANDIDATES, token_hashes=hashes)
    begun = time.perf_counter()
    if int(batch.cached_lengths.sum()) != int(lengths.sum()) - BATCH * NEW_TOKENS:
        raise CacheError("the histories that were stored before were not found; this measures nothing")
    new = torch.zeros(batch.num_rows, 1, 1, dtype=torch.bfloat16)
    batch.wait(0)
    batch.append(0, new, new)
    computed = time.perf_counter()
    cache.commit(batch)
    return time.perf_counter() - computed + begun - begin


def _index(pages: int) -> Any:
    from mtserve_plugin import _core

    config = CacheConfig(num_layers=1, num_heads=1, qk_dim=1, v_dim=1, attn_norm_len=1, num_pages=pages)
    return _core.Index(index_config(config))


def _bytes_per_user(users: int) -> float:
    index = _index(users)
    _stream(index, 0, users, _BLOCK)
    return index.user_bytes() / users


def _growth(ids: int) -> tuple[int, int]:
    """Growth of the index and of the process from a tenth of the ids to all of them, in bytes."""
    pages = min(_STREAM_PAGES, max(1, ids // 100))
    block = min(_BLOCK, pages)
    index = _index(pages)
    _stream(index, 0, ids // 10, block)
    gc.collect()
    index_bytes, rss = index.user_bytes(), resident_bytes()
    _stream(index, ids // 10, ids, block)
    gc.collect()
    return index.user_bytes() - index_bytes, resident_bytes() - rss


def _stream(index: Any, first: int, end: int, block: int) -> None:
    """Users `first` to `end` come once each, `block` at a time, with one token."""
    ones = [1] * block
    for begin in range(first, end, block):
        users = list(range(begin, min(begin + block, end)))
        index.commit(index.begin(users, ones[: len(users)]))
