"""ReplayOptions: what `mtserve replay` can be told, checked before anything heavy is imported."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtserve_plugin.errors import ConfigError

MODES = ("recompute", "device", "paper", "hierarchical")
HOST_POLICIES = {"paper": False, "hierarchical": True}
"""The modes with a host tier, and their `tail_write_back`."""
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelShape:
    """Size of the model that a replay builds; its embedding dimension is `heads * dim`.

    Attributes:
        layers: attention layers.
        heads: attention heads per layer.
        dim: dimension of a head, of queries, keys and values.
        dtype: of the layers, keys and values.
    """

    layers: int
    heads: int
    dim: int
    dtype: str = "float32"


MODELS = {
    "tiny": ModelShape(2, 2, 16),
    "small": ModelShape(4, 4, 32),
    "medium": ModelShape(8, 4, 64),
    "paper-4": ModelShape(4, 4, 128, "bfloat16"),
    "paper": ModelShape(8, 4, 128, "bfloat16"),
}
"""Sizes by name. "paper" is that of the paper's table 1, "paper-4" that of table 5."""


@dataclass(frozen=True)
class ReplayOptions:
    """One run of `mtserve replay`, frozen.

    Args:
        trace: "kuairand-like", "mt-like", "ml-100k", the path of a log, or "package.module:name" of a callable
            that returns a `Trace`.
        requests: timed requests per mode and batch size, the last ones of the trace.
        batch_sizes: requests per batch, one measurement each.
        modes: a subset of `MODES`; "recompute" is always run, because the others are compared with it.
        model: a key of `MODELS`.
        layers, heads, dim, dtype: replace those of `model`.
        candidates: items scored per request.
        pages: device pages; `None`: a fifth of what the trace's users need.
        page_size: tokens per page.
        host_bytes: host tier of "paper" and "hierarchical", each; `None`: room for all users of the trace.
        chunk: tokens per host chunk.
        users: users of a synthetic trace.
        mean_history, max_history: of a synthetic trace, in tokens; `max_history` also caps a log's histories.
            `None` takes the trace's own.
        at_cap: policy at `max_history`, see `HistoryCap`.
        seed: of the synthetic trace, the candidates and the weights.
        threads: threads of torch; `None` leaves torch's choice.
        breakdown: time each step of the paper's Algorithm 1 as well.
        detail: keep what a report shows besides the means: every batch, a few batches' overlap, other sizes.

    Raises:
        ConfigError: an option is out of range; the message names it and the fix.
    """

    trace: str = "kuairand-like"
    requests: int = 304
    batch_sizes: tuple[int, ...] = (1, 4, 8)
    modes: tuple[str, ...] = MODES
    model: str = "small"
    layers: int | None = None
    heads: int | None = None
    dim: int | None = None
    dtype: str | None = None
    candidates: int = 64
    pages: int | None = None
    page_size: int = 32
    host_bytes: int | None = None
    chunk: int = 1024
    users: int = 160
    mean_history: int | None = None
    max_history: int | None = None
    at_cap: str = "stop"
    seed: int = 0
    threads: int | None = None
    breakdown: bool = False
    detail: bool = False

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least {least}")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ConfigError(f"--batch-sizes {_join(self.batch_sizes)} must be one or more numbers of at least 1")
        if len(set(self.batch_sizes)) < len(self.batch_sizes):
            raise ConfigError(f"--batch-sizes {_join(self.batch_sizes)} names one twice; name each once")
        for mode in self.modes:
            if mode not in MODES:
                raise ConfigError(f"--modes {mode!r} is not known; use some of {', '.join(MODES)}")
        if self.model not in MODELS:
            raise ConfigError(f"--model {self.model!r} is not known; use one of {', '.join(MODELS)}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"--dtype {self.dtype!r} is not known; use one of {', '.join(DTYPES)}")
        if self.host_bytes == 0 and any(mode in HOST_POLICIES for mode in self.modes):
            raise ConfigError("--host-bytes 0 leaves no host tier; give more, or --modes recompute,device")
        if self.at_cap != "stop":
            _check_cap(self.max_history, self.at_cap)

    @property
    def ordered_modes(self) -> tuple[str, ...]:
        """The modes to run, recompute among them, in the order of `MODES`."""
        return tuple(mode for mode in MODES if mode in self.modes or mode == MODES[0])

    @property
    def shape(self) -> ModelShape:
        """The model's size with its replacements."""
        changes = {name: getattr(self, name) for name in ("layers", "heads", "dim", "dtype")}
        return dataclasses.replace(
            MODELS[self.model], **{name: value for name, value in changes.items() if value is not None}
        )

    def trace_options(self) -> dict[str, Any]:
        """The keywords that `load_trace` takes for this trace."""
        cap: dict[str, Any] = {"at_cap": self.at_cap}
        if self.max_history is not None:
            cap["max_history"] = self.max_history
        shape = SYNTHETIC_SHAPES.get(self.trace)
        if shape is None:
            # A callable of one's own knows nothing of caps.
            return {} if _is_callable(self.trace) else cap
        longest = self.max_history or shape.max_history
        mean = self.mean_history or round(longest * shape.mean_history / shape.max_history)
        # Twice what is timed, so that users have a past; more, as long as most of a history is older than the trace.
        per_user = min(_REQUESTS_PER_USER, int(mean / (4 * shape.new_tokens)))
        requests = max(self.users * per_user, 2 * self.requests, self.users)
        return {
            "users": self.users,
            "requests": requests,
            "max_history": longest,
            "mean_history": mean,
            "at_cap": self.at_cap,
            "seed": self.seed,
        }


@dataclass(frozen=True)
class _SyntheticShape:
    max_history: int
    mean_history: int
    new_tokens: float


# Of the paper's lengths (table 4) what two cores recompute a few hundred times in a minute.
SYNTHETIC_SHAPES = {
    "kuairand-like": _SyntheticShape(3000, 956, 9.9),
    "mt-like": _SyntheticShape(2000, 1730, 2.5),
}

_REQUESTS_PER_USER = 30

_LEAST = {
    "requests": 1,
    "layers": 1,
    "heads": 1,
    "dim": 1,
    "candidates": 1,
    "pages": 1,
    "page_size": 1,
    "host_bytes": 0,
    "chunk": 1,
    "users": 1,
    "mean_history": 1,
    "max_history": 1,
    "threads": 1,
}

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def parse_bytes(text: str) -> int:
    """ "2GiB", "512 MiB", "1.5g" (binary), "2GB" (decimal) or plain bytes.

    Raises:
        ConfigError: the text is none of these.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{text!r} is no size; write bytes, or a number with a unit, e.g. 512MiB or 2GiB")
    return int(float(match.group(1)) * unit) if "." in match.group(1) else int(match.group(1)) * unit


def parse_numbers(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers separated by commas.

    Raises:
        ConfigError: something else is among them.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(f"{name} {text!r} must be whole numbers separated by commas, e.g. 1,4,8")
    return tuple(int(part) for part in parts)


def parse_names(text: str) -> tuple[str, ...]:
    """Names separated by commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _check_cap(max_history: int | None, at_cap: str) -> None:
    # Here, because it brings numpy, and --help builds the default options.
    from mtserve_plugin.workload.cap import HistoryCap

    try:
        HistoryCap(max_history, at_cap)
    except ConfigError as error:
        raise ConfigError(f"--at-cap: {error}") from None


def _is_callable(trace: str) -> bool:
    return ":" in trace and not Path(trace).exists()


def _join(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers)) or "''"
