"""Simulation: the counters of the cache that serves, the paper's hit ratios at full scale, what is printed."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from mtserve_plugin import CacheConfig, ConfigError, HierarchicalKVCache
from mtserve_plugin.cli import app
from mtserve_plugin.replay.options import ReplayOptions
from mtserve_plugin.replay.plan import plan_replay
from mtserve_plugin.replay.run import run_replay
from mtserve_plugin.simulate.options import BASE, POLICIES, Point, SimulateOptions
from mtserve_plugin.simulate.run import IndexRun, SimulateRow, run_simulation
from mtserve_plugin.simulate.table import print_simulation
from mtserve_plugin.workload import Requests, Trace, batches, load_trace

COUNTERS = (
    "requests",
    "history_tokens",
    "hit_tokens",
    "device_hit_tokens",
    "host_hit_tokens",
    "stored_tokens",
    "lost_tokens",
    "rows_without_room",
    "onloads",
    "onload_tokens",
    "offloads",
    "offload_tokens",
    "tail_write_backs",
    "device_evicted_pages",
    "host_evicted_tokens",
)

# Two write-backs that are told to start at the same time start in either order on real threads.
_ORDERS = ("offload_tokens", "tail_write_backs")


def counted(stats: dict[str, int], before: dict[str, int] | None = None) -> dict[str, int]:
    return {name: stats[name] - (before[name] if before else 0) for name in COUNTERS}


def small_config(policy: str, pages: int = 90, host_chunks: int = 40) -> CacheConfig:
    config = CacheConfig(
        num_layers=1,
        num_heads=1,
        qk_dim=4,
        v_dim=4,
        attn_norm_len=64,
        dtype="float32",
        page_size=8,
        num_pages=pages,
        chunk_size=64,
        tail_write_back=policy == "ours",
    )
    return config if policy == "device" else config.replace(host_bytes=host_chunks * config.chunk_bytes)


def served(trace: Trace, config: CacheConfig, batch_size: int) -> dict[str, int]:
    """Counters of a real cache, contents checked, that is given time for its copies."""
    with HierarchicalKVCache(config) as cache:
        for requests in batches(trace, batch_size, distinct_users=True):
            lengths = requests.history_length
            row = np.repeat(np.arange(len(requests)), lengths)
            place = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths) + requests.start[row]
            hashes = torch.from_numpy(requests.user[row] * 1_000_003 + place + 1)
            candidates = torch.zeros(len(requests), dtype=torch.int64)
            with cache.batch(
                torch.from_numpy(np.ascontiguousarray(requests.user)),
                torch.from_numpy(lengths),
                num_candidates=candidates,
                token_hashes=hashes,
            ) as batch:
                q = torch.randn(int(batch.offsets[-1]), 1, 4)
                batch.attend(0, q, q, q)
                cache.drain()
            cache.drain()
        return counted(cache.stats())


def simulated(trace: Trace, config: CacheConfig, batch_size: int, block: int = 97, delay: int = 0) -> IndexRun:
    run = IndexRun(config, batch_size, delay)
    for requests in trace.blocks(block):
        run.feed(requests)
    run.finish()
    assert run.check() == ""
    return run


@pytest.mark.parametrize("policy", ["device", "paper", "ours"])
@pytest.mark.parametrize("at_cap", ["stop", "slide", "step:40"])
def test_counters_equal_the_cache_s(policy: str, at_cap: str) -> None:
    seed = POLICIES.index(policy) + 10 * len(at_cap)
    trace = load_trace(
        "kuairand-like",
        users=24,
        requests=900,
        max_history=260,
        mean_history=150,
        new_tokens=5.0,
        at_cap=at_cap,
        seed=seed,
        session_requests=4.0,
    )
    # Enough for nothing to be lost with write-back of tails: what is found behind a loss depends on the content check.
    config = small_config(policy, *((240, 200) if policy == "ours" else (90 + seed % 30, 40)))
    found = simulated(trace, config, 4).stats()
    mine, real = counted(found), served(trace, config, 4)
    if policy == "ours":
        for name in (*_ORDERS, "offloads"):
            mine.pop(name), real.pop(name)
    assert mine == real
    assert found["device_hit_tokens"] > 0
    assert (found["host_hit_tokens"] > 0) == (policy != "device")
    assert (found["lost_tokens"] > 0) == (policy != "ours")
    requests = Requests.concatenate(list(trace.blocks()))
    last: dict[int, int] = {}
    before = 0
    for user, length, moved in zip(
        requests.user.tolist(), requests.history_length.tolist(), requests.invalidated.tolist(), strict=True
    ):
        before += 0 if moved else min(last.get(user, 0), length)
        last[user] = length
    assert found["committed_before_tokens"] == before >= found["hit_tokens"]


def test_counters_equal_replay_s(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = HierarchicalKVCache.commit

    def after_copies(cache: HierarchicalKVCache, *words: Any) -> Any:
        # A copy that is reported late makes no difference to a model, but to the moment of a write-back.
        cache.drain()
        return commit(cache, *words)

    monkeypatch.setattr(HierarchicalKVCache, "commit", after_copies)
    options = ReplayOptions(
        model="tiny",
        requests=48,
        users=24,
        max_history=300,
        mean_history=150,
        batch_sizes=(4,),
        page_size=16,
        pages=100,
        chunk=64,
        candidates=3,
        threads=1,
    )
    replayed = run_replay(options)
    plan = plan_replay(load_trace(options.trace, **options.trace_options()), 48, 12)
    for row in replayed.rows[1:]:
        index = IndexRun(CacheConfig.from_dict(replayed.config["caches"][row.mode]), 4)
        for part in (plan.prefill, plan.warmup):
            index.feed(part.requests)
            index.finish()
        before = index.stats()
        index.feed(plan.timed.requests)
        index.finish()
        found = index.stats()
        compared = [name for name in COUNTERS if name in row.counters and name not in _ORDERS]
        changed = {name: found[name] - before[name] for name in compared}
        assert changed == {name: row.counters[name] for name in compared}
        assert len(compared) >= 8
        assert (changed["host_hit_tokens"] > 0) == (row.mode != "device")
        committed = found["committed_before_tokens"] - before["committed_before_tokens"]
        assert changed["hit_tokens"] / committed == row.warm_hit_ratio


@pytest.mark.parametrize("delay", [1, 5])
def test_late_offloads_keep_the_invariants_and_end(delay: int) -> None:
    trace = load_trace(
        "kuairand-like", users=30, requests=2000, max_history=400, mean_history=250, new_tokens=4.0, seed=delay
    )
    prompt, late = (simulated(trace, small_config("ours"), 3, delay=d).stats() for d in (0, delay))
    assert late["transfers_in_flight"] == late["pending_offload_tokens"] == late["open_batches"] == 0
    assert late["requests"] == prompt["requests"] == 2000
    assert counted(late) != counted(prompt)


@pytest.mark.parametrize("batch_size", [1, 5])
def test_blocks_are_cut_anywhere_and_batches_hold_a_user_once(batch_size: int) -> None:
    trace = load_trace("mt-like", users=9, requests=700, max_history=500, mean_history=450, new_tokens=2.0, seed=3)
    found = [simulated(trace, small_config("paper"), batch_size, block=block).stats() for block in (1, 64, 700)]
    assert counted(found[0]) == counted(found[1]) == counted(found[2])
    assert found[0]["batches"] == len(list(batches(trace, batch_size, distinct_users=True)))


@pytest.mark.parametrize("host_chunks", [1, 3, 8, 20])
def test_a_small_host_tier_does_no_harm(host_chunks: int) -> None:
    trace = load_trace(
        "kuairand-like", users=40, requests=4000, max_history=260, mean_history=150, new_tokens=2.0, seed=host_chunks
    )
    device = simulated(trace, small_config("device", 300), 4).stats()
    found = simulated(trace, small_config("ours", 300, host_chunks), 4).stats()
    assert found["hit_tokens"] >= device["hit_tokens"]
    assert found["device_hit_tokens"] > 0.99 * device["device_hit_tokens"]
    assert found["lost_tokens"] <= device["lost_tokens"]


def test_bad_columns_are_refused() -> None:
    one = np.ones(1, np.int64)
    with pytest.raises(ValueError, match=r"lengths\[0\] is -1"):
        IndexRun(small_config("paper"), 2).feed(Requests(one, one, 2 * one, one, np.zeros(1, np.bool_)))


# ---- full scale ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("trace", "device", "total"), [("kuairand-like", 0.6436, 0.9859), ("mt-like", 0.6173, 0.9871)])
def test_calibrated_to_the_paper_and_without_lost_tails(trace: str, device: float, total: float) -> None:
    options = SimulateOptions(trace=trace, policies=("paper", "ours"), batch_sizes=(8,))
    paper, ours = run_simulation(options).rows
    assert (paper.status, ours.status) == ("calibrated", "predicted")
    assert paper.device_hit_ratio == pytest.approx(device, abs=0.02)
    assert paper.total_hit_ratio == pytest.approx(total, abs=0.004)
    assert (paper.paper["device_hit_ratio"], paper.paper["total_hit_ratio"]) == pytest.approx((device, total))
    assert paper.lost_tokens > 0 == ours.lost_tokens
    assert ours.warm_hit_ratio == 1.0
    assert ours.total_hit_ratio >= 0.998
    assert paper.bytes_onloaded == paper.counters["onload_tokens"] * 16_384


# ---- command line --------------------------------------------------------------------------------


def command(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["simulate", *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(result.output.split())


def test_rows_table_and_plot(tmp_path: Path) -> None:
    words = ["--users", "2000", "--requests", "6000", "--policy", "recompute,device,paper,ours", "--pages", "4000,9000"]
    words += ["--host-bytes", "64GiB", "--trace", "ten-million"]
    code, text = command(*words, "--json", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "plot.svg"))
    assert code == 0, text
    result = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert set(result["rows"][0]) == set(SimulateRow.__dataclass_fields__)
    assert [(r["policy"], r["pages"]) for r in result["rows"]] == [
        ("recompute", BASE.pages),
        *((p, n) for p in POLICIES[1:] for n in (4000, 9000)),
    ]
    for row in result["rows"]:
        assert (row["requests"], row["status"], row["paper"]) == (6000, "-", {})
        assert 0 <= row["device_hit_ratio"] <= row["total_hit_ratio"] <= row["warm_hit_ratio"] <= 1
        assert row["missed_tokens"] == pytest.approx((1 - row["total_hit_ratio"]) * row["mean_history"])
        assert (row["index_us_per_batch"] > 0) == (row["policy"] != "recompute")
    assert result["rows"][-1]["warm_hit_ratio"] == 1
    assert result["memory_peak_bytes"] >= result["memory_before_bytes"] > 0
    for wanted in ("ten-million, seed 0: 6,000 requests", "lost tokens", "64.0 GiB, 16.0 KiB per token"):
        assert wanted in text
    assert (tmp_path / "plot.svg").read_text(encoding="utf-8").count("<rect") > 20


@pytest.mark.parametrize("width", [80, 120])
def test_the_paper_s_columns_fit_the_terminal(width: int) -> None:
    options = SimulateOptions(users=100, requests=300, policies=("ours",), batch_sizes=(8,))
    result = run_simulation(options).to_json()
    paper = {"device_hit_ratio": 0.6436, "total_hit_ratio": 0.9859}
    paper |= {"latency_ms": 47.3, "wait_ms": 23.1, "compute_ms": 13.3}
    result["rows"][0] |= {"status": "calibrated", "paper": paper, "bytes_onloaded": 80_000 << 30}
    out = io.StringIO()
    print_simulation(Console(file=out, width=width), result)
    text = out.getvalue()
    for figure in ("64.36/98.59", "47.3; 23.1+13.3", "calibrated", "80000", "40960"):
        assert figure in text
    assert "…" not in text
    assert text.count("hits %") == (4 if width == 120 else 6)


def test_the_paper_s_points_and_what_is_said_of_them() -> None:
    points = SimulateOptions().points
    assert len(points) == len(set(points)) == 10
    assert all(sum(a != b for a, b in zip(point, BASE, strict=True)) <= 1 for point in points)
    assert SimulateOptions(pages=(5, 6), chunks=(32, 64)).points == [
        Point(8, pages, chunk) for pages in (5, 6) for chunk in (32, 64)
    ]
    assert SimulateOptions(trace="ten-million").points == [BASE]
    changed: list[Callable[[], SimulateOptions]] = [
        lambda: SimulateOptions(limit=5),
        lambda: SimulateOptions(seed=1),
        lambda: SimulateOptions(page_size=16),
    ]
    assert SimulateOptions().is_whole_fitted_trace
    assert not any(make().is_whole_fitted_trace for make in changed)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "all"], "--policy 'all' is not known; use some of recompute, device, paper, ours"),
        (["--pages", "5,5"], "--pages '5,5' must be different numbers"),
        (["--host-bytes", "0"], "--host-bytes 0 leaves no host tier"),
        (["--host-bytes", "1MiB"], "holds not even one chunk"),
        (["--chunks", "1000"], "page_size=32 does not divide chunk_size=1000"),
        (["--trace", "nowhere", "--users", "4"], "--users, --requests and --seed shape a synthetic trace"),
        (["--plot", "/nowhere/plot.svg"], "the folder /nowhere does not exist"),
    ],
)
def test_bad_options_are_named_with_the_fix(words: list[str], message: str) -> None:
    code, text = command(*words)
    assert code == 2
    assert message in text
    with pytest.raises(ConfigError):
        SimulateOptions(batch_sizes=(0,))
