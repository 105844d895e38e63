"""One HSTU layer, cut where the cache sits: before and after attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

# Upstream's `norm_eps` of STULayer.
_EPS = 1e-6


class HSTULayer(nn.Module):
    """`x + Linear(Norm(Attention(q, k, v)) * u)` with `u, v, q, k = SiLU(Linear(Norm(x)))` (paper, equations
    2 to 4).

    The order of the projection's columns and the norms are those of upstream's `STULayer`; unlike there SiLU
    applies to all four parts, as the paper has it, and the output projection takes the gated norm alone.

    Args:
        embedding_dim: D.
        num_heads: attention heads H.
        qk_dim: dimension of a query or key head.
        v_dim: dimension of a value head.
    """

    def __init__(self, embedding_dim: int, num_heads: int, qk_dim: int, v_dim: int) -> None:
        super().__init__()
        self._splits = [num_heads * v_dim, num_heads * v_dim, num_heads * qk_dim, num_heads * qk_dim]
        self._input_norm_weight = nn.Parameter(torch.ones(embedding_dim))
        self._input_norm_bias = nn.Parameter(torch.zeros(embedding_dim))
        self._uvqk_weight = nn.Parameter(torch.empty(embedding_dim, sum(self._splits)))
        self._uvqk_beta = nn.Parameter(torch.zeros(sum(self._splits)))
        self._output_norm_weight = nn.Parameter(torch.ones(num_heads * v_dim))
        self._output_norm_bias = nn.Parameter(torch.zeros(num_heads * v_dim))
        self._output_weight = nn.Parameter(torch.empty(num_heads * v_dim, embedding_dim))
        nn.init.xavier_uniform_(self._uvqk_weight)
        nn.init.xavier_uniform_(self._output_weight)

    def project(
        self, x: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """`[T, D]` to u, v `[T, H * v_dim]` and q, k `[T, H * qk_dim]`, in the order u, q, k, v.

        They are views of one tensor, with its row stride: of `out` `[T, 2 * H * (qk_dim + v_dim)]` where it is given,
        without gradient.
        """
        normed = F.layer_norm(x, x.shape[-1:], self._input_norm_weight, self._input_norm_bias, _EPS)
        uvqk = F.silu(torch.addmm(self._uvqk_beta, normed, self._uvqk_weight, out=out), inplace=True)
        u, v, q, k = uvqk.split(self._splits, dim=1)
        return u, q, k, v

    def output(
        self, attention: torch.Tensor, u: torch.Tensor, x: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Norm, gate, projection, residual: `attention`, `u` `[T, H * v_dim]`, `x` `[T, D]`, to `[T, D]`.

        The result is `out` where it is given, without gradient; that may be `x`.
        """
        normed = F.layer_norm(attention, attention.shape[-1:], self._output_norm_weight, self._output_norm_bias, _EPS)
        return torch.addmm(x, normed.mul_(u), self._output_weight, out=out)
