"""Small rankers on torchrec, for examples, tests and replay. Imported lazily: torchrec is optional."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtserve_plugin.models.features import build_features
    from mtserve_plugin.models.hstu import HSTURanker, HSTURankerConfig
    from mtserve_plugin.models.sasrec import SASRec, SASRecConfig

__all__ = ["HSTURanker", "HSTURankerConfig", "SASRec", "SASRecConfig", "build_features"]

_HOMES = {
    "HSTURanker": "hstu",
    "HSTURankerConfig": "hstu",
    "SASRec": "sasrec",
    "SASRecConfig": "sasrec",
    "build_features": "features",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
