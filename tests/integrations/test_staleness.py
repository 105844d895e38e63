"""An accepted approximation stays within its bounds: tokens, seconds, and whoever of them is of unknown age."""

from __future__ import annotations

import copy
import threading

import numpy as np
import pytest
import torch

from mtserve_plugin import NoCache, attach, detach
from mtserve_plugin.errors import AttachError, InputError, OnloadError
from mtserve_plugin.integrations import stats
from mtserve_plugin.integrations.generative_recommenders import staleness
from mtserve_plugin.integrations.generative_recommenders.staleness import Ledger
from tests.integrations.streams import START, relative_error
from tests.integrations.test_split import NAMES

ACCEPTED = {"user_feature": "user_id", "approximate": {"positions"}}
NOW = START + 10_000_000

pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor")


class Served:
    """A model under bounds, its twin that recomputes through the same code, and requests at a time."""

    def __init__(self, model, cache, users, **options):
        self.model, self.cache, self.users = model, cache, users
        self.cold = attach(copy.deepcopy(model), NoCache(cache.config), **ACCEPTED)
        attach(model, cache, **(ACCEPTED | {"version": "1"} | options))

    def request(self, users, lengths, now=NOW, candidates=4):
        for user, length in zip(users, lengths, strict=True):
            if user not in self.users.events:
                self.users.add(user)
            self.users.grow(user, length - len(self.users.events[user]))
        now = now if isinstance(now, list) else [now] * len(users)
        uih, chosen = self.users.request(users, [candidates] * len(users), lengths)
        chosen["item_query_time"].values().copy_(torch.tensor(now).repeat_interleave(candidates))
        return uih, chosen

    def visit(self, users, lengths, now=NOW, candidates=4):
        """Tokens found in the cache, and the error against a recompute."""
        request = self.request(users, lengths, now, candidates)
        before = self.cache.stats()["hit_tokens"]
        got, want = self.model(*request)[0], self.cold(*request)[0]
        return self.cache.stats()["hit_tokens"] - before, relative_error(got, want)


@pytest.fixture
def serve(make_model, make_cache, make_users):
    def make(seed=0, sizes=None, context=True, **options):
        model = make_model(seed, **({} if context else {"contextual_feature_to_max_length": {}}))
        return Served(model, make_cache(model, **(sizes or {})), make_users(make_model(seed), seed + 1), **options)

    return make


def test_after_tokens(serve):
    served = serve(1, refresh_after_tokens=9)
    assert served.visit([1], [30])[0] == 0
    for length, hits in ((34, 30), (38, 34)):
        found, error = served.visit([1], [length])
        assert found == hits
        assert error > 1e-5
    # Nine tokens since the user was encoded as a whole: exactly at the bound.
    found, error = served.visit([1], [39])
    assert found == 0
    assert error <= 1e-6
    # It counts from there again, and in both directions.
    assert served.visit([1], [47])[0] == 39
    assert served.visit([1], [31])[0] > 0
    found, error = served.visit([1], [30])
    assert found == 0
    assert error <= 1e-6
    assert stats(served.model) == {
        "refreshed_by_tokens": 2,
        "refreshed_by_seconds": 0,
        "of_unknown_age": 1,
        "tracked": 1,
    }


def test_after_seconds(serve):
    served = serve(2, refresh_after_seconds=3600)
    served.request([1, 2], [30, 20])
    last = served.users.events[1][-1]["action_timestamp"]
    now = last + 5000
    served.visit([1], [30], now)
    for moved in (3599, -3599):
        found, error = served.visit([1], [30], now + moved)
        assert found == 30
        # Buckets of time are wide, but an hour is more than one of them.
        assert error > 1e-5
    found, error = served.visit([1], [30], now + 3600)
    assert found == 0
    assert error <= 1e-6
    assert served.visit([1], [30], now + 7199)[0] == 30
    # A request that comes from before is as far away.
    assert served.visit([1], [30], now)[0] == 0
    # Without candidates a row's time is that of its last event.
    served.visit([2], [20])
    found, _ = served.visit([2, 1], [20, 30], candidates=0)
    assert found == 0
    assert served.visit([1], [30], last + 3599)[0] == 30
    assert served.visit([1], [30], last + 3600)[0] == 0
    assert stats(served.model)["refreshed_by_seconds"] == 5


def test_each_bound_counts_what_it_caused(serve):
    served = serve(3, refresh_after_tokens=5, refresh_after_seconds=100)
    served.visit([1, 2, 3], [30, 20, 10])
    found, error = served.visit([1, 2, 3], [35, 20, 15], [NOW, NOW + 100, NOW + 100])
    assert found == 0
    assert error <= 1e-6
    counts = stats(served.model)
    assert (counts["refreshed_by_tokens"], counts["refreshed_by_seconds"]) == (2, 1)
    assert (counts["of_unknown_age"], counts["tracked"]) == (3, 3)


def test_only_who_reached_the_bound_is_refreshed(serve):
    served = serve(4, refresh_after_tokens=6)
    served.visit([1, 2], [30, 30])
    request = served.request([1, 2], [36, 33])
    before = served.cache.stats()["hit_tokens"]
    got, want = served.model(*request)[0], served.cold(*request)[0]
    assert served.cache.stats()["hit_tokens"] - before == 30
    assert relative_error(got[:4], want[:4]) <= 1e-6
    assert relative_error(got[4:], want[4:]) > 1e-5


def test_the_same_user_twice_in_a_batch(serve):
    served = serve(5, refresh_after_tokens=6)
    assert served.visit([1, 2, 1], [20, 9, 26])[0] == 0
    # The longest row was stored, and it is its length that counts.
    assert served.visit([1, 1], [31, 21])[0] == 26 + 21
    found, error = served.visit([1, 1], [27, 32])
    assert found == 0
    assert error <= 1e-6
    assert stats(served.model)["refreshed_by_tokens"] == 1


def test_a_user_whom_the_cache_forgot_is_new_again(serve):
    served = serve(6, refresh_after_tokens=8)
    served.visit([1], [30])
    served.cache.evict([1])
    assert served.visit([1], [36])[0] == 0
    assert served.visit([1], [43])[0] == 36
    assert served.visit([1], [44])[0] == 0
    # By an edit of the first event too, and not by one of a later event, before which all is old.
    served.users.edit(1, 0)
    assert served.visit([1], [50])[0] == 0
    served.users.edit(1, 20)
    assert 0 < served.visit([1], [57])[0] < 50
    assert served.visit([1], [58])[0] == 0
    assert stats(served.model)["refreshed_by_tokens"] == 2


def test_the_age_of_what_was_there_before_is_unknown(serve, make_model):
    served = serve(7)
    served.visit([1, 2], [30, 30])
    served.visit([1], [40])
    assert set(stats(served.model).values()) == {0}
    detach(served.model)
    with pytest.raises(AttachError, match="stats: no cache"):
        stats(served.model)
    attach(served.model, served.cache, version="1", refresh_after_tokens=100, **ACCEPTED)
    found, error = served.visit([1], [41])
    assert found == 0
    assert error <= 1e-6
    # What is known belongs to the cache: it outlives detach, and copies share it.
    detach(served.model)
    attach(served.model, served.cache, version="1", refresh_after_tokens=2, **ACCEPTED)
    assert served.visit([1], [42])[0] == 41
    served.model = copy.deepcopy(served.model)
    assert served.visit([1], [42])[0] == 42
    assert served.visit([1], [43])[0] == 0
    # Other weights are another version, of which nothing is known.
    other = make_model(8)
    served.model.load_state_dict(other.state_dict())
    served.cold.load_state_dict(other.state_dict())
    assert served.visit([1], [43])[0] == 0
    assert served.visit([1], [44])[0] == 43
    found, error = served.visit([1], [45])
    assert found == 0
    assert error <= 1e-6


def test_versions_side_by_side(serve, make_model):
    one = serve(9, refresh_after_tokens=6)
    other = Served(make_model(10), one.cache, one.users, version="2", refresh_after_tokens=6)
    one.visit([1], [30])
    other.visit([1], [33])
    # First visits evicted in all versions; from here on each counts for itself.
    one.visit([1], [34])
    assert other.visit([1], [38])[0] == 33
    assert one.visit([1], [39])[0] == 34
    assert other.visit([1], [39])[0] == 0
    assert one.visit([1], [40])[1] <= 1e-6


@pytest.mark.parametrize("lookups_first", [True, False])
def test_a_user_that_another_batch_is_writing(serve, lookups_first):
    served = serve(11)
    detach(served.model)
    attach(served.model, served.cache, version="1", refresh_after_tokens=5, sparse=served.model, **ACCEPTED)
    model = served.model

    def look_up(length):
        request = served.request([1], [length])
        return dict(zip(NAMES, model.preprocess(*request), strict=True)), request

    def finish(values, request):
        return relative_error(model.main_forward(**values)[0], served.cold(*request)[0])

    first = look_up(30)
    if not lookups_first:
        assert finish(*first) <= 1e-6
    # One that is new to the cache while it is being encoded is not evicted by the next batch.
    second = look_up(33)
    if lookups_first:
        assert finish(*second) <= 1e-6
        assert finish(*first) <= 1e-6
        assert served.cache.lengths(1, version="1")["committed"] == 3 + 30
        second = look_up(33)
    # The next one reaches the bound while the second still reads what it evicts.
    third = look_up(36)
    assert finish(*third) <= 1e-6
    assert finish(*second) > 1e-5
    assert served.cache.lengths(1, version="1")["committed"] == 3 + 36
    assert served.visit([1], [40])[0] == 36
    counts = stats(model)
    assert (counts["of_unknown_age"], counts["refreshed_by_tokens"]) == (1, 1)


def test_threads(serve):
    """Six threads visit the same growing users; no score is further off than the bound allows."""
    served = serve(12, context=False, refresh_after_tokens=1)
    lengths = [12 + step // 2 for step in range(16)]
    plans = [[served.request([1, 2], [length, length + 3]) for length in lengths] for _ in range(6)]
    wanted = [[served.cold(*request)[0] for request in plan] for plan in plans]
    errors = []

    def work(plan, wants):
        for request, want in zip(plan, wants, strict=True):
            errors.append(relative_error(served.model(*request)[0], want))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(plans, wanted, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 6 * len(lengths)
    assert max(errors) <= 1e-6


def test_a_failed_batch_and_one_without_pages(serve, monkeypatch):
    served = serve(13, refresh_after_tokens=8, sizes={"num_pages": 12})
    layer = served.model._hstu_transducer._stu_module._stu_layers[1]

    def fail(*_):
        raise RuntimeError("planted")

    request = served.request([1], [20])
    with layer.register_forward_hook(fail), pytest.raises(RuntimeError, match="planted"):
        served.model(*request)
    # Nothing was stored: the user is encoded by the next batch, and counts from there.
    assert served.visit([1], [26])[0] == 0
    assert served.visit([1], [33])[0] == 26
    # 12 pages of 4 tokens have no room for 60: nothing is stored, nobody counts.
    for _ in range(2):
        found, error = served.visit([2], [60])
        assert found == 0
        assert error <= 1e-6
    assert served.visit([1], [34])[1] <= 1e-6

    def broken(batch, layer, **options):
        if bool(batch.cached_lengths.any()):
            raise OnloadError("planted")
        return wait(batch, layer, **options)

    wait = staleness.CacheBatch.wait
    with monkeypatch.context() as patch:
        patch.setattr(staleness.CacheBatch, "wait", broken)
        assert served.visit([1], [36])[1] <= 1e-6
    assert served.cache.stats()["open_batches"] == 0


@pytest.mark.parametrize("name", ["refresh_after_tokens", "refresh_after_seconds"])
def test_refused(make_model, make_cache, make_users, name):
    model = make_model(14)
    cache = make_cache(model)
    types = [type(module) for module in model.modules()]
    bad = [0, -1, True, "9", float("inf"), float("nan"), *([2.5] if name == "refresh_after_tokens" else [])]
    for value in bad:
        with pytest.raises(AttachError, match=f"{name}=.* above 0") as error:
            attach(model, cache, **(ACCEPTED | {name: value}))
        assert error.value.factors == (name,)
    with pytest.raises(AttachError, match=f"{name}=3 bounds the error of an approximation"):
        attach(model, cache, user_feature="user_id", positions="append_stable", **{name: 3})
    for part in (model._hstu_transducer, model._hstu_transducer._stu_module):
        with pytest.raises(AttachError, match=rf"{name}=3: batches .* cache\.evict"):
            attach(part, cache, approximate={"positions"}, **{name: 3})
    assert [type(module) for module in model.modules()] == types
    # Where nothing turns out to be approximate, and without a cache, there is nothing to bound.
    for options in ({"positions": "append_stable"}, {}):
        used = cache if options else NoCache(cache.config)
        attach(model, used, **(ACCEPTED | {name: 1} | options))
        users = make_users(model)
        users.add(1)
        users.grow(1, 20)
        for _ in range(2):
            users.grow(1, 3)
            model(*users.request([1], [3]))
        assert set(stats(model).values()) == {0}
        detach(model)
    assert cache.stats()["hit_tokens"] == 23


def test_a_request_that_does_not_tell_its_time(serve):
    served = serve(15, refresh_after_seconds=9.5)
    uih, chosen = served.request([1], [9])
    others = [key for key in chosen.keys() if key != "item_query_time"]  # noqa: SIM118
    lost = type(chosen).from_jt_dict({key: chosen[key] for key in others})
    with pytest.raises(InputError, match="no key 'item_query_time'"):
        served.model(uih, lost)
    assert stats(served.model)["tracked"] == 0


def test_the_ledger_holds_what_was_put_last_or_nothing():
    draw = np.random.default_rng(16)
    ledger = Ledger(64)
    truth = {}
    people = draw.integers(-(2**62), 2**62, 400)
    forgotten = 0
    for step in range(300):
        users = np.unique(draw.choice(people[: 40 if step < 100 else 400], 30))
        version = str(draw.integers(2))
        known, lengths, times = ledger.find(users, version)
        for user, found, length, time in zip(users.tolist(), known, lengths, times, strict=True):
            assert not found or truth[version, user] == (length, time)
            forgotten += not found and (version, user) in truth
        if step < 100:
            assert forgotten == 0
        lengths, times = draw.integers(0, 2**40, (2, users.size))
        ledger.put(users, lengths, times, version)
        truth |= {(version, user): (a, b) for user, a, b in zip(users.tolist(), lengths, times, strict=True)}
        assert ledger.records <= ledger.capacity == 128
    assert forgotten > 0
    # The users of one call do not push each other out as long as there is room.
    users = draw.integers(-(2**62), 2**62, 48)
    ledger = Ledger(64)
    ledger.put(users, users, users, "")
    assert ledger.records >= 47
    # The longest unseen one goes first.
    small = Ledger(1)
    for user in range(200):
        small.put(np.array([user]), np.array([user]), np.array([0]), "")
        assert small.find(np.array([0]), "")[0].all()


def test_forgetting_costs_a_recompute_and_no_bound(serve, monkeypatch):
    monkeypatch.setattr(staleness, "_most_entries", lambda config: 1)
    served = serve(17, context=False, refresh_after_tokens=4)
    lengths = dict.fromkeys(range(1, 61), 9)
    draw = np.random.default_rng(18)
    for user in lengths:
        served.visit([user], [9])
    encoded = dict(lengths)
    for _ in range(80):
        users = np.unique(draw.integers(1, 61, 3)).tolist()
        for user in users:
            lengths[user] += int(draw.integers(0, 3))
        known, at, _ = staleness._ledgers[served.cache][1].find(np.array(users), "1")
        _, error = served.visit(users, [lengths[user] for user in users])
        fresh = [not k or lengths[u] - encoded[u] >= 4 for u, k in zip(users, known, strict=True)]
        assert all(a == encoded[u] for u, a, k in zip(users, at, known, strict=True) if k)
        encoded |= {u: lengths[u] for u, f in zip(users, fresh, strict=True) if f}
        assert not all(fresh) or error <= 1e-6
    assert stats(served.model)["tracked"] <= 16
    assert stats(served.model)["of_unknown_age"] > 80
