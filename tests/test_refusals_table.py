"""The table of benchmarks/refusals.py: what is refused drifts, what is accepted does not."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "refusals.py"


@pytest.fixture(scope="module")
def refusals() -> Iterator[ModuleType]:
    path, threads = list(sys.path), torch.get_num_threads()
    spec = importlib.util.spec_from_file_location("refusals_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.set_num_threads(1)
    yield module
    torch.set_num_threads(threads)
    del sys.modules[spec.name]
    sys.path[:] = path


@pytest.fixture(scope="module")
def rows(refusals: ModuleType) -> dict[str, Any]:
    torch.manual_seed(0)
    with refusals.serving(None) as service:
        results, skipped = refusals.run(service)
    assert len(skipped) == sum(factor.host_only for factor in refusals.FACTORS) > 0
    return {row.factor: row for row in results}


def test_what_breaks_reuse_drifts_and_what_is_accepted_does_not(rows: dict[str, Any]) -> None:
    breaking = [row for row in rows.values() if row.breaks]
    assert len(breaking) >= 10
    for row in breaking:
        assert row.worst > 1e-3, row.factor
        assert row.refused or row.answer != "accepts", row.factor
    accepted = [row for row in rows.values() if not row.refused and row.answer == "accepts"]
    assert len(accepted) == 3
    for row in accepted:
        assert row.worst < 1e-6, row.factor
        assert row.reused_tokens > 200
        assert not row.causes


def test_every_refusal_has_a_message_and_figures_or_a_reason(rows: dict[str, Any]) -> None:
    for row in rows.values():
        if row.refused:
            assert len(row.message) > 60, row.factor
        assert row.layers or row.scores is not None or row.note, row.factor


@pytest.mark.parametrize(
    ("factor", "cause"),
    [
        ("positions from the end, times from the query", "positions"),
        ("divisor is the batch's longest row", "batch divisor"),
        ("training mode", "randomness"),
        ("contextual_seq_len of the layers", "bidirectional"),
        ("causal=False", "bidirectional"),
    ],
)
def test_the_audit_names_the_planted_factor(rows: dict[str, Any], factor: str, cause: str) -> None:
    assert cause in rows[factor].causes


def test_every_factor_that_attach_looks_for_is_in_the_table(rows: dict[str, Any]) -> None:
    from mtserve_plugin.integrations.generative_recommenders import checks

    assert set(checks._CHECKS) <= {name for row in rows.values() for name in row.refused}


def test_prints_within_120_columns_and_writes_json(
    refusals: ModuleType, rows: dict[str, Any], monkeypatch: Any, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setattr(refusals, "run", lambda service, step: (list(rows.values()), ["left out"]))
    monkeypatch.delenv("GENERATIVE_RECOMMENDERS", raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "argv", ["refusals.py", "--json", str(tmp_path / "out.json")])
    refusals.main()
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 120
    for row in rows.values():
        assert row.factor.split()[0] in printed
        assert not row.refused or row.message.split(":")[0] in printed
    written = json.loads((tmp_path / "out.json").read_text())
    assert [row["factor"] for row in written["rows"]] == list(rows)
    assert written["skipped"] == ["left out"]
