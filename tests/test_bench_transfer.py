"""`mtserve bench transfer`: what it measures is there, and bytes that come back wrong are noticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mtserve_plugin.bench import transfer as module
from mtserve_plugin.cli import app

_SMALL = ["--users", "1", "--layers", "2", "--rounds", "1"]


def test_transfer(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    out = tmp_path / "transfer.json"
    result = CliRunner().invoke(app, ["bench", "transfer", *_SMALL, "--json", str(out)])
    assert result.exit_code == 0, result.output
    measures = json.loads(out.read_text(encoding="utf-8"))
    assert measures["bytes"] == 2 * 1024 * 2 * 4 * 128 * 2
    assert measures["page_bytes"] == 64 << 10
    for name in ("memcpy_gbps", "onload_share_direct", "onload_share_staged", "offload_share"):
        assert 0.001 < measures[name] < 1000
    by_ratio = measures["makespan_over_bound_by_ratio"]
    assert measures["makespan_over_bound"] == max(by_ratio.values())
    assert measures["makespan_floor_by_ratio"] == {"0.5": 1.25, "1.0": 1.5, "2.0": 1.25}
    assert by_ratio.keys() == measures["makespan_floor_by_ratio"].keys()
    assert measures["ok"]
    assert 0.5 < measures["overlap_control"] < 20
    assert measures["commit_with_launch_us"] > 0
    launch = measures["commit_with_launch_us"] - measures["commit_without_launch_us"]
    assert measures["offload_launch_us"] == pytest.approx(launch)
    assert abs(measures["offload_launch_asleep_us"]) < 1e5
    assert "onload, staged" in result.output
    assert torch.get_num_threads() == threads


def test_bytes_of_another_layer_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    appended = module._Place._appended
    calls = []

    def shifted(place: module._Place, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(layer)
        return appended(place, layer if len(calls) <= 2 * place.layers else 0)

    monkeypatch.setattr(module._Place, "_appended", shifted)
    result = CliRunner().invoke(app, ["bench", "transfer", *_SMALL])
    assert result.exit_code == 1
    assert "FAILED: the bytes that came back" in result.output


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--users", "0", "at least 1"),
        ("--layers", "0", "at least 1"),
        ("--rounds", "0", "at least 1"),
        ("--tokens", "100", "multiple of 1024"),
    ],
)
def test_bad_usage(option: str, value: str, message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "transfer", option, value])
    assert result.exit_code == 2
    assert f"{option} {value} must be" in result.output
    assert message in result.output


def test_users_that_stay_on_the_device_are_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._Place, "_leave_the_device", lambda _: None)
    with pytest.raises(module.CacheError, match="measures nothing"):
        module.bench_transfer(users=1, layers=1, rounds=1)
