"""Every defect in this folder still fits the sources; `run.py` shows that the native tests notice each."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parent


def load_runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutation_runner", HERE / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


runner = load_runner()
MUTATIONS = runner.read_mutations()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    runner.copy_sources(folder)
    return folder


@pytest.mark.skipif(shutil.which("git") is None, reason="patches are applied with git")
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_it_applies(mutation: object, tree: Path) -> None:
    assert runner.apply(tree, mutation, check=True) == ""


@pytest.mark.skipif(shutil.which("git") is None, reason="patches are applied with git")
def test_a_patch_that_does_not_fit_is_noticed(tree: Path, tmp_path: Path) -> None:
    stale = tmp_path / "stale.patch"
    text = MUTATIONS[0].path.read_text()
    stale.write_text(text.replace("\n-", "\n-gone ", 2))
    assert runner.apply(tree, runner.Mutation("stale", "C1", "", stale), check=True)


def test_every_rule_of_ordering_has_defects() -> None:
    rows = Counter(mutation.row for mutation in MUTATIONS)
    for row in ("C1", "C2", "C3", "C4", "C5", "C6"):
        assert rows[row] >= 2
    assert len(MUTATIONS) >= 28
    numbers = [mutation.name.split("-")[0] for mutation in MUTATIONS]
    assert len(set(numbers)) == len(numbers)
