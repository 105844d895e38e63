"""The patch script as a module; where GENERATIVE_RECOMMENDERS names it, the host with and without patches."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOST = "generative_recommenders"
# In the order in which they import each other.
PATCHED = {
    "position": f"{HOST}.ops.pytorch.pt_position",
    "stu": f"{HOST}.modules.stu",
    "transducer": f"{HOST}.modules.hstu_transducer",
    "dlrm": f"{HOST}.modules.dlrm_hstu",
}


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tool() -> ModuleType:
    return _load("patches_apply", ROOT / "patches" / "apply.py")


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Makes fresh clones of the host's checkout; without one, the test is skipped."""
    named = os.environ.get("GENERATIVE_RECOMMENDERS")
    if not named:
        pytest.skip("GENERATIVE_RECOMMENDERS does not name a checkout of meta-recsys/generative-recommenders")

    def make() -> Path:
        target = tmp_path_factory.mktemp("host") / "checkout"
        subprocess.run(["git", "clone", "-q", "--shared", named, str(target)], check=True)
        return target

    return make


@pytest.fixture(scope="session")
def host(clone: Callable[[], Path]) -> SimpleNamespace:
    """The host's modules as committed; the import takes about ten seconds."""
    pytest.importorskip("fbgemm_gpu")
    checkout = str(clone())
    sys.path.insert(0, checkout)
    try:
        modules = {key: importlib.import_module(name) for key, name in PATCHED.items()}
        for key in ("common", "ops.hstu_compute", "ops.jagged_tensors", "ops.layer_norm"):
            modules[key.rpartition(".")[2]] = importlib.import_module(f"{HOST}.{key}")
        for key in ("positional_encoder", "preprocessors", "postprocessors", "action_encoder"):
            modules[key] = importlib.import_module(f"{HOST}.modules.{key}")
    finally:
        sys.path.remove(checkout)
    return SimpleNamespace(**modules)


@pytest.fixture(scope="session")
def patched(host: SimpleNamespace, clone: Callable[[], Path], tool: ModuleType) -> SimpleNamespace:
    """The same with the patched files from a checkout with all patches; the rest is shared with `host`."""
    checkout = clone()
    assert tool.main([str(checkout)]) == 0
    saved = {name: sys.modules[name] for name in PATCHED.values()}
    try:
        modules = {key: _load(name, checkout / f"{name.replace('.', '/')}.py") for key, name in PATCHED.items()}
    finally:
        sys.modules.update(saved)
    return SimpleNamespace(**(vars(host) | modules))
