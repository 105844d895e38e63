"""Pages: how they are given, taken back and shared (scenarios A1 to A12)."""

import itertools
import time

import pytest
import torch

from mtserve_plugin.errors import OnloadError
from tests.cache import scenario
from tests.cache.driver import Request, Stop, begin, history_of, push_out, serve, visit
from tests.cache.scenario import BOUNDARIES, PAGE, attend_all_layers, check_cached, index, rise

make = scenario.make


# ---- A1: a shorter history ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["pages", "host", "both", "host-tail-ahead"])
@pytest.mark.parametrize("shorter", [n for n in BOUNDARIES if n < 35])
def test_a1_shorter_history_drops_the_suffix_and_nobody_else(make, where, shorter):
    cache = make(chunks=20)
    visit(cache, (1, 35), (2, 21))
    if where != "pages":
        cache.flush()
    if where == "host":
        push_out(cache)
    if where == "host-tail-ahead":
        push_out(cache, cache.stats()["pages_free"] + 3)  # the coldest user keeps some pages
    before = cache.stats()
    other = cache.lengths(2)
    assert visit(cache, (1, shorter)) == [shorter]
    cache.drain()
    stored = cache.lengths(1)
    assert (stored["committed"] if stored else 0) == shorter
    assert cache.lengths(2)["committed"] == other["committed"]
    assert rise(before, cache.stats(), "truncated_rows", "edited_rows", "lost_tokens") == [1, 0, 0]
    # What was dropped is gone for good, and what is appended in its place is found.
    assert visit(cache, (1, 35)) == [shorter]
    assert visit(cache, (1, 36), (2, 22)) == [35, 21]


def test_a1_shorter_in_a_batch_of_several(make):
    cache = make(chunks=20)
    rows = [(user, 20 + user) for user in range(5)]
    visit(cache, *rows)
    before = cache.stats()
    assert visit(cache, (0, 7), (1, 21), (2, 0), (3, 30), (4, 23)) == [7, 21, 0, 23, 23]
    assert rise(before, cache.stats(), "truncated_rows", "device_evicted_pages", "lost_tokens") == [3, 0, 0]
    assert visit(cache, *rows) == [7, 21, 0, 23, 23]


def test_a1_shorter_and_different(make):
    cache = make()
    serve(cache, [Request(1, range(30), 1)], hashed=True)
    # Nothing of the prefix matches: the whole entry goes.
    other = serve(cache, [Request(1, range(100, 110), 1)], hashed=True)
    assert other.cached_lengths.tolist() == [0]
    assert cache.lengths(1)["committed"] == 10
    again = serve(cache, [Request(1, range(100, 110), 1)], hashed=True)
    assert again.cached_lengths.tolist() == [10]


def test_a1_shorter_while_another_batch_reads_the_longer(make):
    cache = make()
    visit(cache, (1, 30))
    with begin(cache, [Request(1, history_of(1, 30), 1)]) as reading:
        assert reading.cached_lengths.tolist() == [30]
        assert visit(cache, (1, 10)) == [10]
        assert visit(cache, (1, 30)) == [10]  # cut for whoever comes now, though the pages are still being read
        assert cache.lengths(1)["committed"] == 10
        check_cached(cache, reading, [Request(1, history_of(1, 30), 1)])
    assert cache.lengths(1) == {"committed": 10, "device": 10, "persisted": 0}
    assert visit(cache, (1, 30)) == [10]
    assert visit(cache, (1, 30)) == [30]


# ---- A2, A3: duplicates -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [2, 3])
@pytest.mark.parametrize("length", [1, PAGE, 18])
def test_a2_same_user_twice_same_length(make, copies, length):
    cache = make(chunks=20)
    before = cache.stats()
    assert visit(cache, *[(5, length)] * copies) == [0] * copies
    asked = copies * length
    assert rise(before, cache.stats(), "requests", "history_tokens", "stored_tokens") == [copies, asked, length]
    assert visit(cache, *[(5, length)] * copies) == [length] * copies
    after = cache.stats()
    assert rise(before, after, "stored_tokens", "hit_tokens", "history_tokens") == [length, asked, 2 * asked]
    assert after["pages_total"] - after["pages_free"] == -(-length // PAGE)


@pytest.mark.parametrize("order", list(itertools.permutations([64, 60, 17])))
@pytest.mark.parametrize("cached", [0, 30])
def test_a3_same_user_twice_different_lengths(make, order, cached):
    cache = make()
    if cached:
        visit(cache, (5, cached))
    before = cache.stats()
    rows = [(5, n) for n in order]
    # 17 < 30 is a duplicate's shorter view, not a shorter history.
    assert visit(cache, *rows) == [min(cached, n) for n in order]
    assert cache.lengths(5)["committed"] == 64
    assert rise(before, cache.stats(), "stored_tokens", "truncated_rows") == [64 - cached, 0]
    assert visit(cache, *rows) == list(order)


def test_a3_duplicates_at_the_papers_page_and_chunk(make):
    cache = make(page_size=32, chunk_size=1024, num_pages=40, offload_quota_tokens=2048, chunks=2)
    assert visit(cache, (5, 1024), (5, 960)) == [0, 0]
    cache.flush()
    assert cache.lengths(5) == {"committed": 1024, "device": 1024, "persisted": 1024}
    push_out(cache)
    assert visit(cache, (5, 960), (5, 1025)) == [960, 1024]


def test_a3_duplicates_with_different_content(make):
    cache = make()
    edited = [*range(10), 999, *range(11, 20)]
    rows = [Request(1, range(20), 1), Request(1, edited, 1), Request(1, range(25), 2)]
    for expected in ([0, 0, 0], [20, 8, 25]):
        assert serve(cache, rows, hashed=True).cached_lengths.tolist() == expected


# ---- A4: too few pages --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [0, 30])
@pytest.mark.parametrize("lengths", [[50, 50, 50, 50], [160, 1], [1, 161], [161, 161], [40] * 6], ids=str)
def test_a4_more_pages_needed_than_exist(make, lengths, chunks):
    cache = make(num_pages=40, chunks=chunks)
    rows = list(enumerate(lengths))
    for _ in range(2):
        visit(cache, *rows)
        cache.check()
        held = [cache.lengths(user) for user, _ in rows]
        pages = sum(-(-h["device"] // PAGE) for h in held if h)
        assert pages <= 40
        assert sum(h is not None for h in held) < len(rows) or pages == sum(-(-n // PAGE) for n in lengths)
    if sum(-(-n // PAGE) for n in lengths) > 40:
        assert cache.stats()["rows_without_room"] > 0


def test_a4_no_page_is_shared(make):
    cache = make(num_pages=20)
    requests = [Request(user, history_of(user, 11), 1) for user in range(10)]
    with begin(cache, requests) as batch:
        slots = batch._slots
        written = slots[slots >= 0]
        assert written.unique().numel() == written.numel()
        assert written.numel() == 6 * 11  # whole rows or nothing
        attend_all_layers(cache, batch, requests)


# ---- A5: everybody else is in use ---------------------------------------------------------------------------------


def test_a5_users_pinned_by_an_offload_are_not_evicted(make):
    cache = make(num_pages=20, chunks=20)
    visit(cache, (1, 40), (2, 40))
    cache.flush()
    cache._engine.inject_faults(delay_us=100_000)
    push_out(cache, 0)
    visit(cache, (1, 40), (2, 40))
    # Both grow by less than a chunk, then are written back; while that runs their pages are pinned.
    before = cache.stats()
    cache.evict([1, 2])
    visit(cache, (1, 40), (2, 40))
    assert cache.stats()["transfers_in_flight"] == 2
    assert visit(cache, (3, 12)) == [0]
    assert visit(cache, (3, 12)) == [0]
    assert cache.stats()["transfers_in_flight"] > 0, "the offload was too quick to show anything"
    assert rise(before, cache.stats(), "rows_without_room", "device_evicted_pages") == [2, 0]
    assert cache.lengths(1)["device"] == cache.lengths(2)["device"] == 40
    cache.drain()
    assert visit(cache, (3, 12)) == [0]
    assert visit(cache, (3, 12)) == [12]


def test_a5_users_pinned_by_batches_are_not_evicted(make):
    cache = make(num_pages=20)
    requests = [Request(user, history_of(user, 40), 1) for user in (1, 2)]
    serve(cache, requests)
    with begin(cache, requests) as reading:
        assert visit(cache, (3, 8), (1, 44)) == [0, 40]
        assert cache.stats()["device_evicted_pages"] == 0
        check_cached(cache, reading, requests)
        attend_all_layers(cache, reading, requests)
    assert visit(cache, (3, 8)) == [0]
    assert visit(cache, (3, 8)) == [8]


@pytest.mark.parametrize("ends", [True, False])
def test_a5_begin_waits_within_its_bound(make, ends):
    bound = 0.4
    cache = make(num_pages=20, chunks=20, busy_wait_ms=int(bound * 1000))
    reading = None
    if ends:
        cache._engine.inject_faults(delay_us=30_000)
        visit(cache, (1, 80))  # pinned by its offload for a while
    else:
        visit(cache, (1, 80))
        cache.flush()
        reading = begin(cache, [Request(1, history_of(1, 80), 1)])
    started = time.monotonic()
    assert visit(cache, (2, 12)) == [0]
    took = time.monotonic() - started
    if ends:
        assert cache.stats()["rows_without_room"] == 0
        assert visit(cache, (2, 12)) == [12]
    else:
        assert took >= bound * 0.9
        assert cache.stats()["rows_without_room"] == 1
        cache.abort(reading)
    assert took < bound + 2.0  # generous: a busy machine


# ---- A6, A7: victims with and without a host copy -----------------------------------------------------------------


def test_a6_clean_users_go_first_whatever_their_age(make):
    cache = make(num_pages=20, chunks=20, tail_write_back=False)
    visit(cache, (1, 14))  # dirty, the coldest
    visit(cache, (2, 32))  # two full chunks: clean
    cache.drain()
    visit(cache, (3, 14))  # dirty
    push_out(cache, 10)
    assert [cache.lengths(user)["device"] for user in (1, 2, 3)] == [14, 8, 14]
    assert cache.stats()["lost_tokens"] == 0
    assert visit(cache, (1, 14), (2, 32), (3, 14)) == [14, 32, 14]


def test_a6_dirty_tokens_are_lost_last_and_counted(make):
    cache = make(num_pages=20, chunks=20, tail_write_back=False)
    visit(cache, (1, 30))  # one chunk on the host, 14 tokens not
    visit(cache, (2, 15))
    cache.drain()
    push_out(cache, 18)  # 12 pages are in use: the coldest goes
    first, second = cache.lengths(1), cache.lengths(2)
    assert first == {"committed": 16, "device": 0, "persisted": 16}
    assert second == {"committed": 8, "device": 8, "persisted": 0}
    assert cache.stats()["lost_tokens"] == 14 + 7
    before = cache.stats()
    assert visit(cache, (1, 31), (2, 16)) == [16, 8]
    assert rise(before, cache.stats(), "hit_tokens", "history_tokens") == [24, 47]


def test_a6_tails_of_cold_users_are_written_before_they_go(make):
    cache = make(num_pages=40, chunks=60)
    for user in range(30):
        visit(cache, (user, 22))
        cache.drain()
    assert cache.stats()["lost_tokens"] == 0
    assert visit(cache, *[(user, 23) for user in range(4)]) == [22] * 4


@pytest.mark.parametrize("first", ["device", "host"])
@pytest.mark.parametrize("device_pages", [0, 3, 5, 10])
@pytest.mark.parametrize("host_chunks", [0, 1, 2])
def test_a7_both_tiers_evict_parts_in_either_order(make, first, device_pages, host_chunks):
    """The user has 40 tokens: 10 pages, and 3 host blocks of which the tail's holds 8 tokens."""
    cache = make(num_pages=40, chunks=4)
    visit(cache, (1, 40))
    cache.flush()
    assert cache.lengths(1) == {"committed": 40, "device": 40, "persisted": 40}

    def evict_pages():
        push_out(cache, 30 + device_pages)

    def evict_slots():
        # Another user's full chunks need room: the arena has 4, user 1 holds 2.5.
        if host_chunks:
            visit(cache, (50, 16 * (host_chunks + 1)))
            cache.drain()
            cache.evict([50])

    for step in (evict_pages, evict_slots) if first == "device" else (evict_slots, evict_pages):
        step()
    held = cache.lengths(1)
    committed = held["committed"] if held else 0
    assert committed == max(held["device"], held["persisted"]) if held else True
    assert visit(cache, (1, 41)) == [committed]
    assert visit(cache, (1, 41)) == [41]
    stats = cache.stats()
    assert stats["lost_tokens"] == 40 - committed


# ---- A8: evict while in use ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["evict", "clear"])
@pytest.mark.parametrize("busy", ["reader", "writer", "offload", "onload"])
def test_a8_eviction_waits_for_readers_and_copies(make, how, busy):
    cache = make(num_pages=20, chunks=20)
    request = Request(1, history_of(1, 40), 1)
    longer = Request(1, history_of(1, 47), 1)
    delayed = {"delay_us": 60_000}
    if busy == "offload":
        cache._engine.inject_faults(**delayed)
    serve(cache, [request])
    if busy != "offload":
        cache.flush()
    if busy == "onload":
        push_out(cache)
        cache._engine.inject_faults(**delayed)
    batch = begin(cache, [longer if busy == "writer" else request]) if busy != "offload" else None
    cache.evict([1]) if how == "evict" else cache.clear()
    assert cache.lengths(1) is None
    # Everything else may be taken, the pages in use may not.
    visit(cache, (2, 30), (3, 30))
    if busy == "offload":
        assert cache.stats()["transfers_in_flight"] > 0
    if batch is not None:
        check_cached(cache, batch, [longer if busy == "writer" else request])
        attend_all_layers(cache, batch, [longer if busy == "writer" else request])
        cache.commit(batch)
    assert cache.stats()["unpublished_rows"] == (busy == "writer")
    assert cache.lengths(1) is None
    cache._engine.inject_faults()
    cache.drain()
    cache.evict([2, 3])
    stats = cache.stats()
    assert (stats["pages_free"], stats["slots_free"]) == (stats["pages_total"], stats["slots_total"])
    assert visit(cache, (1, 40)) == [0]


def test_a8_a_new_entry_of_the_same_user_is_apart(make):
    cache = make(num_pages=40)
    old = Request(1, range(20), 1)
    serve(cache, [old])
    with begin(cache, [old]) as reading:
        cache.evict([1])
        new = Request(1, range(500, 520), 1)
        assert serve(cache, [new]).cached_lengths.tolist() == [0]
        check_cached(cache, reading, [old])
        attend_all_layers(cache, reading, [old])
    assert serve(cache, [new]).cached_lengths.tolist() == [20]


# ---- A9: a batch fails --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [0, 18])
@pytest.mark.parametrize("stop_at", range(4))
@pytest.mark.parametrize("error", [Stop, torch.OutOfMemoryError, KeyboardInterrupt, OnloadError])
def test_a9_a_failed_batch_leaves_nothing(make, stop_at, cached, error):
    cache = make(num_layers=4)
    if cached:
        visit(cache, (1, cached))
    before = cache.stats()
    requests = [Request(1, history_of(1, 31), 1), Request(2, history_of(2, 9), 1)]

    def fail():
        with begin(cache, requests) as batch:
            for layer in range(stop_at):
                x = torch.full((batch.num_rows, 2, 4), 7.0)
                batch.attend(layer, x, x, torch.full((batch.num_rows, 2, 6), 7.0))
            raise error("in the middle of it")

    with pytest.raises(error):
        fail()
    after = cache.stats()
    assert rise(before, after, "pages_free", "entries", "open_batches", "stored_tokens") == [0, 0, 0, 0]
    assert rise(before, after, "aborts", "commits", "lost_tokens") == [1, 0, 0]
    assert (cache.lengths(1) or {"committed": 0})["committed"] == cached
    assert visit(cache, (1, 31), (2, 9)) == [cached, 0]
    assert visit(cache, (1, 31), (2, 9)) == [31, 9]


def test_a9_all_layers_appended_but_never_committed(make):
    cache = make()
    requests = [Request(1, history_of(1, 31), 1)]
    batch = begin(cache, requests)
    attend_all_layers(cache, batch, requests)
    cache.abort(batch)
    assert cache.lengths(1) is None
    assert visit(cache, (1, 31)) == [0]


# ---- A11: boundaries ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", BOUNDARIES)
@pytest.mark.parametrize("away", [False, True], ids=["pages", "host"])
def test_a11_every_boundary(make, length, away):
    cache = make(chunks=20)
    for grown in BOUNDARIES:
        assert visit(cache, (1, length), candidates=1) == [0]
        if away:
            cache.flush()
            push_out(cache)
            if length:
                assert cache.lengths(1) == {"committed": length, "device": 0, "persisted": length}
        assert visit(cache, (1, length + grown), candidates=1) == [length]
        assert visit(cache, (1, length + grown), candidates=0) == [length + grown]
        cache.evict([1])
        cache.drain()


def test_a11_the_table_is_filled_to_the_last_row(make):
    cache = make(num_pages=10)
    assert visit(cache, (1, 40)) == [0]
    assert visit(cache, (1, 40)) == [40]
    assert cache.stats()["pages_free"] == 0
    assert visit(cache, (1, 41)) == [40]  # one more does not fit
    assert visit(cache, (1, 41)) == [40]
    assert cache.stats()["rows_without_room"] == 2


def test_a11_no_rows_at_all(make):
    cache = make()
    assert visit(cache) == []
    assert visit(cache, (1, 0), candidates=0) == [0]
    assert cache.lengths(1) is None


# ---- A12: all or nothing ------------------------------------------------------------------------------------------


def test_a12_pages_are_not_evicted_in_vain():
    idx = index(num_pages=20)
    for user in range(4):
        idx.commit(idx.begin([user], [20]))
    pinned = idx.begin([0, 1], [20, 20])
    before = idx.stats()
    # 10 pages belong to users that are not in use; 11 cannot be had.
    refused = idx.begin([9], [44])
    assert refused.rows == [(0, False, [])]
    after = idx.stats()
    assert rise(before, after, "device_evicted_pages", "lost_tokens", "rows_without_room") == [0, 0, 1]
    assert [idx.lengths(user)[1] for user in range(4)] == [20] * 4
    idx.abort(refused)
    granted = idx.begin([9], [40])
    assert granted.rows[0][1]
    assert rise(before, idx.stats(), "device_evicted_pages") == [10]
    idx.abort(granted)
    idx.abort(pinned)
    assert idx.check() == ""


def test_a12_slots_are_not_evicted_in_vain():
    idx = index(num_pages=60, chunks=2, tail_write_back=False, offload_quota_tokens=10_000)
    for user in (0, 1):
        (task,) = idx.commit(idx.begin([user], [16]))
        idx.offload_done(task)
    reading = idx.begin([0, 1], [16, 16])
    before = idx.stats()
    assert idx.commit(idx.begin([2], [16])) == []
    assert rise(before, idx.stats(), "offloads_refused_host_full", "host_evicted_tokens", "lost_tokens") == [1, 0, 0]
    assert [idx.lengths(user)[2] for user in range(3)] == [16, 16, 0]
    idx.abort(reading)
    assert idx.check() == ""
