"""`--report`: one page that stands alone and says what the JSON says."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mtserve_plugin.cli import app
from mtserve_plugin.report_html import render_report
from mtserve_plugin.report_html.svg import log_ticks, nice_ticks
from mtserve_plugin.report_html.timeline import measure

_TINY = [
    *("--model", "tiny", "--requests", "40", "--users", "16", "--threads", "1", "--batch-sizes", "1,3"),
    *("--max-history", "400", "--mean-history", "150", "--pages", "80", "--chunk", "64", "--page-size", "16"),
]
_VOID = {"meta", "br", "wbr", "rect", "path", "line", "circle"}
_SECTIONS = (
    *("summary", "results", "latency-section", "hits-section", "timeline-section", "capacity-section"),
    *("configuration", "machine"),
)
_FIGURES = ("latency", "hits", "timeline-direct", "timeline-staged", "capacity")


class _Page(HTMLParser):
    """A page taken apart; refuses tags that do not nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.drawn: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            (self.drawn if "svg" in self._open else self.texts).append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).replace("\xad", "").split())

    def attributes(self, name: str) -> list[str]:
        return [str(values[name]) for _, values in self.tags if name in values]


def _run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("report")
    page, values = folder / "replay.html", folder / "replay.json"
    code, text = _run("replay", *_TINY, "--breakdown", "--report", str(page), "--json", str(values))
    assert code == 0, text
    return json.loads(values.read_text(encoding="utf-8")), page.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    values = tmp_path_factory.mktemp("report") / "simulate.json"
    sizes = ["--pages", "500,1000,2000", "--batch-sizes", "1,4"]
    code, text = _run("simulate", "--users", "50", "--requests", "1500", *sizes, "--json", str(values))
    assert code == 0, text
    return json.loads(values.read_text(encoding="utf-8"))


# ---- the page ------------------------------------------------------------------------------------


def test_the_page_stands_alone(replay: tuple[dict[str, Any], str], simulation: dict[str, Any]) -> None:
    for html in (replay[1], render_report(simulation)):
        page = _Page(html)
        tags = {tag for tag, _ in page.tags}
        assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "use"}
        assert not set(page.attributes("src"))
        assert all(link.startswith("#") for link in page.attributes("href"))
        assert "//" not in html
        assert "@import" not in html
        assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", html))
        assert len(html.encode()) < 1_000_000
        assert "width=device-width" in html


def test_everything_is_there_once(replay: tuple[dict[str, Any], str]) -> None:
    page = _Page(replay[1])
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    assert set(_SECTIONS) | {"steps"} == {str(v["id"]) for tag, v in page.tags if tag == "section"}
    assert {link[1:] for link in page.attributes("href")} == set(_SECTIONS) | {"steps"}
    drawings = [values for tag, values in page.tags if tag == "svg"]
    assert [d["class"] for d in drawings] == ["narrow", "wide"] * len(_FIGURES)
    for used in re.findall(r"url\(#([^)]*)\)", replay[1]):
        assert used in ids
    for drawing in drawings:
        # Letters of 12 units in 336 stay 12 pixels high on a phone of 360.
        assert float(str(drawing["font-size"])) >= 12
        assert float(str(drawing["viewbox"]).split()[2]) in (336, 700)


def test_its_numbers_are_those_of_the_json(replay: tuple[dict[str, Any], str]) -> None:
    result, html = replay
    page = _Page(html)
    rows = result["rows"]
    for size in (1, 3):
        shown = [row for row in rows if row["batch_size"] == size]
        for name, values in (
            ("latency mean (ms)", [f"{row['latency_ms']['mean']:.1f}" for row in shown]),
            ("latency p99 (ms)", [f"{row['latency_ms']['p99']:.1f}" for row in shown]),
            ("speed-up", [f"{row['speedup']:.2f}x" for row in shown]),
            ("total hit ratio", ["-", *(f"{100 * row['total_hit_ratio']:.2f}%" for row in shown[1:])]),
            ("lost tokens", ["-", *(f"{row['lost_tokens']:,}" for row in shown[1:])]),
        ):
            cells = r"</th><td[^>]*>".join([re.escape(name), r"</td><td[^>]*>".join(map(re.escape, values))])
            assert re.search(cells, html), (size, name)
    last = rows[-1]
    assert f"take {last['latency_ms']['p50']:.1f} ms or less with hierarchical" in page.text
    assert f"finds {100 * last['total_hit_ratio']:.1f} % of all history tokens" in page.text
    for row in rows:
        assert f"{row['latency_ms']['p50']:.1f}" in page.drawn
    for name, value in (("options.seed", "0"), ("caches.hierarchical.host_bytes", None), ("machine", None)):
        assert name in page.text
        assert value is None or f"{name} {value}" in page.text or f"{name}{value}" in page.text
    assert str(result["config"]["caches"]["hierarchical"]["host_bytes"]) in page.text
    assert result["machine"]["cpu"] in page.text
    for step in last["steps_ms"]:
        assert step in page.text


def test_the_same_json_gives_the_same_page(replay: tuple[dict[str, Any], str]) -> None:
    assert render_report(copy.deepcopy(replay[0])) == replay[1]


def test_names_from_outside_are_escaped(replay: tuple[dict[str, Any], str], simulation: dict[str, Any]) -> None:
    evil = "</title></svg><script>alert('x')</script>&amp;\"' onload=\""
    result = copy.deepcopy(replay[0])
    result["config"]["trace"] = result["config"]["options"]["trace"] = evil
    result["config"]["trace_description"] = {evil: evil}
    result["config"]["at_cap_policy"] = result["machine"]["cpu"] = evil
    result["problems"], result["ok"] = [evil], False
    for row in [*result["rows"], *result["detail"]["batches"], *result["detail"]["capacity"]["rows"]]:
        row["mode"] = evil if row["mode"] == "hierarchical" else row["mode"]
    simulated = copy.deepcopy(simulation)
    simulated["config"]["options"]["trace"] = evil
    for row in simulated["rows"]:
        row["policy"] = evil if row["policy"] == "ours" else row["policy"]
    for html, tags in ((render_report(result), replay[1]), (render_report(simulated), render_report(simulation))):
        page = _Page(html)
        assert {tag for tag, _ in page.tags} <= {tag for tag, _ in _Page(tags).tags}
        assert not page.attributes("onload")
        assert evil in "".join(page.texts)


def test_failed_checks_come_first(replay: tuple[dict[str, Any], str]) -> None:
    result = copy.deepcopy(replay[0])
    result["ok"], result["problems"] = False, ["device at batch size 1: scores differ"]
    text = _Page(render_report(result)).text
    assert "FAILED: device at batch size 1: scores differ" in text.split("Results")[1]
    assert "All scores agree" not in text
    assert "All scores agree" in _Page(replay[1]).text


# ---- what is recorded for it ---------------------------------------------------------------------


def test_every_batch_is_recorded(replay: tuple[dict[str, Any], str]) -> None:
    detail = replay[0]["detail"]
    for row, run in zip(replay[0]["rows"], detail["batches"], strict=True):
        assert (run["mode"], run["batch_size"]) == (row["mode"], row["batch_size"])
        assert len(run["latency_ms"]) == row["batches"]
        assert sum(run["latency_ms"]) / row["batches"] == pytest.approx(row["latency_ms"]["mean"])
        assert sum(run["requests"]) == row["requests"]
        for name in ("history_tokens", "device_hit_tokens", "host_hit_tokens"):
            assert sum(run[name]) == row["counters"].get(name, 0)


def test_the_sweep_meets_the_measurement(replay: tuple[dict[str, Any], str]) -> None:
    capacity = replay[0]["detail"]["capacity"]
    measured = {row["mode"]: row for row in replay[0]["rows"] if row["batch_size"] == capacity["batch_size"] == 3}
    modes = {row["mode"] for row in capacity["rows"]}
    assert modes == {"device", "paper", "hierarchical"}
    for mode in modes:
        rows = [row for row in capacity["rows"] if row["mode"] == mode]
        (own,) = [row for row in rows if row["pages"] == 80]
        for ratio in ("device_hit_ratio", "total_hit_ratio"):
            assert own[ratio] == pytest.approx(measured[mode][ratio], abs=0.01)
        assert rows[0]["device_hit_ratio"] < own["device_hit_ratio"] < rows[-1]["device_hit_ratio"]


def test_the_timeline(replay: tuple[dict[str, Any], str]) -> None:
    overlaps = replay[0]["detail"]["overlaps"]
    assert [overlap["strategy"] for overlap in overlaps] == ["direct", "staged"]
    for overlap in overlaps:
        assert overlap["mode"] == "hierarchical"
        batches = overlap["batches"]
        assert len(batches) == 6
        assert batches[0][0] == 0
        assert all(begin < end for begin, end in batches)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(batches))
        found: dict[str, list[tuple[float, float]]] = {}
        for stream, _, begin, end in overlap["spans"]:
            assert 0 <= begin <= end
            found.setdefault(stream, []).append((begin, end))
        assert max(end for _, end in found["caller"]) <= batches[-1][1]
        assert found["onload"]
        assert found["offload"]
        assert ("scatter" in found) == (overlap["strategy"] == "staged")
        for stream in {"onload", "offload", "scatter"} & set(found):
            spans = sorted(found[stream])
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), "a stream does one thing at once"
        measured = measure(overlap)
        assert 0 < measured.hidden <= measured.copying
        assert 0 <= measured.waiting < measured.batches


def test_streams_have_lanes_of_their_own_inside_the_plot() -> None:
    overlap = {
        **{"mode": "hierarchical", "strategy": "staged", "batch_size": 1, "first_batch": 4},
        "batches": [(0.0, 10.0), (10.0, 20.0)],
        "spans": [
            ("caller", "8.1 compute q, k, v", 0.0, 6.0),
            ("caller", "8.3 wait for layer", 6.0, 10.0),
            ("onload", "onload copy", 2.0, 8.0),
            ("scatter", "scatter", 8.0, 9.0),
            ("offload", "offload copy", 15.0, 25.0),
        ],
    }
    # Of the onload 4 of 6 ms, of the scatter nothing, of the offload the half that lies in a batch.
    assert measure(overlap) == (17.0, 9.0, 4.0, 20.0)
    from mtserve_plugin.report_html.timeline import timeline_figure

    html = timeline_figure(overlap).to_html()
    assert "17.00 ms of copying, 53&nbsp;% of it" in html
    narrow = html.split("</svg>")[0].split("6 batches")[0].split("2 batches</text>")[1].split("enlarged")[0]
    boxes = re.findall(r'<path d="M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h-[\d.]+z" fill="([^"]*)"', narrow)
    lanes = {y: (float(x), float(width)) for x, y, width, _, fill in boxes if "hatch" not in fill}
    assert len(lanes) == 4
    plot, ends = 336 - 58 - 12, 25.0
    starts = [(x - 58) / plot * ends for x, _ in lanes.values()]
    lengths = [width / plot * ends for _, width in lanes.values()]
    assert starts == pytest.approx([0, 2, 8, 15], abs=0.05)
    assert lengths == pytest.approx([6, 6, 1, 10], abs=0.05)


# ---- runs that lack something --------------------------------------------------------------------


def test_without_a_report_nothing_more_is_measured(tmp_path: Path) -> None:
    values = tmp_path / "r.json"
    code, text = _run("replay", *_TINY, "--modes", "recompute", "--json", str(values))
    assert code == 0, text
    result = json.loads(values.read_text(encoding="utf-8"))
    assert "detail" not in result
    assert "Not recorded" in _Page(render_report(result)).text


@pytest.mark.parametrize("modes", ["recompute", "device", "paper"])
def test_any_modes_make_a_page(tmp_path: Path, modes: str) -> None:
    page = tmp_path / "r.html"
    words = [*_TINY, "--requests", "3", "--batch-sizes", "2", "--modes", modes]
    code, _text = _run("replay", *words, "--report", str(page))
    html = page.read_text(encoding="utf-8")
    assert code == 0 or "FAILED" in html
    drawn = sum(tag == "figure" for tag, _ in _Page(html).tags)
    assert drawn == {"recompute": 1, "device": 3, "paper": 5}[modes]


def test_a_page_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    for path, words in ((tmp_path, "is a folder"), (tmp_path / "no" / "r.html", "does not exist; create it first")):
        code, text = _run("replay", "--requests", "1000000", "--report", str(path))
        assert code == 2
        assert words in text
        assert "--report" in text
        assert "--json" not in text


def test_a_simulation(simulation: dict[str, Any]) -> None:
    page = _Page(render_report(simulation))
    assert [values["class"] for tag, values in page.tags if tag == "svg"] == ["narrow", "wide"] * 2
    rows = [row for row in simulation["rows"] if row["policy"] == "ours" and row["batch_size"] == 4]
    first, last = (f"{100 * row['total_hit_ratio']:.1f} %" for row in (rows[0], rows[-1]))
    assert f"of ours: {first} at 500, {last} at 2,000" in page.text
    for row in simulation["rows"]:
        assert f"{100 * row['total_hit_ratio']:.2f}" in page.text
    one = copy.deepcopy(simulation)
    one["rows"] = one["rows"][:1]
    assert "every size had one value only" in _Page(render_report(one)).text


@pytest.mark.parametrize(("low", "high"), [(0.02, 0.021), (3.0, 5.0), (1.0, 1e4), (0.0001, 3000.0), (0.5, 1.0)])
@pytest.mark.parametrize("most", [3, 6, 12])
def test_ticks(low: float, high: float, most: int) -> None:
    for ticks in (nice_ticks(low, high, most), log_ticks(low, high, most)):
        assert 1 <= len(ticks) <= most
        assert ticks == sorted(set(ticks))
        assert low * (1 - 1e-9) <= ticks[0] <= ticks[-1] <= high * (1 + 1e-9)
