"""Runs an experiment and puts what comes out beside the paper's figures, as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from mtserve_plugin.machine import describe_machine
from mtserve_plugin.replay.paper import figures
from mtserve_plugin.replay.paper.estimate import check_fits, duration_text, estimate, product_rate
from mtserve_plugin.replay.paper.experiments import EXPERIMENTS, Run, plan_runs
from mtserve_plugin.replay.paper.one_user import replay_one_user
from mtserve_plugin.replay.run import OnStep, load_plan, run_replay
from mtserve_plugin.steps import LAYERS

SHAPE_ONLY = (
    "Latencies on another machine show shape only: compare how speed-ups and hit ratios change with the sizes, "
    "not milliseconds."
)


COUNTS = (
    "Counts do not depend on the machine: encoded tokens are the cache's counters, processed ones the rows that went "
    "into the model's encoder."
)

MT_PAGES = (
    "Here mt-like gets kuairand-like's share of pages. The paper's pages hold 8.8 % of what table 4's MT users need; "
    "with so few users, who come seldom, that would hold hardly more than a batch."
)


def run_experiment(
    name: str,
    scale: str = "small",
    given: Mapping[str, Any] | None = None,
    on_step: OnStep | None = None,
    on_plan: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Runs one of the paper's experiments.

    Args:
        name: a key of `EXPERIMENTS`.
        scale, given: see `plan_runs`.
        on_step: see `OnStep`.
        on_plan: told in words, before the first run of the full scale, what it will take at least.

    Returns:
        Plain values: "experiment", "scale" (what was run), "rows" (measured here, one per run, batch size and
        mode), "paper" (its rows), "notes", "machine", "ok", "problems".

    Raises:
        ConfigError: an option is out of range, or the machine's memory does not suffice.
        InputError: the trace is missing, malformed or too short.
    """
    runs = plan_runs(name, scale, given)
    step = on_step or (lambda *_: None)
    if name == "figure1":
        outcome = replay_one_user(runs[0].options, step)
        scales, rows, problems = [outcome.scale], outcome.rows, outcome.problems
    else:
        scales, rows, problems = _replay_all(_sized(runs, scale, step, on_plan), step)
    experiment = EXPERIMENTS[name]
    return {
        "experiment": name,
        "title": experiment.title,
        "where": experiment.where,
        "scale": {"name": scale, "given": dict(given or {}), "runs": scales},
        "rows": rows,
        "paper": figures.FIGURES[name],
        "paper_hardware": figures.HARDWARE,
        "notes": [*_notes(name, scale), *figures.FOOTNOTES.get(name, [])],
        "machine": describe_machine(),
        "ok": not problems,
        "problems": problems,
    }


def _notes(name: str, scale: str) -> list[str]:
    if name == "figure1":
        return [COUNTS]
    return [SHAPE_ONLY, *([MT_PAGES] if (name, scale) == ("table1", "small") else [])]


def _sized(runs: list[Run], scale: str, step: OnStep, on_plan: Callable[[str], None] | None) -> list[Run]:
    """The runs with their pages as numbers, once it is known that all of them fit."""
    sized, needs, rate = [], [], 0.0
    for number, run in enumerate(runs):
        step("planning", number, len(runs))
        options = run.options
        _, plan = load_plan(options)
        if run.share is not None:
            options = dataclasses.replace(options, pages=max(1, round(run.share * plan.pages(options.page_size))))
        rate = rate or product_rate(options.shape.dtype, options.shape.heads * options.shape.dim)
        needs.append(estimate(options, plan, rate))
        sized.append(dataclasses.replace(run, options=options))
    check_fits(needs)
    if on_plan is not None and scale == "full":
        on_plan(f"this will take at least {duration_text(sum(each.seconds for each in needs))} on this machine")
    return sized


def _replay_all(runs: list[Run], step: OnStep) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    scales, rows, problems = [], [], []
    for number, run in enumerate(runs, start=1):
        where = f"{number}/{len(runs)} " if len(runs) > 1 else ""

        def run_step(text: str, done: int, total: int, where: str = where) -> None:
            step(where + text, done, total)

        result = run_replay(run.options, run_step)
        scales.append({**_scale(result.config), "stands_for": run.stands_for})
        rows += [{**dataclasses.asdict(row), **run.stands_for, **_split(row)} for row in result.rows]
        problems += [where + problem for problem in result.problems]
    return scales, rows, problems


def _split(row: Any) -> dict[str, float]:
    """Step 8 split as in the paper's table 3, in ms per batch; nothing without step times."""
    if LAYERS not in row.steps_ms:
        return {}
    wait = row.counters.get("layer_wait_ns", 0) / 1e6 / row.batches
    return {"wait_ms": wait, "compute_ms": row.steps_ms[LAYERS] - wait}


def _scale(config: dict[str, Any]) -> dict[str, Any]:
    names = ("trace", "requests", "users", "mean_history", "mean_delta", "longest_history", "candidates", "threads")
    model = config["model_config"]
    chunk = next(iter(config["caches"].values()))["chunk_size"]
    return {
        **{name: config[name] for name in names},
        "layers": model["num_layers"],
        "heads": model["num_heads"],
        "dim": model["qk_dim"],
        "dtype": model["dtype"],
        "pages": config["pages"],
        "page_size": config["page_size"],
        "pages_share": config["pages"] / config["working_set_pages"],
        "chunk": chunk,
        "seed": config["seed"],
    }
