"""What the page says about a simulation."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from mtserve_plugin.report_html.section import Section, paragraph
from mtserve_plugin.report_html.sweep import simulate_sweeps
from mtserve_plugin.report_html.tables import facts, table
from mtserve_plugin.simulate.table import COLUMNS, PAPER_COLUMNS, simulation_facts

_NO_SWEEP = "Nothing to show: every size had one value only. Give several, e.g. --pages 20480,40960,61440."


def sections(result: dict[str, Any]) -> Iterator[Section]:
    yield Section("summary", "Summary", facts(simulation_facts(result)))
    figures = "\n".join(figure.to_html() for figure in simulate_sweeps(result))
    yield Section("capacity-section", "Capacity sweep", figures or paragraph(_NO_SWEEP))
    yield Section("results", "Results", _results(result["rows"]))


def _results(rows: list[dict[str, Any]]) -> str:
    with_paper = any(row["status"] != "-" for row in rows)
    columns = COLUMNS | (PAPER_COLUMNS if with_paper else {})
    parts = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        shown = [row for row in rows if row["policy"] == policy]
        parts.append(f"<h3>{escape(policy)}</h3>")
        head = [name.replace("\n", " ") for name in columns]
        parts.append(table(head, ([cell(row) for cell in columns.values()] for row in shown), words=0))
    parts.append(paragraph("Missed and lost tokens are per request."))
    if with_paper:
        parts.append(
            paragraph(
                "Calibrated: the trace was fitted to the paper's hit ratios there. Predicted: nothing was fitted. The "
                "paper's hit ratios (device / total) are those of its table 1, its latencies those of table 6 (end to "
                "end) and table 3 (step 8: wait + compute)."
            )
        )
    return "\n".join(parts)
