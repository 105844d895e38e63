"""audit: does a prefix of a history keep its keys and values when the history grows? Measured, and explained."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn

from mtserve_plugin import jagged
from mtserve_plugin.errors import InputError
from mtserve_plugin.stability.causes import Cause, find_causes
from mtserve_plugin.stability.histories import Histories

if TYPE_CHECKING:
    from rich.console import Console

# What is measured for stable models is below 1e-6 in float32; unstable ones begin at 1e-4.
_TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-10}
_HALF_TOLERANCE = 2e-2
_SOON, _LATE = 60, 30 * 86_400
_TOP = 10


@dataclass(frozen=True)
class Encoding:
    """What a model computed for a batch.

    Attributes:
        layers: keys and values of each layer, `[sum of lengths, heads, dim]`, row after row: of the tokens that a
            cache would keep, i.e. context rows (if any) and history, without candidates.
        lengths: `[B]` int64 on the host.
        scores: `[sum of candidates]`.
        identity: `[B]` int64: rows with different identities are never reused for each other, because something else
            than the history differs. `None` if there is no such thing.
    """

    layers: Sequence[tuple[torch.Tensor, torch.Tensor]]
    lengths: torch.Tensor
    scores: torch.Tensor
    identity: torch.Tensor | None = None


@dataclass(frozen=True)
class Reuse:
    """Scores of a batch whose prefixes came from an earlier one.

    Attributes:
        scores: `[sum of candidates]`, or `None` when the model refuses to be cached.
        tokens: history tokens that were reused.
        refused: why there are no scores.
    """

    scores: torch.Tensor | None
    tokens: int = 0
    refused: str = ""


@runtime_checkable
class KVAdapter(Protocol):
    """How the audit sees a model. Ready ones: `stability_adapters.adapter_for`.

    An adapter may have a second method, `reuse(before: Histories, after: Histories) -> Reuse`: the scores of `after`
    when the keys and values of `before` are used for its first tokens. Without it scores are not compared.
    """

    def encode(self, histories: Histories) -> Encoding:
        """Runs the model on whole histories, nothing cached."""
        ...


@dataclass(frozen=True)
class Drift:
    """Largest change of keys and of values relative to the largest of them: max|a-b| / max|b|, per layer."""

    k: tuple[float, ...]
    v: tuple[float, ...]

    @property
    def worst(self) -> tuple[float, ...]:
        """Per layer, of both."""
        return tuple(_larger(k, v) for k, v in zip(self.k, self.v, strict=True))

    def first_above(self, tolerance: float) -> int | None:
        """The first layer that drifts, `None` if none does."""
        return next((layer for layer, drift in enumerate(self.worst) if drift > tolerance), None)


@dataclass(frozen=True)
class ScoreDrift:
    """Scores with reused keys and values against a full recompute.

    Attributes:
        max_rel_difference: max|a-b| / max|b| over all candidates.
        kendall_tau: mean over rows of two or more candidates, 1 for the same order.
        top10_overlap: mean share of the best ten (or half of a row's candidates, if fewer than 20) that are the same.
        reused_tokens: history tokens whose keys and values were not computed again.
    """

    max_rel_difference: float
    kendall_tau: float
    top10_overlap: float
    reused_tokens: int


@dataclass(frozen=True)
class AuditReport:
    """What `audit` found.

    Attributes:
        probes: drift of the prefixes' keys and values for each change that was tried, see `PROBES`.
        scores: `None` when they were not compared; `scores_refused` says why.
        causes: likely ones, most certain first; empty for a stable model.
        tolerance: drifts up to this are rounding.
        rows: histories that were compared.
        prefix_tokens: tokens of their prefixes, context rows included.
        delta_tokens: tokens that the histories grew by.
    """

    probes: Mapping[str, Drift]
    scores: ScoreDrift | None
    scores_refused: str
    causes: tuple[Cause, ...]
    tolerance: float
    rows: int
    prefix_tokens: int
    delta_tokens: int

    @property
    def layers(self) -> Drift:
        """Drift between two visits, the histories having grown in between."""
        return self.probes["visit"]

    @property
    def stable(self) -> bool:
        """True when no change that was tried moves a prefix's keys and values, and reuse gives the same scores."""
        moved = any(drift.first_above(self.tolerance) is not None for drift in self.probes.values())
        return not moved and (self.scores is None or self.scores.max_rel_difference <= self.tolerance)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        return dataclasses.asdict(dataclasses.replace(self, probes=dict(self.probes))) | {"stable": self.stable}

    def print(self, console: Console | None = None) -> None:
        """Tables and causes, to the terminal unless told otherwise."""
        from mtserve_plugin.stability.print import print_audit

        print_audit(self, console)


# Each change that is tried, with what has changed when it shows.
PROBES = {
    "repeat": "the same batch again",
    "visit": "the history grew, and time passed",
    "append": "the history grew, the request stayed the same",
    "later": "the same history, 30 days instead of a minute after its last event",
    "edit": "later events replaced, as many of them",
    "candidates": "other candidates, as many of them",
    "company": "alone, instead of beside longer histories",
}


def audit(
    model: nn.Module | KVAdapter,
    sample: Any,
    *,
    delta: int = 8,
    tolerance: float | None = None,
    show: bool = True,
) -> AuditReport:
    """Measures whether a model's prefixes keep their keys and values, and what reuse does to the scores.

    Encodes the first tokens of each history (P), then all of them (P + delta), and compares keys and values of the
    first P tokens layer by layer. Then changes one thing at a time, which tells the causes apart.

    Args:
        model: an `HSTURanker` or `SASRec`; a `DlrmHSTU` of `generative_recommenders`, attached or not; or any object
            with `KVAdapter`'s method. Its weights are best of trained size: at initial ones position and time tables
            are so small that their drift hides (3e-6 instead of 1e-2).
        sample: what the model's forward takes, as one argument or a tuple: a few rows of distinct users, with
            histories of the lengths that are served; for an adapter of your own, `Histories`.
        delta: tokens that each history grows by; a shorter history grows by half of its own.
        tolerance: `None` for 1e-5 in float32, 2e-2 in bfloat16 and float16.
        show: print the report.

    Returns:
        The report; `report.stable` is the verdict.

    Raises:
        InputError: the model is not known, the sample does not fit it, or no history has two tokens.

    Example:
        >>> report = audit(model, features, show=False)  # doctest: +SKIP
        >>> report.stable, [cause.name for cause in report.causes]  # doctest: +SKIP
        (True, [])
    """
    if delta < 1:
        raise InputError(f"delta={delta} must be at least 1")
    if isinstance(model, KVAdapter):
        adapter: KVAdapter = model
        histories = sample
    else:
        from mtserve_plugin.stability.adapters import adapter_for

        adapter, histories = adapter_for(model, sample)
    if not isinstance(histories, Histories):
        raise InputError(f"sample is {type(histories).__name__}; an adapter of your own takes Histories")
    if histories.users.unique().numel() != histories.users.numel():
        raise InputError("sample: a user occurs twice; give each row a user of its own")

    prefix = histories.lengths - torch.minimum(torch.tensor(delta), histories.lengths // 2)
    with torch.no_grad():
        whole = adapter.encode(histories)
        appended = adapter.encode(histories.cut(prefix))
        shared = _common(appended, whole)
        if int(shared.sum()) == 0 or bool((prefix == histories.lengths).all()):
            raise InputError("sample: no history has a prefix that could be reused; give longer histories")
        if tolerance is None:
            tolerance = _TOLERANCES.get(whole.layers[0][0].dtype, _HALF_TOLERANCE)
        probes = {"append": compare(appended, whole)}
        probes |= _probe(adapter, histories, prefix, whole, shared)
        reuse = _reuse(adapter, histories, prefix)
    scores = None
    if reuse.scores is not None:
        scores = compare_scores(reuse.scores, whole.scores, histories.num_candidates, reuse.tokens)
    report = AuditReport(
        probes={name: probes[name] for name in PROBES if name in probes},
        scores=scores,
        scores_refused=reuse.refused,
        causes=(),
        tolerance=tolerance,
        rows=histories.users.numel(),
        prefix_tokens=int(shared.sum()),
        delta_tokens=int((histories.lengths - prefix).sum()),
    )
    report = dataclasses.replace(report, causes=find_causes(report))
    if show:
        report.print()
    return report


def compare(before: Encoding, after: Encoding, limit: torch.Tensor | None = None) -> Drift:
    """Drift of the keys and values that two encodings of the same rows share.

    Args:
        limit: `[B]`, the first so many tokens per row count; `None` for all that both hold.

    Raises:
        InputError: the encodings do not have the same layers.
    """
    if len(before.layers) != len(after.layers):
        raise InputError(f"the model has {len(before.layers)} layers in one run and {len(after.layers)} in another")
    common = _common(before, after)
    if limit is not None:
        common = torch.minimum(common, limit)
    old, new = (_first_tokens(encoding.lengths, common) for encoding in (before, after))
    k, v = [], []
    for (old_k, old_v), (new_k, new_v) in zip(before.layers, after.layers, strict=True):
        k.append(relative(old_k[old.to(old_k.device)], new_k[new.to(new_k.device)]))
        v.append(relative(old_v[old.to(old_v.device)], new_v[new.to(new_v.device)]))
    return Drift(tuple(k), tuple(v))


def compare_scores(reused: torch.Tensor, full: torch.Tensor, counts: torch.Tensor, tokens: int) -> ScoreDrift:
    """Args: reused, full: `[sum of counts]`; counts: `[B]` candidates per row; tokens: reused ones."""
    if reused.shape != full.shape:
        raise InputError(f"reuse gave {tuple(reused.shape)} scores, the recompute {tuple(full.shape)}")
    taus, overlaps = [], []
    for a, b in zip(reused.split(counts.tolist()), full.split(counts.tolist()), strict=True):
        if a.numel() > 1:
            taus.append(kendall_tau(a, b))
            best = min(_TOP, a.numel() // 2)
            shared = set(a.topk(best).indices.tolist()) & set(b.topk(best).indices.tolist())
            overlaps.append(len(shared) / best)
    return ScoreDrift(relative(reused, full), _mean(taus), _mean(overlaps), tokens)


def kendall_tau(a: torch.Tensor, b: torch.Tensor) -> float:
    """Kendall's tau-b of two lists `[n]`, n of at least 2; 1 where both are constant."""
    signs_a, signs_b = ((x[:, None] - x[None, :]).sign().double() for x in (a, b))
    norm = math.sqrt(float(signs_a.abs().sum()) * float(signs_b.abs().sum()))
    if norm == 0:
        return 1.0 if torch.equal(signs_a, signs_b) else 0.0
    return float((signs_a * signs_b).sum()) / norm


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """max|got - want| / max|want|; 0 for nothing, infinite where one holds NaN."""
    if got.numel() == 0 or torch.equal(got, want):
        return 0.0
    got, want = got.detach().double(), want.detach().double()
    drift = float((got - want).abs().max() / want.abs().max().clamp(min=1e-300))
    return math.inf if math.isnan(drift) else drift


def _probe(
    adapter: KVAdapter, histories: Histories, prefix: torch.Tensor, whole: Encoding, shared: torch.Tensor
) -> Iterator[tuple[str, Drift]]:
    def against_whole(changed: Histories) -> Drift:
        return compare(adapter.encode(changed), whole, shared)

    yield "repeat", against_whole(histories)
    yield "visit", against_whole(histories.visit(prefix))
    if histories.time:
        # Of the prefix, whose last events are then recent: in old age time buckets are all the same.
        soon, late = (adapter.encode(histories.cut(prefix).asked(seconds)) for seconds in (_SOON, _LATE))
        yield "later", compare(late, soon)
    yield "edit", against_whole(histories.edited(prefix))
    yield "candidates", against_whole(histories.other_candidates())
    if histories.users.numel() > 1:
        # Halved, so that the others are longer whichever lengths the sample has.
        alone = torch.arange(histories.users.numel()) == int(histories.lengths.argmin())
        halved = histories.cut(torch.where(alone, (histories.lengths + 1) // 2, histories.lengths))
        yield "company", compare(adapter.encode(halved.select(alone)), _rows(adapter.encode(halved), alone))


def _reuse(adapter: KVAdapter, histories: Histories, prefix: torch.Tensor) -> Reuse:
    reuse = getattr(adapter, "reuse", None)
    if reuse is None:
        return Reuse(None, refused="the adapter has no method reuse")
    return reuse(histories.visit(prefix), histories)


def _common(before: Encoding, after: Encoding) -> torch.Tensor:
    """Tokens per row that both encodings hold, `[B]`; 0 where something else than the history differs."""
    common = torch.minimum(before.lengths, after.lengths)
    if before.identity is None or after.identity is None:
        return common
    return torch.where(before.identity == after.identity, common, 0)


def _rows(encoding: Encoding, rows: torch.Tensor) -> Encoding:
    chosen = jagged.spread(rows, encoding.lengths)
    layers = [(k[chosen.to(k.device)], v[chosen.to(v.device)]) for k, v in encoding.layers]
    identity = None if encoding.identity is None else encoding.identity[rows]
    # Scores stay those of the whole batch: nobody compares them.
    return Encoding(layers, encoding.lengths[rows], encoding.scores, identity)


def _first_tokens(lengths: torch.Tensor, common: torch.Tensor) -> torch.Tensor:
    """Where the first `common[b]` tokens of each row are among all."""
    shift = jagged.offsets(lengths)[:-1] - jagged.offsets(common)[:-1]
    return torch.arange(int(common.sum())) + jagged.spread(shift, common)


def _larger(a: float, b: float) -> float:
    return b if b > a or math.isnan(b) else a


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 1.0
