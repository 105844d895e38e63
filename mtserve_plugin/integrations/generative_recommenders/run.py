"""One batch on its way through an attached model; it lives in a context variable, never on a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property

import torch

from mtserve_plugin import jagged
from mtserve_plugin.batch import CacheBatch
from mtserve_plugin.errors import InputError
from mtserve_plugin.positions import Places, sequence_places

# The payload of an HSTUTransducer by which a caller hands over the time of each row's last stripped event.
BOUNDARY = "mtserve_boundary"


class Run:
    """A batch and what the attached modules have to know besides.

    Rows of the model hold context rows (of every user), delta and candidates; rows of the batch lack the
    context rows of users that hit.

    Args:
        batch: open.
        boundary: `[B]`, seconds, time of the last stripped event per row; `None` when nobody told.
        finish: called after the last layer, e.g. to commit.

    Attributes:
        targets_only: nothing reads what the last layer makes of the history, so that its rows may stay zero.
    """

    def __init__(
        self,
        batch: CacheBatch,
        boundary: torch.Tensor | None = None,
        finish: Callable[[], object] | None = None,
    ) -> None:
        self.batch = batch
        self.boundary = boundary
        self.targets_only = False
        self._finish = finish
        self._layer = 0

    @cached_property
    def context(self) -> torch.Tensor:
        """`[B]` int64 on the host: context rows of each row, cached ones too."""
        layout = self.batch.layout
        return layout.context + layout.paged - layout.cached

    @cached_property
    def _dropped(self) -> torch.Tensor:
        layout = self.batch.layout
        return layout.paged - layout.cached

    @cached_property
    def full_lengths(self) -> torch.Tensor:
        """`[B]` int64 on the host: the model's rows."""
        layout = self.batch.layout
        return self.context + layout.delta + layout.candidates

    @cached_property
    def kept(self) -> torch.Tensor:
        """`[num_rows]` int64 on the host: where the batch's rows are among the model's."""
        own = self.batch.offsets.diff()
        return torch.arange(self.batch.num_rows) + jagged.spread(self._dropped.cumsum(0), own)

    @cached_property
    def _dense_rows(self) -> int:
        return int(self.full_lengths.sum())

    def next_layer(self) -> int:
        self._layer += 1
        return self._layer - 1

    def only_targets(self, layer: int) -> bool:
        """True for a layer that has to be computed for the targets alone."""
        batch = self.batch
        return self.targets_only and layer + 1 == batch.num_layers and 0 < batch.num_all_candidates < batch.num_rows

    def places(self, timestamps: torch.Tensor, context_rows: int) -> Places:
        """Positions and gaps of the model's rows.

        Raises:
            InputError: the rows are not those of the batch, or nobody told the boundary of stripped rows.
        """
        self._check("seq_timestamps", timestamps.numel(), self._dense_rows)
        wrong = self.context != context_rows
        if bool(wrong.any()):
            raise InputError(
                f"the model puts {context_rows} context rows in front of a history, the batch was begun with "
                f"{int(self.context[wrong][0])}; begin it with context_tokens={context_rows}"
            )
        cached = self.batch.cached_lengths
        boundary = self.boundary
        if boundary is None:
            if bool(cached.any()):
                raise InputError(
                    f"seq_payloads has no {BOUNDARY!r}: the gap of the first event behind the stripped ones "
                    "is not known; "
                    "pass the time feature's boundary from batch.strip(...)"
                )
            boundary = timestamps.new_zeros(cached.numel())
        self._check(BOUNDARY, boundary.numel(), cached.numel())
        candidates = self.batch.num_candidates
        return sequence_places(
            timestamps,
            boundary.to(timestamps.device),
            cached,
            self.full_lengths,
            candidates,
            context_rows,
        )

    def through_layers(
        self,
        x: torch.Tensor,
        num_targets: torch.Tensor | None,
        layers: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Runs `layers(x, lengths, offsets)` on the batch's rows and puts zero rows back where context is
        cached.

        Raises:
            InputError: the rows are not those of the batch.
        """
        total, rows = self._dense_rows, self.batch.num_rows
        if x.shape[0] not in (total, rows):
            self._check("x", x.shape[0], total)
        if num_targets is not None and num_targets.device.type == "cpu":
            wrong = num_targets.to(torch.int64) != self.batch.num_candidates
            if bool(wrong.any()):
                row = int(wrong.int().argmax())
                raise InputError(
                    f"num_targets[{row}] is {int(num_targets[row])}, the batch was begun with "
                    f"{int(self.batch.num_candidates[row])} candidates in this row"
                )
        offsets = self.batch.offsets.to(x.device, non_blocking=True)
        if x.shape[0] == rows:
            out = layers(x, offsets.diff(), offsets)
        else:
            kept = self.kept.to(x.device, non_blocking=True)
            inner = layers(x.index_select(0, kept), offsets.diff(), offsets)
            out = inner.new_zeros((total, *inner.shape[1:])).index_copy_(0, kept, inner)
        if self._finish is not None:
            self._finish()
        return out

    def _check(self, name: str, found: int, expected: int) -> None:
        if found != expected:
            raise InputError(
                f"{name} has {found} rows, this batch has {expected}: {self.batch.batch_size} rows of "
                "context rows, "
                "delta and candidates; strip the features with batch.strip(...) of the same batch"
            )


_current: ContextVar[Run | None] = ContextVar("mtserve_run", default=None)


def current_run() -> Run | None:
    """The batch that is on its way in this thread or task."""
    return _current.get()


@contextmanager
def entered(run: Run) -> Iterator[Run]:
    """Makes `run` the current one."""
    token = _current.set(run)
    try:
        yield run
    finally:
        _current.reset(token)
