"""A picture of a trace's return intervals, as the paper's figure 4 shows them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mtserve_plugin.workload import ReturnIntervals, Trace

_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 40, 46
_FIRST, _DECADES = 1, 6
_BINS_PER_DECADE = 10
_TICKS = {60: "1 min", 600: "10 min", 3600: "1 h", 21_600: "6 h", 86_400: "1 day", 604_800: "1 week"}
_BAR, _LINE, _TEXT, _GRID = "#4c78a8", "#e45756", "#333", "#ddd"


def draw_intervals(trace: Trace, path: Path) -> None:
    """Writes an SVG: the share of returns per bin of a logarithmic time axis as bars, the running share as a line."""
    returns = ReturnIntervals.of(trace)
    counts = returns.counts
    if not counts.sum():
        path.write_text(_document([_text(_WIDTH / 2, _HEIGHT / 2, f"{trace.name}: nobody returns", "middle")]))
        return
    per_bar = 40 // _BINS_PER_DECADE
    shown = counts[_FIRST * 40 : (_FIRST + _DECADES) * 40].reshape(-1, per_bar).sum(axis=1) / counts.sum()
    running = np.cumsum(shown) + counts[: _FIRST * 40].sum() / counts.sum()
    top = float(shown.max()) * 1.05
    parts = [_text(_LEFT, 20, f"{trace.name}: time between two requests of a user", "start", size=14)]
    for seconds, label in _TICKS.items():
        x = _x(np.log10(seconds))
        parts.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_HEIGHT - _BOTTOM}" stroke="{_GRID}"/>')
        parts.append(_text(x, _HEIGHT - _BOTTOM + 16, label, "middle"))
    for tenth in range(0, 11, 2):
        parts.append(_text(_LEFT - 6, _y(tenth / 10) + 4, f"{tenth * 10} %", "end"))
    for i, share in enumerate(shown.tolist()):
        left, right = _x(_FIRST + i / _BINS_PER_DECADE), _x(_FIRST + (i + 1) / _BINS_PER_DECADE)
        y = _y(share / top)
        parts.append(
            f'<rect x="{left:.1f}" y="{y:.1f}" width="{right - left - 1:.1f}" height="{_y(0) - y:.1f}" fill="{_BAR}"/>'
        )
    line = " ".join(
        f"{_x(_FIRST + (i + 1) / _BINS_PER_DECADE):.1f},{_y(share):.1f}" for i, share in enumerate(running.tolist())
    )
    parts.append(f'<polyline points="{line}" fill="none" stroke="{_LINE}" stroke-width="2"/>')
    median, late = returns.quantile(0.5), returns.quantile(0.99)
    note = f"line: share that returned by then; bars: share per bin, tallest {float(shown.max()):.1%}; "
    parts.append(
        _text(_LEFT, _HEIGHT - 8, note + f"median {median:.0f} s, 99 % by {(late or 0) / 3600:.1f} h", "start")
    )
    path.write_text(_document(parts), encoding="utf-8")


def _x(decade: float) -> float:
    return _LEFT + (decade - _FIRST) / _DECADES * (_WIDTH - _LEFT - _RIGHT)


def _y(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)


def _text(x: float, y: float, words: str, anchor: str, size: int = 11) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{_TEXT}">{words}</text>'


def _document(parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">\n'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"
