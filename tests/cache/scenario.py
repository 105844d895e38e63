"""What the scenario tests share."""

import pytest
import torch

from mtserve_plugin import HierarchicalKVCache, _core
from mtserve_plugin.engine import index_config
from tests.cache.driver import dense, read_pages, tiny_config, values

PAGE, CHUNK = 4, 16  # of tiny_config
BOUNDARIES = [0, 1, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 3]


@pytest.fixture
def one_torch_thread():
    """Tiny tensors: a pool of threads only makes them wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make():
    """Builds caches of the tiny configuration, poisoned; checks and closes them in the end."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    caches = []

    def build(**options):
        caches.append(HierarchicalKVCache(tiny_config(**options)))
        caches[-1].table.fill_(float("nan"))
        return caches[-1]

    yield build
    for cache in caches:
        cache.check()
        cache.close()
    torch.set_num_threads(threads)


def index(**options):
    """The control plane alone; whoever asks carries out its plans."""
    return _core.Index(index_config(tiny_config(**options)))


def rise(before, after, *names):
    return [after[name] - before[name] for name in names]


def check_cached(cache, batch, requests):
    """The cached bytes of an open batch are what was written."""
    for layer in range(cache.config.num_layers):
        table = batch.wait(layer)
        for row, request in enumerate(requests):
            paged = int(batch.layout.paged[row])
            for x, name in zip(read_pages(cache, table, row, paged, layer), "kv", strict=True):
                want = values(cache.config, request.tokens[:paged], layer, name).to(x.dtype)
                assert torch.equal(x, want), f"row {row}, layer {layer}: {name} changed under its reader"


def attend_all_layers(cache, batch, requests):
    for layer in range(cache.config.num_layers):
        batch.attend(layer, *(dense(cache.config, batch, requests, layer, name) for name in "qkv"))
