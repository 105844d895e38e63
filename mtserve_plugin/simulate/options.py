"""SimulateOptions: what `mtserve simulate` can be told, checked before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from mtserve_plugin.errors import ConfigError
from mtserve_plugin.replay.options import MODELS

POLICIES = ("recompute", "device", "paper", "ours")
"""recompute: nothing is kept. device: pages alone. paper: full chunks are written to the host as they fill. ours: tails
too, before eviction reaches them."""

FITTED_TRACES = ("kuairand-like", "mt-like", "ten-million")


class Point(NamedTuple):
    """Sizes of one simulation: requests per batch, device pages, tokens per host chunk."""

    batch_size: int
    pages: int
    chunk: int


BASE = Point(8, 40_960, 1024)
"""The paper's default configuration (5.1), at which the traces are calibrated."""

BATCH_SIZES = (1, 4, 8)
PAGES = (20_480, 30_720, 40_960, 51_200, 61_440)
CHUNKS = (512, 1024, 2048, 4096)


@dataclass(frozen=True)
class SimulateOptions:
    """One run of `mtserve simulate`, frozen.

    Args:
        trace: one of `FITTED_TRACES`, the path of a log, or "package.module:name" of a callable that returns a `Trace`.
        policies: a subset of `POLICIES`.
        batch_sizes, pages, chunks: every combination is simulated; `None` takes the value of `BASE`. With all three
            `None`, "kuairand-like" and "mt-like" are simulated at the paper's points: `BATCH_SIZES`, `PAGES` and
            `CHUNKS`, one of the three changed at a time.
        page_size: tokens per page.
        host_bytes: host tier of "paper" and "ours".
        model: key of `MODELS`, for the bytes of a token.
        offload_delay: batches between the end of a batch and the moment at which what it writes back has reached the
            host; 0: before the next batch.
        limit: only so many requests, the first ones of the trace.
        users, requests: of a synthetic trace, instead of its own; the rest is scaled along.
        seed: of a synthetic trace.

    Raises:
        ConfigError: an option is out of range; the message names it and the fix.
    """

    trace: str = "kuairand-like"
    policies: tuple[str, ...] = ("device", "paper", "ours")
    batch_sizes: tuple[int, ...] | None = None
    pages: tuple[int, ...] | None = None
    chunks: tuple[int, ...] | None = None
    page_size: int = 32
    host_bytes: int = 768 << 30
    model: str = "paper"
    offload_delay: int = 0
    limit: int | None = None
    users: int | None = None
    requests: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least {least}")
        for option, values in (
            ("--batch-sizes", self.batch_sizes),
            ("--pages", self.pages),
            ("--chunks", self.chunks),
        ):
            if values is not None and (not values or min(values) < 1 or len(set(values)) < len(values)):
                raise ConfigError(f"{option} {','.join(map(str, values))!r} must be different numbers of at least 1")
        if not self.policies:
            raise ConfigError(f"--policy is empty; use some of {', '.join(POLICIES)}")
        for policy in self.policies:
            if policy not in POLICIES:
                raise ConfigError(f"--policy {policy!r} is not known; use some of {', '.join(POLICIES)}")
        if self.model not in MODELS:
            raise ConfigError(f"--model {self.model!r} is not known; use one of {', '.join(MODELS)}")
        if self.host_bytes == 0 and {"paper", "ours"} & set(self.policies):
            raise ConfigError("--host-bytes 0 leaves no host tier; give more, or --policy recompute,device")
        if self.trace not in FITTED_TRACES and (self.users, self.requests, self.seed) != (None, None, None):
            raise ConfigError(
                f"--users, --requests and --seed shape a synthetic trace ({', '.join(FITTED_TRACES)}); "
                f"{self.trace!r} is none, --limit takes its first requests"
            )

    @property
    def points(self) -> list[Point]:
        """The sizes to simulate, in order."""
        given = (self.batch_sizes, self.pages, self.chunks)
        if given == (None, None, None) and self.trace in ("kuairand-like", "mt-like"):
            every = [BASE._replace(batch_size=size) for size in BATCH_SIZES]
            every += [BASE._replace(pages=pages) for pages in PAGES]
            every += [BASE._replace(chunk=chunk) for chunk in CHUNKS]
            return list(dict.fromkeys(every))
        sizes, pages, chunks = (values or (base,) for values, base in zip(given, BASE, strict=True))
        return [Point(size, count, chunk) for size in sizes for count in pages for chunk in chunks]

    @property
    def runs(self) -> list[tuple[str, Point]]:
        """Policy and sizes of every row. Chunks are nothing to a policy without a host tier, nor pages to recompute."""
        found: dict[tuple[str, Point], None] = {}
        for policy in POLICIES:
            for point in self.points if policy in self.policies else ():
                if policy in ("recompute", "device"):
                    point = point._replace(chunk=BASE.chunk)
                if policy == "recompute":
                    point = point._replace(pages=BASE.pages)
                found[policy, point] = None
        return list(found)

    @property
    def trace_options(self) -> dict[str, Any]:
        """The keywords that `load_trace` takes for this trace."""
        given = {"users": self.users, "requests": self.requests, "seed": self.seed}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def is_whole_fitted_trace(self) -> bool:
        """Whether figures of the paper may stand beside the results."""
        return (
            self.trace in ("kuairand-like", "mt-like")
            and (self.users, self.requests, self.limit) == (None, None, None)
            and not self.seed
            and (self.page_size, self.offload_delay) == (32, 0)
        )


_LEAST = {
    "page_size": 1,
    "host_bytes": 0,
    "offload_delay": 0,
    "limit": 1,
    "users": 1,
    "requests": 1,
}
