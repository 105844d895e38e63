"""Life, memory and configuration of a cache (scenarios E1 to E10)."""

import copy
import gc
import json
import logging
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from mtserve_plugin import CacheConfig, HierarchicalKVCache, NoCache
from mtserve_plugin.errors import CacheError, ConfigError
from tests.cache import scenario
from tests.cache.driver import Request, Users, begin, history_of, push_out, serve, tiny_config, traffic, visit
from tests.cache.scenario import attend_all_layers, index, rise

make = scenario.make


# ---- E1: batches that are never finished --------------------------------------------------------------------------


def test_e1_open_batches_are_bounded_and_said_so(make, caplog):
    cache = make(max_open_batches=3)
    visit(cache, (1, 20))
    request = [Request(1, history_of(1, 20), 1)]
    with caplog.at_level(logging.WARNING):
        batches = [begin(cache, request) for _ in range(5)]
    assert [batch.cached_lengths.tolist()[0] for batch in batches] == [20, 20, 20, 0, 0]
    assert len([r for r in caplog.records if "max_open_batches" in r.getMessage()]) == 1
    stats = cache.stats()
    assert (stats["open_batches"], stats["refused_batches"]) == (3, 2)
    # A refused batch is scored like any other.
    attend_all_layers(cache, batches[4], request)
    cache.commit(batches[4])
    assert cache.abort_all() == 4
    assert cache.abort_all() == 0
    assert cache.stats()["open_batches"] == 0
    assert visit(cache, (1, 21)) == [20]
    with pytest.raises(CacheError, match="aborted before"):
        batches[0].wait(0)


def test_e1_a_batch_that_is_dropped_is_aborted(make):
    cache = make()
    batch = begin(cache, [Request(1, history_of(1, 20), 1)])
    assert cache.stats()["pages_free"] == 35
    del batch
    gc.collect()
    stats = cache.stats()
    assert (stats["open_batches"], stats["pages_free"], stats["abandoned_batches"]) == (0, 40, 1)


def test_e1_pins_of_a_dead_thread_can_be_released(make):
    cache = make(num_pages=10)
    kept = []

    def dies():
        kept.append(begin(cache, [Request(1, history_of(1, 40), 1)]))

    thread = threading.Thread(target=dies)
    thread.start()
    thread.join()
    assert visit(cache, (2, 8)) == [0]
    assert cache.stats()["rows_without_room"] == 1
    cache.abort_all()
    assert visit(cache, (2, 8)) == [0]
    assert visit(cache, (2, 8)) == [8]


# ---- E2: cancelled batches ----------------------------------------------------------------------------------------


def test_e2_ten_thousand_cancelled_batches_leak_nothing(make):
    cache = make(num_pages=60, chunks=6)
    visit(cache, (0, 30), (1, 21))
    cache.flush()
    start = cache.stats()
    rng = random.Random(2)
    for _ in range(10_000):
        users = [rng.randrange(2, 30) for _ in range(rng.randint(0, 4))]
        batch = cache.begin(users, [rng.randint(0, 9) for _ in users], num_candidates=1)
        cache.abort(batch)
    end = cache.stats()
    gauges = [
        "entries",
        "open_batches",
        "pages_free",
        "pages_clean",
        "pages_dirty",
        "slots_free",
        "pending_offload_tokens",
    ]
    assert rise(start, end, *gauges, "lost_tokens", "transfers_in_flight", "memory_bytes") == [0] * 10
    assert rise(start, end, "aborts", "commits", "stored_tokens") == [10_000, 0, 0]
    assert visit(cache, (0, 30), (1, 21)) == [30, 21]


def test_e2_cancelled_while_loads_and_offloads_are_in_flight(make):
    cache = make(num_pages=24, chunks=20)
    visit(cache, *[(user, 20) for user in range(4)])
    cache.flush()
    for round_number in range(200):
        user = round_number % 4
        cache.abort(begin(cache, [Request(user, history_of(user, 30), 1)]))
        if round_number % 3 == 0:
            push_out(cache)
    cache.drain()
    stats = cache.stats()
    assert (stats["open_batches"], stats["lost_tokens"], stats["transfers_in_flight"]) == (0, 0, 0)
    assert visit(cache, *[(user, 20) for user in range(4)]) == [20] * 4


def test_e2_the_index_forgets_users_that_come_once():
    idx = index(num_pages=40)
    for user in range(20_000):
        idx.abort(idx.begin([user], [5]))
    first = idx.stats()["memory_bytes"]
    for user in range(20_000, 40_000):
        idx.commit(idx.begin([user], [5]))
    assert idx.stats()["memory_bytes"] <= first * 1.1
    assert idx.stats()["entries"] <= 20


# ---- E5: configuration --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"page_size": 5}, ["page_size", "multiple of 4"]),
        ({"chunk_size": 18}, ["page_size", "chunk_size", "multiple"]),
        ({"host_bytes": 1}, ["host_bytes", "chunk"]),
        ({"host_bytes": 1 << 20, "offload_quota_tokens": 1}, ["offload_quota_tokens"]),
        ({"num_pages": 0}, ["num_pages"]),
        ({"num_pages": 2**31 - 1, "onload_pages": 1}, ["num_pages", "onload_pages"]),
        ({"num_layers": 0}, ["num_layers"]),
        ({"qk_dim": 2.0}, ["qk_dim", "integer"]),
        ({"v_dim": True}, ["v_dim", "integer"]),
        ({"num_heads": "2"}, ["num_heads", "integer"]),
        ({"dtype": "float64"}, ["dtype", "bfloat16"]),
        ({"dtype": torch.float32}, ["dtype"]),
        ({"dtype": ["float32"]}, ["dtype"]),
        ({"attn_scale": 0}, ["attn_scale"]),
        ({"attn_scale": float("nan")}, ["attn_scale"]),
        ({"attn_scale": "big"}, ["attn_scale"]),
        ({"tail_write_back": 1}, ["tail_write_back"]),
        ({"busy_wait_ms": -1}, ["busy_wait_ms"]),
        ({"max_open_batches": 0}, ["max_open_batches"]),
        ({"attn_norm_len": None}, ["attn_norm_len"]),
        ({"onload_strategy": "teleport"}, ["onload_strategy"]),
        ({"offload_strategy": None}, ["offload_strategy"]),
        ({"onload_strategy": "staged", "host_bytes": 1 << 20}, ["onload_pages"]),
        ({"read_onload_region": 1}, ["read_onload_region"]),
        ({"read_onload_region": True}, ["read_onload_region", "staged"]),
        ({"page_sise": 32}, ["page_sise"]),
        ({"device": "cuda"}, ["device"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_e5_an_option_that_cannot_be(options, names):
    good = {
        "num_layers": 2,
        "num_heads": 2,
        "qk_dim": 4,
        "v_dim": 6,
        "dtype": "float32",
        "attn_norm_len": 50,
        "page_size": 4,
        "chunk_size": 16,
        "num_pages": 40,
    }
    CacheConfig.from_dict(good)
    with pytest.raises(ConfigError) as error:
        CacheConfig.from_dict(good | options)
    assert all(name in str(error.value) for name in names), str(error.value)


def test_e5_a_missing_option():
    with pytest.raises(ConfigError, match="num_layers"):
        CacheConfig.from_dict({})


def test_e5_a_device_that_is_not_served():
    with pytest.raises(ConfigError, match="device"):
        HierarchicalKVCache(tiny_config(), device="meta")


def test_e5_memory_that_cannot_be_had():
    wide = tiny_config(num_layers=1, num_heads=512, qk_dim=512, v_dim=512, num_pages=1, chunk_size=1 << 20)
    with pytest.raises(ConfigError, match="host_bytes"):
        HierarchicalKVCache(wide.replace(host_bytes=1 << 55, offload_quota_tokens=1 << 20))
    with pytest.raises(ConfigError, match="num_pages"):
        HierarchicalKVCache(wide.replace(num_pages=1 << 30))


# ---- E7: fork -----------------------------------------------------------------------------------------------------


def in_child(work, seconds=10):
    """Runs `work` in a forked child; returns what it returns, or how it ended."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        signal.alarm(seconds)
        try:
            answer = json.dumps(work())
        except BaseException as error:
            answer = json.dumps(f"raised {type(error).__name__}: {error}")
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child ended with status {status} (14: it hung)"
    return json.loads(answer)


def loading(cache):
    """An open batch whose onload is still in flight."""
    visit(cache, (1, 20))
    cache.flush()
    push_out(cache)
    cache._engine.inject_faults(delay_us=60_000)
    return begin(cache, [Request(1, history_of(1, 20), 1)])


FIRST_USES = {
    "begin": lambda cache, batch: cache.begin([1], [2], num_candidates=1),
    "commit": lambda cache, batch: cache.commit(batch),
    "abort": lambda cache, batch: cache.abort(batch),
    "abort_all": lambda cache, batch: cache.abort_all(),
    "prefetch": lambda cache, batch: cache.prefetch([1]),
    "evict": lambda cache, batch: cache.evict([1]),
    "clear": lambda cache, batch: cache.clear(),
    "flush": lambda cache, batch: cache.flush(),
    "drain": lambda cache, batch: cache.drain(),
    "stats": lambda cache, batch: cache.stats(),
    "lengths": lambda cache, batch: cache.lengths(1),
    "check": lambda cache, batch: cache.check(),
    "retire_version": lambda cache, batch: cache.retire_version(""),
    "wait": lambda cache, batch: batch.wait(0),
    "append": lambda cache, batch: batch.append(0, torch.zeros(1, 2, 4), torch.zeros(1, 2, 6)),
    "attend": lambda cache, batch: batch.attend(0, *(torch.zeros(1, 2, d) for d in (4, 4, 6))),
}


@pytest.mark.parametrize("use", FIRST_USES)
def test_e7_first_use_in_a_forked_child_is_a_clear_error(make, use):
    cache = make(num_pages=20, chunks=10)
    batch = loading(cache)

    def work():
        with pytest.raises(CacheError, match="fork"):
            FIRST_USES[use](cache, batch)
        return "fine"

    try:
        assert in_child(work) == "fine"
        attend_all_layers(cache, batch, [Request(1, history_of(1, 20), 1)])  # the parent goes on
        cache.commit(batch)
    finally:
        cache._engine.inject_faults()


@pytest.mark.parametrize("closes", [True, False])
def test_e7_the_child_neither_joins_nor_frees(closes):
    """A cache that dies in the child must not wait for threads that exist in the parent alone."""
    cache = HierarchicalKVCache(tiny_config(num_pages=20, chunks=10))
    batch = loading(cache)

    def work():
        nonlocal cache, batch
        if closes:
            cache.close()
        del batch, cache
        gc.collect()
        return "fine"

    answer = in_child(work)
    cache._engine.inject_faults()
    cache.abort(batch)
    cache.close()
    assert answer == "fine"


# ---- a cache that dies while it copies ----------------------------------------------------------------------------


def copying(direction):
    """A cache, and perhaps an open batch, with copies in flight that take a while.

    The table is large enough for its memory to go back to the system when it is freed.
    """
    torch.set_num_threads(1)
    config = CacheConfig(
        num_layers=4,
        num_heads=2,
        qk_dim=64,
        v_dim=64,
        dtype="float32",
        attn_norm_len=50,
        num_pages=200,
        chunk_size=256,
        host_bytes=64 << 20,
    )
    cache = HierarchicalKVCache(config)
    x = torch.ones(4096, 2, 64)
    with cache.batch([1], [4096], num_candidates=0) as batch:
        for layer in range(4):
            batch.append(layer, x, x)
        if direction == "offload":
            cache._engine.inject_faults(delay_us=20_000)
    del batch
    if direction == "offload":
        return cache, None
    cache.flush()
    push_out(cache)
    cache._engine.inject_faults(delay_us=20_000)
    cache.prefetch([1])
    return cache, cache.begin([1], [4096], num_candidates=0) if direction == "open batch" else None


@pytest.mark.parametrize("direction", ["offload", "onload", "open batch"])
@pytest.mark.parametrize("first", ["cache", "batch"])
def test_e6_nothing_is_freed_under_a_copy(direction, first):
    """In a process of its own: what it looks for is a crash."""

    def work():
        cache, batch = copying(direction)
        if first == "cache":
            del cache
            gc.collect()
            if batch is not None:
                batch.wait(3)
            del batch
        else:
            del batch
            gc.collect()
            del cache
        gc.collect()
        return "ended well"

    assert in_child(work) == "ended well"


def test_e6_the_interpreter_exits_while_copies_run():
    program = f"""
import sys
sys.path.insert(0, {os.getcwd()!r})
from tests.test_scenarios_lifecycle import copying
everything = copying("offload"), copying("open batch")
print("ended well", flush=True)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, f"exit status {result.returncode}: {result.stderr[-2000:]}"
    assert result.stdout == "ended well\n"
    assert "Traceback" not in result.stderr


# ---- E8: metrics --------------------------------------------------------------------------------------------------

GAUGES = {
    "entries", "open_batches", "pages_total", "pages_free", "pages_clean", "pages_dirty", "slots_total", "slots_free",
    "slots_largest_free", "pending_offload_tokens", "transfers_in_flight", "memory_bytes", "host_bytes", "table_bytes",
    "device_hit_ratio", "total_hit_ratio", "warm_hit_ratio",
}  # fmt: skip


@pytest.mark.parametrize("shape", [{"num_pages": 20, "chunks": 10}, {"num_pages": 12}])
def test_e8_counters_only_rise_and_no_ratio_exceeds_one(make, shape):
    cache = make(**shape)
    users = Users(faithful=range(4), edited=range(4, 6), longest=50)
    rng = random.Random(8)
    before = cache.stats()
    for round_number in range(25):
        traffic(cache, users, rng, 4, versions=["a", "b"])
        if round_number == 10:
            cache.clear()
        if round_number == 15:
            cache.retire_version("a")
        after = cache.stats()
        for name in after:
            # Some counters have one value per layer.
            values, earlier = ([x] if not isinstance(x, list) else x for x in (after[name], before[name]))
            for value, was in zip(values, earlier, strict=True):
                assert value >= 0, name
                assert name in GAUGES or value >= was, f"{name} fell"
                assert not name.endswith("_ratio") or value <= 1, name
        assert after["hit_tokens"] <= after["history_tokens"]
        assert after["stored_tokens"] <= after["history_tokens"]
        assert after["commits"] + after["aborts"] == after["batches"] - after["open_batches"]
        before = after


def test_e8_the_hit_ratio_has_the_papers_denominator(make):
    cache = make(num_pages=40, chunks=10)
    visit(cache, (1, 20), (2, 10))
    cache.flush()
    assert (cache.stats()["total_hit_ratio"], cache.stats()["device_hit_ratio"]) == (0, 0)
    before = cache.stats()
    visit(cache, (1, 25), (2, 10), (3, 5))
    after = cache.stats()
    assert rise(before, after, "history_tokens", "hit_tokens", "device_hit_tokens", "stored_tokens") == [40, 30, 30, 10]
    assert after["total_hit_ratio"] == after["device_hit_ratio"] == 30 / (30 + 40)
    cache.flush()
    push_out(cache)  # asks for 160 tokens that nobody has
    before = cache.stats()
    visit(cache, (1, 25))
    after = cache.stats()
    assert rise(before, after, "history_tokens", "device_hit_tokens", "host_hit_tokens") == [25, 0, 25]
    assert after["total_hit_ratio"] == (30 + 25) / (30 + 40 + 160 + 25)
    assert after["device_hit_ratio"] == 30 / (30 + 40 + 160 + 25)


def test_e8_context_rows_are_no_history(make):
    cache = make()
    request = Request(1, history_of(1, 10), 1, 3, 5)
    for _ in range(2):
        serve(cache, [request], context=3)
    stats = cache.stats()
    assert (stats["history_tokens"], stats["hit_tokens"]) == (20, 10)


def test_e8_no_cache_tells_the_same_names():
    cache = NoCache(tiny_config())
    visit(cache, (1, 20), (2, 1))
    assert cache.stats() == {"requests": 2, "history_tokens": 21, "hit_tokens": 0}


# ---- E10: dimensions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["direct", "staged"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("heads", "qk_dim", "v_dim"), [(1, 1, 1), (1, 8, 3), (3, 5, 7), (2, 16, 24), (5, 3, 64)])
def test_e10_any_dimensions(make, heads, qk_dim, v_dim, dtype, strategy):
    cache = make(
        num_heads=heads,
        qk_dim=qk_dim,
        v_dim=v_dim,
        dtype=dtype,
        page_size=8,
        chunk_size=24,
        num_pages=20,
        onload_pages=8,
        chunks=8,
        onload_strategy=strategy,
        offload_strategy=strategy,
    )
    for length, cached in ((21, 0), (22, 21), (50, 22)):
        assert visit(cache, (1, length), (2, 3))[0] == cached
        cache.flush()
        push_out(cache)
    assert visit(cache, (1, 50), (2, 4)) == [50, 3]


# ---- sharing, copying, closing ------------------------------------------------------------------------------------


def test_e2_a_model_copy_shares_the_cache_and_pickling_is_refused(make):
    cache = make()
    model = torch.nn.Linear(1, 1)
    model.cache = cache
    assert copy.deepcopy(model).cache is cache
    batch = begin(cache, [Request(1, history_of(1, 5), 1)])
    assert copy.deepcopy(batch) is batch
    for thing in (cache, batch):
        with pytest.raises(TypeError, match="pickled"):
            pickle.dumps(thing)
    cache.abort(batch)


def test_b9_close_drains_both_directions_while_batches_are_open():
    cache = HierarchicalKVCache(tiny_config(num_pages=40, chunks=20))
    visit(cache, (1, 40))
    cache.flush()
    push_out(cache)
    cache._engine.inject_faults(delay_us=20_000)
    visit(cache, (2, 40))  # an offload in flight
    batch = begin(cache, [Request(1, history_of(1, 40), 1)])  # and an onload
    started = time.monotonic()
    cache.close()
    cache.close()
    assert time.monotonic() - started < 10
    assert cache.stats()["transfers_in_flight"] == 0
    scenario.check_cached(cache, batch, [Request(1, history_of(1, 40), 1)])
    attend_all_layers(cache, batch, [Request(1, history_of(1, 40), 1)])
    cache.commit(batch)
    assert cache.stats()["open_batches"] == 0
    with pytest.raises(CacheError, match="closed"):
        cache.begin([1], [1], num_candidates=1)
    with pytest.raises(CacheError, match="closed"):
        cache.prefetch([1])
    cache.drain()
    cache.flush()
    cache.check()
