"""The steps of a batch: seen by torch's profiler, added up by a clock, on the thread that asked."""

from __future__ import annotations

import threading

import torch

from mtserve_plugin import HierarchicalKVCache
from mtserve_plugin.steps import APPEND, ATTEND, COMMIT, LAYERS, OUTPUT, PREPARE, PROJECT, STRIP, WAIT, StepClock, step
from tests.cache.driver import Request, history_of, serve, tiny_config

OF_A_BATCH = {PREPARE, WAIT, ATTEND, APPEND, COMMIT}


def test_a_clock_adds_up_what_happens_inside_of_it() -> None:
    with HierarchicalKVCache(tiny_config(num_pages=20)) as cache:
        serve(cache, [Request(1, history_of(1, 9), 2)])
        with StepClock() as clock:
            assert clock.seconds == {}
            serve(cache, [Request(1, history_of(1, 12), 2)])
            once = dict(clock.seconds)
            other = threading.Thread(target=lambda: serve(cache, [Request(2, history_of(2, 9), 2)]))
            other.start()
            other.join()
            assert clock.seconds == once
            serve(cache, [Request(1, history_of(1, 14), 2)])
        assert set(once) == OF_A_BATCH
        assert all(0 < once[name] < clock.seconds[name] for name in once)
        with StepClock() as outer, StepClock() as inner, step(LAYERS):
            pass
        assert set(inner.seconds) == {LAYERS}
        assert outer.seconds == {}


def test_the_profiler_shows_the_papers_names() -> None:
    with HierarchicalKVCache(tiny_config(num_pages=20)) as cache:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            serve(cache, [Request(1, history_of(1, 9), 2)])
        counts = {event.key: event.count for event in profile.key_averages()}
        layers = cache.config.num_layers
    assert {name: counts.get(name) for name in (PREPARE, WAIT, ATTEND, COMMIT)} == {
        PREPARE: 1,
        WAIT: 2 * layers,  # the driver looks at the pages first
        ATTEND: layers,
        COMMIT: 1,
    }
    assert not {STRIP, PROJECT, OUTPUT} & set(counts)


def test_a_step_that_fails_is_counted_and_raises() -> None:
    with StepClock() as clock:
        try:
            with step(STRIP):
                raise ValueError
        except ValueError:
            pass
        else:
            raise AssertionError
    assert set(clock.seconds) == {STRIP}
