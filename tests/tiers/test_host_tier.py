"""The host tier's memory: of the size asked for, resident before serving starts, gone in the end."""

import gc

from mtserve_plugin import HierarchicalKVCache
from tests.cache.driver import push_out, tiny_config, visit


def resident_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS:"))


def test_size_and_residency():
    config = tiny_config(qk_dim=256, v_dim=256, chunk_size=64, chunks=256)
    assert config.host_bytes == 256 * config.chunk_bytes == 128 << 20
    before = resident_bytes()
    cache = HierarchicalKVCache(config)
    assert cache.stats()["host_bytes"] == config.host_bytes
    grown = resident_bytes() - before
    # Complete before the first request, and not more than was asked for.
    assert 0.95 * config.host_bytes <= grown <= config.host_bytes + (32 << 20)
    visit(cache, (1, 30))
    cache.flush()
    push_out(cache)
    assert visit(cache, (1, 30)) == [30]
    cache.close()
    del cache
    gc.collect()
    assert resident_bytes() - before < 0.5 * config.host_bytes


def test_a_size_that_is_no_multiple_of_a_chunk_is_rounded_down():
    config = tiny_config(chunks=3)
    with HierarchicalKVCache(config.replace(host_bytes=config.host_bytes + config.chunk_bytes // 2)) as cache:
        assert cache.stats()["host_bytes"] == 3 * config.chunk_bytes
        assert cache.stats()["slots_total"] == 3 * config.chunk_size // config.slot_tokens


def test_no_host_tier():
    with HierarchicalKVCache(tiny_config()) as cache:
        visit(cache, (1, 40))
        cache.flush()
        push_out(cache)
        assert visit(cache, (1, 40)) == [0]
        stats = cache.stats()
        names = ("host_bytes", "slots_total", "offloads", "onloads", "slots_largest_free")
        assert [stats[name] for name in names] == [0] * 5
        assert stats["lost_tokens"] == 40
