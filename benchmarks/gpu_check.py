"""Where a CUDA device stands: copies, page kernels, transfers, attention, whole requests. One table, one JSON.

    bash benchmarks/gpu_check.sh [FILE]                      builds, tests and runs this
    python benchmarks/gpu_check.py [--json FILE] [--device cuda] [--size paper]

Every figure is a ratio within this run: against a large copy on the device, a pinned copy between host and device, or
the same model without a cache. A part that the machine cannot do is skipped and says why. `--device cpu --size tiny`
runs every part on the CPU in seconds, which shows that the script works and nothing else.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

from stack import Stack

from mtserve_plugin import CacheConfig, HierarchicalKVCache, NoCache, ops
from mtserve_plugin.cache import KVCache
from mtserve_plugin.graphs import LayerGraphs
from mtserve_plugin.machine import describe_machine
from mtserve_plugin.workload import load_trace

RATIOS = (0.5, 1.0, 2.0)
STRATEGIES = ("direct", "staged", "kernel")


@dataclass(frozen=True)
class Size:
    """What is measured. `history` is that of the transfer measurements, `longest` that of the requests."""

    layers: int
    heads: int
    dim: int
    dtype: str
    copy_bytes: int
    users: int
    history: int
    chunk: int
    lengths: tuple[int, ...]
    trace_users: int
    mean: int
    longest: int
    requests: int
    candidates: int
    rounds: int

    def config(self, **sizes: Any) -> CacheConfig:
        return CacheConfig(
            num_layers=self.layers, num_heads=self.heads, qk_dim=self.dim, v_dim=self.dim, dtype=self.dtype,
            attn_norm_len=20_480, chunk_size=self.chunk, offload_quota_tokens=1 << 22, **sizes,
        )  # fmt: skip


SIZES = {
    "paper": Size(
        8, 4, 128, "bfloat16", 1 << 30, 8, 8192, 1024, (256, 1024, 4096, 8192, 16_384), 200, 6375, 20_000, 400, 100, 7
    ),
    "tiny": Size(2, 2, 16, "float32", 1 << 20, 2, 256, 128, (64, 256), 8, 120, 400, 12, 5, 2),
}


class Bench:
    """The parts, in order; each returns plain values."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self.size = size
        self.device = device
        self.speeds: dict[str, float] = {}

    # ---- what the machine can do ---------------------------------------------------------------------------

    def copies(self) -> dict[str, float]:
        """GB/s: a copy on the device (read and write counted once), pinned host to device, device to host."""
        count = self.size.copy_bytes
        a = torch.empty(count, dtype=torch.uint8, device=self.device)
        b = torch.empty_like(a)
        host = torch.empty(count, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        found = {
            "device_gbps": count / self._seconds(lambda: b.copy_(a)) / 1e9,
            "to_device_gbps": count / self._seconds(lambda: a.copy_(host, non_blocking=True)) / 1e9,
            "to_host_gbps": count / self._seconds(lambda: host.copy_(a, non_blocking=True)) / 1e9,
        }
        self.speeds = found
        return found

    def page_kernels(self) -> dict[str, float]:
        """Shares of the device copy's bandwidth."""
        config = self.size.config(num_pages=0x7FFF)
        pages = max(4, self.size.copy_bytes // (config.page_elements * config.element_size * config.num_layers) // 2)
        dtype, page = config.torch_dtype, config.page_size
        table = torch.empty(config.num_layers, pages, config.page_elements, dtype=dtype, device=self.device)
        dense = torch.empty_like(table)
        ids = torch.randperm(pages, dtype=torch.int32).to(self.device)
        rows = torch.full((pages,), page, dtype=torch.int32, device=self.device)
        tokens = pages * page
        k = torch.empty(tokens, config.num_heads, config.qk_dim, dtype=dtype, device=self.device)
        slots = torch.randperm(tokens).to(self.device)
        moved = table.numel() * config.element_size
        calls: dict[str, tuple[Callable[[], Any], int]] = {
            "gather": (lambda: ops.gather_pages(table, dense, ids, rows, config.k_row, page), moved),
            "scatter": (lambda: ops.scatter_pages(table, dense, ids, rows, config.k_row, page), moved),
            "append": (lambda: ops.append_pages(table, 0, k, k, slots, page), moved // config.num_layers),
        }
        return {
            f"{name}_share": count / self._seconds(call) / 1e9 / self.speeds["device_gbps"]
            for name, (call, count) in calls.items()
        }

    # ---- transfers ------------------------------------------------------------------------------------------

    def transfers(self) -> dict[str, Any]:
        """Onload by strategy, and offload, as shares of a pinned copy; makespan over its bound."""
        found: dict[str, Any] = {}
        for strategy in STRATEGIES:
            with self._filled(strategy) as (cache, users, count):
                seconds = self._median(lambda: self._onload(cache, users))
                found[f"onload_{strategy}_share"] = count / seconds / 1e9 / self.speeds["to_device_gbps"]
                if strategy == "direct":
                    copied = count / (self.speeds["to_device_gbps"] * 1e9)
                    found["makespan_over_bound"] = {
                        str(ratio): self._makespan(cache, users, ratio * copied) / max(copied, ratio * copied)
                        for ratio in RATIOS
                    }
        found["offload_share"] = self._offload() / 1e9 / self.speeds["to_host_gbps"]
        return found

    @contextmanager
    def _filled(self, strategy: str) -> Iterator[tuple[HierarchicalKVCache, torch.Tensor, int]]:
        """A cache whose users are on the host alone, and the bytes that bring them back."""
        size = self.size
        pages = size.users * size.history // 32
        tokens = size.users * size.history
        probe = size.config(num_pages=pages)
        host = 2 * tokens * probe.token_bytes
        region = {"onload_pages": pages} if strategy == "staged" else {}
        config = size.config(num_pages=pages, host_bytes=host, onload_strategy=strategy, **region)
        with HierarchicalKVCache(config, self.device) as cache:
            users = torch.arange(size.users)
            self._store(cache, users, size.history)
            cache.flush()
            yield cache, users, tokens * config.token_bytes

    def _store(self, cache: KVCache, users: torch.Tensor, length: int) -> None:
        config = cache.config
        with cache.batch(users, torch.full((len(users),), length), num_candidates=0) as batch:
            shape = (batch.num_rows, config.num_heads, config.qk_dim)
            rows = torch.zeros(shape, dtype=config.torch_dtype, device=self.device)
            for layer in range(config.num_layers):
                batch.wait(layer)
                batch.append(layer, rows, rows)

    def _leave(self, cache: KVCache) -> None:
        """Somebody else takes every page and goes."""
        lengths = torch.tensor([cache.config.num_pages * cache.config.page_size])
        cache.abort(cache.begin(torch.tensor([1 << 40]), lengths, num_candidates=0))
        self._settle()

    def _onload(self, cache: HierarchicalKVCache, users: torch.Tensor) -> float:
        self._leave(cache)
        began = time.perf_counter()
        batch = cache.begin(users, torch.full((len(users),), self.size.history), num_candidates=0)
        for layer in range(cache.config.num_layers):
            batch.wait(layer)
        self._settle()
        seconds = time.perf_counter() - began
        if not bool((batch.cached_lengths == self.size.history).all()):
            raise RuntimeError("the users did not come from the host; this measures nothing")
        cache.commit(batch)
        cache.drain()
        return seconds

    def _makespan(self, cache: HierarchicalKVCache, users: torch.Tensor, compute: float) -> float:
        """Seconds of a batch whose layers compute `compute` seconds in all while they are brought."""
        work = self._work(compute / cache.config.num_layers)

        def once() -> float:
            self._leave(cache)
            began = time.perf_counter()
            batch = cache.begin(users, torch.full((len(users),), self.size.history), num_candidates=0)
            for layer in range(cache.config.num_layers):
                batch.wait(layer)
                work()
            self._settle()
            seconds = time.perf_counter() - began
            cache.commit(batch)
            cache.drain()
            return seconds

        return self._median(once)

    def _work(self, seconds: float) -> Callable[[], None]:
        """Something that keeps the device busy for so long."""
        n = 2048 if self.device.type == "cuda" else 64
        a = torch.randn(n, n, device=self.device)
        one = self._seconds(lambda: torch.mm(a, a))
        times = max(1, round(seconds / one))

        def run() -> None:
            for _ in range(times):
                torch.mm(a, a)

        return run

    def _offload(self) -> float:
        """Bytes per second from commit to the end of the copies."""
        size = self.size
        pages = size.users * size.history // 32
        probe = size.config(num_pages=pages)
        config = size.config(num_pages=pages, host_bytes=2 * size.users * size.history * probe.token_bytes)
        with HierarchicalKVCache(config, self.device) as cache:
            users = torch.arange(size.users)

            def once() -> float:
                cache.clear()
                self._settle()
                self._store(cache, users, size.history)
                began = time.perf_counter()
                cache.flush()
                return time.perf_counter() - began

            return size.users * size.history * config.token_bytes / self._median(once)

    # ---- whole requests -------------------------------------------------------------------------------------

    def requests(self) -> dict[str, Any]:
        """Recompute, device alone, the paper's policy, both tiers: mean ms per batch, speed-ups, hit ratios, errors."""
        size = self.size
        wanted, need, histories = self._workload(size.trace_users)
        timed = wanted[-size.requests :]
        pages = max(need // 5, math.ceil(size.longest / 32) + 1)
        host = 2 * need * 32 * size.config(num_pages=1).token_bytes
        configs = {
            "device": size.config(num_pages=pages),
            "paper": size.config(num_pages=pages, host_bytes=host, tail_write_back=False),
            "hierarchical": size.config(num_pages=pages, host_bytes=host),
        }
        model = Stack(configs["device"], 50_000, self.device)
        rows: list[dict[str, Any]] = []
        for batch_size in (1, 4, 8):
            caches: dict[str, KVCache] = {"recompute": NoCache(configs["device"], self.device)}
            caches |= {name: HierarchicalKVCache(config, self.device) for name, config in configs.items()}
            try:
                rows += self._compare(model, caches, wanted[: -size.requests], timed, histories, batch_size)
            finally:
                for cache in caches.values():
                    cache.close()
        return {"pages": pages, "working_set_pages": need, "requests": len(timed), "rows": rows}

    def graphs(self) -> dict[str, Any]:
        """Both tiers with the layers launched one by one and through CUDA graphs, after the graphs were recorded."""
        size = self.size
        wanted, need, histories = self._workload(max(size.trace_users // 5, 8))
        timed = wanted[-size.requests :]
        pages = max(need // 5, 9 * math.ceil(size.longest / 32))
        host = 2 * need * 32 * size.config(num_pages=1).token_bytes
        config = size.config(num_pages=pages, host_bytes=host)
        model = Stack(config, 50_000, self.device)
        rows: list[dict[str, Any]] = []
        notes: dict[str, Any] = {}
        for batch_size in (1, 4, 8):
            caches: dict[str, KVCache] = {"recompute": NoCache(config, self.device)}
            caches |= {name: HierarchicalKVCache(config, self.device) for name in ("hierarchical", "graphs")}
            graphs = LayerGraphs()
            try:
                rows += self._compare(model, caches, wanted[: -len(timed)], timed, histories, batch_size, graphs)
            finally:
                for cache in caches.values():
                    cache.close()
            counts = {name: value for name, value in graphs.stats().items() if value}
            notes[f"batch_{batch_size}"] = ", ".join(f"{name} {value}" for name, value in counts.items())
            if not counts.get("replayed"):
                notes[f"batch_{batch_size}"] += ": no graph ran, the row of that name is the eager path once more"
        return {**notes, "rows": rows}

    def _workload(self, users: int) -> tuple[list[tuple[int, int]], int, dict[int, Any]]:
        """Requests, the pages that all users' histories take, and item ids by user."""
        size = self.size
        trace = load_trace(
            "kuairand-like", users=users, requests=users * 12, mean_history=size.mean, max_history=size.longest
        )
        wanted = _requests(trace)
        rng = np.random.default_rng(0)
        need = sum(math.ceil(length / 32) for length in dict(wanted).values())
        return wanted, need, {user: rng.integers(0, 50_000, size.longest) for user, _ in wanted}

    def _compare(
        self,
        model: Stack,
        caches: dict[str, KVCache],
        before: list[tuple[int, int]],
        timed: list[tuple[int, int]],
        histories: dict[int, Any],
        batch_size: int,
        graphs: LayerGraphs | None = None,
    ) -> list[dict[str, Any]]:
        """Every batch through every cache; the one named "graphs" with them. Batches that recorded are not timed."""
        rng = np.random.default_rng(1)
        latest = list(dict(before).items())
        for name, cache in caches.items():
            for part in _batches(latest, 2) if name != "recompute" else []:
                model(cache, *_rows(part, histories), rng.integers(0, 50_000, (len(part), 1)))
                cache.drain()
        seconds: dict[str, list[float]] = {name: [] for name in caches}
        errors = dict.fromkeys(caches, 0.0)
        start = {name: cache.stats() for name, cache in caches.items()}
        names = list(caches)
        for number, part in enumerate(_batches(timed, batch_size)):
            candidates = rng.integers(0, 50_000, (len(part), self.size.candidates))
            scores: dict[str, torch.Tensor] = {}
            took: dict[str, float] = {}
            recorded = _recorded(graphs)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                model.graphs = graphs if name == "graphs" else None
                self._settle()
                began = time.perf_counter()
                scores[name] = model(caches[name], *_rows(part, histories), candidates)
                self._settle()
                took[name] = time.perf_counter() - began
                caches[name].drain()
            model.graphs = None
            for name in names if _recorded(graphs) == recorded else ():
                seconds[name].append(took[name])
            want = scores["recompute"]
            for name in names:
                errors[name] = max(errors[name], float((scores[name] - want).abs().max() / want.abs().max()))
        if not seconds["recompute"]:
            raise RuntimeError("every batch recorded graphs; none is left to be timed")
        rows = []
        for name in names:
            stats = caches[name].stats()
            asked = stats["history_tokens"] - start[name]["history_tokens"]
            hit = stats["hit_tokens"] - start[name]["hit_tokens"]
            rows.append(
                {
                    "mode": name,
                    "batch_size": batch_size,
                    "latency_ms": 1e3 * statistics.fmean(seconds[name]),
                    "speedup": statistics.fmean(seconds["recompute"]) / statistics.fmean(seconds[name]),
                    "total_hit_ratio": hit / max(asked, 1),
                    "max_rel_error": errors[name],
                }
            )
        return rows

    def load_or_recompute(self) -> dict[str, Any]:
        """A request whose history is on the host, against loading it and against recomputing it, by length."""
        size = self.size
        rng = np.random.default_rng(2)
        found = []
        for length in size.lengths:
            config = size.config(
                num_pages=2 * math.ceil((length + 64) / 32),
                host_bytes=max(2 * length, 2 * size.chunk) * size.config(num_pages=1).token_bytes,
            )
            model = Stack(config, 1000, self.device)
            history = rng.integers(0, 1000, length + 16)
            candidates = rng.integers(0, 1000, (1, size.candidates))
            with HierarchicalKVCache(config, self.device) as cache:
                model(cache, [1], [history[:length]], candidates)
                cache.flush()

                def cached(cache: HierarchicalKVCache = cache, model: Stack = model) -> float:
                    self._leave(cache)
                    began = time.perf_counter()
                    model(cache, [1], [history[:length]], candidates)  # noqa: B023
                    self._settle()
                    return time.perf_counter() - began

                hierarchical = self._median(cached)
            nothing = NoCache(config, self.device)
            recompute = self._seconds(lambda: model(nothing, [1], [history[:length]], candidates))  # noqa: B023
            load = length * config.token_bytes / (self.speeds["to_device_gbps"] * 1e9)
            found.append(
                {
                    "length": length,
                    "hierarchical_ms": 1e3 * hierarchical,
                    "recompute_ms": 1e3 * recompute,
                    "load_ms": 1e3 * load,
                    "over_best": hierarchical / min(recompute, load) if min(recompute, load) else 0.0,
                }
            )
        return {"rows": found}

    # ---- clocks ---------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _seconds(self, call: Callable[[], Any]) -> float:
        call()

        def once() -> float:
            self._settle()
            began = time.perf_counter()
            call()
            self._settle()
            return time.perf_counter() - began

        return self._median(once)

    def _median(self, once: Callable[[], float]) -> float:
        once()
        return statistics.median(once() for _ in range(self.size.rounds))


def _requests(trace: Any) -> list[tuple[int, int]]:
    """User and history length of every request that has a history."""
    return [
        (int(user), int(length))
        for block in trace.blocks()
        for user, length in zip(block.user, block.history_length, strict=True)
        if length > 0
    ]


def _recorded(graphs: LayerGraphs | None) -> int:
    """Batches so far that recorded, or tried to."""
    if graphs is None:
        return 0
    stats = graphs.stats()
    return stats["recorded"] + stats["failures"]


def _batches(requests: list[tuple[int, int]], size: int) -> Iterator[list[tuple[int, int]]]:
    part: list[tuple[int, int]] = []
    for request in requests:
        if len(part) == size or any(user == request[0] for user, _ in part):
            yield part
            part = []
        part.append(request)
    if part:
        yield part


def _rows(part: list[tuple[int, int]], histories: Any) -> tuple[list[int], list[Any]]:
    return [user for user, _ in part], [histories[user][:length] for user, length in part]


def attention(device: torch.device) -> dict[str, Any]:
    """`benchmarks/gpu_attention.py`, on a CUDA device."""
    if device.type != "cuda":
        raise RuntimeError("needs a CUDA device")
    import gpu_attention

    rows = [gpu_attention.measure(case) for case in gpu_attention.CASES]
    return {"rows": rows}


def run(size: Size, device: torch.device, only: list[str], out: Console) -> dict[str, Any]:
    bench = Bench(size, device)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "copies": bench.copies,
        "page_kernels": bench.page_kernels,
        "attention": lambda: attention(device),
        "transfers": bench.transfers,
        "requests": bench.requests,
        "graphs": bench.graphs,
        "load_or_recompute": bench.load_or_recompute,
    }
    found: dict[str, Any] = {}
    for name, part in parts.items():
        if only and name not in only and name != "copies":
            continue
        began = time.perf_counter()
        try:
            found[name] = part()
        except Exception as error:  # the other parts are worth having
            found[name] = {"skipped": f"{type(error).__name__}: {error}"}
            if not isinstance(error, RuntimeError | NotImplementedError):
                traceback.print_exc()
        found[name]["seconds"] = time.perf_counter() - began
        show(out, name, found[name])
    return found


def show(out: Console, name: str, values: dict[str, Any]) -> None:
    """One part: its figures, or why there are none; lists of rows as a table of their own."""
    out.print(f"[bold]{name}[/] ({values['seconds']:.1f} s)")
    if "skipped" in values:
        out.print(f"  skipped: {values['skipped']}")
    for key, value in values.items():
        if key in ("seconds", "skipped"):
            continue
        if isinstance(value, list) and value and isinstance(value[0], dict):
            table = Table(box=None, pad_edge=False)
            for column in value[0]:
                table.add_column(column, justify="right")
            for row in value:
                table.add_row(*(_text(one) for one in row.values()))
            out.print(table)
        else:
            out.print(f"  {key}: {_text(value)}")


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=SIZES, default="paper")
    parser.add_argument("--only", action="append", default=[], metavar="PART", help="these parts alone")
    options = parser.parse_args()
    out = Console(width=110)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        out.print("torch sees no CUDA device: nothing was measured. mtserve doctor says why.")
        return 1
    device = torch.device(options.device)
    machine = describe_machine() | {"date": datetime.date.today().isoformat()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine |= {"card": properties.name, "card_bytes": properties.total_memory, "cuda": torch.version.cuda}
    out.print(f"{machine.get('card', machine['cpu'])}, torch {machine['torch']}, size {options.size}")
    found = {"machine": machine, "size": options.size, **run(SIZES[options.size], device, options.only, out)}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
