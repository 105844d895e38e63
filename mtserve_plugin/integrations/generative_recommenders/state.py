"""What an attached model keeps between batches, and how a batch is begun and ended for it."""

from __future__ import annotations

import copy
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mtserve_plugin.batch import CacheBatch, entered_batch
from mtserve_plugin.cache import KVCache, NoCache
from mtserve_plugin.errors import CacheError, OnloadError
from mtserve_plugin.integrations.generative_recommenders.features import FeatureSpec, Request
from mtserve_plugin.integrations.generative_recommenders.run import Run, entered
from mtserve_plugin.integrations.generative_recommenders.staleness import Refresher
from mtserve_plugin.integrations.generative_recommenders.weights import Fingerprint, WeightWatch

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

_LOG = logging.getLogger(__name__)

# The payload by which a batch finds its way from `preprocess` to `main_forward`: `[1]` int64.
HANDLE = "mtserve_batch"


@dataclass(frozen=True)
class Options:
    """What `attach` was told; shared by all copies of a model.

    Attributes:
        features: `None` for parts that run under an enclosing batch.
        context_rows: that the model puts in front of every history.
        split: `preprocess` and `main_forward` are called separately.
        refresher: `None` where nothing cached becomes stale, or nobody bounds it.
    """

    cache: KVCache
    features: FeatureSpec | None
    context_rows: int
    content_check: bool
    split: bool
    refresher: Refresher | None = None


@dataclass
class _Begun:
    """A batch between the halves of a split model."""

    run: Run
    features: KeyedJaggedTensor
    candidates: KeyedJaggedTensor
    look_up: Callable[[KeyedJaggedTensor], tuple[Any, ...]]


class State:
    """Held by the root of an attached model, and by the other half of a split one.

    Args:
        root: the module that was attached.
        sparse: the other half, where it is another model.
    """

    def __init__(
        self, options: Options, weights: WeightWatch, root: nn.Module, sparse: nn.Module | None = None
    ) -> None:
        self.options = options
        self.weights = weights
        self.root = root
        self.sparse = sparse
        self._lock = threading.Lock()
        self._in_flight = 0
        self._begun: OrderedDict[int, _Begun] = OrderedDict()
        self._next_handle = 0
        self._uncached = NoCache(options.cache.config, options.cache.device)

    @property
    def split(self) -> bool:
        return self.options.split

    @property
    def holders(self) -> list[nn.Module]:
        """The modules that hold this state."""
        return [self.root] if self.sparse is None else [self.root, self.sparse]

    @property
    def in_flight(self) -> int:
        """Batches that are on their way."""
        with self._lock:
            return self._in_flight + len(self._begun)

    # ---- a whole model -------------------------------------------------------------------------------------

    def serve(
        self,
        features: KeyedJaggedTensor,
        candidates: KeyedJaggedTensor,
        forward: Callable[[KeyedJaggedTensor], tuple[Any, ...]],
    ) -> tuple[Any, ...]:
        """Runs `forward` on the stripped features, and again on the whole ones when cached keys do not
        arrive.
        """
        request = self._read(features, candidates)
        with torch.no_grad(), self._counted():
            try:
                with self._begin(request, self.options.cache) as run:
                    return forward(self._strip(run, features))
            except OnloadError as error:
                self._log_retry(error)
            with self._begin(request, self._uncached) as run:
                return forward(self._strip(run, features))

    # ---- a split model -------------------------------------------------------------------------------------

    def begin_split(
        self,
        features: KeyedJaggedTensor,
        candidates: KeyedJaggedTensor,
        look_up: Callable[[KeyedJaggedTensor], tuple[Any, ...]],
    ) -> tuple[Any, ...]:
        """The sparse half: begins, strips, looks up, and parks the batch under a handle in the payload."""
        request = self._read(features, candidates)
        run = self._open(request, self.options.cache)
        try:
            values = look_up(self._strip(run, features))
        except BaseException:
            self.options.cache.abort(run.batch)
            raise
        values[1][HANDLE] = torch.tensor([self._park(_Begun(run, features, candidates, look_up))])
        return values

    def finish_split(self, values: tuple[Any, ...], dense: Callable[..., tuple[Any, ...]]) -> tuple[Any, ...]:
        """The dense half: `values` as `preprocess` gave them, moved or cast by the caller as it likes."""
        payload = dict(values[1])
        handle = payload.pop(HANDLE, None)
        begun = None if handle is None else self._unpark(int(handle))
        if begun is None:
            raise CacheError(
                f"payload_features[{HANDLE!r}] names no open batch: the features have to come from the "
                "preprocess of the "
                "model that was attached as sparse=, once, and no more than max_open_batches may wait"
            )
        with torch.no_grad(), self._counted():
            try:
                with begun.run.batch, entered(begun.run):
                    return dense(values[0], payload, *values[2:])
            except OnloadError as error:
                self._log_retry(error)
            request = self._read(begun.features, begun.candidates)
            with self._begin(request, self._uncached) as run:
                again = begun.look_up(self._strip(run, begun.features))
                return dense(*_like(again, values))

    # ---- a part under an enclosing batch -------------------------------------------------------------------

    @contextmanager
    def enclosing_run(self, boundary: torch.Tensor | None) -> Iterator[Run]:
        """A run on the batch that the caller entered.

        Raises:
            CacheError: there is none, it belongs to another cache, or weights were changed since attach.
        """
        batch = entered_batch()
        if batch is None:
            raise CacheError(
                "this part of a model was attached alone and needs a batch around its call: "
                "with cache.batch(user_ids, history_lengths, num_candidates=...) as batch: ..."
            )
        if batch._cache is not self.options.cache and not isinstance(batch._cache, NoCache):
            raise CacheError("the enclosing batch belongs to another cache than the one that was attached")
        seen = self.weights.fingerprint()
        if not self.weights.is_current(seen):
            raise CacheError(
                "weights were changed in place since attach, and the enclosing batch was begun under a "
                "version that "
                "names the old ones; detach, attach again, and begin batches with another version"
            )
        with self._counted():
            yield Run(batch, boundary, finish=lambda: self._drop_if_changed(batch, seen))

    # ---- inside --------------------------------------------------------------------------------------------

    def _read(self, features: KeyedJaggedTensor, candidates: KeyedJaggedTensor) -> Request:
        assert self.options.features is not None
        hashed = self.options.content_check and not isinstance(self.options.cache, NoCache)
        refresher = self.options.refresher
        timed = refresher is not None and refresher.needs_times
        return self.options.features.read(features, candidates, content_check=hashed, with_times=timed)

    def _open(self, request: Request, cache: KVCache) -> Run:
        version, seen = self.weights.version()

        def begin() -> CacheBatch:
            return cache.begin(
                request.users,
                request.history_lengths,
                num_candidates=request.candidates,
                context_tokens=self.options.context_rows,
                token_hashes=request.token_hashes,
                context_keys=request.context_keys,
                version=version,
            )

        refresher = self.options.refresher if cache is self.options.cache else None
        batch = begin() if refresher is None else refresher.begin(request, version, begin)

        def finish() -> None:
            if not self._drop_if_changed(batch, seen):
                # The head needs nothing of the cache: pins end here.
                cache.commit(batch)

        return Run(batch, finish=finish)

    @contextmanager
    def _begin(self, request: Request, cache: KVCache) -> Iterator[Run]:
        run = self._open(request, cache)
        with run.batch, entered(run):
            yield run

    def _strip(self, run: Run, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        spec = self.options.features
        assert spec is not None
        stripped, boundary = run.batch.strip(features, spec.history)
        run.boundary = boundary[spec.time]
        return stripped

    def _drop_if_changed(self, batch: CacheBatch, seen: Fingerprint) -> bool:
        """Publishes nothing of a batch across which weights were changed: its layers do not fit together."""
        if self.weights.fingerprint() == seen:
            return False
        _LOG.warning("weights were changed while a batch ran; what it computed is not cached")
        batch._cache.abort(batch)
        return True

    def _park(self, begun: _Begun) -> int:
        with self._lock:
            self._next_handle += 1
            handle = self._next_handle
            self._begun[handle] = begun
            too_many = len(self._begun) > self.options.cache.config.max_open_batches
            oldest = self._begun.popitem(last=False)[1] if too_many else None
        if oldest is not None:
            _LOG.warning("a batch went through preprocess and never came to main_forward; it is aborted")
            self.options.cache.abort(oldest.run.batch)
        return handle

    def _unpark(self, handle: int) -> _Begun | None:
        with self._lock:
            return self._begun.pop(handle, None)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._lock:
            self._in_flight += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_flight -= 1

    def _log_retry(self, error: OnloadError) -> None:
        _LOG.warning("%s; the batch runs again without the cache", error)

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        if self.sparse is not None:
            raise CacheError("half of a split model cannot be copied: detach it first")
        weights, root = copy.deepcopy(self.weights, memo), copy.deepcopy(self.root, memo)
        twin = memo[id(self)] = State(self.options, weights, root)
        return twin

    def __reduce__(self) -> Any:
        raise TypeError("an attached model cannot be pickled: detach it first, or save its state_dict")


def _like(values: tuple[Any, ...], example: tuple[Any, ...]) -> tuple[Any, ...]:
    """Outputs of `preprocess` where, and in which dtypes, the caller had brought the first ones."""

    def move(value: Any, like: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(device=like.device, dtype=like.dtype)
        if isinstance(value, dict):
            return {key: move(one, like[key]) for key, one in value.items()}
        if isinstance(value, tuple):
            parts = [move(one, other) for one, other in zip(value, like, strict=True)]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return value

    return tuple(move(value, like) for value, like in zip(values, example, strict=True))
