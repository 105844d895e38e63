"""The replay: its plan, its measurement, its checks."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from mtserve_plugin import HierarchicalKVCache, InputError, NoCache, ops
from mtserve_plugin import batch as batches_of
from mtserve_plugin.cli import app
from mtserve_plugin.models import hstu
from mtserve_plugin.replay.checks import Difference
from mtserve_plugin.replay.options import MODES, ReplayOptions
from mtserve_plugin.replay.plan import Excerpt, ReplayPlan, grouped, plan_replay
from mtserve_plugin.replay.run import run_replay
from mtserve_plugin.steps import APPEND, ATTEND, COMMIT, LAYERS, OUTPUT, PREPARE, PROJECT, STEPS, WAIT
from mtserve_plugin.workload import Events, Requests, Trace, load_trace

# Seconds: a page budget that is too small for all, histories of up to several chunks.
_TINY = [
    *("--model", "tiny", "--requests", "24", "--users", "16", "--threads", "1"),
    *("--max-history", "400", "--mean-history", "150"),
]
_SIZES = ["--batch-sizes", "1,3", "--candidates", "9", "--chunk", "64", "--page-size", "16"]


class _Result:
    def __init__(self, *words: str, json_file: Path | None = None) -> None:
        extra = ["--json", str(json_file)] if json_file else []
        result = CliRunner().invoke(app, ["replay", *words, *extra])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        self.code = result.exit_code
        self.text = " ".join(result.output.split())
        self.json: dict[str, Any] = (
            json.loads(json_file.read_text(encoding="utf-8")) if json_file and json_file.exists() else {}
        )

    def row(self, mode: str, batch_size: int) -> dict[str, Any]:
        (row,) = [r for r in self.json["rows"] if (r["mode"], r["batch_size"]) == (mode, batch_size)]
        return row


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> _Result:
    return _Result(*_TINY, *_SIZES, "--pages", "80", json_file=tmp_path_factory.mktemp("replay") / "tiny.json")


def test_the_modes_agree(tiny: _Result) -> None:
    assert tiny.code == 0, tiny.text
    assert tiny.json["ok"]
    assert [(r["mode"], r["batch_size"]) for r in tiny.json["rows"]] == [(m, b) for b in (1, 3) for m in MODES]
    for row in tiny.json["rows"]:
        assert row["max_rel_error"] <= 1e-6
        latency = row["latency_ms"]
        assert 0 < latency["p50"] <= latency["p99"]
        assert 0 < latency["mean"] <= latency["p99"] * 1.001
        assert row["counters"]["requests"] == 24
        reference = tiny.row("recompute", row["batch_size"])
        assert row["speedup"] == pytest.approx(reference["latency_ms"]["mean"] / latency["mean"])
        assert row["counters"]["history_tokens"] == reference["counters"]["history_tokens"]


def test_hit_ratios(tiny: _Result) -> None:
    plan = _plan(ReplayOptions(requests=24, users=16, max_history=400, mean_history=150), 9)
    asked, committed = int(plan.timed.requests.history_length.sum()), int(plan.previous.sum())
    assert tiny.json["config"]["mean_history"] == pytest.approx(asked / 24)
    for size in (1, 3):
        nothing, device, paper, both = (tiny.row(mode, size) for mode in MODES)
        assert nothing["total_hit_ratio"] == nothing["warm_hit_ratio"] == nothing["lost_tokens"] == 0
        assert device["device_hit_ratio"] == device["total_hit_ratio"]
        assert 0 < device["total_hit_ratio"] < paper["total_hit_ratio"] < both["total_hit_ratio"] < 1
        assert both["warm_hit_ratio"] == 1 > paper["warm_hit_ratio"]
        assert both["lost_tokens"] == 0 < paper["lost_tokens"] < device["lost_tokens"]
        assert paper["counters"]["tail_write_backs"] == 0
        assert both["counters"]["host_hit_tokens"] > 0, "the host tier was never needed: too many pages"
        for row in (device, paper, both):
            assert row["total_hit_ratio"] == pytest.approx(row["counters"]["hit_tokens"] / asked)
            assert row["warm_hit_ratio"] == pytest.approx(row["counters"]["hit_tokens"] / committed)


def test_breakdown(tmp_path: Path, tiny: _Result) -> None:
    words = [*_TINY, "--batch-sizes", "3", "--pages", "80", "--chunk", "64", "--page-size", "16", "--breakdown"]
    result = _Result(*words, json_file=tmp_path / "r.json")
    assert result.code == 0, result.text
    for mode in MODES:
        row = result.row(mode, 3)
        steps = row["steps_ms"]
        assert set(steps) <= set(STEPS)
        assert (PREPARE in steps) == (COMMIT in steps) == (mode != "recompute")
        parts = (PROJECT, APPEND, WAIT, ATTEND, OUTPUT)
        assert 0 < sum(steps[name] for name in parts) < steps[LAYERS]
        whole = sum(taken for name, taken in steps.items() if name not in parts)
        assert 0.5 * row["latency_ms"]["mean"] < whole < row["latency_ms"]["mean"]
    for name in STEPS:
        assert name in result.text
    assert all(row["steps_ms"] == {} for row in tiny.json["rows"])
    assert STEPS[1] not in tiny.text


def test_with_pages_for_all_everything_committed_is_found(tmp_path: Path) -> None:
    result = _Result(
        *_TINY, "--batch-sizes", "3", "--modes", "device", "--pages", "2000", json_file=tmp_path / "r.json"
    )
    assert result.code == 0, result.text
    assert [row["mode"] for row in result.json["rows"]] == ["recompute", "device"]
    assert result.row("device", 3)["warm_hit_ratio"] == 1.0


def test_the_reader_sees_what_was_run(tiny: _Result) -> None:
    config = tiny.json["config"]
    assert (config["trace"], config["model"], config["seed"]) == ("kuairand-like", "tiny", 0)
    assert config["threads"] == tiny.json["machine"]["threads"] == 1
    assert config["caches"]["hierarchical"]["host_bytes"] > 0 == config["caches"]["device"]["host_bytes"]
    assert len({config["caches"][mode]["num_pages"] for mode in MODES}) == 1
    assert config["at_cap_policy"].startswith("stop: ")
    for wanted in (
        "kuairand-like, seed 0: 24 timed requests",
        f"mean {config['mean_history']:.0f} tokens",
        f"mean delta {config['mean_delta']:.1f}",
        config["at_cap_policy"],
        "80 pages of 16 tokens",
        "speed-up",
        "warm hit ratio",
        "history removed",
        "at most 1e-06 passes",
    ):
        assert wanted in tiny.text
    assert tiny.json["controls"]["history_removed"] > 1e-2
    assert tiny.json["controls"]["positions_shifted"] > 1e-2


def test_the_default_pages_are_a_fifth_of_the_working_set() -> None:
    options = ReplayOptions(
        model="tiny", requests=4, users=8, max_history=200, mean_history=80, batch_sizes=(1,), threads=1
    )
    config = run_replay(options).config
    assert config["pages"] == config["working_set_pages"] // 5


# ---- fairness ------------------------------------------------------------------------------------


def test_modes_take_turns_and_background_copies_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, bool]] = []
    forward = hstu.HSTURanker.forward

    def watched(model: hstu.HSTURanker, features: Any) -> torch.Tensor:
        cache = model.cache
        if isinstance(cache, NoCache):
            kind = "recompute"
        elif not cache.config.host_bytes:
            kind = "device"
        else:
            kind = "hierarchical" if cache.config.tail_write_back else "paper"
        for other in caches:
            assert other.stats()["transfers_in_flight"] == 0, "copies of another turn are still running"
        calls.append((kind, gc.isenabled()))
        return forward(model, features)

    caches: list[HierarchicalKVCache] = []
    build = HierarchicalKVCache.__init__

    def remembered(cache: HierarchicalKVCache, *args: Any, **options: Any) -> None:
        build(cache, *args, **options)
        caches.append(cache)

    monkeypatch.setattr(hstu.HSTURanker, "forward", watched)
    monkeypatch.setattr(HierarchicalKVCache, "__init__", remembered)
    options = ReplayOptions(
        model="tiny", requests=12, users=12, max_history=300, mean_history=120, batch_sizes=(2,), chunk=64, threads=1
    )
    steps: list[tuple[int, int]] = []
    result = run_replay(options, lambda _, done, total: steps.append((done, total)))
    timed = [kind for kind, collecting in calls if not collecting]
    turns = [timed[at : at + len(MODES)] for at in range(0, len(timed), len(MODES))]
    assert len(turns) == result.rows[0].batches >= 6
    for number, turn in enumerate(turns):
        assert turn == [*MODES[number % len(MODES) :], *MODES[: number % len(MODES)]]
    untimed = [kind for kind, collecting in calls if collecting]
    assert untimed.count("recompute") >= 3, "recompute was not warmed up"
    assert gc.isenabled()
    assert steps[-1] == (steps[-1][1] - 1, steps[-1][1]), "the progress bar does not end at its end"


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    options = ReplayOptions(
        model="tiny", requests=2, users=4, max_history=60, mean_history=30, batch_sizes=(1,), threads=before + 1
    )
    assert run_replay(options).config["threads"] == before + 1
    assert torch.get_num_threads() == before


# ---- checks --------------------------------------------------------------------------------------


def _fails(*messages: str) -> None:
    result = _Result(*_TINY, *_SIZES)
    assert result.code == 1, result.text
    for message in messages:
        assert message in result.text
    assert "speed-up" in result.text, "a failed check must not hide the table"


def test_a_wrong_position_behind_a_cached_prefix_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = hstu.places

    def wrong(times: Any, boundary: Any, now: Any, cached: torch.Tensor, *rest: Any) -> Any:
        return right(times, boundary, now, cached - (cached > 0).long(), *rest)

    monkeypatch.setattr(hstu, "places", wrong)
    _fails("hierarchical at batch size 3: scores differ from recompute by", "more than 1e-06")


def test_a_page_that_changes_under_the_cache_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = batches_of.CacheBatch.wait

    def wrong(batch: Any, layer: int, **options: Any) -> Any:
        table = right(batch, layer, **options)
        if table.indices.numel():
            batch.table[layer, int(table.indices[0])].mul_(1.01)
        return table

    monkeypatch.setattr(batches_of.CacheBatch, "wait", wrong)
    _fails("device at batch size 1: scores differ from recompute by")


def test_a_model_that_ignores_its_history_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "paged_hstu_attention", lambda q, k, v, *_: torch.zeros_like(v))
    _fails("control 'history removed'", "control 'positions shifted'", "it must exceed 1e-02")


def test_a_model_without_positions_fails_the_control(monkeypatch: pytest.MonkeyPatch) -> None:
    build = hstu.HSTURanker.__init__

    def blind(model: hstu.HSTURanker, *args: Any, **options: Any) -> None:
        build(model, *args, **options)
        with torch.no_grad():
            model.encoder._position_embeddings_weight.zero_()

    monkeypatch.setattr(hstu.HSTURanker, "__init__", blind)
    _fails("control 'positions shifted' changes the scores by 0.0e+00 only")


def test_difference() -> None:
    difference = Difference()
    assert difference.value == 0
    difference.add(torch.tensor([]), torch.tensor([]))
    difference.add(torch.tensor([1.0, -4.0]), torch.tensor([1.0, -4.0]))
    assert difference.value == 0
    difference.add(torch.tensor([0.5]), torch.tensor([0.25]))
    assert difference.value == 0.25 / 4
    difference.add(torch.tensor([float("nan")]), torch.tensor([1.0]))
    assert difference.value == float("inf")
    zero = Difference()
    zero.add(torch.tensor([0.5]), torch.tensor([0.0]))
    assert zero.value > 1e-2


# ---- traces --------------------------------------------------------------------------------------


def test_a_log_with_a_sliding_window(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    events = [
        f"{user},{generator.integers(50)},{1000 * visit + 7 * event}"
        for visit in range(12)
        for user in range(5)
        for event in range(6)
    ]
    log = tmp_path / "log.csv"
    log.write_text("user_id,item_id,timestamp\n" + "\n".join(events) + "\n", encoding="utf-8")
    words = ["--trace", str(log), "--requests", "20", "--model", "tiny", "--batch-sizes", "2", "--pages", "40"]
    words += ["--threads", "1"]
    slid = _Result(*words, "--max-history", "30", "--at-cap", "slide", json_file=tmp_path / "slid.json")
    grown = _Result(*words, json_file=tmp_path / "grown.json")
    assert slid.code == grown.code == 0, slid.text + grown.text
    assert "at cap slide: a history keeps its last 30 events" in slid.text
    assert slid.row("device", 2)["total_hit_ratio"] == 0
    assert grown.row("device", 2)["warm_hit_ratio"] == 1
    assert slid.json["config"]["mean_delta"] == 30
    assert grown.json["config"]["mean_delta"] == 6


class _Stream(Trace):
    """A trace of random visits that does not know its length."""

    def __init__(self, seed: int, requests: int, users: int, *, known: bool = True) -> None:
        generator = np.random.default_rng(seed)
        self.name = "stream"
        self.num_items, self.num_actions = 10, 2
        self.num_requests = requests if known else None
        user = generator.integers(-users, users, requests)
        grown = dict.fromkeys(np.unique(user).tolist(), 0)
        end = []
        for one in user.tolist():
            end.append(grown[one])
            grown[one] += int(generator.integers(0, 9) * generator.integers(0, 2))
        time = np.sort(generator.integers(0, 100, requests))
        start = np.zeros(requests, np.int64)
        self.all = Requests(user, time, start, np.array(end, np.int64), np.zeros(requests, np.bool_))

    def describe(self) -> dict[str, Any]:
        return {}

    def blocks(self, max_requests: int = 17) -> Iterator[Requests]:
        for begin in range(0, len(self.all), min(max_requests, 17)):
            yield self.all.take(slice(begin, begin + min(max_requests, 17)))

    def events(self, user: int) -> Events:
        zeros = np.zeros(1000, np.int64)
        return Events(zeros, zeros, zeros)


def _plan(options: ReplayOptions, warmup: int) -> ReplayPlan:
    return plan_replay(load_trace(options.trace, **options.trace_options()), options.requests, warmup)


def _equal(left: Requests, right: Requests) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left.columns, right.columns, strict=True))


@pytest.mark.parametrize(
    ("seed", "timed", "warmup", "known"), [(0, 40, 12, True), (1, 150, 30, False), (2, 200, 99, True)]
)
def test_plan(seed: int, timed: int, warmup: int, known: bool) -> None:
    trace = _Stream(seed, 200, 12, known=known)
    plan = plan_replay(trace, timed, warmup)
    warmup = min(warmup, 200 - timed)
    begin = 200 - timed - warmup
    assert _equal(plan.timed.requests, trace.all.take(slice(200 - timed, None)))
    assert _equal(plan.warmup.requests, trace.all.take(slice(begin, 200 - timed)))
    latest: dict[int, int] = {}
    for at in range(begin):
        latest[int(trace.all.user[at])] = at
    mine = set(trace.all.user[begin:].tolist())
    kept = sorted(at for user, at in latest.items() if user in mine and trace.all.end[at] > 0)
    assert _equal(plan.prefill.requests, trace.all.take(np.array(kept, np.int64)))

    length = {int(trace.all.user[at]): int(trace.all.end[at]) for at in kept}
    expected = []
    for at in range(begin, 200):
        user = int(trace.all.user[at])
        if at >= 200 - timed:
            expected.append(length.get(user, 0))
        length[user] = int(trace.all.end[at])
    assert plan.previous.tolist() == expected
    assert plan.pages(8) == sum(-(-tokens // 8) for tokens in length.values())
    assert sorted(length) == plan.users.tolist()
    assert plan.mean_delta == pytest.approx(np.mean(trace.all.end[200 - timed :] - np.array(expected)))


def test_a_trace_that_is_too_short_or_empty() -> None:
    with pytest.raises(InputError, match="has 5 requests; use --requests 5 or fewer"):
        plan_replay(_Stream(0, 5, 2), 6, 0)
    empty = _Stream(0, 5, 2)
    empty.all = Requests(*empty.all.columns[:3], empty.all.start, empty.all.invalidated)
    with pytest.raises(InputError, match="no history at all"):
        plan_replay(empty, 5, 0)


def test_batches_hold_a_user_once() -> None:
    trace = _Stream(3, 150, 9)
    groups = grouped(Excerpt(trace, trace.all), 6)
    assert _equal(Requests.concatenate(groups), trace.all)
    for group in groups:
        assert len(np.unique(group.user)) == len(group) <= 6
