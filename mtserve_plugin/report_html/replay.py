"""What the page says about a replay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mtserve_plugin.report import REPLAY_CELLS, replay_facts, step_cell, step_order
from mtserve_plugin.report_html.hits import hits_figure
from mtserve_plugin.report_html.latency import latency_figure
from mtserve_plugin.report_html.section import Section, paragraph
from mtserve_plugin.report_html.sweep import replay_sweep
from mtserve_plugin.report_html.tables import facts, table, turned
from mtserve_plugin.report_html.timeline import timeline_figure

_NOTHING = "Nothing to show: no mode of this run has what this plot is about."
_NOT_RECORDED = "Not recorded: this page was made from results without the detail that --report records."


def sections(result: dict[str, Any]) -> Iterator[Section]:
    yield Section("summary", "Summary", _summary(result))
    yield Section("results", "Results", _results(result))
    detail = result.get("detail")
    rows = result["rows"]
    plots: dict[str, tuple[str, list[Any]]] = {
        "latency": ("Latency", []),
        "hits": ("Hit ratio over time", []),
        "timeline": ("Streams over a few batches", []),
        "capacity": ("Other numbers of pages", []),
    }
    if detail is not None:
        size = max(row["batch_size"] for row in rows)
        plots["latency"][1].append(latency_figure(rows, detail["batches"]))
        plots["hits"][1].append(hits_figure(rows, detail["batches"], size))
        plots["timeline"][1].extend(map(timeline_figure, detail["overlaps"]))
        plots["capacity"][1].append(replay_sweep(result))
    for key, (title, figures) in plots.items():
        drawn = [figure.to_html() for figure in figures if figure is not None]
        nothing = _NOT_RECORDED if detail is None else _NOTHING
        yield Section(f"{key}-section", title, "\n".join(drawn) or paragraph(nothing))
    if any(row["steps_ms"] for row in rows):
        yield Section("steps", "Steps", _steps(rows))


def _summary(result: dict[str, Any]) -> str:
    rows = result["rows"]
    best = rows[-1]
    base = next(row for row in rows if row["batch_size"] == best["batch_size"])
    parts = [paragraph(f"FAILED: {problem}", "failed") for problem in result["problems"]]
    if best is not base:
        text = (
            f"At batch size {best['batch_size']} a batch takes {best['latency_ms']['mean']:.1f} ms with {best['mode']} "
            f"and {base['latency_ms']['mean']:.1f} ms with {base['mode']} (means): {best['speedup']:.2f}x. "
        )
        if result["ok"]:
            text += "All scores agree with recompute's, and both planted errors were noticed."
        parts.append(paragraph(text, "lead"))
    return "\n".join([*parts, facts(replay_facts(result))])


def _results(result: dict[str, Any]) -> str:
    rows, controls = result["rows"], result["controls"]
    parts = []
    for size in dict.fromkeys(row["batch_size"] for row in rows):
        shown = [row for row in rows if row["batch_size"] == size]
        parts.append(f"<h3>batch size {size}</h3>")
        parts.append(turned(shown, [row["mode"] for row in shown], REPLAY_CELLS))
    parts.append(
        paragraph(
            "recompute encodes every history anew; device keeps pages alone; paper has host memory behind them, which "
            "full chunks reach; hierarchical writes tails back too. Score differences are max|a-b| / max|b| to "
            f"recompute; at most {result['max_rel_error_tolerance']:.0e} passes. Planted errors, each above "
            f"{controls['threshold']:.0e}: history removed {controls['history_removed']:.1e}, delta shifted by one "
            f"position {controls['positions_shifted']:.1e}."
        )
    )
    copies = ", ".join(
        f"{row['background_ms']:.1f} ms with {row['mode']} at batch size {row['batch_size']}"
        for row in rows
        if row["background_ms"] >= 0.05
    )
    if copies:
        parts.append(paragraph(f"Background copies, finished between batches and not in the latency: mean {copies}."))
    return "\n".join(parts)


def _steps(rows: list[dict[str, Any]]) -> str:
    names = sorted({name for row in rows for name in row["steps_ms"]}, key=lambda name: (step_order(name), name))
    parts = [
        paragraph(
            "Mean milliseconds per batch of the steps of the paper's Algorithm 1; 8.1 to 8.5 are parts of 8. On an "
            "asynchronous device these are times of the host."
        )
    ]
    for size in dict.fromkeys(row["batch_size"] for row in rows):
        shown = [row for row in rows if row["batch_size"] == size]
        parts.append(
            table(
                [f"batch size {size}", *(row["mode"] for row in shown)],
                ([name, *(step_cell(name)(row) for row in shown)] for name in names),
            )
        )
    return "\n".join(parts)
