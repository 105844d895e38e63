"""A cache named, sized and attached by gin bindings."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest
import torch

from mtserve_plugin import CacheConfig, HierarchicalKVCache, NoCache, detach
from mtserve_plugin.errors import AttachError, ConfigError, MissingDependencyError
from mtserve_plugin.integrations import stats
from tests.integrations import dlrm_double
from tests.integrations.conftest import NORM_LEN
from tests.integrations.streams import reference, relative_error, run_stream

gin = pytest.importorskip("gin", reason="gin-config is not installed (the extra 'gin')")

TEXT = f"""
import mtserve_plugin.integrations.gin

attach_cache.cache = @HierarchicalKVCache
CacheConfig.attn_norm_len = {NORM_LEN}
CacheConfig.page_size = 4
CacheConfig.chunk_size = 16
CacheConfig.num_pages = 300
CacheConfig.host_bytes = %host_bytes
host_bytes = 1048576
attach.user_feature = "user_id"
attach.positions = "append_stable"
attach.version = "1"
"""

pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor")


@pytest.fixture(autouse=True)
def empty_gin():
    gin.clear_config()
    yield
    gin.clear_config()


@pytest.fixture
def attach_cache():
    from mtserve_plugin.integrations.gin import attach_cache

    caches = []

    def attach(*arguments, **options):
        caches.append(attach_cache(*arguments, **options))
        return caches[-1]

    yield attach
    for cache in caches:
        cache.close()


def of_state(model):
    return vars(model)["_mtserve_state"].options


def test_one_line_and_one_block(make_model, make_users, attach_cache):
    model = make_model(1)
    recomputing, users = reference(model, NORM_LEN), make_users(model, 2)
    gin.parse_config(TEXT)
    cache = attach_cache(model)
    assert type(cache) is HierarchicalKVCache
    assert type(cache.config) is CacheConfig
    sizes = {"page_size": 4, "chunk_size": 16, "num_pages": 300, "host_bytes": 1 << 20}
    assert cache.config == CacheConfig.for_model(make_model(), attn_norm_len=NORM_LEN, **sizes)
    assert of_state(model).cache is cache
    assert run_stream(model, recomputing, users, batches=20, seed=3) <= 1e-6
    assert cache.stats()["total_hit_ratio"] > 0.1
    operative = gin.operative_config_str()
    for line in ("CacheConfig.num_pages = 300", "attach.version = '1'", "attach_cache.cache = @HierarchicalKVCache"):
        assert line in operative
    # Without a cache by one more line.
    detach(model)
    gin.parse_config("attach_cache.cache = @NoCache")
    without = attach_cache(model)
    assert type(without) is NoCache
    assert without.config == cache.config
    assert run_stream(model, recomputing, users, batches=5, seed=4) <= 1e-6


def test_the_dtype_and_the_device_are_those_of_the_model(make_model, attach_cache):
    model = make_model().bfloat16()
    gin.parse_config(TEXT + "CacheConfig.page_size = 8\n")
    cache = attach_cache(model)
    assert (cache.config.dtype, str(cache.device)) == ("bfloat16", "cpu")
    gin.parse_config('CacheConfig.dtype = "float32"')
    with pytest.raises(AttachError, match="dtype='float32', the model has 'bfloat16'"):
        attach_cache(detach(model))
    gin.parse_config('CacheConfig.dtype = "bfloat16"\nNoCache.device = "meta"')
    with pytest.raises(AttachError, match="on cpu, the cache is on meta"):
        attach_cache(model, "NoCache")
    from mtserve_plugin.integrations.gin import no_cache

    gin.clear_config()
    gin.parse_config(f"CacheConfig.attn_norm_len = {NORM_LEN}")
    assert str(no_cache(make_model().to("meta")).device) == "meta"


def test_options_of_attach(make_model, make_users, attach_cache):
    model = make_model(5)
    text = TEXT.replace('attach.positions = "append_stable"', "attach.refresh_after_tokens = 4")
    gin.parse_config(text + 'attach.approximate = ["positions"]\nattach.content_check = False\n')
    attach_cache(model)
    assert not of_state(model).content_check
    users = make_users(model)
    users.add(1)
    for grow in (20, 3, 1):
        users.grow(1, grow)
        model(*users.request([1], [2]))
    assert stats(model)["refreshed_by_tokens"] == 1


@pytest.mark.parametrize("name", ["HierarchicalKVCache", "small/mtserve_plugin.HierarchicalKVCache", "NoCache"])
@pytest.mark.parametrize("where", ["kv_cache", "string", "reference"])
def test_a_name_under_a_scope_has_its_own_sizes(make_model, attach_cache, name, where):
    model = make_model()
    gin.parse_config(TEXT.replace("attach_cache.cache = @HierarchicalKVCache", "small/CacheConfig.num_pages = 50"))
    if where == "kv_cache":
        # As the patch adds it: a field that the model carries along.
        added = [("kv_cache", "str | None", dataclasses.field(default=None))]
        config = dataclasses.make_dataclass("Patched", added, bases=(dlrm_double.DlrmHSTUConfig,))
        model._hstu_configs = config(kv_cache=name)
        assert model._hstu_configs == config(kv_cache=name)
    else:
        gin.parse_config(f"attach_cache.cache = '{name}'" if where == "string" else f"attach_cache.cache = @{name}")
    cache = attach_cache(torch.nn.ModuleList([model]))
    assert type(cache) is (NoCache if name == "NoCache" else HierarchicalKVCache)
    assert cache.config.num_pages == (50 if "small" in name else 300)
    assert cache.config.host_bytes == 1 << 20


def test_bindings_go_before_the_model_s_own_word(make_model, attach_cache):
    model = make_model()
    model._hstu_configs.kv_cache = "HierarchicalKVCache"
    gin.parse_config(TEXT.replace("@HierarchicalKVCache", "@NoCache"))
    assert type(attach_cache(model)) is NoCache
    assert type(attach_cache(detach(model), cache="HierarchicalKVCache")) is HierarchicalKVCache


def test_one_cache_for_two_models(make_model, make_users, attach_cache):
    one, two = make_model(6), make_model(6)
    geometry = dataclasses.asdict(CacheConfig.for_model(one, attn_norm_len=NORM_LEN, page_size=4, chunk_size=16))
    gin.parse_config(TEXT.replace("@HierarchicalKVCache", "@shared/gin.singleton()"))
    gin.parse_config("shared/gin.singleton.constructor = @HierarchicalKVCache")
    gin.parse_config("HierarchicalKVCache.config = @CacheConfig()")
    gin.parse_config([f"CacheConfig.{name} = {value!r}" for name, value in (geometry | {"num_pages": 99}).items()])
    cache = attach_cache(one)
    assert attach_cache(two) is cache
    request = make_users(one)
    request.add(1)
    request.grow(1, 30)
    request = request.request([1], [3])
    assert relative_error(two(*request)[0], one(*request)[0]) <= 1e-6
    assert cache.stats()["hit_tokens"] == 30
    # A cache that was there before stays open when attach refuses.
    with pytest.raises(AttachError, match="detach it first"):
        attach_cache(one)
    cache.begin([1], [30], num_candidates=1).__exit__(ValueError, None, None)


def test_a_function_of_one_s_own(make_model, attach_cache):
    model = make_model()
    config = CacheConfig.for_model(model, attn_norm_len=NORM_LEN)
    gin.parse_config(TEXT)
    made = NoCache(config)
    assert attach_cache(model, cache=lambda model: made) is made
    with pytest.raises(ConfigError, match="made a CacheConfig"):
        attach_cache(detach(model), cache=lambda model: config)


REFUSED = {
    "page_size": ("CacheConfig.page_size = 3", ConfigError, "page_size=3 x 4 bytes"),
    "num_pages": ('CacheConfig.num_pages = "many"', ConfigError, "num_pages='many' must be an integer"),
    "dtype": ('CacheConfig.dtype = "float31"', ConfigError, "dtype='float31' is not supported"),
    "geometry": ("CacheConfig.num_heads = 3", AttachError, "num_heads=3, the model has 2"),
    "user_feature": ("attach.user_feature = None", AttachError, "attach.*user_feature='user_id'"),
    "positions": ('attach.positions = "stable"', AttachError, "positions='stable' is unknown"),
    "approximate": ('attach.approximate = ["divisor"]', AttachError, "approximate='divisor'"),
    "refresh": ("attach.refresh_after_tokens = 3", AttachError, "refresh_after_tokens=3 bounds"),
    "evaluated": ("attach_cache.cache = @HierarchicalKVCache()", ConfigError, r"instead of @HierarchicalKVCache\(\)"),
    "number": ("attach_cache.cache = 7", ConfigError, "cache=7 is no cache"),
    "name": ('attach_cache.cache = "Fast"', ConfigError, "cache='Fast' names no configurable"),
    "none": ("attach_cache.cache = None", ConfigError, "attach_cache.cache: no cache is named.*kv_cache="),
    "device": ('HierarchicalKVCache.device = "meta"', ConfigError, "device='meta' is not served"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_values_are_refused(make_model, attach_cache, monkeypatch, name):
    line, error, text = REFUSED[name]
    model = make_model()
    types_before = [type(module) for module in model.modules()]
    open_caches = []
    init, close = HierarchicalKVCache.__init__, HierarchicalKVCache.close
    monkeypatch.setattr(
        HierarchicalKVCache, "__init__", lambda self, *a, **b: (init(self, *a, **b), open_caches.append(self))[0]
    )
    monkeypatch.setattr(
        HierarchicalKVCache, "close", lambda self: (close(self), self in open_caches and open_caches.remove(self))[0]
    )
    gin.parse_config(TEXT + line)
    with pytest.raises(error, match=text):
        attach_cache(model)
    assert [type(module) for module in model.modules()] == types_before
    assert open_caches == []


def test_a_missing_option_is_named(make_model, attach_cache):
    gin.parse_config(TEXT.replace("CacheConfig.attn_norm_len", "unused"))
    with pytest.raises(ConfigError, match="option 'attn_norm_len' is missing"):
        attach_cache(make_model())


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("CacheConfig.num_pagez = 3", "num_pagez"),
        ("attach.cash = 3", "cash"),
        ("attach.cache = @NoCache", "cache"),
        ("attach_cache.model = 3", "model"),
        ("attach_cache.cache = @FastCache", "FastCache"),
        ("mtserve_plugin.detach.model = 3", "mtserve_plugin.detach"),
    ],
)
def test_unknown_names_are_refused_where_they_stand(line, text):
    with pytest.raises(ValueError, match=text):
        gin.parse_config(TEXT + line)


def test_without_gin_config_the_command_is_named(monkeypatch):
    import mtserve_plugin.integrations.gin as bindings

    spec = importlib.util.spec_from_file_location("bindings_again", bindings.__file__)
    for found, text in ((None, "gin-config is not installed"), (types.ModuleType("gin"), "is not gin-config")):
        if found is not None:
            found.__path__ = ["/elsewhere/gin"]
        monkeypatch.setitem(sys.modules, "gin", found)
        with pytest.raises(MissingDependencyError, match=text + r".*pip install 'mtserve-plugin\[gin\]'"):
            spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_the_guide_s_block_is_read():
    guide = (Path(__file__).parents[2] / "docs" / "integration.md").read_text()
    (block,) = re.findall(r"```gin\n(import mtserve_plugin.*?)```", guide, re.DOTALL)
    gin.parse_config(block)
    assert gin.query_parameter("CacheConfig.host_bytes") == 256 << 20
    assert gin.query_parameter("attach_cache.cache").selector == "HierarchicalKVCache"
