"""`mtserve bench forward`: what it measures is there, and scores that the cache gets wrong are noticed."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mtserve_plugin import ops
from mtserve_plugin.bench import forward as module
from mtserve_plugin.cli import app
from mtserve_plugin.models.layer import HSTULayer

_SMALL = ["--history", "70", "--history", "130", "--delta", "5", "--candidates", "7"]
_SMALL += ["--layers", "2", "--heads", "2", "--dim", "16", "--rounds", "2"]


@pytest.fixture(autouse=True)
def checkout(monkeypatch: pytest.MonkeyPatch) -> str | None:
    """The checkout that the environment names; the tests run as if there was none."""
    named = os.environ.get("GENERATIVE_RECOMMENDERS")
    monkeypatch.delenv("GENERATIVE_RECOMMENDERS", raising=False)
    return named


def bench(*options: str) -> Any:
    return CliRunner().invoke(app, ["bench", "forward", *_SMALL, *options])


def test_forward(tmp_path: Path) -> None:
    threads, layer_norm = torch.get_num_threads(), torch.nn.functional.layer_norm
    out = tmp_path / "forward.json"
    result = bench("--json", str(out))
    assert result.exit_code == 0, result.output
    measures = json.loads(out.read_text(encoding="utf-8"))
    assert measures["ok"]
    assert measures["max_rel_error"] <= 1e-6
    assert measures["history_replaced"] > 1e-2
    assert 1 < measures["gemm_gflops"] < 10_000
    assert measures["layers_over_arithmetic"] < measures["cached_over_arithmetic"]
    assert 0 < measures["content_check_share"] < 1
    assert measures["batch8_over_batch1"] > 0
    for history in (70, 130):
        assert (
            measures[f"arithmetic_ms_{history}"] < measures[f"layers_ms_{history}"] < measures[f"cached_ms_{history}"]
        )
        assert measures[f"recompute_over_cached_{history}"] > 0
        steps = measures["breakdown_ms"][str(history)]
        assert all(spent > 0 for spent in steps.values()), steps
        assert steps["8.4 attention"] < sum(steps.values())
    assert not any(name.startswith("upstream") for name in measures)
    assert "over arithmetic" in result.output
    assert torch.get_num_threads() == threads
    assert torch.nn.functional.layer_norm is layer_norm
    assert HSTULayer.project.__module__ == "mtserve_plugin.models.layer"


def test_the_arithmetic_is_that_of_the_layers() -> None:
    """Counted pair by pair, and weight by weight."""
    delta, candidates, history = 3, 2, 11
    with module._Place([history], delta, candidates, layers=3, heads=2, dim=4) as place:
        products = sum(
            weight.numel()
            for name, weight in place.model.layers.named_parameters()
            if name.endswith(("_uvqk_weight", "_output_weight"))
        )
        for new in (delta, history):
            positions = [*range(history - new, history), *[None] * candidates]
            pairs = sum(history + 1 if at is None else at + 1 for at in positions)
            # A pair's score and its share of the output, over both heads.
            attention = 3 * pairs * 2 * (4 + 4)
            assert place.flops(history, new) == 2 * ((new + candidates) * products + attention)


def attention_of_another_page(*arguments: Any) -> torch.Tensor:
    changed = list(arguments)
    changed[8] = arguments[8].flip(0)
    return attention(*changed)


def attention_without_history(*arguments: Any) -> torch.Tensor:
    return arguments[2].clone()


attention = ops.paged_hstu_attention


@pytest.mark.parametrize(
    ("defect", "message"),
    [
        (attention_of_another_page, "FAILED: scores with the cache differ"),
        (attention_without_history, "the comparison shows nothing"),
    ],
)
def test_wrong_scores_fail(monkeypatch: pytest.MonkeyPatch, defect: Callable[..., Any], message: str) -> None:
    monkeypatch.setattr(ops, "paged_hstu_attention", defect)
    result = bench()
    assert result.exit_code == 1
    assert message in result.output


def test_a_cache_that_holds_nothing_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.HierarchicalKVCache, "lengths", lambda *_, **__: None)
    result = bench()
    assert result.exit_code == 1
    assert "measures nothing" in result.output


@pytest.mark.parametrize("option", ["--delta", "--candidates", "--layers", "--heads", "--dim", "--rounds"])
def test_bad_usage(option: str) -> None:
    result = bench(option, "0")
    assert result.exit_code == 2
    assert f"{option} 0 must be at least 1" in result.output


def test_bad_histories_and_checkouts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = bench("--history", "5")
    assert result.exit_code == 2
    assert "--history 5 must be longer than the delta" in result.output
    monkeypatch.setenv("GENERATIVE_RECOMMENDERS", str(tmp_path))
    result = bench()
    assert result.exit_code == 2
    assert "has no folder generative_recommenders" in " ".join(result.output.split())


def test_upstream_is_measured_too(checkout: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not checkout:
        pytest.skip("GENERATIVE_RECOMMENDERS does not name a checkout of meta-recsys/generative-recommenders")
    monkeypatch.setenv("GENERATIVE_RECOMMENDERS", checkout)
    out = tmp_path / "forward.json"
    result = bench("--json", str(out))
    assert result.exit_code == 0, result.output
    measures = json.loads(out.read_text(encoding="utf-8"))
    assert measures["upstream_max_rel_error"] <= 1e-6
    for history in (70, 130):
        cached = measures[f"upstream_cached_ms_{history}"]
        assert cached > 0
        assert measures[f"upstream_over_cached_{history}"] > 0
        over_ours = measures[f"upstream_recompute_ms_{history}"] / measures[f"cached_ms_{history}"]
        assert measures[f"upstream_over_our_cached_{history}"] == pytest.approx(over_ours)

    # Embeddings of other candidates: the difference is seen.
    host = importlib.import_module("mtserve_plugin.bench.forward_host")
    monkeypatch.setattr(host, "difference", lambda got, want: real_difference(got, want.flip(0)))
    result = bench()
    assert result.exit_code == 1
    assert "FAILED: upstream's embeddings with the cache differ" in result.output


real_difference = module.difference
