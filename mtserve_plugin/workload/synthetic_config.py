"""SyntheticConfig: everything that shapes a synthetic trace, and two sets of values that follow the paper."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from mtserve_plugin.errors import ConfigError
from mtserve_plugin.workload.cap import HistoryCap

_DAY = 86_400


@dataclass(frozen=True)
class SyntheticConfig:
    """Shape of a synthetic trace, frozen.

    Requests of a user come in sessions: short gaps inside, a heavy-tailed pause between two of them (paper,
    figure 4). Each request is followed by new events, so the history grows until the cap. `users`, `requests`
    and the lengths are those of the paper's table 4; the rest is not given there and was chosen or fitted.

    Args:
        name: name of the trace.
        users: users, each with at least one request.
        requests: requests in all.
        min_history: shortest history that a user starts with, in tokens.
        mean_history: mean history length over all requests. The histories that users start with are spread
            between `min_history` and `max_history` so that this mean comes out.
        max_history: longest history in tokens.
        at_cap: policy at `max_history`, see `HistoryCap`. `mean_history` is met under "stop" and "slide";
            "step:N" makes histories shorter.
        start_multiple: histories start with multiples of this, as long as `min_history` allows; 1 for any length.
        new_tokens: mean number of events between two requests of a user, above 0 (geometric). From 1 on there is
            at least one event between two requests, below 1 there may be none.
        pace_sigma: skew of the events between two requests across users: a user's mean is `new_tokens` times a
            log-normal factor with this sigma, cut at two of them, its mean 1 over all requests. Gaps inside a
            session are as much longer, because more events take more time. 0 makes all users alike.
        activity_sigma: skew of activity across users: requests per user follow a log-normal law with this
            sigma; 0 gives everybody the same number.
        session_requests: mean requests of a session (geometric), at least 1.
        min_gap_s: shortest time between two requests of a user in a session, in seconds.
        mean_gap_s: mean of that time (`min_gap_s` plus an exponential law), in seconds.
        min_pause_s: shortest time between two sessions, in seconds.
        tail_index: index of the Lomax law of the pauses beyond `min_pause_s`; smaller is heavier. Its scale
            is not a parameter: each user's pauses fill `horizon_s`.
        horizon_s: time that the trace covers, in seconds.
        start_time: when it begins, in seconds.
        num_items: size of the catalogue.
        item_exponent: popularity of the items: frequency proportional to rank ** -item_exponent.
        num_actions: action codes; code 0 is the most frequent.
        seed: all randomness follows from it.

    Raises:
        ConfigError: an option is out of range or contradicts another; the message names it and the fix.
    """

    name: str
    users: int
    requests: int
    min_history: int
    mean_history: float
    max_history: int
    at_cap: str = "stop"
    start_multiple: int = 1
    new_tokens: float = 10.0
    pace_sigma: float = 0.0
    activity_sigma: float = 0.25
    session_requests: float = 2.0
    min_gap_s: int = 60
    mean_gap_s: float = 80.0
    min_pause_s: int = 120
    tail_index: float = 2.0
    horizon_s: int = 31 * _DAY
    start_time: int = 1_649_376_000
    num_items: int = 1_000_000
    item_exponent: float = 1.0
    num_actions: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
                raise ConfigError(f"{name}={value!r} must be a number of at least {least}")
        for field in dataclasses.fields(self):
            if field.type == "int" and not isinstance(getattr(self, field.name), int):
                raise ConfigError(f"{field.name}={getattr(self, field.name)!r} must be an integer")
        HistoryCap(self.max_history, self.at_cap)
        if self.requests < self.users:
            raise ConfigError(f"requests={self.requests} must be at least users={self.users}: one request each")
        if not self.min_history <= self.mean_history <= self.max_history:
            raise ConfigError(
                f"mean_history={self.mean_history} must lie between min_history={self.min_history} and "
                f"max_history={self.max_history}"
            )
        if self.mean_gap_s < self.min_gap_s:
            raise ConfigError(f"mean_gap_s={self.mean_gap_s} must be at least min_gap_s={self.min_gap_s}")
        if self.num_items > 2**31 or self.users > 2**31:
            raise ConfigError("num_items and users must be at most 2**31")

    @property
    def cap(self) -> HistoryCap:
        return HistoryCap(self.max_history, self.at_cap)

    def replace(self, **changes: Any) -> SyntheticConfig:
        """A copy with some options changed, checked like a new one.

        Raises:
            ConfigError: an option is unknown, besides what the constructor checks.
        """
        known = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise ConfigError(f"unknown option {name!r}; known options: {', '.join(known)}")
        return dataclasses.replace(self, **changes)

    def scaled(
        self, *, users: int, requests: int, max_history: int | None = None, mean_history: float | None = None
    ) -> SyntheticConfig:
        """A smaller or larger trace in which a user behaves as in this one.

        Lengths that are not given keep their proportion to `max_history`. The horizon follows the requests
        per user, so that the gaps between a user's requests stay the same, and the catalogue follows the
        requests.
        """
        longest = self.max_history if max_history is None else max_history
        ratio = longest / self.max_history
        per_user = (requests / users) / (self.requests / self.users) if users > 0 else 1.0
        return self.replace(
            users=users,
            requests=requests,
            min_history=self.min_history if self.min_history <= 1 else max(1, round(self.min_history * ratio)),
            max_history=longest,
            mean_history=self.mean_history * ratio if mean_history is None else mean_history,
            horizon_s=max(1, round(self.horizon_s * per_user)),
            num_items=min(self.num_items, max(1000, round(self.num_items * requests / self.requests))),
        )


_LEAST: dict[str, float] = {
    "users": 1,
    "requests": 1,
    "min_history": 0,
    "mean_history": 0,
    "max_history": 1,
    "start_multiple": 1,
    "new_tokens": 1e-3,
    "pace_sigma": 0,
    "activity_sigma": 0,
    "session_requests": 1,
    "min_gap_s": 1,
    "mean_gap_s": 1,
    "min_pause_s": 1,
    "tail_index": 0.1,
    "horizon_s": 1,
    "start_time": 0,
    "num_items": 1,
    "item_exponent": 0,
    "num_actions": 1,
}

KUAIRAND_LIKE = SyntheticConfig(
    name="kuairand-like",
    users=1_000,
    requests=1_181_699,
    min_history=1,
    mean_history=6_375.0,
    max_history=20_000,
    new_tokens=9.9,
    session_requests=1.95,
    num_items=4_369_953,
    num_actions=256,
)
"""KuaiRand-1K in the paper's table 4. Its 11,713,045 events over 1,181,699 requests are 9.9 new tokens per
request; with these nearly all histories start from nothing, and `activity_sigma` brings the mean to 6,375.
`session_requests` was fitted: an LRU over 40,960 pages of 32 tokens finds 64 % of the tokens (table 1: 63.5 %)."""

MT_LIKE = SyntheticConfig(
    name="mt-like",
    users=2_884,
    requests=1_972_438,
    min_history=4_000,
    mean_history=5_189.0,
    max_history=6_000,
    new_tokens=2.5,
    session_requests=2.2,
)
"""The MT trace in the paper's table 4. At 684 requests per user a mean of 5,189 between 4,000 and 6,000 leaves room
for two or three new tokens per request: a dozen would hold every user at the cap for most of the trace.
`session_requests` was fitted: the same LRU finds 60 % of the tokens (table 1: 60.3 %)."""
