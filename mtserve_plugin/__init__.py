"""A two-tier key/value cache for generative recommenders.

Keys and values of a user's history stay between two requests: pages on the device for users seen lately, chunks in
host memory for everybody else. See `HierarchicalKVCache` for the cache, `CacheBatch` for one batch in flight.

Importing the package costs nothing: the names below are imported, and torch with them, when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtserve_plugin.batch import CacheBatch, PageTable
    from mtserve_plugin.cache import HierarchicalKVCache, KVCache, NoCache
    from mtserve_plugin.config import CacheConfig
    from mtserve_plugin.errors import AttachError, CacheError, ConfigError, InputError, OnloadError
    from mtserve_plugin.integrations import attach, detach
    from mtserve_plugin.stability import audit

__version__ = "0.1.0"

__all__ = [
    "AttachError",
    "CacheBatch",
    "CacheConfig",
    "CacheError",
    "ConfigError",
    "HierarchicalKVCache",
    "InputError",
    "KVCache",
    "NoCache",
    "OnloadError",
    "PageTable",
    "attach",
    "audit",
    "detach",
]

_HOMES = {
    "AttachError": "errors",
    "CacheBatch": "batch",
    "CacheConfig": "config",
    "CacheError": "errors",
    "ConfigError": "errors",
    "HierarchicalKVCache": "cache",
    "InputError": "errors",
    "KVCache": "cache",
    "NoCache": "cache",
    "OnloadError": "errors",
    "PageTable": "batch",
    "attach": "integrations",
    "audit": "stability",
    "detach": "integrations",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
