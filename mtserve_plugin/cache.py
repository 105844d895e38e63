"""KVCache, the hook interface a model sees, and its two implementations."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from mtserve_plugin import host_memory
from mtserve_plugin.arguments import Ids, check_values, host_int64, read_request
from mtserve_plugin.batch import CacheBatch
from mtserve_plugin.config import CacheConfig
from mtserve_plugin.engine import build_engine, cuda_library
from mtserve_plugin.errors import CacheError, ConfigError, InputError
from mtserve_plugin.steps import COMMIT, PREPARE, step

_LOG = logging.getLogger(__name__)


class KVCache(ABC):
    """What a model needs from a cache of keys and values.

    A model calls `batch(...)` once per forward and then the batch's own methods; operators call the rest. A cache is
    shared by reference: `deepcopy` of a model keeps the same cache, and pickling is refused.
    """

    def __init__(self, config: CacheConfig, device: torch.device | str = "cpu") -> None:
        self.config = config
        self.device = torch.device(device)

    def batch(
        self,
        user_ids: Ids,
        history_lengths: Ids,
        *,
        num_candidates: int | torch.Tensor,
        context_tokens: int = 0,
        token_hashes: torch.Tensor | None = None,
        context_keys: torch.Tensor | None = None,
        version: str = "",
    ) -> CacheBatch:
        """`begin` as a context manager: commits when the block ends well, aborts when it raises."""
        return self.begin(
            user_ids,
            history_lengths,
            num_candidates=num_candidates,
            context_tokens=context_tokens,
            token_hashes=token_hashes,
            context_keys=context_keys,
            version=version,
        )

    @abstractmethod
    def begin(
        self,
        user_ids: Ids,
        history_lengths: Ids,
        *,
        num_candidates: int | torch.Tensor,
        context_tokens: int = 0,
        token_hashes: torch.Tensor | None = None,
        context_keys: torch.Tensor | None = None,
        version: str = "",
    ) -> CacheBatch:
        """Looks up what is cached for a batch, reserves pages and starts the onloads (Algorithm 1, steps 1, 2).

        Never waits for a copy, and may offer less than is stored.

        Args:
            user_ids: `[B]` int64, any value; a user may occur more than once. On the host: a device tensor is accepted
                at the price of one synchronisation.
            history_lengths: `[B]` int64 like `user_ids`, tokens of each row's whole history, 0 included.
            num_candidates: candidates per row, one number or `[B]` int64.
            context_tokens: context rows in front of each history that the model adds itself.
            token_hashes: int64, one hash per history token, row after row; an edited history is then reused only up to
                the first page that differs. Without it a history is taken to have only grown.
            context_keys: `[B]` int64, a hash of each row's context values; a changed one is an edit at position 0.
            version: the model's version; keys and values of another version are never offered.

        Raises:
            InputError: shapes, dtypes or values are wrong; nothing was changed.
        """

    @abstractmethod
    def commit(self, batch: CacheBatch) -> None:
        """Publishes what the batch appended and starts the offloads; refused unless every layer was appended."""

    @abstractmethod
    def abort(self, batch: CacheBatch) -> None:
        """Gives back what the batch reserved and publishes nothing. Safe to call twice."""

    @abstractmethod
    def prefetch(self, user_ids: Ids, *, version: str = "") -> None:
        """Starts bringing these users' keys and values to the device, before their requests come."""

    @abstractmethod
    def evict(self, user_ids: Ids) -> None:
        """Forgets these users in both tiers and all versions; new requests miss at once, readers finish undisturbed."""

    @abstractmethod
    def clear(self) -> None:
        """Forgets every user."""

    @abstractmethod
    def flush(self) -> None:
        """Waits until all transfers in flight are done and everything that fits is persisted in the host tier."""

    @abstractmethod
    def drain(self) -> None:
        """Waits until all transfers in flight are done; starts none."""

    @abstractmethod
    def close(self) -> None:
        """Drains the transfers, joins the threads, frees the memory. Safe to call twice."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Counters (which only rise), gauges and hit ratios; see `docs/operating.md`."""

    def check_process(self) -> None:  # noqa: B027
        """Raises CacheError where this cache cannot be used: in a process forked from the one that built it."""

    def __enter__(self) -> KVCache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(f"a {type(self).__name__} cannot be pickled: it owns device memory; build one per process")


class NoCache(KVCache):
    """Recompute through the same code: every batch finds nothing and stores nothing."""

    def __init__(self, config: CacheConfig, device: torch.device | str = "cpu") -> None:
        super().__init__(config, device)
        self._table = torch.empty((config.num_layers, 0, config.page_elements), dtype=config.torch_dtype, device=device)
        self._requests = 0
        self._history_tokens = 0

    def begin(
        self,
        user_ids: Ids,
        history_lengths: Ids,
        *,
        num_candidates: int | torch.Tensor,
        context_tokens: int = 0,
        token_hashes: torch.Tensor | None = None,
        context_keys: torch.Tensor | None = None,
        version: str = "",
    ) -> CacheBatch:
        request = read_request(user_ids, history_lengths, num_candidates, context_tokens, token_hashes, context_keys)
        check_values(request)
        lengths, candidates, rows = request.lengths, request.candidates, request.rows
        layout = torch.zeros((6, rows + 1), dtype=torch.int64)
        layout[1, :rows] = context_tokens
        layout[2, :rows] = lengths
        layout[4, :rows] = candidates
        torch.cumsum(lengths + candidates + context_tokens, 0, out=layout[5, 1:])
        self._requests += rows
        self._history_tokens += int(lengths.sum())
        return CacheBatch(self, lengths, layout, self._table, torch.zeros(2 * rows + 1, dtype=torch.int32), None)

    def commit(self, batch: CacheBatch) -> None:
        if not batch.is_open:
            raise CacheError("this batch was committed or aborted before; begin a new one")
        batch._close()

    def abort(self, batch: CacheBatch) -> None:
        batch._close()

    def prefetch(self, user_ids: Ids, *, version: str = "") -> None:
        pass

    def evict(self, user_ids: Ids) -> None:
        pass

    def clear(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def drain(self) -> None:
        pass

    def close(self) -> None:
        pass

    def stats(self) -> dict[str, Any]:
        return {"requests": self._requests, "history_tokens": self._history_tokens, "hit_tokens": 0}


class Span(NamedTuple):
    """A piece of a stream's work, in seconds of `time.perf_counter` (Linux: of CLOCK_MONOTONIC).

    Attributes:
        stream: "onload", "scatter", "offload", or one of the threads that issue and complete their work.
        name: what was done, e.g. "onload copy".
    """

    stream: str
    name: str
    begin: float
    end: float


class HierarchicalKVCache(KVCache):
    """The two-tier cache: pages on the device, chunks in host memory (MTServe, section 4).

    With `host_bytes=0` it is the device-only baseline. One cache per device and process; any number of models and
    threads may share it. Memory is taken at construction: the page table from torch, the host tier from the system.

    Args:
        config: geometry, sizes and policies.
        device: where the model runs: "cpu", or "cuda:N" with a build that has the CUDA library.

    Raises:
        ConfigError: the device is not served by this build, or the memory cannot be had.
    """

    def __init__(self, config: CacheConfig, device: torch.device | str = "cpu") -> None:
        super().__init__(config, device)
        library, self.device = cuda_library(self.device)
        self._pid = os.getpid()
        try:
            self.table = torch.empty(config.table_shape, dtype=config.torch_dtype, device=self.device)
            self._engine = build_engine(config, self.table, library)
        except (MemoryError, RuntimeError) as error:
            self._release()
            raise ConfigError(
                f"the memory cannot be had ({error}): num_pages={config.num_pages} + "
                f"onload_pages={config.onload_pages} need {config.table_bytes} bytes on {self.device}, "
                f"host_bytes={config.host_bytes} on the host; use less"
            ) from None
        try:
            host_memory.make_resident(self._engine, config.host_bytes)
        except BaseException as error:
            self._release()
            if not isinstance(error, (MemoryError, RuntimeError)):
                raise
            raise ConfigError(
                f"host_bytes={config.host_bytes}: the host tier cannot be made resident"
                f"{' and pinned' if library else ''} ({error}); use less, or allow more"
                f"{' locked memory (ulimit -l; containers: --ulimit memlock=-1)' if library else ' memory'}"
            ) from None
        self._versions: dict[str, int] = {}
        self._next_version = 0
        self._open: weakref.WeakSet[CacheBatch] = weakref.WeakSet()
        self._warned_refused = False
        self._warns = bool(library)
        atexit.register(_close_at_exit, weakref.ref(self))

    @step.of(PREPARE)
    def begin(
        self,
        user_ids: Ids,
        history_lengths: Ids,
        *,
        num_candidates: int | torch.Tensor,
        context_tokens: int = 0,
        token_hashes: torch.Tensor | None = None,
        context_keys: torch.Tensor | None = None,
        version: str = "",
    ) -> CacheBatch:
        self.check_process()
        request = read_request(user_ids, history_lengths, num_candidates, context_tokens, token_hashes, context_keys)
        rows, lengths = request.rows, request.lengths
        layout = torch.empty((6, rows + 1), dtype=torch.int64)
        try:
            native = self._engine.begin(
                request.users.data_ptr(),
                lengths.data_ptr(),
                request.candidates.data_ptr(),
                rows,
                context_tokens,
                request.token_hashes.data_ptr() if request.token_hashes is not None else 0,
                request.context_keys.data_ptr() if request.context_keys is not None else 0,
                self._version_id(version),
                layout.data_ptr(),
                self.config.busy_wait_ms > 0,
                self._stream(),
            )
        except ValueError as error:
            raise InputError(str(error)) from None
        except RuntimeError as error:
            raise CacheError(str(error)) from None
        page_table = torch.empty(2 * rows + 1 + native.table_size(self.config.page_size, False), dtype=torch.int32)
        native.write_table(page_table.data_ptr(), self.config.page_size, False)
        batch = CacheBatch(self, lengths, layout, self.table, page_table, native)
        if native.is_uncached():
            self._warn_refused()
        if self._warns:
            self._warn_survived()
        self._open.add(batch)
        return batch

    @step.of(COMMIT)
    def commit(self, batch: CacheBatch) -> None:
        self._check_own(batch)
        if not batch.is_complete:
            self.abort(batch)
            raise CacheError(
                "commit refused, the batch was aborted: not every layer was appended; "
                "call attend or append once for each layer"
            )
        batch._close()
        self._engine.commit(batch._native)

    def abort(self, batch: CacheBatch) -> None:
        if batch.is_open:
            self._check_own(batch)
            batch._close()
            self._engine.abort(batch._native)

    def abort_all(self) -> int:
        """Aborts every open batch, e.g. those whose caller died; returns how many there were."""
        open_batches = [batch for batch in self._open if batch.is_open]
        for batch in open_batches:
            self.abort(batch)
        return len(open_batches)

    def prefetch(self, user_ids: Ids, *, version: str = "") -> None:
        self.check_process()
        users = host_int64("user_ids", user_ids).tolist()
        try:
            self._engine.prefetch(users, self._version_id(version))
        except RuntimeError as error:
            raise CacheError(str(error)) from None

    def evict(self, user_ids: Ids) -> None:
        self.check_process()
        self._engine.evict(host_int64("user_ids", user_ids).tolist())

    def clear(self) -> None:
        self.check_process()
        self._engine.clear()

    def retire_version(self, version: str) -> None:
        """Forgets what this version of the model computed: at once for new requests, its memory lazily.

        A batch that runs under it may finish, but publishes nothing.
        """
        self.check_process()
        number = self._versions.pop(version, None)
        if number is not None:
            self._engine.retire_version(number)

    def flush(self) -> None:
        self.check_process()
        self._engine.flush()

    def drain(self) -> None:
        self.check_process()
        self._engine.drain()

    def close(self) -> None:
        # After a fork the threads exist only in the parent: the child neither joins nor frees.
        if os.getpid() == self._pid:
            self._engine.close()

    def __del__(self) -> None:
        # The table must outlive the copies into it; the constructor may have failed before there was an engine.
        if hasattr(self, "_engine"):
            self.close()

    def stats(self) -> dict[str, Any]:
        self.check_process()
        stats: dict[str, Any] = self._engine.stats()
        stats["hit_tokens"] = stats["device_hit_tokens"] + stats["host_hit_tokens"]
        asked = max(stats["history_tokens"], 1)
        stats["device_hit_ratio"] = stats["device_hit_tokens"] / asked
        stats["total_hit_ratio"] = stats["hit_tokens"] / asked
        stats["host_bytes"] = self._engine.host_capacity()
        stats["table_bytes"] = self.table.numel() * self.table.element_size()
        return stats

    @contextmanager
    def timeline(self, limit: int = 100_000) -> Iterator[list[Span]]:
        """What the cache's streams did while the block ran, in the list that it yields, filled when the block ends.

        Args:
            limit: spans that are kept, the first ones. One is recorded per copy or scatter of a layer's slice.
        """
        self.check_process()
        spans: list[Span] = []
        self._engine.start_timeline(limit)
        try:
            yield spans
        finally:
            for stream, name, begin, end in self._engine.take_timeline():
                spans.append(Span(stream, name, begin * 1e-9, end * 1e-9))

    def _release(self) -> None:
        """Gives back what a constructor that fails has taken: its exception would keep this object alive."""
        if hasattr(self, "_engine"):
            self._engine.close()
            del self._engine
        if hasattr(self, "table"):
            del self.table

    def _stream(self) -> int:
        """The caller's stream, on which a batch computes; 0 on the CPU."""
        return 0 if self.device.type == "cpu" else torch.cuda.current_stream(self.device).cuda_stream

    def lengths(self, user_id: int, *, version: str = "") -> dict[str, int] | None:
        """What is stored for a user, in tokens: `committed`, `device`, `persisted`; `None` for an unknown user."""
        self.check_process()
        committed, device, host = self._engine.lengths(user_id, self._version_id(version))
        return None if committed < 0 else {"committed": committed, "device": device, "persisted": host}

    def check(self) -> None:
        """Walks the whole index and raises CacheError when an invariant does not hold. For tests."""
        self.check_process()
        problem = self._engine.check()
        if problem:
            raise CacheError(f"index invariant broken: {problem}")

    def _version_id(self, version: str) -> int:
        number = self._versions.get(version)
        if number is None:
            self._next_version += 1
            number = self._versions.setdefault(version, self._next_version)
        return number

    def check_process(self) -> None:
        if os.getpid() != self._pid:
            raise CacheError(
                f"this cache was built in process {self._pid} and does not survive a fork; "
                "build one in each process, after forking"
            )

    def _check_own(self, batch: CacheBatch) -> None:
        self.check_process()
        if not batch.is_open:
            raise CacheError("this batch was committed or aborted before; begin a new one")
        if batch._cache is not self:
            raise CacheError("this batch belongs to another cache")

    def _warn_survived(self) -> None:
        warning = self._engine.take_warning()
        if warning:
            self._warns = False
            _LOG.warning(
                "a call of CUDA was refused: %s. What it was to copy counts as not cached, requests are scored without "
                "it; stats() counts further ones as onload_failures and offload_failures.",
                warning,
            )

    def _warn_refused(self) -> None:
        if not self._warned_refused:
            self._warned_refused = True
            _LOG.warning(
                "max_open_batches=%d batches are open; further ones run uncached. "
                "Commit or abort each batch, or call abort_all() for those whose caller died.",
                self.config.max_open_batches,
            )


def _close_at_exit(cache: weakref.ref[HierarchicalKVCache]) -> None:
    alive = cache()
    if alive is not None:
        alive.close()
