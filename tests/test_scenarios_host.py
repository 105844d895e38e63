"""Offload and the host tier (scenarios B1 to B11)."""

import itertools
import random

import pytest

from tests.cache import scenario
from tests.cache.driver import Request, begin, history_of, push_out, serve, visit
from tests.cache.scenario import BOUNDARIES, CHUNK, PAGE, attend_all_layers, check_cached, index

make = scenario.make


def store(idx, user, tokens):
    """One committed visit; returns the offloads it starts."""
    return idx.commit(idx.begin([user], [tokens]))


def carry_out(idx, tasks):
    """Completes tasks and what follows from them, in order."""
    ranges = []
    while tasks:
        task = tasks.pop(0)
        ranges.append((task.first, task.end))
        tasks += idx.offload_done(task)
    return ranges


def used_slots(idx):
    stats = idx.stats()
    return stats["slots_total"] - stats["slots_free"]


# ---- B1: back before the offload is done --------------------------------------------------------------------------


@pytest.mark.parametrize("when", list(itertools.combinations(range(8), 3)))
def test_b1_no_range_is_copied_twice_and_none_skipped(when):
    """Eight visits of five tokens; the offload in flight completes only after the visits in `when`."""
    idx = index(num_pages=60, chunks=10, tail_write_back=False)
    waiting, ranges, persisted = [], [], 0
    for visit_number in range(8):
        waiting += store(idx, 1, 5 * (visit_number + 1))
        if visit_number in when:
            ranges += carry_out(idx, waiting)
        assert len(waiting) <= 1, "two offloads of one user at once"
        assert idx.lengths(1)[2] >= persisted
        persisted = idx.lengths(1)[2]
    ranges += carry_out(idx, waiting)
    # The last visit published 40 tokens: two full chunks.
    assert ranges[0][0] == 0
    assert ranges[-1][1] == 32
    assert all(end == first for (_, end), (first, _) in itertools.pairwise(ranges))
    assert idx.lengths(1) == (40, 40, 32)


@pytest.mark.parametrize("strategy", ["direct", "staged"])
def test_b1_visits_during_the_offload_are_right(make, strategy):
    cache = make(num_pages=60, chunks=20, offload_strategy=strategy)
    cache._engine.inject_faults(delay_us=5_000)
    for length in (18, 20, 33, 33, 50, 64, 65):
        visit(cache, (1, length))
    cache.flush()
    stats = cache.stats()
    assert cache.lengths(1) == {"committed": 65, "device": 65, "persisted": 65}
    assert stats["offload_tokens"] >= 65
    push_out(cache)
    assert visit(cache, (1, 66)) == [65]


# ---- B2: the quota ------------------------------------------------------------------------------------------------


def test_b2_a_full_quota_refuses_and_a_later_visit_retries():
    idx = index(num_pages=100, chunks=20, offload_quota_tokens=32, tail_write_back=False)
    first = store(idx, 1, 32)
    assert [(t.first, t.end) for t in first] == [(0, 32)]
    assert store(idx, 2, 16) == []
    assert idx.stats()["offloads_refused_quota"] == 1
    assert idx.lengths(2) == (16, 16, 0)
    carry_out(idx, first)
    # Nothing was marked as queued: the retry starts at the beginning.
    assert [(t.first, t.end) for t in store(idx, 2, 20)] == [(0, 16)]


def test_b2_a_long_user_goes_through_a_small_quota_in_pieces():
    idx = index(num_pages=100, chunks=20, offload_quota_tokens=32, tail_write_back=False)
    assert carry_out(idx, store(idx, 1, 100)) == [(0, 32), (32, 64), (64, 96)]
    assert idx.lengths(1) == (100, 100, 96)


def test_b2_a_tail_that_is_rewritten_counts_in_full():
    idx = index(num_pages=100, chunks=20, offload_quota_tokens=16, tail_write_back=False)
    store(idx, 1, 6)
    carry_out(idx, idx.plan_flush())
    assert idx.lengths(1)[2] == 6
    # The tail's block of 8 tokens is too small: it is written again from token 0.
    tasks = store(idx, 1, 22)
    assert [(t.first, t.end) for t in tasks] == [(0, 16)]
    assert idx.stats()["pending_offload_tokens"] == 16
    carry_out(idx, tasks)
    assert carry_out(idx, idx.plan_flush()) == [(16, 22)]
    other = store(idx, 2, 16)
    assert store(idx, 1, 36) == []  # the quota is used up
    carry_out(idx, other)
    # 14 tokens are new behind 22, but 20 would be written: more than the quota.
    (task,) = idx.plan_flush()
    assert (task.first, task.end) == (16, 32)
    assert idx.stats()["pending_offload_tokens"] == 16


def test_b2_pending_tokens_never_exceed_the_quota(make):
    cache = make(num_pages=200, chunks=40, offload_quota_tokens=32)
    cache._engine.inject_faults(delay_us=3_000)
    for step in range(10):
        visit(cache, *[(user, 16 * step + user) for user in range(4)])
        assert cache.stats()["pending_offload_tokens"] <= 32
    cache._engine.inject_faults()
    cache.flush()
    assert [cache.lengths(user)["persisted"] for user in range(4)] == [144, 145, 146, 147]


# ---- B4: a full host ----------------------------------------------------------------------------------------------


def test_b4_the_coldest_users_without_pages_go_first():
    idx = index(num_pages=24, chunks=4, tail_write_back=False)
    for user in range(3):  # 0 is the coldest
        carry_out(idx, store(idx, user, 16))
    # 1 and 2 keep pages, 0 loses all of its own: 12 pages in use, 12 free.
    idx.abort(idx.begin([99], [16 * PAGE]))
    assert [idx.lengths(user)[1] for user in range(3)] == [0, 16, 16]
    idx.commit(idx.begin([0], [0]))  # a visit that cuts user 0 to nothing...
    carry_out(idx, store(idx, 0, 16))  # ... and stores it again: now the hottest
    idx.abort(idx.begin([99], [16 * PAGE]))  # user 1 loses its pages
    assert [idx.lengths(user)[1:] for user in range(3)] == [(16, 16), (0, 16), (16, 16)]
    carry_out(idx, store(idx, 3, 32))  # one chunk is free, one more is needed
    assert [idx.lengths(user)[2] for user in range(4)] == [16, -1, 16, 32]


def test_b4_reading_keeps_a_user_warm():
    idx = index(num_pages=40, chunks=4, tail_write_back=False)
    for user in range(4):
        carry_out(idx, store(idx, user, 16))
    idx.abort(idx.begin([99], [40 * PAGE]))  # nobody has pages left
    read = idx.begin([0], [16])  # the oldest is read, from the host
    for task in read.onloads:
        idx.onload_done(task)
    idx.commit(read)
    idx.abort(idx.begin([99], [40 * PAGE]))
    carry_out(idx, store(idx, 4, 16))
    assert [idx.lengths(user)[2] for user in range(5)] == [16, -1, 16, 16, 16]


def test_b4_slots_go_from_the_tail():
    idx = index(num_pages=60, chunks=4, tail_write_back=False)
    carry_out(idx, store(idx, 1, 64))
    idx.abort(idx.begin([99], [60 * PAGE]))
    assert idx.lengths(1) == (64, 0, 64)
    for user, left in ((2, 48), (3, 32), (4, 16)):
        carry_out(idx, store(idx, user, 16))
        idx.abort(idx.begin([99], [60 * PAGE]))
        if left != 48:
            # Users 2, 3 have no pages either, but are hotter.
            assert idx.lengths(2)[2] == 16
        assert idx.lengths(1) == (left, 0, left)
    batch = idx.begin([1], [64])
    assert batch.rows[0][0] == 16
    idx.abort(batch)


def test_b4_users_in_use_keep_their_slots():
    idx = index(num_pages=60, chunks=2, tail_write_back=False)
    carry_out(idx, store(idx, 1, 16))
    carry_out(idx, store(idx, 2, 16))
    reading = idx.begin([1], [16])
    carry_out(idx, store(idx, 3, 16))
    assert [idx.lengths(user)[2] for user in (1, 2, 3)] == [16, 0, 16]
    idx.abort(reading)


def test_b4_no_endless_exchange_with_the_tail_write_back(make):
    cache = make(num_pages=100, chunks=2, offload_quota_tokens=10_000)
    for round_number in range(3):
        visit(cache, *[(user, 20 + round_number) for user in range(4)])
        before = cache.stats()["offloads"]
        cache.flush()
        cache.flush()
        # Each user is tried once or twice, however little fits.
        assert cache.stats()["offloads"] - before <= 8
    settled = cache.stats()["offloads"]
    cache.flush()
    assert cache.stats()["offloads"] == settled
    assert visit(cache, *[(user, 23) for user in range(4)]) == [22] * 4


# ---- B5: clear while offloads are in flight -----------------------------------------------------------------------


@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("how", ["clear", "evict"])
def test_b5_late_completions_of_cleared_work_are_ignored(ok, gathered, how):
    idx = index(num_pages=60, chunks=6, tail_write_back=False)
    tasks = store(idx, 1, 35) + store(idx, 2, 35)
    assert len(tasks) == 2
    if gathered:
        idx.offload_gathered(tasks[0])
    idx.clear() if how == "clear" else idx.evict([1, 2])
    assert idx.lengths(1) == (-1, -1, -1)
    assert idx.check() == ""
    store(idx, 1, 10)  # a new life
    for task in reversed(tasks):
        assert idx.offload_done(task, ok) == []
        assert idx.check() == ""
    assert idx.lengths(1) == (10, 10, 0)
    assert idx.lengths(2) == (-1, -1, -1)
    assert used_slots(idx) == 0
    assert idx.stats()["offload_tokens"] == 0
    idx.clear()
    assert idx.stats()["pages_free"] == 60


@pytest.mark.parametrize("strategy", ["direct", "staged"])
def test_b5_clear_under_real_copies(make, strategy):
    cache = make(num_pages=60, chunks=10, offload_strategy=strategy)
    cache._engine.inject_faults(delay_us=3_000)
    for life in range(5):
        requests = [Request(user, range(life * 1000, life * 1000 + 35), 1) for user in range(3)]
        assert serve(cache, requests).cached_lengths.tolist() == [0, 0, 0]
        assert cache.stats()["transfers_in_flight"] > 0
        cache.clear()
    cache.drain()
    stats = cache.stats()
    assert (stats["slots_free"], stats["pages_free"]) == (stats["slots_total"], stats["pages_total"])


# ---- B6: a partial last chunk -------------------------------------------------------------------------------------


@pytest.mark.parametrize("persisted", [n for n in BOUNDARIES if n])
@pytest.mark.parametrize("grown", [1, 2, PAGE, CHUNK - 1, CHUNK, CHUNK + 3])
def test_b6_a_tail_grows_on_the_host(make, persisted, grown):
    cache = make(num_pages=60, chunks=10)
    visit(cache, (1, persisted))
    cache.flush()
    assert cache.lengths(1)["persisted"] == persisted
    # From the host, into a page that the delta shares.
    push_out(cache)
    assert visit(cache, (1, persisted + grown)) == [persisted]
    assert visit(cache, (1, persisted + grown)) == [persisted + grown]
    cache.flush()
    assert cache.lengths(1)["persisted"] == persisted + grown
    push_out(cache)
    assert visit(cache, (1, persisted + grown)) == [persisted + grown]


def test_b6_grows_in_place_while_there_is_room():
    idx = index(num_pages=60, chunks=4)
    store(idx, 1, 5)
    (first,) = idx.plan_flush()
    assert (first.first, first.end, [order for _, order in first.blocks]) == (0, 5, [1])
    idx.offload_done(first)
    store(idx, 1, 8)
    (second,) = idx.plan_flush()
    assert (second.first, second.end, second.blocks) == (5, 8, first.blocks)
    idx.offload_done(second)
    store(idx, 1, 9)
    (third,) = idx.plan_flush()
    assert (third.first, third.end, [order for _, order in third.blocks]) == (0, 9, [2])
    assert used_slots(idx) == 2 + 4  # the old block serves readers until the new one is complete
    idx.offload_done(third)
    assert used_slots(idx) == 4
    assert idx.lengths(1) == (9, 9, 9)


def test_b6_a_failed_rewrite_keeps_the_old_tail():
    idx = index(num_pages=60, chunks=4)
    store(idx, 1, 5)
    carry_out(idx, idx.plan_flush())
    store(idx, 1, 13)
    (rewrite,) = idx.plan_flush()
    idx.offload_done(rewrite, False)
    assert idx.lengths(1) == (13, 13, 5)
    assert used_slots(idx) == 2
    assert idx.check() == ""


def test_b6_an_append_is_newer_than_the_onload(make):
    """The batch appends to the page that its own onload is about to fill in part."""
    cache = make(num_pages=60, chunks=10)
    visit(cache, (1, 18))
    cache.flush()
    push_out(cache)
    cache._engine.inject_faults(delay_us=20_000)
    requests = [Request(1, history_of(1, 23), 1)]
    with begin(cache, requests) as batch:
        assert batch.cached_lengths.tolist() == [18]
        attend_all_layers(cache, batch, requests)
    cache.drain()
    with begin(cache, requests) as batch:
        assert batch.cached_lengths.tolist() == [23]
        check_cached(cache, batch, requests)


@pytest.mark.parametrize("strategy", ["direct", "staged"])
@pytest.mark.parametrize("persisted", [n for n in BOUNDARIES if n % PAGE])
def test_b6_an_onload_leaves_the_rest_of_its_last_page_alone(make, persisted, strategy):
    cache = make(num_pages=60, onload_pages=20, chunks=10, onload_strategy=strategy)
    visit(cache, (1, persisted))
    cache.flush()
    push_out(cache)
    cache.table.fill_(float("nan"))
    batch = begin(cache, [Request(1, history_of(1, persisted + 9), 1)])
    for layer in range(cache.config.num_layers):
        last = cache.table[layer, batch.wait(layer).indices[-1]]
        split = PAGE * cache.config.k_row
        for rows in (last[:split].view(PAGE, -1), last[split:].view(PAGE, -1)):
            assert not rows[: persisted % PAGE].isnan().any()
            assert rows[persisted % PAGE :].isnan().all()
    cache.abort(batch)


# ---- B6, A1, D2: while the only copy is between the tiers ---------------------------------------------------------


def in_transit(tokens, hashes=()):
    """A user whose pages were gathered by an offload and evicted before the host has them."""
    idx = index(num_pages=12, chunks=10)
    batch = idx.begin([1], [tokens], token_hashes=list(hashes))
    (task,) = idx.commit(batch)
    idx.offload_gathered(task)
    idx.abort(idx.begin([99], [12 * PAGE]))
    assert idx.lengths(1) == (0, 0, 0)
    assert idx.stats()["lost_tokens"] == 0
    return idx, task


def test_b6_what_is_in_transit_is_found_when_it_arrives():
    idx, task = in_transit(16)
    batch = idx.begin([1], [20])
    assert batch.rows[0][0] == 0
    idx.abort(batch)
    idx.offload_done(task)
    assert idx.lengths(1) == (16, 0, 16)


def test_b6_what_is_in_transit_and_fails_is_lost_and_counted():
    idx, task = in_transit(16)
    idx.offload_done(task, False)
    assert idx.lengths(1) == (-1, -1, -1)
    assert idx.stats()["lost_tokens"] == 16
    assert used_slots(idx) == 0


@pytest.mark.parametrize("shorter", [0, 1, PAGE, 10, 15])
@pytest.mark.parametrize("ends", ["commit", "abort"])
def test_a1_shorter_history_while_the_rest_is_in_transit(shorter, ends):
    idx, task = in_transit(16)
    batch = idx.begin([1], [shorter])
    idx.commit(batch) if ends == "commit" else idx.abort(batch)
    idx.offload_done(task)
    # The end that was cut must not come back with the offload.
    assert max(idx.lengths(1)[0], 0) == shorter
    assert idx.stats()["lost_tokens"] == 0
    assert idx.check() == ""


@pytest.mark.parametrize("at", [0, 3, PAGE, 9, 15])
def test_d2_an_edit_while_the_old_content_is_in_transit(at):
    old = list(range(100, 116))
    idx, task = in_transit(16, old)
    new = [*old[:at], 7, *old[at + 1 :]]
    idx.commit(idx.begin([1], [16], token_hashes=new))
    idx.offload_done(task)
    assert idx.check() == ""
    for content in (old, new):
        batch = idx.begin([1], [16], token_hashes=content)
        assert batch.rows[0][0] <= at
        idx.abort(batch)


def test_b6_an_onload_never_reads_a_block_that_is_being_replaced():
    idx = index(num_pages=12, chunks=3, tail_write_back=False)
    store(idx, 1, 5)
    carry_out(idx, idx.plan_flush())
    store(idx, 1, 13)
    (rewrite,) = idx.plan_flush()
    assert rewrite.first == 0
    idx.offload_gathered(rewrite)
    idx.abort(idx.begin([99], [12 * PAGE]))
    assert idx.lengths(1) == (5, 0, 5)
    batch = idx.begin([1], [13])
    idx.prefetch([1])
    reading = {slot for task in batch.onloads for slot, _ in task.blocks}
    idx.offload_done(rewrite)
    # Whoever writes next must not get a block that is still being read.
    written = {slot for user in (2, 3) for task in store(idx, user, 16) for slot, _ in task.blocks}
    assert not reading & written
    assert idx.check() == ""


# ---- B8: completions out of order ---------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("failing", [None, 0, 1, 2])
def test_b8_offloads_complete_in_any_order(order, failing):
    idx = index(num_pages=60, chunks=10, tail_write_back=False, offload_quota_tokens=10_000)
    tasks = [task for user in range(3) for task in store(idx, user, 16 * (user + 1))]
    for which in order:
        idx.offload_done(tasks[which], which != failing)
        assert idx.check() == ""
        expected = [16 * (u + 1) if u in order[: order.index(which) + 1] and u != failing else 0 for u in range(3)]
        assert [idx.lengths(user)[2] for user in range(3)] == expected
    assert idx.stats()["pending_offload_tokens"] == 0
    assert idx.stats()["offload_failures"] == (failing is not None)
    if failing is not None:  # the next visit that brings something tries again
        assert carry_out(idx, store(idx, failing, 16 * (failing + 1) + 1)) == [(0, 16 * (failing + 1))]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("failing", [None, 0, 1, 2])
def test_b8_onloads_complete_in_any_order(order, failing):
    idx = index(num_pages=60, chunks=10, tail_write_back=False, offload_quota_tokens=10_000)
    for user in range(3):
        carry_out(idx, store(idx, user, 16 * (user + 1)))
    idx.abort(idx.begin([99], [60 * PAGE]))
    batch = idx.begin([0, 1, 2], [16, 32, 48])
    tasks = batch.onloads
    assert sorted(batch.loads) == sorted(task.ticket for task in tasks)
    for which in order:
        idx.onload_done(tasks[which], which != failing)
        assert idx.check() == ""
    idx.abort(batch)
    lengths = [16 * (user + 1) if user != failing else 0 for user in range(3)]
    assert [max(idx.lengths(user)[0], 0) for user in range(3)] == lengths
    assert idx.stats()["lost_tokens"] == (0 if failing is None else 16 * (failing + 1))


# ---- B11: fragmentation -------------------------------------------------------------------------------------------


def test_b11_short_tails_take_small_blocks():
    idx = index(num_pages=400, chunks=8, chunk_size=32, offload_quota_tokens=10_000)
    for tokens, slots in ((1, 1), (4, 1), (5, 2), (8, 2), (9, 4), (16, 4), (17, 8), (32, 8), (33, 9), (41, 12)):
        carry_out(idx, store(idx, 1, tokens))
        carry_out(idx, idx.plan_flush())
        assert used_slots(idx) == slots, f"{tokens} tokens"
        assert idx.stats()["slots_largest_free"] == 8
        idx.evict([1])
        assert used_slots(idx) == 0


@pytest.mark.parametrize("seed", range(5))
def test_b11_buddies_merge_again(seed):
    """Hundreds of users with short tails come and go; when they are gone, whole chunks are back."""
    rng = random.Random(seed)
    idx = index(num_pages=2000, chunks=12, chunk_size=32, offload_quota_tokens=10_000)
    alive = []
    for user in range(300):
        carry_out(idx, store(idx, user, rng.choice([1, 3, 4, 5, 9, 17, 32, 40])))
        carry_out(idx, idx.plan_flush())
        alive.append(user)
        if rng.random() < 0.6:
            idx.evict([alive.pop(rng.randrange(len(alive)))])
        stats = idx.stats()
        assert idx.check() == ""
        assert stats["slots_largest_free"] <= stats["slots_free"]
        assert (stats["slots_largest_free"] == 0) == (stats["slots_free"] == 0)
    rng.shuffle(alive)
    for user in alive:
        idx.evict([user])
    stats = idx.stats()
    assert (stats["slots_free"], stats["slots_largest_free"]) == (96, 8)
    # Every chunk can be had whole.
    assert carry_out(idx, store(idx, 1, 12 * 32)) == [(0, 12 * 32)]


def test_b11_a_chunk_is_found_by_evicting_short_tails():
    idx = index(num_pages=400, chunks=1, chunk_size=32, tail_write_back=False, offload_quota_tokens=10_000)
    for user in range(8):
        store(idx, user, 4)
        carry_out(idx, idx.plan_flush())
    assert idx.stats()["slots_free"] == 0
    idx.abort(idx.begin([99], [1600]))  # nobody has pages left: all eight are evictable
    assert carry_out(idx, store(idx, 50, 32)) == [(0, 32)]
    assert idx.stats()["host_evicted_tokens"] == 32
    assert idx.lengths(50) == (32, 32, 32)
