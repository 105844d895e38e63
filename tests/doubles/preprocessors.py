"""What happens to the embeddings before the attention layers: MLPs, actions, context rows in front."""

from __future__ import annotations

import abc

import torch

from tests.doubles.common import HammerModule
from tests.doubles.jagged_tensors import complete_cumsum, concat_2D_jagged, rows_and_positions
from tests.doubles.layer_norm import mlp

Payloads = dict[str, torch.Tensor]
Preprocessed = tuple[int, int, int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Payloads]


class InputPreprocessor(HammerModule):
    @abc.abstractmethod
    def forward(
        self,
        max_uih_len: int,
        max_targets: int,
        total_uih_len: int,
        total_targets: int,
        seq_lengths: torch.Tensor,
        seq_timestamps: torch.Tensor,
        seq_embeddings: torch.Tensor,
        num_targets: torch.Tensor,
        seq_payloads: Payloads,
    ) -> Preprocessed:
        """The arguments as the layers need them, offsets behind the lengths; see `ContextualPreprocessor`."""

    def interleave_targets(self) -> bool:
        return False


class ActionEncoder(HammerModule):
    def __init__(
        self,
        action_embedding_dim: int,
        action_feature_name: str,
        action_weights: list[int],
        watchtime_feature_name: str = "",
        watchtime_to_action_thresholds_and_weights: list[tuple[int, int]] | None = None,
        embedding_init_std: float = 0.1,
        is_inference: bool = False,
    ) -> None:
        super().__init__(is_inference=is_inference)
        assert not watchtime_to_action_thresholds_and_weights, "not part of the doubles"
        self._action_feature_name = action_feature_name
        self._num_action_types = len(action_weights)
        self._action_embedding_dim = action_embedding_dim
        self.register_buffer("_combined_action_weights", torch.tensor(action_weights))
        self._action_embedding_table = torch.nn.Parameter(
            torch.randn(self._num_action_types, action_embedding_dim) * embedding_init_std
        )
        self._target_action_embedding_table = torch.nn.Parameter(
            torch.randn(1, self.output_embedding_dim) * embedding_init_std
        )

    @property
    def output_embedding_dim(self) -> int:
        return self._action_embedding_dim * self._num_action_types

    def forward(
        self,
        max_uih_len: int,
        max_targets: int,
        uih_offsets: torch.Tensor,
        target_offsets: torch.Tensor,
        seq_embeddings: torch.Tensor,
        seq_payloads: Payloads,
    ) -> torch.Tensor:
        """`[T, types * dim]`; the payload holds one bit mask per history token and none for the targets."""
        taken = (seq_payloads[self._action_feature_name][:, None] & self._combined_action_weights) > 0
        history = (taken[:, :, None] * self._action_embedding_table).flatten(1)
        targets = self._target_action_embedding_table.expand(seq_embeddings.shape[0] - history.shape[0], -1)
        return concat_2D_jagged(
            max_uih_len + max_targets,
            history,
            targets,
            offsets_left=uih_offsets,
            offsets_right=target_offsets,
            kernel=self.hammer_kernel(),
        )


class ContextualPreprocessor(InputPreprocessor):
    def __init__(
        self,
        input_embedding_dim: int,
        hidden_dim: int,
        output_embedding_dim: int,
        contextual_feature_to_max_length: dict[str, int],
        contextual_feature_to_min_uih_length: dict[str, int],
        action_embedding_dim: int = 8,
        action_feature_name: str = "",
        action_weights: list[int] | None = None,
        additional_embedding_features: list[str] = [],  # noqa: B006
        action_embedding_init_std: float = 0.1,
        is_inference: bool = True,
    ) -> None:
        super().__init__(is_inference=is_inference)
        self._input_embedding_dim = input_embedding_dim
        self._output_embedding_dim = output_embedding_dim
        self._hidden_dim = hidden_dim
        self._contextual_feature_to_max_length = contextual_feature_to_max_length
        self._contextual_feature_to_min_uih_length = contextual_feature_to_min_uih_length
        self._max_contextual_seq_len = sum(contextual_feature_to_max_length.values())
        self._additional_embedding_features = additional_embedding_features
        self._action_feature_name = action_feature_name
        self._action_weights = action_weights
        rows, dim = self._max_contextual_seq_len, output_embedding_dim
        if rows > 0:
            std = (2.0 / (input_embedding_dim + dim)) ** 0.5
            self._batched_contextual_linear_weights = torch.nn.Parameter(
                torch.randn(rows, input_embedding_dim, dim) * std
            )
            self._batched_contextual_linear_bias = torch.nn.Parameter(torch.zeros(rows, dim))
        self._content_embedding_mlp = mlp(input_embedding_dim, hidden_dim, dim)
        # Without additional features the host still registers this MLP, with a first weight of zero columns.
        self._additional_embedding_mlp = mlp(input_embedding_dim * len(additional_embedding_features), hidden_dim, dim)
        if action_weights is not None:
            self._action_encoder = ActionEncoder(
                action_embedding_dim=action_embedding_dim,
                action_feature_name=action_feature_name,
                action_weights=action_weights,
                embedding_init_std=action_embedding_init_std,
                is_inference=is_inference,
            )
            self._action_embedding_mlp = mlp(self._action_encoder.output_embedding_dim, hidden_dim, dim)

    def forward(
        self,
        max_uih_len: int,
        max_targets: int,
        total_uih_len: int,
        total_targets: int,
        seq_lengths: torch.Tensor,
        seq_timestamps: torch.Tensor,
        seq_embeddings: torch.Tensor,
        num_targets: torch.Tensor,
        seq_payloads: Payloads,
    ) -> Preprocessed:
        """`seq_embeddings` [T, E] and `seq_timestamps` [T] hold history, then targets, of every row."""
        out = self._content_embedding_mlp(seq_embeddings)
        if self._additional_embedding_features:
            extra = torch.cat([seq_payloads[name] for name in self._additional_embedding_features], dim=1)
            out = out + self._additional_embedding_mlp(extra)
        offsets = complete_cumsum(seq_lengths)
        target_offsets = complete_cumsum(num_targets)
        if self._action_weights is not None:
            actions = self._action_encoder(
                max_uih_len=max_uih_len,
                max_targets=max_targets,
                uih_offsets=offsets - target_offsets,
                target_offsets=target_offsets,
                seq_embeddings=seq_embeddings,
                seq_payloads=seq_payloads,
            )
            out = out + self._action_embedding_mlp(actions)
        max_seq_len = max_uih_len + max_targets
        rows = self._max_contextual_seq_len
        if rows > 0:
            context = self._context_rows(seq_lengths, seq_payloads, seq_embeddings.dtype)
            zeros = seq_timestamps.new_zeros(context.shape[0], 1)
            max_seq_len += rows
            out = self._in_front(max_seq_len, context, out, offsets)
            seq_timestamps = self._in_front(max_seq_len, zeros, seq_timestamps[:, None], offsets)[:, 0]
            seq_lengths = seq_lengths + rows
            offsets = complete_cumsum(seq_lengths)
            total_uih_len += rows * seq_lengths.numel()
        return (
            max_seq_len,
            total_uih_len,
            total_targets,
            seq_lengths,
            offsets,
            seq_timestamps,
            out,
            num_targets,
            seq_payloads,
        )

    def _context_rows(self, seq_lengths: torch.Tensor, payloads: Payloads, dtype: torch.dtype) -> torch.Tensor:
        """`[B * C, D]`; a feature is zero where history and targets together are shorter than its minimum."""
        parts = []
        for name, length in self._contextual_feature_to_max_length.items():
            rows, place = rows_and_positions(payloads[f"{name}_offsets"])
            kept = place < length
            values = payloads[name].to(dtype)
            padded = values.new_zeros(seq_lengths.numel(), length, values.shape[1])
            padded[rows[kept], place[kept]] = values[kept]
            enough = seq_lengths >= self._contextual_feature_to_min_uih_length.get(name, 0)
            parts.append(padded * enough[:, None, None])
        weights = self._batched_contextual_linear_weights.to(dtype)
        context = torch.einsum("bce,ced->bcd", torch.cat(parts, dim=1), weights)
        return (context + self._batched_contextual_linear_bias.to(dtype)).flatten(0, 1)

    def _in_front(
        self, max_seq_len: int, context: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        return concat_2D_jagged(
            max_seq_len,
            context,
            values,
            max_len_left=self._max_contextual_seq_len,
            offsets_right=offsets,
            kernel=self.hammer_kernel(),
        )
