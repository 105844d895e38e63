"""Speed of the paged HSTU attention on the CPU, against two yardsticks.

    python benchmarks/attention.py [--threads N] [--rounds N] [--json FILE]

`einsum` is attention as one would write it in torch: pages gathered and padded to one tensor, whole masks. `gemm`
is two matrix products per head with as many multiply-adds as attention needs, and nothing else: no gather, no
SiLU, no masks. All three take turns in every round; times are medians. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from mtserve_plugin import ops

PAGE_SIZE = 32
NORM_LEN = 4096.0


@dataclass(frozen=True)
class Case:
    """B equal rows: `paged` tokens in pages, `delta` new ones, `candidates`."""

    name: str
    batch: int
    paged: int
    delta: int
    candidates: int
    heads: int
    dim: int
    dtype: str = "float32"

    @property
    def pairs(self) -> int:
        """Visible pairs of query and key per head, without each candidate's own key."""
        history = self.delta * self.paged + self.delta * (self.delta + 1) // 2
        return self.batch * (history + self.candidates * (self.paged + self.delta))

    @property
    def flops(self) -> int:
        return 4 * self.pairs * self.heads * self.dim


CASES = [
    Case("cached 4096", 1, 4096, 32, 64, 4, 128),
    Case("cached 4096", 1, 4096, 32, 64, 4, 128, "bfloat16"),
    Case("cached 2000 x 8", 8, 2000, 32, 64, 4, 64),
    Case("cached 2000 x 8", 8, 2000, 32, 64, 4, 64, "bfloat16"),
    Case("recompute 2000", 1, 0, 2000, 64, 4, 64),
    Case("few queries", 1, 4096, 1, 8, 4, 128),
    Case("short x 32", 32, 200, 8, 32, 2, 32),
]


def attention_arguments(case: Case) -> tuple[Any, ...]:
    dtype = getattr(torch, case.dtype)
    dense = case.delta + case.candidates
    q, k, v = (torch.randn(case.batch * dense, case.heads, case.dim).to(dtype) for _ in range(3))
    pages = -(-case.paged // PAGE_SIZE)
    table = torch.randn(1, case.batch * pages, 2 * PAGE_SIZE * case.heads * case.dim).to(dtype)
    rows = torch.arange(case.batch + 1)
    return (
        q,
        k,
        v,
        table,
        0,
        rows * dense,
        torch.full((case.batch,), case.candidates),
        torch.full((case.batch,), case.paged),
        torch.randperm(case.batch * pages).to(torch.int32),
        (rows * pages).to(torch.int32),
        PAGE_SIZE,
        case.dim**-0.5,
        NORM_LEN,
        0,
    )


def padded_einsum(case: Case, arguments: tuple[Any, ...]) -> torch.Tensor:
    """The same attention in torch. Rows are equally long here, so that padding itself costs nothing."""
    q, k, v, table, _, _, _, _, page_indices, *_ = arguments
    shape = (case.batch, -1, case.heads, case.dim)
    pages = table[0, page_indices.long()].view(-1, 2, PAGE_SIZE * case.heads * case.dim)
    cached_k, cached_v = (pages[:, i].reshape(shape)[:, : case.paged] for i in range(2))
    q, k, v = (x.view(shape) for x in (q, k, v))
    keys, values = torch.cat([cached_k, k], 1), torch.cat([cached_v, v], 1)
    key = torch.arange(keys.shape[1])[None, :]
    query = torch.arange(case.paged, keys.shape[1])[:, None]
    seen = ((key < case.paged + case.delta) & (key <= query)) | (key == query)
    scores = torch.nn.functional.silu(torch.einsum("bihd,bjhd->bhij", q, keys) * case.dim**-0.5) / NORM_LEN
    return torch.einsum("bhij,bjhd->bihd", scores * seen, values).flatten(0, 1)


def gemm(case: Case) -> Callable[[], object]:
    dtype = getattr(torch, case.dtype)
    queries = case.delta + case.candidates
    keys = max(1, round(case.pairs / (case.batch * queries)))
    batch = case.batch * case.heads
    q, k, v = (torch.randn(batch, n, case.dim).to(dtype) for n in (queries, keys, keys))
    k = k.transpose(1, 2)
    scores, out = q.new_empty(batch, queries, keys), torch.empty_like(q)

    def run() -> None:
        torch.bmm(q, k, out=scores)
        torch.bmm(scores, v, out=out)

    return run


def medians(contestants: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            if turn > 0:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(spent) for name, spent in times.items()}


def measure(case: Case, rounds: int) -> dict[str, Any]:
    arguments = attention_arguments(case)
    ours, theirs = ops.paged_hstu_attention(*arguments).double(), padded_einsum(case, arguments).double()
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    if error > (1e-5 if case.dtype == "float32" else 0.05):
        raise SystemExit(f"{case.name}, {case.dtype}: attention and einsum differ by {error:.1e}")
    spent = medians(
        {
            "attention": lambda: ops.paged_hstu_attention(*arguments),
            "einsum": lambda: padded_einsum(case, arguments),
            "gemm": gemm(case),
        },
        rounds,
    )
    return asdict(case) | {
        "attention_ms": spent["attention"],
        "einsum_ms": spent["einsum"],
        "gemm_ms": spent["gemm"],
        "einsum_ratio": spent["einsum"] / spent["attention"],
        "gemm_ratio": spent["gemm"] / spent["attention"],
        "gflops": case.flops / spent["attention"] / 1e6,
    }


def show(results: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title)
    for column in ("case", "B", "paged", "delta", "cand.", "H x D", "dtype"):
        table.add_column(column)
    for column in ("attention ms", "einsum ms", "gemm ms", "einsum / ours", "gemm / ours", "GFLOP/s"):
        table.add_column(column, justify="right")
    for r in results:
        table.add_row(
            *(str(r[n]) for n in ("name", "batch", "paged", "delta", "candidates")),
            f"{r['heads']} x {r['dim']}",
            r["dtype"],
            *(f"{r[n]:.2f}" for n in ("attention_ms", "einsum_ms", "gemm_ms", "einsum_ratio", "gemm_ratio")),
            f"{r['gflops']:.0f}",
        )
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads (default: all)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds per case (default: 7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    results = [measure(case, options.rounds) for case in CASES]
    about = {"threads": options.threads, "isa": ops.cpu_isa(), "torch": torch.__version__}
    title = f"paged HSTU attention, {options.threads} threads, {ops.cpu_isa()}; medians of {options.rounds}"
    show(results, title)
    if options.json:
        about["machine"] = platform.machine()
        options.json.write_text(json.dumps({"about": about, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
