"""Paged HSTU attention on CUDA tensors: checks, the batch's plan, the choice of blocks, the launch.

What the kernels need to know about a batch is worked out on the host, where its lengths are, packed into one buffer and
copied once, without waiting; all layers of the batch use that copy. It is found again by the identity of the length
tensors, as `CacheBatch` hands out the same ones for every layer.

The bits of the result do not depend on the plan: BLOCK_N and SEGMENT follow from dtype and dims alone, and what is
tuned (warps, pipeline stages) or chosen per batch (BLOCK_M, splitting) changes no order of additions.

A CUDA graph can be recorded around a batch whose plan was made before, by a call with the same length tensors on the
same stream. It replays that batch: plan and grid belong to its lengths, and the length tensors must live as long as it.
`planned_attention` is for graphs that serve other batches too: its plan lies where the caller keeps it.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch.utils.weak import WeakIdKeyDictionary

from mtserve_plugin.triton_kernels import ALONE
from mtserve_plugin.triton_kernels.attention import attention_kernel, join_kernel
from mtserve_plugin.triton_kernels.plan import (
    ROW_FIELDS,
    SEGMENT,
    TILE_FIELDS,
    Lengths,
    cut,
    queries_per_tile,
    sections,
    tuning_key,
)

_OP = "paged_hstu_attention"
# True if the kernels run in triton's interpreter, on CPU tensors (TRITON_INTERPRET=1 when triton is imported).
INTERPRETED = not isinstance(attention_kernel, triton.JITFunction)
# The interpreter runs one program after the other; as a device of this size it splits what is small in tests.
_INTERPRETED_PROCESSORS = 8


class Blocks(NamedTuple):
    """Sizes of a program's work: queries, keys per block, and what is tried to run them."""

    queries: int
    many_queries: int  # where rows have many
    keys: int
    configs: tuple[triton.Config, ...]  # the first is used untuned


@cache
def choose_blocks(dtype: torch.dtype, qk_dim: int, v_dim: int) -> Blocks:
    """Block sizes for one geometry; the number of keys must depend on nothing else, since it orders the sums."""
    widest = max(_padded(qk_dim), _padded(v_dim))
    if dtype == torch.float32:
        # Full products run on the ordinary units, which hold their operands in registers: small blocks do not spill.
        size = 32 if widest <= 64 else 16
        return Blocks(size, size, size, _configs((8, 2), (4, 2), (8, 3)))
    # 64 queries fill the smallest tensor core tile of every architecture from sm_90 on. Fewer would run on other
    # instructions there, which may round otherwise.
    if widest <= 128:
        return Blocks(64, 128, 64, _configs((8, 3), (8, 3, 128), (8, 5), (4, 3)))
    return Blocks(64, 64, 32 if widest <= 256 else 16, _configs((8, 3), (8, 2)))


def _configs(*choices: tuple[int, ...]) -> tuple[triton.Config, ...]:
    """From warps, stages and registers per thread, the latter where two programs shall fit a processor.

    The load of the page ids takes every second stage: three make two buffers for keys, five make three.
    """
    return tuple(
        triton.Config({}, num_warps=warps, num_stages=stages, maxnreg=next(iter(registers), None))
        for warps, stages, *registers in choices
    )


def _padded(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))


@dataclass(frozen=True)
class Plan:
    """One batch as the kernels see it.

    Attributes:
        rows, tiles, split_tiles, pages: int32 on the device; records as in `attention.py`. All lie in one buffer.
        num_tiles: programs per head without splitting.
        num_split_tiles: programs per head with it.
        segments: most segments that one tile sees.
        bucket: what the tuning goes by: programs and keys, each to a power of two.
    """

    rows: torch.Tensor
    tiles: torch.Tensor
    split_tiles: torch.Tensor
    pages: torch.Tensor
    num_tiles: int
    num_split_tiles: int
    segments: int
    bucket: int
    block_m: int
    split: bool


def make_plan(
    lengths: Lengths,
    device: torch.device,
    *,
    heads: int,
    window: int,
    blocks: Blocks,
    processors: int,
    split: bool | None,
) -> Plan:
    """Cuts the batch into tiles and copies all that the kernels read about it to `device`, without waiting.

    Args:
        processors: how many programs the device runs at once, about; decides on splitting where `split` is `None`.
    """
    rows = len(lengths.offsets) - 1
    block_m = queries_per_tile(blocks.queries, blocks.many_queries, int(lengths.offsets[-1]), rows)
    work = cut(lengths, block_m=block_m, heads=heads, window=window, processors=processors, split=split)
    there = _copied([work.rows, work.tiles, work.split_tiles, work.pages], device)
    programs = max(1, len(work.split_tiles) if work.split else len(work.tiles)) * heads
    return Plan(
        rows=there[0],
        tiles=there[1],
        split_tiles=there[2],
        pages=there[3],
        num_tiles=len(work.tiles),
        num_split_tiles=len(work.split_tiles),
        segments=work.segments,
        bucket=tuning_key(programs, work.keys),
        block_m=block_m,
        split=work.split,
    )


def _copied(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """int32 copies on the device, in one buffer and one transfer; pinned, so that the host does not wait for it."""
    at = sections([x.size for x in arrays])
    packed = torch.empty(at[-1].stop, dtype=torch.int32, pin_memory=device.type == "cuda")
    view = packed.numpy()
    for where, x in zip(at, arrays, strict=True):
        view[where] = x.reshape(-1)
    there = packed.to(device, non_blocking=True)
    return [there[where] for where in at]


# ---- arguments -------------------------------------------------------------------------------------------------


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(f"{_OP}: {message}")


def _check_tensors(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, layer: int, page_size: int
) -> None:
    _require(q.dim() == 3, f"q has shape {list(q.shape)}; expected [tokens, heads, qk_dim]")
    _require(k.shape == q.shape, f"k has shape {list(k.shape)}; expected that of q, {list(q.shape)}")
    _require(
        v.dim() == 3 and v.shape[:2] == q.shape[:2],
        f"v has shape {list(v.shape)}; expected [{q.shape[0]}, {q.shape[1]}, v_dim]",
    )
    _require(
        q.dtype in (torch.float32, torch.float16, torch.bfloat16),
        f"q is {q.dtype}; expected float32, float16 or bfloat16",
    )
    for name, x in (("k", k), ("v", v), ("table", table)):
        _require(x.dtype == q.dtype, f"{name} is {x.dtype}; expected {q.dtype}, as q")
        _require(x.device == q.device, f"{name} is on {x.device}; expected {q.device}, as q")
    _require(table.dim() == 3, f"table has shape {list(table.shape)}; expected [layers, pages, page_elements]")
    _require(table.shape[2] <= 1 or table.stride(2) == 1, "table must be contiguous in its last dimension")
    _require(0 <= layer < table.shape[0], f"layer is {layer}; the table has {table.shape[0]} layers")
    _require(page_size > 0, f"page_size is {page_size}; it must be positive")
    elements = page_size * q.shape[1] * (q.shape[2] + v.shape[2])
    _require(
        table.shape[2] == elements,
        f"table has pages of {table.shape[2]} elements; page_size={page_size} token rows of k and v are {elements}",
    )


def _check_numbers(scale: float, norm_len: float, max_attn_len: int) -> None:
    _require(norm_len > 0 and math.isfinite(norm_len), f"norm_len is {norm_len}; it must be positive")
    _require(math.isfinite(scale), f"scale is {scale}; it must be finite")
    _require(max_attn_len >= 0, f"max_attn_len is {max_attn_len}; it must not be negative (0: no window)")


def _check_lengths(x: Lengths, tokens: int, num_pages: int, page_size: int) -> None:
    """Whether what the rows say about themselves can be read without leaving any tensor."""
    _require(len(x.offsets) >= 1, "offsets is empty; expected batch size + 1 entries")
    rows = len(x.offsets) - 1
    for name, array, size in (
        ("num_candidates", x.candidates, rows),
        ("paged_lens", x.paged, rows),
        ("page_indptr", x.indptr, rows + 1),
    ):
        _require(len(array) == size, f"{name} has {len(array)} entries; offsets says {rows} rows, so expected {size}")
    dense, given = np.diff(x.offsets), np.diff(x.indptr)
    _require(x.offsets[0] == 0, f"offsets[0] is {x.offsets[0]}; expected 0")
    _require(bool((dense >= 0).all()), "offsets falls; it must rise")
    _require(x.offsets[-1] == tokens, f"offsets ends at {x.offsets[-1]}; q has {tokens} token rows")
    _require(
        bool(((x.candidates >= 0) & (x.candidates <= dense)).all()),
        "num_candidates has an entry below 0 or above the row's dense rows",
    )
    _require(bool((x.paged >= 0).all()), "paged_lens has a negative entry")
    _require(
        x.indptr[0] >= 0 and bool((given >= 0).all()) and x.indptr[-1] <= len(x.pages),
        f"page_indptr must rise from 0 or more to at most {len(x.pages)}, the entries of page_indices",
    )
    needed = -(-x.paged // page_size)
    _require(
        bool((needed <= given).all()), "paged_lens has an entry that needs more pages than page_indptr gives the row"
    )
    if needed.any():
        of = np.repeat(np.arange(rows), needed)
        used = x.pages[x.indptr[of] + np.arange(len(of)) - np.repeat(np.cumsum(needed) - needed, needed)]
        _require(
            bool(((used >= 0) & (used < num_pages)).all()),
            f"page_indices has an entry that is no page of the table; it has {num_pages} pages",
        )
    most = 2**31 - 2 * SEGMENT
    _require(
        tokens < most and bool((x.paged < most - dense).all()), "a row has more tokens than 32-bit positions can count"
    )


def _on_host(name: str, x: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    _require(x.dim() == 1, f"{name} has shape {list(x.shape)}; expected one dimension")
    _require(x.dtype == dtype, f"{name} is {x.dtype}; expected {dtype}")
    _require(
        x.device.type == "cpu",
        f"{name} is on {x.device}; lengths and page lists are read on the host: pass them as CPU tensors "
        "(as CacheBatch does), they are copied once per batch",
    )
    return x.detach().numpy()


# ---- plans by the identity of the length tensors ---------------------------------------------------------------


class _Remembered(NamedTuple):
    others: tuple[weakref.ref[torch.Tensor], ...]
    versions: tuple[int, ...]
    key: tuple[Any, ...]
    plan: Plan


_plans: WeakIdKeyDictionary = WeakIdKeyDictionary()
_lock = threading.Lock()


def _version(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _recall(lengths: tuple[torch.Tensor, ...], key: tuple[Any, ...]) -> Plan | None:
    with _lock:
        known: _Remembered | None = _plans.get(lengths[0])
    if (
        known is None
        or known.key != key
        or known.versions != tuple(map(_version, lengths))
        or any(ref() is not x for ref, x in zip(known.others, lengths[1:], strict=True))
    ):
        return None
    return known.plan


def _remember(lengths: tuple[torch.Tensor, ...], key: tuple[Any, ...], plan: Plan) -> None:
    others = tuple(weakref.ref(x) for x in lengths[1:])
    with _lock:
        _plans[lengths[0]] = _Remembered(others, tuple(map(_version, lengths)), key, plan)


# ---- launch ----------------------------------------------------------------------------------------------------


def paged_hstu_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    layer: int,
    offsets: torch.Tensor,
    num_candidates: torch.Tensor,
    paged_lens: torch.Tensor,
    page_indices: torch.Tensor,
    page_indptr: torch.Tensor,
    page_size: int,
    scale: float,
    norm_len: float,
    max_attn_len: int,
    *,
    split: bool | None = None,
    config: triton.Config | None = None,
) -> torch.Tensor:
    """`ops.paged_hstu_attention` for CUDA tensors; lengths and page lists stay on the host.

    Scores are rounded to the dtype of `v` before they meet the values, as tensor cores want it; sums are float32. The
    first batch of a new size (programs and keys, to a power of two) tries the kernel's configurations, which compiles
    them and waits for the device; `MTSERVE_TRITON_AUTOTUNE=0` forbids it. In the interpreter tensors are on the CPU.

    Args:
        split: whether segments of keys go to programs of their own; `None` decides by the size of the batch. It does
            not change a bit of the result.
        config: warps and stages to run with instead of the tuned ones.

    Raises:
        RuntimeError: a shape, dtype, device, page id, length or the layer is wrong.
        triton.runtime.errors.OutOfResources: the head dims need more shared memory than the device has.
    """
    _check_tensors(q, k, v, table, layer, page_size)
    _check_numbers(scale, norm_len, max_attn_len)
    tokens, heads, qk_dim = q.shape
    device, dtype = q.device, q.dtype
    blocks = choose_blocks(dtype, qk_dim, v.shape[2])
    lengths = (offsets, num_candidates, paged_lens, page_indices, page_indptr)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (q.shape, v.shape, dtype, table.shape[1], page_size, max_attn_len, device, stream, split)
    plan = _recall(lengths, key)
    if plan is None:
        arrays = Lengths(
            _on_host("offsets", offsets, torch.int64),
            _on_host("num_candidates", num_candidates, torch.int64),
            _on_host("paged_lens", paged_lens, torch.int64),
            _on_host("page_indices", page_indices, torch.int32),
            _on_host("page_indptr", page_indptr, torch.int32),
        )
        _check_lengths(arrays, tokens, table.shape[1], page_size)
        plan = make_plan(
            arrays, device, heads=heads, window=max_attn_len, blocks=blocks, processors=processors(device), split=split
        )
        _remember(lengths, key, plan)
    return _launch(q, k, v, table, layer, plan, page_size, scale, norm_len, max_attn_len, config)


def planned_attention(
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
    """`graphs.operator.paged_hstu_attention_planned` for CUDA tensors: reads nothing on the host and allocates alike
    whatever the plan says, so that it can be recorded. Configurations are tried outside of a recording alone.

    Raises:
        RuntimeError: a shape, dtype, device or the layer is wrong; what the plan says is not checked.
    """
    _check_tensors(q, k, v, table, layer, page_size)
    _check_numbers(scale, norm_len, max_attn_len)
    _require(
        plan.dtype == torch.int32 and plan.dim() == 1, f"plan is {plan.dtype} {list(plan.shape)}; expected int32 [n]"
    )
    _require(plan.device == q.device, f"plan is on {plan.device}; expected {q.device}, as q")
    at = sections([ROW_FIELDS * rows, TILE_FIELDS * tiles, TILE_FIELDS * split_tiles, pages])
    _require(at[-1].stop <= plan.numel(), f"plan has {plan.numel()} entries; rows, tiles and pages need {at[-1].stop}")
    packed = [plan[where] for where in at]
    programs = (split_tiles or tiles) * q.shape[1]
    fixed = Plan(
        rows=packed[0],
        tiles=packed[1],
        split_tiles=packed[2],
        pages=packed[3],
        num_tiles=tiles,
        num_split_tiles=split_tiles,
        segments=segments,
        bucket=tuning_key(programs, segments * SEGMENT),
        block_m=block_m,
        split=split_tiles > 0,
    )
    return _launch(q, k, v, table, layer, fixed, page_size, scale, norm_len, max_attn_len, None)


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    layer: int,
    plan: Plan,
    page_size: int,
    scale: float,
    norm_len: float,
    max_attn_len: int,
    config: triton.Config | None,
) -> torch.Tensor:
    tokens, heads, qk_dim = q.shape
    v_dim = v.shape[2]
    device, dtype = q.device, q.dtype
    blocks = choose_blocks(dtype, qk_dim, v_dim)
    out = q.new_empty(v.shape)
    if out.numel() == 0:
        return out
    if qk_dim == 0:
        return out.zero_()
    if INTERPRETED and dtype == torch.bfloat16:
        # The interpreter neither multiplies bfloat16 rightly nor rounds to it.
        q, k, v, table, out = (x.float() for x in (q, k, v, table, out))
    q, k, v = (x if x.shape[2] <= 1 or x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    # A slice of a table without pages has no address of its own; nothing of it is read.
    pages_of_layer = table[layer]
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    constants = {
        "HEADS": heads,
        "QK_DIM": qk_dim,
        "V_DIM": v_dim,
        "QK_PAD": _padded(qk_dim),
        "V_PAD": _padded(v_dim),
        "BLOCK_M": plan.block_m,
        "SEGMENT": SEGMENT,
    }
    parts = out
    if plan.split:
        parts = torch.empty((plan.segments, tokens, heads, v_dim), dtype=torch.float32, device=device)
    tiles, count = (plan.split_tiles, plan.num_split_tiles) if plan.split else (plan.tiles, plan.num_tiles)
    arguments = (q, k, v, pages_of_layer, out, parts, plan.rows, tiles, plan.pages, *strides)
    arguments += (table.stride(1), tokens, scale, norm_len, max_attn_len, plan.bucket)
    all_constants = constants | {"PAGE_SIZE": page_size, "BLOCK_N": blocks.keys, "SPLIT": plan.split}
    kind = (device, dtype, plan.bucket, *all_constants.values())
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        _run(blocks.configs, config, kind, (count * heads,), arguments, all_constants)
        if plan.split:
            join_kernel[(plan.num_tiles * heads,)](
                q, k, v, out, parts, plan.rows, plan.tiles, *strides, tokens, scale, norm_len, max_attn_len, **constants
            )
    return out.to(dtype)


@cache
def processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


_best: dict[tuple[Any, ...], triton.Config] = {}


def _run(
    configs: tuple[triton.Config, ...],
    config: triton.Config | None,
    key: tuple[Any, ...],
    grid: tuple[int],
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
) -> None:
    if grid[0] == 0:
        return
    chosen = config or _best.get(key)
    if chosen is None and _may_tune():
        # The tuner keeps the arguments of the call in itself.
        with ALONE:
            tuner = _tuner(configs)
            tuner[grid](*arguments, **constants)
            _best[key] = tuner.best_config
        return
    chosen = chosen or configs[0]
    attention_kernel[grid](*arguments, **constants, **chosen.all_kwargs())


@cache
def _tuner(configs: tuple[triton.Config, ...]) -> Any:
    keys = ["bucket", "QK_DIM", "V_DIM", "HEADS", "PAGE_SIZE", "BLOCK_M", "SPLIT"]
    return triton.autotune(list(configs), key=keys, cache_results=True)(attention_kernel)


def _may_tune() -> bool:
    if INTERPRETED or os.environ.get("MTSERVE_TRITON_AUTOTUNE") == "0":
        return False
    # Trying configurations waits for the device, which a graph that is being recorded forbids.
    return not torch.cuda.is_current_stream_capturing()
