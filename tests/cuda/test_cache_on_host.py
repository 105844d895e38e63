"""A cache on CUDA whose device is the host (host_cuda.cpp): what Python makes of errors, memory and the timeline."""

import ctypes
import gc
import logging
import os
import shutil
import subprocess
import time
import weakref
from pathlib import Path

import pytest
import torch

from mtserve_plugin import HierarchicalKVCache, host_memory
from mtserve_plugin.errors import CacheError, ConfigError, OnloadError
from tests.cache.driver import push_out, tiny_config, visit
from tests.cache.scenario import one_torch_thread  # noqa: F401

CXX = shutil.which(os.environ.get("CXX", "c++"))
pytestmark = [
    pytest.mark.skipif(CXX is None, reason="the library is compiled here"),
    pytest.mark.usefixtures("one_torch_thread"),
]

SOURCES = Path(__file__).parents[2] / "csrc"
OUT_OF_MEMORY, ILLEGAL_ADDRESS = 2, 700
STRATEGIES = [
    {"onload_strategy": "direct", "offload_strategy": "direct"},
    {"onload_strategy": "staged", "onload_pages": 12, "offload_strategy": "staged"},
    {"onload_strategy": "kernel", "offload_strategy": "direct"},
]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("cuda") / "host_cuda.so"
    command = [CXX, "-std=c++20", "-shared", "-fPIC", f"-I{SOURCES}", str(Path(__file__).parent / "host_cuda.cpp")]
    done = subprocess.run([*command, "-o", str(path)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return path


@pytest.fixture
def device(library, monkeypatch):
    """The device's switches: `fail(call, countdown, code)` and `left(what)`; in the end nothing may be left."""
    monkeypatch.setattr("mtserve_plugin.cache.cuda_library", lambda device: (str(library), device))
    switches = ctypes.CDLL(str(library))

    class Device:
        @staticmethod
        def fail(call, countdown, code):
            switches.host_cuda_fail(call.encode(), countdown, code)

        @staticmethod
        def left(what=""):
            return switches.host_cuda_left(what.encode())

    yield Device
    for call in ("copy", "copy_by_kernel", "pin", "allocate_pinned", "allocate_device", "synchronize"):
        Device.fail(call, 0, 0)
    gc.collect()
    assert Device.left() == 0


def build(chunks=20, **options):
    cache = HierarchicalKVCache(tiny_config(num_pages=12, chunks=chunks, **options))
    cache.table.fill_(float("nan"))
    return cache


def stored_on_the_host(cache):
    """User 1 with 20 tokens, on the host alone."""
    visit(cache, (1, 20))
    cache.flush()
    push_out(cache)
    assert cache.lengths(1) == {"committed": 20, "device": 0, "persisted": 20}


def call_of(options):
    return "copy_by_kernel" if options["onload_strategy"] == "kernel" else "copy"


@pytest.mark.parametrize("options", STRATEGIES)
def test_what_the_device_survives_costs_one_transfer_and_one_line(device, options, caplog):
    caplog.set_level(logging.WARNING, "mtserve_plugin")
    with build(**options) as cache:
        for failures in (1, 2):
            stored_on_the_host(cache)
            device.fail(call_of(options), 1, OUT_OF_MEMORY)
            with pytest.raises(OnloadError, match="run this batch uncached"):
                visit(cache, (1, 21))
            cache.drain()
            assert cache.stats()["onload_failures"] == failures
        stored_on_the_host(cache)
        assert visit(cache, (1, 21)) == [20]
        cache.flush()
        device.fail("copy", 1, OUT_OF_MEMORY)
        assert visit(cache, (2, 16)) == [0]
        cache.drain()
        assert cache.stats()["offload_failures"] == 1
        assert visit(cache, (2, 17)) == [16]
        cache.check()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert "out of memory" in lines[0]
    assert "onload copy" in lines[0]


@pytest.mark.parametrize("options", STRATEGIES)
def test_the_end_of_the_device_names_call_and_layer(device, options):
    with build(**options) as cache:
        stored_on_the_host(cache)
        device.fail(call_of(options), 2, ILLEGAL_ADDRESS)
        with pytest.raises(
            CacheError, match=r"layer [01]: .*onload copy of layer [01]\): an illegal memory access"
        ) as raised:
            visit(cache, (1, 21))
        assert not isinstance(raised.value, OnloadError)
        with pytest.raises(CacheError, match=r"cannot be used any more: .*onload copy"):
            visit(cache, (2, 5))
        cache.drain()
        assert cache.stats()["open_batches"] == 0


def test_a_failing_pin_names_the_fix_and_leaves_nothing(device, monkeypatch):
    monkeypatch.setattr(host_memory, "_SLICE", 1 << 20)
    chunks = 24_000
    with build(chunks) as cache:
        host_bytes = cache.config.host_bytes
        pins = device.left("pins")
        assert pins >= 3
    device.fail("pin", pins, OUT_OF_MEMORY)
    tables = []
    empty = torch.empty

    def remember(*args, **kwargs):
        out = empty(*args, **kwargs)
        tables.append(weakref.ref(out))
        return out

    monkeypatch.setattr(torch, "empty", remember)
    with pytest.raises(ConfigError, match=rf"host_bytes={host_bytes}: .*cudaHostRegister.*ulimit -l") as raised:
        build(chunks)
    # Although the exception, and with it the constructor's frame, is still alive.
    assert raised.value.__traceback__ is not None
    assert device.left() == 0
    assert tables
    assert all(table() is None for table in tables)


def test_staging_memory_that_cannot_be_had_is_named(device):
    device.fail("allocate_pinned", 2, OUT_OF_MEMORY)
    with pytest.raises(ConfigError, match=r"cudaHostAlloc \(\d+ bytes\): out of memory"):
        build(onload_strategy="staged", onload_pages=12)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_host_tier_that_does_not_become_resident_is_released(monkeypatch, error):
    """On the CPU."""
    closed = []

    def make_resident(engine, host_bytes):
        closed.append(engine)
        raise error("no")

    monkeypatch.setattr(host_memory, "make_resident", make_resident)
    expected = ConfigError if error is RuntimeError else KeyboardInterrupt
    with pytest.raises(expected) as raised:
        HierarchicalKVCache(tiny_config())
    if expected is ConfigError:
        assert "host_bytes=" in str(raised.value)
        assert "use less" in str(raised.value)
    assert closed[0].host_capacity() == 0


@pytest.mark.parametrize("options", STRATEGIES)
def test_the_timeline_shows_threads_and_streams_on_one_clock(device, options):
    with build(**options) as cache:
        stored_on_the_host(cache)
        before = time.perf_counter()
        with cache.timeline() as spans:
            visit(cache, (1, 21))
            cache.flush()
        after = time.perf_counter()
        streams = {span.stream for span in spans}
        assert {"onload", "offload", "onload issue", "offload issue"} <= streams
        assert ("scatter" in streams) == (options["onload_strategy"] == "staged")
        slack = 0.02
        for span in spans:
            assert before - slack <= span.begin <= span.end <= after + slack
        copies = [span for span in spans if span.name == "onload copy"]
        assert len(copies) >= cache.config.num_layers
        issue = next(span for span in spans if span.name == "issue onload")
        assert all(issue.begin - slack <= span.begin and span.end <= issue.end + slack for span in copies)
