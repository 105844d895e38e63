"""`meta-recsys/generative-recommenders`: `DlrmHSTU`, `HSTUTransducer` and `STUStack`, at commit `db1bf8f`.

Nothing of the host is imported: its modules are loaded when one of its models exists.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from mtserve_plugin.cache import KVCache
from mtserve_plugin.errors import AttachError, CacheError
from mtserve_plugin.integrations.generative_recommenders import checks, classes
from mtserve_plugin.integrations.generative_recommenders.features import read_spec
from mtserve_plugin.integrations.generative_recommenders.geometry import device_of, read_geometry
from mtserve_plugin.integrations.generative_recommenders.host import NAME, Host, find_host
from mtserve_plugin.integrations.generative_recommenders.parts import Parts, find_parts, find_root
from mtserve_plugin.integrations.generative_recommenders.staleness import (
    Bounds,
    check_bounds,
    make_refresher,
    no_stats,
)
from mtserve_plugin.integrations.generative_recommenders.state import Options, State
from mtserve_plugin.integrations.generative_recommenders.weights import WeightWatch, check_version
from mtserve_plugin.positions import AppendStablePositionalEncoder


def recognises(model: nn.Module) -> bool:
    """True when the host is loaded and a module of it is in the model, attached or not."""
    host = find_host()
    if host is None:
        return False
    kinds = (*host.kinds(), host.STU)
    return any(isinstance(module, kinds) or _is_of_host(module) for module in model.modules())


def why_not(thing: object) -> str:
    """Why something that is no module cannot be attached."""
    name = type(thing).__name__
    if name in ("HSTUModelFamily", "ModelFamilyDenseDist"):
        return (
            f"{name} chooses the worker that computes a batch after the features are looked up, so that the "
            "cache that will serve it is not known when they are stripped. Attach inside of each worker, and "
            "route users to workers before the lookup"
        )
    return f"{name} is no torch.nn.Module. Attach the module that it holds"


def attach(
    model: nn.Module,
    cache: KVCache,
    *,
    user_feature: str | None,
    version: str | None,
    positions: str,
    approximate: Collection[str],
    sparse: nn.Module | None,
    content_check: bool,
    refresh_after_tokens: int | None,
    refresh_after_seconds: float | None,
) -> nn.Module:
    """See `mtserve_plugin.attach`."""
    host = _host()
    if any(isinstance(module, classes.Attached) for module in model.modules()):
        raise AttachError("attached: this model has a cache already; detach it first", ("attached",))
    parts = find_parts(model, host, sparse)
    bounds = check_bounds(refresh_after_tokens, refresh_after_seconds, approximate, whole=parts.dlrm is not None)
    accepted = checks.check(parts, host, cache, positions, approximate)
    spec = None if parts.dlrm is None else read_spec(parts.dlrm._hstu_configs, user_feature)
    weights = WeightWatch(parts.weights(), version)
    stable = positions == "append_stable" or isinstance(parts.encoder, AppendStablePositionalEncoder)
    check_version(cache, version, parts.weights(), "append_stable" if stable else "model")
    options = Options(
        cache=cache,
        features=spec,
        context_rows=parts.context_rows,
        content_check=content_check,
        split=sparse is not None,
        refresher=make_refresher(cache, bounds if accepted else Bounds()),
    )
    other = parts.sparse if parts.sparse is not parts.dlrm else None
    state = State(options, weights, parts.root, other)
    for part, mixin in _mixins(parts, stable):
        part.__class__ = classes.attached_class(mixin, type(part), host)
    for holder in state.holders:
        vars(holder)[classes.STATE] = state
    return model


def detach(model: nn.Module) -> nn.Module:
    """See `mtserve_plugin.detach`."""
    roots = [module for module in model.modules() if classes.STATE in vars(module)]
    if not roots:
        raise AttachError("detach: no cache is attached to this model", ("detach",))
    states = [vars(root)[classes.STATE] for root in roots]
    for state in states:
        if state.in_flight:
            raise CacheError(f"detach: {state.in_flight} batches of this model are in flight; let them end first")
    for holder in {id(holder): holder for state in states for holder in state.holders}.values():
        for module in holder.modules():
            if isinstance(module, classes.Attached):
                module.__class__ = type(module)._mtserve_base
            vars(module).pop(classes.STATE, None)
    return model


def geometry(model: nn.Module) -> dict[str, Any]:
    """What `CacheConfig.for_model` reads.

    Raises:
        AttachError: the model is of another shape than those that are known.
    """
    return read_geometry(find_parts(model, _host(), need_tables=False))


def device(model: nn.Module) -> torch.device:
    """Where the model's layers are, and where its cache has to be.

    Raises:
        AttachError: as `geometry`.
    """
    return device_of(find_parts(model, _host(), need_tables=False))


def cache_name(model: nn.Module) -> str | None:
    """What the model's configuration names its cache (`DlrmHSTUConfig.kv_cache`, by `patches/0003-stu-hook.patch`).

    Raises:
        AttachError: as `geometry`.
    """
    return getattr(getattr(find_root(model, _host()), "_hstu_configs", None), "kv_cache", None)


def stats(model: nn.Module) -> dict[str, int]:
    """See `mtserve_plugin.integrations.stats`."""
    states = [vars(module)[classes.STATE] for module in model.modules() if classes.STATE in vars(module)]
    if not states:
        raise AttachError("stats: no cache is attached to this model", ("stats",))
    refresher = states[0].options.refresher
    return no_stats() if refresher is None else refresher.stats()


def _host() -> Host:
    host = find_host()
    if host is None:
        raise AttachError(f"host: {NAME} is not loaded, so that this cannot be a model of it", ("host",))
    return host


def _is_of_host(module: nn.Module) -> bool:
    return any(cls.__module__.partition(".")[0] == NAME for cls in type(module).__mro__)


def _mixins(parts: Parts, stable: bool) -> list[tuple[nn.Module, type]]:
    chosen: list[tuple[nn.Module, type]] = [(parts.stack, classes.CachedStack)]
    chosen += [(layer, classes.CachedLayer) for layer in parts.layers]
    if parts.encoder is not None and stable:
        chosen.append((parts.encoder, classes.AppendStablePositions))
    if parts.transducer is not None:
        chosen.append((parts.transducer, classes.CachedTransducer))
    for half in {id(one): one for one in (parts.dlrm, parts.sparse) if one is not None}.values():
        chosen.append((half, classes.CachedDlrm))
    return chosen
