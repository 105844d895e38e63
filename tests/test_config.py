"""CacheConfig: what follows from it, and what it refuses (refusals by option: scenario E5)."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtserve_plugin import CacheConfig
from mtserve_plugin.engine import index_config
from mtserve_plugin.errors import CacheError, ConfigError


def paper(**changes):
    """Appendix C of the paper."""
    sizes = {"num_layers": 8, "num_heads": 4, "qk_dim": 128, "v_dim": 128, "attn_norm_len": 20_480}
    return CacheConfig(**(sizes | {"onload_pages": 10_008, "host_bytes": 64 << 30} | changes))


def test_the_papers_sizes():
    config = paper()
    assert (config.page_size, config.chunk_size, config.num_pages) == (32, 1024, 40_960)
    assert config.token_bytes == 16 * 1024
    assert config.chunk_bytes == 16 << 20
    assert config.chunk_bytes // config.num_layers == 2 << 20  # one layer of a chunk: one copy
    assert config.num_chunks == 4096
    assert config.slot_tokens == 128
    assert config.table_shape == (8, 50_968, 32 * 2 * 4 * 128)
    layers, pages, elements = config.table_shape
    assert layers * pages * elements * config.element_size == 25_484 << 20
    assert config.scale == pytest.approx(128**-0.5)
    assert paper(attn_scale=0.25).scale == 0.25
    assert config.torch_dtype == torch.bfloat16


def test_the_same_options_everywhere():
    config = paper(busy_wait_ms=7, tail_write_back=False)
    assert CacheConfig.from_dict(dataclasses.asdict(config)) == config
    assert config.replace(num_pages=9).num_pages == 9
    assert config.replace() == config
    assert hash(config) == hash(paper(busy_wait_ms=7, tail_write_back=False))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_pages = 3
    with pytest.raises(ConfigError, match="chunk_size"):
        config.replace(chunk_size=100)
    with pytest.raises(ConfigError, match="unknown option 'pages'"):
        config.replace(pages=100)


def test_errors_are_value_errors_of_the_package():
    with pytest.raises(ValueError, match="num_heads"):
        paper(num_heads=0)
    assert issubclass(ConfigError, CacheError)


@given(
    pages_per_chunk=st.integers(1, 200),
    page=st.integers(1, 40),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    chunks=st.integers(0, 5),
    heads=st.integers(1, 5),
    qk=st.integers(1, 9),
    v=st.integers(1, 9),
)
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_slots_and_chunks_fit_each_other(pages_per_chunk, page, dtype, chunks, heads, qk, v):
    page_size = page * 8
    sizes = {"num_layers": 3, "num_heads": heads, "qk_dim": qk, "v_dim": v, "dtype": dtype, "attn_norm_len": 9}
    config = CacheConfig(
        **sizes, page_size=page_size, chunk_size=page_size * pages_per_chunk, num_pages=5, offload_quota_tokens=10**6
    )
    config = config.replace(host_bytes=chunks * config.chunk_bytes)
    slot, chunk = config.slot_tokens, config.chunk_size
    assert slot % page_size == 0
    assert chunk % slot == 0
    per_chunk = chunk // slot
    assert per_chunk & (per_chunk - 1) == 0, "buddies need a power of two"
    assert config.num_chunks == chunks
    assert config.page_elements * config.element_size % 16 == 0
    assert config.token_bytes * page_size == config.page_elements * 3 * config.element_size
    native = index_config(config)
    assert (native.page_size, native.chunk_tokens, native.slot_tokens) == (page_size, chunk, slot)
    assert (native.num_pages, native.num_chunks) == (5, chunks)


def test_a_host_tier_that_is_no_multiple_of_a_chunk_is_rounded_down():
    config = paper()
    assert paper(host_bytes=3 * config.chunk_bytes + 5).num_chunks == 3
    assert paper(host_bytes=0).num_chunks == 0
