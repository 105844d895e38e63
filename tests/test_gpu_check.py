"""The script for CUDA devices, every part of it on the CPU: that it runs and measures what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "benchmarks" / "gpu_check.py", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_every_part_runs(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = _run("--device", "cpu", "--size", "tiny", "--json", str(file))
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert "needs a CUDA device" in found["attention"]["skipped"]
    for name in ("copies", "page_kernels", "transfers", "requests", "graphs", "load_or_recompute"):
        assert "skipped" not in found[name], found[name]
        assert name in done.stdout
    shares = {name: value for name, value in found["transfers"].items() if name.endswith("_share")}
    assert set(shares) == {f"onload_{s}_share" for s in ("direct", "staged", "kernel")} | {"offload_share"}
    assert all(value > 0 for value in shares.values())
    rows = {(row["mode"], row["batch_size"]): row for row in found["requests"]["rows"]}
    for size in (1, 4, 8):
        assert rows["recompute", size]["speedup"] == 1
        assert 0 < rows["device", size]["total_hit_ratio"] < rows["hierarchical", size]["total_hit_ratio"] < 1
        assert all(row["max_rel_error"] <= 2e-6 for row in found["requests"]["rows"])
    assert "no graph ran" in found["graphs"]["batch_1"]
    assert {row["mode"] for row in found["graphs"]["rows"]} == {"recompute", "hierarchical", "graphs"}
    assert [row["length"] for row in found["load_or_recompute"]["rows"]] == [64, 256]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_without_a_device_it_says_so() -> None:
    done = _run()
    assert done.returncode == 1
    assert "torch sees no CUDA device" in done.stdout
    script = subprocess.run(
        ["bash", ROOT / "benchmarks" / "gpu_check.sh"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
    )
    assert script.returncode == 1
    assert "torch sees no CUDA device" in script.stderr + script.stdout
