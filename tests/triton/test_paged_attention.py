"""The Triton kernel in triton's interpreter, in a process of its own: the switch is read when kernels are defined."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mtserve_plugin import ops
from mtserve_plugin.errors import MissingDependencyError


def test_in_the_interpreter():
    pytest.importorskip("triton")
    here = Path(__file__)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", here.with_name("interpreted.py"), "-x", "-p", "no:cacheprovider"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=here.parents[2],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]


def test_the_operator_has_a_kernel_for_cuda_that_asks_for_triton(monkeypatch):
    assert torch._C._dispatch_has_kernel_for_dispatch_key("mtserve::paged_hstu_attention", "CUDA")
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(MissingDependencyError, match="pip install 'triton"):
        ops._attention_on_cuda()
