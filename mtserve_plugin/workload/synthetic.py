"""SyntheticTrace: requests and events computed from a seed, in any amount, in bounded memory.

Every quantity is a function of (seed, user, position), so that a user's events can be computed without the
rest of the trace, and blocks are the same whatever their size. Times and counts are integers, so that sums do
not depend on the order of additions.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mtserve_plugin.errors import ConfigError, InputError
from mtserve_plugin.workload import draws
from mtserve_plugin.workload.agenda import Agenda, Pending
from mtserve_plugin.workload.draws import Floats, UInt64s
from mtserve_plugin.workload.ragged import offsets_of, ranges, rows_of
from mtserve_plugin.workload.synthetic_config import SyntheticConfig
from mtserve_plugin.workload.trace import BLOCK_REQUESTS, Events, Int64s, Requests, Trace, check_block_size

_PASS_REQUESTS = 262_144
_KEPT_EVENTS = 2_000_000
# Blocks smaller than this are cut from rounds of this size: a round has a fixed cost.
_ROUND_REQUESTS = 4096
# A geometric law with this mean yields nothing but 0.
_NO_EVENTS = 1e-300
# What is fitted to the users of a trace is fitted to at most so many of them.
_FITTED_USERS = 200_000


class _Gap(NamedTuple):
    """What lies between a user's request number k - 1 and number k: `gap` seconds and `tokens` new events."""

    gap: Int64s
    tokens: Int64s


class SyntheticTrace(Trace):
    """A trace with the statistics of a `SyntheticConfig`. User ids are 0 to `users - 1`.

    Args:
        config: the shape, e.g. `KUAIRAND_LIKE.scaled(users=40, requests=4000)`.

    Raises:
        ConfigError: `mean_history` cannot be reached with the growth that the other options imply, or the
            requests do not fit into the horizon; the message names values that would do.
    """

    def __init__(self, config: SyntheticConfig) -> None:
        self.config = config
        self.name = config.name
        self.num_requests = config.requests
        self.num_items = config.num_items
        self.num_actions = config.num_actions
        self._cap = config.cap
        users = np.arange(config.users, dtype=np.int64)
        self._keys = {s: draws.keys_of(config.seed, s, users) for s in ("session", "gap", "tokens")}
        self._counts = _requests_per_user(config, users)
        self._pace = _paces(config, users, self._counts)
        self._initial, self.start_exponent = _initial_histories(config, users, self._counts, self._pace)
        self._pause_scale = self._fit_pauses()
        self._recent: OrderedDict[int, Events] = OrderedDict()
        self._recent_events = 0

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "synthetic",
            **dataclasses.asdict(self.config),
            "cap_policy": self._cap.describe(),
            "initial_history_mean": float(self._initial.mean()),
        }

    # ---- requests ------------------------------------------------------------------------------------------

    def blocks(self, max_requests: int = BLOCK_REQUESTS) -> Iterator[Requests]:
        check_block_size(max_requests)
        config = self.config
        batch = min(max(max_requests, _ROUND_REQUESTS), BLOCK_REQUESTS)
        tile = max(1, min(256, 2 * batch // config.users))
        window = max(1, config.horizon_s * batch // config.requests)
        position = np.zeros(config.users, np.int64)
        time = np.full(config.users, config.start_time, np.int64)
        events = np.zeros(config.users, np.int64)
        agenda = Agenda(config.start_time, window)
        soon = np.zeros(0, np.int64)
        emitted = number = 0
        while emitted < config.requests:
            limit = config.start_time + (number + 1) * window
            if limit > agenda.horizon:
                agenda.extend()
                soon = np.flatnonzero((position < self._counts) & (time < agenda.horizon))
            while len(behind := soon[time[soon] < limit]):
                agenda.add(self._generate(behind, tile, position, time, events))
                soon = soon[(position[soon] < self._counts[soon]) & (time[soon] < agenda.horizon)]
            ready = agenda.take(number)
            number += 1
            requests = self._requests(ready)
            emitted += len(requests)
            for begin in range(0, len(requests), max_requests):
                yield requests.take(slice(begin, begin + max_requests))

    def _generate(self, users: Int64s, tile: int, position: Int64s, time: Int64s, events: Int64s) -> Pending:
        """The next `tile` requests of each of `users`, whose `position`, `time` and `events` move along."""
        lengths = np.minimum(tile, self._counts[users] - position[users])
        row = rows_of(lengths)
        ends = offsets_of(lengths)[1:]
        step = self._gaps(users[row], ranges(position[users], lengths))
        times = _running(step.gap, lengths) + time[users][row]
        totals = _running(step.tokens, lengths) + events[users][row]
        position[users] += lengths
        time[users] = times[ends - 1]
        events[users] = totals[ends - 1]
        return Pending(users[row], times, totals, totals - step.tokens)

    def _requests(self, ready: Pending) -> Requests:
        order = np.lexsort((ready.events, ready.user, ready.time))
        user, time, events, before = (column[order] for column in ready)
        start, end = self._cap.window(events)
        # A first request has nothing before it and a history within the cap: it counts as unmoved too.
        earlier, _ = self._cap.window(before)
        return Requests(user, time, start, end, start != earlier)

    def _gaps(self, user: Int64s, position: Int64s) -> _Gap:
        """Gap and new events in front of request `position` of `user`; for number 0 its initial history."""
        pause, weight = self._pauses(user, position)
        config = self.config
        quantile = draws.uniforms(self._keys["gap"][user], position)
        inside = config.min_gap_s - (config.mean_gap_s - config.min_gap_s) * np.log1p(-quantile)
        inside *= self._pace[user]
        between = config.min_pause_s + self._pause_scale[user] * weight
        gap = np.where(pause, between, inside).astype(np.int64)
        tokens = self._new_tokens(user, position)
        return _Gap(gap, np.where(position == 0, self._initial[user], tokens))

    def _pauses(self, user: Int64s, position: Int64s) -> tuple[npt.NDArray[np.bool_], Floats]:
        """Whether a session ends in front of a request, and the weight of the pause there."""
        key = self._keys["session"][user]
        pause = draws.uniforms(key, position * 2) * self.config.session_requests < 1.0
        pause |= position == 0
        return pause, (1.0 - draws.uniforms(key, position * 2 + 1)) ** (-1.0 / self.config.tail_index) - 1.0

    def _new_tokens(self, user: Int64s, position: Int64s) -> Int64s:
        mean = self.config.new_tokens * self._pace[user]
        least = (mean >= 1.0).astype(np.int64)
        extra = np.maximum(mean - least, _NO_EVENTS)
        quantile = draws.uniforms(self._keys["tokens"][user], position)
        return least + (np.log1p(-quantile) / np.log(extra / (1.0 + extra))).astype(np.int64)

    def _fit_pauses(self) -> Floats:
        """`[users]`: the factor on each user's pause weights with which its requests fill the horizon.

        One pause more than there are requests is counted, so that users do not all end at the horizon.
        """
        config = self.config
        fixed = np.zeros(config.users)
        weights = np.zeros(config.users)
        counts = self._counts + 1
        mean_inside = config.mean_gap_s * self._pace
        for users in _user_chunks(counts):
            row = rows_of(counts[users])
            position = ranges(np.zeros(len(users), np.int64), counts[users])
            pause, weight = self._pauses(users[row], position)
            pause |= position == self._counts[users][row]
            begins = offsets_of(counts[users])[:-1]
            fixed[users] = np.add.reduceat(np.where(pause, config.min_pause_s, mean_inside[users][row]), begins)
            weights[users] = np.add.reduceat(np.where(pause, weight, 0.0), begins)
        if (worst := float(fixed.max())) >= config.horizon_s:
            raise ConfigError(
                f"horizon_s={config.horizon_s} is too short: the busiest user's {int(self._counts.max())} "
                f"requests take {worst:.0f} s even without pauses; raise horizon_s or lower requests per user"
            )
        return (config.horizon_s - fixed) / np.maximum(weights, 1e-12)

    # ---- events --------------------------------------------------------------------------------------------

    def events(self, user: int) -> Events:
        if not 0 <= user < self.config.users:
            raise InputError(
                f"user={user} is not in the trace {self.name!r}; its users are 0 to {self.config.users - 1}"
            )
        if (kept := self._recent.get(user)) is not None:
            self._recent.move_to_end(user)
            return kept
        made = self._make_events(user)
        self._recent[user] = made
        self._recent_events += len(made.item)
        while self._recent_events > _KEPT_EVENTS and len(self._recent) > 1:
            self._recent_events -= len(self._recent.popitem(last=False)[1].item)
        return made

    def _make_events(self, user: int) -> Events:
        config = self.config
        count = int(self._counts[user])
        position = np.arange(count, dtype=np.int64)
        gap, tokens = self._gaps(np.full(count, user, np.int64), position)
        asked = config.start_time + np.cumsum(gap)
        initial = int(tokens[0])
        after = tokens[1:]
        row = rows_of(after)
        place = ranges(np.zeros(count - 1, np.int64), after)
        # What follows a request lies within the interval that it stands for, and before the next request.
        lasts = np.minimum(gap[1:], config.min_gap_s)
        later = asked[:-1][row] + place * lasts[row] // after[row]
        total = initial + len(row)
        pace = max(1, min(config.horizon_s // max(total, 1), int(asked[0]) // (initial + 1)))
        sooner = asked[0] - pace * np.arange(initial, 0, -1, dtype=np.int64)
        number = np.arange(total, dtype=np.int64)
        item = self.items_at(draws.uniforms(self._key("item", user), number))
        action = draws.zipf(draws.uniforms(self._key("action", user), number), config.num_actions, 1.0)
        made = Events(item, action, np.concatenate([sooner, later]))
        for column in made:
            column.setflags(write=False)
        return made

    def _key(self, stream: str, user: int) -> UInt64s:
        return draws.keys_of(self.config.seed, stream, np.array([user], np.int64))

    def items_at(self, quantile: Floats) -> Int64s:
        return draws.zipf(quantile, self.config.num_items, self.config.item_exponent)


def _requests_per_user(config: SyntheticConfig, users: Int64s) -> Int64s:
    """`[users]`, at least 1 each, `config.requests` in all, log-normal around their mean."""
    weight = np.exp(config.activity_sigma * draws.normals(draws.keys_of(config.seed, "activity", users)))
    share = weight / weight.sum() * (config.requests - config.users)
    counts = np.floor(share).astype(np.int64)
    missing = config.requests - config.users - int(counts.sum())
    counts[np.argsort(counts - share, kind="stable")[:missing]] += 1
    return counts + 1


def _paces(config: SyntheticConfig, users: Int64s, counts: Int64s) -> Floats:
    """`[users]`: by what factor each has more events between two requests than the average over all requests."""
    if not config.pace_sigma:
        return np.ones(len(users))
    # Cut, so that no user is busy beyond the horizon.
    normal = np.clip(draws.normals(draws.keys_of(config.seed, "pace", users)), -2.0, 2.0)
    pace = np.exp(config.pace_sigma * normal)
    return pace * (counts.sum() / (pace @ counts))


def _initial_histories(config: SyntheticConfig, users: Int64s, counts: Int64s, pace: Floats) -> tuple[Int64s, float]:
    """`[users]`: the lengths that histories start with, and the exponent p that shapes them.

    They are min + (max - min) * uniform ** p: the whole range occurs, p decides the mean. A history is
    expected to grow by `new_tokens` per request (times its pace) up to the maximum, so the mean over all requests
    has a closed form per user.
    """
    every = draws.uniforms(draws.keys_of(config.seed, "initial", users), np.zeros_like(users))
    low, high, multiple = config.min_history, config.max_history, config.start_multiple
    sample = slice(None, None, -(-len(users) // _FITTED_USERS))
    quantile, counts, pace = every[sample], counts[sample], pace[sample]

    def initial(exponent: float, quantile: Floats = quantile) -> Floats:
        start = np.floor(low + (high - low) * quantile**exponent)
        if multiple > 1:
            start = np.maximum(start // multiple * multiple, low)
            start[np.argmin(quantile)] = low
        return start

    def mean(start: Floats, new_tokens: float) -> float:
        growth = new_tokens * pace
        growing = np.clip(np.ceil((high - start) / growth), 0, counts)
        tokens = growing * start + growth * growing * (growing - 1) / 2 + (counts - growing) * high
        return float(tokens.sum()) / float(counts.sum())

    lowest = mean(initial(np.inf), config.new_tokens)
    if lowest > config.mean_history * 1.005:
        fitting = _bisect(lambda growth: mean(initial(np.inf), growth) < config.mean_history, 0.0, config.new_tokens)
        raise ConfigError(
            f"mean_history={config.mean_history} is out of reach: with new_tokens={config.new_tokens} it is "
            f"{lowest:.0f} even if every history starts at min_history={low}; "
            + (
                f"use new_tokens of at most {fitting:.2f}, a higher mean_history, or fewer requests per user"
                if fitting >= 1
                else "use a higher mean_history, a lower min_history, or fewer requests per user"
            )
        )
    odds = _bisect(lambda t: mean(initial(t / (1.0 - t)), config.new_tokens) > config.mean_history, 0.0, 1.0 - 1e-9)
    exponent = odds / (1.0 - odds)
    reached = mean(initial(exponent), config.new_tokens)
    if multiple > 1 and abs(reached - config.mean_history) > 0.02 * config.mean_history:
        raise ConfigError(
            f"mean_history={config.mean_history} is out of reach: with histories that start at multiples of "
            f"start_multiple={multiple} the nearest mean is {reached:.0f}; use that, or a lower start_multiple"
        )
    return initial(exponent, every).astype(np.int64), exponent


def _bisect(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The largest value in [low, high] for which `holds`, which is true below some point and false above."""
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _user_chunks(counts: Int64s) -> Iterator[Int64s]:
    """Runs of users that have about `_PASS_REQUESTS` requests together."""
    group = (np.cumsum(counts) - 1) // _PASS_REQUESTS
    yield from np.split(np.arange(len(counts), dtype=np.int64), np.flatnonzero(np.diff(group)) + 1)


def _running(values: Int64s, lengths: Int64s) -> Int64s:
    """Running sums inside each row."""
    total = np.cumsum(values)
    begins = offsets_of(lengths)[:-1]
    return total - np.repeat(total[begins] - values[begins], lengths)
