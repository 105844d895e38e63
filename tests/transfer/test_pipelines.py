"""The pipelines through the public cache: overlap, failed copies, both strategies."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from mtserve_plugin import CacheConfig, CacheError, HierarchicalKVCache, OnloadError
from tests.cache import driver

LAYERS = 6
STRATEGIES = [("direct", "direct"), ("staged", "direct"), ("direct", "staged"), ("staged", "staged")]


def make_cache(onload: str = "direct", offload: str = "direct", **options: object) -> HierarchicalKVCache:
    config = CacheConfig(
        num_layers=LAYERS, num_heads=1, qk_dim=4, v_dim=8, dtype="float32", attn_norm_len=64, page_size=4,
        chunk_size=16, host_bytes=1 << 20, offload_quota_tokens=512, onload_strategy=onload, offload_strategy=offload,
        **{"num_pages": 16, "onload_pages": 20, **options},
    )  # fmt: skip
    cache = HierarchicalKVCache(config)
    cache.table.fill_(float("nan"))
    return cache


def keys_and_values(user: int, layer: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    position = torch.arange(first, end, dtype=torch.float32)[:, None, None]
    base = user * 1000 + layer * 100 + position
    return base + torch.arange(4) / 8, -base - torch.arange(8) / 16


def visit(cache: HierarchicalKVCache, user: int, length: int) -> int:
    """One request that stores; returns the cached length."""
    with cache.batch([user], [length], num_candidates=0) as batch:
        cached = int(batch.cached_lengths)
        for layer in range(LAYERS):
            batch.wait(layer)
            batch.append(layer, *keys_and_values(user, layer, cached, length))
    return cached


def assert_pages_hold(cache: HierarchicalKVCache, user: int, length: int) -> None:
    """Every byte of the user's cached tokens, read through the page table."""
    size = cache.config.page_size
    with cache.batch([user], [length], num_candidates=0) as batch:
        assert batch.cached_lengths.tolist() == [length]
        for layer in range(LAYERS):
            pages = cache.table[layer][batch.wait(layer).indices.long()]
            k = pages[:, : size * 4].reshape(-1, 1, 4)[:length]
            v = pages[:, size * 4 :].reshape(-1, 1, 8)[:length]
            want_k, want_v = keys_and_values(user, layer, 0, length)
            assert torch.equal(k, want_k)
            assert torch.equal(v, want_v)


def push_to_host(cache: HierarchicalKVCache, user: int, length: int) -> None:
    visit(cache, user, length)
    cache.flush()
    visit(cache, user + 500, cache.config.num_pages * cache.config.page_size)  # takes every page
    cache.evict([user + 500])
    cache.drain()
    assert cache.lengths(user) == {"committed": length, "device": 0, "persisted": length}


@pytest.mark.parametrize(("onload", "offload"), STRATEGIES)
@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 33, 60, 64])
def test_a_user_survives_the_trip_to_the_host_and_back(onload: str, offload: str, length: int) -> None:
    with make_cache(onload, offload) as cache:
        push_to_host(cache, 7, length)
        assert_pages_hold(cache, 7, length)
        assert visit(cache, 7, length + 3 if length < 60 else length) == length
        cache.check()


@pytest.mark.parametrize(("onload", "offload"), STRATEGIES)
def test_a_tail_on_the_host_grows_in_place_and_into_larger_slots(onload: str, offload: str) -> None:
    with make_cache(onload, offload) as cache:
        for length in (2, 3, 5, 9, 14, 16, 23, 40):
            push_to_host(cache, 9, length)
        assert_pages_hold(cache, 9, 40)


@pytest.mark.parametrize("onload", ["direct", "staged"])
def test_the_first_layer_is_served_while_later_layers_are_still_copied(onload: str) -> None:
    with make_cache(onload) as cache:
        push_to_host(cache, 1, 12)
        cache._engine.inject_faults(delay_us=30_000)  # per copy: 6 layers take 180 ms
        started = time.perf_counter()
        with cache.batch([1], [12], num_candidates=0) as batch:
            begun = time.perf_counter() - started
            batch.wait(0)
            first = time.perf_counter() - started
            batch.wait(LAYERS - 1)
            last = time.perf_counter() - started
        assert begun < 0.02 < first < last - 0.09


@pytest.mark.parametrize("onload", ["direct", "staged"])
@pytest.mark.parametrize("copy", [1, 3, LAYERS])
def test_a_failed_onload_is_an_error_at_wait_and_a_miss_afterwards(onload: str, copy: int) -> None:
    with make_cache(onload) as cache:
        push_to_host(cache, 1, 12)
        cache._engine.inject_faults(onload_copy=copy)
        with pytest.raises(OnloadError, match="layer"):
            visit(cache, 1, 14)
        cache.drain()
        assert cache.stats()["onload_failures"] == 1
        assert cache.lengths(1) is None
        assert visit(cache, 1, 14) == 0
        assert_pages_hold(cache, 1, 14)
        cache.check()


@pytest.mark.parametrize("offload", ["direct", "staged"])
def test_a_failed_offload_is_not_published_and_tried_again_later(offload: str) -> None:
    with make_cache(offload=offload) as cache:
        cache._engine.inject_faults(offload_copy=2)
        visit(cache, 1, 20)
        cache.drain()
        assert cache.stats()["offload_failures"] == 1
        assert cache.lengths(1) == {"committed": 20, "device": 20, "persisted": 0}
        visit(cache, 1, 21)
        cache.flush()
        assert cache.lengths(1) == {"committed": 21, "device": 21, "persisted": 21}
        push_to_host(cache, 1, 21)
        assert_pages_hold(cache, 1, 21)


def test_prefetch_brings_a_user_to_the_device_before_the_request() -> None:
    with make_cache() as cache:
        push_to_host(cache, 1, 30)
        cache.prefetch([1, 424242])
        cache.drain()
        assert cache.lengths(1) == {"committed": 30, "device": 30, "persisted": 30}
        before = cache.stats()["onloads"]
        assert_pages_hold(cache, 1, 30)
        assert cache.stats()["onloads"] == before


def test_close_drains_and_a_later_begin_is_refused() -> None:
    cache = make_cache()
    batch = cache.begin([1], [20], num_candidates=0)
    cache.close()
    cache.close()
    cache.abort(batch)
    with pytest.raises(CacheError, match="closed"):
        cache.begin([1], [20], num_candidates=0)


@pytest.mark.parametrize("strategy", ["direct", "staged"])
def test_the_timeline_tells_what_the_streams_did(strategy):
    pages = 20 if strategy == "staged" else 0
    options = {"onload_strategy": strategy, "offload_strategy": strategy, "onload_pages": pages}
    with HierarchicalKVCache(driver.tiny_config(num_pages=40, chunks=8, **options)) as cache:
        begin = time.perf_counter()
        with cache.timeline() as spans:
            driver.visit(cache, (1, 33))
            cache.flush()
            driver.push_out(cache)
            driver.visit(cache, (1, 35))
            assert spans == []
        end = time.perf_counter()
        assert {"onload", "offload"} <= {span.stream for span in spans}
        assert ("scatter" in {span.stream for span in spans}) == (strategy == "staged")
        assert all(begin <= span.begin <= span.end <= end for span in spans)
        for stream in ("onload", "offload"):
            mine = [span for span in spans if span.stream == stream]
            assert all(a.end <= b.begin for a, b in itertools.pairwise(mine)), "a stream runs one thing at a time"
        driver.visit(cache, (1, 40))
        with cache.timeline(limit=1) as few:
            driver.visit(cache, (2, 33))
            cache.flush()
        assert len(few) == 1
