"""Layers through CUDA graphs on a device: scores are those without them, whatever bucket, stream and thread."""

from __future__ import annotations

import threading

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from mtserve_plugin import HierarchicalKVCache, NoCache, ops
from mtserve_plugin.graphs import GraphLimits, LayerGraphs, layers
from mtserve_plugin.graphs.buckets import Tiling
from mtserve_plugin.graphs.metadata import Metadata
from mtserve_plugin.graphs.operator import paged_hstu_attention_planned
from mtserve_plugin.graphs.recorder import CudaRecorder
from mtserve_plugin.triton_kernels import launch
from tests.gpu.test_cache import TOLERANCE, config, onload, stack, visits
from tests.graphs.plans import send, work_of
from tests.kernels.reference import random_batch

DEVICE = "cuda"


def models(sizes, limits=None):
    """The same model with graphs and without."""
    graphed, eager = (stack.Stack(sizes, 500, DEVICE) for _ in range(2))
    graphed.graphs = LayerGraphs(limits)
    return graphed, eager


def error(found, want):
    return float((found - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("options", [onload("direct"), onload("staged") | {"read_onload_region": True}, {"v_dim": 32}])
def test_scores_are_those_of_a_recompute(options, dtype):
    sizes = config(dtype=dtype, **options)
    graphed, eager = models(sizes)
    nothing = NoCache(sizes, DEVICE)
    with HierarchicalKVCache(sizes, DEVICE) as cache:
        cache.table.fill_(float("nan"))
        for users, histories, candidates in visits(1, 80):
            found = graphed(cache, users, histories, candidates)
            assert error(found, eager(nothing, users, histories, candidates)) <= TOLERANCE[dtype]
        cache.drain()
        cache.check()
        hits = cache.stats()
        assert hits["device_hit_tokens"] > 0
        assert hits["host_hit_tokens"] > 0
    stats = graphed.graphs.stats()
    assert stats["failures"] == stats["renewals"] == 0
    assert stats["replayed"] > stats["recorded"] > 0


def test_the_planned_operator_is_the_operator():
    torch.manual_seed(3)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for split in (False, True):
            batch = random_batch([1700, 33, 0, 7], [9, 0, 3, 0], [1600, 30, 0, 7], qk_dim=64, v_dim=128, dtype=dtype)
            blocks = launch.choose_blocks(dtype, 64, 128)
            work, bucket = work_of(batch, Tiling(blocks.queries, blocks.many_queries, 132), split)
            metadata = Metadata(bucket, torch.device(DEVICE), CudaRecorder())
            out = paged_hstu_attention_planned(*send(metadata, bucket, batch, work))
            arguments = [
                x.to(DEVICE) if getattr(x, "is_floating_point", bool)() else x for x in batch.arguments().values()
            ]
            assert torch.equal(out[: int(batch.offsets[-1])], ops.paged_hstu_attention(*arguments)), (dtype, split)


def test_long_histories_are_split():
    sizes = config(num_pages=800, attn_norm_len=4096)
    graphed, eager = models(sizes)
    nothing = NoCache(sizes, DEVICE)
    generator = torch.Generator().manual_seed(2)
    history = torch.randint(0, 500, (9000,), generator=generator).numpy()
    candidates = torch.randint(0, 500, (1, 8), generator=generator).numpy()
    with HierarchicalKVCache(sizes, DEVICE) as cache:
        for length in (8000, 8010, 8050, 8060, 8075, 8076):
            found = graphed(cache, [1], [history[:length]], candidates)
            assert error(found, eager(nothing, [1], [history[:length]], candidates)) <= TOLERANCE["float32"]
    assert any(bucket.split_tiles for bucket in graphed.graphs._buckets)
    assert graphed.graphs.stats()["replayed"] > 0


def test_a_replay_does_not_wait_for_the_device(monkeypatch):
    sizes = config()
    graphed, _ = models(sizes)
    replay, replays = LayerGraphs._replay, []

    def strict(*args):
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            replays.append(1)
            return replay(*args)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    monkeypatch.setattr(LayerGraphs, "_replay", strict)
    with HierarchicalKVCache(sizes, DEVICE) as cache:
        for users, histories, candidates in visits(4, 20):
            graphed(cache, users, histories, candidates)
    assert replays
    assert graphed.graphs.stats()["failures"] == 0


def test_streams_and_threads():
    sizes = config(num_pages=400)
    graphed, eager = models(sizes, GraphLimits(tokens=1024))
    nothing = NoCache(sizes, DEVICE)
    wrong = []

    def work(seed, cache):
        with torch.cuda.stream(torch.cuda.Stream()):
            for users, histories, candidates in visits(seed, 30):
                mine = [seed * 100 + user for user in users]
                found = graphed(cache, mine, histories, candidates)
                far = error(found, eager(nothing, mine, histories, candidates))
                if not far <= TOLERANCE["float32"]:
                    wrong.append((seed, far))

    with HierarchicalKVCache(sizes, DEVICE) as cache:
        torch.cuda.synchronize()
        threads = [threading.Thread(target=work, args=(seed, cache)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    stats = graphed.graphs.stats()
    assert not wrong
    assert stats["replayed"] > 0
    assert stats["failures"] == 0


def test_other_weights_are_recorded_anew():
    sizes = config()
    graphed, eager = models(sizes)
    nothing = NoCache(sizes, DEVICE)
    with HierarchicalKVCache(sizes, DEVICE) as cache:
        for number, (users, histories, candidates) in enumerate(visits(5, 30)):
            if number in (10, 20):
                for model in (graphed, eager):
                    torch.manual_seed(number)
                    weight = model.layers[1]._uvqk_weight
                    weight.data = weight + 0.05 * torch.randn_like(weight)
                cache.clear()
            found = graphed(cache, users, histories, candidates)
            assert error(found, eager(nothing, users, histories, candidates)) <= TOLERANCE["float32"]
    assert graphed.graphs.stats()["renewals"] == 2


def test_a_recording_that_fails_leaves_the_device_usable(monkeypatch):
    sizes = config()
    graphed, eager = models(sizes)
    nothing = NoCache(sizes, DEVICE)
    stream = torch.cuda.current_stream()

    class Looks(layers._Stretch):
        def _output(self, *arguments):
            out = super()._output(*arguments)
            if torch.cuda.is_current_stream_capturing():
                out.sum().item()  # no recording may wait for the device
            return out

    with HierarchicalKVCache(sizes, DEVICE) as cache:
        monkeypatch.setattr(layers, "_Stretch", Looks)
        for part in range(2):
            for users, histories, candidates in visits(6 + part, 20):
                found = graphed(cache, users, histories, candidates)
                assert error(found, eager(nothing, users, histories, candidates)) <= TOLERANCE["float32"]
                assert torch.cuda.current_stream() == stream
            stats = graphed.graphs.stats()
            assert stats["failures"] > 0
            assert (stats["replayed"] > 0) == (part == 1)
            monkeypatch.undo()
            graphed.graphs.clear()
            cache.clear()
