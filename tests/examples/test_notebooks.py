"""Every notebook runs to its end, on the doubles and on the host itself; its own assertions raise."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
CHECKOUT = os.environ.get("GENERATIVE_RECOMMENDERS")


def runs_of(path: Path) -> list[Any]:
    """A notebook with `ranking_service` runs on the doubles and on the host itself, any other needs neither."""
    if "ranking_service" not in path.read_text(encoding="utf-8"):
        return [pytest.param(path, "", "", id=path.stem)]
    skip = pytest.mark.skipif(not CHECKOUT, reason="GENERATIVE_RECOMMENDERS does not name a checkout")
    return [
        pytest.param(path, "", "stand-ins", id=f"{path.stem}-doubles"),
        pytest.param(path, CHECKOUT, "its own checkout", id=f"{path.stem}-checkout", marks=skip),
    ]


def text_of(notebook: Any) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "\n".join(output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs)


@pytest.mark.parametrize(("path", "checkout", "name"), [run for path in NOTEBOOKS for run in runs_of(path)])
def test_runs(
    path: Path, checkout: str, name: str, tmp_path: Path, tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = tmp_path / "examples"
    shutil.copytree(ROOT / "examples", examples, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(variable, str(tmp_path_factory.mktemp(variable.lower())))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GENERATIVE_RECOMMENDERS", checkout)
    monkeypatch.delenv("MPLBACKEND", raising=False)
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(examples)}}
    )
    client.execute()
    assert name in text_of(notebook)
    assert any("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", []))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_stored_as_it_ran(path: Path) -> None:
    """In order, without errors or warnings, and without a trace of the machine."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell.outputs for cell in cells)
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert not any(output.get("name") == "stderr" for output in outputs)
    stored = text_of(notebook) + str(notebook.metadata) + str([cell.metadata for cell in notebook.cells])
    assert not re.search(r"(?<![\w.])/(home|root|work|tmp|usr|opt|Users|mnt)\b|[A-Z]:\\", stored)
    assert os.uname().nodename not in stored


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    for link in re.findall(r"\]\(([^)\s:]+)\)", text):
        assert (path.parent / link.partition("#")[0]).exists(), link


def test_every_notebook_is_listed() -> None:
    listed = re.findall(r"\((\w+\.ipynb)\)", (ROOT / "examples/README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == [path.name for path in NOTEBOOKS]
