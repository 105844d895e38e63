"""Position and time embeddings, counted from the end of the history and from the query."""

from __future__ import annotations

import torch

from tests.doubles.common import HammerModule, require_pytorch
from tests.doubles.jagged_tensors import rows_and_positions


class HSTUPositionalEncoder(HammerModule):
    """Not append-stable: each event moves all older positions and times. Buckets are roots of minutes."""

    def __init__(
        self,
        num_position_buckets: int,
        num_time_buckets: int,
        embedding_dim: int,
        contextual_seq_len: int,
        is_inference: bool = True,
    ) -> None:
        super().__init__(is_inference=is_inference)
        self._embedding_dim = embedding_dim
        self._contextual_seq_len = contextual_seq_len
        self._position_embeddings_weight = _table(num_position_buckets, num_position_buckets, embedding_dim)
        self._timestamp_embeddings_weight = _table(num_time_buckets + 1, num_time_buckets, embedding_dim)

    def forward(
        self,
        max_seq_len: int,
        seq_lengths: torch.Tensor,
        seq_offsets: torch.Tensor,
        seq_timestamps: torch.Tensor,
        seq_embeddings: torch.Tensor,
        num_targets: torch.Tensor | None,
    ) -> torch.Tensor:
        """`seq_embeddings` [T, D] and `seq_timestamps` [T] (seconds) include context rows and targets."""
        require_pytorch(self.hammer_kernel())
        positions, times = self._position_embeddings_weight, self._timestamp_embeddings_weight
        rows, place = rows_and_positions(seq_offsets)
        end = (seq_lengths if num_targets is None else seq_lengths - num_targets)[rows]
        behind = place if num_targets is None else torch.minimum(place, end)
        index = (end - behind + self._contextual_seq_len).clamp(max=positions.shape[0] - 1)
        index = torch.where(place < self._contextual_seq_len, place, index)

        query = seq_timestamps[(seq_offsets[1:] - 1)[rows]]
        minutes = (query - seq_timestamps).clamp(min=1e-6) / 60.0
        # The host bounds the bucket by the table's width instead of its length.
        bucket = minutes.sqrt().int().clamp(max=times.shape[1] - 1)
        added = times[bucket] + positions[index]
        return seq_embeddings * self._embedding_dim**0.5 + added.to(seq_embeddings.dtype)


def _table(rows: int, buckets: int, dim: int) -> torch.nn.Parameter:
    bound = buckets**-0.5
    return torch.nn.Parameter(torch.empty(rows, dim).uniform_(-bound, bound))
