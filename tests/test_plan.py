"""`mtserve plan`: memory by arithmetic, hit ratios that are the index's own, a configuration that is one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mtserve_plugin import CacheConfig, ConfigError
from mtserve_plugin.cli import app
from mtserve_plugin.plan.memory import Geometry, divide, onload_pages
from mtserve_plugin.plan.options import PlanOptions, parse_duration
from mtserve_plugin.plan.run import make_plan
from mtserve_plugin.replay.options import MODELS

_MIB = 1 << 20
_SMALL = ["--users", "60", "--tokens", "300", "--new-tokens", "6", "--page-size", "16", "--chunk", "128"]
_MEMORY = ["--model", "tiny", "--device-memory", "8MiB", "--host-memory", "64MiB", "--batch-size", "2"]


def _run(*words: str) -> Any:
    result = CliRunner().invoke(app, ["plan", *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_papers_memory() -> None:
    geometry = Geometry(MODELS["paper"])
    assert geometry.token_bytes == 16 * 1024
    assert onload_pages(8, 40_008, 32) == 10_002
    assert (40_960 + 10_008) * geometry.page_bytes == 25_484 * _MIB
    assert (40_960 + 10_002) * geometry.page_bytes == 25_481 * _MIB
    assert geometry.paper_workbench_bytes(8 * 40_008) == pytest.approx(1_875 * _MIB, rel=1e-3)
    assert geometry.paper_workbench_bytes(8 * 40_008, layers=8) == pytest.approx(15_000 * _MIB, rel=1e-3)
    text = _run("--appendix-c").output
    for figure in ("25,484", "25,481", "15,000", "16.0 KiB"):
        assert figure in text


@pytest.mark.parametrize("staged", [False, True])
def test_what_is_divided_adds_up(staged: bool) -> None:
    geometry = Geometry(MODELS["small"], page_size=16)
    given = 300 * _MIB
    memory = divide(geometry, given, 4, 1000, staged=staged)
    assert given - geometry.page_bytes < memory.total_bytes <= given
    assert memory.pages_bytes == memory.pages * geometry.page_bytes
    assert memory.onload_pages == (250 if staged else 0)
    config = CacheConfig(
        num_layers=4, num_heads=4, qk_dim=32, v_dim=32, dtype="float32", attn_norm_len=1, page_size=16,
        num_pages=memory.pages, onload_pages=memory.onload_pages, chunk_size=128,
    )  # fmt: skip
    assert config.table_bytes == memory.pages_bytes + memory.onload_bytes
    assert memory.total_bytes == config.table_bytes + 4 * 1000 * 128 * 4 * (4 + 6)


def test_memory_that_holds_nothing_says_how_much_would() -> None:
    geometry = Geometry(MODELS["small"])
    with pytest.raises(ConfigError, match="--device-memory") as refused:
        divide(geometry, 1000, 8, 3000)
    (enough,) = re.findall(r"give (\d+) or more", str(refused.value))
    assert divide(geometry, int(enough), 8, 3000).pages == 94
    with pytest.raises(ConfigError):
        divide(geometry, int(enough) - 1, 8, 3000)


def test_a_plan(tmp_path: Path) -> None:
    result = _run(*_SMALL, *_MEMORY, "--json", str(tmp_path / "plan.json"))
    assert result.exit_code == 0, result.output
    plan = json.loads((tmp_path / "plan.json").read_text())
    pages = plan["memory"]["pages"]
    planned = {row["policy"]: row for row in plan["predictions"] if row["pages"] == pages}
    assert set(planned) == {"device", "paper", "ours"}
    device, paper, ours = planned["device"], planned["paper"], planned["ours"]
    assert device["onload_bytes_per_s"] == 0 == device["offload_bytes_per_s"]
    assert device["total_hit_ratio"] == device["device_hit_ratio"] < paper["total_hit_ratio"] < ours["total_hit_ratio"]
    assert ours["warm_hit_ratio"] == 1
    sweep = sorted((row["pages"], row["device_hit_ratio"]) for row in plan["predictions"] if row["policy"] == "ours")
    assert len(sweep) == 5
    assert [ratio for _, ratio in sweep] == sorted(ratio for _, ratio in sweep)
    assert sweep[0][1] < sweep[-1][1]
    pasted = re.search(r"config = (CacheConfig\(.*?\n\))", result.output, re.DOTALL)
    assert pasted is not None
    config = eval(pasted[1], {"CacheConfig": CacheConfig})
    assert (config.num_pages, config.host_bytes, config.page_size) == (pages, 64 * _MIB, 16)
    assert plan["working_set_bytes"] == 60 * 300 * config.token_bytes
    assert plan["requests_per_s"] == pytest.approx(60 / 3600)


def test_tables_fit_a_terminal_of_80_columns() -> None:
    words = ["--users", "400", "--tokens", "6000", "--new-tokens", "200", "--device-memory", "24GiB"]
    text = CliRunner().invoke(app, ["plan", *words], env={"COLUMNS": "80"}).output
    assert "computed" in text
    assert "…" not in text
    assert "Next: attach(model" in text


def test_traffic_follows_the_interval() -> None:
    options = PlanOptions(
        users=60, tokens=300, new_tokens=6, model="tiny", device_bytes=8 * _MIB, host_bytes=64 * _MIB, batch_size=2,
        page_size=16, chunk=128, interval_s=36_000,
    )  # fmt: skip
    slow = make_plan(options).predictions
    fast = make_plan(PlanOptions(**{**options.__dict__, "interval_s": 3_600})).predictions
    for a, b in zip(slow, fast, strict=True):
        assert b.total_hit_ratio == pytest.approx(a.total_hit_ratio, abs=0.02)
        assert b.onload_bytes_per_s == pytest.approx(10 * a.onload_bytes_per_s, rel=0.25)


def test_a_log_of_ones_own(tmp_path: Path) -> None:
    events = [f"{user},{visit},{1000 * visit + user}" for visit in range(30) for user in range(20)]
    log = tmp_path / "log.csv"
    log.write_text("user_id,item_id,timestamp\n" + "\n".join(events) + "\n")
    result = _run("--trace", str(log), *_MEMORY, "--page-size", "16", "--chunk", "128")
    assert result.exit_code == 0, result.output
    assert "20, " in result.output
    assert "imagined" not in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--users", "0"], "--users 0 must be at least 1"),
        (["--interval", "soon"], "is no duration"),
        (["--model", "huge"], "--model 'huge' is not known"),
        (["--dtype", "int8"], "--dtype 'int8' is not known"),
        (["--max-history", "10"], "must be at least --tokens"),
        (["--chunk", "100"], "--chunk 100 must be a multiple of --page-size 32"),
        (["--device-memory", "1MiB"], "--device-memory"),
        (["--new-tokens", "50000", "--tokens", "6000"], "no requests can be imagined"),
    ],
)
def test_bad_usage_is_explained(words: list[str], message: str) -> None:
    result = _run(*words)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_durations() -> None:
    assert [parse_duration(text) for text in ("90", "90s", "1.5min", "2h", " 1 d ")] == [90, 90, 90, 7200, 86_400]
