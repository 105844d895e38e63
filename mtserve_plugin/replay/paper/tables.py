"""What `mtserve replay --paper` prints, from the plain values of `run_experiment`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtserve_plugin.replay.paper import figures
from mtserve_plugin.report import print_facts
from mtserve_plugin.steps import LAYERS

_Row = dict[str, Any]
_Cell = Callable[[_Row], str]

_BAR_WIDTH = 44
_TABLE_WIDTH = 110
_KEYS = ("trace", "batch_size", "mode", "layers", "chunk", "pages")


def print_experiment(out: Console, result: dict[str, Any]) -> None:
    """An experiment's values, see `run_experiment`: what was run, its tables, what to make of them."""
    print_facts(out, _facts(result))
    out.print()
    _PRINTERS[result["experiment"]](out, result)
    for note in result["notes"]:
        out.print(note, soft_wrap=True)


# ---- what was run --------------------------------------------------------------------------------


def _facts(result: dict[str, Any]) -> list[tuple[str, str]]:
    runs, machine = result["scale"]["runs"], result["machine"]
    facts = [("experiment", f"{result['title']} ({result['where']})"), ("scale", _scale_text(result))]
    if "user" in runs[0]:
        facts.append(
            (
                "trace",
                f"{runs[0]['trace']}, seed {runs[0]['seed']}: of its users the one whose three histories "
                f"add up to nearest the paper's tokens; a visit with {runs[0]['filled_with']:,} was served before",
            )
        )
    else:
        facts.append(("trace", _each(runs, "{trace}, seed {seed}: {requests} timed requests of {users} users")))
        facts.append(
            (
                "histories",
                _each(runs, "mean {mean_history:.0f} tokens (longest {longest_history}), mean delta {mean_delta:.1f}"),
            )
        )
        facts.append(
            (
                "device tier",
                _each(runs, "{pages} ({pages_share:.1%})")
                + f" pages of {runs[0]['page_size']} tokens (of what the users need)",
            )
        )
        facts.append(("modes", _modes_text(result["rows"])))
    facts += [
        ("host chunk", _each(runs, "{chunk} tokens")),
        ("model", _each(runs, "{layers} layers, {heads} heads of {dim}, {dtype}, {candidates} candidates")),
        ("here", f"{machine['cpu']}, {machine['cores']} cores, {runs[0]['threads']} threads, torch {machine['torch']}"),
        (
            "paper",
            f"{result['paper_hardware']}; {figures.LAYERS_OF_MODEL} layers, 4 heads of 128, bfloat16, "
            f"{figures.PAGES:,} pages of {figures.PAGE_SIZE}, chunk {figures.CHUNK}",
        ),
    ]
    return facts


def _modes_text(rows: list[_Row]) -> str:
    """Our names of the modes, and the paper's."""
    modes = dict.fromkeys(row["mode"] for row in rows)
    return ", ".join(f"{mode}: {figures.NAMES.get(mode, 'tails written back too, not in the paper')}" for mode in modes)


def _scale_text(result: dict[str, Any]) -> str:
    given = result["scale"]["given"]
    replaced = "; replaced: " + ", ".join(f"{name} {value}" for name, value in given.items()) if given else ""
    return _preset_text(result) + replaced


def _preset_text(result: dict[str, Any]) -> str:
    if result["scale"]["name"] == "full":
        return "full: the paper's model, histories, pages and chunks; fewer requests than its traces have"
    if "user" in result["scale"]["runs"][0]:
        return "small: histories of the paper's length, a smaller model; --scale full takes the paper's model"
    return (
        "small: histories and chunks 1/16 of the paper's, a smaller model, few users and requests; --scale full runs "
        "the paper's sizes"
    )


def _each(runs: list[_Row], text: str) -> str:
    return "; ".join(dict.fromkeys(text.format(**run) for run in runs))


# ---- tables --------------------------------------------------------------------------------------


def _print_comparison(out: Console, result: dict[str, Any], labels: dict[str, _Cell], cells: dict[str, _Cell]) -> None:
    """A table with a row per run, batch size and mode; each of `cells` stands in it twice, here and in the paper."""
    table = _table(labels)
    for name in cells:
        table.add_column(f"{name}\nhere", justify="right", no_wrap=True)
        table.add_column("\npaper", justify="right", no_wrap=True, style="dim")
    before = None
    for row in result["rows"]:
        group = [row.get(name) for name in _KEYS if name != "mode"]
        if before not in (None, group):
            table.add_row()
        before = group
        paper = _counterpart(row, result["paper"])
        values = []
        for cell in cells.values():
            values += [_text(cell, row), _text(cell, paper)]
        table.add_row(*(cell(row) for cell in labels.values()), *values)
    _print_table(out, table)


def _print_table(out: Console, table: Table) -> None:
    # Wider than a narrow terminal rather than cut: half a number says something else.
    whole, out.width = out.width, max(out.width, _TABLE_WIDTH)
    out.print(table, soft_wrap=True)
    out.width = whole


def _table(labels: Iterable[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for name in labels:
        table.add_column(f"\n{name}" if "\n" not in name else name, no_wrap=True)
    return table


def _counterpart(row: _Row, paper: list[_Row]) -> _Row:
    """The paper's row for what this one stands for; empty where it has none."""
    for candidate in paper:
        if all(candidate.get(name) == row.get(name) for name in _KEYS if name in candidate):
            return candidate
    return {}


def _text(cell: _Cell, row: _Row) -> str:
    try:
        return cell(row)
    except KeyError:
        return "-"


def _latency(row: _Row) -> str:
    value = row["latency_ms"]
    return f"{value['mean'] if isinstance(value, dict) else value:.1f}"


def _hits(name: str) -> _Cell:
    return lambda row: "-" if row.get("mode") == "recompute" else f"{row[name]:.2%}"


_BATCH: dict[str, _Cell] = {"batch": lambda row: str(row["batch_size"])}
_MODE: dict[str, _Cell] = {"mode": lambda row: row["mode"]}
_SPEED: dict[str, _Cell] = {"latency ms": _latency, "speed-up": lambda row: f"{row['speedup']:.2f}x"}
_RATIOS: dict[str, _Cell] = {"device hits": _hits("device_hit_ratio"), "total hits": _hits("total_hit_ratio")}
_SPLIT: dict[str, _Cell] = {
    "wait ms": lambda row: f"{row['wait_ms']:.2f}",
    "compute ms": lambda row: f"{row['compute_ms']:.2f}",
}


def _print_table_1(out: Console, result: dict[str, Any]) -> None:
    for trace, name in figures.DATASETS.items():
        rows = [row for row in result["rows"] if row["trace"] == trace]
        out.print(f"{trace} (the paper's {name}):")
        _print_comparison(out, {**result, "rows": rows}, _BATCH | _MODE, _SPEED | _RATIOS)


def _print_table_2(out: Console, result: dict[str, Any]) -> None:
    _print_steps(out, result, result["rows"])


def _print_table_3(out: Console, result: dict[str, Any]) -> None:
    sizes = {run["stands_for"]["chunk"]: run["chunk"] for run in result["scale"]["runs"]}
    chunks: dict[str, _Cell] = {
        "chunk\nhere": lambda row: str(sizes[row["chunk"]]),
        "\npaper": lambda row: str(row["chunk"]),
    }
    _print_comparison(out, result, chunks | _MODE, _SPLIT | _SPEED)
    _print_found(out, result, chunks)
    out.print(
        "Wait is the time that batches waited in step 8 for layers on their way from the host; compute is the rest of "
        "step 8. A replay runs on the CPU: both tiers are main memory, no bus lies between them, and waits are short.",
        soft_wrap=True,
    )


def _print_table_5(out: Console, result: dict[str, Any]) -> None:
    layers = {run["stands_for"]["layers"]: run["layers"] for run in result["scale"]["runs"]}
    depths: dict[str, _Cell] = {
        "layers\nhere": lambda row: str(layers[row["layers"]]),
        "\npaper": lambda row: str(row["layers"]),
    }
    _print_comparison(out, result, depths | _BATCH | _MODE, _SPEED | _RATIOS)
    half = min(layers)
    out.print(f"Steps with {layers[half]} layers here and {half} in the paper:")
    _print_steps(out, result, [row for row in result["rows"] if row["layers"] == half])


def _print_table_6(out: Console, result: dict[str, Any]) -> None:
    sizes = {run["stands_for"]["pages"]: run for run in result["scale"]["runs"]}
    pages: dict[str, _Cell] = {
        "pages\nhere": lambda row: str(sizes[row["pages"]]["pages"]),
        "\npaper": lambda row: f"{row['pages']:,} ({_gigabytes(row['pages'])} GB)",
    }
    _print_comparison(out, result, pages | _MODE, _SPEED)
    _print_found(out, result, pages)


def _gigabytes(pages: int) -> int:
    return next(int(str(row["table_gb"])) for row in figures.TABLE_6 if row["pages"] == pages)


def _print_found(out: Console, result: dict[str, Any], labels: dict[str, _Cell]) -> None:
    """What was found and brought in, of which the paper has no numbers for this sweep."""
    out.print("Found and brought in, here; the paper has no numbers for these:")
    cells = {
        **labels,
        **_MODE,
        "device hits": _hits("device_hit_ratio"),
        "total hits": _hits("total_hit_ratio"),
        "wait ms": _SPLIT["wait ms"],
        "onloaded tokens\nper request": lambda row: f"{row['counters']['onload_tokens'] / row['requests']:.0f}",
        "lost tokens": lambda row: f"{row['lost_tokens']:,}",
    }
    table = _table(labels | _MODE)
    for name in list(cells)[len(labels) + 1 :]:
        table.add_column(f"\n{name}" if "\n" not in name else name, justify="right", no_wrap=True)
    for row in result["rows"]:
        if row["mode"] != "recompute":
            table.add_row(*(_text(cell, row) for cell in cells.values()))
    _print_table(out, table)


def _print_steps(out: Console, result: dict[str, Any], rows: list[_Row]) -> None:
    """A table per batch size with a line per step; every mode stands in it twice, here and in the paper."""
    steps = dict.fromkeys([*figures.STEPS, *(name for row in rows for name in row["steps_ms"])])
    for size in dict.fromkeys(row["batch_size"] for row in rows):
        shown = [row for row in rows if row["batch_size"] == size]
        pairs = [(row, _counterpart(row, result["paper"])) for row in shown]
        table = _table([f"batch {size}, ms"])
        for row, paper in pairs:
            table.add_column(f"{row['mode']}\nhere", justify="right", no_wrap=True)
            if paper:
                table.add_column(f"{figures.NAMES[row['mode']]}\npaper", justify="right", no_wrap=True, style="dim")
        lines: dict[str, _Cell] = {name: _step(name) for name in sorted(steps, key=_order)}
        lines["whole"] = _latency
        lines["share of step 8"] = lambda row: f"{row['steps_ms'][LAYERS] / _mean(row):.0%}"
        for name, cell in lines.items():
            values = []
            for row, paper in pairs:
                values.append(_text(cell, row))
                if paper:
                    values.append(_text(cell, paper))
            table.add_row(name, *values, end_section=name == list(lines)[-3])
        _print_table(out, table)
    out.print(
        "Steps 8.1 to 8.5 are parts of 8. Steps 6 and 7 do not occur here: metadata is prepared inline and published "
        "by 9. The content check, which finds edited histories, is not in the paper.",
        soft_wrap=True,
    )


def _step(name: str) -> _Cell:
    return lambda row: f"{row['steps_ms'][name]:.2f}"


def _mean(row: _Row) -> float:
    value = row["latency_ms"]
    return float(value["mean"] if isinstance(value, dict) else value)


def _order(name: str) -> float:
    number = name.split(" ")[0].split("-")[0]
    return float(number) if number.replace(".", "").isdigit() else 0.0


# ---- figure 1 ------------------------------------------------------------------------------------


def _print_figure_1(out: Console, result: dict[str, Any]) -> None:
    rows = result["rows"]
    longest = max(row["processed"]["recompute"] for row in rows)
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for name in ("request", "mode", "history\ntokens", "of them\nencoded", "candidates", "tokens\nprocessed"):
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        for mode, style in (("recompute", "red"), ("reuse", "green")):
            first = mode == "recompute"
            width = max(1, round(_BAR_WIDTH * row["processed"][mode] / longest))
            table.add_row(
                str(row["request"]) if first else "",
                mode,
                f"{row['history']:,}" if first else "",
                f"{row['encoded'][mode]:,}",
                f"{row['candidates']:,}",
                f"{row['processed'][mode]:,}",
                Text("█" * width, style=style),
            )
    _print_table(out, table)
    sums = {
        kind: {mode: sum(row[kind][mode] for row in rows) for mode in ("recompute", "reuse")}
        for kind in ("encoded", "processed")
    }
    paper = result["paper"][0]
    total = Table(box=SIMPLE_HEAD, pad_edge=False)
    total.add_column("three requests")
    for name in ("recompute", "reuse", "factor"):
        total.add_column(name, justify="right")
    lines = {
        "here, history tokens encoded": sums["encoded"],
        "here, with candidates": sums["processed"],
        "paper (figure 1)": {"recompute": paper["recompute_tokens"], "reuse": paper["reuse_tokens"]},
    }
    for name, tokens in lines.items():
        factor = f"{tokens['recompute'] / tokens['reuse']:.1f}x" if tokens["reuse"] else "-"
        total.add_row(name, f"{tokens['recompute']:,}", f"{tokens['reuse']:,}", factor)
    _print_table(out, total)


_PRINTERS: dict[str, Callable[[Console, dict[str, Any]], None]] = {
    "table1": _print_table_1,
    "table2": _print_table_2,
    "table3": _print_table_3,
    "table5": _print_table_5,
    "table6": _print_table_6,
    "figure1": _print_figure_1,
}
