"""What the measurements share: clocks, and a Python that does nothing of its own meanwhile."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds, and what came out."""
    began = time.perf_counter()
    out = run()
    return 1e3 * (time.perf_counter() - began), out


def best(run: Callable[[], Any]) -> tuple[float, Any]:
    """The least of three times, for what is so short that an interrupt would be all that is seen."""
    return min((timed(run) for _ in range(3)), key=lambda one: one[0])


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """max|a-b| / max|b|; infinite where it is no number."""
    found = float((got - want).abs().max() / want.abs().max())
    return math.inf if math.isnan(found) else found


@contextmanager
def no_garbage_collection() -> Iterator[Callable[[], int]]:
    """Switches Python's collector off; yields a function that collects when there is time for it."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield gc.collect
    finally:
        if enabled:
            gc.enable()


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Torch on so many threads; `None` leaves them."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
