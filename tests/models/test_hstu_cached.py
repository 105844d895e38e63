import copy
import random

import pytest
import torch

from mtserve_plugin import HierarchicalKVCache, NoCache
from mtserve_plugin.errors import CacheError, InputError
from mtserve_plugin.models import HSTURanker, HSTURankerConfig
from tests.models.reference import Events, features_of, reference_scores, relative_error

PAGE, CHUNK = 4, 16
MIB = 1 << 20


@pytest.fixture
def make():
    """Builds a model on a small cache, and a copy of it that recomputes; closes and checks the cache at the
    end.
    """
    caches = []

    def build(
        seed=0,
        *,
        num_pages=200,
        onload_pages=40,
        host_bytes=MIB,
        page_size=PAGE,
        content_check=True,
        **changes,
    ):
        config = HSTURankerConfig.small(**changes)
        sizes = {"num_pages": num_pages, "onload_pages": onload_pages, "host_bytes": host_bytes}
        cache = HierarchicalKVCache(config.cache_config(page_size=page_size, chunk_size=CHUNK, **sizes))
        # Whatever is read without having been written shows.
        cache.table.fill_(float("nan"))
        caches.append(cache)
        cached = HSTURanker(config, cache, seed=seed, content_check=content_check).eval()
        recomputing = copy.deepcopy(cached)
        recomputing.cache = NoCache(config.cache_config())
        return cached, recomputing

    yield build
    for cache in caches:
        cache.flush()
        cache.check()
        cache.close()


def compare(cached, recomputing, rows, tolerance=1e-6):
    features = features_of(rows)
    got, want = cached(features), recomputing(features)
    assert relative_error(got, want) <= tolerance
    return got


def hits(model):
    return model.cache.stats()["hit_tokens"]


@pytest.mark.parametrize(
    ("sizes", "least_hit_ratio"),
    [
        ({}, 0.5),
        ({"num_pages": 60, "onload_pages": 30}, 0.3),
        ({"num_pages": 60, "onload_pages": 0, "host_bytes": 0}, 0.05),
        ({"num_pages": 9, "onload_pages": 3}, 0.0),
        ({"max_attn_len": 11}, 0.5),
    ],
    ids=["roomy", "two tiers", "device only", "tiny", "window"],
)
def test_streams_of_growing_histories(make, sizes, least_hit_ratio):
    cached, recomputing = make(1, **sizes)
    events, rng = Events(2, cached.config), random.Random(3)
    users = [rng.randint(-(2**63), 2**63 - 1) for _ in range(8)]
    scores = []
    for step in range(40):
        # With repetition: the same user may stand twice in a batch, once with a shorter history.
        batch = rng.choices(users, k=rng.randint(1, 5))
        for user in set(batch):
            events.grow(user, rng.choice([0, 0, 1, 3, PAGE, CHUNK]))
        rows = [events.row(user, candidates=rng.randint(1, 4)) for user in batch]
        if step % 7 == 0 and len(batch) > 1:
            rows.append(events.row(batch[0], length=len(rows[0]["item"]) // 2))
        if step % 11 == 5:
            cached.cache.evict([rng.choice(users)])
        features = features_of(rows)
        scores.append((cached(features), recomputing(features)))
    got, want = (torch.cat(side) for side in zip(*scores, strict=True))
    assert relative_error(got, want) <= 1e-6
    # Both agree, and at the end of the stream they are right.
    assert relative_error(scores[-1][0], reference_scores(recomputing, rows)) <= 1e-6
    stats = cached.cache.stats()
    assert least_hit_ratio <= stats["total_hit_ratio"] <= 1


@pytest.mark.parametrize("length", [0, 1, PAGE, PAGE + 1, CHUNK, 3 * CHUNK])
def test_a_second_visit_without_new_events(make, length):
    cached, recomputing = make(4)
    events = Events(5, cached.config)
    events.grow(1, length)
    compare(cached, recomputing, [events.row(1)])
    assert hits(cached) == 0
    compare(cached, recomputing, [events.row(1), events.row(2, candidates=2)])
    assert hits(cached) == length


def test_the_same_user_twice_in_a_batch(make):
    cached, recomputing = make(6)
    events = Events(7, cached.config)
    events.grow(1, 30)
    compare(cached, recomputing, [events.row(1), events.row(1, length=20), events.row(1)])
    events.grow(1, 5)
    compare(cached, recomputing, [events.row(1, length=33), events.row(1), events.row(1)])
    assert cached.cache.lengths(1)["committed"] == 35


def test_evicted_users_come_back(make):
    cached, recomputing = make(8)
    events = Events(9, cached.config)
    for user in (1, 2):
        events.grow(user, 40)
    rows = [events.row(1), events.row(2)]
    compare(cached, recomputing, rows)
    cached.cache.evict([1])
    compare(cached, recomputing, rows)
    assert hits(cached) == 40


def test_users_return_from_the_host_tier(make):
    cached, recomputing = make(10, num_pages=14, onload_pages=14)
    events = Events(11, cached.config)
    for user in range(6):
        events.grow(user, 3 * CHUNK)
    for _ in range(2):
        for user in range(6):
            compare(cached, recomputing, [events.row(user)])
            cached.cache.flush()
    assert cached.cache.stats()["host_hit_tokens"] >= 5 * 3 * CHUNK


def test_scores_do_come_from_the_pages(make):
    cached, recomputing = make(12, host_bytes=0, onload_pages=0)
    events = Events(13, cached.config)
    events.grow(1, 3 * PAGE)
    row = events.row(1)
    compare(cached, recomputing, [row])
    cached.cache.table.nan_to_num_(0.0).mul_(-1.0)
    assert relative_error(cached(features_of([row])), recomputing(features_of([row]))) > 1e-2


@pytest.mark.parametrize("change", ["edit", "delete", "slide"])
def test_changed_histories_are_found_out_by_the_content_check(make, change):
    for content_check in (True, False):
        cached, recomputing = make(14, content_check=content_check)
        events = Events(15, cached.config)
        events.grow(1, 50)
        row = events.row(1, candidates=20)
        compare(cached, recomputing, [row])
        for key in ("item", "action", "time"):
            if change == "edit":
                row[key] = [*row[key][:10], row[key][10] ^ 1, *row[key][11:]]
            elif change == "delete":
                row[key] = row[key][:10] + row[key][11:] + row[key][-1:]
            else:
                row[key] = row[key][1:] + row[key][-1:]
        error = relative_error(cached(features_of([row])), recomputing(features_of([row])))
        if content_check:
            assert error <= 1e-6
            assert hits(cached) == (0 if change == "slide" else 10 // PAGE * PAGE)
        else:
            assert error > 1e-5


def test_new_weights_under_a_new_version_read_nothing_old(make):
    cached, recomputing = make(16)
    events = Events(17, cached.config)
    events.grow(1, 40)
    row = events.row(1)
    compare(cached, recomputing, [row])
    for model in (cached, recomputing):
        model.load_state_dict(HSTURanker(model.config, NoCache(model.config.cache_config()), seed=99).state_dict())
    # Control: under the old version the old keys and values are used.
    assert relative_error(cached(features_of([row])), recomputing(features_of([row]))) > 1e-2
    cached.version = "2"
    compare(cached, recomputing, [row])
    compare(cached, recomputing, [row])


def test_a_failure_in_the_middle_leaves_the_cache_as_it_was(make, monkeypatch):
    cached, recomputing = make(18)
    events = Events(19, cached.config)
    events.grow(1, 20)
    compare(cached, recomputing, [events.row(1)])
    before = cached.cache.lengths(1)["committed"]
    events.grow(1, 10)
    row = events.row(1)

    def fail(*_, **__):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(cached.layers[2], "output", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            cached(features_of([row]))
    with pytest.raises(IndexError):
        cached(features_of([row | {"candidate": [cached.config.num_items]}]))
    with pytest.raises(InputError):
        cached(features_of([row]).permute([0, 1, 2, 3, 4]))
    cached.train()
    with pytest.raises(CacheError, match="training mode"):
        cached(features_of([row]))
    cached.eval()
    assert cached.cache.lengths(1)["committed"] == before == 20
    compare(cached, recomputing, [row])


def test_bfloat16_against_its_own_cold_path(make):
    cached, recomputing = make(20, dtype="bfloat16", page_size=8)
    events = Events(21, cached.config)
    for step in range(6):
        events.grow(1, 9)
        events.grow(2, step)
        compare(cached, recomputing, [events.row(1), events.row(2)], tolerance=1e-2)
    assert hits(cached) > 0
