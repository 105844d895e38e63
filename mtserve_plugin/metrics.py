"""`HierarchicalKVCache.stats()` for Prometheus: a collector that reads it when it is scraped.

    from prometheus_client import start_http_server
    from mtserve_plugin.metrics import export

    export(cache)              # any number of caches, each with a name of its own
    start_http_server(9090)

`docs/grafana.json` is a board over these metrics.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mtserve_plugin.cache import KVCache
from mtserve_plugin.errors import CacheError, ConfigError, MissingDependencyError

try:
    from prometheus_client import REGISTRY, CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise MissingDependencyError(
        "prometheus-client is not installed. Fix: pip install 'mtserve-plugin[metrics]'"
    ) from error


@dataclass(frozen=True)
class _Family:
    """One metric: its samples are statistics of `stats()`, told apart by one label or the only one."""

    name: str
    help: str
    samples: Mapping[str, str]  # label value -> key of stats()
    label: str = ""


def _one(name: str, key: str, text: str) -> _Family:
    return _Family(name, text, {"": key})


_COUNTERS = (
    _Family(
        "mtserve_batches",
        "Batches, by how they ended; begun ones are all of them.",
        {
            "begun": "batches",
            "committed": "commits",
            "aborted": "aborts",
            "refused": "refused_batches",
            "abandoned": "abandoned_batches",
        },
        "state",
    ),
    _one("mtserve_requests", "requests", "Rows of batches."),
    _one("mtserve_history_tokens", "history_tokens", "History tokens asked for: the denominator of hit ratios."),
    _Family(
        "mtserve_hit_tokens",
        "History tokens whose keys and values were found, by the tier that had them.",
        {"device": "device_hit_tokens", "host": "host_hit_tokens"},
        "tier",
    ),
    _one("mtserve_stored_tokens", "stored_tokens", "Tokens published by commits."),
    _one("mtserve_lost_tokens", "lost_tokens", "Tokens committed once and now in neither tier."),
    _Family(
        "mtserve_rows_not_stored",
        "Rows that were scored but not stored, by reason.",
        {"no_room": "rows_without_room", "busy": "rows_busy", "unpublished": "unpublished_rows"},
        "reason",
    ),
    _one("mtserve_rows_from_region", "rows_from_region", "Rows read from the onload region for want of pages."),
    _Family(
        "mtserve_rows_changed",
        "Rows whose history was not what is cached, by what had happened to it.",
        {"edited": "edited_rows", "shortened": "truncated_rows"},
        "change",
    ),
    _one("mtserve_device_evicted_pages", "device_evicted_pages", "Device pages freed for others."),
    _one("mtserve_host_evicted_tokens", "host_evicted_tokens", "Tokens dropped from the host tier for others."),
    _Family(
        "mtserve_transfers",
        "Transfers between the tiers that were started.",
        {"onload": "onloads", "offload": "offloads"},
        "direction",
    ),
    _Family(
        "mtserve_transfer_tokens",
        "Tokens moved between the tiers.",
        {"onload": "onload_tokens", "offload": "offload_tokens"},
        "direction",
    ),
    _Family(
        "mtserve_transfer_bytes",
        "Bytes moved between the tiers.",
        {"onload": "onload_bytes", "offload": "offload_bytes"},
        "direction",
    ),
    _Family(
        "mtserve_transfer_failures",
        "Transfers that failed; their tokens count as not cached.",
        {"onload": "onload_failures", "offload": "offload_failures"},
        "direction",
    ),
    _one("mtserve_tail_write_backs", "tail_write_backs", "Offloads that ended inside a chunk."),
    _Family(
        "mtserve_offloads_refused",
        "Offloads that were put off, by reason.",
        {"quota": "offloads_refused_quota", "host_full": "offloads_refused_host_full"},
        "reason",
    ),
)

_GAUGES = (
    _one("mtserve_users", "entries", "Users of whom something is cached."),
    _one("mtserve_open_batches", "open_batches", "Batches between begin and commit or abort."),
    _one("mtserve_transfers_in_flight", "transfers_in_flight", "Transfers that are not done."),
    _one("mtserve_pending_offload_tokens", "pending_offload_tokens", "Tokens queued for the host."),
    _one("mtserve_pages", "pages_total", "Pages of the device tier."),
    _Family(
        "mtserve_pages_available",
        "Pages that a batch could have: free ones, and those of users nobody uses, clean or with unpersisted tokens.",
        {"free": "pages_free", "clean": "pages_clean", "dirty": "pages_dirty"},
        "state",
    ),
    _one("mtserve_region_pages", "region_pages_total", "Pages of the onload region."),
    _one("mtserve_region_pages_free", "region_pages_free", "Of these, pages that nobody loads into or reads."),
    _one("mtserve_slots", "slots_total", "Slots of the host tier."),
    _one("mtserve_slots_free", "slots_free", "Of these, free ones."),
    _one("mtserve_slots_largest_free", "slots_largest_free", "The largest run of adjacent free slots."),
    _one("mtserve_index_bytes", "memory_bytes", "Memory of the index."),
    _one("mtserve_host_bytes", "host_bytes", "Size of the host tier."),
    _one("mtserve_table_bytes", "table_bytes", "Size of the device tier's page table."),
)

DERIVED = frozenset({"hit_tokens", "device_hit_ratio", "total_hit_ratio", "layer_waits", "layer_wait_ns"})
"""Keys of `stats()` without a metric of their own: sums and ratios that a query computes better over an interval, and
the lists per layer, which `mtserve_layer_waits` and `mtserve_layer_wait_seconds` carry."""


class CacheCollector(Collector):
    """Metrics of any number of caches, each under a label `cache`.

    A cache that was closed or is gone is left out. Counters have the suffix `_total`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._caches: dict[str, weakref.ref[KVCache]] = {}

    def add(self, cache: KVCache, name: str) -> None:
        """Adds a cache.

        Raises:
            ConfigError: the name is taken by another cache that is still there.
        """
        with self._lock:
            there = self._caches.get(name)
            if there is not None and there() not in (None, cache):
                raise ConfigError(f"name={name!r} is the name of another cache; give each cache a name of its own")
            self._caches[name] = weakref.ref(cache)

    def remove(self, cache: KVCache) -> None:
        """Leaves a cache out from now on."""
        with self._lock:
            self._caches = {name: there for name, there in self._caches.items() if there() not in (None, cache)}

    def collect(self) -> Iterator[Metric]:
        """Reads all caches; called by the registry at each scrape."""
        stats = dict(self._read())
        for family in _COUNTERS:
            yield _filled(CounterMetricFamily(family.name, family.help, labels=_labels(family)), family, stats)
        for family in _GAUGES:
            yield _filled(GaugeMetricFamily(family.name, family.help, labels=_labels(family)), family, stats)
        yield from _layers(stats)

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are unique by their prefix, and registration must not read a cache."""
        return []

    def _read(self) -> Iterator[tuple[str, dict[str, Any]]]:
        with self._lock:
            caches = [(name, there()) for name, there in self._caches.items()]
        for name, cache in caches:
            if cache is None:
                continue
            try:
                yield name, cache.stats()
            except CacheError:  # of another process
                continue


def export(cache: KVCache, *, name: str = "default", registry: CollectorRegistry = REGISTRY) -> CacheCollector:
    """Shows a cache's statistics in a registry of prometheus-client.

    Args:
        cache: any `KVCache`; it is not kept alive.
        name: the value of the label `cache`.
        registry: prometheus-client's own by default, which `start_http_server` serves.

    Returns:
        The registry's collector of caches.

    Raises:
        ConfigError: the name is taken by another cache.
    """
    with _lock:
        collector = _collectors.get(registry)
        if collector is None:
            collector = _collectors[registry] = CacheCollector()
            registry.register(collector)
    collector.add(cache, name)
    return collector


def _labels(family: _Family) -> list[str]:
    return ["cache", family.label] if family.label else ["cache"]


def _filled(metric: Any, family: _Family, stats: Mapping[str, Mapping[str, Any]]) -> Metric:
    for name, values in stats.items():
        for label, key in family.samples.items():
            if key in values:
                metric.add_metric([name, label] if family.label else [name], values[key])
    return metric


def _layers(stats: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    waits = CounterMetricFamily(
        "mtserve_layer_waits", "Waits of batches for a layer's onload.", labels=["cache", "layer"]
    )
    seconds = CounterMetricFamily(
        "mtserve_layer_wait_seconds", "Time of batches in these waits, in seconds.", labels=["cache", "layer"]
    )
    for name, values in stats.items():
        for layer, count in enumerate(values.get("layer_waits", ())):
            waits.add_metric([name, str(layer)], count)
        for layer, nanoseconds in enumerate(values.get("layer_wait_ns", ())):
            seconds.add_metric([name, str(layer)], nanoseconds * 1e-9)
    yield waits
    yield seconds


_lock = threading.Lock()
_collectors: weakref.WeakKeyDictionary[CollectorRegistry, CacheCollector] = weakref.WeakKeyDictionary()
