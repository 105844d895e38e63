"""Runs a trace through the index and the policies of `HierarchicalKVCache`, without keys, values or a model.

The index is the one that serves: its plans are carried out by reporting them done. A batch's onloads arrive before it
commits, its offloads `offload_delay` batches later. No content is hashed: histories are taken to continue what was
cached unless the trace marks a request as invalidated.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mtserve_plugin import _core
from mtserve_plugin.config import CacheConfig
from mtserve_plugin.engine import index_config
from mtserve_plugin.machine import describe_machine, resident_bytes
from mtserve_plugin.replay.options import MODELS
from mtserve_plugin.simulate.options import Point, SimulateOptions
from mtserve_plugin.simulate.paper import paper_figures, status
from mtserve_plugin.workload import FITTED, Requests, Trace, load_trace

OnStep = Callable[[str, int, int], None]
"""Told what is being done, how many steps are done, and how many there are."""


@dataclass
class SimulateRow:
    """One policy at one point.

    Attributes:
        trace: name of the trace.
        policy: "recompute", "device", "paper" or "ours".
        status: "calibrated", "predicted", or "-" for a trace that was not fitted to the paper.
        batch_size: requests per batch; a batch ends early before a user's second request.
        pages, page_size, chunk_size, host_bytes: sizes of the two tiers; host_bytes 0 without one.
        device_hit_ratio: tokens found in pages / history tokens asked for.
        total_hit_ratio: tokens found in either tier / history tokens asked for.
        warm_hit_ratio: tokens found / tokens that the same users' previous requests had.
        requests, batches: how many.
        mean_history: history tokens per request.
        missed_tokens: history tokens per request that were not found and have to be encoded.
        lost_tokens: committed once, then dropped from both tiers.
        bytes_onloaded, bytes_offloaded: between the tiers.
        index_us_per_batch: time in the index, in microseconds.
        seconds: whole time of this row, generating the trace included.
        paper: the paper's figures for this point, see `paper_figures`.
        counters: the index's counters.
    """

    trace: str
    policy: str
    status: str
    batch_size: int
    pages: int
    page_size: int
    chunk_size: int
    host_bytes: int
    device_hit_ratio: float = 0.0
    total_hit_ratio: float = 0.0
    warm_hit_ratio: float = 0.0
    requests: int = 0
    batches: int = 0
    mean_history: float = 0.0
    missed_tokens: float = 0.0
    lost_tokens: int = 0
    bytes_onloaded: int = 0
    bytes_offloaded: int = 0
    index_us_per_batch: float = 0.0
    seconds: float = 0.0
    paper: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)


@dataclass
class SimulateResult:
    """A run's outcome; `to_json` gives it as plain values.

    Attributes:
        config: options and trace: everything that is needed to repeat the run.
        machine: see `describe_machine`.
        rows: one per policy and point.
        seconds: of the whole run.
        memory_before_bytes, memory_peak_bytes: of the process, before the trace was opened and at most.
    """

    config: dict[str, Any]
    machine: dict[str, Any]
    rows: list[SimulateRow]
    seconds: float
    memory_before_bytes: int
    memory_peak_bytes: int

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class IndexRun:
    """A cache's index, fed with requests.

    Args:
        config: the cache; geometry and strategies do not matter.
        batch_size: requests per batch.
        offload_delay: see `SimulateOptions`.
    """

    def __init__(self, config: CacheConfig, batch_size: int, offload_delay: int = 0) -> None:
        self._native = _core.Simulation(index_config(config), batch_size, offload_delay)

    def feed(self, requests: Requests) -> None:
        """Serves requests that follow those of earlier calls; the last few may wait to fill their batch."""
        user = np.ascontiguousarray(requests.user, np.int64)
        length = np.ascontiguousarray(requests.history_length, np.int64)
        invalidated = np.ascontiguousarray(requests.invalidated, np.bool_)
        self._native.run(user.ctypes.data, length.ctypes.data, invalidated.ctypes.data, len(user))

    def finish(self) -> None:
        """Serves the batch that is not full and completes every transfer."""
        self._native.finish()

    def stats(self) -> dict[str, int]:
        """The index's counters and gauges, `committed_before_tokens` and `index_ns`."""
        found: dict[str, int] = self._native.stats()
        found["hit_tokens"] = found["device_hit_tokens"] + found["host_hit_tokens"]
        return found

    def check(self) -> str:
        """Breaches of the index's invariants, in words; empty when there are none."""
        return str(self._native.check())


def open_trace(options: SimulateOptions) -> Trace:
    """The trace that these options name; synthetic ones are the fitted."""
    return load_trace(options.trace, limit=options.limit, shapes=FITTED, **options.trace_options)


def cache_config(options: SimulateOptions, policy: str, point: Point) -> CacheConfig:
    """The cache whose index is simulated."""
    shape = MODELS[options.model]
    device = CacheConfig(
        num_layers=shape.layers,
        num_heads=shape.heads,
        qk_dim=shape.dim,
        v_dim=shape.dim,
        dtype=shape.dtype,
        attn_norm_len=1,
        page_size=options.page_size,
        num_pages=point.pages,
        chunk_size=point.chunk,
    )
    if policy in ("recompute", "device"):
        return device
    return device.replace(
        host_bytes=options.host_bytes,
        offload_quota_tokens=max(device.offload_quota_tokens, point.chunk),
        tail_write_back=policy == "ours",
    )


def run_simulation(options: SimulateOptions, on_step: OnStep | None = None) -> SimulateResult:
    """Simulates every policy at every point, one after another on one core.

    Memory grows with the users, not with the requests.

    Raises:
        ConfigError: an option is out of range.
        InputError: the trace is missing or malformed.
    """
    step = on_step or (lambda *_: None)
    memory = _Memory()
    begin = time.perf_counter()
    configs = [(policy, point, cache_config(options, policy, point)) for policy, point in options.runs]
    step("opening the trace", 0, 1)
    trace = open_trace(options)
    rows = []
    for number, (policy, point, config) in enumerate(configs):
        text = f"{policy}, {point.batch_size} x {point.pages} x {point.chunk} ({number + 1}/{len(configs)})"

        def shown(done: int, text: str = text) -> None:
            memory.look()
            step(text, done, trace.num_requests or done)

        rows.append(_simulate(trace, options, policy, point, config, shown))
    return SimulateResult(
        config={
            "options": dataclasses.asdict(options),
            "trace_description": trace.describe(),
            "token_bytes": configs[0][2].token_bytes,
        },
        machine=describe_machine(),
        rows=rows,
        seconds=time.perf_counter() - begin,
        memory_before_bytes=memory.before,
        memory_peak_bytes=memory.peak,
    )


class _Memory:
    """The largest size of the process that was seen."""

    def __init__(self) -> None:
        self.before = self.peak = resident_bytes()

    def look(self) -> None:
        self.peak = max(self.peak, resident_bytes())


def _simulate(
    trace: Trace,
    options: SimulateOptions,
    policy: str,
    point: Point,
    config: CacheConfig,
    shown: Callable[[int], None],
) -> SimulateRow:
    begin = time.perf_counter()
    fitted = options.is_whole_fitted_trace
    row = SimulateRow(
        trace=options.trace,
        policy=policy,
        status=status(options.trace, policy, point) if fitted else "-",
        batch_size=point.batch_size,
        pages=point.pages,
        page_size=options.page_size,
        chunk_size=point.chunk,
        host_bytes=config.host_bytes,
        paper=paper_figures(options.trace, policy, point) if fitted else {},
    )
    index = None if policy == "recompute" else IndexRun(config, point.batch_size, options.offload_delay)
    tokens = 0
    for block in trace.blocks():
        row.requests += len(block)
        tokens += int(block.history_length.sum())
        if index is not None:
            index.feed(block)
        shown(row.requests)
    row.mean_history = row.missed_tokens = tokens / max(row.requests, 1)
    if index is not None:
        index.finish()
        shown(row.requests)
        _fill(row, index.stats(), config.token_bytes)
    row.seconds = time.perf_counter() - begin
    return row


def _fill(row: SimulateRow, stats: dict[str, int], token_bytes: int) -> None:
    asked = max(stats["history_tokens"], 1)
    row.batches = stats["batches"]
    row.device_hit_ratio = stats["device_hit_tokens"] / asked
    row.total_hit_ratio = stats["hit_tokens"] / asked
    row.warm_hit_ratio = stats["hit_tokens"] / max(stats["committed_before_tokens"], 1)
    row.missed_tokens = (stats["history_tokens"] - stats["hit_tokens"]) / max(row.requests, 1)
    row.lost_tokens = stats["lost_tokens"]
    row.bytes_onloaded = stats["onload_tokens"] * token_bytes
    row.bytes_offloaded = stats["offload_tokens"] * token_bytes
    row.index_us_per_batch = stats["index_ns"] / 1e3 / max(row.batches, 1)
    row.counters = stats
