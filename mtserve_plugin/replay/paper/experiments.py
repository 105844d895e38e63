"""What is run for each of the paper's experiments, at two scales."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mtserve_plugin.errors import ConfigError
from mtserve_plugin.replay.options import MODELS, ReplayOptions
from mtserve_plugin.replay.paper import figures

SCALES = ("small", "full")
SHRINK = 16
"""By what the small scale divides histories and chunks."""

_CACHED = figures.PAGES * figures.PAGE_SIZE
_WORKING_SET = figures.USERS["kuairand-like"] * figures.MEAN_HISTORY["kuairand-like"]
PAGES_SHARE = _CACHED / _WORKING_SET
"""Of the tokens of table 4's KuaiRand-1K users, at their mean, what the paper's pages hold."""


@dataclass(frozen=True)
class Run:
    """One replay of an experiment.

    Args:
        options: what is replayed; `pages` is `None` where `share` decides.
        share: pages, as a share of what the users of the replay need; `None` takes the options'.
        stands_for: what this run is in the paper's table: "trace", and "layers", "chunk" or "pages" where they vary.
    """

    options: ReplayOptions
    share: float | None = None
    stands_for: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """One table or figure of the paper.

    Args:
        title: what it shows.
        where: where the paper has it.
        varies: fields of `ReplayOptions` that it sets itself.
        runs: from a base per trace, whose pages are the paper's, to the runs.
        batch_sizes: requests per batch.
    """

    title: str
    where: str
    varies: tuple[str, ...]
    runs: Callable[[Callable[..., Run]], list[Run]]
    batch_sizes: tuple[int, ...] = (1, 4, 8)


def _table_1(base: Callable[..., Run]) -> list[Run]:
    return [base("kuairand-like"), base("mt-like")]


def _table_2(base: Callable[..., Run]) -> list[Run]:
    return [base(breakdown=True)]


def _table_3(base: Callable[..., Run]) -> list[Run]:
    return [
        base(breakdown=True, modes=("paper", "hierarchical"), chunk=row["chunk"], stands_for={"chunk": row["chunk"]})
        for row in figures.TABLE_3
    ]


def _table_5(base: Callable[..., Run]) -> list[Run]:
    # The whole model too: table 5 is there to be compared with table 1.
    return [
        base(layers=figures.LAYERS_OF_MODEL, stands_for={"layers": figures.LAYERS_OF_MODEL}),
        base(breakdown=True, layers=4, stands_for={"layers": 4}),
    ]


def _table_6(base: Callable[..., Run]) -> list[Run]:
    return [
        base(breakdown=True, modes=("paper", "hierarchical"), pages=row["pages"], stands_for={"pages": row["pages"]})
        for row in figures.TABLE_6
    ]


def _figure_1(base: Callable[..., Run]) -> list[Run]:
    return [base(modes=("hierarchical",), mean_history=figures.FIGURE_1["recompute_tokens"] // 3, max_history=4_000)]


EXPERIMENTS: dict[str, Experiment] = {
    "table1": Experiment(
        "end-to-end latency, speed-up and hit ratio", "table 1, section 5.2", ("trace", "pages"), _table_1
    ),
    "table2": Experiment("latency by step of Algorithm 1", "table 2, section 5.2", ("breakdown",), _table_2),
    "table3": Experiment("size of a host chunk", "table 3, section 5.4", ("chunk", "breakdown"), _table_3, (8,)),
    "table5": Experiment(
        "a model of half the layers", "table 5, appendix D.1", ("model", "layers", "breakdown"), _table_5
    ),
    "table6": Experiment(
        "capacity of the device tier", "table 6, appendix D.2", ("pages", "breakdown"), _table_6, (8,)
    ),
    "figure1": Experiment(
        "tokens processed by three consecutive requests of one user",
        "figure 1, section 1",
        ("batch_sizes", "modes", "requests", "pages", "host_bytes", "breakdown"),
        _figure_1,
        (1,),
    ),
}


def plan_runs(name: str, scale: str = "small", given: Mapping[str, Any] | None = None) -> list[Run]:
    """The runs of an experiment.

    Args:
        name: a key of `EXPERIMENTS`.
        scale: "small": histories and chunks are a sixteenth of the paper's, the model has half its layers and is
            narrower, users and requests are few; pages keep their share of what the users need. "full": the paper's
            sizes.
        given: fields of `ReplayOptions` that replace those of every run.

    Raises:
        ConfigError: the name or scale is unknown, or a given field is what the experiment varies.
    """
    if name not in EXPERIMENTS:
        raise ConfigError(f"--paper {name!r} is not known; use one of {', '.join(EXPERIMENTS)}")
    if scale not in SCALES:
        raise ConfigError(f"--scale {scale!r} is not known; use one of {', '.join(SCALES)}")
    experiment = EXPERIMENTS[name]
    given = dict(given or {})
    for option in experiment.varies:
        if option in given:
            raise ConfigError(f"--{option.replace('_', '-')} is set by --paper {name} itself; leave it out")
    size = _full if scale == "full" else _small

    def base(trace: str = "kuairand-like", *, stands_for: dict[str, Any] | None = None, **changes: Any) -> Run:
        pages = changes.pop("pages", figures.PAGES)
        run = size(trace, pages, {"batch_sizes": experiment.batch_sizes, **changes})
        share = None if "pages" in given else run.share
        return Run(dataclasses.replace(run.options, **given), share, {"trace": trace, **(stands_for or {})})

    return experiment.runs(base)


def _small(trace: str, pages: int, changes: dict[str, Any]) -> Run:
    # What two cores recompute in a minute or two.
    chosen: dict[str, Any] = {
        "trace": trace,
        "users": 400,
        "requests": 300,
        "mean_history": round(figures.MEAN_HISTORY[trace] / SHRINK),
        "max_history": round(figures.MAX_HISTORY[trace] / SHRINK),
        "candidates": 16,
        "model": "small",
        **changes,
    }
    chosen["chunk"] = chosen.get("chunk", figures.CHUNK) // SHRINK
    if "layers" in chosen:
        chosen["layers"] = chosen["layers"] * MODELS["small"].layers // figures.LAYERS_OF_MODEL
    return Run(ReplayOptions(**chosen), PAGES_SHARE * pages / figures.PAGES)


def _full(trace: str, pages: int, changes: dict[str, Any]) -> Run:
    chosen: dict[str, Any] = {
        "trace": trace,
        "users": figures.USERS[trace],
        # So many that most users come, as they do in the paper's whole traces.
        "requests": 8_000,
        "mean_history": figures.MEAN_HISTORY[trace],
        "max_history": figures.MAX_HISTORY[trace],
        "model": "paper",
        "chunk": figures.CHUNK,
        "pages": pages,
        **changes,
    }
    return Run(ReplayOptions(**chosen))
