"""PlanOptions: what `mtserve plan` can be told, checked before anything heavy is imported."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from mtserve_plugin.errors import ConfigError
from mtserve_plugin.plan.memory import ELEMENT_BYTES
from mtserve_plugin.replay.options import MODELS, ModelShape


@dataclass(frozen=True)
class PlanOptions:
    """One run of `mtserve plan`, frozen.

    Args:
        trace: a log or trace, as for `mtserve simulate`; its users replace the numbers below. `None`: the numbers.
        users: users who come back.
        tokens: mean history of a request, in tokens.
        max_history: longest history; `None`: three times the mean, as in KuaiRand-1K.
        new_tokens: events between two requests of a user, mean.
        interval_s: time between two requests of a user, mean, in seconds.
        model: a key of `MODELS`; layers, heads, dim, dtype replace those of it.
        device_bytes: for pages, onload region, workbench and what forwards allocate.
        host_bytes: for the host tier.
        batch_size: requests per batch.
        page_size: tokens per page.
        chunk: tokens per host chunk.
        staged: plan an onload region.
        seed: of the simulated requests.

    Raises:
        ConfigError: an option is out of range; the message names it and the fix.
    """

    trace: str | None = None
    users: int = 1_000
    tokens: int = 6_000
    max_history: int | None = None
    new_tokens: float = 10.0
    interval_s: float = 3_600.0
    model: str = "paper"
    layers: int | None = None
    heads: int | None = None
    dim: int | None = None
    dtype: str | None = None
    device_bytes: int = 24 << 30
    host_bytes: int = 256 << 30
    batch_size: int = 8
    page_size: int = 32
    chunk: int = 1024
    staged: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least {least}")
        if self.model not in MODELS:
            raise ConfigError(f"--model {self.model!r} is not known; use one of {', '.join(MODELS)}")
        if self.shape.dtype not in ELEMENT_BYTES:
            raise ConfigError(f"--dtype {self.dtype!r} is not known; use one of {', '.join(ELEMENT_BYTES)}")
        if self.max_history is not None and self.max_history < self.tokens:
            raise ConfigError(f"--max-history {self.max_history} must be at least --tokens {self.tokens}, the mean")
        if self.chunk % self.page_size:
            raise ConfigError(f"--chunk {self.chunk} must be a multiple of --page-size {self.page_size}")

    @property
    def shape(self) -> ModelShape:
        """The model's size with its replacements."""
        changes = {name: getattr(self, name) for name in ("layers", "heads", "dim", "dtype")}
        return dataclasses.replace(
            MODELS[self.model], **{name: value for name, value in changes.items() if value is not None}
        )

    @property
    def longest(self) -> int:
        """The longest history in tokens, unless a trace tells."""
        return self.max_history or 3 * self.tokens


_LEAST = {
    "users": 1,
    "tokens": 1,
    "max_history": 1,
    "new_tokens": 0.1,
    "interval_s": 1,
    "layers": 1,
    "heads": 1,
    "dim": 1,
    "device_bytes": 1,
    "host_bytes": 0,
    "batch_size": 1,
    "page_size": 1,
    "chunk": 1,
}

_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400}


def parse_duration(text: str) -> float:
    """ "90s", "15min", "1.5h", "2d" or plain seconds, as seconds.

    Raises:
        ConfigError: the text is none of these.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    unit = _SECONDS.get(match.group(2) or "s") if match else None
    if match is None or unit is None:
        raise ConfigError(f"{text!r} is no duration; write seconds, or a number with s, min, h or d, e.g. 90min")
    return float(match.group(1)) * unit
