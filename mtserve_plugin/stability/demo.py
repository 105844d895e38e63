"""Small models for `mtserve audit`: stable ones, and ones with a known factor that breaks reuse."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from mtserve_plugin import dependencies, jagged
from mtserve_plugin.batch import CacheBatch, entered_batch
from mtserve_plugin.cache import NoCache
from mtserve_plugin.errors import ConfigError
from mtserve_plugin.models.layer import HSTULayer
from mtserve_plugin.positions import AppendStableEncoder
from mtserve_plugin.stability.histories import Histories

dependencies.require_torchrec()

from mtserve_plugin.models.hstu import HSTURanker, HSTURankerConfig  # noqa: E402
from mtserve_plugin.models.sasrec import SASRec, SASRecConfig  # noqa: E402

_START = 1_600_000_000


class FromEndEncoder(AppendStableEncoder):
    """Positions count from the end of the history, as in upstream's `HSTUPositionalEncoder`."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor, gaps: torch.Tensor) -> torch.Tensor:
        batch = _batch()
        ends = jagged.spread(batch.history_lengths, batch.offsets.diff())
        return super().forward(x, ends.to(x.device) - positions, gaps)


class QueryTimeEncoder(AppendStableEncoder):
    """A token's time is how long ago the event was when the request came, as upstream has it."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor, gaps: torch.Tensor) -> torch.Tensor:
        batch = _batch()
        own = batch.offsets.diff()
        place = torch.arange(batch.num_rows) - jagged.spread(batch.offsets[:-1], own)
        is_candidate = (place >= jagged.spread(own - batch.num_candidates, own)).to(x.device)
        between = gaps.masked_fill(is_candidate, 0).cumsum(0)
        last = (batch.offsets[1:] - 1).clamp(min=0).to(x.device)
        since_last = gaps[last].masked_fill((batch.num_candidates == 0).to(x.device), 0)
        ages = jagged.spread(between[last] + since_last, own) - between
        return super().forward(x, positions, ages.masked_fill(is_candidate, 0))


class BatchDivisorLayer(HSTULayer):
    """Attention divides by the longest row of the batch."""

    attn_norm_len = 1

    def output(
        self, attention: torch.Tensor, u: torch.Tensor, x: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        batch = _batch()
        longest = int((batch.history_lengths + batch.num_candidates).max())
        return super().output(attention * (self.attn_norm_len / longest), u, x, out)


class DropoutLayer(HSTULayer):
    """Drops a fifth of attention's output in every run."""

    def output(
        self, attention: torch.Tensor, u: torch.Tensor, x: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return super().output(F.dropout(attention, 0.2, training=True), u, x, out)


class FromEndSASRec(SASRec):
    """Positions count from the end of the history, as with histories padded on the left."""

    def place(self, batch: CacheBatch) -> torch.Tensor:
        return jagged.spread(batch.history_lengths, batch.offsets.diff()) - super().place(batch)


class BidirectionalSASRec(SASRec):
    """Every token of a history sees every other, as in BERT4Rec."""

    causal = False


MODELS = ("hstu", "sasrec")
ENCODERS = ("append-stable", "from-end", "now")
PLANTS = ("none", "batch-divisor", "bidirectional", "dropout")


def build_demo(model: str, encoder: str, plant: str, seed: int) -> torch.nn.Module:
    """A small model with random weights of trained size, in eval mode.

    Raises:
        ConfigError: this model has no such variant.
    """
    return _sasrec(encoder, plant, seed) if model == "sasrec" else _hstu(encoder, plant, seed)


def sample_histories(rows: int, length: int, candidates: int, seed: int) -> Histories:
    """Histories of half to all of `length` tokens, for the models of `build_demo`."""
    generator = torch.Generator().manual_seed(seed)
    config = HSTURankerConfig.small()

    def draw(high: int, count: int) -> torch.Tensor:
        return torch.randint(high, (count,), generator=generator)

    lengths = length - draw(max(length // 2, 1), rows)
    total = int(lengths.sum())
    # Bursts of seconds and pauses of weeks.
    gaps = torch.rand(total, generator=generator, dtype=torch.float64).mul(14).exp().to(torch.int64)
    starts = jagged.offsets(lengths)
    since = torch.cat((torch.zeros(1, dtype=torch.int64), gaps.cumsum(0)))
    times = _START + since[1:] - jagged.spread(since[starts[:-1]], lengths)
    return Histories(
        users=torch.arange(rows),
        lengths=lengths,
        tokens={"item": draw(config.num_items, total), "action": draw(config.num_actions, total), "time": times},
        candidates={"candidate": draw(config.num_items, rows * candidates)},
        num_candidates=torch.full((rows,), candidates),
        now=times[starts[1:] - 1] + 1 + draw(10_000, rows),
        time="time",
    )


def _hstu(encoder: str, plant: str, seed: int) -> HSTURanker:
    if plant == "bidirectional":
        raise ConfigError("--plant bidirectional needs --model sasrec: HSTU's operator is causal")
    config = HSTURankerConfig.small()
    model = HSTURanker(config, NoCache(config.cache_config()), seed=seed).eval()
    kinds: dict[str, type[AppendStableEncoder]] = {"from-end": FromEndEncoder, "now": QueryTimeEncoder}
    if encoder in kinds:
        model.encoder.__class__ = kinds[encoder]
    planted: dict[str, type[HSTULayer]] = {"batch-divisor": BatchDivisorLayer, "dropout": DropoutLayer}
    if plant in planted:
        for layer in model.layers:
            layer.__class__ = planted[plant]
            vars(layer)["attn_norm_len"] = config.attn_norm_len
    return model


def _sasrec(encoder: str, plant: str, seed: int) -> SASRec:
    if encoder == "now":
        raise ConfigError("--encoder now needs --model hstu: SASRec does not look at times")
    if plant not in ("none", "bidirectional"):
        raise ConfigError(f"--plant {plant} needs --model hstu; SASRec has bidirectional")
    if encoder == "from-end" and plant == "bidirectional":
        raise ConfigError("--encoder from-end and --plant bidirectional exclude each other for --model sasrec")
    kind: Any = SASRec
    if encoder == "from-end":
        kind = FromEndSASRec
    elif plant == "bidirectional":
        kind = BidirectionalSASRec
    config = SASRecConfig.small()
    return kind(config, NoCache(config.cache_config()), seed=seed).eval()


def _batch() -> CacheBatch:
    batch = entered_batch()
    assert batch is not None, "the models here run inside a batch"
    return batch
