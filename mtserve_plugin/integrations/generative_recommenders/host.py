"""The host's classes and operators, looked up among the modules that are loaded: attaching imports
nothing.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mtserve_plugin.errors import AttachError

NAME = "generative_recommenders"

# What is called or replaced, with the parameters that must be there.
_SIGNATURES = {
    "STULayer.forward": "x x_lengths x_offsets max_seq_len num_targets max_kv_caching_len kv_caching_lengths",
    "STUStack.forward": "x x_lengths x_offsets max_seq_len num_targets max_kv_caching_len kv_caching_lengths",
    "HSTUPositionalEncoder.forward": ("max_seq_len seq_lengths seq_offsets seq_timestamps seq_embeddings num_targets"),
    "HSTUTransducer.forward": (
        "max_uih_len max_targets total_uih_len total_targets seq_lengths seq_embeddings seq_timestamps "
        "num_targets seq_payloads"
    ),
    "DlrmHSTU.forward": "uih_features candidates_features",
    "DlrmHSTU.preprocess": "uih_features candidates_features",
    "DlrmHSTU.main_forward": (
        "seq_embeddings payload_features max_uih_len uih_seq_lengths max_num_candidates num_candidates"
    ),
    "hstu_compute_uqvk": (
        "x norm_weight norm_bias norm_eps num_heads attn_dim hidden_dim uvqk_weight uvqk_bias kernel"
    ),
    "hstu_compute_output": (
        "attn u x norm_weight norm_bias norm_eps output_weight num_heads linear_dim dropout_ratio training "
        "concat_u "
        "concat_x mul_u_activation_type group_norm recompute_y_in_backward kernel"
    ),
}


class _Absent:
    """Stands for a class whose module is not loaded: nothing is an instance of it."""


@dataclass(frozen=True)
class Host:
    """Classes of the host; those that are not loaded are `_Absent`."""

    DlrmHSTU: type
    HSTUTransducer: type
    STU: type
    STUStack: type
    STULayer: type
    DynamicSTU: type
    SDSTU: type
    HSTUPositionalEncoder: type
    InputPreprocessor: type
    ContextualPreprocessor: type
    OutputPostprocessor: type
    hstu_compute_uqvk: Callable[..., tuple[torch.Tensor, ...]]
    hstu_compute_output: Callable[..., torch.Tensor]

    def kinds(self) -> tuple[type, ...]:
        """What can be attached, the outermost first."""
        return (self.DlrmHSTU, self.HSTUTransducer, self.STUStack)


def find_host() -> Host | None:
    """The host as it is loaded; `None` without it, in which case no model can be of it.

    Raises:
        AttachError: it is a version of the host with other signatures.
    """
    if f"{NAME}.modules.stu" not in sys.modules:
        return None
    host = Host(
        DlrmHSTU=_get("modules.dlrm_hstu", "DlrmHSTU"),
        HSTUTransducer=_get("modules.hstu_transducer", "HSTUTransducer"),
        STU=_get("modules.stu", "STU"),
        STUStack=_get("modules.stu", "STUStack"),
        STULayer=_get("modules.stu", "STULayer"),
        DynamicSTU=_get("modules.dynamic_stu", "DynamicSTU"),
        SDSTU=_get("modules.dynamic_stu", "SDSTU"),
        HSTUPositionalEncoder=_get("modules.positional_encoder", "HSTUPositionalEncoder"),
        InputPreprocessor=_get("modules.preprocessors", "InputPreprocessor"),
        ContextualPreprocessor=_get("modules.preprocessors", "ContextualPreprocessor"),
        OutputPostprocessor=_get("modules.postprocessors", "OutputPostprocessor"),
        hstu_compute_uqvk=_get("ops.hstu_compute", "hstu_compute_uqvk"),
        hstu_compute_output=_get("ops.hstu_compute", "hstu_compute_output"),
    )
    for name, wanted in _SIGNATURES.items():
        _check_signature(host, name, wanted.split())
    return host


def class_chain(module: nn.Module, base: type) -> list[type]:
    """The classes from the module's own (before it was attached) down to, without, `base`."""
    chain = getattr(type(module), "_mtserve_base", type(module)).__mro__
    return list(chain[: chain.index(base)])


def _get(module: str, name: str) -> Any:
    loaded = sys.modules.get(f"{NAME}.{module}")
    return _Absent if loaded is None else getattr(loaded, name, _Absent)


def _check_signature(host: Host, name: str, wanted: list[str]) -> None:
    owner, _, method = name.partition(".")
    function = getattr(host, owner)
    if function is not _Absent and method:
        function = getattr(function, method, _Absent)
    if function is _Absent:
        # A class that is not loaded is in no model; a missing function or method is another version.
        if method and getattr(host, owner) is _Absent:
            return
        found: list[str] = []
    else:
        found = [parameter for parameter in inspect.signature(function).parameters if parameter != "self"]
    missing = [parameter for parameter in wanted if parameter not in found]
    if missing:
        raise AttachError(
            f"host version: {name} of the loaded {NAME} takes {', '.join(found) or 'nothing'}; "
            f"{', '.join(missing)} is "
            "missing. This version is not known, and what its cached keys and values would depend on "
            "neither. Use "
            "commit db1bf8f, or one with the same signatures",
            ("host version",),
        )
