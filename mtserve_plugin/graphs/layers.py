"""LayerGraphs: runs a batch's layers through recordings, or says that it cannot."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, cast

import torch
from torch import nn

from mtserve_plugin import ops
from mtserve_plugin.batch import CacheBatch
from mtserve_plugin.graphs.buckets import Bucket, GraphLimits, Tiling, bucket_of, round_dense
from mtserve_plugin.graphs.metadata import Metadata
from mtserve_plugin.graphs.operator import paged_hstu_attention_planned
from mtserve_plugin.graphs.recorder import CudaRecorder, Event, Recorder, Recording
from mtserve_plugin.triton_kernels import launch_module
from mtserve_plugin.triton_kernels.plan import Cut, Lengths, cut

_LOG = logging.getLogger(__name__)
# Of a device that has no kernels to ask: small enough that tests see splitting.
_CPU_TILING = Tiling(32, 64, 8)


class Layer(Protocol):
    """What is asked of a layer; `models.layer.HSTULayer` is one. Both must queue the same work for any batch."""

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]: ...
    def output(self, attention: torch.Tensor, u: torch.Tensor, x: torch.Tensor) -> torch.Tensor: ...
    def modules(self) -> Any: ...


# The input of a layer and what its projection made of it: x, u, q, k, v; behind the last layer x alone.
_Carried = tuple[torch.Tensor, ...]


@dataclass
class _Recorded:
    """One bucket: where its batches go, and the work between the waits, layer after layer."""

    metadata: Metadata
    x: torch.Tensor
    stretches: list[Recording] = field(default_factory=list)
    out: torch.Tensor | None = None


class LayerGraphs:
    """Runs the layers of an HSTU model through CUDA graphs, which spares the host the launches.

    Between the waits for two layers the device gets one graph: attention over the pages, append and output of one layer
    and the projection of the next. The waits themselves stay on the host, between the graphs, so that layers compute
    while later ones are still being brought. Batches share the graphs of a bucket (`graphs.buckets`): activations have
    a fixed place there, and what a batch is reaches the device in one copy in front of its first layer. The first batch
    of a bucket runs eagerly and records as it goes.

    `run` returns `None` where the caller has to run the layers itself: without a CUDA device, for a cache without
    pages, beyond the limits, while another thread's batch is in here, and for a bucket whose recording failed, which is
    tried once and warned about once. Weights that were replaced or moved, and another cache, throw all recordings away;
    weights changed in place are read as they are.

    One object belongs to one model. It may be called from many threads and streams; one batch at a time is inside, the
    others run eagerly. For inference: no gradient is recorded.

    Args:
        limits: which batches run through graphs, and how many sizes are recorded.
        recorder: makes what records; CUDA graphs by default.

    Example:
        >>> model = HSTURanker(config, cache, graphs=LayerGraphs(GraphLimits(tokens=2048))).eval()  # doctest: +SKIP
    """

    def __init__(self, limits: GraphLimits | None = None, recorder: Callable[[], Recorder] = CudaRecorder) -> None:
        self.limits = limits or GraphLimits()
        self._make_recorder = recorder
        self._recorder = recorder()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._warned = False
        self._buckets: dict[Bucket, _Recorded | None] = {}
        self._key: tuple[Any, ...] = ()
        # Keeps the weights that are recorded, also where a parameter was given other memory. The table is its cache's.
        self._held: list[torch.Tensor] = []
        self._table: weakref.ref[torch.Tensor] | None = None
        # The end of the last batch on the device.
        self._done: Event | None = None

    # ---- for users ----------------------------------------------------------------------------------------------

    def run(self, layers: nn.ModuleList | Sequence[Layer], x: torch.Tensor, batch: CacheBatch) -> torch.Tensor | None:
        """All layers of a batch: waits, attends, appends.

        Args:
            layers: the model's, as many as the cache has.
            x: `[num_rows, D]`, the dense tokens.
            batch: open, nothing appended.

        Returns:
            `[num_rows, D]`, or `None` if the layers have to be run eagerly; nothing was done then.

        Raises:
            OnloadError: a layer's cached keys and values did not arrive.
        """
        if not self._recorder.supports(x.device):
            self._warn("layers on %s cannot be recorded; they run eagerly", x.device)
            if self._held:
                self.clear()  # the model has left the device
            return self._decline("device")
        if self._recorder.is_recorded():
            return self._decline("capturing")
        if batch.table.shape[1] == 0:
            return self._decline("no_pages")
        if x.dim() != 2 or x.shape[0] != batch.num_rows or x.dtype != batch.table.dtype:
            return self._decline("input")
        if not self._lock.acquire(blocking=False):
            return self._decline("busy")
        try:
            with torch.no_grad(), _on(x.device):
                return self._run(cast(list[Layer], list(layers)), x, batch)
        finally:
            self._lock.release()

    def stats(self) -> dict[str, int]:
        """Counters and gauges.

        Batches: `replayed` and `recorded`; those that ran eagerly by why: `eager_device`, `eager_no_pages`,
        `eager_capturing` (the caller records a graph itself), `eager_input` (not what the batch needs, which the eager
        path then says), `eager_limits`, `eager_buckets` (as many as allowed are recorded), `eager_busy`,
        `eager_failed`. `failures` are buckets that could not be recorded,
        `renewals` counts how often what moved threw all away. Now: `buckets`, and `bytes` on the device of their
        activations in and out and of their metadata, without what the graphs use inside.
        """
        names = ("replayed", "recorded", "failures", "renewals")
        reasons = ("device", "capturing", "no_pages", "input", "limits", "buckets", "busy", "failed")
        kept = [recorded for recorded in list(self._buckets.values()) if recorded is not None]
        return {
            **{name: self._counts[name] for name in names},
            **{f"eager_{reason}": self._counts[f"eager_{reason}"] for reason in reasons},
            "buckets": len(kept),
            "bytes": sum(2 * one.x.numel() * one.x.element_size() + one.metadata.num_bytes for one in kept),
        }

    def clear(self) -> None:
        """Throws all recordings away and forgets which ones failed."""
        with self._lock:
            self._forget()

    def __reduce__(self) -> Any:
        # Copies of a model have weights of their own.
        return LayerGraphs, (self.limits, self._make_recorder)

    # ---- inside -------------------------------------------------------------------------------------------------

    def _run(self, layers: Sequence[Layer], x: torch.Tensor, batch: CacheBatch) -> torch.Tensor | None:
        config, table = batch._config, batch._table_of_cached
        if not self.limits.admit(batch.batch_size, batch.num_rows, len(table.indices)):
            return self._decline("limits")
        self._renew(layers, x, batch)
        tiling = _tiling(x.device, config.torch_dtype, config.qk_dim, config.v_dim)
        rows, tokens = round_dense(batch.batch_size, batch.num_rows)
        block_m = tiling.block_m(rows, tokens)
        layout = batch.layout
        parts = (layout.offsets, layout.candidates, layout.paged, table.indices, table.indptr)
        work = cut(
            Lengths(*(part.numpy() for part in parts)),
            block_m=block_m,
            heads=config.num_heads,
            window=config.max_attn_len,
            processors=tiling.processors,
        )
        bucket = bucket_of(work, rows, tokens, block_m)
        if bucket not in self._buckets and len(self._buckets) >= self.limits.buckets:
            return self._decline("buckets")
        recorded = self._buckets.get(bucket)
        if recorded is None and bucket in self._buckets:
            return self._decline("failed")
        # The previous batch may have run on another stream.
        done = self._done = self._done or self._recorder.event()
        done.wait()
        try:
            if recorded is None:
                return self._record(layers, x, batch, bucket, work)
            return self._replay(recorded, x, batch, work)
        finally:
            done.record()

    def _replay(self, recorded: _Recorded, x: torch.Tensor, batch: CacheBatch, work: Cut) -> torch.Tensor:
        self._fill(recorded, x, batch, work)
        recorded.stretches[0].replay()
        for layer, stretch in enumerate(recorded.stretches[1:]):
            batch.wait(layer)
            stretch.replay()
            _note_append(batch, layer)
        self._count("replayed")
        assert recorded.out is not None
        return recorded.out[: batch.num_rows].clone()

    def _record(
        self, layers: Sequence[Layer], x: torch.Tensor, batch: CacheBatch, bucket: Bucket, work: Cut
    ) -> torch.Tensor:
        """Runs the batch eagerly in the bucket's shapes, which warms up what is recorded right behind it."""
        failed: Exception | None = None
        if not any(self._buckets.values()):
            self._recorder.renew()
        # An ordinary tensor even where the caller is in inference mode: others that call later may not be.
        with torch.inference_mode(False):
            recorded = _Recorded(Metadata(bucket, x.device, self._recorder), x.new_zeros((bucket.tokens, x.shape[1])))
        self._fill(recorded, x, batch, work)
        now: _Carried = ()
        taped: _Carried = ()
        for stretch in range(len(layers) + 1):
            if stretch:
                batch.wait(stretch - 1)
            body = _Stretch(stretch, layers, recorded, bucket, batch)
            try:
                then = body(now)
            except Exception as error:
                # Nothing was noted as appended, and to append once more writes the same.
                self._give_up(bucket, failed or error)
                return _eagerly(layers, stretch, now or (recorded.x,), batch)
            if stretch:
                _note_append(batch, stretch - 1)
            now = then
            if failed is None:
                try:
                    recording, taped = self._recorder.record(lambda body=body, taped=taped: body(taped))  # type: ignore[misc]
                    recorded.stretches.append(recording)
                except Exception as error:
                    failed = error
        if failed is not None:
            self._give_up(bucket, failed)
        else:
            recorded.out = taped[0]
            self._buckets[bucket] = recorded
            self._count("recorded")
        return now[0][: batch.num_rows].clone()

    def _fill(self, recorded: _Recorded, x: torch.Tensor, batch: CacheBatch, work: Cut) -> None:
        recorded.x[: x.shape[0]].copy_(x)
        recorded.metadata.send(work, batch._slots if batch._stores else None)

    def _renew(self, layers: Sequence[Layer], x: torch.Tensor, batch: CacheBatch) -> None:
        """Forgets the recordings if what they read has moved."""
        # `parameters()` would take four times as long, with every batch.
        modules = (module for layer in layers for module in layer.modules())
        parameters = [one for module in modules for one in module._parameters.values() if one is not None]
        table = batch.table
        key = (x.device, x.dtype, x.shape[1], table.data_ptr(), *table.shape, *(one.data_ptr() for one in parameters))
        if key == self._key and self._table is not None and self._table() is table:
            return
        if self._buckets:
            self._count("renewals")
        self._forget()
        self._key = key
        self._table = weakref.ref(table)
        self._held = [one.detach() for one in parameters]

    def _forget(self) -> None:
        if self._done is not None:
            self._done.synchronize()
        self._done = None
        self._buckets.clear()
        self._held = []
        self._table = None
        self._key = ()

    def _give_up(self, bucket: Bucket, error: Exception) -> None:
        self._buckets[bucket] = None
        self._recorder.renew()  # whatever state the failure left it in
        self._count("failures")
        self._warn("layers could not be recorded for %s and run eagerly: %s: %s", bucket, type(error).__name__, error)

    def _decline(self, reason: str) -> torch.Tensor | None:
        self._count(f"eager_{reason}")
        return None

    def _count(self, name: str) -> None:
        with self._counting:
            self._counts[name] += 1

    def _warn(self, message: str, *values: object) -> None:
        if not self._warned:
            self._warned = True
            _LOG.warning(message, *values)


class _Stretch:
    """The work between two waits: 0 is in front of the first one, i behind the wait for layer i - 1.

    Nothing in here may depend on the batch but by what lies in the bucket's buffers.
    """

    def __init__(
        self, index: int, layers: Sequence[Layer], recorded: _Recorded, bucket: Bucket, batch: CacheBatch
    ) -> None:
        self._index = index
        self._layers = layers
        self._x = recorded.x
        self._metadata = recorded.metadata
        self._bucket = bucket
        self._table = batch.table
        self._config = batch._config

    def __call__(self, carried: _Carried) -> _Carried:
        index, layers = self._index, self._layers
        x = self._output(index - 1, *carried) if index else self._x
        return (x, *layers[index].project(x)) if index < len(layers) else (x,)

    def _output(
        self, layer: int, x: torch.Tensor, u: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        config, bucket = self._config, self._bucket
        q, k, v = (part.unflatten(1, (config.num_heads, -1)) for part in (q, k, v))
        attended = paged_hstu_attention_planned(
            q,
            k,
            v,
            self._table,
            layer,
            self._metadata.plan,
            bucket.rows,
            bucket.tiles,
            bucket.split_tiles,
            bucket.segments,
            bucket.pages,
            bucket.block_m,
            config.page_size,
            config.scale,
            float(config.attn_norm_len),
            config.max_attn_len,
        )
        ops.append_pages(self._table, layer, k, v, self._metadata.slots, config.page_size)
        return self._layers[layer].output(attended.flatten(1), u, x)


def _eagerly(layers: Sequence[Layer], stretch: int, carried: _Carried, batch: CacheBatch) -> torch.Tensor:
    """The rest of a batch from a stretch on."""
    x, *projected = (part[: batch.num_rows] for part in carried)
    for index in range(max(0, stretch - 1), len(layers)):
        u, q, k, v = projected or layers[index].project(x)
        x = layers[index].output(batch.attend(index, q, k, v), u, x)
        projected = []
    return x


def _note_append(batch: CacheBatch, layer: int) -> None:
    batch._appended |= 1 << layer


@cache
def _tiling(device: torch.device, dtype: torch.dtype, qk_dim: int, v_dim: int) -> Tiling:
    if device.type != "cuda":
        return _CPU_TILING
    launch = launch_module()
    blocks = launch.choose_blocks(dtype, qk_dim, v_dim)
    return Tiling(blocks.queries, blocks.many_queries, launch.processors(device))


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
