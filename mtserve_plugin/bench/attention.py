"""How far attention over pages and the copies of pages are from what the processor can do, on one thread.

Attention is measured against matrix products that reach the processor's peak, copies against the C library's memcpy.
Rounds measure all things in turn, so that whatever else the machine does hits all of them. Times are processor time of
the calling thread: on an idle machine that is the time which passes, on a busy one the time which would.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from mtserve_plugin import ops
from mtserve_plugin.bench.timing import no_garbage_collection
from mtserve_plugin.errors import ConfigError
from mtserve_plugin.machine import describe_machine

OnStep = Callable[[str, int, int], None]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# The largest difference to float64 that is none, max|a-b| / max|b|: float32, and one rounding to bfloat16.
TOLERANCES = {"fp32": 1e-6, "bf16": 2**-8 + 1e-6}
_PAGE = 32
_NORM_LEN = 4096.0
# Square matrices that stay in the nearest caches; see `_products` for the others.
_SQUARES = (256, 512)
# Reading so much leaves little of anything else in a cache.
_OTHER_BYTES = 64 << 20


@dataclass(frozen=True)
class AttentionBench:
    """What `bench_attention` measured; all numbers are medians over the rounds, dictionaries go by dtype.

    Attributes:
        isa: the instruction set of the attention kernel (`ops.cpu_isa`).
        attention_ms: one call of `ops.paged_hstu_attention`.
        einsum_ms: the same attention in torch, with keys gathered, whole masks and four operators.
        gflops: attention's multiply-adds over visible pairs of query and key, twice, per second; in 10^9.
        gemm_peak_gflops: the fastest of several shapes of `torch.mm`, which uses AMX where the processor has it.
            Attention by AMX, which multiplies values by three parts of a score, can reach half of that.
        roofline_gflops: the lesser one of that peak and of what memory can feed: operations per byte of keys, values,
            queries and results, times the bytes that memcpy reads and writes per second.
        max_rel_error: attention against float64, max|a-b| / max|b|.
        memcpy_gbps: memcpy of as many bytes as the pages of one layer hold in bfloat16, whole, in 10^9 bytes per
            second. This and the copies below start with nothing of theirs in the caches.
        gather_share, scatter_share: bandwidth of copying those pages out of a table and into it, a share of memcpy's.
        append_share: of appending all their tokens.
        append_slices_share: the same when keys and values are slices of one projection, so that rows lie apart.
        shape: sizes.
        rounds: measurements.
        machine: see `describe_machine`.
    """

    isa: str
    attention_ms: dict[str, float]
    einsum_ms: dict[str, float]
    gflops: dict[str, float]
    gemm_peak_gflops: dict[str, float]
    roofline_gflops: dict[str, float]
    max_rel_error: dict[str, float]
    memcpy_gbps: float
    gather_share: float
    scatter_share: float
    append_share: float
    append_slices_share: float
    shape: dict[str, int]
    rounds: int
    machine: dict[str, Any] = field(default_factory=describe_machine)

    @property
    def problems(self) -> list[str]:
        """What is not as it has to be, in words."""
        return [
            f"attention in {dtype} differs from float64 by {error:.1e}; a rounding is {TOLERANCES[dtype]:.1e}"
            for dtype, error in self.max_rel_error.items()
            if not error <= TOLERANCES[dtype]
        ]

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for dtype in DTYPES:
            values |= {
                f"{dtype}_share_of_gemm_peak": self.gflops[dtype] / self.gemm_peak_gflops[dtype],
                f"{dtype}_share_of_roofline": self.gflops[dtype] / self.roofline_gflops[dtype],
                f"{dtype}_ms": self.attention_ms[dtype],
                f"{dtype}_einsum_ms": self.einsum_ms[dtype],
                f"{dtype}_gflops": self.gflops[dtype],
                f"{dtype}_gemm_peak_gflops": self.gemm_peak_gflops[dtype],
                f"{dtype}_roofline_gflops": self.roofline_gflops[dtype],
                f"{dtype}_max_rel_error": self.max_rel_error[dtype],
            }
        return values | {
            "gather_share_of_memcpy": self.gather_share,
            "scatter_share_of_memcpy": self.scatter_share,
            "append_share_of_memcpy": self.append_share,
            "append_slices_share_of_memcpy": self.append_slices_share,
            "memcpy_gbps": self.memcpy_gbps,
            "isa": self.isa,
            **self.shape,
            "page_size": _PAGE,
            "rounds": self.rounds,
            "threads": 1,
            "clock": "thread_time",
            "machine": self.machine,
            "ok": not self.problems,
        }

    def table(self) -> list[tuple[str, str, str]]:
        shape = "{queries} queries, {keys} keys, {heads} heads of {dim}".format_map(self.shape)
        rows = []
        targets = {"fp32": "target 0.7", "bf16": "target 0.5"}
        for dtype in DTYPES:
            rows += [
                (f"attention, {dtype}", f"{self.attention_ms[dtype]:.2f} ms", f"{self.isa}; {shape}"),
                ("", f"{self.gflops[dtype]:.0f} GFLOP/s", f"in torch: {self.einsum_ms[dtype]:.2f} ms"),
                (
                    "  of the peak",
                    f"{self.gflops[dtype] / self.gemm_peak_gflops[dtype]:.2f}",
                    f"of matrix products, {self.gemm_peak_gflops[dtype]:.0f} GFLOP/s",
                ),
                (
                    "  of the roofline",
                    f"{self.gflops[dtype] / self.roofline_gflops[dtype]:.2f}",
                    f"{self.roofline_gflops[dtype]:.0f} GFLOP/s; {targets[dtype]}",
                ),
            ]
        return [
            *rows,
            ("memcpy", f"{self.memcpy_gbps:.2f} GB/s", "of one layer's pages in bfloat16"),
            ("gather", f"{self.gather_share:.2f}", "of memcpy's bandwidth; target 0.9"),
            ("scatter", f"{self.scatter_share:.2f}", "of memcpy's bandwidth"),
            ("append", f"{self.append_share:.2f}", "of memcpy's bandwidth; target 0.9"),
            ("append, slices", f"{self.append_slices_share:.2f}", "of memcpy's bandwidth; rows lie apart"),
        ]


def bench_attention(
    *,
    queries: int = 96,
    keys: int = 4096,
    heads: int = 4,
    dim: int = 128,
    rounds: int = 15,
    on_step: OnStep | None = None,
) -> AttentionBench:
    """Measures the operators on pages.

    Args:
        queries: of one request: a third of them new tokens, the others candidates.
        keys: tokens of the history, the new ones included; all others lie in pages of 32.
        heads: heads.
        dim: of a head, for keys and for values.
        rounds: measurements whose median is taken.
        on_step: told what is being done.

    Raises:
        ConfigError: an argument is out of range.
    """
    for name, value, least in (
        ("queries", queries, 1),
        ("keys", keys, queries),
        ("heads", heads, 1),
        ("dim", dim, 1),
        ("rounds", rounds, 1),
    ):
        if value < least:
            raise ConfigError(f"--{name} {value} must be at least {least}")
    step = on_step or (lambda *_: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with no_garbage_collection():
            step("comparing with float64", 0, rounds + 2)
            generator = torch.Generator().manual_seed(queries + keys + heads + dim)
            cases = {name: _Attention(queries, keys, heads, dim, dtype, generator) for name, dtype in DTYPES.items()}
            errors = {name: case.error() for name, case in cases.items()}
            copies = _Copies(keys, heads, dim, generator)
            contestants = copies.contestants()
            cold = set(contestants)
            for name, case in cases.items():
                contestants |= {f"{name} attention": case.run, f"{name} einsum": case.einsum}
                contestants |= {f"{name} mm {i}": mm for i, mm in enumerate(case.products)}
            seen: list[dict[str, float]] = []
            for turn in range(rounds + 1):
                step(f"round {turn}", 1 + turn, rounds + 2)
                spent = {}
                for name, run in contestants.items():
                    if name in cold:
                        copies.leave_the_caches()
                    spent[name] = _seconds(run)
                # The first round touches what the others find touched.
                if turn:
                    seen.append(spent)
    finally:
        torch.set_num_threads(threads)

    spent = {name: statistics.median(one[name] for one in seen) for name in contestants}
    shares = {
        name: statistics.median(one["memcpy"] / one[name] for one in seen)
        for name in ("gather", "scatter", "append", "append slices")
    }
    memcpy_rate = copies.size / spent["memcpy"]
    gflops = {name: case.flops / spent[f"{name} attention"] / 1e9 for name, case in cases.items()}
    peaks = {
        name: max(case.product_flops[i] / spent[f"{name} mm {i}"] for i in range(len(case.products))) / 1e9
        for name, case in cases.items()
    }
    return AttentionBench(
        isa=ops.cpu_isa(),
        attention_ms={name: 1e3 * spent[f"{name} attention"] for name in cases},
        einsum_ms={name: 1e3 * spent[f"{name} einsum"] for name in cases},
        gflops=gflops,
        gemm_peak_gflops=peaks,
        roofline_gflops={
            name: min(peaks[name], case.flops / case.bytes_touched * 2 * memcpy_rate / 1e9)
            for name, case in cases.items()
        },
        max_rel_error=errors,
        memcpy_gbps=memcpy_rate / 1e9,
        gather_share=shares["gather"],
        scatter_share=shares["scatter"],
        append_share=shares["append"],
        append_slices_share=shares["append slices"],
        shape={"queries": queries, "keys": keys, "heads": heads, "dim": dim},
        rounds=rounds,
    )


class _Attention:
    """One request's attention in one dtype, its cached keys in pages in random order."""

    def __init__(
        self, queries: int, keys: int, heads: int, dim: int, dtype: torch.dtype, generator: torch.Generator
    ) -> None:
        self.delta = queries // 3
        self.candidates = queries - self.delta
        self.paged = keys - self.delta
        self.heads, self.dim, self.dtype = heads, dim, dtype
        self.q, self.k, self.v = (torch.randn(queries, heads, dim, generator=generator).to(dtype) for _ in range(3))
        pages = -(-self.paged // _PAGE)
        self.table = torch.randn(1, pages, 2 * _PAGE * heads * dim, generator=generator).to(dtype)
        self.page_ids = torch.randperm(pages, generator=generator).to(torch.int32)
        self.arguments = (
            self.q,
            self.k,
            self.v,
            self.table,
            0,
            torch.tensor([0, queries]),
            torch.tensor([self.candidates]),
            torch.tensor([self.paged]),
            self.page_ids,
            torch.tensor([0, pages], dtype=torch.int32),
            _PAGE,
            dim**-0.5,
            _NORM_LEN,
            0,
        )
        history = self.delta * self.paged + self.delta * (self.delta + 1) // 2
        self.flops = 4 * heads * dim * (history + self.candidates * (keys + 1))
        self.bytes_touched = dtype.itemsize * heads * dim * (2 * (keys + self.candidates) + 2 * queries)
        self.products, self.product_flops = _products(queries, keys, dim, self.flops, dtype, generator)

    def run(self) -> torch.Tensor:
        return ops.paged_hstu_attention(*self.arguments)

    def einsum(self) -> torch.Tensor:
        return self._einsum(self.dtype)

    def error(self) -> float:
        exact = self._einsum(torch.float64)
        return float((self.run().double() - exact).abs().max() / exact.abs().max())

    def _einsum(self, dtype: torch.dtype) -> torch.Tensor:
        pages = self.table[0, self.page_ids.long()].to(dtype).view(-1, 2, _PAGE, self.heads, self.dim)
        cached_k, cached_v = (pages[:, i].reshape(-1, self.heads, self.dim)[: self.paged] for i in range(2))
        keys, values = torch.cat([cached_k, self.k.to(dtype)]), torch.cat([cached_v, self.v.to(dtype)])
        key = torch.arange(len(keys))[None, :]
        query = torch.arange(self.paged, len(keys))[:, None]
        seen = ((key < self.paged + self.delta) & (key <= query)) | (key == query)
        scores = F.silu(torch.einsum("ihd,jhd->hij", self.q.to(dtype), keys) * self.dim**-0.5) / _NORM_LEN
        return torch.einsum("hij,jhd->ihd", scores * seen, values)


def _products(
    queries: int, keys: int, dim: int, flops: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[list[Callable[[], object]], list[int]]:
    """Matrix products, attention's own two among them, each with about `flops` operations, and how many they have."""
    runs: list[Callable[[], object]] = []
    counts = []
    shapes = [(n, n, n) for n in _SQUARES] + [(queries, dim, keys), (queries, keys, dim)]
    for m, depth, n in shapes:
        a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((m, depth), (depth, n)))
        runs.append(_repeated(a, b, turns := max(1, round(flops / (2 * m * depth * n)))))
        counts.append(2 * m * depth * n * turns)
    return runs, counts


def _repeated(a: torch.Tensor, b: torch.Tensor, turns: int) -> Callable[[], object]:
    out = a.new_empty(a.shape[0], b.shape[1])

    def run() -> None:
        for _ in range(turns):
            torch.mm(a, b, out=out)

    return run


class _Copies:
    """All tokens of a history in one layer's pages, in bfloat16."""

    def __init__(self, keys: int, heads: int, dim: int, generator: torch.Generator) -> None:
        pages = -(-keys // _PAGE)
        tokens, row = pages * _PAGE, heads * dim
        self.row = row
        # As many pages again stay untouched between those that are copied.
        self.table = torch.randn(1, 2 * pages, 2 * _PAGE * row, generator=generator).to(torch.bfloat16)
        self.dense = torch.zeros(1, pages, 2 * _PAGE * row, dtype=torch.bfloat16)
        self.page_ids = torch.randperm(2 * pages, generator=generator)[:pages].to(torch.int32)
        self.num_rows = torch.full((pages,), _PAGE, dtype=torch.int32)
        self.slots = (self.page_ids.long()[:, None] * _PAGE + torch.arange(_PAGE)).flatten()
        self.size = self.dense.numel() * 2
        self.source, self.target = (torch.full((self.size,), i, dtype=torch.uint8) for i in range(2))
        self.keys, self.values = (torch.ones(tokens, heads, dim, dtype=torch.bfloat16) for _ in range(2))
        # As a layer's projection has them: beside what the queries and the gate take.
        projection = torch.ones(tokens, 4 * row, dtype=torch.bfloat16)
        self.key_slices, self.value_slices = (
            part.unflatten(1, (heads, dim)) for part in projection.split(row, dim=1)[2:]
        )
        self.other = torch.ones(_OTHER_BYTES // 8, dtype=torch.int64)

    def contestants(self) -> dict[str, Callable[[], object]]:
        pages = (self.page_ids, self.num_rows, self.row, _PAGE)
        return {
            "memcpy": lambda: ctypes.memmove(self.target.data_ptr(), self.source.data_ptr(), self.size),
            "gather": lambda: ops.gather_pages(self.table, self.dense, *pages),
            "scatter": lambda: ops.scatter_pages(self.table, self.dense, *pages),
            "append": lambda: ops.append_pages(self.table, 0, self.keys, self.values, self.slots, _PAGE),
            "append slices": lambda: ops.append_pages(
                self.table, 0, self.key_slices, self.value_slices, self.slots, _PAGE
            ),
        }

    def leave_the_caches(self) -> None:
        self.other.sum()


def _seconds(run: Callable[[], object]) -> float:
    began = time.thread_time()
    run()
    return time.thread_time() - began
