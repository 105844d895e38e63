"""Layers through recordings: scores, pages and refusals are those of the eager path."""

from __future__ import annotations

import copy
import gc
import logging
import random
import threading
import weakref

import pytest
import torch

from mtserve_plugin import HierarchicalKVCache, NoCache
from mtserve_plugin.batch import CacheBatch
from mtserve_plugin.errors import ConfigError, OnloadError
from mtserve_plugin.graphs import GraphLimits, LayerGraphs, layers
from mtserve_plugin.graphs.buckets import Bucket
from mtserve_plugin.graphs.metadata import Metadata
from mtserve_plugin.models import HSTURanker, HSTURankerConfig
from mtserve_plugin.triton_kernels.plan import Lengths, cut
from tests.graphs.tape import NoEvent, Tape, TapeRecorder
from tests.models.reference import Events, features_of, relative_error

TOLERANCE = 1e-6


class Pair:
    """The same model twice, with recordings and without, each on a cache of its own; and one that recomputes."""

    def __init__(self, limits=None, *, num_pages=200, host_bytes=1 << 20, seed=1, **changes):
        config = HSTURankerConfig.small(**changes)
        sizes = {"num_pages": num_pages, "onload_pages": 40, "host_bytes": host_bytes}
        geometry = config.cache_config(page_size=4, chunk_size=16, **sizes)
        self.caches = [HierarchicalKVCache(geometry) for _ in range(2)]
        for cache in self.caches:
            cache.table.fill_(float("nan"))
        self.eager = HSTURanker(config, self.caches[0], seed=seed).eval()
        self.recomputing = copy.deepcopy(self.eager)
        self.recomputing.cache = NoCache(config.cache_config())
        self.recorder = TapeRecorder(lambda: [self.model.cache.table, *self.model.layers.parameters()])
        self.graphs = LayerGraphs(limits, self.recorder)
        self.model = HSTURanker(config, self.caches[1], seed=seed, graphs=self.graphs).eval()
        self.events = Events(seed, config)
        self.random = random.Random(seed)

    def rows(self, users):
        for user in users:
            self.events.grow(user, self.random.choice((0, 1, 3, 9, 40)))
        return [self.events.row(user, candidates=self.random.choice((0, 1, 5, 20))) for user in users]

    def score(self, rows):
        """Scores with recordings, which have to be those of both others."""
        rows = [*rows, self.events.row("anyone", candidates=20)]  # one score alone may be near 0
        rows[-1]["user"] = -5
        features = features_of(rows)
        got, eager, want = self.model(features), self.eager(features), self.recomputing(features)
        for cache in self.caches:  # so that both are asked at the same point
            cache.drain()
        assert relative_error(got, want) <= TOLERANCE
        assert relative_error(got, eager) <= TOLERANCE
        return got

    def stream(self, steps, users=6, rows=4):
        for _ in range(steps):
            self.score(self.rows(self.random.choices(range(users), k=self.random.randint(1, rows))))

    def check_pages(self):
        """Both caches hold the same keys and values, wherever they put them."""
        tables = [cache.table.nan_to_num(nan=7.0).flatten(0, 1) for cache in self.caches]
        a, b = (table.reshape(self.caches[0].config.num_layers, -1) for table in tables)
        assert relative_error(a, b) <= TOLERANCE

    def close(self):
        for cache in self.caches:
            cache.flush()
            cache.check()
            cache.close()


@pytest.fixture
def pair():
    made = []

    def build(*args, **options):
        made.append(Pair(*args, **options))
        return made[-1]

    yield build
    for one in made:
        one.close()


@pytest.mark.parametrize(
    "sizes",
    [{}, {"num_pages": 60}, {"max_attn_len": 11}, {"num_pages": 9, "host_bytes": 0}, {"qk_dim": 8, "num_heads": 3}],
    ids=["roomy", "two tiers", "window", "tiny", "three heads"],
)
def test_streams_through_recordings(pair, sizes):
    one = pair(**sizes)
    one.stream(25)
    stats = one.graphs.stats()
    assert stats["replayed"] > stats["recorded"] > 0
    assert stats["failures"] == stats["renewals"] == stats["eager_limits"] == 0
    layers_and_first = one.model.config.num_layers + 1
    assert one.recorder.num_recordings == stats["recorded"] * layers_and_first
    assert one.recorder.replays == stats["replayed"] * layers_and_first
    hits = [cache.stats()["hit_tokens"] for cache in one.caches]
    assert hits[0] == hits[1]
    assert hits[0] > 0 or sizes.get("num_pages") == 9


def test_pages_hold_what_the_eager_path_writes(pair):
    one = pair(GraphLimits(tokens=128), num_pages=400)
    for step in range(12):
        one.score(one.rows(range(step % 4 + 1)))
    for cache in one.caches:
        cache.flush()
    assert one.graphs.stats()["replayed"] > 0
    one.check_pages()
    # and another model, which knows nothing of recordings, finds them good
    one.eager.cache = one.caches[1]
    rows = one.rows([0, 1, 2, 3])
    before = one.caches[1].stats()["hit_tokens"]
    features = features_of(rows)
    assert relative_error(one.eager(features), one.recomputing(features)) <= TOLERANCE
    assert one.caches[1].stats()["hit_tokens"] > before


def test_long_histories_are_split(pair):
    one = pair(GraphLimits(tokens=2048), num_pages=1000)
    for grown in (600, 5, 700, 2, 0, 60):
        one.events.grow(1, grown)
        one.score([one.events.row(1, candidates=3)])
    assert {bucket.split_tiles > 0 for bucket in one.graphs._buckets} == {True, False}
    for _ in range(3):
        one.events.grow(1, 1)
        one.score([one.events.row(1, candidates=3)])
    assert one.graphs.stats()["replayed"] >= 3


def test_an_onload_that_fails_falls_back_like_the_eager_path(pair, monkeypatch):
    one = pair()
    rows = one.rows([1, 2, 3])
    one.score(rows)
    one.score(rows)
    wait, failing = CacheBatch.wait, [2]

    def broken(batch, layer, **options):
        if batch.table.shape[1] and layer == failing[0]:
            raise OnloadError("planted")
        return wait(batch, layer, **options)

    monkeypatch.setattr(CacheBatch, "wait", broken)
    recorded = one.graphs.stats()["recorded"]
    for layer in (0, 2):  # while replaying, and while a bucket is recorded
        failing[0] = layer
        one.score(rows)
        one.score(one.rows([1, 2, 3, 4, 5, 6, 7, 8][: 4 + layer * 2]))
    assert one.graphs.stats()["recorded"] == recorded
    monkeypatch.undo()
    one.stream(10)
    assert one.graphs.stats()["recorded"] > recorded
    assert all(cache.stats()["open_batches"] == 0 for cache in one.caches)


def test_each_wait_is_right_in_front_of_its_layer(pair, monkeypatch):
    one, log = pair(), []
    wait, replay = CacheBatch.wait, Tape.replay
    monkeypatch.setattr(CacheBatch, "wait", lambda batch, layer: log.append(layer) or wait(batch, layer))
    monkeypatch.setattr(Tape, "replay", lambda tape: log.append("replay") or replay(tape))
    features = features_of(one.rows([1, 2]))
    one.model(features)
    assert log == [0, 1, 2]
    one.model(features)  # nothing left but candidates: another bucket may be recorded
    log.clear()
    one.model(features)
    assert log == ["replay", 0, "replay", 1, "replay", 2, "replay"]


@pytest.mark.parametrize("at", [0, 3])
def test_a_recording_that_fails_is_tried_once_and_warned_about_once(pair, caplog, at):
    one = pair()
    one.recorder.fail = [False] * at + [True] * 100
    with caplog.at_level(logging.WARNING):
        one.stream(14)
    stats = one.graphs.stats()
    assert stats["failures"] >= 2
    assert stats["eager_failed"] > stats["failures"]
    assert (stats["recorded"], stats["replayed"]) == (0, 0)
    assert [record.message for record in caplog.records if "could not be recorded" in record.message][1:] == []
    assert "this cannot be recorded" in caplog.text
    one.recorder.fail = []
    one.graphs.clear()
    one.stream(14)
    assert one.graphs.stats()["replayed"] > 0


def test_an_operator_that_fails_leaves_the_batch_to_the_eager_path(pair, monkeypatch):
    one = pair()
    calls = []

    def failing(*args):
        calls.append(args[4])
        if args[4] == 1:
            raise RuntimeError("no kernel for this shape")
        return planned(*args)

    planned = layers.paged_hstu_attention_planned
    monkeypatch.setattr(layers, "paged_hstu_attention_planned", failing)
    one.score(one.rows([1, 2]))
    assert calls == [0, 0, 1]
    one.stream(5)
    assert one.graphs.stats()["replayed"] == 0
    for cache in one.caches:
        assert cache.stats()["commits"] == 6


def test_other_weights_are_recorded_anew(pair):
    one = pair()
    rows = one.rows([1, 2, 3])
    first = one.score(rows)
    one.score(rows)
    models = (one.model, one.eager, one.recomputing)
    for change in ("in place", "data", "parameter"):
        for model in models:
            torch.manual_seed(4)
            weight = model.layers[1]._uvqk_weight
            other = weight.detach() + 0.1 * torch.randn_like(weight)
            if change == "in place":
                weight.data.copy_(other)
            elif change == "data":
                weight.data = other
            else:
                model.layers[1]._uvqk_weight = torch.nn.Parameter(other)
            model.version = change
        for _ in range(3):
            changed = one.score(rows)
        assert relative_error(changed, first) > 1e-3
        first = changed
        assert one.graphs.stats()["renewals"] == ("in place", "data", "parameter").index(change)


def test_another_cache_is_recorded_anew_and_none_is_eager(pair):
    one = pair()
    rows = one.rows([1, 2, 3])
    one.score(rows)
    one.score(rows)
    one.model.cache = NoCache(one.model.config.cache_config())
    one.score(rows)
    stats = one.graphs.stats()
    assert (stats["eager_no_pages"], stats["renewals"]) == (1, 0)
    with HierarchicalKVCache(one.caches[1].config) as other:
        other.table.fill_(float("nan"))
        one.model.cache = other
        for _ in range(3):
            one.score(rows)
        assert one.graphs.stats()["renewals"] == 1
        assert other.stats()["hit_tokens"] > 0
        one.model.cache = one.caches[1]


def test_recordings_keep_no_cache_and_no_model_that_has_left(pair):
    one = pair()
    rows = one.rows([1, 2])
    other = HierarchicalKVCache(one.caches[1].config)
    other.table.fill_(float("nan"))
    table = weakref.ref(other.table)
    one.model.cache = other
    for _ in range(3):
        one.score(rows)
    assert one.graphs.stats()["replayed"] > 0
    one.model.cache = NoCache(one.model.config.cache_config())
    other.close()
    del other
    gc.collect()
    assert table() is None
    one.model.cache = one.caches[1]
    one.score(rows)
    one.recorder.supported = False
    one.score(rows)
    assert one.graphs.stats()["buckets"] == 0
    assert one.graphs._held == []


def test_a_caller_that_records_itself_is_left_alone(pair):
    one = pair()
    rows = one.rows([1, 2])
    one.recorder.recorded_by_others = True
    one.score(rows)
    stats = one.graphs.stats()
    assert (stats["eager_capturing"], stats["recorded"], stats["buckets"]) == (1, 0, 0)


def test_limits(pair, caplog):
    one = pair(GraphLimits(rows=4, tokens=128, pages=64, buckets=1))
    one.stream(20, rows=5)
    stats = one.graphs.stats()
    assert stats["eager_limits"] > 0
    assert stats["buckets"] == 1
    assert stats["eager_buckets"] > 0
    with pytest.raises(ConfigError, match="buckets=0"):
        GraphLimits(buckets=0)
    # without a device the switch does nothing but say so, once
    one.model.graphs = LayerGraphs()
    with caplog.at_level(logging.WARNING):
        one.stream(3)
    assert one.model.graphs.stats()["eager_device"] == 3
    assert len([r for r in caplog.records if "cannot be recorded" in r.message]) == 1
    twin = copy.deepcopy(one.graphs)
    assert twin.limits == one.graphs.limits
    assert twin.stats()["buckets"] == 0


def test_batches_of_other_threads_run_eagerly(pair):
    one = pair()
    rows = one.rows([1, 2])
    one.score(rows)
    one.score(rows)
    before = one.graphs.stats()["eager_busy"]
    with one.graphs._lock:
        one.score(rows)
    assert one.graphs.stats()["eager_busy"] == before + 1
    features = [features_of([one.events.row(user, candidates=20)]) for user in range(6)]
    want = [one.recomputing(each) for each in features]
    got = [[] for _ in features]

    def work(index):
        for _ in range(8):
            got[index].append(one.model(features[index]))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine, right in zip(got, want, strict=True):
        assert all(relative_error(each, right) <= TOLERANCE for each in mine)
        assert len(mine) == 8


@pytest.mark.parametrize("defect", ["slots", "plan", "rows"])
def test_what_belongs_to_one_batch_cannot_be_recorded(pair, monkeypatch, defect):
    """Plants something of the first batch in the recordings: recording refuses it, or scores show it."""
    one = pair()

    class Baked(layers._Stretch):
        def __init__(self, *args):
            super().__init__(*args)
            self._rows = args[-1].num_rows
            self._metadata = copy.copy(self._metadata)
            if defect != "rows":
                setattr(self._metadata, defect, getattr(self._metadata, defect).clone())

        def _output(self, *args):
            out = super()._output(*args)
            if defect == "rows":
                out[self._rows :].zero_()
            return out

    monkeypatch.setattr(layers, "_Stretch", Baked)
    if defect == "rows":
        with pytest.raises(AssertionError):
            one.stream(20)
        return
    one.stream(5)
    assert one.graphs.stats()["recorded"] == 0
    assert one.graphs.stats()["failures"] > 0


class LateCopies:
    """Copies that happen when somebody waits for them: what a device may do at the worst."""

    def __init__(self):
        self.pending, self.arrived = [], []

    def copy(self, to, source):
        self.pending.append((to, source))

    def event(self):
        return LateEvent(self)

    def run(self, count):
        while len(self.arrived) < count:
            to, source = self.pending.pop(0)
            to.copy_(source)
            self.arrived.append(to.clone())


class LateEvent(NoEvent):
    def __init__(self, copies):
        self.copies, self.at = copies, 0

    def record(self):
        self.at = len(self.copies.arrived) + len(self.copies.pending)

    def synchronize(self):
        self.copies.run(self.at)


@pytest.mark.parametrize("waits", [True, False], ids=["", "defect: refilled too early"])
def test_staging_is_not_refilled_while_a_copy_is_in_flight(waits, monkeypatch):
    if not waits:
        monkeypatch.setattr(LateEvent, "synchronize", lambda self: None)
    copies = LateCopies()
    bucket = Bucket(rows=2, tokens=64, pages=64, block_m=32, split_tiles=0, segments=0)
    metadata = Metadata(bucket, torch.device("cpu"), copies)
    generator = torch.Generator().manual_seed(3)
    sent = []
    for _ in range(7):
        tokens = int(torch.randint(1, 64, (), generator=generator))
        slots = torch.randint(-1, 1000, (tokens,), generator=generator)
        pages = torch.randint(0, 500, (9,), generator=generator).int().numpy()
        array = torch.tensor
        lengths = Lengths(
            array([0, tokens]).numpy(), array([0]).numpy(), array([33]).numpy(), pages, array([0, 9]).int().numpy()
        )
        metadata.send(cut(lengths, block_m=32, heads=1, window=0, processors=8), slots)
        sent.append((slots, pages))
        assert len(copies.pending) <= 2 or not waits
    copies.run(7)
    good = []
    for (slots, pages), there in zip(sent, copies.arrived, strict=True):
        plan = there[64:].view(torch.int32)
        at = metadata._sections
        tiles = plan[at[1]].view(-1, 3)[:, 0]
        used = -(-len(slots) // 32)
        good.append(
            torch.equal(there[: len(slots)], slots)
            and bool((there[len(slots) : 64] == -1).all())
            and plan[at[3]][:9].tolist() == pages.tolist()
            and tiles.tolist() == [0] * used + [-1] * (len(tiles) - used)
            and plan[at[0]].tolist() == [0, len(slots), 0, 33, 0, 0, 0, 0, 0, 0]
        )
    assert all(good) == waits
