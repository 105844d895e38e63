"""Workbench: memory for the projections of a forward, allocated once (paper, appendix C.2)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from mtserve_plugin.errors import ConfigError
from mtserve_plugin.plan.memory import projection_row

if TYPE_CHECKING:
    from mtserve_plugin.models.hstu import HSTURankerConfig

__all__ = ["Workbench"]


class Workbench:
    """The buffer for u, q, k and v, lent to one batch at a time.

    The paper gives each layer a workbench of its own. Here all layers use the same rows in turn: nothing reads a
    layer's projections once its output is there, because keys and values that are kept are copied to pages. Outputs
    are no part of it: attention and the norms allocate theirs.

    What does not get the buffer, because the batch has more rows than it or another one has it, allocates as if there
    were none; results are the same, bit by bit. The buffer follows the model to another device or dtype. On a GPU a
    batch waits for the stream that had the buffer before, and a batch that is captured into a graph never gets it: its
    replays would not ask.

    Args:
        config: sizes and dtype of the model.
        max_tokens: rows. A batch has one for each history token that is not cached and for each candidate.
        device: where the model is.

    Attributes:
        lent: batches that got the buffer.
        fallbacks: batches that did not.

    Raises:
        ConfigError: `max_tokens` is negative.
    """

    def __init__(self, config: HSTURankerConfig, max_tokens: int, device: torch.device) -> None:
        if max_tokens < 0:
            raise ConfigError(f"workbench_tokens={max_tokens} must be at least 0; 0 allocates for each batch anew")
        self.lent = 0
        self.fallbacks = 0
        self._arguments = (config, max_tokens, device)
        self._lock = threading.Lock()
        self._taken = False
        self._stream: torch.cuda.Stream | None = None
        self._allocate(config.cache_config().torch_dtype, device)

    @property
    def max_tokens(self) -> int:
        """Rows."""
        return self._buffer.shape[0]

    @property
    def bytes(self) -> int:
        """Its size; what `mtserve plan` counts for as many tokens."""
        return self._buffer.nbytes

    @contextmanager
    def lend(self, x: torch.Tensor) -> Iterator[torch.Tensor | None]:
        """Memory for the projections of `x` `[T, D]`, the layers' input, for the duration of the block.

        Yields:
            `[T, elements of u, q, k and v]` with the dtype and device of `x`, uninitialized; `None` where the caller
            has to allocate.
        """
        if not self._take(x):
            yield None
            return
        try:
            if (self._buffer.dtype, self._buffer.device) != (x.dtype, x.device):
                self._allocate(x.dtype, x.device)
            if x.is_cuda:
                self._follow(torch.cuda.current_stream(x.device))
            yield self._buffer[: x.shape[0]]
        finally:
            with self._lock:
                self._taken = False

    def _take(self, x: torch.Tensor) -> bool:
        # Autograd would need each layer's projections after the next layer has overwritten them.
        unsuited = torch.is_grad_enabled() or (x.is_cuda and torch.cuda.is_current_stream_capturing())
        with self._lock:
            if unsuited or self._taken or x.shape[0] > self.max_tokens:
                self.fallbacks += 1
                return False
            self._taken = True
            self.lent += 1
            return True

    def _allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        config, max_tokens, _ = self._arguments
        row = projection_row(config.num_heads, config.qk_dim, config.v_dim)
        # A tensor made under inference mode could not be written outside of it.
        with torch.inference_mode(False):
            self._buffer = torch.empty(max_tokens, row, dtype=dtype, device=device)
        self._stream = None

    def _follow(self, stream: torch.cuda.Stream) -> None:
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream
        self._buffer.record_stream(stream)

    def __reduce__(self) -> tuple[type[Workbench], tuple[HSTURankerConfig, int, torch.device]]:
        """A copy of a model has memory of its own."""
        return Workbench, self._arguments
