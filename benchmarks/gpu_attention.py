"""Speed of the paged HSTU attention on a CUDA device, against what the device can do and against recompute.

    python benchmarks/gpu_attention.py [--json FILE]

`roofline` is the least time in which the device can move the operator's bytes (cached keys and values, new rows,
output; each once) or do its multiply-adds, whichever is longer. Both speeds are measured here: a large copy, a large
matrix product of the same dtype. `recompute` is the same operator with the whole history as new rows and no pages,
attention alone: what a model without a cache pays here, besides its other layers. Times are medians.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from mtserve_plugin import ops

PAGE_SIZE = 32
NORM_LEN = 20_480.0


@dataclass(frozen=True)
class Case:
    """B equal rows: `paged` tokens in pages, `delta` new ones, `candidates`."""

    batch: int
    paged: int
    delta: int
    candidates: int
    heads: int = 4
    dim: int = 128
    dtype: str = "bfloat16"

    @property
    def flops(self) -> int:
        """Of visible pairs of query and key, without each candidate's own key."""
        history = self.delta * self.paged + self.delta * (self.delta + 1) // 2
        pairs = self.batch * (history + self.candidates * (self.paged + self.delta))
        return 4 * pairs * self.heads * self.dim

    @property
    def bytes(self) -> int:
        """Keys and values of pages; q, k, v and the output of new rows."""
        rows = 2 * self.paged + 4 * (self.delta + self.candidates)
        return self.batch * rows * self.heads * self.dim * getattr(torch, self.dtype).itemsize


CASES = [
    Case(1, 4096, 32, 64),
    Case(8, 4096, 32, 64),
    Case(32, 4096, 32, 64),
    Case(128, 1000, 32, 64),
    Case(1, 20_000, 64, 256),
    Case(8, 20_000, 64, 256),
    Case(8, 4096, 1, 8),
    Case(8, 4096, 32, 64, dtype="float16"),
    Case(8, 4096, 32, 64, dtype="float32"),
    Case(32, 4096, 32, 64, heads=8, dim=64),
]


def attention_arguments(case: Case) -> tuple[Any, ...]:
    dense = case.delta + case.candidates
    shape = {"dtype": getattr(torch, case.dtype), "device": "cuda"}
    q, k, v = (torch.randn(case.batch * dense, case.heads, case.dim, **shape) for _ in range(3))
    pages = -(-case.paged // PAGE_SIZE)
    table = torch.randn(1, case.batch * pages, 2 * PAGE_SIZE * case.heads * case.dim, **shape)
    rows = torch.arange(case.batch + 1)
    return (
        *(q, k, v, table, 0, rows * dense),
        torch.full((case.batch,), case.candidates),
        torch.full((case.batch,), case.paged),
        torch.randperm(case.batch * pages).to(torch.int32),
        (rows * pages).to(torch.int32),
        *(PAGE_SIZE, case.dim**-0.5, NORM_LEN, 0),
    )


def milliseconds(run: Any) -> float:
    from triton.testing import do_bench

    return float(do_bench(run, warmup=50, rep=200, return_mode="median"))


def attention_ms(case: Case) -> float:
    arguments = attention_arguments(case)
    return milliseconds(lambda: ops.paged_hstu_attention(*arguments))


@cache
def bytes_per_ms() -> float:
    """Read and written by a copy that no cache of the device holds."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    to = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: to.copy_(source))


@cache
def flops_per_ms(dtype: str) -> float:
    size = 8192 if dtype != "float32" else 4096
    x = torch.randn(size, size, dtype=getattr(torch, dtype), device="cuda")
    out = torch.empty_like(x)
    return 2 * size**3 / milliseconds(lambda: torch.mm(x, x, out=out))


def measure(case: Case) -> dict[str, Any]:
    spent = attention_ms(case)
    recompute = attention_ms(replace(case, paged=0, delta=case.paged + case.delta))
    moving, multiplying = case.bytes / bytes_per_ms(), case.flops / flops_per_ms(case.dtype)
    return asdict(case) | {
        "attention_ms": spent,
        "recompute_ms": recompute,
        "recompute_ratio": recompute / spent,
        "roofline_ms": max(moving, multiplying),
        "bound_by": "memory" if moving > multiplying else "arithmetic",
        "roofline_share": max(moving, multiplying) / spent,
        "gigabytes_per_s": case.bytes / spent / 1e6,
        "teraflops": case.flops / spent / 1e9,
    }


def show(results: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title)
    for column in ("B", "paged", "delta", "cand.", "H x D", "dtype", "bound by"):
        table.add_column(column)
    columns = ("attention ms", "roofline ms", "share", "recompute ms", "recompute / ours", "GB/s", "TFLOP/s")
    for column in columns:
        table.add_column(column, justify="right")
    for r in results:
        table.add_row(
            *(str(r[n]) for n in ("batch", "paged", "delta", "candidates")),
            f"{r['heads']} x {r['dim']}",
            *(r["dtype"], r["bound_by"]),
            *(f"{r['attention_ms']:.3f}", f"{r['roofline_ms']:.3f}", f"{r['roofline_share']:.0%}"),
            *(f"{r['recompute_ms']:.3f}", f"{r['recompute_ratio']:.1f}"),
            *(f"{r['gigabytes_per_s']:.0f}", f"{r['teraflops']:.1f}"),
        )
    Console(width=170).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: torch sees none, and this measures nothing else")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False  # the kernel multiplies float32 in full
    import triton

    results = [measure(case) for case in CASES]
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_gigabytes_per_s": bytes_per_ms() / 1e6,
        "product_teraflops": {dtype: flops_per_ms(dtype) / 1e9 for dtype in sorted({c.dtype for c in CASES})},
    }
    show(results, f"paged HSTU attention on {about['device']}; medians")
    if options.json:
        options.json.write_text(json.dumps({"about": about, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
