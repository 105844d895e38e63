"""Latency distributions: one histogram per batch size and mode over a common logarithmic axis."""

from __future__ import annotations

import math
from typing import Any

from mtserve_plugin.report_html.figure import Figure
from mtserve_plugin.report_html.svg import GRID, INK, LETTER, MID, Drawing, log_ticks, plain

_LANE, _HEAD, _AXIS = 30, 28, 40
_BINS = 48
_SPREAD = 3.0

Row = dict[str, Any]


def latency_figure(rows: list[Row], batches: list[Row]) -> Figure:
    """Of a replay's `rows`, which have the percentiles, and `detail["batches"]`, which have every batch."""
    last = rows[-1]
    base = next(row for row in rows if row["batch_size"] == last["batch_size"])
    finding = f"Half of the batches take {last['latency_ms']['p50']:.1f} ms or less with {last['mode']}"
    if last is not base:
        finding += f", {base['latency_ms']['p50']:.1f} ms with {base['mode']}"
    finding += f" (batch size {last['batch_size']})"
    reading = (
        "Each row is one mode: the taller a bar, the more batches took that long. The thick line is the median (p50, "
        "also printed at the right), the diamond is p99. Further left is faster; the axis is logarithmic, so equal "
        "distances are equal factors."
    )
    return Figure("latency", finding, reading, lambda key, width, label: _draw(key, width, label, rows, batches))


def _draw(key: str, width: float, label: str, rows: list[Row], batches: list[Row]) -> Drawing:
    sizes = list(dict.fromkeys(row["batch_size"] for row in rows))
    height = len(sizes) * _HEAD + len(rows) * _LANE + _AXIS
    drawing = Drawing(key, width, height, label)
    left = max(len(row["mode"]) for row in rows) * LETTER + 6
    right = width - max(len(_median(row)) for row in rows) * LETTER - 8
    values = [value for run in batches for value in run["latency_ms"]]
    low, high = _range(values)

    def at(value: float) -> float:
        return left + (right - left) * math.log(value / low) / math.log(high / low)

    bottom = height - _AXIS
    for tick in log_ticks(low, high, int((right - left) / 36)):
        drawing.line((at(tick), _HEAD - 6), (at(tick), bottom), stroke=GRID)
        drawing.text(at(tick), bottom + 15, plain(tick), "middle")
    drawing.line((left, bottom), (right, bottom))
    drawing.text((left + right) / 2, bottom + 33, "latency of a batch (ms)", "middle")
    every = {(run["mode"], run["batch_size"]): run["latency_ms"] for run in batches}
    y = 0.0
    for size in sizes:
        y += _HEAD
        drawing.text(0, y - 7, f"batch size {size}", bold=True)
        drawing.text(width, y - 7, "p50", "end")
        for row in (row for row in rows if row["batch_size"] == size):
            y += _LANE
            floor = y - 4
            drawing.text(0, floor - 4, row["mode"])
            drawing.text(width, floor - 4, _median(row), "end")
            drawing.rects(_bars(every[row["mode"], size], left, right, floor, at), fill=MID)
            drawing.line((left, floor), (right, floor), stroke=GRID)
            p50, p99 = at(row["latency_ms"]["p50"]), at(row["latency_ms"]["p99"])
            drawing.line((p50, floor - _LANE + 7), (p50, floor + 2), stroke=INK, width=3)
            drawing.marker(p99, floor - 7, "diamond", fill="#fff")
    return drawing


def _bars(
    values: list[float], left: float, right: float, floor: float, at: Any
) -> list[tuple[float, float, float, float]]:
    bins, bar = [0] * _BINS, (right - left) / _BINS
    for value in values:
        bins[min(int((at(value) - left) / bar), _BINS - 1)] += 1
    tallest, room = max(bins), _LANE - 8
    # A single batch among hundreds stays visible.
    heights = [max(2.0, room * found / tallest) if found else 0.0 for found in bins]
    return [(left + i * bar, floor - h, bar, h) for i, h in enumerate(heights) if h]


def _range(values: list[float]) -> tuple[float, float]:
    low, high = min(values) / 1.08, max(values) * 1.08
    widen = math.sqrt(max(1.0, _SPREAD / (high / low)))
    return low / widen, high * widen


def _median(row: Row) -> str:
    return f"{row['latency_ms']['p50']:.1f}"
