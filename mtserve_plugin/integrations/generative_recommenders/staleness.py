"""Bounds on how stale an accepted approximation may become: whoever reaches one is encoded afresh.

An encoder that counts from the end of the history and from the request leaves keys and values (K/V) in the cache that
are right for the length and the time at which they were computed. How far a user has moved away from there is known
from two numbers per user, which a table of fixed size holds. A user who is not in it is of unknown age and is encoded
afresh too: forgetting costs one recompute, never a bound.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mtserve_plugin.batch import CacheBatch
from mtserve_plugin.cache import KVCache, NoCache
from mtserve_plugin.config import CacheConfig
from mtserve_plugin.errors import AttachError
from mtserve_plugin.integrations.generative_recommenders.features import Request

Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]

_WAYS = 8
_RECORD = np.dtype([(name, np.int64) for name in ("user", "version", "length", "time", "used")])
# Of Fibonacci hashing: 2**64 divided by the golden ratio, made odd.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Bounds:
    """How far a user may move away from where its K/V were computed; `None` is without bound.

    Attributes:
        tokens: by how many tokens the history may have grown or been cut.
        seconds: how much earlier or later a request may be.
    """

    tokens: int | None = None
    seconds: float | None = None

    def __bool__(self) -> bool:
        return self.tokens is not None or self.seconds is not None


def check_bounds(
    refresh_after_tokens: object, refresh_after_seconds: object, approximate: Collection[str], *, whole: bool
) -> Bounds:
    """Args:
        whole: a whole model is attached, which begins its batches itself.

    Raises:
        AttachError: a bound is no positive number, nothing approximate was accepted that it could bound, or batches
            are begun by the caller.
    """
    given = {"refresh_after_tokens": refresh_after_tokens, "refresh_after_seconds": refresh_after_seconds}
    for name, value in given.items():
        if value is None:
            continue
        kind = int if name == "refresh_after_tokens" else (int, float)
        if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < math.inf:
            what = "a number of tokens" if kind is int else "a number of seconds"
            raise AttachError(f"{name}={value!r} must be {what} above 0, or None for no bound", (name,))
        if not approximate:
            raise AttachError(
                f"{name}={value!r} bounds the error of an approximation, and none was accepted: cached keys and "
                'values are those of a recompute. Leave it out, or accept one with approximate={"positions"}',
                (name,),
            )
        if not whole:
            raise AttachError(
                f"{name}={value!r}: batches around a part of a model are begun by its caller, who knows users and "
                "times and evicts with cache.evict(user_ids). Attach the DlrmHSTU, or leave it out",
                (name,),
            )
    return Bounds(**{name.removeprefix("refresh_after_"): value for name, value in given.items()})  # type: ignore[arg-type]


class Ledger:
    """Per user and version: the length and the time at which everything cached was encoded, or earlier ones.

    A table of eight places per set; a new user takes the place of its set's longest unseen one. Not locked.

    Args:
        capacity: records to hold at least, as long as they spread evenly; twice as many fit.
    """

    def __init__(self, capacity: int) -> None:
        self._bits = max(math.ceil(math.log2(2 * max(capacity, 1) / _WAYS)), 1)
        self._table = np.zeros((1 << self._bits, _WAYS), _RECORD)
        self._clock = 0
        self._versions: dict[str, int] = {}

    @property
    def capacity(self) -> int:
        return self._table.size

    @property
    def records(self) -> int:
        """Places that are taken."""
        return int(np.count_nonzero(self._table["version"]))

    def find(self, users: Ints, version: str) -> tuple[Bools, Ints, Ints]:
        """`[n]` each: whether there is a record, its length, its time. Found users count as seen now."""
        number = self._number(version)
        sets, ways, known = self._places(users, number)
        self._clock += 1
        self._table["used"][sets[known], ways[known]] = self._clock
        found = self._table[sets, ways]
        return known, found["length"], found["time"]

    def put(self, users: Ints, lengths: Ints, times: Ints, version: str) -> None:
        """Records users, each at most once; of more than eight new ones in a set some find no place."""
        number = self._number(version)
        sets, ways, known = self._places(users, number)
        self._clock += 1
        self._table["used"][sets[known], ways[known]] = self._clock
        # New users of one set take different places: the first its longest unseen one, the next the second.
        new = np.flatnonzero(~known)
        new = new[np.argsort(sets[new], kind="stable")]
        rank = (np.arange(new.size) - np.searchsorted(sets[new], sets[new])) % _WAYS
        ways[new] = np.argsort(self._table["used"][sets[new]], axis=1, kind="stable")[np.arange(new.size), rank]
        record = np.empty(users.size, _RECORD)
        record["user"], record["version"], record["used"] = users, number, self._clock
        record["length"], record["time"] = lengths, times
        self._table[sets, ways] = record

    def _number(self, version: str) -> int:
        return self._versions.setdefault(version, len(self._versions) + 1)

    def _places(self, users: Ints, number: int) -> tuple[Ints, Ints, Bools]:
        mixed = (users.view(np.uint64) ^ (np.uint64(number) << np.uint64(32))) * _SPREAD
        mixed = (mixed ^ (mixed >> np.uint64(32))) * _SPREAD
        sets = (mixed >> np.uint64(64 - self._bits)).astype(np.int64)
        there = self._table[sets]
        here = (there["user"] == users[:, None]) & (there["version"] == number)
        return sets, here.argmax(axis=1), here.any(axis=1)


_ledgers: weakref.WeakKeyDictionary[KVCache, tuple[threading.Lock, Ledger]] = weakref.WeakKeyDictionary()


class Refresher:
    """Begins batches so that nobody in them is beyond a bound; shared by all copies of a model.

    The ledger belongs to the cache: models that share a cache share it, and it outlives `detach`. Its size follows
    from what the cache can hold, since a user takes one page or one slot at least.

    Args:
        bounds: at least one.
    """

    def __init__(self, cache: KVCache, bounds: Bounds) -> None:
        self._cache = cache
        self._bounds = bounds
        if cache not in _ledgers:
            _ledgers.setdefault(cache, (threading.Lock(), Ledger(_most_entries(cache.config))))
        self._lock, self._ledger = _ledgers[cache]
        self._by_tokens = self._by_seconds = self._of_unknown_age = 0

    @property
    def needs_times(self) -> bool:
        return self._bounds.seconds is not None

    def begin(self, request: Request, version: str, begin: Callable[[], CacheBatch]) -> CacheBatch:
        """Calls `begin` after evicting who reached a bound, and records whom this batch encodes as a whole.

        One step under one lock: between the look at a user's age and `begin`, no other batch under bounds may put
        keys and values of another age in the place of those that were looked at. `begin` takes microseconds, unless
        `busy_wait_ms` lets it wait for pages; commits and aborts, which free them, do not need the lock.
        """
        with self._lock:
            self._evict_stale(request, version)
            batch = begin()
            self._record_new(request, version, batch)
        return batch

    def _evict_stale(self, request: Request, version: str) -> None:
        users, lengths, times = _columns(request)
        known, old_lengths, old_times = self._ledger.find(users, version)
        grown = known & _reached(lengths, old_lengths, self._bounds.tokens)
        aged = known & _reached(times, old_times, self._bounds.seconds)
        stale = ~known | grown | aged
        if not stale.any():
            return
        evicted = np.unique(users[stale])
        self._cache.evict(torch.from_numpy(evicted))
        by_tokens = np.unique(users[grown]).size
        unknown = np.unique(users[~known]).size
        self._by_tokens += by_tokens
        self._by_seconds += evicted.size - by_tokens - unknown
        self._of_unknown_age += unknown

    def _record_new(self, request: Request, version: str, batch: CacheBatch) -> None:
        """Of whom nothing was found, evicted or forgotten by the cache, everything that is stored is new."""
        if not batch._stores:
            return
        first = batch.offsets[:-1]
        new = (batch.cached_lengths == 0) & (first < batch.offsets[1:])
        # Of a user's rows one stores, unless another batch is writing the user: then that one's begin recorded it.
        new[new.clone()] = batch._slots[first[new]] >= 0
        if bool(new.any()):
            users, lengths, times = (column[new.numpy()] for column in _columns(request))
            self._ledger.put(users, lengths, times, version)

    def stats(self) -> dict[str, int]:
        """See `mtserve_plugin.integrations.stats`."""
        with self._lock:
            counts = self._by_tokens, self._by_seconds, self._of_unknown_age, self._ledger.records
        return dict(zip(no_stats(), counts, strict=True))


def make_refresher(cache: KVCache, bounds: Bounds) -> Refresher | None:
    """`None` where nothing can become stale: without bounds, or without a cache."""
    return Refresher(cache, bounds) if bounds and not isinstance(cache, NoCache) else None


def no_stats() -> dict[str, int]:
    """`Refresher.stats` where nothing is refreshed."""
    return dict.fromkeys(("refreshed_by_tokens", "refreshed_by_seconds", "of_unknown_age", "tracked"), 0)


def _most_entries(config: CacheConfig) -> int:
    return config.num_pages + config.num_chunks * (config.chunk_size // config.slot_tokens)


def _columns(request: Request) -> tuple[Ints, Ints, Ints]:
    users, lengths = request.users.numpy(), request.history_lengths.numpy()
    return users, lengths, np.zeros_like(users) if request.times is None else request.times.numpy()


def _reached(now: Ints, before: Ints, bound: float | None) -> Bools:
    return np.zeros(now.shape, np.bool_) if bound is None else np.abs(now - before) >= bound
