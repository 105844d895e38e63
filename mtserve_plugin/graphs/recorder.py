"""What records and replays: CUDA graphs, or whatever stands in for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from mtserve_plugin.triton_kernels import ALONE

T = TypeVar("T")


class Recording(Protocol):
    """Work that can be run again on the same tensors."""

    def replay(self) -> None:
        """Queues the work on the current stream."""
        ...


class Event(Protocol):
    """A point on a stream, as `torch.cuda.Event`; one that was never recorded has passed."""

    def record(self) -> Any: ...
    def wait(self) -> Any: ...
    def synchronize(self) -> Any: ...


class Recorder(Protocol):
    """Makes recordings for one device; what differs between a CUDA device and a stand-in in tests."""

    def supports(self, device: torch.device) -> bool:
        """Whether work on this device can be recorded."""
        ...

    def is_recorded(self) -> bool:
        """Whether the caller is recording its current stream."""
        ...

    def record(self, body: Callable[[], T]) -> tuple[Recording, T]:
        """Records what `body` does and returns what it returned: tensors which every replay writes anew.

        Memory that `body` allocates may be shared with other recordings; they are replayed in the order in which they
        were recorded, one after the other, and tensors that are still referenced are left alone.
        """
        ...

    def event(self) -> Event: ...

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copies from the host to the device on the current stream, without waiting."""
        ...

    def renew(self) -> None:
        """Later recordings share no memory with earlier ones."""
        ...


class CudaRecorder:
    """`torch.cuda.CUDAGraph`s that share one memory pool."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def supports(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def is_recorded(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def record(self, body: Callable[[], T]) -> tuple[Recording, T]:
        with ALONE:
            if self._stream is None or self._stream.device.index != torch.cuda.current_device():
                self._stream = torch.cuda.Stream()
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            before = torch.cuda.current_stream()
            try:
                # The cache's own threads and other batches go on calling CUDA meanwhile.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    outputs = body()
            finally:
                # Where a recording fails torch leaves the thread on the recorder's stream.
                torch.cuda.set_stream(before)
        return graph, outputs

    def event(self) -> Event:
        return torch.cuda.Event()

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source, non_blocking=True)

    def renew(self) -> None:
        self._pool = None
