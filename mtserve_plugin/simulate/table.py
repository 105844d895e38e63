"""What `mtserve simulate` prints. Takes plain values: imports neither torch nor numpy."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mtserve_plugin.report import bytes_text, print_facts, print_next
from mtserve_plugin.simulate.options import FITTED_TRACES

_Row = dict[str, Any]


def print_simulation(out: Console, result: dict[str, Any]) -> None:
    """A simulation's `to_json()`: what was run, a row per policy and point, and what the paper has there."""
    rows = result["rows"]
    print_facts(out, simulation_facts(result))
    with_paper = any(row["status"] != "-" for row in rows)
    for policy in dict.fromkeys(row["policy"] for row in rows):
        out.print()
        shown = [row for row in rows if row["policy"] == policy]
        whole = _table(policy, shown, COLUMNS | PAPER_COLUMNS if with_paper else COLUMNS)
        if not with_paper or out.measure(whole, options=out.options.update(max_width=1000)).maximum <= out.width:
            out.print(whole)
            continue
        out.print(_table(policy, shown, COLUMNS))
        beside = {name: COLUMNS[name] for name in _BESIDE} | PAPER_COLUMNS
        out.print(_table(f"{policy}: what the paper has", shown, beside))
    if with_paper:
        out.print(
            "Calibrated: the trace was fitted to the paper's hit ratios there. Predicted: nothing was fitted. "
            "The paper's hit ratios (device/total) are those of table 1, its latencies those of table 6 (end to end) "
            "and table 3 (step 8: wait+compute). Where table 1 has 94.66 %, table 5 has 98.56 %.",
            soft_wrap=True,
        )
    out.print(
        "Warm hits: out of what the user's previous request had; below 100 %, something was lost. Missed tokens are "
        "computed anew, lost tokens were dropped from both tiers; both per request. Onload: in all. Index: per batch.",
        soft_wrap=True,
    )
    for row in rows:
        if row["counters"].get("rows_without_room"):
            out.print(
                f"{row['policy']}, batch {row['batch_size']}, {row['pages']} pages: "
                f"{row['counters']['rows_without_room']} requests found no room for their pages and were not stored; "
                "raise --pages",
                soft_wrap=True,
            )
    trace = result["config"]["options"]["trace"]
    log = "LOG" if trace in FITTED_TRACES else shlex.quote(trace)
    print_next(out, f"mtserve plan --trace {log}, for the memory to give")


def simulation_facts(result: dict[str, Any]) -> list[tuple[str, str]]:
    rows, options = result["rows"], result["config"]["options"]
    seed = result["config"]["trace_description"].get("seed")
    longest = max(row["seconds"] for row in rows)
    host = max(row["host_bytes"] for row in rows)
    return [
        (
            "trace",
            options["trace"] + ("" if seed is None else f", seed {seed}") + f": {rows[0]['requests']:,} requests",
        ),
        ("histories", f"mean {rows[0]['mean_history']:,.0f} tokens"),
        (
            "host tier",
            f"{bytes_text(host)}, {bytes_text(result['config']['token_bytes'])} per token" if host else "none",
        ),
        ("time", f"{result['seconds']:.1f} s in all, {longest:.1f} s for the slowest row, one core"),
        (
            "memory",
            f"{bytes_text(result['memory_peak_bytes'])} at most, "
            f"{bytes_text(result['memory_before_bytes'])} of it before the trace was opened",
        ),
        ("machine", f"{result['machine']['cpu']}, torch {result['machine']['torch']} (not used)"),
    ]


def _table(title: str, rows: list[_Row], columns: dict[str, Callable[[_Row], str]]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in _WORDS else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    return table


def _percent(name: str) -> Callable[[_Row], str]:
    return lambda row: "-" if row["policy"] == "recompute" else f"{100 * row[name]:.2f}"


def _gib(count: int) -> str:
    size = count / 2**30
    return f"{size:.0f}" if size >= 10 or not count else f"{size:.2g}"


def _paper_hits(row: _Row) -> str:
    return "/".join(f"{100 * row['paper'][name]:.2f}" for name in _HITS if name in row["paper"])


def _latency(row: _Row) -> str:
    paper, found = row["paper"], []
    if "latency_ms" in paper:
        found.append(f"{paper['latency_ms']:.1f}")
    if "wait_ms" in paper:
        found.append(f"{paper['wait_ms']:.1f}+{paper['compute_ms']:.1f}")
    return "; ".join(found)


_HITS = ("device_hit_ratio", "total_hit_ratio")
COLUMNS: dict[str, Callable[[_Row], str]] = {
    "batch": lambda row: str(row["batch_size"]),
    "pages": lambda row: str(row["pages"]),
    "chunk": lambda row: str(row["chunk_size"]) if row["host_bytes"] else "-",
    "device\nhits %": _percent("device_hit_ratio"),
    "total\nhits %": _percent("total_hit_ratio"),
    "warm\nhits %": _percent("warm_hit_ratio"),
    "missed\ntokens": lambda row: f"{row['missed_tokens']:.1f}",
    "lost\ntokens": lambda row: f"{row['lost_tokens'] / max(row['requests'], 1):.1f}",
    "onload\nGiB": lambda row: _gib(row["bytes_onloaded"]),
    "index\nµs": lambda row: f"{row['index_us_per_batch']:.1f}",
}
PAPER_COLUMNS: dict[str, Callable[[_Row], str]] = {
    "paper's\nhits %": _paper_hits,
    "paper's\nms": _latency,
    "": lambda row: row["status"],
}
_BESIDE = ("batch", "pages", "chunk", "device\nhits %", "total\nhits %")
_WORDS = ("paper's\nms", "")
