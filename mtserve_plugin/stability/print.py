"""An audit's report as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from mtserve_plugin import report as terminal

if TYPE_CHECKING:
    from rich.console import Console

    from mtserve_plugin.stability.measure import AuditReport

_MOST_LAYERS = 8


def print_audit(report: AuditReport, console: Console | None = None) -> None:
    """Drift per layer, drift per change, scores, verdict, causes."""
    from mtserve_plugin.stability.measure import PROBES

    out = console or terminal.console()
    out.print(
        f"{report.rows} histories, {report.prefix_tokens} tokens in their prefixes, {report.delta_tokens} appended. "
        f"Drift is max|a-b| / max|b|; up to {report.tolerance:.0e} is rounding.",
        soft_wrap=True,
    )
    layers = Table(title="between two visits", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    layers.add_column("layer", justify="right")
    for name in ("drift of K", "drift of V"):
        layers.add_column(name, justify="right")
    for layer, (k, v) in enumerate(zip(report.layers.k, report.layers.v, strict=True)):
        layers.add_row(str(layer), _cell(k, report.tolerance), _cell(v, report.tolerance))
    out.print(layers)

    probes = Table(title="one change at a time", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    probes.add_column("change")
    shown = _shown(len(report.layers.k))
    for layer in shown:
        probes.add_column(f"layer {layer}", justify="right", no_wrap=True)
    for name, drift in report.probes.items():
        probes.add_row(PROBES[name], *(_cell(drift.worst[layer], report.tolerance) for layer in shown))
    out.print(probes)

    if report.scores is None:
        out.print(Text(f"scores of reuse: not compared: {report.scores_refused}"), soft_wrap=True)
    else:
        scores = report.scores
        out.print(
            f"scores of reuse ({scores.reused_tokens} tokens reused) against a recompute: "
            f"difference {scores.max_rel_difference:.1e}, Kendall's tau {scores.kendall_tau:.4f}, "
            f"same top 10 {100 * scores.top10_overlap:.1f}%",
            soft_wrap=True,
        )
    verdict = "STABLE: a prefix keeps its keys and values" if report.stable else "UNSTABLE: reuse is not exact"
    out.print(Text(verdict, style="green" if report.stable else "bold red"))
    for cause in report.causes:
        out.print(Text(f"{cause.name}: {cause.text}"), soft_wrap=True)


def _shown(layers: int) -> Sequence[int]:
    """The first layers and the last one, where there are too many for a line."""
    return range(layers) if layers <= _MOST_LAYERS else [*range(_MOST_LAYERS - 1), layers - 1]


def _cell(drift: float, tolerance: float) -> Text:
    return Text(f"{drift:.1e}" if drift else "0", style="" if drift <= tolerance else "bold red")
