"""The host itself, from the checkout that GENERATIVE_RECOMMENDERS names; without it these tests are
skipped.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtserve_plugin import CacheConfig, HierarchicalKVCache
from tests.integrations import streams

HOST = "generative_recommenders"
NORM_LEN = 128
DATASETS = ("streaming-400m", "debug", "movielens-1m", "kuairand-1k")
USER_FEATURES = {"debug": "viewer_id"}


@pytest.fixture(scope="session")
def host() -> SimpleNamespace:
    """Its modules; the import takes about ten seconds."""
    checkout = os.environ.get("GENERATIVE_RECOMMENDERS")
    if not checkout:
        pytest.skip("GENERATIVE_RECOMMENDERS does not name a checkout of meta-recsys/generative-recommenders")
    pytest.importorskip("fbgemm_gpu")
    sys.path.insert(0, checkout)
    try:
        names = {
            "common": "common",
            "configs": "dlrm_v3.configs",
            "inference": "dlrm_v3.inference.inference_modules",
            "dlrm": "modules.dlrm_hstu",
            "stu": "modules.stu",
            "dynamic_stu": "modules.dynamic_stu",
            "preprocessors": "modules.preprocessors",
        }
        modules = {key: importlib.import_module(f"{HOST}.{name}") for key, name in names.items()}
    finally:
        sys.path.remove(checkout)
    return SimpleNamespace(**modules)


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """The tensors are small; more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_model(host: SimpleNamespace) -> Callable[..., Any]:
    """A `DlrmHSTU` of a shipped configuration, smaller, with weights of trained size, and its users."""

    def make(dataset: str, seed: int = 0, is_dense: bool = False, **changes: Any) -> Any:
        config, tables = host.configs.get_hstu_configs(dataset), host.configs.get_embedding_table_config(dataset)
        small = {
            "hstu_num_heads": 2,
            "hstu_attn_linear_dim": 24,
            "hstu_attn_qk_dim": 16,
            "hstu_attn_num_layers": 3,
            "hstu_embedding_table_dim": 32,
            "hstu_preprocessor_hidden_dim": 48,
            "hstu_transducer_embedding_dim": 32,
        }
        for name, value in (small | changes).items():
            setattr(config, name, value)
        for table in tables.values():
            table.embedding_dim = config.hstu_embedding_table_dim
        if dataset == "debug":
            # As shipped, histories of these streams would never reach it.
            config.contextual_feature_to_min_uih_length = {"viewer_id": 30, "dummy_contexual": 128}
        model = host.inference.get_hstu_model(tables, config, table_device="cpu", max_hash_size=200, is_dense=is_dense)
        model.set_hammer_kernel(host.common.HammerKernel.PYTORCH)
        streams.trained_size(model, seed)
        sizes = {name: table.num_embeddings for table in tables.values() for name in table.feature_names}
        feature = USER_FEATURES.get(dataset, "user_id")
        return model, streams.Users(config, sizes, seed + 1, feature)

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
