"""What of a context feature belongs to a user's identity, against the definition in Python's own integers."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mtserve_plugin.integrations.generative_recommenders.features import _mix_context

LONGEST = 3


def mix(key, value):
    key = (key ^ value) * 0x9E3779B97F4A7C15 % 2**64
    # Shifts are those of signed integers: the sign moves in from above.
    key = (key ^ (signed(key) >> 29) % 2**64) * 0xBF58476D1CE4E5B9 % 2**64
    return key ^ (signed(key) >> 32) % 2**64


def signed(key):
    return key - 2**64 if key >= 2**63 else key


def expected(rows, met):
    keys = []
    for row, counts in zip(rows, met, strict=True):
        key = mix(7, min(len(row), LONGEST))
        for place in range(LONGEST):
            key = mix(key, (row[place] if place < len(row) else 0) % 2**64)
        keys.append(signed(key if counts else mix(7, 0x5EED)))
    return keys


def of(rows, met):
    flat = np.array([value for row in rows for value in row], dtype=np.int64)
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    keys = np.full(len(rows), 7, dtype=np.int64)
    return _mix_context(keys, flat, lengths, LONGEST, np.array(met, dtype=bool)).tolist()


@pytest.mark.parametrize("seed", range(5))
def test_against_the_definition(seed):
    rng = random.Random(seed)
    rows = [[rng.randrange(-(2**63), 2**63) for _ in range(rng.randrange(6))] for _ in range(30 * (seed > 0))]
    met = [seed == 1 or rng.random() < 0.7 for _ in rows]
    assert of(rows, met) == expected(rows, met)


def test_every_value_counts_up_to_the_longest_and_none_beyond():
    row = [5, 6, 7, 8, 9]
    changed = [[*row[:place], 99, *row[place + 1 :]] for place in range(len(row))]
    keys = of([row, *changed, row[:2], [*row[:2], 0]], [True] * 8)
    assert len(set(keys[:4])) == 4
    assert keys[4] == keys[5] == keys[0]
    assert keys[6] != keys[7]
