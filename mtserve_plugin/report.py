"""Tables for the terminal, and the JSON files behind `--json`. Takes plain values: imports neither torch nor numpy."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtserve_plugin.errors import ConfigError
from mtserve_plugin.replay.options import SYNTHETIC_SHAPES

_PIPE_WIDTH = 120
_METRIC_WIDTH, _MODE_WIDTH = 20, 11
_SHORT = {"hierarchical": "hierarch."}


def console(*, stderr: bool = False) -> Console:
    """A console that is as wide as its terminal or COLUMNS; 120 columns where neither is there, e.g. in a pipe."""
    made = Console(stderr=stderr, highlight=False)
    if made.is_terminal or os.environ.get("COLUMNS"):
        return made
    return Console(stderr=stderr, highlight=False, width=_PIPE_WIDTH)


def check_writable(path: Path | None, option: str = "--json") -> None:
    """Refuses the path of an option that cannot be written, before the work is done.

    Raises:
        ConfigError: its folder is missing, it is a folder itself, or it cannot be opened for writing.
    """
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: the folder {path.parent} does not exist; create it first")
    if path.exists() and not path.is_file():
        return
    is_new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise _not_writable(path, option, error) from None
    if is_new:
        path.unlink()


def _not_writable(path: Path, option: str, error: OSError) -> ConfigError:
    return ConfigError(f"{option} {path} cannot be written ({error.strerror}); give a file in a folder of yours")


def write_json(path: Path | None, values: Any) -> None:
    """Writes `values` as indented JSON; nothing without a path.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path is None:
        return
    try:
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise _not_writable(path, "--json", error) from None


def print_next(out: Console, text: str) -> None:
    """What to do with the result, on one line, so that a command can be copied."""
    out.print(Text(f"Next: {text}"), soft_wrap=True)


def print_facts(out: Console, facts: Iterable[tuple[str, str]]) -> None:
    """Name and value, one line each, values aligned."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, Text(value))
    out.print(table)


def print_problems(out: Console, problems: Sequence[str]) -> None:
    for problem in problems:
        out.print(Text(f"FAILED: {problem}", style="bold red"), soft_wrap=True)


# ---- replay --------------------------------------------------------------------------------------


def print_replay(out: Console, result: dict[str, Any]) -> None:
    """A replay's `to_json()`: what was run, the paper's table 1, the controls."""
    print_facts(out, replay_facts(result))
    rows = result["rows"]
    sizes = list(dict.fromkeys(row["batch_size"] for row in rows))
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    fitting = max(1, (out.width - _METRIC_WIDTH) // (_MODE_WIDTH * len(modes)))
    for begin in range(0, len(sizes), fitting):
        shown = [row for row in rows if row["batch_size"] in sizes[begin : begin + fitting]]
        out.print(_replay_table(shown, REPLAY_CELLS))
    steps = dict.fromkeys(name for row in rows for name in row["steps_ms"])
    if steps:
        out.print("Steps of the paper's Algorithm 1, mean ms per batch (its table 2); 8.1 to 8.5 are parts of 8:")
        cells = {name: step_cell(name) for name in sorted(steps, key=step_order)}
        for begin in range(0, len(sizes), fitting):
            shown = [row for row in rows if row["batch_size"] in sizes[begin : begin + fitting]]
            out.print(_replay_table(shown, cells))
        out.print(
            "Steps 6 and 7 (await and update metadata) are parts of 1-2 and 9 here: metadata is prepared inline.",
            soft_wrap=True,
        )
    controls, tolerance = result["controls"], result["max_rel_error_tolerance"]
    out.print(
        f"Score differences are max|a-b| / max|b| to recompute; at most {tolerance:.0e} passes. "
        f"Controls, each above {controls['threshold']:.0e}:\n"
        f"  history removed {controls['history_removed']:.1e}, "
        f"delta shifted by one position {controls['positions_shifted']:.1e}",
        soft_wrap=True,
    )
    if any(row["requests"] / row["batches"] < row["batch_size"] - 0.5 for row in rows):
        out.print("A batch ends early, before a user's second request, so that users occur once in it.")
    copies = [
        f"{row['background_ms']:.1f} ms at batch size {row['batch_size']}"
        for row in rows
        if row["mode"] == "hierarchical"
    ]
    if copies:
        out.print(
            "Background copies, finished between batches and not in the latency: mean " + ", ".join(copies),
            soft_wrap=True,
        )
    for size in sizes:
        without_room = {
            row["mode"]: row["counters"]["rows_without_room"]
            for row in rows
            if row["batch_size"] == size and row["counters"].get("rows_without_room")
        }
        if without_room:
            out.print(
                f"Batch size {size}: requests that found no room for their pages and were not stored: "
                + ", ".join(f"{count} ({mode})" for mode, count in without_room.items())
                + f"; raise --pages above {result['config']['pages']}",
                soft_wrap=True,
            )
    trace = result["config"]["trace"]
    if trace in SYNTHETIC_SHAPES:
        print_next(out, "the same on your log, mtserve replay --trace LOG; memory for it, mtserve plan --trace LOG")
    else:
        print_next(out, f"mtserve plan --trace {shlex.quote(trace)}, for the memory to give")


def replay_facts(result: dict[str, Any]) -> list[tuple[str, str]]:
    config, machine = result["config"], result["machine"]
    model = config["model_config"]
    caches = config["caches"]
    device = (
        f"{config['pages']} pages of {config['page_size']} tokens, "
        f"{_percent(config['pages'] / config['working_set_pages'])} of the {config['working_set_pages']} "
        f"that {config['users']} users need"
    )
    facts = [
        ("trace", f"{config['trace']}, seed {config['seed']}: {config['requests']} timed requests"),
        (
            "histories",
            f"mean {config['mean_history']:.0f} tokens (longest {config['longest_history']}), "
            f"mean delta {config['mean_delta']:.1f}, {config['candidates']} candidates",
        ),
        ("at cap", config["at_cap_policy"]),
        (
            "model",
            f"{config['model']}: {model['num_layers']} layers, {model['num_heads']} heads of {model['qk_dim']}, "
            f"{model['dtype']}",
        ),
        ("device tier", device),
    ]
    if "hierarchical" in caches:
        host = caches["hierarchical"]
        facts.append(
            ("host tier", f"{bytes_text(host['host_bytes'])}, chunks of {host['chunk_size']} tokens (hierarchical)")
        )
    facts.append(
        (
            "before timing",
            f"{config['prefill_requests']} requests fill each cache, {config['warmup_requests']} warm each mode up",
        )
    )
    facts.append(
        (
            "machine",
            f"{machine['cpu']}, {machine['cores']} cores, {config['threads']} threads, torch {machine['torch']}",
        )
    )
    return facts


def _replay_table(rows: list[dict[str, Any]], cells: dict[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("")
    for index, row in enumerate(rows):
        first = index == 0 or rows[index - 1]["batch_size"] != row["batch_size"]
        head = f"batch {row['batch_size']}" if first else ""
        table.add_column(f"{head}\n{_SHORT.get(row['mode'], row['mode'])}", justify="right", no_wrap=True)
    for name, cell in cells.items():
        table.add_row(name, *(cell(row) for row in rows))
    return table


def step_cell(name: str) -> Any:
    return lambda row: f"{row['steps_ms'][name]:.2f}" if name in row["steps_ms"] else "-"


def step_order(name: str) -> float:
    number = name.split(" ")[0].split("-")[0]
    return float(number) if number.replace(".", "").isdigit() else 0.0


def _found(name: str) -> Any:
    return lambda row: "-" if row["mode"] == "recompute" else _percent(row[name])


def _difference(row: dict[str, Any]) -> str:
    return "-" if row["mode"] == "recompute" else f"{row['max_rel_error']:.1e}"


REPLAY_CELLS: dict[str, Any] = {
    "requests per batch": lambda row: f"{row['requests'] / row['batches']:.2f}",
    "latency mean (ms)": lambda row: f"{row['latency_ms']['mean']:.1f}",
    "latency p50 (ms)": lambda row: f"{row['latency_ms']['p50']:.1f}",
    "latency p99 (ms)": lambda row: f"{row['latency_ms']['p99']:.1f}",
    "speed-up": lambda row: f"{row['speedup']:.2f}x",
    "device hit ratio": _found("device_hit_ratio"),
    "total hit ratio": _found("total_hit_ratio"),
    "warm hit ratio": _found("warm_hit_ratio"),
    "lost tokens": lambda row: "-" if row["mode"] == "recompute" else f"{row['lost_tokens']:,}",
    "score difference": _difference,
}


# ---- bench, doctor -------------------------------------------------------------------------------


def print_measures(out: Console, title: str, rows: Iterable[tuple[str, str, str]]) -> None:
    """Name, value and explanation."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("measure", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("meaning", style="dim")
    for row in rows:
        table.add_row(*row)
    out.print(table)


_STATUS_STYLE = {"ok": "green", "warn": "yellow", "error": "bold red"}


def print_findings(out: Console, findings: Sequence[dict[str, str]]) -> None:
    """`diagnose()`'s findings, and the command that mends each."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("part", "status", "version"):
        table.add_column(name, no_wrap=True)
    table.add_column("what is known", overflow="fold")
    fixes = []
    for finding in findings:
        table.add_row(
            finding["name"],
            Text(finding["status"], style=_STATUS_STYLE.get(finding["status"], "")),
            Text(finding["version"] or "-"),
            Text(finding["text"]),
        )
        if finding["fix"] and finding["status"] != "ok":
            fixes.append((finding["name"], finding["fix"]))
    out.print(table)
    for name, fix in fixes:
        # One line each, so that a command can be copied.
        out.print(Text(f"to mend {name}: {fix}"), soft_wrap=True)
    if not any(finding["status"] == "error" for finding in findings):
        print_next(out, "mtserve replay, which shows what the cache gains on this machine")
    else:
        print_next(out, "mend what has the status error, from the top, and run mtserve doctor again")


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def bytes_text(count: int) -> str:
    """A size with a binary unit, e.g. 1.5 GiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError
