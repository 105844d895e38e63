"""What happens to the candidates' embeddings after the attention layers."""

from __future__ import annotations

from abc import abstractmethod

import torch

from tests.doubles.common import HammerModule

Payloads = dict[str, torch.Tensor]


class OutputPostprocessor(HammerModule):
    @abstractmethod
    def forward(
        self, seq_embeddings: torch.Tensor, seq_timestamps: torch.Tensor, seq_payloads: Payloads
    ) -> torch.Tensor:
        """`[L, D]` and `[L]` (seconds) to `[L, D]`."""


class L2NormPostprocessor(OutputPostprocessor):
    def __init__(self, is_inference: bool = False) -> None:
        super().__init__(is_inference=is_inference)

    def forward(
        self, seq_embeddings: torch.Tensor, seq_timestamps: torch.Tensor, seq_payloads: Payloads
    ) -> torch.Tensor:
        return torch.nn.functional.normalize(seq_embeddings, dim=-1, eps=1e-6)


class LayerNormPostprocessor(OutputPostprocessor):
    def __init__(self, embedding_dim: int, eps: float = 1e-5, is_inference: bool = False) -> None:
        super().__init__(is_inference=is_inference)
        self._layer_norm = torch.nn.LayerNorm([embedding_dim], eps=eps)

    def forward(
        self, seq_embeddings: torch.Tensor, seq_timestamps: torch.Tensor, seq_payloads: Payloads
    ) -> torch.Tensor:
        return self._layer_norm(seq_embeddings.to(self._layer_norm.weight.dtype))


class TimestampLayerNormPostprocessor(OutputPostprocessor):
    """Adds where in each period (an hour of a day, a day of a week) the candidate's time falls."""

    def __init__(
        self,
        embedding_dim: int,
        time_duration_features: list[tuple[int, int]],
        eps: float = 1e-5,
        is_inference: bool = False,
    ) -> None:
        super().__init__(is_inference=is_inference)
        self._layer_norm = torch.nn.LayerNorm([embedding_dim], eps=eps)
        units, periods = zip(*time_duration_features, strict=True)
        self.register_buffer("_period_units", torch.tensor([units], dtype=torch.float32))
        self.register_buffer("_units_per_period", torch.tensor([periods], dtype=torch.float32))
        self._time_feature_combiner = torch.nn.Linear(embedding_dim + 2 * len(units), embedding_dim)

    def forward(
        self, seq_embeddings: torch.Tensor, seq_timestamps: torch.Tensor, seq_payloads: Payloads
    ) -> torch.Tensor:
        units = torch.div(seq_timestamps[:, None].float(), self._period_units.float(), rounding_mode="floor")
        # The host's pi has two digits.
        angle = torch.remainder(units, self._units_per_period) / self._units_per_period * (2 * 3.14)
        features = torch.stack([angle.cos(), angle.sin()], dim=-1).flatten(1).to(seq_embeddings.dtype)
        joined = torch.cat([seq_embeddings, features], dim=1)
        return self._layer_norm(self._time_feature_combiner(joined.to(self._time_feature_combiner.weight.dtype)))
