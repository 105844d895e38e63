"""Timeline of the four streams over a few batches: what overlapped with what."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from mtserve_plugin.report_html.figure import Figure
from mtserve_plugin.report_html.svg import DARK, GRID, INK, LETTER, LIGHT, MID, Drawing, nice_ticks, plain

# Names of mtserve_plugin.steps, which imports torch.
_CALLER, _WAIT, _LAYERS = "caller", "8.3 wait for layer", "8 HSTU layers"
_IN_LAYERS = ("8.1", "8.2", "8.4", "8.5")
STREAMS = ("onload", "scatter", "offload")
LANES = ("compute", *STREAMS, "threads")

_LEFT, _RIGHT = 58, 12
_LANE, _GAP, _TITLE, _BATCHES, _AXIS, _LEGEND = 22, 5, 24, 18, 40, 19
_LEAST_WIDTH, _MERGE = 1.0, 0.4
_STRATEGY = {
    "direct": "onloads go straight from host memory into pages",
    "staged": "onloads go into the onload region, which batches read until a scatter has copied it into pages",
}

Interval = tuple[float, float]


class _Span(NamedTuple):
    lane: str
    kind: str
    begin: float
    end: float


class _View(NamedTuple):
    title: str
    begin: float
    end: float


class Overlapped(NamedTuple):
    """Milliseconds, over all recorded batches.

    Attributes:
        copying: work of the three copy streams, added up.
        hidden: the part of it during which the caller was busy inside a batch and not waiting.
        waiting: the caller's waits for layers.
        batches: the forward passes, added up.
    """

    copying: float
    hidden: float
    waiting: float
    batches: float


def timeline_figure(overlap: dict[str, Any]) -> Figure:
    """Of one entry of `detail["overlaps"]`."""
    found = measure(overlap)
    share = f"{100 * found.hidden / found.copying:.0f} % of it" if found.copying else "none of it"
    finding = (
        f"{overlap['strategy'].capitalize()} onloads: {found.copying:.2f} ms of copying, {share} while the model "
        f"was computing; the model waited {found.waiting:.2f} of {found.batches:.1f} ms"
    )
    first = overlap["first_batch"]
    count = len(overlap["batches"])
    reading = (
        f"{count} consecutive batches (timed ones {first + 1} to {first + count}, batch size {overlap['batch_size']}, "
        f"{overlap['mode']}), run without a pause on a cache of their own after the measurement; "
        f"{_STRATEGY[overlap['strategy']]}. One row per stream: work that stands above other work ran at the same "
        "time. Striped: the model waits for cached keys and values. The threads issue and complete the streams' work. "
        f"Work too short to be seen is drawn {_LEAST_WIDTH:.0f} pixel wide. Below, one batch enlarged."
    )
    return Figure(
        f"timeline-{overlap['strategy']}",
        finding,
        reading,
        lambda key, width, label: _draw(key, width, label, overlap),
    )


def measure(overlap: dict[str, Any]) -> Overlapped:
    """How much of the copying was hidden behind computation."""
    waits = _merged((begin, end) for stream, name, begin, end in overlap["spans"] if (stream, name) == (_CALLER, _WAIT))
    batches = _merged((begin, end) for begin, end in overlap["batches"])
    copying = hidden = 0.0
    for stream in STREAMS:
        busy = _merged((begin, end) for name, _, begin, end in overlap["spans"] if name == stream)
        copying += _length(busy)
        inside = _common(busy, batches)
        hidden += _length(inside) - _length(_common(inside, waits))
    return Overlapped(copying, hidden, _length(waits), _length(batches))


def _draw(key: str, width: float, label: str, overlap: dict[str, Any]) -> Drawing:
    spans = _spans(overlap)
    views = _views(overlap, spans)
    legend = 3
    panel = _TITLE + _BATCHES + len(LANES) * (_LANE + _GAP) + _AXIS
    drawing = Drawing(key, width, legend * _LEGEND + 6 + len(views) * panel, label)
    names = {
        "layers": (DARK, "computing attention layers; copying"),
        "wait": (drawing.hatch, "waiting for a layer's cached keys and values"),
        "around": (LIGHT, "the rest of a batch: look up, strip, embed, commit"),
    }
    for number, (fill, text) in enumerate(names.values()):
        y = float(number * _LEGEND)
        drawing.rect(0.5, y + 3, 14, 12, fill=fill, stroke=INK)
        drawing.text(20, y + 13, text)
    y = legend * _LEGEND + 6.0
    for view in views:
        _panel(drawing, y, width - _RIGHT, view, overlap, spans)
        y += panel
    return drawing


def _panel(
    drawing: Drawing, top: float, right: float, view: _View, overlap: dict[str, Any], spans: list[_Span]
) -> None:
    def at(time: float) -> float:
        share = (time - view.begin) / (view.end - view.begin)
        return _LEFT + (right - _LEFT) * min(max(share, 0.0), 1.0)

    fills = {"layers": DARK, "wait": drawing.hatch, "around": LIGHT, "copy": DARK, "thread": MID}
    drawing.text(0, top + 15, view.title, bold=True)
    y = top + _TITLE
    lanes_end = y + _BATCHES + len(LANES) * (_LANE + _GAP)
    for number, (begin, end) in enumerate(overlap["batches"], start=1):
        if begin >= view.end or end <= view.begin:
            continue
        for edge in (at(begin), at(end)):
            drawing.line((edge, y + 2), (edge, lanes_end), stroke=GRID)
        drawing.line((at(begin), y + 14), (at(end), y + 14), stroke=INK)
        if at(end) - at(begin) > 2 * LETTER:
            drawing.text((at(begin) + at(end)) / 2, y + 11, _batch_name(number, at(end) - at(begin)), "middle")
    y += _BATCHES
    for lane in LANES:
        drawing.text(0, y + _LANE - 7, lane)
        drawing.line((_LEFT, y + _LANE), (right, y + _LANE), stroke=GRID)
        if lane == "scatter" and overlap["strategy"] == "direct":
            drawing.text(_LEFT + 4, y + _LANE - 7, "not used: copies go into pages")
        for kind, fill in fills.items():
            inside = (
                (at(span.begin), at(span.end))
                for span in spans
                if (span.lane, span.kind) == (lane, kind) and span.begin < view.end and span.end > view.begin
            )
            boxes = [
                (min(begin, right - _LEAST_WIDTH), y + 2, max(end - begin, _LEAST_WIDTH), _LANE - 3)
                for begin, end in _merged(inside, _MERGE)
            ]
            drawing.rects(boxes, fill=fill)
        y += _LANE + _GAP
    for tick in nice_ticks(view.begin, view.end, int((right - _LEFT) / 50)):
        drawing.line((at(tick), y), (at(tick), y + 4))
        drawing.text(at(tick), y + 16, plain(tick), "middle")
    drawing.line((_LEFT, y), (right, y))
    drawing.text((_LEFT + right) / 2, y + 32, "time since the first batch began (ms)", "middle")


def _batch_name(number: int, room: float) -> str:
    return f"batch {number}" if room > 8 * LETTER else str(number)


def _spans(overlap: dict[str, Any]) -> list[_Span]:
    found = []
    for stream, name, begin, end in overlap["spans"]:
        if stream == _CALLER:
            if name != _LAYERS:
                kind = "wait" if name == _WAIT else "layers" if name.startswith(_IN_LAYERS) else "around"
                found.append(_Span("compute", kind, begin, end))
        elif stream in STREAMS:
            found.append(_Span(stream, "copy", begin, end))
        else:
            found.append(_Span("threads", "thread", begin, end))
    return found


def _views(overlap: dict[str, Any], spans: list[_Span]) -> list[_View]:
    """All batches, and the beginning of the one that brought most from the host, until its copies had come."""
    batches = overlap["batches"]
    end = max([batches[-1][1], *(span.end for span in spans)])
    views = [_View(f"{len(batches)} batches", 0.0, end)]
    onloads = [span for span in spans if span.lane in ("onload", "scatter")]
    if onloads:
        brought = [[s for s in onloads if begin <= s.begin < end] for begin, end in batches]
        number = max(range(len(batches)), key=lambda i: sum(s.end - s.begin for s in brought[i]))
        if brought[number]:
            begin, end = batches[number]
            last = max(span.end for span in brought[number])
            title = f"batch {number + 1} enlarged, until its copies have come"
            views.append(_View(title, begin, min(end, begin + 1.3 * (last - begin))))
    return views


def _merged(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """In order, those that touch or are closer than `gap` as one."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1] + gap:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _common(left: list[Interval], right: list[Interval]) -> list[Interval]:
    """Where both have something; both merged."""
    found, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            found.append((begin, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length(intervals: list[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
