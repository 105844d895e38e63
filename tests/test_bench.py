"""`mtserve bench index`: what it measures is there, and a growing index is noticed."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mtserve_plugin.bench import index as bench
from mtserve_plugin.cli import app
from mtserve_plugin.machine import resident_bytes

_SMALL = ["--ids", "40000", "--users", "5000", "--visits", "6"]


def test_index(tmp_path: Path) -> None:
    out = tmp_path / "index.json"
    result = CliRunner().invoke(app, ["bench", "index", *_SMALL, "--json", str(out)])
    assert result.exit_code == 0, result.output
    measures = json.loads(out.read_text(encoding="utf-8"))
    assert 0 < measures["begin_commit_us_batch8"] < 1e5
    assert 0 < measures["begin_commit_us_batch8_1m_users"] < 1e5
    assert measures["begin_commit_us_batch8_content_check"] > 0
    assert 50 < measures["bytes_per_user"] < 1000
    assert measures["growth_after_10m_ids"] == 0
    assert (measures["ids"], measures["users"]) == (40_000, 5_000)
    assert measures["ok"]
    assert "5,000 more users known" in result.output


def test_an_index_that_keeps_evicted_users_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = bench._index
    # Pages for everybody: nobody is forgotten.
    monkeypatch.setattr(bench, "_index", lambda pages: fixed(100_000))
    result = CliRunner().invoke(app, ["bench", "index", *_SMALL])
    assert result.exit_code == 1
    assert "FAILED: the index grew by" in result.output


@pytest.mark.parametrize("option", ["--ids", "--users", "--visits"])
def test_bad_usage(option: str) -> None:
    result = CliRunner().invoke(app, ["bench", "index", option, "0"])
    assert result.exit_code == 2
    assert f"{option} 0 must be at least" in result.output


def test_visits_that_find_nothing_are_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = importlib.import_module("mtserve_plugin.errors")
    monkeypatch.setattr(bench, "_store", lambda *_: None)
    with pytest.raises(errors.CacheError, match="measures nothing"):
        bench._begin_commit_us(0, 4)


def test_resident_bytes_follow_the_process() -> None:
    before = resident_bytes()
    held = bytearray(b"x" * (64 << 20))
    assert resident_bytes() - before > 48 << 20
    assert len(held) == 64 << 20
