"""A plan: memory by arithmetic, hit ratios and traffic by simulation of the index that would serve."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mtserve_plugin.config import CacheConfig
from mtserve_plugin.errors import ConfigError, InputError
from mtserve_plugin.plan.memory import DeviceMemory, Geometry, divide
from mtserve_plugin.plan.options import PlanOptions
from mtserve_plugin.simulate.run import IndexRun
from mtserve_plugin.workload import Trace, load_trace, statistics
from mtserve_plugin.workload.synthetic import SyntheticTrace
from mtserve_plugin.workload.synthetic_config import SyntheticConfig

OnStep = Callable[[str, int, int], None]
"""Told what is being done, how many steps are done, and how many there are."""

# An LRU's hit ratio depends on its size relative to the users, not on their number, once there are some thousands.
_SIMULATED_USERS = 4_000
_REQUESTS_PER_USER = 40
# Of the requests, those that fill the cache before anything is counted.
_WARM_UP = 1 / 3
_SWEEP = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True)
class Users:
    """Who comes, from the options or from a trace.

    Attributes:
        users: how many.
        tokens: mean history over the requests.
        longest: longest history.
        new_tokens: mean events between two requests of a user.
        interval_s: mean time between two requests of a user; 0 when nobody returns.
    """

    users: int
    tokens: float
    longest: int
    new_tokens: float
    interval_s: float

    @property
    def requests_per_s(self) -> float:
        return self.users / self.interval_s if self.interval_s else 0.0


@dataclass
class Prediction:
    """What a policy would find at a number of pages, once the cache is filled.

    Attributes:
        policy: "device", "paper" or "ours".
        pages: of the planned cache.
        device_hit_ratio, total_hit_ratio, warm_hit_ratio: as `mtserve simulate` has them.
        computed_tokens: per request, not found.
        onload_bytes_per_s, offload_bytes_per_s: at the planned rate of requests.
    """

    policy: str
    pages: int
    device_hit_ratio: float = 0.0
    total_hit_ratio: float = 0.0
    warm_hit_ratio: float = 0.0
    computed_tokens: float = 0.0
    onload_bytes_per_s: float = 0.0
    offload_bytes_per_s: float = 0.0


@dataclass
class Plan:
    """The outcome; `to_json` gives it as plain values.

    Attributes:
        options: what was asked.
        users: who comes.
        token_bytes, user_bytes, working_set_bytes: keys and values of a token, of a mean user, of all users.
        memory: how device memory is divided.
        host_tokens: that the host tier holds.
        predictions: the policies at the planned pages, then "ours" at other numbers of pages.
        config: options of the `CacheConfig` to use.
        simulated_users, simulated_requests: of the simulation, in proportion to which its pages and host were scaled.
    """

    options: PlanOptions
    users: Users
    token_bytes: int
    user_bytes: int
    working_set_bytes: int
    memory: DeviceMemory
    host_tokens: int
    config: dict[str, Any]
    predictions: list[Prediction] = field(default_factory=list)
    simulated_users: int = 0
    simulated_requests: int = 0

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {
            "memory_total_bytes": self.memory.total_bytes,
            "requests_per_s": self.users.requests_per_s,
        }


def make_plan(options: PlanOptions, on_step: OnStep | None = None) -> Plan:
    """Plans a cache for these users and this memory.

    Raises:
        ConfigError: the memory does not hold one batch, or an option does not fit the others.
        InputError: the trace is missing or malformed.
    """
    step = on_step or (lambda *_: None)
    trace, users = _trace(options, step)
    geometry = Geometry(options.shape, options.page_size)
    memory = divide(geometry, options.device_bytes, options.batch_size, users.longest, staged=options.staged)
    plan = Plan(
        options=options,
        users=users,
        token_bytes=geometry.token_bytes,
        user_bytes=round(users.tokens * geometry.token_bytes),
        working_set_bytes=round(users.users * users.tokens * geometry.token_bytes),
        memory=memory,
        host_tokens=options.host_bytes // geometry.token_bytes,
        config=_config(options, users, memory),
    )
    if trace is None:
        trace = _imagined(options, users)
        plan.simulated_users = min(users.users, _SIMULATED_USERS)
    else:
        plan.simulated_users = users.users
    plan.simulated_requests = trace.num_requests or 0
    runs = [(policy, 1.0) for policy in ("device", "paper", "ours") if policy == "device" or options.host_bytes]
    runs += [(runs[-1][0], factor) for factor in _SWEEP if factor != 1.0]
    for number, (policy, factor) in enumerate(runs):
        step(f"simulating {policy}", number, len(runs))
        plan.predictions.append(_predict(plan, trace, policy, factor))
    return plan


def _trace(options: PlanOptions, step: OnStep) -> tuple[Trace | None, Users]:
    if options.trace is None:
        return None, Users(
            options.users, float(options.tokens), options.longest, options.new_tokens, options.interval_s
        )
    step("reading the trace", 0, 1)
    trace = load_trace(options.trace)
    facts = statistics(trace)
    returns = facts["requests"] - facts["users"]
    if returns <= 0:
        raise InputError(f"--trace {options.trace}: no user comes back, so a cache finds nothing")
    per_user = facts["requests"] / facts["users"]
    return trace, Users(
        users=facts["users"],
        tokens=facts["mean_history"],
        longest=facts["max_history"],
        new_tokens=facts["appended_tokens"] / returns,
        interval_s=facts["span_s"] / max(per_user, 1.0),
    )


def _imagined(options: PlanOptions, users: Users) -> Trace:
    """Requests of such users: sessions of two requests on average, the pauses between them heavy-tailed."""
    count = min(users.users, _SIMULATED_USERS)
    per_user = max(2, min(_REQUESTS_PER_USER, int(users.tokens / (2 * users.new_tokens))))
    interval = users.interval_s
    try:
        return SyntheticTrace(
            SyntheticConfig(
                name="planned",
                users=count,
                requests=count * per_user,
                min_history=1,
                mean_history=users.tokens,
                max_history=users.longest,
                new_tokens=users.new_tokens,
                activity_sigma=0.5,
                session_requests=2.0,
                min_gap_s=max(1, round(interval / 20)),
                mean_gap_s=max(1.0, interval / 10),
                min_pause_s=max(1, round(interval / 10)),
                horizon_s=max(2, round(interval * per_user)),
                seed=options.seed,
            )
        )
    except ConfigError as error:
        raise ConfigError(
            f"no requests can be imagined for --tokens {options.tokens}, --max-history {users.longest}, "
            f"--new-tokens {users.new_tokens:g}, --interval {interval:g}s: {error}"
        ) from None


def _config(options: PlanOptions, users: Users, memory: DeviceMemory) -> dict[str, Any]:
    shape = options.shape
    config: dict[str, Any] = {
        "num_layers": shape.layers,
        "num_heads": shape.heads,
        "qk_dim": shape.dim,
        "v_dim": shape.dim,
        "dtype": shape.dtype,
        "attn_norm_len": users.longest,
        "page_size": options.page_size,
        "num_pages": memory.pages,
        "chunk_size": options.chunk,
        "host_bytes": options.host_bytes,
    }
    if options.staged:
        config |= {"onload_strategy": "staged", "onload_pages": memory.onload_pages}
    CacheConfig(**config)  # refuses what cannot be
    return config


def _predict(plan: Plan, trace: Trace, policy: str, factor: float) -> Prediction:
    scale = plan.simulated_users / plan.users.users
    pages = max(1, round(plan.memory.pages * factor))
    longest = math.ceil(plan.users.longest / plan.options.page_size)
    config = CacheConfig(**plan.config).replace(num_pages=max(round(pages * scale), longest))
    if policy == "device":
        config = config.replace(host_bytes=0)
    else:
        host = max(round(plan.options.host_bytes * scale), config.chunk_bytes)
        quota = max(config.offload_quota_tokens, config.chunk_size)
        config = config.replace(host_bytes=host, tail_write_back=policy == "ours", offload_quota_tokens=quota)
    index = IndexRun(config, plan.options.batch_size)
    before: dict[str, int] | None = None
    seen = 0
    for block in trace.blocks(_block(plan.simulated_requests)):
        if before is None and seen >= plan.simulated_requests * _WARM_UP:
            index.finish()  # no request may be half counted
            before = index.stats()
        index.feed(block)
        seen += len(block)
    index.finish()
    after = index.stats()
    counted = {name: after[name] - (before or {}).get(name, 0) for name in _COUNTED}
    asked, requests = max(counted["history_tokens"], 1), max(counted["requests"], 1)
    rate = plan.users.requests_per_s * plan.token_bytes / requests
    return Prediction(
        policy=policy,
        pages=pages,
        device_hit_ratio=counted["device_hit_tokens"] / asked,
        total_hit_ratio=counted["hit_tokens"] / asked,
        warm_hit_ratio=counted["hit_tokens"] / max(counted["committed_before_tokens"], 1),
        computed_tokens=(counted["history_tokens"] - counted["hit_tokens"]) / requests,
        onload_bytes_per_s=counted["onload_tokens"] * rate,
        offload_bytes_per_s=counted["offload_tokens"] * rate,
    )


_COUNTED = (
    "requests",
    "history_tokens",
    "hit_tokens",
    "device_hit_tokens",
    "committed_before_tokens",
    "onload_tokens",
    "offload_tokens",
)


def _block(requests: int) -> int:
    """Blocks small enough that the warm-up ends where it should."""
    return max(1_000, requests // 30)
