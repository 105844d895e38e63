"""Metrics: every statistic is exported, names follow the conventions, the Grafana board asks for what exists."""

from __future__ import annotations

import gc
import json
import re
from pathlib import Path

import pytest

from mtserve_plugin import ConfigError, HierarchicalKVCache, NoCache
from tests.cache.driver import tiny_config, visit

prometheus = pytest.importorskip("prometheus_client", reason="prometheus-client is not installed (the extra 'metrics')")

from prometheus_client import CollectorRegistry, generate_latest  # noqa: E402

from mtserve_plugin import metrics  # noqa: E402

BOARD = Path(__file__).parents[1] / "docs" / "grafana.json"


def served(**options):
    cache = HierarchicalKVCache(tiny_config(num_pages=40, chunks=8, **options))
    visit(cache, (1, 20), (2, 9))
    visit(cache, (1, 23))
    cache.flush()
    return cache


def test_every_statistic_has_its_metric():
    registry = CollectorRegistry()
    with served() as cache:
        metrics.export(cache, name="a", registry=registry)
        keys = [key for family in (*metrics._COUNTERS, *metrics._GAUGES) for key in family.samples.values()]
        assert sorted(keys) == sorted(set(cache.stats()) - metrics.DERIVED)
        stats = cache.stats()
        for family in (*metrics._COUNTERS, *metrics._GAUGES):
            suffix = "_total" if family in metrics._COUNTERS else ""
            for label, key in family.samples.items():
                labels = {"cache": "a"} | ({family.label: label} if family.label else {})
                assert registry.get_sample_value(family.name + suffix, labels) == stats[key], key
        assert registry.get_sample_value("mtserve_requests_total", {"cache": "a"}) == 3
        hits = {"cache": "a", "tier": "device"}
        assert registry.get_sample_value("mtserve_hit_tokens_total", hits) == 20
        for layer in range(cache.config.num_layers):
            labels = {"cache": "a", "layer": str(layer)}
            assert registry.get_sample_value("mtserve_layer_waits_total", labels) == stats["layer_waits"][layer]
            seconds = registry.get_sample_value("mtserve_layer_wait_seconds_total", labels)
            assert seconds == pytest.approx(stats["layer_wait_ns"][layer] * 1e-9)


def test_names_and_texts_follow_the_conventions():
    registry = CollectorRegistry()
    with served() as cache:
        metrics.export(cache, registry=registry)
        text = generate_latest(registry).decode()
    families = re.findall(r"# HELP (\S+) (.+)", text)
    assert len(families) == len(metrics._COUNTERS) + len(metrics._GAUGES) + 2
    for name, words in families:
        assert re.fullmatch(r"mtserve_[a-z_]+", name)
        assert words.endswith(".")


def test_caches_come_and_go():
    registry = CollectorRegistry()
    first, second = served(), served()
    collector = metrics.export(first, name="first", registry=registry)
    assert metrics.export(second, name="second", registry=registry) is collector
    metrics.export(second, name="second", registry=registry)
    with pytest.raises(ConfigError, match="name='first'"):
        metrics.export(second, name="first", registry=registry)
    without = NoCache(tiny_config())
    metrics.export(without, name="none", registry=registry)

    def names():
        return set(re.findall(r'mtserve_requests_total\{cache="(\w+)"\}', generate_latest(registry).decode()))

    assert names() == {"first", "second", "none"}
    collector.remove(second)
    assert names() == {"first", "none"}
    first.close()
    del first
    gc.collect()
    assert names() == {"none"}
    metrics.export(second, name="first", registry=registry)
    assert names() == {"first", "none"}


def test_the_board_asks_for_what_exists():
    registry = CollectorRegistry()
    with served() as cache:
        metrics.export(cache, registry=registry)
        text = generate_latest(registry).decode()
    samples = {match[0]: set(re.findall(r'(\w+)="', match[1])) for match in re.findall(r"^(\w+)\{(.*)\}", text, re.M)}
    board = json.loads(BOARD.read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in panels}) == len(panels) >= 8
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    for expression in asked:
        used = re.findall(r"(mtserve_\w+)", expression)
        assert used
        assert set(used) <= set(samples), expression
        for labels in re.findall(r"by \(([\w, ]+)\)", expression):
            assert set(labels.split(", ")) <= set().union(*(samples[name] for name in used)), expression
    # What an operator has to see: each of these is on the board.
    for name in ("mtserve_lost_tokens_total", "mtserve_transfer_failures_total", "mtserve_layer_wait_seconds_total"):
        assert any(name in expression for expression in asked)
