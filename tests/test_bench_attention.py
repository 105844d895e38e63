"""`mtserve bench attention`: what it measures is there, and results that attention gets wrong are noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mtserve_plugin import ops
from mtserve_plugin.bench import attention as module
from mtserve_plugin.cli import app

_SMALL = ["--queries", "7", "--keys", "100", "--heads", "2", "--dim", "9", "--rounds", "2"]


def test_attention(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    out = tmp_path / "attention.json"
    result = CliRunner().invoke(app, ["bench", "attention", *_SMALL, "--json", str(out)])
    assert result.exit_code == 0, result.output
    measures = json.loads(out.read_text(encoding="utf-8"))
    assert measures["ok"]
    assert measures["isa"] == ops.cpu_isa()
    for dtype, error in (("fp32", 1e-6), ("bf16", 2**-8 + 1e-6)):
        assert 0 < measures[f"{dtype}_max_rel_error"] <= error
        # Two new tokens see 99 and 100 keys, five candidates 100 and themselves.
        flops = 4 * 2 * 9 * (99 + 100 + 5 * 101)
        assert measures[f"{dtype}_gflops"] == pytest.approx(flops / measures[f"{dtype}_ms"] / 1e6)
        peak, roofline = measures[f"{dtype}_gemm_peak_gflops"], measures[f"{dtype}_roofline_gflops"]
        # Which of the two limits attention depends on the machine.
        intensity = flops / ((4 if dtype == "fp32" else 2) * 2 * 9 * (2 * 105 + 2 * 7))
        assert roofline == pytest.approx(min(peak, 2 * measures["memcpy_gbps"] * intensity))
        assert measures[f"{dtype}_share_of_gemm_peak"] == pytest.approx(measures[f"{dtype}_gflops"] / peak)
        assert measures[f"{dtype}_share_of_roofline"] == pytest.approx(measures[f"{dtype}_gflops"] / roofline)
    for name in ("gather", "scatter", "append", "append_slices"):
        assert 0.001 < measures[f"{name}_share_of_memcpy"] < 1000
    assert "of the roofline" in result.output
    assert torch.get_num_threads() == threads


def test_wrong_results_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = ops.paged_hstu_attention

    def one_key_short(*arguments: Any) -> torch.Tensor:
        paged = list(arguments)
        paged[7] = arguments[7] - 1
        return attention(*paged)

    monkeypatch.setattr(module.ops, "paged_hstu_attention", one_key_short)
    result = CliRunner().invoke(app, ["bench", "attention", *_SMALL])
    assert result.exit_code == 1
    assert "FAILED: attention in fp32 differs" in result.output
    assert "FAILED: attention in bf16 differs" in result.output


@pytest.mark.parametrize(
    ("option", "value", "least"),
    [("--queries", "0", 1), ("--heads", "0", 1), ("--dim", "0", 1), ("--rounds", "0", 1), ("--keys", "95", 96)],
)
def test_bad_usage(option: str, value: str, least: int) -> None:
    result = CliRunner().invoke(app, ["bench", "attention", option, value])
    assert result.exit_code == 2
    assert f"{option} {value} must be at least {least}" in result.output
