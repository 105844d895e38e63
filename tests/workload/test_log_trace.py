"""Logs cut into requests, against a literal reading of the rules, one event at a time."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mtserve_plugin.errors import ConfigError, InputError
from mtserve_plugin.workload import HistoryCap, Log, LogTrace, Requests, check_trace


def make_log(user, time_ms, item=None):
    n = len(user)
    return Log(
        files=("made",),
        user=np.asarray(user, np.int64),
        item=np.arange(n, dtype=np.int64) * 10 if item is None else np.asarray(item, np.int64),
        action=(np.arange(n) % 3).astype(np.uint16),
        time_ms=np.asarray(time_ms, np.int64),
        num_actions=3,
        actions=("a", "b", "c"),
    )


def all_requests(trace, max_requests=1 << 16):
    return Requests.concatenate(list(trace.blocks(max_requests)))


def literal_requests(log, interval_ms, cap, step, min_history):
    """Per request user, time, history and whether it is invalidated; each user's events. `step` 0 stops."""
    out, events = [], {}
    for user in sorted(set(log.user.tolist())):
        rows = [i for i in range(len(log)) if log.user[i] == user]
        rows.sort(key=lambda i: log.time_ms[i])
        events[user] = rows
        kept, waiting, begin, dropped, earlier = [], [], None, 0, None
        for i in rows:
            if begin is None or log.time_ms[i] - begin >= interval_ms:
                begin = int(log.time_ms[i])
                for event in waiting:
                    kept.append(event)
                    if cap is not None and len(kept) > cap:
                        if step:
                            kept, dropped = kept[step:], dropped + step
                        else:
                            kept.pop()
                waiting = []
                if len(kept) + dropped >= min_history:
                    moved = earlier is not None and earlier != dropped
                    out.append((begin, user, tuple(kept), moved))
                    earlier = dropped
            waiting.append(i)
    out.sort(key=lambda request: request[:2])
    return [(user, begin // 1000, kept, moved) for begin, user, kept, moved in out], events


@pytest.mark.parametrize("at_cap", ["none", "stop", "slide", "step:1", "step:3", "step:9"])
@pytest.mark.parametrize("seed", range(3))
def test_requests_match_the_literal_rules(at_cap, seed):
    rng = np.random.default_rng(seed)
    n = 600
    user = rng.choice([-(2**62), -1, 0, 5, 2**62], n)
    time = rng.integers(0, 4000, n) * 250 + 10**12
    log = make_log(user, time, rng.integers(0, 40, n) * 7)
    cap = None if at_cap == "none" else 9
    policy = "stop" if at_cap == "none" else at_cap
    step = {"stop": 0, "slide": 1, "step:1": 1, "step:3": 3, "step:9": 9}[policy]
    trace = LogTrace(log, interval_s=20.25, max_history=cap, at_cap=policy, min_history=seed)
    expected, events = literal_requests(log, 20250, cap, step, seed)
    found = all_requests(trace, int(rng.integers(1, 50)))
    assert len(found) == trace.num_requests == len(expected) > 50
    for i, (who, when, kept, moved) in enumerate(expected):
        assert (found.user[i], found.time[i], found.invalidated[i]) == (who, when, moved)
        mine = events[who][found.start[i] : found.end[i]]
        assert tuple(mine) == kept
        history = trace.histories(found.take(slice(i, i + 1)))
        assert trace.item_ids[history.item].tolist() == log.item[mine].tolist()
        assert history.action.tolist() == log.action[mine].tolist()
        assert history.time.tolist() == (log.time_ms[mine] // 1000).tolist()
    assert found.invalidated.any() == (step > 0)
    check_trace(trace, limit=400)


def test_interval_counts_from_its_first_event_and_closes_at_exactly_its_length():
    log = make_log([1] * 6, [0, 40_000, 59_999, 60_000, 100_000, 120_000])
    requests = all_requests(LogTrace(log, min_history=0))
    assert requests.time.tolist() == [0, 60, 120]
    assert requests.end.tolist() == [0, 3, 5]
    assert all_requests(LogTrace(log)).end.tolist() == [3, 5]


def test_equal_times_keep_the_order_of_the_log_and_share_an_interval():
    trace = LogTrace(make_log([4, 4, 4, 9], [5000, 5000, 90_000, 90_000], [30, 10, 20, 5]))
    requests = all_requests(trace)
    assert requests.user.tolist() == [4]
    assert trace.item_ids[trace.histories(requests).item].tolist() == [30, 10]


def test_unsorted_logs_and_two_users_at_once():
    trace = LogTrace(make_log([2, 1, 2, 1], [200_000, 200_000, 0, 100_000]))
    requests = all_requests(trace)
    assert requests.user.tolist() == [1, 2]
    assert requests.time.tolist() == [200, 200]


def test_wrong_requests_and_options_are_refused():
    log = make_log([1, 1, 2], [0, 90_000, 0])
    trace = LogTrace(log)
    requests = all_requests(trace)
    with pytest.raises(InputError, match="user=3 is not in the trace"):
        trace.events(3)
    with pytest.raises(InputError, match="user 7 is not in the trace"):
        trace.histories(Requests(np.array([7]), *requests.columns[1:]))
    with pytest.raises(InputError, match="user 1 has fewer events"):
        trace.histories(Requests(*requests.columns[:3], np.array([3]), requests.invalidated))
    with pytest.raises(InputError, match="no request has a history of min_history=2"):
        LogTrace(log, min_history=2)
    with pytest.raises(InputError, match="cannot be sorted together"):
        LogTrace(make_log(np.arange(2000), np.arange(2000) * 10**13))
    for options, message in [
        ({"interval_s": 0}, "interval_s=0"),
        ({"interval_s": float("nan")}, "interval_s=nan"),
        ({"min_history": -1}, "min_history=-1"),
        ({"max_history": 0}, "max_history=0"),
        ({"at_cap": "drop"}, "at_cap='drop' is not known; use 'stop'"),
        ({"at_cap": "step:0"}, "N must be at least 1"),
        ({"at_cap": "step:6", "max_history": 5}, "at most max_history=5"),
        ({"at_cap": "step:-1"}, "is not known"),
    ]:
        with pytest.raises(ConfigError, match=message):
            LogTrace(log, **options)


@pytest.mark.parametrize("at_cap", ["stop", "slide", "step:2"])
def test_describe_states_the_policy_and_survives_json(at_cap):
    trace = LogTrace(make_log([1, 1], [0, 90_000]), max_history=50, at_cap=at_cap)
    said = json.loads(json.dumps(trace.describe()))
    assert said["at_cap"] == at_cap
    assert said["cap_policy"].startswith(at_cap.partition(":")[0])
    assert "50" in said["cap_policy"]
    assert said["requests"] == 1
    assert "no cap" in HistoryCap(None).describe()


def test_popular_items_come_as_often_as_in_the_log():
    trace = LogTrace(make_log([1] * 8, np.arange(8) * 70_000, [5, 5, 5, 5, 5, 5, 9, 5]))
    quantile = np.random.default_rng(0).random(4000)
    assert abs((trace.items_at(quantile) == 1).mean() - 1 / 8) < 0.03
