"""What the measurements of whole requests share."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
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
