"""Is a replay's exactness worth anything? Two errors, made on purpose, that its comparison must notice."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from mtserve_plugin.cache import HierarchicalKVCache, NoCache
from mtserve_plugin.models.hstu import HSTURanker
from mtserve_plugin.replay.model import to_kjt
from mtserve_plugin.replay.plan import ReplayPlan
from mtserve_plugin.workload import CandidateSampler, Features, Requests, build_features

TOLERANCE = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1e-2}
"""Largest relative score difference to recompute that passes, by the model's dtype. In float32 it covers the order of
sums; in the others one rounding more or less per layer."""

CONTROL_THRESHOLD = 1e-2
"""What each control has to exceed in float32; with other dtypes, their tolerance where that is larger."""

_REQUESTS = 8
_DELTA_SHARE = 4


class Controls(NamedTuple):
    """Relative score differences to recompute, of two planted errors.

    Attributes:
        history_removed: candidates no longer see the history; their own positions and times are kept.
        positions_shifted: the delta stands one position too far right, as it would with a cached length that is off
            by one; its prefix comes from the cache.
    """

    history_removed: float
    positions_shifted: float


class Difference:
    """max|a - b| / max|b| over all pairs of score tensors it is given, b being the reference."""

    def __init__(self) -> None:
        self._error = self._scale = 0.0

    def add(self, scores: torch.Tensor, reference: torch.Tensor) -> None:
        if not reference.numel():
            return
        # A NaN would compare as no error at all.
        error = float((scores.double() - reference.double()).abs().nan_to_num(nan=float("inf")).max())
        self._error = max(self._error, error)
        self._scale = max(self._scale, float(reference.abs().max()))

    @property
    def value(self) -> float:
        return self._error / self._scale if self._scale else float(self._error > 0)


def control_threshold(dtype: str) -> float:
    return max(CONTROL_THRESHOLD, TOLERANCE[dtype])


def run_controls(model: HSTURanker, plan: ReplayPlan, sampler: CandidateSampler) -> Controls:
    """Plants both errors in a few of the timed requests, one request at a time; `model.cache` is put back."""
    chosen = _choose(plan)
    used = model.cache
    removed, shifted = Difference(), Difference()
    pages = int((-(-chosen.requests.history_length // used.config.page_size) + 1).sum())
    config = used.config.replace(num_pages=pages, onload_pages=0, host_bytes=0)
    try:
        with HierarchicalKVCache(config, used.device) as cache:
            for row, previous in enumerate(chosen.previous.tolist()):
                request = chosen.requests.take(slice(row, row + 1))
                features = build_features(plan.timed, request, sampler)
                model.cache = NoCache(used.config, used.device)
                places = _Places(model)
                reference = _score(model, features)
                places.close()
                removed.add(_without_history(model, features, places), reference)
                model.cache = cache
                if previous:
                    _score(model, _cut(features, previous))
                shifted.add(_with_shifted_delta(model, features, previous), reference)
    finally:
        model.cache = used
    return Controls(removed.value, shifted.value)


class _Chosen(NamedTuple):
    requests: Requests
    previous: np.ndarray


def _choose(plan: ReplayPlan) -> _Chosen:
    """Timed requests with a history, one per user: the largest deltas behind a cached prefix first.

    A delta of two tokens behind thousands moves the scores too little for any threshold but the tolerance itself, so
    the prefix leaves at least a quarter of the history to the delta.
    """
    requests = plan.timed.requests
    length = requests.history_length
    prefix = np.where(requests.invalidated, 0, np.minimum(plan.previous, length))
    share = (length - prefix) / np.maximum(length, 1)
    order = np.lexsort((-share, prefix == 0, length == 0))
    _, first = np.unique(requests.user[order], return_index=True)
    picked = order[np.sort(first)][:_REQUESTS]
    picked = picked[length[picked] > 0]
    longest_prefix = length[picked] - np.maximum(length[picked] // _DELTA_SHARE, 1)
    return _Chosen(requests.take(picked), np.minimum(prefix[picked], longest_prefix))


def _score(model: HSTURanker, features: Features) -> torch.Tensor:
    return model(to_kjt(features, model.config.num_items)).cpu()


class _Places:
    """Remembers the positions and gaps that the encoder is called with."""

    def __init__(self, model: HSTURanker) -> None:
        self._handle = model.encoder.register_forward_pre_hook(self._keep)
        self.positions = self.gaps = torch.empty(0)

    def _keep(self, _: Any, args: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        _, self.positions, self.gaps = args

    def close(self) -> None:
        self._handle.remove()


def _without_history(model: HSTURanker, features: Features, places: _Places) -> torch.Tensor:
    def restore(_: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x = args[0]
        return x, places.positions[-len(x) :], places.gaps[-len(x) :]

    handle = model.encoder.register_forward_pre_hook(restore)
    try:
        return _score(model, _cut(features, 0))
    finally:
        handle.remove()


def _with_shifted_delta(model: HSTURanker, features: Features, previous: int) -> torch.Tensor:
    length = int(features.lengths[0])

    def shift(_: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, positions, gaps = args
        delta = (positions >= previous) & (positions < length)
        return x, positions + delta, gaps

    handle = model.encoder.register_forward_pre_hook(shift)
    try:
        return _score(model, features)
    finally:
        handle.remove()


def _cut(features: Features, length: int) -> Features:
    """One request with only the first `length` events of its history."""
    return Features(
        features.user,
        features.now,
        np.minimum(features.lengths, length),
        features.item[:length],
        features.action[:length],
        features.time[:length],
        features.candidate_lengths,
        features.candidate,
    )
