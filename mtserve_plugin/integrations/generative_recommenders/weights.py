"""Notices weights that change under a cache, by the version counters of parameters and buffers."""

from __future__ import annotations

import copy
import hashlib
import itertools
import logging
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from mtserve_plugin.cache import KVCache, NoCache
from mtserve_plugin.errors import AttachError

_LOG = logging.getLogger(__name__)

Fingerprint = list[tuple[int, int, int]]

_internal = itertools.count(1)
_digests: weakref.WeakKeyDictionary[KVCache, dict[str, bytes]] = weakref.WeakKeyDictionary()

# Rows of a table that count: enough to tell two models apart, few enough to read at attach.
_SAMPLED_ROWS = 1024


class WeightWatch:
    """The version under which a model's keys and values are known, renewed when a weight was changed in
    place.

    A copy by `deepcopy` watches the copied weights from the moment of the copy, under the version of the
    original.

    Args:
        modules: on whose parameters and buffers keys and values depend.
        version: names the weights as they are now; `None` makes up a name.
    """

    def __init__(self, modules: Iterable[nn.Module], version: str | None) -> None:
        owners = [owner for module in modules for owner in module.modules()]
        self._tensors: list[Mapping[str, torch.Tensor | None]] = [
            tensors for owner in owners for tensors in (owner._parameters, owner._buffers) if tensors
        ]
        for tensors in self._tensors:
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_inference():
                    raise AttachError(
                        f"weights: {name} was created under torch.inference_mode and has no version counter, "
                        "so that a "
                        "change in place would go unnoticed. Build the model outside of it",
                        ("weights",),
                    )
        self._lock = threading.Lock()
        self._base = version
        self._version = _made_up() if version is None else version
        self._remember(self.fingerprint())

    def fingerprint(self) -> Fingerprint:
        """Changes when a weight is changed in place, gets other memory, or is replaced."""
        return [
            # A forward may have replaced a buffer by an inference tensor, which counts no versions.
            (id(tensor), -1 if tensor.is_inference() else tensor._version, tensor.data_ptr())
            for tensors in self._tensors
            for tensor in tensors.values()
            if tensor is not None
        ]

    def version(self) -> tuple[str, Fingerprint]:
        """The version that holds now, and what to compare at the end of the batch."""
        now = self.fingerprint()
        with self._lock:
            if now != self._seen or self._any_gone():
                self._remember(now)
                self._version = _made_up(self._base)
                _LOG.info("weights were changed in place: keys and values continue under version %r", self._version)
            return self._version, now

    def is_current(self, seen: Fingerprint) -> bool:
        """True while nothing was changed since `version` was asked last, or since the watch began."""
        with self._lock:
            return seen == self._seen and not self._any_gone()

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightWatch:
        twin: WeightWatch = object.__new__(WeightWatch)
        memo[id(self)] = twin
        changed = self.fingerprint() != self._seen or self._any_gone()
        twin._tensors = [copy.deepcopy(tensors, memo) for tensors in self._tensors]
        twin._lock = threading.Lock()
        twin._base = self._base
        twin._version = _made_up(self._base) if changed else self._version
        twin._remember(twin.fingerprint())
        return twin

    def _remember(self, seen: Fingerprint) -> None:
        self._seen = seen
        self._objects = [weakref.ref(tensor) for tensor in self._all()]

    def _any_gone(self) -> bool:
        """True when a tensor was replaced and freed, after which its id and memory may belong to its
        successor.
        """
        return any(reference() is None for reference in self._objects)

    def _all(self) -> Iterator[torch.Tensor]:
        for tensors in self._tensors:
            for tensor in tensors.values():
                if tensor is not None:
                    yield tensor


def check_version(cache: KVCache, version: str | None, modules: Iterable[nn.Module], positions: str) -> None:
    """Remembers which weights a version names, and how positions are counted with them.

    Raises:
        AttachError: others were attached to the same cache under the same version.
    """
    if version is None or isinstance(cache, NoCache):
        return
    known = _digests.setdefault(cache, {})
    digest = _digest(modules) + positions.encode()
    if known.setdefault(version, digest) != digest:
        raise AttachError(
            f"version: other weights, or other positions, were attached to this cache under version={version!r}; "
            "their keys and values would be read as this model's. Give each set of weights its own version",
            ("version",),
        )


def _made_up(base: str | None = None) -> str:
    return f"{base or ''}#{next(_internal)}"


def _digest(modules: Iterable[nn.Module]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for module in modules:
        for name, weight in module.state_dict().items():
            if not isinstance(weight, torch.Tensor) or weight.is_meta:
                continue
            rows = weight.detach()
            if rows.dim() > 0 and rows.shape[0] > 4 * _SAMPLED_ROWS:
                rows = rows[:: rows.shape[0] // _SAMPLED_ROWS]
            digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
            digest.update(rows.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()
