"""A two-tier key/value cache for generative recommenders.

Keys and values of a user's history stay between two requests: pages on the device for users seen lately, chunks in
host memory for everybody else. See `HierarchicalKVCache` for the cache, `CacheBatch` for one batch in flight.
"""

from mtserve_plugin.batch import CacheBatch, PageTable
from mtserve_plugin.cache import HierarchicalKVCache, KVCache, NoCache
from mtserve_plugin.config import CacheConfig
from mtserve_plugin.errors import CacheError, ConfigError, InputError, OnloadError

__version__ = "0.1.0"

__all__ = [
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
]
