"""How the audit sees the models of this package and of `generative_recommenders`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mtserve_plugin import jagged
from mtserve_plugin.batch import CacheBatch
from mtserve_plugin.cache import HierarchicalKVCache, KVCache, NoCache
from mtserve_plugin.errors import CacheError, InputError
from mtserve_plugin.stability.histories import Histories
from mtserve_plugin.stability.measure import Encoding, KVAdapter, Reuse

_HOST = "generative_recommenders"


def adapter_for(model: nn.Module, sample: Any) -> tuple[KVAdapter, Histories]:
    """The adapter that knows this model, and its sample in columns.

    Raises:
        InputError: the model is not known, or the sample is not what its forward takes.
    """
    arguments = sample if isinstance(sample, tuple) else (sample,)
    if hasattr(model, "_hstu_configs") and hasattr(model, "main_forward"):
        return _for_dlrm(model, *_checked(model, arguments, 2))
    if isinstance(getattr(model, "cache", None), KVCache):
        features = _checked(model, arguments, 1)[0]
        return CachedModelAdapter(model, _swap_attribute, _ranker_arguments), _ranker_histories(features)
    raise InputError(
        f"{type(model).__name__} is no model that the audit knows; write an adapter: an object with "
        "encode(histories) -> Encoding, see mtserve_plugin.stability.KVAdapter"
    )


class CachedModelAdapter:
    """For models that go through `CacheBatch`: their keys and values are taken there, and reuse is a real cache's.

    Args:
        model: its forward returns scores.
        swap: `swap(model, cache)` is a context in which the model uses that cache.
        arguments: the forward's arguments for some histories.
        scores: the scores `[sum of candidates]` in what the forward returns.
        identity: see `Encoding.identity`.
    """

    def __init__(
        self,
        model: nn.Module,
        swap: Callable[[nn.Module, KVCache], Any],
        arguments: Callable[[Histories], tuple[Any, ...]],
        scores: Callable[[Any], torch.Tensor] = lambda output: output,
        identity: Callable[[Histories], torch.Tensor] | None = None,
    ) -> None:
        self._model = model
        self._swap = swap
        self._arguments = arguments
        self._scores = scores
        self._identity = identity

    def encode(self, histories: Histories) -> Encoding:
        now = self._cache_now()
        tap = _TapCache(now.config, now.device)
        scores = self._run(tap, histories)
        layout = tap.last.layout
        lengths = layout.context + layout.delta
        kept = jagged.offsets(lengths)[:-1]
        rows = torch.arange(int(lengths.sum())) + jagged.spread(layout.offsets[:-1] - kept, lengths)
        layers = [tuple(x[rows.to(x.device)] for x in tap.last.seen[layer]) for layer in sorted(tap.last.seen)]
        identity = None if self._identity is None else self._identity(histories)
        return Encoding([(k, v) for k, v in layers], lengths, scores, identity)

    def reuse(self, before: Histories, after: Histories) -> Reuse:
        """Two visits through a cache of its own, with room for all of the second one."""
        now = self._cache_now()
        longest = int(after.lengths.max()) + 64
        pages = after.users.numel() * -(-longest // now.config.page_size)
        try:
            with HierarchicalKVCache(
                now.config.replace(num_pages=pages, host_bytes=0, onload_pages=0), now.device
            ) as own:
                self._run(own, before)
                hits = own.stats()["hit_tokens"]
                scores = self._run(own, after)
                return Reuse(scores, own.stats()["hit_tokens"] - hits)
        except CacheError as error:
            return Reuse(None, refused=str(error))

    def _cache_now(self) -> KVCache:
        return _cache_of(self._model)

    def _run(self, cache: KVCache, histories: Histories) -> torch.Tensor:
        with self._swap(self._model, cache), torch.no_grad():
            return self._scores(self._model(*self._arguments(histories)))


class HostAdapter:
    """For a `DlrmHSTU` as it is, without a cache: its projection operator is watched while it runs.

    Reuse is emulated: in each layer the prefix's rows of k and v are those of the earlier run.

    Args:
        model: with a kernel other than Triton's fused one, which does not give its keys and values out.
        context_rows: that its preprocessor puts in front of every history.
        arguments: the forward's arguments for some histories.
        identity: see `Encoding.identity`.
    """

    def __init__(
        self,
        model: nn.Module,
        context_rows: int,
        arguments: Callable[[Histories], tuple[Any, ...]],
        identity: Callable[[Histories], torch.Tensor],
    ) -> None:
        self._model = model
        self._context_rows = context_rows
        self.arguments = arguments
        self.identity = identity

    def encode(self, histories: Histories) -> Encoding:
        return self._encode(histories, None)

    def reuse(self, before: Histories, after: Histories) -> Reuse:
        old = self._encode(before, None)
        assert old.identity is not None
        same = old.identity == self.identity(after)
        scores = self._encode(after, dataclasses.replace(old, lengths=torch.where(same, old.lengths, 0)), old.lengths)
        return Reuse(scores.scores, int((before.lengths * same).sum()))

    def _encode(self, histories: Histories, old: Encoding | None, held: torch.Tensor | None = None) -> Encoding:
        lengths = histories.lengths + self._context_rows
        starts = jagged.offsets(lengths + histories.num_candidates)
        layers: list[tuple[torch.Tensor, torch.Tensor]] = []

        def tap(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if k.shape[0] != int(starts[-1]):
                raise InputError(
                    f"layer {len(layers)} runs on {k.shape[0]} rows where context, history and candidates are "
                    f"{int(starts[-1])}; write an adapter for this model"
                )
            if old is not None:
                assert held is not None
                place = _first_rows(starts, old.lengths).to(k.device)
                source = _first_rows(jagged.offsets(held), old.lengths).to(k.device)
                old_k, old_v = old.layers[len(layers)]
                k, v = k.index_copy(0, place, old_k[source]), v.index_copy(0, place, old_v[source])
            kept = _first_rows(starts, lengths).to(k.device)
            layers.append((k[kept], v[kept]))
            return k, v

        with watched(tap), torch.no_grad():
            output = self._model(*self.arguments(histories))
        if not layers:
            raise InputError(
                "the model ran without hstu_compute_uqvk: fused kernels do not give keys and values out; "
                "call model.set_hammer_kernel(HammerKernel.PYTORCH) before the audit"
            )
        return Encoding(layers, lengths, _dlrm_scores(output), self.identity(histories))


# ---- a batch that remembers ------------------------------------------------------------------------------------


class _TapBatch(CacheBatch):
    """Remembers the keys and values of every layer."""

    seen: dict[int, tuple[torch.Tensor, torch.Tensor]]

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        super().append(layer, k, v)
        self._remember(layer, k, v)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = super().attend(layer, q, k, v)
        self._remember(layer, k, v)
        return out

    def _remember(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self.seen[layer] = (
            self._heads("k", k, self._config.qk_dim).clone(),
            self._heads("v", v, self._config.v_dim).clone(),
        )


class _TapCache(NoCache):
    """`NoCache` whose last batch remembers."""

    last: _TapBatch

    def begin(self, *args: Any, **options: Any) -> CacheBatch:
        plain = super().begin(*args, **options)
        self.last = _TapBatch(self, plain.history_lengths, plain._layout, plain.table, plain._page_table, None)
        self.last.seen = {}
        return self.last


# ---- models of this package ------------------------------------------------------------------------------------


def _ranker_histories(features: Any) -> Histories:
    from mtserve_plugin.models.features import HISTORY_KEYS, read_request

    request = read_request(features)
    return Histories(
        users=request.users,
        lengths=request.history_lengths,
        tokens={key: features[key].values().cpu() for key in HISTORY_KEYS},
        candidates={"candidate": features["candidate"].values().cpu()},
        num_candidates=request.candidates,
        now=features["now"].values().cpu(),
        time="time",
    )


def ranker_features(histories: Histories) -> Any:
    """What `HSTURanker` and `SASRec` take."""
    from mtserve_plugin.models.features import build_features

    return build_features(
        user=histories.users,
        history_lengths=histories.lengths,
        **histories.tokens,
        **histories.candidates,
        num_candidates=histories.num_candidates,
        now=histories.now,
    )


def _ranker_arguments(histories: Histories) -> tuple[Any, ...]:
    return (ranker_features(histories),)


@contextmanager
def _swap_attribute(model: Any, cache: KVCache) -> Iterator[None]:
    before = model.cache
    model.cache = cache
    try:
        yield
    finally:
        model.cache = before


# ---- generative_recommenders -----------------------------------------------------------------------------------


def _for_dlrm(model: Any, uih: Any, candidates: Any) -> tuple[KVAdapter, Histories]:
    config = model._hstu_configs
    history = [name for name, _ in config.merge_uih_candidate_feature_mapping]
    query = config.candidates_querytime_feature_name
    names, chosen = list(uih.keys()), list(candidates.keys())
    lengths = uih[config.uih_post_id_feature_name].lengths().to("cpu", torch.int64)
    counts = candidates.lengths().to("cpu", torch.int64).view(len(chosen), -1)[0]
    # A row's query time is that of its first candidate; rows without candidates have none.
    first = jagged.offsets(counts)[:-1].clamp(max=max(int(counts.sum()) - 1, 0))
    histories = Histories(
        users=torch.arange(lengths.numel()),
        lengths=lengths,
        tokens={name: uih[name].values().cpu() for name in history},
        candidates={name: candidates[name].values().cpu() for name in chosen if name != query},
        num_candidates=counts,
        now=candidates[query].values().cpu()[first],
        time=config.uih_action_time_feature_name,
        context={
            name: (uih[name].values().cpu(), uih[name].lengths().to("cpu", torch.int64))
            for name in names
            if name not in history
        },
    )

    def arguments(some: Histories) -> tuple[Any, ...]:
        return _dlrm_arguments(some, query, names, chosen)

    def identity(some: Histories) -> torch.Tensor:
        return _context_met(config.contextual_feature_to_min_uih_length, some)

    if _state_of(model) is not None:
        return CachedModelAdapter(model, _swap_attached, arguments, _dlrm_scores, identity), histories
    rows = sum(getattr(module, "_max_contextual_seq_len", 0) for module in model.modules())
    return HostAdapter(model, rows, arguments, identity), histories


def _dlrm_arguments(histories: Histories, query: str, uih: list[str], candidates: list[str]) -> tuple[Any, ...]:
    columns = {name: (values, histories.lengths) for name, values in histories.tokens.items()} | dict(histories.context)
    chosen = {name: (values, histories.num_candidates) for name, values in histories.candidates.items()}
    chosen[query] = (jagged.spread(histories.now, histories.num_candidates), histories.num_candidates)
    return _to_kjt(columns, uih), _to_kjt(chosen, candidates)


def _to_kjt(columns: Mapping[str, tuple[torch.Tensor, torch.Tensor]], order: list[str]) -> Any:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    return KeyedJaggedTensor(
        keys=order,
        values=torch.cat([columns[name][0] for name in order]),
        lengths=torch.cat([columns[name][1] for name in order]),
        stride=columns[order[0]][1].numel(),
    )


def _dlrm_scores(output: tuple[Any, ...]) -> torch.Tensor:
    """The first task's predictions."""
    return output[3][0]


def _context_met(least: Mapping[str, int], histories: Histories) -> torch.Tensor:
    """Which context features count, as bits: they do from a minimum of history and candidates on."""
    identity = torch.zeros_like(histories.lengths)
    for bit, minimum in enumerate(least.values()):
        identity += (histories.lengths + histories.num_candidates >= minimum).to(torch.int64) << bit
    return identity


def _state_of(model: nn.Module) -> Any:
    from mtserve_plugin.integrations.generative_recommenders.classes import STATE

    return vars(model).get(STATE)


def _cache_of(model: Any) -> KVCache:
    state = _state_of(model)
    return model.cache if state is None else state.options.cache


@contextmanager
def _swap_attached(model: nn.Module, cache: KVCache) -> Iterator[None]:
    state = _state_of(model)
    before = state.options
    state.options = dataclasses.replace(before, cache=cache)
    try:
        yield
    finally:
        state.options = before


@contextmanager
def watched(tap: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Puts `tap` behind the host's projection operator, where the host's own attention looks it up."""
    operators: Any = sys.modules[f"{_HOST}.ops.hstu_compute"]
    original = operators.hstu_compute_uqvk

    def watched(*args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        u, q, k, v = original(*args, **options)
        k, v = tap(k, v)
        return u, q, k, v

    operators.hstu_compute_uqvk = watched
    try:
        yield
    finally:
        operators.hstu_compute_uqvk = original


def _checked(model: nn.Module, arguments: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    if len(arguments) != count:
        raise InputError(f"sample has {len(arguments)} parts; the forward of {type(model).__name__} takes {count}")
    return arguments


def _first_rows(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The first `lengths[b]` rows of each segment that starts at `starts[b]`."""
    shift = starts[: lengths.numel()] - jagged.offsets(lengths)[:-1]
    return torch.arange(int(lengths.sum())) + jagged.spread(shift, lengths)
