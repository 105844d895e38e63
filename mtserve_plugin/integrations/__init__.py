"""Caches for models of other code bases: one subpackage per code base, loaded when a model of it is
attached.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from types import ModuleType
from typing import Literal

from torch import nn

from mtserve_plugin.cache import KVCache
from mtserve_plugin.errors import AttachError

_CODE_BASES = ("generative_recommenders",)

Positions = Literal["model", "append_stable"]


def attach(
    model: nn.Module,
    cache: KVCache,
    *,
    user_feature: str | None = None,
    version: str | None = None,
    positions: Positions = "model",
    approximate: Collection[str] = (),
    sparse: nn.Module | None = None,
    content_check: bool = True,
    refresh_after_tokens: int | None = None,
    refresh_after_seconds: float | None = None,
) -> nn.Module:
    """Makes the model's own forward use the cache.

    Known are `DlrmHSTU`, `HSTUTransducer` and `STUStack` of `generative_recommenders`, or a module that holds
    one of them. Its modules change their class to subclasses of it; parameters, `state_dict` keys and
    `isinstance` stay as they are, and `detach` restores the classes. An attached model is for inference: no
    gradient is recorded.

    What changes in the numbers, with any cache, `NoCache` included: attention divides by
    `cache.config.attn_norm_len`, where the model divides by the longest row of each batch, so that a user's
    keys and values do not depend on who else is in the batch; and with `positions="append_stable"` what the
    encoder adds.

    A `DlrmHSTU` asks the cache by itself: users from `user_feature`, lengths and hashes from the history
    features, which are stripped before the embedding lookup. A batch whose keys and values fail to arrive is
    run again uncached. An `HSTUTransducer` or `STUStack` runs under an enclosing `with cache.batch(...)`, on
    stripped rows; the time of each row's last stripped event, `[B]` in seconds, goes into
    `seq_payloads["mtserve_boundary"]` where the encoder is append-stable.

    Args:
        model: in eval mode, on the cache's device.
        cache: its geometry has to be the model's, see `CacheConfig.for_model`.
        user_feature: the feature that holds each row's user id, for a `DlrmHSTU`. Raw ids are best: ids that
            were reduced to the size of a table may be shared by two users, which the content check finds out.
        version: names the weights; models with the same weights and the same version share what is cached.
            `None` makes up a name that nobody shares. Weights that are changed in place afterwards get a new
            internal version; changes that bypass the parameters' version counters (`parameter.data.copy_`,
            tables that a kernel updates) do not: detach and attach with another version.
        positions: "append_stable" replaces `HSTUPositionalEncoder` by one on the same tables under which a
            prefix keeps its keys and values (`positions.AppendStablePositionalEncoder`); the model has to be
            trained so.
        approximate: names of factors that make reuse inexact and are accepted: "positions".
        refresh_after_tokens: bounds what was accepted: a user whose history has grown, or was cut, by this many tokens
            since it was encoded as a whole is evicted, in all versions, and encoded as a whole again. `None` is
            without bound.
        refresh_after_seconds: the same for the time between the two requests, earlier or later. The request's own
            time counts, that of its row's last candidate (without candidates, of the last event), from which the
            model's encoder counts too; no other clock is looked at.
        sparse: the model whose `preprocess` feeds this model's `main_forward`, where both are called by hand
            or in two places (`HSTUSparseInferenceModule`); may be `model` itself.
        content_check: hash every history token, so that edited, deleted and slid histories are found out;
            without it a history is taken to have only grown.

    Returns:
        The same model.

    Raises:
        AttachError: the model is not known, not reusable as it is, or does not fit the cache. The message has
            one paragraph per obstacle; nothing was changed.

    Example:
        >>> config = CacheConfig.for_model(model, attn_norm_len=4096, num_pages=1000)  # doctest: +SKIP
        >>> attach(model, HierarchicalKVCache(config), user_feature="user_id", version="7")  # doctest: +SKIP
    """
    return integration_of(model).attach(
        model,
        cache,
        user_feature=user_feature,
        version=version,
        positions=positions,
        approximate=approximate,
        sparse=sparse,
        content_check=content_check,
        refresh_after_tokens=refresh_after_tokens,
        refresh_after_seconds=refresh_after_seconds,
    )


def detach(model: nn.Module) -> nn.Module:
    """Gives an attached model its own classes back; the cache keeps what it holds.

    Raises:
        AttachError: the model is not attached.
        CacheError: a batch of the model is in flight.
    """
    return integration_of(model).detach(model)


def stats(model: nn.Module) -> dict[str, int]:
    """What attached models did to keep approximations within their bounds; copies of a model count together.

    Returns:
        `refreshed_by_tokens`, `refreshed_by_seconds`: users encoded as a whole because they reached that bound (both:
        the first); `of_unknown_age`: because nothing was known about them, as of every user who comes for the first
        time; `tracked`: users and versions of whom it is known now when they were encoded, by all models that share
        the cache. All 0 without bounds.

    Raises:
        AttachError: the model is not attached.
    """
    return integration_of(model).stats(model)


def integration_of(model: nn.Module) -> ModuleType:
    """The subpackage that knows this model.

    Raises:
        AttachError: none does.
    """
    for name in _CODE_BASES:
        integration = importlib.import_module(f"{__name__}.{name}")
        if not isinstance(model, nn.Module):
            raise AttachError(f"model: {integration.why_not(model)}", ("model",))
        if integration.recognises(model):
            return integration
    raise AttachError(
        f"model: {type(model).__name__} is of no code base that attach knows ({', '.join(_CODE_BASES)}). "
        "Call the cache "
        "by hand: with cache.batch(...) as batch, and batch.attend(...) in each layer",
        ("model",),
    )
