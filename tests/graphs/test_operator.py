"""The planned operator on the CPU, and what surrounds its kernel for a device."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mtserve_plugin.graphs import operator
from mtserve_plugin.graphs.buckets import Tiling, rounded
from mtserve_plugin.graphs.metadata import Metadata
from tests.graphs.plans import Now, send, work_of
from tests.kernels.reference import jagged_batch, random_batch

TILING = Tiling(32, 64, 8)


@pytest.mark.parametrize(
    "batch",
    [
        lambda: jagged_batch(8, v_dim=24, window=13),
        lambda: jagged_batch(4, heads=3, qk_dim=7, dtype=torch.bfloat16),
        lambda: random_batch([5], [0], [5]),
        lambda: random_batch([0, 9], [3, 0], [0, 9]),
        lambda: random_batch([600], [3], [590]),
    ],
)
def test_it_is_the_operator_with_another_way_to_say_the_batch(batch):
    torch.manual_seed(5)
    batch = batch()
    work, bucket = work_of(batch, TILING)
    metadata = Metadata(bucket, torch.device("cpu"), Now())
    arguments = send(metadata, bucket, batch, work, garbage_rows=False)
    out = operator.paged_hstu_attention_planned(*arguments)
    tokens = int(batch.offsets[-1])
    assert torch.equal(out[:tokens], batch.attend())
    assert out[tokens:].isnan().all()
    assert out.shape == (bucket.tokens, *batch.v[0].shape[1:])
    with FakeTensorMode() as mode:
        fake = operator.paged_hstu_attention_planned(
            *(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments)
        )
    assert (fake.shape, fake.dtype, fake.stride()) == (out.shape, out.dtype, out.stride())


def test_sizes_are_rounded_up():
    assert [rounded(size, 4) for size in (0, 1, 4, 5, 8, 9, 1000)] == [4, 4, 4, 8, 8, 16, 1024]
    # A bucket's tiles are enough for rows of any lengths.
    generator = torch.Generator().manual_seed(1)
    for _ in range(100):
        counts = torch.randint(0, 70, (int(torch.randint(1, 9, (), generator=generator)),), generator=generator)
        batch = random_batch([0] * len(counts), counts.tolist(), [0] * len(counts), heads=1, qk_dim=1, v_dim=1)
        work, bucket = work_of(batch, TILING)
        assert len(work.tiles) <= bucket.tiles
        assert len(work.rows) <= bucket.rows
        assert sum(counts) <= bucket.tokens


def test_there_is_a_kernel_for_cuda():
    name = "mtserve::paged_hstu_attention_planned"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
