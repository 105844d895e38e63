"""Device code of the paged HSTU attention; `ops.paged_hstu_attention` says what it computes.

One program takes BLOCK_M queries of one batch row and one head. It walks over the keys they see in blocks of BLOCK_N,
which start at multiples of BLOCK_N of the position, and adds them up in segments of SEGMENT keys, which start at
multiples of SEGMENT. Whether a key comes from a page or from a dense row is decided per key, by its address alone, and
everything else is the same instructions. So the order of additions for a query depends on nothing but positions, and
SPLIT, which gives every segment to a program of its own, adds up the same numbers in the same order.

`plan.py` says what `rows`, `tiles` and `pages` hold, all int32; a tile's segment is read under SPLIT only. A tile of
batch row -1 does nothing: a grid may be larger than its work.
"""

# Arguments of device code have types of the device, which mypy does not know.
# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from mtserve_plugin.triton_kernels.plan import ROW_FIELDS, TILE_FIELDS

_ROW = tl.constexpr(ROW_FIELDS)
_TILE = tl.constexpr(TILE_FIELDS)


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _columns(base, columns, rows_wanted, DIM: tl.constexpr, PAD: tl.constexpr):
    """Loads [rows, PAD] from row addresses; what is not wanted and what pads is 0 and is not read."""
    wanted = rows_wanted[:, None]
    if DIM != PAD:
        wanted = wanted & (columns < DIM)[None, :]
    return tl.load(base[:, None] + columns[None, :], mask=wanted, other=0.0)


@triton.jit
def _finish(
    acc,
    q_tile,
    k,
    v,
    out,
    dense_row,
    head,
    valid,
    candidate,
    has_candidates,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    scale,
    norm_len,
    HEADS: tl.constexpr,
    QK_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    QK_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Adds to each candidate what it sees of itself, divides and stores."""
    v_columns = tl.arange(0, V_PAD)
    if has_candidates:
        own = valid & candidate
        k_own = _columns(k + dense_row * k_stride + head * k_head_stride, tl.arange(0, QK_PAD), own, QK_DIM, QK_PAD)
        v_own = _columns(v + dense_row * v_stride + head * v_head_stride, v_columns, own, V_DIM, V_PAD)
        # The diagonal of a product like all others: a sum over dims would depend on how threads share them.
        products = tl.dot(q_tile, tl.trans(k_own), input_precision="ieee")
        each = tl.arange(0, BLOCK_M)
        score = tl.sum(tl.where(each[:, None] == each[None, :], products, 0.0), 1)
        score = tl.where(own, _silu(score * scale), 0.0)
        acc = tl.fma(tl.broadcast_to(score[:, None], acc.shape), v_own.to(tl.float32), acc)
    wanted = valid[:, None]
    if V_DIM != V_PAD:
        wanted = wanted & (v_columns < V_DIM)[None, :]
    to = out + (dense_row * HEADS + head) * V_DIM
    tl.store(to[:, None] + v_columns[None, :], (acc / norm_len).to(out.dtype.element_ty), mask=wanted)


# Arguments that change from batch to batch, or lie in one packed buffer, must not ask for another compilation.
@triton.jit(
    do_not_specialize=["tokens", "window", "bucket"],
    do_not_specialize_on_alignment=["parts", "rows", "tiles", "pages"],
)
def attention_kernel(
    q,
    k,
    v,
    table,
    out,
    parts,
    rows,
    tiles,
    pages,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    page_stride,
    tokens,
    scale,
    norm_len,
    window,
    bucket,
    HEADS: tl.constexpr,
    QK_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    QK_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEGMENT: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Writes `out`, or under SPLIT one segment's sums to `parts`, float32 [segments, tokens, HEADS, V_DIM]."""
    tile = tl.program_id(0) // HEADS
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    row = tl.load(tiles + tile * _TILE)
    if row < 0:
        return
    first = tl.load(tiles + tile * _TILE + 1)
    start = tl.load(rows + row * _ROW)
    dense = tl.load(rows + row * _ROW + 1)
    history = dense - tl.load(rows + row * _ROW + 2)
    paged = tl.load(rows + row * _ROW + 3)
    page_begin = tl.load(rows + row * _ROW + 4)

    # Keys [low, high) are seen by any of the tile's queries; a query sees [oldest, newest], a candidate itself besides.
    query = first + tl.arange(0, BLOCK_M)
    valid = query < dense
    candidate = query >= history
    position = paged + tl.minimum(query, history)
    newest = tl.where(valid, tl.where(candidate, position - 1, position), -1)
    high = paged + tl.minimum(tl.minimum(first + BLOCK_M, dense), history)
    low = 0
    oldest = tl.zeros_like(position)
    if window > 0:
        low = tl.maximum(paged + tl.minimum(first, history) - window, 0)
        oldest = tl.maximum(position - window, 0)

    dense_row = start.to(tl.int64) + query
    q_tile = _columns(q + dense_row * q_stride + head * q_head_stride, tl.arange(0, QK_PAD), valid, QK_DIM, QK_PAD)
    page_v = PAGE_SIZE * HEADS * QK_DIM

    first_segment = low // SEGMENT
    last_segment = tl.cdiv(high, SEGMENT)
    if SPLIT:
        segment_begin = tl.load(tiles + tile * _TILE + 2)
        segment_end = segment_begin + 1
    else:
        segment_begin = first_segment
        segment_end = last_segment
    acc = tl.zeros([BLOCK_M, V_PAD], tl.float32)
    for segment in range(segment_begin, segment_end):
        begin = tl.maximum(segment * SEGMENT, low // BLOCK_N * BLOCK_N)
        end = tl.minimum((segment + 1) * SEGMENT, high)
        part = tl.zeros([BLOCK_M, V_PAD], tl.float32)
        for block in range(begin, end, BLOCK_N):
            key = block + tl.arange(0, BLOCK_N)
            wanted = (key >= low) & (key < high)
            cached = key < paged
            page = tl.load(pages + page_begin + key // PAGE_SIZE, mask=wanted & cached, other=0)
            # 64 bits before the product: a table may have more elements than 32 bits can count.
            page_start = table + page.to(tl.int64) * page_stride
            slot = key % PAGE_SIZE
            key_row = (start + key - paged).to(tl.int64)
            k_tile = _columns(
                tl.where(
                    cached,
                    page_start + slot * (HEADS * QK_DIM) + head * QK_DIM,
                    k + key_row * k_stride + head * k_head_stride,
                ),
                tl.arange(0, QK_PAD),
                wanted,
                QK_DIM,
                QK_PAD,
            )
            v_tile = _columns(
                tl.where(
                    cached,
                    page_start + page_v + slot * (HEADS * V_DIM) + head * V_DIM,
                    v + key_row * v_stride + head * v_head_stride,
                ),
                tl.arange(0, V_PAD),
                wanted,
                V_DIM,
                V_PAD,
            )
            score = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
            seen = (key[None, :] <= newest[:, None]) & (key[None, :] >= oldest[:, None])
            weight = tl.where(seen, _silu(score * scale), 0.0).to(v_tile.dtype)
            part = tl.dot(weight, v_tile, part, input_precision="ieee")
        acc += part

    if SPLIT:
        v_columns = tl.arange(0, V_PAD)
        slice_start = (segment_begin - first_segment).to(tl.int64) * tokens
        to = parts + ((slice_start + dense_row) * HEADS + head) * V_DIM
        tl.store(to[:, None] + v_columns[None, :], acc, mask=valid[:, None] & (v_columns < V_DIM)[None, :])
    else:
        _finish(
            acc,
            q_tile,
            k,
            v,
            out,
            dense_row,
            head,
            valid,
            candidate,
            first + BLOCK_M > history,
            k_stride,
            k_head_stride,
            v_stride,
            v_head_stride,
            scale,
            norm_len,
            HEADS,
            QK_DIM,
            V_DIM,
            QK_PAD,
            V_PAD,
            BLOCK_M,
        )


@triton.jit(do_not_specialize=["tokens", "window"], do_not_specialize_on_alignment=["parts", "rows", "tiles"])
def join_kernel(
    q,
    k,
    v,
    out,
    parts,
    rows,
    tiles,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    tokens,
    scale,
    norm_len,
    window,
    HEADS: tl.constexpr,
    QK_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    QK_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """Adds up what `attention_kernel` left in `parts` under SPLIT, in the order of the segments, and writes `out`."""
    tile = tl.program_id(0) // HEADS
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    row = tl.load(tiles + tile * _TILE)
    if row < 0:
        return
    first = tl.load(tiles + tile * _TILE + 1)
    start = tl.load(rows + row * _ROW)
    dense = tl.load(rows + row * _ROW + 1)
    history = dense - tl.load(rows + row * _ROW + 2)
    paged = tl.load(rows + row * _ROW + 3)
    query = first + tl.arange(0, BLOCK_M)
    valid = query < dense
    high = paged + tl.minimum(tl.minimum(first + BLOCK_M, dense), history)
    low = 0
    if window > 0:
        low = tl.maximum(paged + tl.minimum(first, history) - window, 0)
    dense_row = start.to(tl.int64) + query
    v_columns = tl.arange(0, V_PAD)
    acc = tl.zeros([BLOCK_M, V_PAD], tl.float32)
    part_row = dense_row
    for _ in range(low // SEGMENT, tl.cdiv(high, SEGMENT)):
        acc += _columns(parts + (part_row * HEADS + head) * V_DIM, v_columns, valid, V_DIM, V_PAD)
        part_row += tokens
    q_tile = _columns(q + dense_row * q_stride + head * q_head_stride, tl.arange(0, QK_PAD), valid, QK_DIM, QK_PAD)
    _finish(
        acc,
        q_tile,
        k,
        v,
        out,
        dense_row,
        head,
        valid,
        query >= history,
        first + BLOCK_M > history,
        k_stride,
        k_head_stride,
        v_stride,
        v_head_stride,
        scale,
        norm_len,
        HEADS,
        QK_DIM,
        V_DIM,
        QK_PAD,
        V_PAD,
        BLOCK_M,
    )
