"""Hit ratio against a size: device pages, tokens per chunk or requests per batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mtserve_plugin.report_html.figure import Figure
from mtserve_plugin.report_html.svg import DARK, GRID, INK, LIGHT, MID, Drawing, Point, nice_ticks, plain

_LEFT, _RIGHT, _PLOT, _AXIS, _LEGEND = 44, 14, 200, 40, 19


@dataclass(frozen=True)
class Style:
    dash: str
    shape: str
    fill: str
    stroke: str


STYLES = {
    "device": Style("2 4", "triangle", "#fff", MID),
    "paper": Style("8 4", "square", LIGHT, INK),
    "hierarchical": Style("", "circle", DARK, DARK),
    "ours": Style("", "circle", DARK, DARK),
}
_OTHER = Style("4 2 1 2", "diamond", "#fff", INK)


@dataclass
class Curve:
    """Total hit ratios of one mode or policy.

    Attributes:
        name: of the mode or policy.
        points: size and share, in ascending order of size.
        marks: points to be marked with a cross: measured, or the paper's.
    """

    name: str
    points: list[Point]
    marks: list[Point] = field(default_factory=list)


def sweep_figure(
    key: str,
    finding: str,
    reading: str,
    curves: Sequence[Curve],
    *,
    axis: str,
    marks: str = "",
    logarithmic: bool = False,
) -> Figure:
    """Curves of hit ratios over sizes.

    Args:
        axis: name of the horizontal axis, with its unit.
        marks: what the crosses are.
        logarithmic: equal factors are equal distances, and only the sizes themselves are ticks.
    """
    return Figure(
        key,
        finding,
        reading,
        lambda inner, width, label: _draw(inner, width, label, list(curves), axis, marks, logarithmic),
    )


def _draw(key: str, width: float, label: str, curves: list[Curve], axis: str, marks: str, logarithmic: bool) -> Drawing:
    legend = len(curves) + bool(marks)
    top = legend * _LEGEND + 34
    drawing = Drawing(key, width, top + _PLOT + _AXIS, label)
    left, right, bottom = _LEFT, width - _RIGHT, top + _PLOT
    sizes = sorted({x for curve in curves for x, _ in [*curve.points, *curve.marks]})
    shares = [y for curve in curves for _, y in [*curve.points, *curve.marks]]
    floor = max(0.0, math.floor(min(shares) * 10 - 0.5) / 10) if min(shares) > 0.3 else 0.0

    def at(size: float, share: float) -> Point:
        measure = math.log if logarithmic else float
        low, high = measure(sizes[0]), measure(sizes[-1])
        where = (measure(size) - low) / (high - low) if high > low else 0.5
        inset = 8
        return left + inset + (right - left - 2 * inset) * where, bottom - _PLOT * (share - floor) / (1 - floor)

    for share in nice_ticks(floor, 1, 6):
        _, y = at(sizes[0], share)
        drawing.line((left, y), (right, y), stroke=GRID)
        drawing.text(left - 5, y + 4, f"{100 * share:.0f} %", "end")
    for size in sizes if logarithmic else nice_ticks(sizes[0], sizes[-1], int((right - left) / 44)):
        x, _ = at(size, floor)
        drawing.line((x, bottom), (x, bottom + 4))
        drawing.text(x, bottom + 16, plain(size), "middle")
    drawing.line((left, bottom), (right, bottom))
    drawing.text((left + right) / 2, bottom + 34, axis, "middle")
    drawing.text(0, top - 14, "total hit ratio (share of history tokens)")
    for number, curve in enumerate(curves):
        style = STYLES.get(curve.name, _OTHER)
        points = [at(*point) for point in curve.points]
        drawing.path(points, stroke=style.stroke, width=2, dash=style.dash)
        for x, y in points:
            drawing.marker(x, y, style.shape, fill=style.fill)
        y = number * _LEGEND + 10.0
        drawing.line((0, y), (34, y), stroke=style.stroke, width=2, dash=style.dash)
        drawing.marker(17, y, style.shape, fill=style.fill)
        drawing.text(42, y + 4, curve.name)
    for curve in curves:
        for point in curve.marks:
            drawing.marker(*at(*point), "cross", size=6)
    if marks:
        y = len(curves) * _LEGEND + 10.0
        drawing.marker(17, y, "cross", size=6)
        drawing.text(42, y + 4, marks)
    return drawing


# ---- of a replay ---------------------------------------------------------------------------------


def replay_sweep(result: dict[str, Any]) -> Figure | None:
    """Of a replay's `detail["capacity"]`, with its measured ratios as crosses."""
    capacity = result["detail"]["capacity"]
    if not capacity["rows"]:
        return None
    size, pages = capacity["batch_size"], result["config"]["pages"]
    measured = {row["mode"]: row["total_hit_ratio"] for row in result["rows"] if row["batch_size"] == size}
    curves = [
        Curve(
            mode,
            [(row["pages"], row["total_hit_ratio"]) for row in capacity["rows"] if row["mode"] == mode],
            [(pages, measured[mode])],
        )
        for mode in dict.fromkeys(row["mode"] for row in capacity["rows"])
    ]
    share = pages / capacity["working_set_pages"]
    found = ", ".join(f"{100 * measured[curve.name]:.1f} % with {curve.name}" for curve in curves)
    return sweep_figure(
        "capacity",
        f"With device pages for {100 * share:.0f} % of what the users need, this run found {found}",
        f"Lines: the same requests through the cache's index alone, at other numbers of device pages (batch size "
        f"{size}; {plain(capacity['working_set_pages'])} pages hold every user). Crosses: measured in this run; they "
        "should lie on their lines. Higher is better; further left needs less device memory.",
        curves,
        axis=f"device pages of {result['config']['page_size']} tokens",
        marks="measured by this replay",
    )


# ---- of a simulation -----------------------------------------------------------------------------

_SIZES = {
    "pages": ("device pages", "More pages"),
    "chunk_size": ("tokens per host chunk", "Larger chunks"),
    "batch_size": ("requests per batch", "Larger batches"),
}


def simulate_sweeps(result: dict[str, Any]) -> list[Figure]:
    """One figure per size that a simulation varied, the other sizes held at the values that have most points."""
    figures = []
    for name, (axis, subject) in _SIZES.items():
        curves, fixed = _slice(result["rows"], name)
        if not curves:
            continue
        best = curves[-1]
        (low, first), (high, last) = best.points[0], best.points[-1]
        marks = any(curve.marks for curve in curves)
        held = ", ".join(f"{_SIZES[other][0]} {plain(value)}" for other, value in fixed.items())
        verb = "raise" if last > first + 5e-4 else "lower" if last < first - 5e-4 else "do not change"
        figures.append(
            sweep_figure(
                f"sweep-{name.replace('_', '-')}",
                f"{subject} {verb} the total hit ratio of {best.name}: {100 * first:.1f} % at {plain(low)}, "
                f"{100 * last:.1f} % at {plain(high)}",
                f"Each point is one simulation of the whole trace ({held})."
                + (" Crosses are what the paper reports for its own traces." if marks else "")
                + " Higher is better; the vertical axis need not begin at 0.",
                curves,
                axis=axis + (f" of {result['rows'][0]['page_size']} tokens" if name == "pages" else ""),
                marks="the paper's table 1" if marks else "",
                logarithmic=name != "pages",
            )
        )
    return figures


def _slice(rows: list[dict[str, Any]], name: str) -> tuple[list[Curve], dict[str, float]]:
    others = [other for other in _SIZES if other != name]
    tiered = [row for row in rows if row["host_bytes"]] or rows
    slices: dict[tuple[float, ...], set[float]] = {}
    for row in tiered:
        slices.setdefault(tuple(row[other] for other in others), set()).add(row[name])
    held = max(slices, key=lambda values: (len(slices[values]), values))
    fixed = dict(zip(others, held, strict=True))
    curves: dict[str, Curve] = {}
    for row in rows:
        # Chunks mean nothing to a policy without a host tier, nor pages to one without pages.
        free = row["policy"] == "recompute" or (name == "chunk_size" and not row["host_bytes"])
        if free or any(row[o] != fixed[o] for o in others if row["host_bytes"] or o != "chunk_size"):
            continue
        curve = curves.setdefault(row["policy"], Curve(row["policy"], []))
        curve.points.append((row[name], row["total_hit_ratio"]))
        if "total_hit_ratio" in row["paper"]:
            curve.marks.append((row[name], row["paper"]["total_hit_ratio"]))
    for curve in curves.values():
        curve.points.sort()
    return [curve for curve in curves.values() if len(curve.points) > 1], fixed
