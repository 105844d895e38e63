"""What recorded kernels read about a batch: one buffer on the device at a fixed address, one copy per batch."""

from __future__ import annotations

import numpy as np
import torch

from mtserve_plugin.graphs.buckets import Bucket
from mtserve_plugin.graphs.recorder import Event, Recorder
from mtserve_plugin.triton_kernels.plan import ROW_FIELDS, TILE_FIELDS, Cut, sections


class Metadata:
    """The device buffer of one bucket and the two host buffers that feed it in turn.

    The host fills one buffer while the copy out of the other may still be on its way; before a buffer is filled again
    the host waits for the copy out of it. The copy itself runs on the caller's stream, behind the kernels that read
    what was there before.

    Attributes:
        slots: int64 `[bucket.tokens]` on the device, the page slot of each dense row; -1 for padding.
        plan: int32 on the device, packed as `triton_kernels/plan.py` says; the padding of tiles is -1.
    """

    def __init__(self, bucket: Bucket, device: torch.device, recorder: Recorder) -> None:
        self._bucket = bucket
        self._sections = sections(bucket.plan_sizes)
        # int64 entries: the slots, then the plan, two of its entries in each.
        size = bucket.tokens + (self._sections[-1].stop + 1) // 2
        self._device = torch.zeros(size, dtype=torch.int64, device=device)
        pinned = device.type == "cuda"
        self._host = [torch.zeros(size, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._sent: list[Event] = [recorder.event() for _ in range(2)]
        self._recorder = recorder
        self._turn = 0
        self.slots = self._device[: bucket.tokens]
        self.plan = self._device[bucket.tokens :].view(torch.int32)

    @property
    def num_bytes(self) -> int:
        """On the device; twice as many on the host."""
        return self._device.numel() * 8

    def send(self, work: Cut, slots: torch.Tensor | None) -> None:
        """Sends a batch to the device without waiting for it.

        Args:
            work: the batch, cut with the bucket's `block_m`.
            slots: int64 `[num_rows]` on the host; `None` if the batch stores nothing.
        """
        self._turn ^= 1
        host, sent = self._host[self._turn], self._sent[self._turn]
        sent.synchronize()
        packed = host.numpy()
        at = packed[: self._bucket.tokens]
        count = 0 if slots is None else len(slots)
        if slots is not None:
            at[:count] = slots.numpy()
        at[count:] = -1
        rows, tiles, split_tiles, pages = (packed[self._bucket.tokens :].view(np.int32)[x] for x in self._sections)
        _fill(rows.reshape(-1, ROW_FIELDS), work.rows, 0)
        _fill(tiles.reshape(-1, TILE_FIELDS), work.tiles, -1)
        _fill(split_tiles.reshape(-1, TILE_FIELDS), work.split_tiles, -1)
        pages[: len(work.pages)] = work.pages
        self._recorder.copy(self._device, host)
        sent.record()


def _fill(to: np.ndarray, records: np.ndarray, padding: int) -> None:
    to[: len(records)] = records
    to[len(records) :] = padding
