"""torch.ops.mtserve.*: the operators on pages, their schemas, fake kernels and typed wrappers.

Layout, the same for all of them: a device table is `[layers, pages, page_elements]`; a page of one layer is
its K block `[page_size, heads, qk_dim]` and behind it its V block `[page_size, heads, v_dim]`. Dtypes are
float32, float16 or bfloat16, the same for all floating tensors of a call.

For CUDA tensors the copies are CUDA kernels (CMake option `MTSERVE_CUDA`), attention is a Triton kernel
(`triton_kernels/`). Lengths, page lists and slots stay on the host, where `CacheBatch` keeps them: they are copied to
the device once per tensor, without waiting for it.

The CPU kernels release the GIL and run on torch's threads. They are compiled for several instruction sets;
the environment variable `MTSERVE_CPU_ISA` (`baseline`, `avx2`, `avx512`, `avx512_bf16`, `amx`) forbids those wider
than the one it names.

The native library is loaded when this module is imported. Where it is missing the module still imports, and
the first call raises `MissingDependencyError`. Bad arguments raise `RuntimeError`, which names operator and
argument.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.utils.weak import WeakIdKeyDictionary

from mtserve_plugin.errors import MissingDependencyError

_REBUILD = "pip install --no-build-isolation --no-deps --force-reinstall mtserve-plugin (-e . in a checkout)"


def _load() -> str | None:
    """Loads the native library; returns what went wrong, or None."""
    spec = importlib.util.find_spec("mtserve_plugin._ops")
    if spec is None or spec.origin is None:
        return f"the native library mtserve_plugin/_ops is missing; build it: {_REBUILD}"
    try:
        torch.ops.load_library(spec.origin)
    except (OSError, RuntimeError) as error:
        return (
            f"{spec.origin} cannot be loaded into torch {torch.__version__} ({error}); "
            f"mtserve-plugin needs torch>=2.11,<2.15; rebuild it: {_REBUILD}"
        )
    if torch.version.cuda is not None:
        _load_cuda()
    return None


def _load_cuda() -> None:
    """Adds the page operators for CUDA tensors, where this build has them (CMake option MTSERVE_CUDA)."""
    spec = importlib.util.find_spec("mtserve_plugin._ops_cuda")
    if spec is None or spec.origin is None:
        return
    try:
        torch.ops.load_library(spec.origin)
    except (OSError, RuntimeError) as error:
        logging.getLogger(__name__).warning("%s cannot be loaded; operators stay on the CPU: %s", spec.origin, error)


_problem = _load()


def is_available() -> bool:
    """True if the native library was loaded, so that the operators can be called."""
    return _problem is None


def _operator(name: str) -> Callable[..., Any]:
    problem = _problem
    if problem is None:
        if hasattr(torch.ops.mtserve, name):
            return getattr(torch.ops.mtserve, name).default
        problem = f"the native library is older than the package and lacks it; rebuild it: {_REBUILD}"

    def missing(*args: Any) -> NoReturn:
        raise MissingDependencyError(f"{name}: {problem}")

    return missing


_append_pages = _operator("append_pages")
_gather_pages = _operator("gather_pages")
_scatter_pages = _operator("scatter_pages")
_paged_hstu_attention = _operator("paged_hstu_attention")
_cpu_isa = _operator("cpu_isa")


def append_pages(
    table: torch.Tensor, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, page_size: int
) -> None:
    """Writes new tokens' keys and values into pages of one layer (paper, Algorithm 1, step 7).

    Args:
        table: `[layers, pages, page_size * heads * (qk_dim + v_dim)]`, changed in place.
        layer: the layer to write.
        k: `[T, heads, qk_dim]`, the table's dtype. Token rows may lie apart (a slice of one projection).
        v: `[T, heads, v_dim]`, the same.
        slots: `[T]` int64, `page_id * page_size + row in page`; -1 skips the token. No slot may occur twice.
        page_size: token rows per page.

    Raises:
        RuntimeError: a shape, dtype, slot or the layer is wrong; nothing was written.
    """
    if table.is_cuda and slots.device.type == "cpu":
        slots = _on_device(slots, table.device)
    _append_pages(table, layer, k, v, slots, page_size)


def gather_pages(
    table: torch.Tensor,
    out: torch.Tensor,
    page_ids: torch.Tensor,
    num_rows: torch.Tensor,
    k_row: int,
    page_size: int,
) -> None:
    """Copies pages of all layers out of the table, only the token rows that are valid.

    Args:
        table: `[layers, pages, page_elements]`.
        out: `[layers, n, page_elements]`, changed in place; rows of a page at or beyond its `num_rows` stay
            as they are.
        page_ids: `[n]` int32; -1 skips the entry.
        num_rows: `[n]` int32, token rows to copy per page, 0 to `page_size`.
        k_row: elements of one token's keys, `heads * qk_dim`; the rest of a token's elements are its values.
        page_size: token rows per page.

    Raises:
        RuntimeError: a shape, dtype, page id or row count is wrong; nothing was written.
    """
    _gather_pages(table, out, page_ids, num_rows, k_row, page_size)


def scatter_pages(
    table: torch.Tensor,
    source: torch.Tensor,
    page_ids: torch.Tensor,
    num_rows: torch.Tensor,
    k_row: int,
    page_size: int,
) -> None:
    """Copies pages of all layers into the table, only the token rows that are valid.

    Args:
        table: `[layers, pages, page_elements]`, changed in place; rows of a page at or beyond its `num_rows`
            stay as they are.
        source: `[layers, n, page_elements]`.
        page_ids: `[n]` int32; -1 skips the entry. No other id may occur twice.
        num_rows: `[n]` int32, token rows to copy per page, 0 to `page_size`.
        k_row: elements of one token's keys, `heads * qk_dim`; the rest of a token's elements are its values.
        page_size: token rows per page.

    Raises:
        RuntimeError: a shape, dtype, page id or row count is wrong; nothing was written.
    """
    _scatter_pages(table, source, page_ids, num_rows, k_row, page_size)


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
) -> torch.Tensor:
    """HSTU attention of new tokens over cached keys in pages and new keys in the dense tensors (Algorithm 1,
    step 6).

    `out[t] = sum over visible keys j of silu(scale * q[t] . k[j]) / norm_len * v[j]`. The positions of batch
    row b are its paged tokens 0 .. `paged_lens[b]` - 1, then its dense rows that are no candidates; P is
    their number. A history query at position i sees the keys j <= i. A candidate sees all P of them and
    itself, no other candidate. With a window w = `max_attn_len` > 0 a history query sees i - j <= w, and a
    candidate, counted as position P, P - j <= w.

    Sums are float32 and run over keys in the order of their positions, in blocks that start at fixed
    positions. So the output for a token is the same, bit by bit, whatever else is in the batch, however many
    threads there are, and whichever of its keys come from pages. Token rows of a page at or beyond
    `paged_lens` are never loaded.

    Args:
        q: `[T, heads, qk_dim]`; token rows and heads may lie apart (slices of one projection).
        k: like `q`.
        v: `[T, heads, v_dim]`.
        table: `[layers, pages, page_size * heads * (qk_dim + v_dim)]`; `pages` may be 0.
        layer: the table's layer to read.
        offsets: `[B + 1]` int64; dense rows of batch row b are `offsets[b]:offsets[b + 1]`, candidates at the
            end.
        num_candidates: `[B]` int64.
        paged_lens: `[B]` int64, tokens read from pages.
        page_indices: `[n]` int32, page ids of all rows.
        page_indptr: `[B + 1]` int32; row b owns `page_indices[page_indptr[b]:page_indptr[b + 1]]`.
        page_size: token rows per page.
        scale: factor on q·k.
        norm_len: the constant divisor.
        max_attn_len: attention window; 0 means all.

    Returns:
        `[T, heads, v_dim]`, the dtype of `q`, contiguous.

    Raises:
        RuntimeError: a shape, dtype, page id, length or the layer is wrong.
        MissingDependencyError: the tensors are on a CUDA device and triton is missing.
    """
    return _paged_hstu_attention(
        q,
        k,
        v,
        table,
        layer,
        offsets,
        num_candidates,
        paged_lens,
        page_indices,
        page_indptr,
        page_size,
        scale,
        norm_len,
        max_attn_len,
    )


def cpu_isa() -> str:
    """The instruction set that attention in bfloat16 uses on this processor.

    One of "amx", "avx512_bf16", "avx512", "avx2" and "baseline"; where it is "amx", float32 and float16 use AVX-512.
    Before a process uses AMX, its results are compared with those of AVX-512 on a small problem. Should they differ, a
    warning is written to the standard error, and this is "avx512_bf16".
    """
    return _cpu_isa()


_copies: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _on_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a host tensor, made once per tensor and stream; the host does not wait for it."""
    key = (device, torch.cuda.current_stream(device).cuda_stream, 0 if x.is_inference() else x._version)
    known = _copies.get(x)
    if known is None or known[0] != key:
        known = _copies[x] = (key, x.pin_memory().to(device, non_blocking=True))
    return known[1]


def _attention_on_cuda(*args: Any) -> torch.Tensor:
    from mtserve_plugin.triton_kernels import launch_module

    return launch_module().paged_hstu_attention(*args)


def _fake_in_place(*args: Any) -> None:
    return None


def _fake_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
    return q.new_empty(v.shape)


if _problem is None:
    for _name in ("append_pages", "gather_pages", "scatter_pages"):
        torch.library.register_fake(f"mtserve::{_name}", _fake_in_place)
    torch.library.register_fake("mtserve::paged_hstu_attention", _fake_attention)
    torch.library.impl("mtserve::paged_hstu_attention", "CUDA", _attention_on_cuda)
