"""Hit ratio over time and per tier: what was found where, request after request."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from mtserve_plugin.report_html.figure import Figure
from mtserve_plugin.report_html.svg import DARK, GRID, INK, LETTER, Drawing, nice_ticks, plain

_MOST_BINS = 40
_LEFT, _RIGHT = 60, 10
_PANEL, _TITLE, _AXIS, _LEGEND = 66, 30, 38, 20
_NAMES = ("found in device pages", "found in host memory", "not found, encoded again")

Row = dict[str, Any]


def hits_figure(rows: list[Row], batches: list[Row], batch_size: int) -> Figure | None:
    """Of a replay's `detail["batches"]`, one panel per mode with a cache; `None` without such a mode."""
    shown = [run for run in batches if run["batch_size"] == batch_size and run["mode"] != "recompute"]
    if not shown:
        return None
    ratios = {row["mode"]: row for row in rows if row["batch_size"] == batch_size}
    last = ratios[shown[-1]["mode"]]
    device, total = last["device_hit_ratio"], last["total_hit_ratio"]
    finding = (
        f"{last['mode']} finds {_percent(total)} of all history tokens: {_percent(device)} in device pages, "
        f"{_percent(total - device)} in host memory"
    )
    bins = len(_bins(shown[0])[1])
    reading = (
        f"Time runs from left to right, request by request (batch size {batch_size}; "
        f"{len(shown[0]['latency_ms'])} batches in {bins} steps). Of 100 % history tokens the dark part was found in "
        "device pages and the striped part in host memory; the white rest had to be encoded again. The numbers above a "
        "panel are means over the whole run."
    )
    return Figure("hits", finding, reading, lambda key, width, label: _draw(key, width, label, shown, ratios))


def _draw(key: str, width: float, label: str, shown: list[Row], ratios: dict[str, Row]) -> Drawing:
    legend = _legend_rows(width)
    height = len(legend) * _LEGEND + 4 + len(shown) * (_TITLE + _PANEL) + _AXIS
    drawing = Drawing(key, width, height, label)
    fills = (DARK, drawing.hatch, "#fff")
    for line, entries in enumerate(legend):
        x = 0.0
        for number in entries:
            drawing.rect(x, line * _LEGEND + 3, 14, 12, fill=fills[number], stroke=INK)
            drawing.text(x + 20, line * _LEGEND + 13, _NAMES[number])
            x += 20 + len(_NAMES[number]) * LETTER + 12
    right = width - _RIGHT
    y = len(legend) * _LEGEND + 4.0
    drawing.sideways(12, y + len(shown) * (_TITLE + _PANEL) / 2 + _TITLE / 2, "share of history tokens")
    for run in shown:
        row = ratios[run["mode"]]
        drawing.text(_LEFT, y + _TITLE - 9, run["mode"], bold=True)
        device, total = row["device_hit_ratio"], row["total_hit_ratio"]
        drawing.text(right, y + _TITLE - 9, f"{_percent(device)} + {_percent(total - device)}", "end")
        y += _TITLE
        _panel(drawing, run, y, right, fills)
        y += _PANEL
    requests = sum(shown[0]["requests"])
    for tick in nice_ticks(0, requests, int((right - _LEFT) / 44)):
        x = _LEFT + (right - _LEFT) * tick / requests
        drawing.line((x, y), (x, y + 4))
        drawing.text(x, y + 16, plain(tick), "middle")
    drawing.text((_LEFT + right) / 2, y + 33, "timed requests, in order", "middle")
    return drawing


def _panel(drawing: Drawing, run: Row, top: float, right: float, fills: tuple[str, str, str]) -> None:
    bottom = top + _PANEL
    edges, device, total = _bins(run)
    xs = [_LEFT + (right - _LEFT) * edge / edges[-1] for edge in edges]
    steps = list(zip(xs, xs[1:], device, total, strict=False))
    for share in (0.0, 0.5, 1.0):
        y = bottom - _PANEL * share
        drawing.text(_LEFT - 5, y + 4, f"{share:.0%}".replace("%", " %"), "end")
        drawing.line((_LEFT, y), (right, y), stroke=GRID)
    upper = [(x, bottom - _PANEL * found) for a, b, _, found in steps for x in (a, b)]
    lower = [(x, bottom - _PANEL * found) for a, b, found, _ in steps for x in (a, b)]
    if run["host_hit_tokens"] and any(run["host_hit_tokens"]):
        drawing.path([*upper, *reversed(lower)], fill=fills[1], closed=True)
    drawing.path([(xs[0], bottom), *lower, (xs[-1], bottom)], fill=fills[0], closed=True)
    drawing.path(upper, stroke=INK, width=1.5)
    drawing.line((_LEFT, bottom), (right, bottom))


def _bins(run: Row) -> tuple[list[int], list[float], list[float]]:
    """Edges in requests, and per bin the share of tokens found on the device and in either tier."""
    count = len(run["requests"])
    bins = min(_MOST_BINS, count)
    cuts = [round(i * count / bins) for i in range(bins + 1)]
    edges, device, total = [0], [], []
    for begin, end in pairwise(cuts):
        asked = max(sum(run["history_tokens"][begin:end]), 1)
        on_device = sum(run["device_hit_tokens"][begin:end])
        edges.append(edges[-1] + sum(run["requests"][begin:end]))
        device.append(on_device / asked)
        total.append((on_device + sum(run["host_hit_tokens"][begin:end])) / asked)
    return edges, device, total


def _legend_rows(width: float) -> list[list[int]]:
    rows: list[list[int]] = [[]]
    used = 0.0
    for number, name in enumerate(_NAMES):
        wide = 20 + len(name) * LETTER + 12
        if rows[-1] and used + wide > width:
            rows.append([])
            used = 0.0
        rows[-1].append(number)
        used += wide
    return rows


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
