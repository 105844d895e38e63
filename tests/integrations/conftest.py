"""The host's modules replaced by doubles, `DlrmHSTU` included, and models and caches to attach."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mtserve_plugin import CacheConfig, HierarchicalKVCache
from tests import doubles
from tests.doubles.common import HammerKernel
from tests.integrations import dlrm_double, streams

NORM_LEN = 128
ROWS = 200


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """The tensors are small; more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def host() -> Iterator[None]:
    with doubles.installed():
        sys.modules[f"{doubles.HOST}.modules.dlrm_hstu"] = dlrm_double
        yield


@pytest.fixture
def make_model() -> Callable[..., Any]:
    def make(seed: int = 0, **changes: Any) -> dlrm_double.DlrmHSTU:
        model = dlrm_double.DlrmHSTU(dlrm_double.DlrmHSTUConfig(**changes), ROWS)
        model.set_hammer_kernel(HammerKernel.PYTORCH)
        return streams.trained_size(model, seed).eval()

    return make


@pytest.fixture
def make_cache() -> Iterator[Callable[..., HierarchicalKVCache]]:
    """Caches that fit a model, with poison in their pages; closed and checked at the end."""
    caches = []

    def make(model: torch.nn.Module, **sizes: Any) -> HierarchicalKVCache:
        options = {"attn_norm_len": NORM_LEN, "page_size": 4, "chunk_size": 16, "num_pages": 400}
        cache = HierarchicalKVCache(CacheConfig.for_model(model, **(options | sizes)))
        cache.table.fill_(float("nan"))
        caches.append(cache)
        return cache

    yield make
    for cache in caches:
        cache.flush()
        cache.check()
        cache.close()


@pytest.fixture
def make_users() -> Callable[..., streams.Users]:
    def make(model: Any, seed: int = 0) -> streams.Users:
        embedded = ("item_id", "candidate_id", "category_id", "candidate_category_id", "user_id", "cities")
        return streams.Users(model._hstu_configs, dict.fromkeys(embedded, ROWS), seed)

    return make
