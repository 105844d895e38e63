"""Does an experiment fit into this machine, and how long will it take at least? Answered before anything is built."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from mtserve_plugin.config import CacheConfig
from mtserve_plugin.errors import ConfigError
from mtserve_plugin.machine import describe_machine
from mtserve_plugin.replay.options import HOST_POLICIES, ModelShape, ReplayOptions
from mtserve_plugin.replay.plan import Excerpt, ReplayPlan
from mtserve_plugin.report import bytes_text

# Like run_replay's own refusal: the rest is for the model and what a batch needs.
_MEMORY_SHARE = 0.8


class Estimate(NamedTuple):
    """What a run needs.

    Attributes:
        table_bytes: page tables of its modes, which exist side by side.
        host_bytes: host tiers of its modes.
        seconds: time of the products of matrices in recomputing and in filling the caches, at the rate that this
            machine reaches in one such product: the least it will take.
    """

    table_bytes: int
    host_bytes: int
    seconds: float

    @property
    def memory_bytes(self) -> int:
        return self.table_bytes + self.host_bytes


def estimate(options: ReplayOptions, plan: ReplayPlan, rate: float) -> Estimate:
    """Memory and least time of a run; `options.pages` is set, `rate` is that of `product_rate`."""
    shape = options.shape
    sizes = CacheConfig(
        num_layers=shape.layers,
        num_heads=shape.heads,
        qk_dim=shape.dim,
        v_dim=shape.dim,
        attn_norm_len=1,
        dtype=shape.dtype,
        page_size=options.page_size,
        num_pages=options.pages or 1,
        chunk_size=options.chunk,
    )
    host = plan.chunks(options.chunk) * sizes.chunk_bytes if options.host_bytes is None else options.host_bytes
    cached = len(options.ordered_modes) - 1
    recomputed = sum(_operations(part, shape, options.candidates) for part in (plan.timed, plan.warmup))
    filled = cached * _operations(plan.prefill, shape, options.candidates)
    return Estimate(
        cached * sizes.table_bytes,
        host * len(HOST_POLICIES.keys() & set(options.modes)),
        len(options.batch_sizes) * (recomputed + filled) / rate,
    )


def check_fits(estimates: Sequence[Estimate]) -> None:
    """Refuses before hours are spent on the runs that do fit.

    Raises:
        ConfigError: the largest run needs more memory than this machine has.
    """
    largest = max(estimates, key=lambda each: each.memory_bytes)
    memory = describe_machine()["memory_bytes"]
    if memory and largest.memory_bytes > _MEMORY_SHARE * memory:
        raise ConfigError(
            f"this experiment needs page tables of {bytes_text(largest.table_bytes)} and host tiers of "
            f"{bytes_text(largest.host_bytes)}, side by side for its modes; this machine has {bytes_text(memory)}, of "
            f"which {_MEMORY_SHARE:.0%} may be taken. It would also take at least "
            f"{duration_text(sum(each.seconds for each in estimates))} here. Use --scale small, or fewer --users and "
            "--requests, one of the --modes, a smaller --host-bytes or --model"
        )


def product_rate(dtype: str, width: int) -> float:
    """Operations per second of one product of matrices, as a layer's projection has them, on this machine."""
    x = torch.ones((1024, width), dtype=getattr(torch, dtype))
    weight = torch.ones((width, 4 * width), dtype=x.dtype)
    x @ weight
    begin, count = time.perf_counter(), 0
    while (taken := time.perf_counter() - begin) < 0.2 or not count:
        x @ weight
        count += 1
    return count * 2.0 * x.numel() * weight.shape[1] / taken


def duration_text(seconds: float) -> str:
    """In seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _operations(part: Excerpt, shape: ModelShape, candidates: int) -> float:
    """Of encoding every request of `part` anew: four projections in, one out, and causal attention."""
    tokens = part.requests.history_length.astype(np.float64) + candidates
    width = shape.heads * shape.dim
    return shape.layers * float((tokens * 10 * width**2 + 2 * width * tokens**2).sum())
