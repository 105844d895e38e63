"""The whole cache on a CUDA device: scores with it are those without it, whatever the copies do."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from mtserve_plugin import CacheConfig, CacheError, HierarchicalKVCache, NoCache

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
stack = pytest.importorskip("stack", reason="benchmarks/ is not beside tests/")

TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}


def config(**options):
    sizes = {"num_layers": 3, "num_heads": 2, "qk_dim": 64, "v_dim": 64, "attn_norm_len": 4096, "chunk_size": 128}
    made = CacheConfig(**(sizes | {"dtype": "float32", "num_pages": 40, "offload_quota_tokens": 4096} | options))
    return made.replace(host_bytes=60 * made.chunk_bytes)


def onload(strategy):
    region = {"onload_pages": 24} if strategy == "staged" else {}
    return {"onload_strategy": strategy, **region}


def visits(seed, rounds):
    """Users whose histories grow, and batches of them."""
    rng = np.random.default_rng(seed)
    histories = {user: rng.integers(0, 500, 700) for user in range(12)}
    lengths = dict.fromkeys(histories, 0)
    for _ in range(rounds):
        users = rng.choice(12, size=rng.integers(1, 4), replace=False)
        for user in users:
            lengths[user] = min(lengths[user] + int(rng.integers(1, 60)), 400)
        yield list(users), [histories[user][: lengths[user]] for user in users], rng.integers(0, 500, (len(users), 6))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    "options",
    [
        onload("direct"),
        onload("kernel"),
        onload("staged"),
        onload("staged") | {"read_onload_region": True},
        onload("staged") | {"offload_strategy": "staged"},
    ],
    ids=lambda o: "-".join(map(str, o.values())),
)
def test_scores_are_those_of_a_recompute(options, dtype):
    sizes = config(dtype=dtype, **options)
    model = stack.Stack(sizes, 500, "cuda")
    nothing = NoCache(sizes, "cuda")
    with HierarchicalKVCache(sizes, "cuda") as cache:
        cache.table.fill_(float("nan"))
        for users, histories, candidates in visits(1, 60):
            found = model(cache, users, histories, candidates)
            want = model(nothing, users, histories, candidates)
            assert float((found - want).abs().max() / want.abs().max()) <= TOLERANCE[dtype]
        cache.drain()
        cache.check()
        stats = cache.stats()
        assert stats["host_hit_tokens"] > 0
        assert stats["device_hit_tokens"] > 0
        assert stats["onload_failures"] == stats["offload_failures"] == 0


def test_a_stream_of_ones_own():
    sizes = config()
    model = stack.Stack(sizes, 500, "cuda")
    nothing = NoCache(sizes, "cuda")
    with HierarchicalKVCache(sizes, "cuda") as cache, torch.cuda.stream(torch.cuda.Stream()):
        for users, histories, candidates in visits(2, 30):
            found = model(cache, users, histories, candidates)
            want = model(nothing, users, histories, candidates)
            assert float((found - want).abs().max() / want.abs().max()) <= TOLERANCE["float32"]


def test_several_devices():
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    with HierarchicalKVCache(config(), "cuda:0") as first, HierarchicalKVCache(config(), "cuda:1") as second:
        for cache in (first, second):
            model = stack.Stack(cache.config, 500, cache.device)
            with torch.cuda.device(cache.device):
                for users, histories, candidates in visits(3, 10):
                    assert model(cache, users, histories, candidates).device == cache.device


def test_a_device_that_does_not_exist():
    with pytest.raises(CacheError):
        HierarchicalKVCache(config(), f"cuda:{torch.cuda.device_count()}")
