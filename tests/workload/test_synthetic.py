"""Synthetic traces: the paper's statistics, and the same numbers everywhere."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import time
import tracemalloc
from collections import OrderedDict

import numpy as np
import pytest

from mtserve_plugin.errors import ConfigError, InputError
from mtserve_plugin.workload import (
    FITTED,
    KUAIRAND_LIKE,
    MT_LIKE,
    Requests,
    SyntheticTrace,
    check_trace,
    load_trace,
    statistics,
    synthetic,
)

SMALL = {"users": 40, "requests": 3000, "max_history": 4000, "mean_history": 1200}


def digest(trace):
    state = hashlib.sha256()
    for block in trace.blocks(501):
        for column in block.columns:
            state.update(np.ascontiguousarray(column).tobytes())
    for user in (0, 7, 39):
        for column in trace.events(user):
            state.update(column.tobytes())
    return state.hexdigest()


@pytest.mark.parametrize(
    ("config", "users", "requests", "shortest", "longest", "mean", "gpu_hits"),
    [
        (KUAIRAND_LIKE, 1000, 1_181_699, 1, 20_000, 6375, 0.6352),
        (MT_LIKE, 2884, 1_972_438, 4000, 6000, 5189, 0.6026),
    ],
)
def test_full_size_has_the_paper_s_statistics(config, users, requests, shortest, longest, mean, gpu_hits):
    trace = SyntheticTrace(config)
    found = statistics(trace)
    assert (found["users"], found["requests"]) == (users, requests)
    assert (found["min_history"], found["max_history"]) == (shortest, longest)
    assert found["mean_history"] == pytest.approx(mean, rel=0.01)
    returns = found["return_interval_s"]
    assert returns["p50"] < 300 < 1500 < returns["p75"]
    assert returns["p99.9"] > 86_400
    assert lru_hit_ratio(trace, pages=40_960) == pytest.approx(gpu_hits, abs=0.02)


def lru_hit_ratio(trace, pages):
    """Tokens found by an LRU over whole users in pages of 32 tokens (table 1, GPU-only, batch size 1)."""
    cached, free, hits, asked = OrderedDict(), pages, 0, 0
    for block in trace.blocks():
        for user, length in zip(block.user.tolist(), block.history_length.tolist(), strict=True):
            before = cached.pop(user, 0)
            hits, asked = hits + min(before, length), asked + length
            free += -(-before // 32) - -(-length // 32)
            while free < 0:
                free += -(-cached.popitem(last=False)[1] // 32)
            cached[user] = length
    return hits / asked


@pytest.mark.parametrize("name", ["kuairand-like", "mt-like"])
@pytest.mark.parametrize("seed", range(4))
def test_small_scale_keeps_mean_and_range(name, seed):
    wish = SMALL if name == "kuairand-like" else {"users": 60, "requests": 6000}
    config = load_trace(name, seed=seed, **wish).config
    found = statistics(SyntheticTrace(config))
    assert (found["users"], found["requests"]) == (config.users, config.requests)
    assert found["mean_history"] == pytest.approx(config.mean_history, rel=0.03)
    assert config.min_history <= found["min_history"] < config.min_history + 0.2 * config.mean_history
    assert 0.9 * config.max_history < found["max_history"] <= config.max_history
    last = np.zeros(config.users, np.int64)
    for block in SyntheticTrace(config).blocks():
        np.maximum.at(last, block.user, block.time)
    assert np.median(config.start_time + config.horizon_s - last) > 900
    per_request = found["span_s"] / (found["requests"] / found["users"])
    whole = KUAIRAND_LIKE if name == "kuairand-like" else MT_LIKE
    assert per_request == pytest.approx(whole.horizon_s / (whole.requests / whole.users), rel=0.1)


@pytest.mark.parametrize("at_cap", ["stop", "slide", "step:500"])
@pytest.mark.parametrize("seed", [0, 2**63, -5])
def test_contract_holds_and_invalidation_follows_the_policy(at_cap, seed):
    trace = load_trace("kuairand-like", **SMALL, at_cap=at_cap, seed=seed)
    check_trace(trace, limit=3000, users=40)
    found = statistics(trace)
    longest = found["max_history"]
    assert longest <= 4000
    assert found["invalidated"] > 0 or at_cap == "stop"
    assert found["invalidated"] == 0 or at_cap != "stop"
    assert trace.describe()["cap_policy"].startswith(at_cap.partition(":")[0])


def test_windows_agree_with_the_events_that_came_before():
    trace = load_trace(
        "kuairand-like", users=7, requests=900, max_history=900, mean_history=700, at_cap="slide", seed=3
    )
    requests = Requests.concatenate(list(trace.blocks()))
    for user in range(7):
        mine = requests.take(requests.user == user)
        events = trace.events(user)
        # All and only events before a request are its history: the next event is not before it.
        assert (events.time[mine.end - 1] <= mine.time).all()
        assert (events.time[mine.end[:-1]] >= mine.time[:-1]).all()
        assert len(events.item) == mine.end[-1]
        assert (np.diff(mine.end) > 0).all()


def test_same_numbers_in_every_process():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_synthetic import SMALL, digest\n"
        "from mtserve_plugin.workload import load_trace\n"
        "print(digest(load_trace('kuairand-like', **SMALL, seed=11)))\n"
    )
    here = os.path.dirname(__file__)
    trace = load_trace("kuairand-like", **SMALL, seed=11)
    trace.events(3)
    expected = digest(trace)
    env = {**os.environ, "PYTHONHASHSEED": "77", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code, here], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == expected == digest(trace)
    assert digest(load_trace("kuairand-like", **SMALL, seed=12)) != expected


@pytest.mark.parametrize("rounds", [1, 16, 300])
def test_blocks_are_the_same_whatever_their_size(rounds, monkeypatch):
    trace = load_trace("mt-like", users=9, requests=3000, at_cap="step:100", seed=rounds)
    whole = Requests.concatenate(list(trace.blocks()))
    monkeypatch.setattr(synthetic, "_ROUND_REQUESTS", rounds)
    for size in (1, 13, 1000):
        blocks = list(trace.blocks(size))
        assert max(map(len, blocks)) <= size
        for one, other in zip(Requests.concatenate(blocks).columns, whole.columns, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["kuairand-like", "mt-like"])
def test_fitted_traces_have_the_paper_s_statistics_too(name):
    plain, found = (KUAIRAND_LIKE if name == "kuairand-like" else MT_LIKE), statistics(SyntheticTrace(FITTED[name]))
    assert (found["users"], found["requests"]) == (plain.users, plain.requests)
    assert (found["min_history"], found["max_history"]) == (plain.min_history, plain.max_history)
    assert found["mean_history"] == pytest.approx(plain.mean_history, rel=0.01)
    returns = found["return_interval_s"]
    assert returns["p50"] < 600 < 21_600 < returns["p99"]
    assert returns["p99.9"] > 86_400


@pytest.mark.parametrize("new_tokens", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("seed", [5, 6])
def test_pace_spreads_the_events_and_the_gaps_of_users_alike(new_tokens, seed):
    wish = {"users": 50, "requests": 30_000, "mean_history": 4500, "min_history": 0}
    wish |= {"new_tokens": new_tokens, "activity_sigma": 0.0, "session_requests": 50.0, "at_cap": "slide"}
    trace = load_trace("mt-like", **wish, pace_sigma=0.7, seed=seed)
    requests = Requests.concatenate(list(trace.blocks()))
    check_trace(trace, limit=3000, users=50)
    grown, gap = np.zeros((2, 50))
    for user in range(50):
        mine = requests.take(requests.user == user)
        grown[user] = np.diff(mine.end).mean()
        gap[user] = np.quantile(np.diff(mine.time), 0.3)
    assert grown.mean() == pytest.approx(new_tokens, rel=0.1)
    assert np.corrcoef(np.log(gap), np.log(trace._pace))[0, 1] > 0.99
    assert np.corrcoef(grown, trace._pace)[0, 1] > 0.99 or new_tokens == 1.0
    assert np.std(np.log(gap)) == pytest.approx(0.7, abs=0.2)
    even = load_trace("mt-like", **wish, pace_sigma=0.0, seed=seed)
    assert (even._pace == 1).all()


@pytest.mark.parametrize(("low", "multiple"), [(4000, 1024), (0, 500), (3000, 1000)])
def test_histories_start_at_multiples(low, multiple):
    options = {"users": 300, "requests": 30_000, "min_history": low, "new_tokens": 0.5, "mean_history": 4900}
    trace = load_trace("mt-like", **options, start_multiple=multiple)
    requests = Requests.concatenate(list(trace.blocks()))
    first = requests.end[np.unique(requests.user, return_index=True)[1]]
    assert set(np.unique(first[first > low] % multiple)) == {0}
    assert first.min() == low
    assert requests.history_length.mean() == pytest.approx(trace.config.mean_history, rel=0.02)


def test_items_follow_the_popularity_law_and_differ_between_users():
    trace = load_trace("kuairand-like", **SMALL, num_items=100, item_exponent=1.0, num_actions=4)
    item = np.concatenate([trace.events(u).item for u in range(40)])
    share = np.bincount(item, minlength=100) / len(item)
    law = np.log((np.arange(100) + 2) / (np.arange(100) + 1)) / np.log(101)
    assert np.abs(share - law).max() < 0.01
    assert not np.array_equal(trace.events(0).item[:500], trace.events(1).item[:500])
    assert set(np.unique(trace.events(0).action)) == {0, 1, 2, 3}


def test_full_size_streams_in_bounded_memory_and_time():
    begin = time.perf_counter()
    trace = SyntheticTrace(KUAIRAND_LIKE.scaled(users=3400, requests=4_000_000))
    tracemalloc.start()
    count = sum(len(block) for block in trace.blocks(8192))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 4_000_000
    assert peak < 24 << 20
    assert time.perf_counter() - begin < 60


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"users": 0}, "users=0 must be a number of at least 1"),
        ({"users": 10, "requests": 9}, "requests=9 must be at least users=10"),
        ({"users": 10, "requests": 100, "mean_history": 30_000}, "must lie between"),
        ({"tail_index": -1}, "tail_index=-1"),
        ({"mean_history": 19_000, "start_multiple": 10_000, "new_tokens": 0.1}, "out of reach.*lower start_multiple"),
        ({"new_tokens": 0}, "new_tokens=0 must be"),
        ({"pace_sigma": -0.1}, "pace_sigma=-0.1 must be"),
        ({"seed": 1.5}, "seed=1.5 must be an integer"),
        ({"session_length": 4}, "unknown option 'session_length'; known options: name, users"),
        ({"at_cap": "fade"}, "at_cap='fade'"),
        ({"horizon_s": 1000}, "horizon_s=1000 is too short.*raise horizon_s"),
    ],
)
def test_bad_options_are_named_with_the_fix(options, message):
    with pytest.raises(ConfigError, match=message):
        load_trace("kuairand-like", **options)


def test_unreachable_mean_names_a_growth_that_does_it():
    wish = {"users": 10, "requests": 20_000, "max_history": 4000, "mean_history": 2500}
    with pytest.raises(ConfigError, match="use new_tokens of at most") as caught:
        load_trace("kuairand-like", **wish)
    advice = float(re.search(r"at most ([\d.]+)", str(caught.value))[1])
    assert statistics(load_trace("kuairand-like", **wish, new_tokens=advice))["mean_history"] == pytest.approx(
        2500, rel=0.03
    )


def test_boundaries():
    one = load_trace("kuairand-like", users=1, requests=1, max_history=5, mean_history=1)
    assert statistics(one)["requests"] == 1
    check_trace(one)
    flat = SyntheticTrace(MT_LIKE.scaled(users=5, requests=50).replace(new_tokens=1, activity_sigma=0))
    assert np.bincount(next(flat.blocks()).user).tolist() == [10] * 5
    check_trace(flat)
    with pytest.raises(InputError, match="user=5 is not in the trace"):
        flat.events(5)
    with pytest.raises(InputError, match="max_requests=0"):
        next(flat.blocks(0))
