"""Joining and parting jagged rows; a jagged tensor is `[total, D]`, row b is `offsets[b]:offsets[b + 1]`."""

from __future__ import annotations

import torch

from tests.doubles.common import HammerKernel, require_pytorch


def complete_cumsum(lengths: torch.Tensor) -> torch.Tensor:
    """Offsets `[B + 1]` of lengths `[B]`."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def rows_and_positions(offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For every token the row it belongs to and its place in the row, `[total]` each."""
    lengths = offsets.diff()
    rows = torch.repeat_interleave(torch.arange(lengths.numel(), device=offsets.device), lengths)
    return rows, torch.arange(rows.numel(), device=offsets.device) - offsets[rows]


def _offsets(offsets: torch.Tensor | None, total: int, length: int | None, like: torch.Tensor) -> torch.Tensor:
    if offsets is not None:
        return offsets
    assert length is not None
    return torch.arange(0, total + 1, length, device=like.device)


def concat_2D_jagged(
    max_seq_len: int,
    values_left: torch.Tensor,
    values_right: torch.Tensor,
    max_len_left: int | None = None,
    max_len_right: int | None = None,
    offsets_left: torch.Tensor | None = None,
    offsets_right: torch.Tensor | None = None,
    kernel: HammerKernel = HammerKernel.PYTORCH,
) -> torch.Tensor:
    """Row b of the result is row b of left, then row b of right; without offsets a side is dense."""
    require_pytorch(kernel)
    left = _offsets(offsets_left, values_left.shape[0], max_len_left, values_left)
    right = _offsets(offsets_right, values_right.shape[0], max_len_right, values_right)
    row_left, _ = rows_and_positions(left)
    row_right, _ = rows_and_positions(right)
    order = torch.cat([row_left, row_right]).argsort(stable=True)
    return torch.cat([values_left, values_right])[order]


def split_2D_jagged(
    max_seq_len: int,
    values: torch.Tensor,
    total_len_left: int | None = None,
    total_len_right: int | None = None,
    max_len_left: int | None = None,
    max_len_right: int | None = None,
    offsets_left: torch.Tensor | None = None,
    offsets_right: torch.Tensor | None = None,
    kernel: HammerKernel = HammerKernel.PYTORCH,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `concat_2D_jagged`; both offsets are needed here."""
    require_pytorch(kernel)
    assert offsets_left is not None
    assert offsets_right is not None
    rows, positions = rows_and_positions(offsets_left + offsets_right)
    in_left = positions < offsets_left.diff()[rows]
    return values[in_left], values[~in_left]
