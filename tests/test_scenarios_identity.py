"""Whose keys and values they are, and of which content (scenarios D1 to D5)."""

import random

import pytest
import torch

from mtserve_plugin import HierarchicalKVCache
from tests.cache import scenario
from tests.cache.driver import Request, begin, history_of, push_out, serve, tiny_config, visit
from tests.cache.scenario import BOUNDARIES, CHUNK, PAGE, attend_all_layers, check_cached, rise

make = scenario.make


def hashed(cache, history, user=1, **identity):
    """Serves one row whose content is checked; returns its cached length."""
    context, key = identity.get("context", 0), identity.pop("key", 0)
    request = Request(user, history, 2, context, key, identity.get("version", ""))
    cache.drain()  # a cut waits for the copy that still reads what is cut
    return serve(cache, [request], hashed=True, **identity).cached_lengths.tolist()[0]


# ---- D1: model versions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("away", [False, True], ids=["pages", "host"])
def test_d1_versions_live_side_by_side(make, away):
    cache = make(num_pages=60, chunks=20)
    for length, cached in ((30, 0), (33, 30)):
        for version in ("old", "new"):
            assert visit(cache, (1, length), (2, 9), version=version)[0] == cached
            if away:
                cache.flush()
                push_out(cache)
    assert cache.lengths(1, version="old")["committed"] == cache.lengths(1, version="new")["committed"] == 33
    assert cache.lengths(1, version="never seen") is None


def test_d1_a_retired_version_misses_at_once_and_is_reclaimed_lazily(make):
    cache = make(num_pages=40, chunks=20)
    visit(cache, *[(user, 30) for user in range(5)], version="old")
    cache.flush()
    cache.retire_version("old")
    assert cache.lengths(0, version="old") is None
    before = cache.stats()
    rows = [(user, 30) for user in range(5)]
    for cached in (0, 30):
        assert visit(cache, *rows, version="new") == [cached] * 5
        cache.flush()
    # What the old version held made room without being counted as lost, and without being copied.
    assert rise(before, cache.stats(), "lost_tokens", "onloads", "rows_without_room") == [0, 0, 0]
    assert visit(cache, (0, 30), version="old") == [0]  # the name may come back, the content may not


def test_d1_a_batch_of_a_retired_version_finishes_but_publishes_nothing(make):
    cache = make(num_pages=40)
    request = Request(1, history_of(1, 20), 1, version="old")
    serve(cache, [request], version="old")
    longer = Request(1, history_of(1, 29), 1, version="old")
    before = cache.stats()
    with begin(cache, [longer], version="old") as batch:
        assert batch.cached_lengths.tolist() == [20]
        cache.retire_version("old")
        assert visit(cache, (1, 20), version="new") == [0]
        check_cached(cache, batch, [longer])
        attend_all_layers(cache, batch, [longer])
    assert rise(before, cache.stats(), "unpublished_rows", "stored_tokens") == [1, 20]
    assert cache.lengths(1, version="old") is None
    cache.evict([1])
    assert cache.stats()["pages_free"] == 40


def test_d1_retiring_unknown_or_twice_is_harmless(make):
    cache = make()
    cache.retire_version("never seen")
    visit(cache, (1, 9), version="a")
    cache.retire_version("a")
    cache.retire_version("a")
    assert visit(cache, (1, 9), version="b") == [0]
    assert visit(cache, (1, 9), version="b") == [9]


# ---- D2: edits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["replace", "delete", "insert"])
@pytest.mark.parametrize("at", [n for n in BOUNDARIES if n < 34])
@pytest.mark.parametrize("away", [False, True], ids=["pages", "host"])
def test_d2_an_edit_keeps_the_whole_pages_before_it(make, change, at, away):
    cache = make(num_pages=60, chunks=20)
    history = list(range(100, 135))
    assert hashed(cache, history) == 0
    if away:
        cache.flush()
        push_out(cache)
    before = cache.stats()
    edited = {
        "replace": [*history[:at], 7, *history[at + 1 :]],
        "delete": [*history[:at], *history[at + 1 :]],
        "insert": [*history[:at], 7, *history[at:]],
    }[change]
    assert hashed(cache, edited) == at - at % PAGE
    assert sum(rise(before, cache.stats(), "edited_rows", "truncated_rows")) == 1
    assert cache.stats()["onload_tokens"] - before["onload_tokens"] <= at  # the dead rest is not brought
    assert hashed(cache, [*edited, 8]) == len(edited)
    assert hashed(cache, history) == at - at % PAGE  # the old content is gone


def test_d2_an_edit_in_the_unfinished_last_page(make):
    cache = make()
    history = list(range(10))
    assert hashed(cache, history) == 0
    assert hashed(cache, [*history, 10]) == 10
    assert hashed(cache, [*history[:9], 99, 10]) == 8
    # An append where the last event changed too.
    assert hashed(cache, [*history[:9], 99, 11, 12]) == 8
    assert hashed(cache, [*history[:9], 99, 11, 12]) == 12


def test_d2_every_single_edit_is_seen():
    """Whatever position changes to whatever, nothing at or behind it is offered."""
    rng = random.Random(4)
    with HierarchicalKVCache(tiny_config(num_pages=60)) as cache:
        for _ in range(60):
            history = [rng.randrange(4) for _ in range(rng.randint(1, 40))]  # many equal tokens
            serve(cache, [Request(1, history, 1)], hashed=True)
            at = rng.randrange(len(history))
            edited = list(history)
            if rng.random() < 0.5 and at + 1 < len(history):
                edited[at], edited[at + 1] = edited[at + 1], edited[at]  # two events swapped
            else:
                edited[at] = rng.randrange(4)
            cached = serve(cache, [Request(1, edited, 1)], hashed=True).cached_lengths.tolist()[0]
            same = next((i for i, (a, b) in enumerate(zip(history, edited, strict=True)) if a != b), len(history))
            assert cached == (same if same == len(history) else same - same % PAGE)
            cache.evict([1])


def test_d2_content_that_was_never_hashed_is_not_trusted(make):
    cache = make()
    assert visit(cache, (1, 20)) == [0]
    assert visit(cache, (1, 20), hashed=True) == [0]
    assert visit(cache, (1, 22), hashed=True) == [20]
    assert visit(cache, (1, 23)) == [22]  # who does not ask for a check gets none
    assert visit(cache, (1, 23), hashed=True) == [0]


def test_d2_the_hashes_end_with_the_tokens_that_were_lost(make):
    """Eviction cuts in whole pages of the device, or at a persisted tail; what is left is still checked."""
    cache = make(num_pages=60, chunks=20, tail_write_back=False)
    history = list(range(50))
    hashed(cache, history[:22])
    cache.flush()
    hashed(cache, history[:31])
    push_out(cache)
    assert cache.lengths(1)["committed"] == 22
    assert hashed(cache, [*history[:21], 99, *history[22:31]]) == 20
    push_out(cache)
    assert hashed(cache, history) in (16, 20)


# ---- D3: context --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_hashes", [False, True])
@pytest.mark.parametrize("away", [False, True], ids=["pages", "host"])
def test_d3_a_changed_context_is_an_edit_at_position_0(make, with_hashes, away):
    cache = make(num_pages=60, chunks=20)

    def ask(length, key, context=3):
        cache.flush()
        if away:
            push_out(cache)
        request = Request(1, history_of(1, length), 1, context, key)
        return serve(cache, [request], hashed=with_hashes, context=context).cached_lengths.tolist()[0]

    assert [ask(20, 5), ask(21, 5), ask(21, 6), ask(21, 5), ask(21, 5)] == [0, 20, 0, 0, 21]
    assert [ask(21, 5, context=4), ask(21, 5, context=4), ask(22, 0, context=0)] == [0, 21, 0]
    assert cache.stats()["edited_rows"] == 4


@pytest.mark.parametrize("context", [1, PAGE - 1, PAGE, PAGE + 1, CHUNK])
@pytest.mark.parametrize("length", [0, 1, PAGE, 17])
def test_d3_context_rows_are_cached_with_the_history_or_computed(make, context, length):
    cache = make(num_pages=60, chunks=20)
    for step, cached in enumerate((0, length, length)):
        request = Request(1, history_of(1, length + step // 2), 1, context, 3)
        batch = serve(cache, [request], context=context)
        assert batch.cached_lengths.tolist() == [cached]
        assert batch.context_lengths.tolist() == [0 if cached else context]


def test_d3_rows_with_different_context_in_one_batch(make):
    cache = make()
    rows = [Request(user, history_of(user, 10), 1, 2, user + 50) for user in range(3)]
    serve(cache, rows, context=2)
    rows[1] = Request(1, history_of(1, 10), 1, 2, 99)
    assert serve(cache, rows, context=2).cached_lengths.tolist() == [10, 0, 10]


# ---- D4: sliding --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropped", [1, PAGE - 1, PAGE, PAGE + 1, CHUNK, 30])
@pytest.mark.parametrize("grown", [0, 1, 30])
@pytest.mark.parametrize("away", [False, True], ids=["pages", "host"])
def test_d4_a_slid_window_is_detected(make, dropped, grown, away):
    cache = make(num_pages=60, chunks=20)
    events = list(range(200))
    assert hashed(cache, events[:40]) == 0
    if away:
        cache.flush()
        push_out(cache)
    window = events[dropped : 40 + grown]
    assert hashed(cache, window) == 0
    assert hashed(cache, window) == len(window)
    assert hashed(cache, events[:40]) == 0


# ---- D5: ids and independence -------------------------------------------------------------------------------------

AWKWARD = [0, 1, -1, 2**63 - 1, -(2**63), 2**32, 2**32 + 1, -(2**32), 2**31, -(2**31), 0x9E3779B97F4A7C15 - 2**64]


def test_d5_ids_are_full_64_bit(make):
    cache = make(num_pages=200, chunks=40)
    rows = [(user, 5 + i) for i, user in enumerate(AWKWARD)]
    requests = [Request(user, [i * 100 + t for t in range(n)], 1) for i, (user, n) in enumerate(rows)]
    for cached in (0, 1):
        batch = serve(cache, requests)
        assert batch.cached_lengths.tolist() == [n * cached for _, n in rows]
    assert cache.stats()["entries"] == len(AWKWARD)
    assert [cache.lengths(user)["committed"] for user in AWKWARD] == [n for _, n in rows]
    cache.evict(torch.tensor(AWKWARD[:5]))
    assert cache.stats()["entries"] == len(AWKWARD) - 5
    assert cache.lengths(2**32)["committed"] == 10


def test_d5_thousands_of_ids_come_and_go(make):
    """The map grows, shrinks and keeps its promises under ids that collide in their low bits."""
    cache = make(num_pages=3000)
    rng = random.Random(3)
    alive = {}
    for _ in range(40):
        users = [(rng.randrange(200) << 48) | rng.choice([0, 1]) for _ in range(30)]
        for user in users:
            alive[user] = rng.randint(1, 9)
        batch = cache.begin(users, [alive[u] for u in users], num_candidates=0)
        x = torch.zeros(batch.num_rows, 2, 4)
        for layer in range(2):
            batch.append(layer, x, torch.zeros(batch.num_rows, 2, 6))
        cache.commit(batch)
        gone = rng.sample(sorted(alive), min(20, len(alive)))
        cache.evict(gone)
        for user in gone:
            del alive[user]
        cache.check()
        assert cache.stats()["entries"] == len(alive)
        assert all(cache.lengths(user)["committed"] == n for user, n in alive.items())


def test_d5_caches_are_independent(make):
    first, second = make(), make(num_heads=1)
    assert visit(first, (1, 20)) == [0]
    assert visit(second, (1, 20)) == [0]
    second.clear()
    assert visit(first, (1, 20)) == [20]
    assert visit(second, (1, 20)) == [0]
    assert (first.stats()["requests"], second.stats()["requests"]) == (2, 2)
