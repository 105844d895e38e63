"""What a cache has to know about a model, read from its modules."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from mtserve_plugin.config import DTYPES, CacheConfig
from mtserve_plugin.errors import AttachError
from mtserve_plugin.integrations.generative_recommenders.parts import Parts

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def read_geometry(parts: Parts) -> dict[str, Any]:
    """`CacheConfig`'s options that follow from the model; `attn_norm_len` only where the model pins it.

    Raises:
        AttachError: the layers differ among each other, or the dtype is none that a cache can hold.
    """
    layers = parts.layers
    geometry = {
        "num_layers": len(layers),
        "num_heads": _same(layers, "_num_heads"),
        "qk_dim": _same(layers, "_attention_dim"),
        "v_dim": _same(layers, "_hidden_dim"),
        "max_attn_len": _same(layers, "_max_attn_len"),
        "dtype": dtype_of(parts),
    }
    scale = _same(layers, "_attn_alpha")
    geometry["attn_scale"] = None if same_scale(scale, geometry["qk_dim"] ** -0.5) else scale
    if pinned := _same(layers, "_attn_norm_len", 0):
        geometry["attn_norm_len"] = pinned
    return geometry


def check_geometry(parts: Parts, config: CacheConfig) -> str:
    """A paragraph that names the first option in which cache and model differ; empty when they agree."""
    geometry = read_geometry(parts)
    scale = geometry.pop("attn_scale") or geometry["qk_dim"] ** -0.5
    for name, mine in geometry.items():
        theirs = getattr(config, name)
        if theirs != mine:
            return _differs(name, theirs, mine)
    return "" if same_scale(scale, config.scale) else _differs("attn_scale", config.scale, scale)


def same_scale(a: float, b: float) -> bool:
    """Equal but for the rounding of a square root."""
    return math.isclose(a, b, rel_tol=1e-9)


def dtype_of(parts: Parts) -> str:
    """Of the keys and values: that of the content MLP, whose input and output share it, else that of the
    layers.

    A layer casts its weights to the dtype of what comes in; without a preprocessor nothing but the weights
    tells.
    """
    mlp = getattr(parts.preprocessor, "_content_embedding_mlp", None)
    source: nn.Module = parts.layers[0] if mlp is None else mlp
    dtype = next(weight.dtype for weight in source.parameters() if weight.is_floating_point())
    if dtype not in _NAMES:
        raise AttachError(
            f"dtype: the model computes in {dtype}; a cache holds {', '.join(DTYPES)}. Convert the model",
            ("dtype",),
        )
    return _NAMES[dtype]


def device_of(parts: Parts) -> torch.device:
    """Where the layers are."""
    return next(parts.stack.parameters()).device


def _differs(name: str, theirs: object, mine: object) -> str:
    return (
        f"{name}: the cache was built for {name}={theirs!r}, the model has {mine!r}. Keys and values of one "
        "do not fit the "
        "other. Build the cache with CacheConfig.for_model(model, ...)"
    )


_REQUIRED = object()


def _same(layers: tuple[nn.Module, ...], name: str, default: Any = _REQUIRED) -> Any:
    values = [getattr(layer, name) if default is _REQUIRED else getattr(layer, name, default) for layer in layers]
    for index, value in enumerate(values):
        if value != values[0]:
            raise AttachError(
                f"geometry: layer {index} has {name}={value!r}, layer 0 has {values[0]!r}. A cache holds all "
                "layers with "
                "one geometry. Give all layers the same",
                ("geometry",),
            )
    return values[0]
