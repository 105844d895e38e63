"""Soak: random traffic on one cache from several threads, with copies that fail.

    python benchmarks/soak.py [--requests 200000] [--threads 2] [--seed 1] [--strategy staged] [--json FILE]

Users come back longer, shorter, edited and slid, under two model versions; batches stop in the middle; users are
evicted, prefetched, flushed and cleared; copies between the tiers fail and are late. Every cached byte that a batch
reads is compared with what was appended for that user, version, content, layer and position, and in the end pages,
slots, pins, queues and users have to be back where they started. The exit code is 1 when anything is not.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtserve_plugin import CacheConfig, CacheError, HierarchicalKVCache, OnloadError
from mtserve_plugin.commands.progress import progress_bar
from mtserve_plugin.machine import describe_machine, resident_bytes
from mtserve_plugin.report import check_writable, console, print_measures, print_problems, write_json

LAYERS, DIM, PAGE, CHUNK, LONGEST, USERS = 2, 4, 4, 32, 90, 48
VERSIONS = ("a", "b")
# Of the process, over the last nine tenths of the run: allocators keep some of what was freed.
RSS_ALLOWANCE = 64 << 20


def mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def digests(user: int, version: str, tokens: np.ndarray) -> np.ndarray:
    """Per token a number that stands for it, for everything before it, and for whom it was computed."""
    position = np.arange(len(tokens), dtype=np.uint64)
    owner = mix(np.array([user * len(VERSIONS) + VERSIONS.index(version) + 1], dtype=np.uint64))
    return mix(np.cumsum(mix(tokens * np.uint64(0x632BE59BD9B4E019) + position), dtype=np.uint64) + owner)


def rows(seen: np.ndarray, layer: int, is_v: bool) -> torch.Tensor:
    """Keys or values `[len(seen), 1, DIM]`, integers below 2^23, which float32 holds exactly."""
    lane = np.arange(DIM, dtype=np.uint64) + np.uint64(DIM * (2 * layer + is_v) + 1)
    return torch.from_numpy((mix(seen[:, None] + lane) >> np.uint64(41)).astype(np.float32)).unsqueeze(1)


class Users:
    """What each user's history holds now; shared by the threads."""

    def __init__(self) -> None:
        self.tokens = [np.empty(0, dtype=np.uint64) for _ in range(USERS)]
        self.next = 0
        self.lock = threading.Lock()

    def fresh(self, n: int) -> np.ndarray:
        self.next += n
        return np.arange(self.next - n, self.next, dtype=np.uint64)

    def visit(self, user: int, rng: random.Random) -> np.ndarray:
        with self.lock:
            tokens = self.tokens[user]
            move = rng.random()
            if move < 0.04:
                tokens = tokens[: rng.randint(0, len(tokens))]
            elif move < 0.07 and len(tokens):
                tokens = tokens.copy()
                tokens[rng.randrange(len(tokens))] = self.fresh(1)[0]
            elif move < 0.09 or len(tokens) > LONGEST - 8:
                tokens = tokens[rng.randint(1, 40) :]
            else:
                tokens = np.concatenate([tokens, self.fresh(rng.choice([0, 1, 2, 3, 5, 8, 8]))])
            self.tokens[user] = tokens
            return tokens


class Soak:
    def __init__(self, requests: int, threads: int, seed: int, strategy: str) -> None:
        self.requests, self.threads, self.seed = requests, threads, seed
        self.config = CacheConfig(
            num_layers=LAYERS, num_heads=1, qk_dim=DIM, v_dim=DIM, dtype="float32", attn_norm_len=1,
            page_size=PAGE, num_pages=320, onload_pages=48 if strategy == "staged" else 0, chunk_size=CHUNK,
            host_bytes=90 * CHUNK * LAYERS * 2 * DIM * 4, offload_quota_tokens=24 * CHUNK,
            onload_strategy=strategy, offload_strategy=strategy,
        )  # fmt: skip
        self.cache = HierarchicalKVCache(self.config)
        self.cache.table.fill_(float("nan"))
        self.users = Users()
        self.lock = threading.Lock()
        self.served = self.compared = self.failed = self.stopped = 0
        self.problems: list[str] = []

    def work(self, number: int) -> None:
        rng = random.Random(f"{self.seed} {number}")
        try:
            batches = 0
            while self.served < self.requests and not self.problems:
                self.serve(rng)
                self.operate(rng)
                batches += 1
                if batches % 200 == 0:
                    self.cache.check()
        except (CacheError, AssertionError, RuntimeError) as error:
            self.problems.append(f"thread {number}: {type(error).__name__}: {error}")

    def serve(self, rng: random.Random) -> None:
        version = VERSIONS[rng.random() < 0.2]
        # Some users come much more often than others.
        chosen = [min(rng.randrange(USERS), rng.randrange(USERS)) for _ in range(rng.randint(1, 8))]
        histories = [self.users.visit(user, rng) for user in chosen]
        seen = [digests(user, version, tokens) for user, tokens in zip(chosen, histories, strict=True)]
        lengths = torch.tensor([len(tokens) for tokens in histories])
        hashes = torch.from_numpy(np.concatenate(histories).view(np.int64))
        stops = rng.random() < 0.03
        batch = self.cache.begin(torch.tensor(chosen), lengths, num_candidates=1, token_hashes=hashes, version=version)
        cached = batch.cached_lengths.tolist()
        try:
            for layer in range(LAYERS):
                self.compare(batch, seen, cached, layer)
                new = np.concatenate(
                    [np.append(row[have:], np.uint64(0)) for row, have in zip(seen, cached, strict=True)]
                )
                batch.append(layer, rows(new, layer, False), rows(new, layer, True))
                if stops:
                    break
            if stops:
                self.cache.abort(batch)
            else:
                self.cache.commit(batch)
        except OnloadError:
            self.cache.abort(batch)
            with self.lock:
                self.failed += 1
        with self.lock:
            self.served += len(chosen)
            self.stopped += stops

    def compare(self, batch: Any, seen: list[np.ndarray], cached: list[int], layer: int) -> None:
        table = batch.wait(layer)
        if not sum(cached):
            return
        # Token t of a row lies in row t % PAGE of the row's page t // PAGE.
        first = table.indptr.tolist()
        slots = np.concatenate([first[row] * PAGE + np.arange(have) for row, have in enumerate(cached)])
        pages = self.cache.table[layer, table.indices.long()]
        wanted = np.concatenate([row[:have] for row, have in zip(seen, cached, strict=True)])
        for is_v, block in ((False, pages[:, : PAGE * DIM]), (True, pages[:, PAGE * DIM :])):
            got = block.reshape(-1, 1, DIM)[torch.from_numpy(slots)]
            if not torch.equal(got, rows(wanted, layer, is_v)):
                wrong = (got != rows(wanted, layer, is_v)).flatten(1).any(1).sum()
                raise AssertionError(f"layer {layer}: {int(wrong)} of {len(wanted)} cached tokens are wrong")
        with self.lock:
            self.compared += 2 * len(wanted)

    def operate(self, rng: random.Random) -> None:
        cache, dice = self.cache, rng.random()
        if dice < 0.02:
            cache.evict([rng.randrange(USERS)])
        elif dice < 0.07:
            cache.prefetch([rng.randrange(USERS) for _ in range(3)], version=VERSIONS[0])
        elif dice < 0.072:
            cache.flush()
        elif dice < 0.073:
            cache.clear()
        elif dice < 0.10:
            cache._engine.inject_faults(
                onload_copy=rng.choice([0, 1, 5]), offload_copy=rng.choice([0, 1, 5]), delay_us=rng.choice([0, 0, 50])
            )

    def run(self) -> dict[str, Any]:
        began = time.perf_counter()
        workers = [threading.Thread(target=self.work, args=(i,), daemon=True) for i in range(self.threads)]
        early = None
        with progress_bar() as step:
            for worker in workers:
                worker.start()
            while any(worker.is_alive() for worker in workers):
                step("serving", min(self.served, self.requests), self.requests)
                if early is None and self.served * 10 > self.requests:
                    early = resident_bytes()
                time.sleep(0.1)
        seconds = time.perf_counter() - began
        growth = max(0, resident_bytes() - early) if early is not None else 0
        if growth > RSS_ALLOWANCE:
            self.problems.append(f"the process grew by {growth >> 20} MiB while it served")
        stats = self.settle()
        return {
            "requests": self.served,
            "seconds": seconds,
            "tokens_compared": self.compared,
            "batches_stopped": self.stopped,
            "batches_without_their_onload": self.failed,
            "rss_growth_bytes": growth,
            "threads": self.threads,
            "seed": self.seed,
            "strategy": self.config.onload_strategy,
            "stats": stats,
            "problems": self.problems,
            "machine": describe_machine(),
            "ok": not self.problems,
        }

    def settle(self) -> dict[str, Any]:
        """Nothing may be left: counters of what is held are back at their start."""
        cache = self.cache
        cache._engine.inject_faults()
        cache.drain()
        try:
            cache.check()
        except CacheError as error:
            self.problems.append(str(error))
        stats = cache.stats()
        cache.clear()
        after = cache.stats()
        for name in ("entries", "open_batches", "transfers_in_flight", "pending_offload_tokens"):
            if after[name] != 0:
                self.problems.append(f"{name} is {after[name]} in the end; it was 0 in the beginning")
        for free, total in (("pages_free", "pages_total"), ("slots_free", "slots_total")):
            if after[free] != after[total]:
                self.problems.append(f"{free} is {after[free]} in the end; it was {after[total]} in the beginning")
        # What was meant to happen did happen.
        for name in ("host_hit_tokens", "device_hit_tokens", "onload_failures", "offload_failures", "edited_rows"):
            if self.served > 20_000 and stats[name] == 0:
                self.problems.append(f"{name} is 0: the traffic did not reach it")
        cache.close()
        return stats


def table(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    stats = result["stats"]
    return [
        ("requests", f"{result['requests']:,}", f"{result['threads']} threads, {result['strategy']} copies"),
        ("time", f"{result['seconds']:.1f} s", f"{result['requests'] / result['seconds']:,.0f} requests per second"),
        ("tokens compared", f"{result['tokens_compared']:,}", "cached ones, byte for byte, per layer, keys and values"),
        ("hit ratio", f"{stats['total_hit_ratio']:.3f}", f"device alone {stats['device_hit_ratio']:.3f}"),
        ("onloads", f"{stats['onloads']:,}", f"{stats['onload_failures']:,} made to fail"),
        ("offloads", f"{stats['offloads']:,}", f"{stats['offload_failures']:,} made to fail"),
        ("batches", f"{stats['batches']:,}", f"{stats['aborts']:,} aborted, {result['batches_stopped']:,} at will"),
        (
            "edits, cuts",
            f"{stats['edited_rows']:,}, {stats['truncated_rows']:,}",
            "rows that did not continue their history",
        ),
        ("growth, process", f"{result['rss_growth_bytes'] >> 10} KiB", "after the first tenth"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--strategy", choices=("direct", "staged"), default="staged")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    options = parser.parse_args()
    check_writable(options.json)
    torch.set_num_threads(1)
    result = Soak(options.requests, options.threads, options.seed, options.strategy).run()
    write_json(options.json, result)
    print_measures(console(), "soak", table(result))
    if result["problems"]:
        print_problems(console(stderr=True), result["problems"])
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
