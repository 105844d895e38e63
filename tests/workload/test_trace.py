"""Traces of one's own, limits, batches, candidates, features."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mtserve_plugin.errors import ConfigError, InputError
from mtserve_plugin.workload import (
    CandidateSampler,
    Events,
    Requests,
    Trace,
    batches,
    build_features,
    check_trace,
    load_trace,
    statistics,
)


class Own(Trace):
    """Three users in turn, five events between two requests of a user."""

    def __init__(self, requests=30):
        self.name, self.num_requests, self.num_items, self.num_actions = "own", requests, 50, 2
        number = np.arange(requests)
        zero = np.zeros(requests, np.int64)
        self.requests = Requests(number % 3, number * 10 + 60, zero, number // 3 * 5, zero.astype(bool))

    def describe(self):
        return {"kind": "own"}

    def blocks(self, max_requests=1000):
        for begin in range(0, len(self.requests), max_requests):
            yield self.requests.take(slice(begin, begin + max_requests))

    def events(self, user):
        count = np.arange(60)
        return Events((count * 7 + user) % 50, count % 2, count * 6)


SMALL = {"users": 20, "requests": 1500, "max_history": 400, "mean_history": 200, "new_tokens": 3}


def joined(parts):
    return Requests.concatenate(list(parts))


def equal(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one.columns, other.columns, strict=True))


def test_own_trace_is_enough_for_everything():
    trace = load_trace(f"{__name__}:Own", requests=12)
    check_trace(trace)
    assert statistics(trace)["mean_history"] == np.mean(trace.requests.end)
    assert statistics(trace)["appended_tokens"] == 5 * 9
    sampler = CandidateSampler(trace, 4)
    features = build_features(trace, trace.requests, sampler)
    assert features.item.tolist() == [
        (k * 7 + u) % 50 for u, end in zip(trace.requests.user, trace.requests.end, strict=True) for k in range(end)
    ]


def _broken(**columns):
    trace = Own()
    trace.requests = dataclasses.replace(trace.requests, **columns)
    return trace


def _wrong_events(change):
    trace = Own()
    right = trace.events
    trace.events = lambda user: change(right(user))
    return trace


def _growing_blocks():
    trace = Own()
    right, calls = trace.blocks, []

    def blocks(max_requests=1000):
        calls.append(1)
        for block in right(max_requests):
            yield dataclasses.replace(block, time=block.time + len(calls))

    trace.blocks = blocks
    return trace


def _other_histories():
    trace = Own()
    right = Trace.histories
    trace.histories = lambda requests: right(trace, requests)._replace(item=right(trace, requests).item + 1)
    return trace


NUMBER = np.arange(30)


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        (_broken(user=(NUMBER % 3).astype(np.int32)), "user is int32"),
        (_broken(time=np.where(NUMBER == 12, 0, NUMBER * 10 + 60)), "request 12: time decreases"),
        (_broken(start=NUMBER // 3 * 5 + 1), "request 0: 0 <= start <= end"),
        (_broken(invalidated=NUMBER == 1), "request 1: invalidated is set on a user's first"),
        (_broken(invalidated=NUMBER == 7), "request 7: user 1: invalidated must tell"),
        (_broken(start=(NUMBER >= 20) * 5), "request 21: user 0: invalidated must tell"),
        (_broken(end=np.where(NUMBER == 9, 0, NUMBER // 3 * 5)), "request 9: user 0: end decreases"),
        (_wrong_events(lambda e: e._replace(item=e.item + 1)), r"events\(0\): item reaches num_items=50"),
        (
            _wrong_events(lambda e: e._replace(action=e.action.astype(np.int8))),
            r"events\(0\): action is int8",
        ),
        (_wrong_events(lambda e: e._replace(time=e.time[::-1])), r"events\(0\): time decreases"),
        (_wrong_events(lambda e: Events(*(c[:44] for c in e))), r"request 27: events\(0\) has 44 events"),
        (_wrong_events(lambda e: e._replace(time=e.time + 600)), "last event is later than its request"),
        (_growing_blocks(), "time depends on max_requests, or on the call"),
        (_other_histories(), "histories: item of user 0 differs"),
    ],
)
def test_check_trace_finds_what_is_wrong(trace, message):
    check_trace(Own())
    with pytest.raises(InputError, match=message):
        check_trace(trace)


def test_head_is_the_beginning_of_the_trace():
    trace = load_trace("kuairand-like", **SMALL)
    whole = joined(trace.blocks())
    for limit in (0, 1, 7, 10, 1500, 2000):
        head = load_trace("kuairand-like", limit=limit, **SMALL)
        count = min(limit, 1500)
        assert head.num_requests == count
        assert head.describe()["limit"] == limit
        for size in (1, 7, 4096):
            assert equal(joined(head.blocks(size)), whole.take(slice(0, count)))
        assert np.array_equal(head.events(3).item, trace.events(3).item)
    with pytest.raises(InputError, match="limit=-1"):
        trace.head(-1)


@pytest.mark.parametrize("size", [1, 2, 8, 33, 1499, 1500, 5000])
@pytest.mark.parametrize("distinct", [False, True])
def test_batches_keep_every_request_in_order(size, distinct, monkeypatch):
    from mtserve_plugin.workload import batching

    monkeypatch.setattr(batching, "BLOCK_REQUESTS", 50)
    trace = load_trace("kuairand-like", **SMALL)
    whole = joined(trace.blocks())
    parts = list(batches(trace, size, distinct_users=distinct))
    assert equal(joined(parts), whole)
    begin = 0
    for i, part in enumerate(parts):
        assert 1 <= len(part) <= size
        assert not distinct or len(np.unique(part.user)) == len(part)
        begin += len(part)
        if i + 1 < len(parts):
            # A batch is shorter only where the next request would have brought a user twice.
            assert len(part) == size or (distinct and whole.user[begin] in part.user)
    with pytest.raises(InputError, match="batch_size=0"):
        next(batches(trace, 0))


@pytest.mark.parametrize("by", ["popularity", "uniform"])
def test_a_request_has_the_same_candidates_in_every_company(by):
    trace = load_trace("kuairand-like", **SMALL)
    whole = joined(trace.blocks())
    sampler = CandidateSampler(trace, (0, 30), by=by, seed=5)
    value, length = sampler(whole)
    ends = np.cumsum(length)
    assert set(np.unique(length)) == set(range(31))
    rng = np.random.default_rng(1)
    for _ in range(20):
        rows = rng.permutation(1500)[: rng.integers(1, 9)]
        some, lengths = CandidateSampler(load_trace("kuairand-like", **SMALL, at_cap="slide"), (0, 30), by=by, seed=5)(
            whole.take(rows)
        )
        assert lengths.tolist() == length[rows].tolist()
        assert some.tolist() == [v for r in rows for v in value[ends[r] - length[r] : ends[r]]]
    assert value.min() >= 0
    assert value.max() < trace.num_items
    other, _ = CandidateSampler(trace, (0, 30), by=by, seed=6)(whole)
    assert not np.array_equal(other[:100], value[:100])


def test_candidates_follow_popularity_or_not():
    trace = load_trace("kuairand-like", **SMALL, num_items=64)
    whole = joined(trace.blocks())
    popular = np.bincount(CandidateSampler(trace, 32)(whole)[0], minlength=64) / 48_000
    seen = np.bincount(np.concatenate([trace.events(u).item for u in range(20)]), minlength=64)
    assert np.abs(popular - seen / seen.sum()).max() < 0.015
    uniform = np.bincount(CandidateSampler(trace, 32, by="uniform")(whole)[0], minlength=64) / 48_000
    assert np.abs(uniform - 1 / 64).max() < 0.004
    some, length = CandidateSampler(trace, (1, 30), by="uniform")(whole)
    assert abs(np.corrcoef(some[np.cumsum(length) - length], length)[0, 1]) < 0.1
    for wrong in (-1, (3, 2)):
        with pytest.raises(ConfigError, match="num_candidates"):
            CandidateSampler(trace, wrong)
    with pytest.raises(ConfigError, match="by='random'"):
        CandidateSampler(trace, 3, by="random")


@pytest.mark.parametrize("rows", [[], [0], [1499, 3, 3, 700]])
def test_features_are_the_events_of_the_windows(rows):
    trace = load_trace("kuairand-like", **SMALL, at_cap="slide")
    requests = joined(trace.blocks()).take(np.array(rows, np.int64))
    features = build_features(trace, requests, CandidateSampler(trace, 6))
    assert len(features) == len(rows)
    assert features.now.tolist() == requests.time.tolist()
    assert features.candidate_lengths.tolist() == [6] * len(rows)
    assert len(features.candidate) == 6 * len(rows)
    at = 0
    for user, start, end in zip(requests.user.tolist(), requests.start.tolist(), requests.end.tolist(), strict=True):
        events = trace.events(user)
        for name in Events._fields:
            column = getattr(features, name)
            assert np.array_equal(column[at : at + end - start], getattr(events, name)[start:end])
        at += end - start
    assert at == features.lengths.sum() == len(features.item)
    for field in dataclasses.fields(features):
        assert getattr(features, field.name).dtype == np.int64


@pytest.mark.parametrize("size", [1, 10, 5000])
def test_statistics_match_a_direct_count(size):
    trace = load_trace("kuairand-like", **SMALL, at_cap="step:150")
    whole = joined(trace.blocks())
    found = statistics(trace, size)
    order = np.lexsort((np.arange(1500), whole.user))
    again = np.diff(whole.user[order]) == 0
    gaps = np.diff(whole.time[order])[again]
    assert found["users"] == 20
    assert found["appended_tokens"] == np.diff(whole.end[order])[again].sum()
    assert found["invalidated"] == whole.invalidated.sum() > 0
    assert found["mean_history"] == pytest.approx(whole.history_length.mean())
    assert found["min_history"] == whole.history_length.min()
    assert found["max_history"] == whole.history_length.max()
    assert found["span_s"] == whole.time[-1] - whole.time[0]
    for name, share in (("p10", 10), ("p50", 50), ("p90", 90), ("p99", 99)):
        exact = np.percentile(gaps, share, method="inverted_cdf")
        assert found["return_interval_s"][name] == pytest.approx(exact, rel=0.06)
    alone = statistics(load_trace("kuairand-like", users=1, requests=1, max_history=5, mean_history=1))
    assert alone["return_interval_s"]["p50"] is None


def test_load_trace_refuses_what_it_does_not_know():
    with pytest.raises(ConfigError, match=r"unknown option 'users' for a log; known options: limit, user"):
        load_trace("whatever.csv", users=3)
    with pytest.raises(ConfigError, match=r"is no file and no importable"):
        load_trace("no.such.module:trace")
    with pytest.raises(ConfigError, match=r"returned a Fraction; it must return a Trace"):
        load_trace("fractions:Fraction")
    one = load_trace("mt-like", requests=5000)
    assert one.config.users == 7
    two = load_trace("kuairand-like", users=10)
    assert two.config.requests == 11_817
