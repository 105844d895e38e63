"""Random traffic on the whole cache, with real bytes and real threads: every cached byte is compared with what was
written, every score with a float64 computation from the whole history.
"""

import os
import random
import threading

import pytest
import torch

from mtserve_plugin import HierarchicalKVCache, NoCache
from tests.cache.driver import Request, Users, serve, tiny_config, traffic

STEPS = 3000 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 110

SHAPES = {
    "device-only": {"num_pages": 30},
    "tight": {"num_pages": 24, "chunks": 12},
    "paper-policy": {"num_pages": 24, "chunks": 12, "tail_write_back": False},
    "no-room-at-all": {"num_pages": 3, "chunks": 1},
    "ample": {"num_pages": 400, "chunks": 60, "offload_quota_tokens": 100_000},
    "staged": {
        "num_pages": 24,
        "onload_pages": 12,
        "chunks": 12,
        "onload_strategy": "staged",
        "offload_strategy": "staged",
    },
    "read-region": {
        "num_pages": 16,
        "onload_pages": 12,
        "chunks": 12,
        "onload_strategy": "staged",
        "read_onload_region": True,
    },
    "staged-offload": {"num_pages": 24, "chunks": 30, "offload_strategy": "staged"},
    # E10: unequal dims, one head, nothing a power of two, 2-byte elements, a chunk of a single slot.
    "odd": {
        "num_pages": 24,
        "chunks": 12,
        "num_heads": 1,
        "qk_dim": 3,
        "v_dim": 5,
        "dtype": "bfloat16",
        "page_size": 8,
        "chunk_size": 24,
    },
    "window": {"num_pages": 24, "chunks": 12, "max_attn_len": 9, "attn_scale": 0.7},
}


def build(shape):
    cache = HierarchicalKVCache(tiny_config(**SHAPES[shape]))
    cache.table.fill_(float("nan"))
    return cache


def everything_is_free(cache):
    cache.drain()
    cache.check()
    stats = cache.stats()
    assert stats["open_batches"] == stats["transfers_in_flight"] == stats["pending_offload_tokens"] == 0
    cache.clear()
    stats = cache.stats()
    assert stats["entries"] == 0
    assert stats["pages_free"] == stats["pages_total"]
    assert stats["slots_free"] == stats["slots_total"]
    assert stats["region_pages_free"] == stats["region_pages_total"]


@pytest.mark.parametrize(
    ("shape", "context"),
    [*((shape, 0) for shape in SHAPES), ("device-only", 3), ("tight", 3), ("staged", 5), ("read-region", 2)],
)
def test_every_byte_and_score_is_right(shape, context):
    rng = random.Random(f"{shape}{context}")
    with build(shape) as cache:
        users = Users(faithful=range(4), edited=range(4, 7), longest=70)
        served, _ = traffic(cache, users, rng, STEPS, context=context, versions=["a", "b"])
        stats = cache.stats()
        assert served > STEPS * 0.8
        assert stats["stored_tokens"] > 0 or shape == "no-room-at-all"
        assert 0 <= stats["hit_tokens"] <= stats["history_tokens"]
        if shape in ("tight", "staged", "read-region"):
            assert stats["host_hit_tokens"] > 0
            assert stats["device_hit_tokens"] > 0
        assert (stats["rows_from_region"] > 0) == (shape == "read-region")
        everything_is_free(cache)


@pytest.mark.parametrize("shape", ["tight", "staged", "read-region"])
def test_a_failed_copy_never_reaches_a_score(shape):
    rng = random.Random(shape)
    with build(shape) as cache:
        users = Users(faithful=range(4), edited=range(4, 6), longest=70)
        traffic(cache, users, rng, 2 * STEPS, faults=True)
        cache._engine.inject_faults()
        stats = cache.stats()
        assert stats["onload_failures"] + stats["offload_failures"] > 0
        traffic(cache, users, rng, STEPS // 4)
        everything_is_free(cache)


@pytest.mark.parametrize("shape", ["tight", "staged", "read-region", "paper-policy"])
def test_threads_share_a_cache(shape):
    errors = []
    with build(shape) as cache:
        cache._engine.inject_faults(delay_us=200)
        users = Users(faithful=range(4), edited=range(4, 7), longest=60)

        def work(seed):
            try:
                traffic(cache, users, random.Random(seed), STEPS, versions=["a", "a", "b"])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(f"{shape}{i}",)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        everything_is_free(cache)


def test_a_committed_history_scores_like_no_cache():
    config = tiny_config(chunks=12)
    with HierarchicalKVCache(config) as cache:
        cache.table.fill_(float("nan"))
        outputs = []
        for _ in range(2):
            requests = [Request(user, range(user * 100, user * 100 + 30 + user), 3) for user in range(3)]
            batch = serve(cache, requests)
            outputs.append(batch.cached_lengths.tolist())
        assert outputs == [[0, 0, 0], [30, 31, 32]]
        serve(NoCache(config), requests)
        assert torch.isnan(cache.table).any(), "the test writes over the whole table and would not see a stray read"
