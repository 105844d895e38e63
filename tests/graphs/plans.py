"""Batches of `tests/kernels/reference.py` as a bucket's buffers hold them, with garbage where nothing may be read."""

from __future__ import annotations

import torch

from mtserve_plugin.graphs.buckets import Bucket, Tiling, bucket_of, round_dense
from mtserve_plugin.graphs.metadata import Metadata
from mtserve_plugin.triton_kernels.plan import Lengths, cut
from tests.graphs.tape import NoEvent
from tests.kernels.reference import Batch

GARBAGE = 2**30 + 7


class Now:
    """Copies at once."""

    def copy(self, to, source):
        to.copy_(source)

    def event(self):
        return NoEvent()


def work_of(batch: Batch, tiling: Tiling, split: bool | None = None):
    """The batch cut for its bucket, and the bucket."""
    arguments = batch.arguments()
    names = ("offsets", "num_candidates", "paged_lens", "page_indices", "page_indptr")
    offsets = arguments["offsets"]
    rows, tokens = round_dense(len(offsets) - 1, int(offsets[-1]))
    block_m = tiling.block_m(rows, tokens)
    work = cut(
        Lengths(*(arguments[name].numpy() for name in names)),
        block_m=block_m,
        heads=batch.q[0].shape[1],
        window=batch.window,
        processors=tiling.processors,
        split=split,
    )
    return work, bucket_of(work, rows, tokens, block_m)


def send(metadata: Metadata, bucket: Bucket, batch: Batch, work, garbage_rows: bool = True):
    """Fills the buffers and returns the planned operator's arguments; dense rows of padding are NaN.

    The CPU's kernel counts the rows by what is 0: `garbage_rows=False`.
    """
    tokens = int(batch.offsets[-1])
    metadata.send(work, torch.arange(tokens))
    rows, tiles, split_tiles, pages = (metadata.plan[at] for at in metadata._sections)
    rows.view(-1, 5)[len(work.rows) :] = GARBAGE if garbage_rows else 0
    tiles.view(-1, 3)[len(work.tiles) :, 1:] = GARBAGE
    split_tiles.view(-1, 3)[len(work.split_tiles) :, 1:] = GARBAGE
    pages[len(work.pages) :] = GARBAGE

    def padded(x):
        out = torch.full((bucket.tokens, *x.shape[1:]), float("nan"), dtype=x.dtype)
        out[:tokens] = x
        return out.to(metadata.plan.device)

    q, k, v = (padded(batch.dense(x)) for x in (batch.q, batch.k, batch.v))
    return (
        *(q, k, v, batch.table.to(q.device), batch.layer, metadata.plan, bucket.rows, bucket.tiles, bucket.split_tiles),
        *(bucket.segments, bucket.pages, bucket.block_m, batch.page_size, batch.scale, batch.norm_len, batch.window),
    )
