"""`mtserve replay --paper`: presets, the paper's own figures, and where ours come from."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mtserve_plugin.cli import app
from mtserve_plugin.errors import ConfigError
from mtserve_plugin.replay.paper import figures
from mtserve_plugin.replay.paper.estimate import check_fits, estimate
from mtserve_plugin.replay.paper.experiments import EXPERIMENTS, SCALES, plan_runs
from mtserve_plugin.replay.paper.one_user import choose_visits
from mtserve_plugin.replay.run import load_plan
from mtserve_plugin.steps import LAYERS
from mtserve_plugin.workload import load_trace

TABLES = [name for name in EXPERIMENTS if name != "figure1"]
_TINY = "--requests 10 --users 8 --threads 1 --heads 2 --dim 8 --candidates 5"
_SEED = 7


class _Result:
    def __init__(self, name: str, *words: str, json_file: Path | None = None) -> None:
        extra = ["--json", str(json_file)] if json_file else []
        words = ("replay", "--paper", name, "--seed", str(_SEED), *words, *extra)
        # Wide enough for any latency: on a busy machine figures have more digits, and a cell that breaks is not found.
        result = CliRunner(env={"COLUMNS": "120"}).invoke(app, words)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        self.code = result.exit_code
        self.text = " ".join(result.output.split())
        self.json: dict[str, Any] = json.loads(json_file.read_text(encoding="utf-8")) if self._has(json_file) else {}

    @staticmethod
    def _has(json_file: Path | None) -> bool:
        return json_file is not None and json_file.exists()


# ---- presets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_presets(name: str, scale: str) -> None:
    runs = plan_runs(name, scale)
    shapes = [run.options.shape for run in runs]
    if scale == "full":
        assert {(s.heads, s.dim, s.dtype) for s in shapes} == {(4, 128, "bfloat16")}
        assert {run.options.page_size for run in runs} == {32}
    if name == "figure1":
        return
    assert all(run.options.batch_sizes == ((8,) if name in ("table3", "table6") else (1, 4, 8)) for run in runs)
    # Every row of the paper has a run that stands for it.
    for row in figures.FIGURES[name]:
        standing = [run for run in runs if all(row.get(key, value) == value for key, value in run.stands_for.items())]
        assert len(standing) == 1
        options, share = standing[0].options, standing[0].share
        assert row["batch_size"] in options.batch_sizes
        assert row["mode"] in options.ordered_modes
        layers, chunk, pages = row.get("layers", 8), row.get("chunk", 1024), row.get("pages", 40_960)
        if scale == "full":
            assert (options.shape.layers, options.chunk, options.pages) == (layers, chunk, pages)
            assert options.users == (2_884 if row["trace"] == "mt-like" else 1_000)
            assert options.max_history == (6_000 if row["trace"] == "mt-like" else 20_000)
        else:
            assert (2 * options.shape.layers, 16 * options.chunk) == (layers, chunk)
            # Table 4: 1,000 users with 6,375 tokens each.
            assert share == pytest.approx(pages * 32 / 6_375_000)


def test_options_replace_the_presets_unless_they_are_what_varies() -> None:
    runs = plan_runs("table3", given={"requests": 5, "pages": 99})
    assert [(run.options.requests, run.options.pages, run.share) for run in runs] == [(5, 99, None)] * 4
    for name, field, value in (
        ("table1", "trace", "x"),
        ("table3", "chunk", 64),
        ("table5", "layers", 2),
        ("table6", "pages", 9),
    ):
        with pytest.raises(ConfigError, match=f"--{field} is set by --paper {name} itself"):
            plan_runs(name, given={field: value})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--paper", "table4"], "use one of table1, table2, table3, table5, table6, figure1"),
        (["--paper", "table1", "--scale", "huge"], "use one of small, full"),
        (["--paper", "table6", "--pages", "9"], "leave it out"),
        (["--paper", "table1", "--report", "x.html"], "does not go with --paper"),
        (["--scale", "full"], "belongs to --paper"),
    ],
)
def test_refusals(words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["replay", *words])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


# ---- the paper's figures -------------------------------------------------------------------------


def test_figures_are_those_of_the_text() -> None:
    """Numbers that the paper states in its sentences, not in its tables, must follow from the tables as typed."""

    def one(table: str, **keys: Any) -> dict[str, Any]:
        (row,) = [row for row in figures.FIGURES[table] if all(row[key] == value for key, value in keys.items())]
        return row

    kuairand = {"trace": "kuairand-like", "batch_size": 8}
    assert one("table1", **kuairand, mode="paper")["speedup"] == 3.04
    assert one("table1", trace="mt-like", batch_size=8, mode="paper")["total_hit_ratio"] == 0.9871
    steps = {mode: one("table2", **kuairand, mode=mode)["steps_ms"][LAYERS] for mode in figures.MODES}
    assert round(steps["recompute"] - steps["paper"], 1) == 87.6
    assert round(steps["device"] / steps["paper"], 2) == 1.67
    assert one("table5", batch_size=8, layers=4, mode="paper")["latency_ms"] == 27.0
    assert one("table6", pages=20_480)["speedup"] == pytest.approx(1.69, abs=0.01)
    assert figures.FIGURE_1["recompute_tokens"] == 4_031
    assert figures.FIGURE_1["reuse_tokens"] == 529


def test_columns_add_up() -> None:
    """Speed-ups and latencies follow from other figures, so a step in the wrong column or a wrong digit shows."""
    for row in figures.TABLE_1 + figures.TABLE_5:
        alike = [
            other
            for other in figures.TABLE_1 + figures.TABLE_5
            if other["mode"] == "recompute"
            and all(other.get(key) == row.get(key) for key in ("trace", "batch_size", "layers"))
        ]
        # Table 1 rounds MT's 14.1 / 11.7 up, table 5 KuaiRand's 143.6 / 47.3 too.
        assert row["speedup"] == pytest.approx(alike[0]["latency_ms"] / row["latency_ms"], abs=0.016)
    for row in figures.TABLE_2 + [row for row in figures.TABLE_5 if "steps_ms" in row]:
        assert sum(row["steps_ms"].values()) == pytest.approx(row["latency_ms"], abs=0.5)


# ---- ours ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], _Result]:
    folder = tmp_path_factory.mktemp("paper")

    @functools.cache
    def run(name: str) -> _Result:
        words = _TINY.split()
        words += [] if name in ("table3", "table6") else ["--batch-sizes", "1,8"]
        words += [] if name == "table1" else ["--mean-history", "100", "--max-history", "300"]
        words += [] if name == "table5" else ["--layers", "1"]
        return _Result(name, *words, json_file=folder / f"{name}.json")

    return run


@pytest.mark.parametrize("name", TABLES)
def test_tables(name: str, results: Callable[[str], _Result]) -> None:
    result = results(name)
    assert result.code == 0, result.text
    values = result.json
    assert set(values) >= {"experiment", "scale", "rows", "paper"}
    assert values["paper"] == figures.FIGURES[name]
    assert (values["experiment"], values["scale"]["name"]) == (name, "small")
    assert "show shape only" in result.text
    # Ours: from runs of the options given.
    for run in values["scale"]["runs"]:
        assert (run["requests"], run["dim"], run["candidates"], run["seed"]) == (10, 8, 5, _SEED)
        assert f"{run['pages']} ({run['pages_share']:.1%})" in result.text
    for row in values["rows"]:
        assert row["requests"] == 10
        assert row["max_rel_error"] <= 1e-6
        assert row["latency_ms"]["mean"] > 0
        if row["mode"] in figures.MODES:
            assert f"{row['latency_ms']['mean']:.1f}" in result.text
    # The paper's: whatever stands beside a row of ours.
    for row in values["paper"]:
        if row["batch_size"] in (1, 8):
            assert f"{row['latency_ms']:.1f}" in result.text
            assert "speedup" not in row or name == "table2" or f"{row['speedup']:.2f}x" in result.text
    for wanted in _PAPER_SAYS[name]:
        assert wanted in result.text


_PAPER_SAYS = {
    "table1": ("94.66%", "98.71%", "82.4", "96.73%"),
    "table2": ("127.40", "66.30", "39.80", "6 await metadata"),
    "table3": ("34.64", "17.74", "57.6", "its text 17.09 ms"),
    "table5": ("2.68x", "98.56%", "20.40", "94.66 %"),
    "table6": ("20,480 (10 GB)", "61,440 (30 GB)", "84.7", "1.70x"),
}


def test_each_sweep_changes_what_it_says(results: Callable[[str], _Result]) -> None:
    runs = {name: results(name).json for name in ("table3", "table6")}
    assert [run["chunk"] for run in runs["table3"]["scale"]["runs"]] == [32, 64, 128, 256]
    assert len({run["pages"] for run in runs["table3"]["scale"]["runs"]}) == 1
    pages = [run["pages"] for run in runs["table6"]["scale"]["runs"]]
    assert pages == sorted(pages)
    assert pages[-1] == pytest.approx(3 * pages[0], abs=2)
    for row in runs["table3"]["rows"]:
        whole = row["wait_ms"] + row["compute_ms"]
        assert whole == pytest.approx(row["steps_ms"][LAYERS])
        assert row["wait_ms"] == pytest.approx(row["counters"].get("layer_wait_ns", 0) / 1e6 / row["batches"])
        assert 0 <= row["wait_ms"] < whole
    waited = [row["wait_ms"] for row in runs["table3"]["rows"] if row["mode"] != "recompute"]
    assert max(waited) > 0


def test_figure_1(tmp_path: Path) -> None:
    words = ["--users", "6", "--max-history", "600", "--mean-history", "450", "--candidates", "5"]
    words += ["--layers", "1", "--heads", "2", "--dim", "8", "--threads", "1"]
    result = _Result("figure1", *words, json_file=tmp_path / "r.json")
    assert result.code == 0, result.text
    rows = result.json["rows"]
    trace = load_trace("kuairand-like", **plan_runs("figure1", given=_given(words))[0].options.trace_options())
    visits = choose_visits(trace, 3)
    assert len(set(visits.user.tolist())) == 1
    lengths = visits.history_length.tolist()
    assert result.json["scale"]["runs"][0]["filled_with"] == lengths[0]
    for row, before, length in zip(rows, lengths[:-1], lengths[1:], strict=True):
        assert row["history"] == length > before
        assert row["encoded"] == {"recompute": length, "reuse": length - before}
        assert row["processed"] == {"recompute": length + 5, "reuse": length - before + 5}
    for wanted in ("4,031", "529", "7.6x", f"{sum(lengths[1:]):,}", "█"):
        assert wanted in result.text


def _given(words: list[str]) -> dict[str, Any]:
    return {"seed": _SEED} | {
        name.removeprefix("--").replace("-", "_"): int(value)
        for name, value in zip(words[::2], words[1::2], strict=True)
    }


# ---- the full scale ------------------------------------------------------------------------------


def test_the_full_scale_is_estimated_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    options = plan_runs("table2", "full")[0].options
    _, plan = load_plan(options)
    needs = estimate(options, plan, rate=1e12)
    # Appendix C: 8 layers x pages x 2 x 32 x 4 x 128 x 2 bytes, in each of three caches.
    assert needs.table_bytes == 3 * 8 * 40_960 * 2 * 32 * 4 * 128 * 2
    tokens = int(plan.longest.sum())
    assert 2 * tokens * 16_384 < needs.host_bytes < 2 * (tokens + 2 * 1024 * len(plan.users)) * 16_384
    assert plan.pages(32) > 2 * 40_960
    assert needs.seconds > 0
    machine = {"memory_bytes": needs.memory_bytes}
    monkeypatch.setattr("mtserve_plugin.replay.paper.estimate.describe_machine", lambda: machine)
    with pytest.raises(ConfigError, match=r"page tables of 60\.0 GiB .*Use --scale small"):
        check_fits([needs])
    machine["memory_bytes"] *= 2
    check_fits([needs])
