"""The agenda: every request comes out of the window in which it is due, once."""

from __future__ import annotations

import numpy as np
import pytest

from mtserve_plugin.workload.agenda import Agenda, Pending


@pytest.mark.parametrize("seed", range(4))
def test_each_request_is_taken_once_from_its_window(seed):
    generator = np.random.default_rng(seed)
    begin, window = int(generator.integers(-50, 50)), int(generator.integers(1, 9))
    agenda = Agenda(begin, window)
    put, got = [], []
    for number in range(100):
        if begin + (number + 1) * window > agenda.horizon:
            agenda.extend()
        for _ in range(generator.integers(0, 3)):
            size = int(generator.integers(0, 20))
            time = begin + number * window + generator.integers(0, 70 * window, size)
            user = np.arange(len(put), len(put) + size)
            put += time.tolist()
            agenda.add(Pending(user, time, 2 * time, 3 * time))
        due = agenda.take(number)
        assert ((due.time - begin) // window == number).all()
        assert (due.events == 2 * due.time).all()
        assert (due.before == 3 * due.time).all()
        got += due.user.tolist()
    assert sorted(got) == [user for user, time in enumerate(put) if time < begin + 100 * window]
