"""Builds the native tests and runs them, shortly and without sanitizers (`sanitize.sh` runs them with)."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "native-tests"

pytestmark = pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which(os.environ.get("CXX", "c++")) is None,
    reason="the native tests need cmake and a C++ compiler",
)


def run(*command):
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, f"{' '.join(map(str, command))}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    return result.stdout


@pytest.fixture(scope="module")
def programs():
    """The build folder is kept: after the first time only what changed is compiled."""
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    run("cmake", "-S", HERE, "-B", BUILD, *([] if (BUILD / "CMakeCache.txt").exists() else generator))
    tests = sorted(HERE.glob("test_*.cpp"))
    run("cmake", "--build", BUILD, "--parallel", "2", *(x for test in tests for x in ("--target", test.stem)))
    return BUILD


@pytest.mark.parametrize("program", sorted(path.stem for path in HERE.glob("test_*.cpp")))
def test_native(programs, program):
    assert "tests passed" in run(programs / program, "--quick")
