"""How fast keys and values move between the tiers, and how much of it hides behind compute.

Everything goes through the public cache, on the caller's thread, as a model would do it. Rounds measure all things in
turn, so that whatever else the machine does hits all of them, and each share is taken within its round.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from mtserve_plugin.bench.timing import no_garbage_collection
from mtserve_plugin.cache import HierarchicalKVCache
from mtserve_plugin.config import CacheConfig
from mtserve_plugin.errors import CacheError, ConfigError
from mtserve_plugin.machine import describe_machine

OnStep = Callable[[str, int, int], None]

_HEADS, _DIM, _PAGE, _CHUNK = 4, 128, 32, 1024
_DTYPE = "bfloat16"
# The compute of one layer, as multiples of the time in which one layer's bytes are copied.
RATIOS = (0.5, 1.0, 2.0)
_POISON = 0x7FC1  # a NaN


@dataclass(frozen=True)
class TransferBench:
    """What `bench_transfer` measured; all numbers are medians over the rounds.

    Attributes:
        memcpy_gbps: one thread's memcpy of the same number of bytes, whole, in 10^9 bytes per second.
        onload_share: per strategy ("direct", "staged"), bandwidth from `begin` to the last layer's `wait`, as a share
            of memcpy's.
        offload_share: bandwidth from `commit` to the end of the copies (direct), as a share of memcpy's.
        offload_launch_us: what a commit that launches an offload costs more than one that does not.
        offload_launch_cpu_us: the same in processor time of the calling thread. Where it is far less, the copies or
            somebody else took the caller's core: the machine was not idle.
        makespan: per ratio of compute to copying, the time of a batch over max(bytes / bandwidth, compute). The
            bandwidth is the better one of memcpy's and the onload's own.
        overlap_control: memcpy and compute of equal length on two threads, without the cache, over either alone: 1
            where two cores are idle, 2 where the threads share one, and then `makespan` says nothing.
        floor: per ratio, the least that `makespan` can be: no layer computes before it is copied, so that the first
            layer's copy and the last layer's compute overlap nothing.
        bytes_moved: of one onload.
        layers, users, tokens, rounds: what was measured.
        verified: every byte of an onload was compared with what had been appended.
        machine: see `describe_machine`.
    """

    memcpy_gbps: float
    onload_share: dict[str, float]
    offload_share: float
    launch: _Launch
    makespan: dict[float, float]
    overlap_control: float
    floor: dict[float, float]
    bytes_moved: int
    layers: int
    users: int
    tokens: int
    rounds: int
    verified: bool
    machine: dict[str, Any] = field(default_factory=describe_machine)

    @property
    def worst_makespan(self) -> float:
        return max(self.makespan.values())

    @property
    def problems(self) -> list[str]:
        """What is not as it has to be, in words."""
        return [] if self.verified else ["the bytes that came back are not those that were appended"]

    def to_json(self) -> dict[str, Any]:
        return {
            "memcpy_gbps": self.memcpy_gbps,
            "onload_share_direct": self.onload_share["direct"],
            "onload_share_staged": self.onload_share["staged"],
            "offload_share": self.offload_share,
            "offload_launch_us": self.launch.extra_us,
            "offload_launch_asleep_us": self.launch.asleep_us,
            "commit_with_launch_us": self.launch.commit_us,
            "commit_without_launch_us": self.launch.quiet_us,
            "makespan_over_bound": self.worst_makespan,
            "makespan_over_bound_by_ratio": {str(ratio): value for ratio, value in self.makespan.items()},
            "overlap_control": self.overlap_control,
            "makespan_floor_by_ratio": {str(ratio): value for ratio, value in self.floor.items()},
            "bytes": self.bytes_moved,
            "page_bytes": 2 * _PAGE * _HEADS * _DIM * 2,
            "layers": self.layers,
            "users": self.users,
            "tokens_per_user": self.tokens,
            "rounds": self.rounds,
            "machine": self.machine,
            "ok": not self.problems,
        }

    def table(self) -> list[tuple[str, str, str]]:
        size = f"{self.users} users with {self.tokens} tokens, {self.layers} layers: {self.bytes_moved / 2**20:.0f} MiB"
        rows = [
            ("memcpy", f"{self.memcpy_gbps:.2f} GB/s", f"one thread; {size}"),
            ("onload, direct", f"{self.onload_share['direct']:.2f}", "of memcpy's bandwidth; target 0.9"),
            (
                "onload, staged",
                f"{self.onload_share['staged']:.2f}",
                "of memcpy's bandwidth; every byte moves three times",
            ),
            ("offload, direct", f"{self.offload_share:.2f}", "of memcpy's bandwidth"),
            (
                "offload launch",
                f"{self.launch.extra_us:.1f} us",
                f"a commit with one {self.launch.commit_us:.1f} us, without {self.launch.quiet_us:.1f}; target 30 us",
            ),
            ("offload launch", f"{self.launch.asleep_us:.1f} us", "the same after more than a second without offloads"),
            (
                "overlap control",
                f"{self.overlap_control:.3f}",
                "memcpy beside compute, no cache; 1: two idle cores, 2: one",
            ),
        ]
        for ratio, value in self.makespan.items():
            text = (
                f"of max(copy, compute), compute = {ratio:g} x copy; target 1.1, least possible {self.floor[ratio]:.3f}"
            )
            rows.append(("makespan", f"{value:.3f}", text))
        return rows


def bench_transfer(
    *, users: int = 4, tokens: int = 1024, layers: int = 24, rounds: int = 7, on_step: OnStep | None = None
) -> TransferBench:
    """Measures both pipelines with pages of the paper's size (32 tokens, 4 heads of 128, bfloat16: 64 KiB per layer).

    Args:
        users: users of a batch, all of whom return from the host tier.
        tokens: history of each, a multiple of 1024, so that all of it is persisted.
        layers: more layers let more of a batch's copies overlap its compute: see `TransferBench.floor`.
        rounds: measurements whose median is taken.
        on_step: told what is being done.

    Raises:
        ConfigError: an argument is out of range, or the memory cannot be had.
    """
    for name, value, least in (
        ("users", users, 1),
        ("layers", layers, 1),
        ("rounds", rounds, 1),
        ("tokens", tokens, 1),
    ):
        if value < least:
            raise ConfigError(f"--{name} {value} must be at least {least}")
    if tokens % _CHUNK:
        raise ConfigError(f"--tokens {tokens} must be a multiple of {_CHUNK}, the chunk size")
    step = on_step or (lambda *_: None)
    total = rounds + 3
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ExitStack() as stack, no_garbage_collection():
            step("storing users", 0, total)
            places = {
                strategy: stack.enter_context(_Place(users, tokens, layers, strategy))
                for strategy in ("direct", "staged")
            }
            step("comparing bytes", 1, total)
            verified = all(place.verify() for place in places.values())
            memcpy = _Memcpy(places["direct"].bytes)
            seen: list[dict[str, Any]] = []
            for done in range(rounds):
                step(f"round {done + 1}", 2 + done, total)
                seen.append(_round(places, memcpy))
            step("launching offloads", 2 + rounds, total)
            launch = _measure_launch(places["direct"], 16 * rounds)
    finally:
        torch.set_num_threads(threads)

    def median(name: str, key: Any = None) -> float:
        return statistics.median(one[name] if key is None else one[name][key] for one in seen)

    return TransferBench(
        memcpy_gbps=median("memcpy_gbps"),
        onload_share={strategy: median("onload_share", strategy) for strategy in places},
        offload_share=median("offload_share"),
        launch=launch,
        makespan={ratio: median("makespan", ratio) for ratio in RATIOS},
        overlap_control=median("overlap_control"),
        floor={ratio: 1 + min(1.0, ratio) / max(1.0, ratio) / layers for ratio in RATIOS},
        bytes_moved=places["direct"].bytes,
        layers=layers,
        users=users,
        tokens=tokens,
        rounds=rounds,
        verified=verified,
    )


def _round(places: dict[str, _Place], memcpy: _Memcpy) -> dict[str, Any]:
    """Everything once."""
    direct = places["direct"]
    copied = memcpy.seconds()
    onloads = {strategy: place.onload() for strategy, place in places.items()}
    best = min(copied, onloads["direct"])
    makespan = {}
    for ratio in RATIOS:
        work = _Compute(ratio * best / direct.layers)
        computed = work.seconds(direct.layers)
        makespan[ratio] = direct.onload(work) / max(best, computed)
    return {
        "memcpy_gbps": direct.bytes / copied / 1e9,
        "onload_share": {strategy: copied / seconds for strategy, seconds in onloads.items()},
        "offload_share": copied / direct.offload(),
        "makespan": makespan,
        "overlap_control": _overlap_control(memcpy, direct.layers),
    }


class _Place:
    """A cache whose users are persisted and return from the host at every `onload`."""

    def __init__(self, users: int, tokens: int, layers: int, strategy: str) -> None:
        self.layers = layers
        self.users = torch.arange(users)
        self.lengths = torch.full((users,), tokens)
        self.bytes = users * tokens * layers * 2 * _HEADS * _DIM * 2
        self.pages = users * (tokens // _PAGE)
        chunk_bytes = _CHUNK * layers * 2 * _HEADS * _DIM * 2
        config = CacheConfig(
            num_layers=layers,
            num_heads=_HEADS,
            qk_dim=_DIM,
            v_dim=_DIM,
            dtype=_DTYPE,
            attn_norm_len=1,
            page_size=_PAGE,
            num_pages=self.pages + 2,
            onload_pages=self.pages if strategy == "staged" else 0,
            chunk_size=_CHUNK,
            # One more chunk, for the user whose offloads are timed one by one.
            host_bytes=users * (tokens // _CHUNK) * chunk_bytes + chunk_bytes,
            offload_quota_tokens=users * tokens,
            tail_write_back=False,
            onload_strategy=strategy,
        )
        self.cache = HierarchicalKVCache(config)
        generator = torch.Generator().manual_seed(users * tokens + layers)
        # Layer l stores the rows from l on: no two layers hold the same.
        shape = (users * tokens + layers, _HEADS, _DIM)
        self.keys = torch.randn(shape, generator=generator).to(torch.bfloat16)
        self.values = torch.randn(shape, generator=generator).to(torch.bfloat16)
        self.cache.table.view(torch.int16).fill_(_POISON)
        self._store()
        self.cache.drain()

    def __enter__(self) -> _Place:
        return self

    def __exit__(self, *_: object) -> None:
        self.cache.close()

    def _store(self) -> float:
        """Appends every user's tokens; returns the moment at which commit was called."""
        batch = self.cache.begin(self.users, self.lengths, num_candidates=0)
        for layer in range(self.layers):
            batch.wait(layer)
            batch.append(layer, *self._appended(layer))
        began = time.perf_counter()
        self.cache.commit(batch)
        return began

    def _appended(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = slice(layer, layer + int(self.lengths.sum()))
        return self.keys[rows], self.values[rows]

    def _leave_the_device(self) -> None:
        """Somebody who asks for every page evicts all others, whose tokens are persisted: nothing is copied."""
        filler = self.cache.begin([1 << 40], [self.cache.config.num_pages * _PAGE], num_candidates=0)
        self.cache.abort(filler)

    def onload(self, work: _Compute | None = None) -> float:
        """Seconds of a batch whose users all return from the host, computing `work` per layer."""
        self._leave_the_device()
        before = self.cache.stats()["onload_bytes"]
        began = time.perf_counter()
        batch = self.cache.begin(self.users, self.lengths, num_candidates=0)
        for layer in range(self.layers):
            batch.wait(layer)
            if work is not None:
                work.once()
        took = time.perf_counter() - began
        self.cache.commit(batch)
        self.cache.drain()
        if self.cache.stats()["onload_bytes"] - before != self.bytes:
            raise CacheError("the users did not return from the host; this measures nothing")
        return took

    def offload(self) -> float:
        """Seconds from commit to the end of the copies to the host."""
        self.cache.evict(self.users)
        before = self.cache.stats()["offload_bytes"]
        began = self._store()
        self.cache.drain()
        took = time.perf_counter() - began
        if self.cache.stats()["offload_bytes"] - before != self.bytes:
            raise CacheError("the users were not written to the host; this measures nothing")
        return took

    def verify(self) -> bool:
        """Whether an onload brings back every byte."""
        self._leave_the_device()
        self.cache.table.view(torch.int16).fill_(_POISON)
        batch = self.cache.begin(self.users, self.lengths, num_candidates=0)
        split = _PAGE * _HEADS * _DIM
        same = batch.cached_lengths.equal(self.lengths)
        for layer in range(self.layers):
            pages = self.cache.table[layer][batch.wait(layer).indices.long()]
            for got, want in zip((pages[:, :split], pages[:, split:]), self._appended(layer), strict=True):
                same &= torch.equal(got.reshape(-1).view(torch.int16), want.reshape(-1).view(torch.int16))
        self.cache.commit(batch)
        self.cache.drain()
        return same


class _Memcpy:
    """The C library's copy between two buffers, touched before."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.source = torch.ones(size, dtype=torch.uint8)
        self.target = torch.zeros(size, dtype=torch.uint8)

    def seconds(self) -> float:
        began = time.perf_counter()
        ctypes.memmove(self.target.data_ptr(), self.source.data_ptr(), self.size)
        return time.perf_counter() - began


class _Compute:
    """A loop of a given duration on the calling thread, in the nearest cache: it stands for a layer's kernels."""

    def __init__(self, seconds: float) -> None:
        self.a = torch.ones(64, 64)
        self.out = torch.empty(64, 64)
        self.turns = 100
        once = statistics.median(self._timed() for _ in range(5))
        self.turns = max(1, round(self.turns * seconds / once))

    def once(self) -> None:
        for _ in range(self.turns):
            torch.mm(self.a, self.a, out=self.out)

    def _timed(self) -> float:
        began = time.perf_counter()
        self.once()
        return time.perf_counter() - began

    def seconds(self, layers: int) -> float:
        """What the layers take when nothing is copied."""
        began = time.perf_counter()
        for _ in range(layers):
            self.once()
        return time.perf_counter() - began


def _overlap_control(memcpy: _Memcpy, layers: int) -> float:
    """What two threads take at once, over what either takes alone."""
    alone = memcpy.seconds()
    work = _Compute(alone / layers)
    alone = max(alone, work.seconds(layers))
    other = threading.Thread(target=memcpy.seconds)
    began = time.perf_counter()
    other.start()
    work.seconds(layers)
    other.join()
    return (time.perf_counter() - began) / alone


@dataclass(frozen=True)
class _Launch:
    """Median microseconds of a commit of one token, with an offload to launch and without; both after a silence too."""

    commit_us: float
    quiet_us: float
    commit_asleep_us: float
    quiet_asleep_us: float

    @property
    def extra_us(self) -> float:
        return self.commit_us - self.quiet_us

    @property
    def asleep_us(self) -> float:
        return self.commit_asleep_us - self.quiet_asleep_us


def _measure_launch(place: _Place, samples: int) -> _Launch:
    cache, user = place.cache, torch.tensor([1 << 41])
    # Room for it: the others keep nothing on the device.
    place._leave_the_device()

    def median_us(pause: float, samples: int) -> tuple[float, float]:
        with_launch, without = [], []
        for _ in range(samples):
            cache.evict(user)
            _commit_seconds(cache, user, _CHUNK - 1)
            before = cache.stats()["offloads"]
            time.sleep(pause)  # both commits come after a pause, on an idle machine
            with_launch.append(_commit_seconds(cache, user, _CHUNK))
            cache.drain()
            time.sleep(pause)
            without.append(_commit_seconds(cache, user, _CHUNK + 1))
            if cache.stats()["offloads"] != before + 1:
                raise CacheError("no offload was launched; this measures nothing")
        return statistics.median(with_launch) * 1e6, statistics.median(without) * 1e6

    # The thread that issues offloads looks for work by itself for a second.
    return _Launch(*median_us(0.003, samples), *median_us(1.2, 3))


def _commit_seconds(cache: HierarchicalKVCache, user: torch.Tensor, length: int) -> float:
    batch = cache.begin(user, torch.tensor([length]), num_candidates=0)
    new = torch.zeros(batch.num_rows, _HEADS, _DIM, dtype=torch.bfloat16)
    for layer in range(cache.config.num_layers):
        batch.wait(layer)
        batch.append(layer, new, new)
    began = time.perf_counter()
    cache.commit(batch)
    return time.perf_counter() - began
