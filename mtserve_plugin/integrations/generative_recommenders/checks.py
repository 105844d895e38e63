"""What decides whether a prefix keeps its keys and values: each factor is looked for, and accepted or
refused.

The factors, with what each costs, were measured on the host (fp32, relative error of the candidates'
embeddings).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from mtserve_plugin.cache import KVCache
from mtserve_plugin.errors import AttachError
from mtserve_plugin.integrations.generative_recommenders.geometry import check_geometry, device_of
from mtserve_plugin.integrations.generative_recommenders.host import Host
from mtserve_plugin.integrations.generative_recommenders.parts import Parts
from mtserve_plugin.positions import AppendStablePositionalEncoder

APPROXIMATIONS = ("positions",)

Check = Callable[[Parts, Host], str]


def check(parts: Parts, host: Host, cache: KVCache, positions: str, approximate: Collection[str]) -> list[str]:
    """Returns: the factors that were found and are accepted, which make reuse inexact.

    Raises:
        AttachError: with one paragraph per factor that stands against reuse.
    """
    names = {approximate} if isinstance(approximate, str) else set(approximate)
    unknown = sorted(names - set(APPROXIMATIONS))
    if unknown:
        raise AttachError(
            f"approximate={unknown[0]!r} names no factor that can be accepted; those are: {', '.join(APPROXIMATIONS)}",
            ("approximate",),
        )
    if positions not in ("model", "append_stable"):
        raise AttachError(f"positions={positions!r} is unknown; use 'model' or 'append_stable'", ("positions",))
    refused = list(refusals(parts, host, replaced=positions == "append_stable"))
    found = [(name, text) for name, text in refused if name not in names]
    if not any(name == "geometry" for name, _ in found):
        found += [("cache", text) for text in _check_cache(parts, cache) if text]
    if found:
        raise AttachError("\n\n".join(text for _, text in found), tuple(name for name, _ in found))
    return [name for name, _ in refused if name in names]


def refusals(parts: Parts, host: Host, *, replaced: bool = False) -> Iterator[tuple[str, str]]:
    """Name and paragraph of every factor by which this model's prefixes lose their keys and values.

    Args:
        replaced: positions are counted by the append-stable encoder instead of the model's own.
    """
    for name, find in _CHECKS.items():
        text = _cannot_replace(parts) if name == "positions" and replaced else find(parts, host)
        if text:
            yield name, f"{name}: {text}"


def training_parts(parts: Parts) -> list[str]:
    """Names of modules that are in training mode."""
    return [name or "the model" for name, module in parts.root.named_modules() if module.training]


def _training(parts: Parts, host: Host) -> str:
    names = training_parts(parts)
    if not names:
        return ""
    return (
        f"{names[0]} is in training mode, where dropout makes two runs of the same history differ (measured: "
        "0.75), and "
        "weights change under what is cached. Call model.eval()"
    )


def _positions(parts: Parts, host: Host) -> str:
    encoder = parts.encoder
    if encoder is None or isinstance(encoder, AppendStablePositionalEncoder):
        return ""
    return (
        f"{type(encoder).__name__} counts positions from the end of the history and times from the query, so "
        "that every "
        "new event and every later request changes what all old tokens look like, and with it their keys and "
        "values "
        "in every layer (measured with tables of trained size: 9e-2 of the keys and values, 1e-3 to 1e-2 of the "
        "scores, more with every append). Train the model "
        "with positions.AppendStablePositionalEncoder and attach it as it is; or, for a model trained so "
        "with the same "
        'tables, attach with positions="append_stable"; or accept the error with approximate={"positions"}'
    )


def _cannot_replace(parts: Parts) -> str:
    if parts.encoder is not None:
        return ""
    return 'positions="append_stable" replaces the model\'s encoder, and there is none. Leave the argument out'


def _layer_context(parts: Parts, host: Host) -> str:
    for index, layer in enumerate(parts.layers):
        if (rows := getattr(layer, "_contextual_seq_len", 0)) > 0:
            return (
                f"layer {index} has contextual_seq_len={rows}: its first rows see the whole history, so that "
                "every new "
                "event changes them, and from the third layer on all that look at them. Build the layers "
                "with "
                "contextual_seq_len=0 (context rows of the preprocessor are fine)"
            )
    return ""


def _target_aware(parts: Parts, host: Host) -> str:
    for index, layer in enumerate(parts.layers):
        if not getattr(layer, "_target_aware", True):
            return (
                f"layer {index} has target_aware=False: candidates see each other and count as history, "
                "whose keys and "
                "values would go into the cache. Build the layers with target_aware=True"
            )
    return ""


def _causal(parts: Parts, host: Host) -> str:
    for index, layer in enumerate(parts.layers):
        if not getattr(layer, "_causal", True):
            return (
                f"layer {index} has causal=False: old tokens see new ones, so that each append changes them. "
                "Build the "
                "layers with causal=True"
            )
    return ""


def _full_attention(parts: Parts, host: Host) -> str:
    for index, layer in enumerate(parts.layers):
        for name in ("_min_full_attn_seq_len", "min_full_attn_seq_len"):
            if (rows := getattr(layer, name, 0) or 0) > 0:
                return (
                    f"layer {index} has min_full_attn_seq_len={rows}: the last rows see everything, and "
                    "which rows are "
                    "the last changes with every append. Build the layers without it"
                )
    return ""


def _preprocessor(parts: Parts, host: Host) -> str:
    found: Any = parts.preprocessor
    if found is None:
        return ""
    if found.interleave_targets() or type(found).__name__ == "ContextualInterleavePreprocessor":
        return (
            f"{type(found).__name__} makes two tokens of every event, so that history lengths count "
            "something else than "
            "the tokens that are cached. Use ContextualPreprocessor"
        )
    if type(found) is not host.ContextualPreprocessor:
        return (
            f"{type(found).__name__} is not known: it may look at more than one token, at lengths, or at the "
            "end of the "
            "history. Use ContextualPreprocessor"
        )
    if parts.encoder is not None and getattr(parts.encoder, "_contextual_seq_len", 0) != parts.context_rows:
        return (
            f"the encoder counts {getattr(parts.encoder, '_contextual_seq_len', 0)} context rows, the "
            "preprocessor adds "
            f"{parts.context_rows}. Build the encoder with contextual_seq_len={parts.context_rows}"
        )
    return ""


def _postprocessor(parts: Parts, host: Host) -> str:
    found = parts.postprocessor
    known = ("L2NormPostprocessor", "LayerNormPostprocessor", "TimestampLayerNormPostprocessor")
    if found is None or type(found).__name__ in known:
        return ""
    return (
        f"{type(found).__name__} is not known: it gets the payloads, from which cached events are stripped. "
        "Use "
        f"{', '.join(known)}"
    )


def _outputs(parts: Parts, host: Host) -> str:
    if parts.transducer is None:
        return ""
    if getattr(parts.transducer, "_return_full_embeddings", False):
        return (
            "return_full_embeddings=True asks for the embeddings of all history tokens, and those that are "
            "cached are "
            "not computed. Build the transducer without it"
        )
    if getattr(parts.transducer, "_listwise_training", False):
        return "listwise training hides which rows are candidates. Build the transducer for inference"
    if getattr(parts.transducer, "stu_hook", None) is not None:
        return "stu_hook is set: what it does with the layers is not known. Set it to None"
    return ""


def _check_cache(parts: Parts, cache: KVCache) -> Iterator[str]:
    yield check_geometry(parts, cache.config)
    device = device_of(parts)
    # A device without an index is the current one.
    known = cache.device.index is not None and device.index is not None
    if device.type != cache.device.type or (known and device.index != cache.device.index):
        yield (
            f"device: the model's layers are on {device}, the cache is on {cache.device}. Move the model, or "
            "build the "
            "cache with device=..."
        )


_CHECKS: dict[str, Check] = {
    "training": _training,
    "positions": _positions,
    "contextual_seq_len": _layer_context,
    "target_aware": _target_aware,
    "causal": _causal,
    "min_full_attn_seq_len": _full_attention,
    "preprocessor": _preprocessor,
    "postprocessor": _postprocessor,
    "outputs": _outputs,
}
