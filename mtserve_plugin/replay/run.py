"""Replays the end of a request trace through a model, with and without the cache, and compares (paper, table 1).

Four modes serve the same requests: "recompute" (`NoCache`), "device" (`HierarchicalKVCache` without a host tier),
"paper" (with one, under the paper's policy: full chunks alone reach it) and "hierarchical" (tails are written back too,
before they are evicted). How it is kept fair:

- Each mode has its own cache; all caches are filled with the same requests before anything is timed.
- A batch is run by all modes before the next one begins, in an order that rotates from batch to batch. The batches in
  front of the timed ones are run in the same way, untimed.
- A latency runs from the features, ready as a `KeyedJaggedTensor`, to the scores: begin and strip are in it. Each mode
  gets features of its own, since torchrec keeps offsets in them.
- Python's garbage collector is off while batches are timed.
- Between two modes the replay waits until no transfer is in flight, outside the timed region, so that no mode pays
  for another one's background copies. How long this took is `background_ms`; a server that is never idle would see
  these copies compete with its computation.

And honest: scores of every batch are compared with recompute's, and two planted errors must show in that comparison
(`checks`).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mtserve_plugin.bench.timing import no_garbage_collection, torch_threads
from mtserve_plugin.cache import HierarchicalKVCache, KVCache, NoCache
from mtserve_plugin.config import CacheConfig
from mtserve_plugin.errors import ConfigError
from mtserve_plugin.machine import describe_machine
from mtserve_plugin.models.hstu import HSTURanker
from mtserve_plugin.replay.capacity import sweep_pages
from mtserve_plugin.replay.checks import TOLERANCE, Controls, Difference, control_threshold, run_controls
from mtserve_plugin.replay.model import build_model, to_kjt
from mtserve_plugin.replay.options import HOST_POLICIES, ReplayOptions
from mtserve_plugin.replay.overlap import BATCHES as OVERLAP_BATCHES
from mtserve_plugin.replay.overlap import Overlap, choose_window, record, staged
from mtserve_plugin.replay.plan import ReplayPlan, grouped, plan_replay
from mtserve_plugin.report import bytes_text
from mtserve_plugin.steps import STEPS, StepClock
from mtserve_plugin.workload import CandidateSampler, Requests, Trace, build_features, load_trace

OnStep = Callable[[str, int, int], None]
"""Told what is being done, how many steps are done, and how many there are."""

_WARMUP_BATCHES = 3
# Small, so that a cache with few pages has written a tail to the host before its pages are needed.
_FILL_BATCH = 4
_COLLECT_EVERY = 256
# The rest is for the model and what a batch needs.
_MEMORY_SHARE = 0.8


@dataclass
class ModeRow:
    """What was measured for one mode and batch size.

    Attributes:
        mode: one of `MODES`.
        batch_size: requests per batch; a batch ends early before a user's second request.
        requests: timed requests.
        batches: timed batches.
        latency_ms: mean, p50 and p99 over batches.
        speedup: recompute's mean latency divided by this one's.
        device_hit_ratio: tokens found in pages / history tokens asked for.
        total_hit_ratio: tokens found in either tier / history tokens asked for.
        warm_hit_ratio: tokens found / tokens committed by the same users before, of this mode's own requests.
        lost_tokens: committed once and then in neither tier, since the cache was empty: while it was filled, too.
        max_rel_error: max|a - b| / max|b| over all scores, b being recompute's.
        background_ms: mean time, after a batch, until its transfers were done; not part of the latency.
        counters: the cache's counters over the timed batches.
        steps_ms: mean per batch of each step in `mtserve_plugin.steps`; empty unless asked for.
    """

    mode: str
    batch_size: int
    requests: int
    batches: int
    latency_ms: dict[str, float]
    speedup: float = 1.0
    device_hit_ratio: float = 0.0
    total_hit_ratio: float = 0.0
    warm_hit_ratio: float = 0.0
    lost_tokens: int = 0
    max_rel_error: float = 0.0
    background_ms: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)
    steps_ms: dict[str, float] = field(default_factory=dict)


@dataclass
class ReplayResult:
    """A run's outcome; `to_json` gives it as plain values.

    Attributes:
        config: options, trace, model, sizes: everything that is needed to repeat the run.
        machine: see `describe_machine`.
        rows: one per batch size and mode.
        controls: what the planted errors changed.
        tolerance: what `max_rel_error` may not exceed.
        control_threshold: what each control must exceed.
        detail: only if asked for, and then in the JSON as well. `batches`: one entry per batch size and mode with
            lists that have one value per batch; `overlaps`: see `Overlap`; `capacity`: see `sweep_pages`.
    """

    config: dict[str, Any]
    machine: dict[str, Any]
    rows: list[ModeRow]
    controls: Controls
    tolerance: float
    control_threshold: float
    detail: dict[str, Any] | None = None

    @property
    def problems(self) -> list[str]:
        """The checks that failed, in words; empty when the measurement can be trusted."""
        found = []
        for row in self.rows:
            if not row.max_rel_error <= self.tolerance:
                found.append(
                    f"{row.mode} at batch size {row.batch_size}: scores differ from recompute by "
                    f"{row.max_rel_error:.1e}, more than {self.tolerance:.0e}"
                )
        for name, value in self.controls._asdict().items():
            if not value > self.control_threshold:
                found.append(
                    f"control '{name.replace('_', ' ')}' changes the scores by {value:.1e} only; it must exceed "
                    f"{self.control_threshold:.0e}, or equal scores prove nothing for this model and trace"
                )
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            "config": self.config,
            "machine": self.machine,
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "controls": {**self.controls._asdict(), "threshold": self.control_threshold},
            "max_rel_error_tolerance": self.tolerance,
            "ok": not self.problems,
            "problems": self.problems,
            **({} if self.detail is None else {"detail": self.detail}),
        }


def run_replay(options: ReplayOptions, on_step: OnStep | None = None) -> ReplayResult:
    """Runs one replay; see the module's text for what is compared and how.

    Raises:
        ConfigError: an option is out of range, or memory cannot be had.
        InputError: the trace is missing, malformed or too short.
    """
    with torch_threads(options.threads):
        return _Replay(options, on_step or (lambda *_: None)).run()


def load_plan(options: ReplayOptions) -> tuple[Trace, ReplayPlan]:
    """The trace that a replay with these options takes, and what it takes of it.

    Raises:
        ConfigError: an option of the trace is out of range.
        InputError: the trace is missing, malformed or too short.
    """
    trace = load_trace(options.trace, **options.trace_options())
    return trace, plan_replay(trace, options.requests, _WARMUP_BATCHES * max(options.batch_sizes))


class _Replay:
    def __init__(self, options: ReplayOptions, on_step: OnStep) -> None:
        self._options = options
        self._on_step = on_step
        on_step("reading the trace", 0, 1)
        self._trace, self._plan = load_plan(options)
        self._sampler = CandidateSampler(self._trace, options.candidates, seed=options.seed)
        on_step("building the model", 0, 1)
        longest = int(self._plan.longest.max())
        self._model = build_model(self._trace, options.shape, longest, options.seed)
        self._configs = _cache_configs(options, self._plan, self._model)
        self._batches = {size: grouped(self._plan.timed, size) for size in options.batch_sizes}
        self._warmups = {size: grouped(self._plan.warmup, size) for size in options.batch_sizes}
        self._fills = grouped(self._plan.prefill, _FILL_BATCH)
        self._per_batch: list[dict[str, Any]] = []
        self._done = 0
        modes = len(self._configs)
        self._steps = sum(
            (modes - 1) * len(self._fills) + modes * (len(self._warmups[size]) + len(self._batches[size]))
            for size in options.batch_sizes
        )

    def run(self) -> ReplayResult:
        rows = [row for size in self._options.batch_sizes for row in self._measure(size)]
        detail = self._detail() if self._options.detail else None
        controls = run_controls(self._model, self._plan, self._sampler)
        dtype = self._model.config.dtype
        return ReplayResult(
            self._describe(), describe_machine(), rows, controls, TOLERANCE[dtype], control_threshold(dtype), detail
        )

    def _measure(self, batch_size: int) -> list[ModeRow]:
        modes = list(self._configs)
        caches = {mode: _build_cache(mode, config) for mode, config in self._configs.items()}
        runs = {mode: _Run() for mode in modes}
        try:
            for mode, cache in caches.items():
                if not isinstance(cache, NoCache):
                    for requests in self._fills:
                        self._serve(cache, requests, f"filling the {mode} cache")
            for requests in self._warmups[batch_size]:
                for cache in caches.values():
                    self._serve(cache, requests, f"batch size {batch_size}: warming up")
            before = {mode: cache.stats() for mode, cache in caches.items()}
            with no_garbage_collection() as collect:
                for number, requests in enumerate(self._batches[batch_size]):
                    turn = number % len(modes)
                    for mode in modes[turn:] + modes[:turn]:
                        text = f"batch size {batch_size}: {mode}"
                        with runs[mode].clock if self._options.breakdown else nullcontext():
                            runs[mode].add(*self._serve(caches[mode], requests, text))
                        if self._options.detail:
                            runs[mode].count(caches[mode].stats())
                    reference = runs[modes[0]].scores
                    for mode in modes:
                        runs[mode].difference.add(runs[mode].scores, reference)
                    if number % _COLLECT_EVERY == _COLLECT_EVERY - 1:
                        collect()
            rows = [self._row(mode, batch_size, runs[mode], before[mode], caches[mode].stats()) for mode in modes]
            if self._options.detail:
                self._per_batch += [runs[mode].to_json(mode, batch_size, before[mode]) for mode in modes]
        finally:
            self._model.cache = NoCache(self._model.cache.config)
            for cache in caches.values():
                cache.close()
        for row in rows:
            row.speedup = rows[0].latency_ms["mean"] / row.latency_ms["mean"]
        return rows

    def _serve(self, cache: KVCache, requests: Any, text: str) -> tuple[torch.Tensor, float, float]:
        """Scores of one batch, seconds it took, and seconds until its transfers were done."""
        self._on_step(text, self._done, self._steps)
        features = to_kjt(build_features(self._trace, requests, self._sampler), self._model.config.num_items)
        self._model.cache = cache
        begin = time.perf_counter()
        scores = self._model(features)
        end = time.perf_counter()
        cache.drain()
        settled = time.perf_counter()
        self._done += 1
        return scores, end - begin, settled - end

    def _detail(self) -> dict[str, Any]:
        size = max(self._options.batch_sizes)
        cached = {mode: config for mode, config in self._configs.items() if mode != "recompute"}
        self._on_step("simulating other sizes", 0, 1)
        before = [*self._fills, *self._warmups[size]]
        working_set = self._plan.pages(self._options.page_size)
        return {
            "batches": self._per_batch,
            "capacity": {
                "batch_size": size,
                "working_set_pages": working_set,
                "rows": sweep_pages(cached, working_set, before, self._batches[size]),
            },
            "overlaps": [overlap.to_json() for overlap in self._overlaps(size)],
        }

    def _overlaps(self, size: int) -> Iterator[Overlap]:
        """A few batches under each strategy, with the cache of the last mode that has a host tier."""
        mode = next((mode for mode in reversed(self._configs) if mode in HOST_POLICIES), None)
        if mode is None:
            return
        (tokens,) = (
            run["host_hit_tokens"] for run in self._per_batch if (run["mode"], run["batch_size"]) == (mode, size)
        )
        first = choose_window(tokens)
        batches = self._batches[size]
        before = [*self._fills, *self._warmups[size], *batches[:first]]
        region = size * -(-int(self._plan.longest.max()) // self._options.page_size)
        for config in (self._configs[mode], staged(self._configs[mode], region)):
            self._on_step(f"recording {config.onload_strategy} onloads", 0, 1)
            yield record(
                config,
                map(self._batch, before),
                [self._batch(requests) for requests in batches[first : first + OVERLAP_BATCHES]],
                mode=mode,
                batch_size=size,
                first_batch=first,
            )

    def _batch(self, requests: Requests) -> Callable[[KVCache], None]:
        features = to_kjt(build_features(self._trace, requests, self._sampler), self._model.config.num_items)

        def run(cache: KVCache) -> None:
            self._model.cache = cache
            try:
                self._model(features)
            finally:
                self._model.cache = NoCache(cache.config)

        return run

    def _row(self, mode: str, batch_size: int, run: _Run, before: dict[str, Any], after: dict[str, Any]) -> ModeRow:
        counters = {name: after[name] - before[name] for name in _COUNTERS if name in after}
        if "layer_wait_ns" in after:
            counters["layer_wait_ns"] = sum(after["layer_wait_ns"]) - sum(before["layer_wait_ns"])
        asked = max(counters["history_tokens"], 1)
        committed = max(int(self._plan.previous.sum()), 1)
        latency = np.array(run.seconds) * 1e3
        return ModeRow(
            mode=mode,
            batch_size=batch_size,
            requests=len(self._plan.timed.requests),
            batches=len(run.seconds),
            latency_ms={
                "mean": float(latency.mean()),
                "p50": float(np.percentile(latency, 50)),
                "p99": float(np.percentile(latency, 99)),
            },
            device_hit_ratio=counters.get("device_hit_tokens", 0) / asked,
            total_hit_ratio=counters["hit_tokens"] / asked,
            warm_hit_ratio=counters["hit_tokens"] / committed,
            lost_tokens=after.get("lost_tokens", 0),
            max_rel_error=run.difference.value,
            background_ms=statistics.fmean(run.background) * 1e3,
            counters=counters,
            steps_ms={
                name: 1e3 * run.clock.seconds[name] / len(run.seconds) for name in STEPS if name in run.clock.seconds
            },
        )

    def _describe(self) -> dict[str, Any]:
        options, plan, trace = self._options, self._plan, self._trace
        sizes = next(iter(self._configs.values()))
        return {
            "options": dataclasses.asdict(options),
            "trace": options.trace,
            "seed": options.seed,
            "threads": torch.get_num_threads(),
            "trace_description": trace.describe(),
            "at_cap_policy": trace.describe().get("cap_policy", "as the trace has it"),
            "requests": len(plan.timed.requests),
            "prefill_requests": len(plan.prefill.requests),
            "warmup_requests": len(plan.warmup.requests),
            "users": len(plan.users),
            "mean_history": plan.mean_history,
            "mean_delta": plan.mean_delta,
            "longest_history": int(plan.longest.max()),
            "candidates": options.candidates,
            "model": options.model,
            "model_config": dataclasses.asdict(self._model.config),
            "page_size": sizes.page_size,
            "pages": sizes.num_pages,
            "working_set_pages": plan.pages(sizes.page_size),
            "host_bytes": max(config.host_bytes for config in self._configs.values()),
            "caches": {mode: dataclasses.asdict(config) for mode, config in self._configs.items()},
        }


_COUNTERS = (
    "requests",
    "history_tokens",
    "hit_tokens",
    "device_hit_tokens",
    "host_hit_tokens",
    "stored_tokens",
    "rows_without_room",
    "edited_rows",
    "truncated_rows",
    "lost_tokens",
    "onload_tokens",
    "onload_failures",
    "offload_tokens",
    "offload_failures",
    "tail_write_backs",
)


class _Run:
    """One mode's timed batches."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.background: list[float] = []
        self.difference = Difference()
        self.clock = StepClock()
        self.scores = torch.empty(0)
        self.stats: list[dict[str, Any]] = []

    def add(self, scores: torch.Tensor, seconds: float, background: float) -> None:
        self.scores = scores
        self.seconds.append(seconds)
        self.background.append(background)

    def count(self, stats: dict[str, Any]) -> None:
        """Takes the cache's counters after a batch."""
        self.stats.append(stats)

    def to_json(self, mode: str, batch_size: int, before: dict[str, Any]) -> dict[str, Any]:
        """What each batch took and found; `before` are the counters ahead of the first."""
        return {
            "mode": mode,
            "batch_size": batch_size,
            "latency_ms": [seconds * 1e3 for seconds in self.seconds],
            **{
                name: np.diff([stats.get(name, 0) for stats in (before, *self.stats)]).tolist()
                for name in ("requests", "history_tokens", "device_hit_tokens", "host_hit_tokens")
            },
        }


def _cache_configs(options: ReplayOptions, plan: ReplayPlan, model: HSTURanker) -> dict[str, CacheConfig]:
    pages = options.pages or max(1, plan.pages(options.page_size) // 5)
    device = model.config.cache_config(page_size=options.page_size, num_pages=pages, chunk_size=options.chunk)
    host_bytes = options.host_bytes
    if host_bytes is None:
        host_bytes = plan.chunks(options.chunk) * device.chunk_bytes
    configs = {}
    for mode in options.ordered_modes:
        if mode in HOST_POLICIES:
            quota = max(device.offload_quota_tokens, options.chunk)
            configs[mode] = device.replace(
                host_bytes=host_bytes, offload_quota_tokens=quota, tail_write_back=HOST_POLICIES[mode]
            )
        else:
            configs[mode] = device
    _check_memory(configs)
    return configs


def _check_memory(configs: dict[str, CacheConfig]) -> None:
    """The host tier is made resident at once, so what does not fit would end the process, not raise."""
    tables = sum(math.prod(c.table_shape) * c.element_size for mode, c in configs.items() if mode != "recompute")
    host = sum(config.host_bytes for config in configs.values())
    memory = describe_machine()["memory_bytes"]
    if memory and tables + host > _MEMORY_SHARE * memory:
        raise ConfigError(
            f"the page tables ({bytes_text(tables)}) and the host tiers ({bytes_text(host)}) do not fit into this "
            f"machine's {bytes_text(memory)}; use a smaller --host-bytes, --pages, --model or --max-history"
        )


def _build_cache(mode: str, config: CacheConfig) -> KVCache:
    return NoCache(config) if mode == "recompute" else HierarchicalKVCache(config)
