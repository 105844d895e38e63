"""The three operators of a layer: projections, attention, output."""

from __future__ import annotations

import torch
from torch.nn import functional

from tests.doubles.common import HammerKernel, require_pytorch
from tests.doubles.jagged_tensors import rows_and_positions


def hstu_compute_uqvk(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    norm_eps: float,
    num_heads: int,
    attn_dim: int,
    hidden_dim: int,
    uvqk_weight: torch.Tensor,
    uvqk_bias: torch.Tensor,
    kernel: HammerKernel = HammerKernel.PYTORCH,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`x` [T, D] to u [T, H * V], q and k [T, H, A], v [T, H, V]; the weight holds u, v, q, k."""
    require_pytorch(kernel)
    normed = functional.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, norm_eps)
    v_row, k_row = hidden_dim * num_heads, attn_dim * num_heads
    u, v, q, k = (normed @ uvqk_weight + uvqk_bias).split([v_row, v_row, k_row, k_row], dim=1)
    heads = (num_heads, -1)
    return functional.silu(u), q.unflatten(1, heads), k.unflatten(1, heads), v.unflatten(1, heads)


def visible(
    seq_offsets: torch.Tensor, num_targets: torch.Tensor | None, max_attn_len: int, contextual_seq_len: int
) -> torch.Tensor:
    """Which query sees which key, `[T, T]` bool over the whole batch.

    A target counts as the position right behind the history, so that targets do not see each other; context
    rows share position 0 and see the whole history.
    """
    rows, ids = rows_and_positions(seq_offsets)
    end = seq_offsets.diff()
    same = torch.eye(rows.numel(), dtype=torch.bool, device=rows.device)
    if contextual_seq_len > 0:
        ids = (ids - contextual_seq_len + 1).clamp(min=0)
        end = end - contextual_seq_len + 1
    if num_targets is not None:
        end = end - num_targets
        ids = torch.minimum(ids, end[rows])
    distance = ids[:, None] - ids[None, :]
    seen = same | (distance > 0)
    if max_attn_len > 0:
        seen = seen & (distance <= max_attn_len)
    if contextual_seq_len > 0:
        seen = seen | ((ids[:, None] == 0) & (ids < end[rows])[None, :])
    return seen & (rows[:, None] == rows[None, :])


def hstu_preprocess_and_attention(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    norm_eps: float,
    num_heads: int,
    attn_dim: int,
    hidden_dim: int,
    uvqk_weight: torch.Tensor,
    uvqk_bias: torch.Tensor,
    max_seq_len: int,
    seq_offsets: torch.Tensor,
    attn_alpha: float,
    causal: bool,
    num_targets: torch.Tensor | None,
    max_attn_len: int,
    contextual_seq_len: int,
    recompute_uvqk_in_backward: bool,
    recompute_normed_x_in_backward: bool,
    sort_by_length: bool,
    prefill: bool = False,
    kernel: HammerKernel = HammerKernel.PYTORCH,
    enable_tma: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """u and the attention's output, `[T, H * V]` each, then k, v. As in the host, `max_seq_len` divides."""
    assert causal, "only causal attention"
    u, q, k, v = hstu_compute_uqvk(
        x, norm_weight, norm_bias, norm_eps, num_heads, attn_dim, hidden_dim, uvqk_weight, uvqk_bias, kernel
    )
    seen = visible(seq_offsets, num_targets, max_attn_len, contextual_seq_len)
    scores = functional.silu(torch.einsum("thd,shd->hts", q, k) * attn_alpha) / max_seq_len
    return u, torch.einsum("hts,shd->thd", scores * seen, v).flatten(1), k, v


def hstu_compute_output(
    attn: torch.Tensor,
    u: torch.Tensor,
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    norm_eps: float,
    output_weight: torch.Tensor,
    num_heads: int,
    linear_dim: int,
    dropout_ratio: float,
    training: bool,
    concat_u: bool,
    concat_x: bool,
    mul_u_activation_type: str,
    group_norm: bool,
    recompute_y_in_backward: bool,
    kernel: HammerKernel = HammerKernel.PYTORCH,
) -> torch.Tensor:
    """`x + [u, attn, u * norm(attn)] @ output_weight`, `[T, D]`."""
    require_pytorch(kernel)
    assert concat_u, "only what a layer asks for"
    assert concat_x, "only what a layer asks for"
    if group_norm:
        normed = functional.group_norm(attn.unflatten(1, (num_heads, -1)), num_heads, norm_weight, norm_bias, norm_eps)
        normed = normed.flatten(1)
    else:
        normed = functional.layer_norm(attn, attn.shape[-1:], norm_weight, norm_bias, norm_eps)
    y = functional.dropout(torch.cat([u, attn, u * normed], dim=1), dropout_ratio, training)
    return x + y @ output_weight
