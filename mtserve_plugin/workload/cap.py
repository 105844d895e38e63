"""HistoryCap: what happens to a history that outgrows the longest length a model takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mtserve_plugin.errors import ConfigError
from mtserve_plugin.workload.trace import Int64s


@dataclass(frozen=True)
class HistoryCap:
    """The longest history and the policy that keeps to it.

    Args:
        max_history: longest history in tokens (M); `None` for no limit.
        at_cap: "stop": a history keeps its first M events and later ones are left out, so that its prefix
            stays valid (upstream's `maybe_truncate_seq` does this). "slide": it keeps the last M; from then
            on each request that brings new events changes its own prefix. "step:N": when it would exceed M,
            its N oldest events go at once (as often as needed); only that request's prefix changes.

    Raises:
        ConfigError: the policy is unknown, or N is not between 1 and M.
    """

    max_history: int | None
    at_cap: str = "stop"

    def __post_init__(self) -> None:
        if self.max_history is not None and self.max_history < 1:
            raise ConfigError(f"max_history={self.max_history} must be at least 1, or None for no limit")
        if self.at_cap in ("stop", "slide"):
            return
        kind, _, count = self.at_cap.partition(":")
        if kind != "step" or not count.isascii() or not count.isdigit():
            raise ConfigError(f"at_cap={self.at_cap!r} is not known; use 'stop', 'slide', or 'step:N' with N events")
        if not 1 <= int(count) <= (self.max_history or int(count)):
            raise ConfigError(
                f"at_cap={self.at_cap!r}: N must be at least 1 and at most max_history={self.max_history}"
            )

    @property
    def step(self) -> int:
        """Events dropped at once; 0 for "stop"."""
        if self.at_cap == "stop":
            return 0
        return 1 if self.at_cap == "slide" else int(self.at_cap.partition(":")[2])

    def window(self, events: Int64s) -> tuple[Int64s, Int64s]:
        """The histories `[start, end)` of users with so many events, int64 `[n]` each.

        They follow from these numbers alone, so a trace needs no memory of earlier requests.
        """
        if self.max_history is None:
            return np.zeros_like(events), events
        if not self.step:
            return np.zeros_like(events), np.minimum(events, self.max_history)
        excess = np.maximum(events - self.max_history, 0)
        return -(-excess // self.step) * self.step, events

    def describe(self) -> str:
        """The policy in force, in words."""
        if self.max_history is None:
            return "no cap: a history holds all events before its request"
        if not self.step:
            return f"stop: a history keeps its first {self.max_history} events"
        if self.at_cap == "slide":
            return (
                f"slide: a history keeps its last {self.max_history} events; "
                "a request that moves the window is invalidated"
            )
        return (
            f"step: a history that would exceed {self.max_history} events loses its {self.step} oldest "
            "at once; that request is invalidated"
        )
