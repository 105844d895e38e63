"""`torch.ops.mtserve.paged_hstu_attention_planned`: attention that reads its batch from the device.

It is `ops.paged_hstu_attention` for recordings: sizes are those of a bucket, and what the batch is stands in a packed
plan on the tensors' device, which is read when the work runs and not when it is called. On the CPU the plan lies in
host memory and the native kernel does the work, so that everything around it can be tried without a device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mtserve_plugin import ops
from mtserve_plugin.triton_kernels import launch_module
from mtserve_plugin.triton_kernels.plan import ROW_FIELDS, TILE_FIELDS, sections

_NAME = "mtserve::paged_hstu_attention_planned"


def paged_hstu_attention_planned(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    layer: int,
    plan: torch.Tensor,
    rows: int,
    tiles: int,
    split_tiles: int,
    segments: int,
    pages: int,
    block_m: int,
    page_size: int,
    scale: float,
    norm_len: float,
    max_attn_len: int,
) -> torch.Tensor:
    """`ops.paged_hstu_attention` with a plan of fixed size at a fixed place.

    Args:
        q: `[T, heads, qk_dim]`, T tokens of which the plan may use fewer.
        k: like `q`.
        v: `[T, heads, v_dim]`.
        table: `[layers, pages, page_size * heads * (qk_dim + v_dim)]`.
        layer: the table's layer to read.
        plan: int32 on the device of `q`, packed as `triton_kernels/plan.py` says. What it holds is not checked: it has
            to be one that `Metadata` wrote.
        rows: batch rows that the plan has room for.
        tiles: tiles that it has room for.
        split_tiles: tiles under splitting that it has room for; 0 means no splitting.
        segments: segments of keys that one tile may see; counts under splitting alone.
        pages: page ids that it has room for.
        block_m: queries per tile.
        page_size: token rows per page.
        scale: factor on q·k.
        norm_len: the constant divisor.
        max_attn_len: attention window; 0 means all.

    Returns:
        `[T, heads, v_dim]`, the dtype of `q`, contiguous. Tokens that the plan does not use are undefined (on the CPU:
        NaN).

    Raises:
        RuntimeError: a shape, dtype or the layer is wrong.
        MissingDependencyError: the tensors are on a CUDA device and triton is missing, or the native library is.
    """
    return torch.ops.mtserve.paged_hstu_attention_planned.default(
        q, k, v, table, layer, plan, rows, tiles, split_tiles, segments, pages, block_m, page_size, scale, norm_len,
        max_attn_len,
    )  # fmt: skip


def _on_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    layer: int,
    plan: torch.Tensor,
    rows: int,
    tiles: int,
    split_tiles: int,
    segments: int,
    pages: int,
    block_m: int,
    page_size: int,
    scale: float,
    norm_len: float,
    max_attn_len: int,
) -> torch.Tensor:
    at = sections([ROW_FIELDS * rows, TILE_FIELDS * tiles, TILE_FIELDS * split_tiles, pages])
    packed = plan.numpy()
    _, dense, candidates, paged, first = packed[at[0]].reshape(rows, ROW_FIELDS).astype(np.int64).T
    offsets = np.concatenate([[0], dense.cumsum()])
    tokens = int(offsets[-1])
    out = q.new_full(v.shape, float("nan"))
    used = int(np.flatnonzero(dense).max(initial=-1)) + 1
    if used == 0:
        return out
    end = first[used - 1] + -(-paged[used - 1] // page_size)
    out[:tokens] = ops.paged_hstu_attention(
        q[:tokens],
        k[:tokens],
        v[:tokens],
        table,
        layer,
        torch.from_numpy(offsets[: used + 1].copy()),
        torch.from_numpy(candidates[:used].copy()),
        torch.from_numpy(paged[:used].copy()),
        torch.from_numpy(packed[at[3]].copy()),
        torch.from_numpy(np.append(first[:used], end).astype(np.int32)),
        page_size,
        scale,
        norm_len,
        max_attn_len,
    )
    return out


def _on_cuda(*arguments: Any) -> torch.Tensor:
    return launch_module().planned_attention(*arguments)


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
    return q.new_empty(v.shape)


torch.library.define(
    _NAME,
    "(Tensor q, Tensor k, Tensor v, Tensor table, int layer, Tensor plan, int rows, int tiles, int split_tiles, "
    "int segments, int pages, int block_m, int page_size, float scale, float norm_len, int max_attn_len) -> Tensor",
)
torch.library.impl(_NAME, "CPU", _on_cpu)
torch.library.impl(_NAME, "CUDA", _on_cuda)
torch.library.register_fake(_NAME, _fake)
