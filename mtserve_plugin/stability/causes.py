"""From what moves a prefix's keys and values to why: the causes that an audit can name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mtserve_plugin.stability.measure import AuditReport


@dataclass(frozen=True)
class Cause:
    """Why a prefix changes: a short name, and a sentence with the remedy."""

    name: str
    text: str


_CAUSES = {
    cause.name: cause
    for cause in (
        Cause(
            "randomness",
            "Two identical runs differ: dropout is active or the model is in training mode, or an operator is not "
            "deterministic. Call model.eval() and audit again; nothing else that was measured counts.",
        ),
        Cause(
            "query time",
            "The same history has other keys and values when it is asked for later: times are counted from the query. "
            "Count each event's time as the gap to the event before it (positions.AppendStableEncoder).",
        ),
        Cause(
            "positions",
            "The first layer's keys and values change with every new event, whatever it is: positions count from the "
            "end of the history, or rows are padded on the left. Count from the start.",
        ),
        Cause(
            "looks ahead",
            "The first layer's keys and values of old tokens depend on later events: what is computed in front of the "
            "layers (an encoder, a convolution, a pooled feature) reads beyond a token's own past.",
        ),
        Cause(
            "bidirectional",
            "Old tokens see later events: attention is bidirectional, or rows in front of the history see all of it "
            "(contextual_seq_len of a layer), or the last rows do (min_full_attn_seq_len). Make attention causal.",
        ),
        Cause(
            "candidates",
            "Old tokens see the candidates, whose keys and values belong to one request. Let candidates see the "
            "history and themselves, and be seen by nobody (target_aware=True).",
        ),
        Cause(
            "padding",
            "The first layer's keys and values depend on who else is in the batch: positions count within padding, or "
            "a norm runs over the batch.",
        ),
        Cause(
            "batch divisor",
            "Keys and values behind the first attention depend on who else is in the batch: attention divides by the "
            "longest row. Pin the divisor to one constant (attn_norm_len; attach does).",
        ),
        Cause(
            "own divisor",
            "Keys and values behind the first attention change with the number of events, not with what they are: "
            "attention divides by the length of the history. Divide by a constant.",
        ),
        Cause(
            "unknown",
            "Keys and values of the prefix change, but by none of the known factors alone. Compare the probes above: "
            "each names what was different.",
        ),
        Cause(
            "scores",
            "Keys and values of the prefix stay, yet reuse gives other scores: the scores depend on old tokens by "
            "another way than attention (a pooled history, the last token's output).",
        ),
    )
}


def find_causes(report: AuditReport) -> tuple[Cause, ...]:
    """What the drifts of the probes have in common with known factors."""
    first = {name: drift.first_above(report.tolerance) for name, drift in report.probes.items()}
    if first["repeat"] is not None:
        # What else was measured is noise.
        return (_CAUSES["randomness"],)
    found = []
    if first.get("later") is not None:
        found.append("query time")
    if first["append"] == 0 and first["edit"] != 0:
        found.append("positions")
    if first["edit"] is not None:
        found.append("looks ahead" if first["edit"] == 0 else "bidirectional")
    if first["candidates"] is not None:
        found.append("candidates")
    if first.get("company") is not None:
        found.append("padding" if first["company"] == 0 else "batch divisor")
    if first["append"] not in (None, 0) and first["edit"] is None and first.get("company") is None:
        found.append("own divisor")
    if not found and any(layer is not None for layer in first.values()):
        found.append("unknown")
    if not found and not report.stable:
        found.append("scores")
    return tuple(_CAUSES[name] for name in found)
