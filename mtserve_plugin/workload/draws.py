"""Random numbers as a pure function of a seed and integer keys: the same in every process and in any order.

The mixer is the finaliser of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
2014).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mtserve_plugin.workload.trace import Int64s

UInt64s = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(x: UInt64s) -> UInt64s:
    """A bijection on 64-bit words whose outputs look independent; changes `x` in place and returns it."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def keys_of(seed: int, stream: str, *ids: Int64s) -> UInt64s:
    """One 64-bit key per element of `ids` (equal shapes), for one purpose (`stream`); any seed and ids."""
    word = seed & _WORD
    for byte in stream.encode():
        word = ((word ^ byte) * 0x100000001B3) & _WORD
    key = np.full(ids[0].shape, word, np.uint64)
    for column in ids:
        key += np.uint64(_GOLDEN)
        key ^= column.astype(np.int64).view(np.uint64)
        mix(key)
    return key


def uniforms(key: UInt64s, position: Int64s) -> Floats:
    """Uniform in [0, 1), number `position` of the sequence that `key` names; the two broadcast."""
    word = (position.view(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    return (mix(word + key) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def normals(key: UInt64s) -> Floats:
    """One standard normal per key (Box-Muller)."""
    zero = np.zeros(key.shape, np.int64)
    radius = np.sqrt(-2.0 * np.log1p(-uniforms(key, zero)))
    return radius * np.cos(2.0 * np.pi * uniforms(key, zero + 1))


def zipf(quantile: Floats, size: int, exponent: float) -> Int64s:
    """The rank in 0..size-1 at each quantile of a Zipf-like law, density proportional to (rank + 1) **
    -exponent.

    The continuous law on [1, size + 1) is inverted, so that a draw costs the same for any size.
    """
    if exponent == 1.0:
        rank = np.exp(quantile * np.log(size + 1.0))
    else:
        power = 1.0 - exponent
        rank = (1.0 + quantile * ((size + 1.0) ** power - 1.0)) ** (1.0 / power)
    return np.clip(rank.astype(np.int64) - 1, 0, size - 1)
