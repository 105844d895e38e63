"""The two norms inside the host's MLPs."""

from __future__ import annotations

import torch
from torch.nn import functional

from tests.doubles.common import HammerModule


class LayerNorm(HammerModule):
    def __init__(self, dim: int, eps: float = 1e-5, is_inference: bool = False) -> None:
        super().__init__(is_inference=is_inference)
        self._normalized_shape = [dim]
        self._eps = eps
        self.weight = torch.nn.Parameter(torch.ones(dim))
        self.bias = torch.nn.Parameter(torch.zeros(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, self._eps)


class SwishLayerNorm(LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(super().forward(x))


def mlp(in_dim: int, hidden_dim: int, out_dim: int) -> torch.nn.Sequential:
    """The host's usual block: two linear layers, a gate between them, a norm at the end."""
    return torch.nn.Sequential(
        torch.nn.Linear(in_dim, hidden_dim),
        SwishLayerNorm(hidden_dim),
        torch.nn.Linear(hidden_dim, out_dim),
        LayerNorm(out_dim),
    )
