"""The Triton kernels compile for the architectures we serve, with resources that fit; no device is needed."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton.backends.nvidia")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled in the interpreter", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from mtserve_plugin.graphs.buckets import Tiling
from mtserve_plugin.graphs.metadata import Metadata
from mtserve_plugin.triton_kernels import launch
from mtserve_plugin.triton_kernels.attention import attention_kernel, join_kernel
from tests.graphs.plans import Now, send, work_of
from tests.kernels.reference import random_batch
from tests.triton.ahead import SHARED, compile_kernel

UNITS = {80: "mma", 90: "wgmma", 100: "tcgen05"}


@pytest.mark.parametrize("target", UNITS)
def test_the_papers_shape(target):
    for split in (False, True) if target == 90 else (False,):
        found = compile_kernel(attention_kernel, target, torch.bfloat16, 128, 128, split=split)
        assert found.stack <= 64, "registers spill"
        assert found.shared <= SHARED[target]
        assert found.unit == UNITS[target]
        # Keys and values of pages arrive in pieces of 16 bytes, while the block before is multiplied.
        assert found.wide_copies > 0


@pytest.mark.parametrize(
    ("target", "dtype", "qk_dim", "v_dim"),
    [
        (80, torch.float32, 128, 128),
        (90, torch.float16, 7, 20),
        (90, torch.float32, 64, 32),
        (100, torch.float16, 256, 64),
    ],
)
def test_other_shapes(target, dtype, qk_dim, v_dim):
    found = compile_kernel(attention_kernel, target, dtype, qk_dim, v_dim)
    assert found.shared <= SHARED[target]
    assert (found.unit == "fma") == (dtype == torch.float32)


def test_joining_the_segments():
    found = compile_kernel(join_kernel, 90, torch.bfloat16, 128, 128)
    assert found.stack <= 64
    assert found.shared <= SHARED[90]


class AbsentDevice:
    """All that the just-in-time compiler asks of a device before it launches something."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 1_000_000  # compiled kernels are kept by device: no real one may find these

    def get_current_stream(self, device):
        return 0


class CompileOnly:
    def __init__(self, kernel):
        self.kernel = kernel
        self.compiled = []

    def __getitem__(self, grid):
        assert grid[0] > 0
        return lambda *args, **options: self.compiled.append(self.kernel.warmup(*args, grid=grid, **options))


def test_the_launch_fits_the_kernels_and_other_lengths_compile_nothing(monkeypatch):
    kernels = {name: CompileOnly(getattr(launch, name)) for name in ("attention_kernel", "join_kernel")}
    for name, kernel in kernels.items():
        monkeypatch.setattr(launch, name, kernel)
    monkeypatch.setenv("MTSERVE_TRITON_AUTOTUNE", "0")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(driver, "_active", AbsentDevice())
    # Numbers that the compiler would make special cases of: 1, and what 16 divides.
    for histories, paged, window in (([700, 9], [690, 0], 0), ([16, 0, 1300], [16, 0, 1], 1), ([1], [1], 16)):
        shape = {"qk_dim": 32, "v_dim": 32, "window": window, "dtype": torch.float16}
        batch = random_batch(histories, [1] * len(paged), paged, **shape)
        launch.paged_hstu_attention(*batch.arguments().values(), split=True)
        # The same kernels serve the fixed buffers of recordings.
        blocks = launch.choose_blocks(torch.float16, 32, 32)
        work, bucket = work_of(batch, Tiling(blocks.queries, blocks.queries, 8), split=True)
        metadata = Metadata(bucket, torch.device("cpu"), Now())
        launch.planned_attention(*send(metadata, bucket, batch, work))
    for kernel in kernels.values():
        assert len(kernel.compiled) == 6
        assert len(set(map(id, kernel.compiled))) == 1
