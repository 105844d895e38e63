"""The host with the patch that lets a model's configuration name its cache, attached by gin bindings."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtserve_plugin import HierarchicalKVCache, NoCache, detach
from tests.integrations.streams import reference, run_stream
from tests.upstream.conftest import HOST, NORM_LEN

gin = pytest.importorskip("gin", reason="gin-config is not installed (the extra 'gin')")

ROOT = Path(__file__).resolve().parents[2]
MODULES = (f"{HOST}.modules.hstu_transducer", f"{HOST}.modules.dlrm_hstu")
TEXT = f"""
import mtserve_plugin.integrations.gin

CacheConfig.attn_norm_len = {NORM_LEN}
CacheConfig.page_size = 4
CacheConfig.chunk_size = 16
small/CacheConfig.num_pages = 90
small/CacheConfig.host_bytes = 1048576
attach.user_feature = "user_id"
attach.positions = "append_stable"
"""

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def patched(host, tmp_path, monkeypatch):
    """`modules.dlrm_hstu` of a patched clone, in the place of the host's own for one test."""
    checkout = tmp_path / "checkout"
    named = os.environ["GENERATIVE_RECOMMENDERS"]
    subprocess.run(["git", "clone", "-q", "--shared", named, str(checkout)], check=True)
    script = [sys.executable, str(ROOT / "patches" / "apply.py"), str(checkout), "--only", "stu-hook"]
    subprocess.run(script, check=True, capture_output=True)
    for name in MODULES:
        spec = importlib.util.spec_from_file_location(name, checkout / f"{name.replace('.', '/')}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
    monkeypatch.setattr(host.inference, "DlrmHSTU", module.DlrmHSTU)
    monkeypatch.setattr(host.configs, "DlrmHSTUConfig", module.DlrmHSTUConfig)
    gin.clear_config()
    yield module
    gin.clear_config()


def test_the_configuration_names_the_cache(patched, make_model):
    model, users = make_model("streaming-400m", 1, kv_cache="small/HierarchicalKVCache")
    assert "kv_cache" in [field.name for field in dataclasses.fields(model._hstu_configs)]
    assert model._hstu_transducer.stu_hook is None
    recomputing = reference(model, NORM_LEN)
    gin.parse_config(TEXT)
    from mtserve_plugin.integrations.gin import attach_cache

    with attach_cache(model) as cache:
        assert type(cache) is HierarchicalKVCache
        assert (cache.config.num_pages, cache.config.host_bytes) == (90, 1 << 20)
        assert run_stream(model, recomputing, users, batches=60, seed=2) <= 1e-6
        assert cache.stats()["total_hit_ratio"] > 0.2
    gin.parse_config("attach_cache.cache = @NoCache")
    assert type(attach_cache(detach(model))) is NoCache
    assert run_stream(model, recomputing, users, batches=5, seed=3) <= 1e-6
