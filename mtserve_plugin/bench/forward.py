"""What a whole request costs: recomputed, and with its history cached on the device, against the arithmetic it needs.

Rounds measure all things in turn, so that whatever else the machine does hits all of them, and each ratio is taken
within its round. One thread.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from mtserve_plugin.bench.forward_host import HostBench, bench_host, checkout
from mtserve_plugin.bench.timing import best, difference, no_garbage_collection, timed
from mtserve_plugin.cache import HierarchicalKVCache, NoCache
from mtserve_plugin.errors import CacheError, ConfigError
from mtserve_plugin.machine import describe_machine
from mtserve_plugin.models.features import build_features
from mtserve_plugin.models.hstu import HSTURanker, HSTURankerConfig
from mtserve_plugin.steps import HASH, LAYERS, STEPS, StepClock, step

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor

OnStep = Callable[[str, int, int], None]
Millis = dict[int, float]

BATCH = 8
TOLERANCE = 1e-6
_CONTROL = 1e-2
_PAGE = 32
# Square matrices of a size at which a product reaches the processor's peak and the operands stay in its cache.
_GEMM = 1024
_HASH_TARGET = 0.03
# In the breakdown, beside the paper's steps; those that begin like the first are parts of the layers.
_WITHIN, _NORM, _REST = "8.", "8.1, 8.5 norms", "rest"


@dataclass(frozen=True)
class ForwardBench:
    """What `bench_forward` measured; all numbers are medians over the rounds, dictionaries go by length of history.

    A cached request finds all of its history but the delta on the device. Arithmetic is the time that the layers'
    multiply-adds (projections, and attention over the pairs that its mask leaves) take at the speed of a large matrix
    product.

    Attributes:
        gemm_gflops: speed of a float32 product of 1024 x 1024 matrices.
        recompute_ms, cached_ms: a request, from features to scores.
        layers_ms: the part of `cached_ms` that its layers take.
        batch_ms: eight cached requests of the shortest history as one batch.
        arithmetic_ms: of a cached request.
        recompute_over_arithmetic, cached_over_arithmetic, layers_over_arithmetic: each over the arithmetic of itself.
        recompute_over_cached: how much faster the cache makes a request.
        batch_over_one: eight cached requests in a batch over one; 8 without any gain.
        content_check_share: of a cached request: hashing its history, and comparing the hashes in `begin`.
        breakdown_ms: a cached request's time by step (`mtserve_plugin.steps`); 8.x are parts of 8, the rest is in none.
        max_rel_error: scores cached against recomputed, max|a-b| / max|b|.
        control: the same measure for a request whose history holds other items at the same places, which only the
            attention to it can tell apart.
        host: the same for a model of `generative_recommenders`; `None` without a checkout.
        shape: sizes of model and request.
        rounds: measurements.
        machine: see `describe_machine`.
    """

    gemm_gflops: float
    recompute_ms: Millis
    cached_ms: Millis
    layers_ms: Millis
    batch_ms: float
    arithmetic_ms: Millis
    recompute_over_arithmetic: Millis
    cached_over_arithmetic: Millis
    layers_over_arithmetic: Millis
    recompute_over_cached: Millis
    batch_over_one: float
    content_check_share: Millis
    breakdown_ms: dict[int, dict[str, float]]
    max_rel_error: float
    control: float
    host: HostBench | None
    shape: dict[str, int]
    rounds: int
    machine: dict[str, Any] = field(default_factory=describe_machine)

    @property
    def problems(self) -> list[str]:
        """What is not as it has to be, in words."""
        found = []
        if self.max_rel_error > TOLERANCE:
            found.append(f"scores with the cache differ from recomputed ones by {self.max_rel_error:.1e}")
        if self.control < _CONTROL:
            found.append(
                f"scores under another history differ by {self.control:.1e} only: the comparison shows nothing"
            )
        if self.host is not None and self.host.max_rel_error > TOLERANCE:
            found.append(f"upstream's embeddings with the cache differ by {self.host.max_rel_error:.1e}")
        return found

    def to_json(self) -> dict[str, Any]:
        by_history = {
            "recompute_over_cached": self.recompute_over_cached,
            "recompute_ms": self.recompute_ms,
            "cached_ms": self.cached_ms,
            "layers_ms": self.layers_ms,
            "arithmetic_ms": self.arithmetic_ms,
        }
        values: dict[str, Any] = {
            "layers_over_arithmetic": max(self.layers_over_arithmetic.values()),
            "cached_over_arithmetic": max(self.cached_over_arithmetic.values()),
            "recompute_over_arithmetic": max(self.recompute_over_arithmetic.values()),
            "batch8_over_batch1": self.batch_over_one,
            "content_check_share": max(self.content_check_share.values()),
            **{f"{name}_{history}": value for name, rows in by_history.items() for history, value in rows.items()},
            "batch8_ms": self.batch_ms,
            "gemm_gflops": self.gemm_gflops,
            "max_rel_error": self.max_rel_error,
            "history_replaced": self.control,
            "breakdown_ms": {str(history): steps for history, steps in self.breakdown_ms.items()},
            "by_history": {
                str(history): {
                    "layers_over_arithmetic": self.layers_over_arithmetic[history],
                    "cached_over_arithmetic": self.cached_over_arithmetic[history],
                    "recompute_over_arithmetic": self.recompute_over_arithmetic[history],
                    "content_check_share": self.content_check_share[history],
                }
                for history in self.cached_ms
            },
        }
        if self.host is not None:
            values |= self.host.to_json() | {
                f"upstream_over_our_cached_{history}": self.host.recompute_ms[history] / self.cached_ms[history]
                for history in self.cached_ms
            }
        return values | {
            **self.shape,
            "rounds": self.rounds,
            "threads": 1,
            "machine": self.machine,
            "ok": not self.problems,
        }

    def table(self) -> list[tuple[str, str, str]]:
        shape = self.shape
        request = f"delta {shape['delta']}, {shape['candidates']} candidates"
        rows = [
            ("matrix product", f"{self.gemm_gflops:.0f} GFLOP/s", "float32, one thread: what arithmetic is priced at")
        ]
        for history, cached in self.cached_ms.items():
            least = self.arithmetic_ms[history]
            rows += [
                (f"cached, {history}", f"{cached:.2f} ms", f"{request}; arithmetic {least:.2f} ms"),
                ("  over arithmetic", f"{self.cached_over_arithmetic[history]:.2f}", "whole request"),
                ("  layers", f"{self.layers_over_arithmetic[history]:.2f}", "over the same arithmetic"),
                ("  content check", f"{self.content_check_share[history]:.2%}", f"of it; target {_HASH_TARGET:.0%}"),
                (
                    f"recompute, {history}",
                    f"{self.recompute_ms[history]:.1f} ms",
                    f"{self.recompute_over_arithmetic[history]:.2f} of its arithmetic",
                ),
                ("  over cached", f"{self.recompute_over_cached[history]:.1f}", "what the cache gains"),
            ]
        rows.append(
            (
                f"batch of {BATCH}",
                f"{self.batch_ms:.1f} ms",
                f"{self.batch_over_one:.2f} of one cached request with {min(self.cached_ms)} tokens",
            )
        )
        longest = max(self.breakdown_ms)
        for name, spent in self.breakdown_ms[longest].items():
            rows.append((f"  {name}", f"{spent:.3f} ms", f"of a cached request with {longest} tokens"))
        rows.append(
            (
                "score difference",
                f"{self.max_rel_error:.1e}",
                f"cached to recompute; other items in the history {self.control:.1e}",
            )
        )
        return rows + (self.host.table(self.cached_ms) if self.host is not None else [])


def bench_forward(
    *,
    histories: Sequence[int] = (2000, 4000),
    delta: int = 32,
    candidates: int = 64,
    layers: int = 4,
    heads: int = 4,
    dim: int = 64,
    rounds: int = 7,
    on_step: OnStep | None = None,
) -> ForwardBench:
    """Measures one model, float32; with GENERATIVE_RECOMMENDERS naming a checkout, one of `DlrmHSTU` as well.

    Args:
        histories: tokens of each request's whole history.
        delta: of them, tokens that are not cached.
        candidates: per request.
        layers, heads: of the model.
        dim: of a head, for keys and for values; the embeddings have `heads * dim`.
        rounds: measurements whose median is taken.
        on_step: told what is being done.

    Raises:
        ConfigError: an argument is out of range.
        CacheError: the cache did not hold what was to be found in it, so that nothing was measured.
    """
    sizes = {"delta": delta, "candidates": candidates, "layers": layers, "heads": heads, "dim": dim, "rounds": rounds}
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"--{name} {value} must be at least 1")
    if not histories or min(histories) <= delta:
        raise ConfigError(f"--history {min(histories, default=0)} must be longer than the delta, {delta} tokens")
    histories = sorted(set(histories))
    tell = on_step or (lambda *_: None)
    host_rounds = min(rounds, 3) if checkout() else 0
    total = rounds + 2 + (host_rounds and host_rounds + 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tell("building the model", 0, total)
        with no_garbage_collection(), _Place(histories, delta, candidates, layers, heads, dim) as place:
            tell("comparing scores", 1, total)
            error, control = place.compare()
            seen = []
            for done in range(rounds):
                tell(f"round {done + 1}", 2 + done, total)
                seen.append(place.round())
        host = None
        if host_rounds:
            host = bench_host(
                histories=histories,
                delta=delta,
                candidates=candidates,
                layers=layers,
                heads=heads,
                dim=dim,
                rounds=host_rounds,
                on_step=lambda text, done: tell(text, 2 + rounds + done, total),
            )
    finally:
        torch.set_num_threads(threads)

    def median(value: Callable[[_Round, int], float]) -> Millis:
        return {history: statistics.median(value(one, history) for one in seen) for history in histories}

    def over_arithmetic(spent: str, of: Callable[[int], int]) -> Millis:
        return median(lambda one, history: getattr(one, spent)[history] * one.gflops * 1e6 / of(history))

    shortest = histories[0]
    return ForwardBench(
        gemm_gflops=statistics.median(one.gflops for one in seen),
        recompute_ms=median(lambda one, history: one.recompute[history]),
        cached_ms=median(lambda one, history: one.cached[history]),
        layers_ms=median(lambda one, history: one.steps[history][LAYERS]),
        batch_ms=statistics.median(one.batch for one in seen),
        arithmetic_ms=median(lambda one, history: place.flops(history, delta) / one.gflops / 1e6),
        recompute_over_arithmetic=over_arithmetic("recompute", lambda history: place.flops(history, history)),
        cached_over_arithmetic=over_arithmetic("cached", lambda history: place.flops(history, delta)),
        layers_over_arithmetic=median(
            lambda one, history: one.steps[history][LAYERS] * one.gflops * 1e6 / place.flops(history, delta)
        ),
        recompute_over_cached=median(lambda one, history: one.recompute[history] / one.cached[history]),
        batch_over_one=statistics.median(one.batch / one.cached[shortest] for one in seen),
        content_check_share=median(lambda one, history: one.content_check[history] / one.cached[history]),
        breakdown_ms={
            history: {
                name: statistics.median(one.steps[history][name] for one in seen) for name in seen[0].steps[history]
            }
            for history in histories
        },
        max_rel_error=max(error, *(one.error for one in seen)),
        control=control,
        host=host,
        shape={name: value for name, value in sizes.items() if name != "rounds"},
        rounds=rounds,
    )


@dataclass
class _Round:
    """Everything once; milliseconds by length of history."""

    gflops: float
    recompute: Millis
    cached: Millis
    steps: dict[int, dict[str, float]]
    content_check: Millis
    batch: float
    error: float


class _Place:
    """A model, a cache in which every history but its delta is stored, and the requests."""

    def __init__(
        self, histories: Sequence[int], delta: int, candidates: int, layers: int, heads: int, dim: int
    ) -> None:
        longest = max(histories)
        config = HSTURankerConfig(
            num_items=100_000,
            num_actions=16,
            embedding_dim=heads * dim,
            num_layers=layers,
            num_heads=heads,
            qk_dim=dim,
            v_dim=dim,
            max_positions=longest + 1,
            num_time_buckets=2048,
            attn_norm_len=longest,
        )
        self.config = config
        self.candidates = candidates
        self.generator = torch.Generator().manual_seed(layers * heads * dim)
        tokens = sum(histories) + BATCH * min(histories)
        pages = tokens // _PAGE + 2 * (len(histories) + BATCH)
        self.cache = HierarchicalKVCache(config.cache_config(num_pages=pages, page_size=_PAGE))
        self.recompute = NoCache(config.cache_config())
        self.model = HSTURanker(config, self.cache).eval()
        self.gemm = _Gemm()
        # By length; the batch goes under its own users.
        self.requests = {
            history: _Request(self._users([history], history), [history], history, delta) for history in histories
        }
        shortest, users = min(histories), list(range(-BATCH, 0))
        self.batch = _Request(self._users(users, shortest), users, shortest, delta)
        for request in (*self.requests.values(), self.batch):
            self.model(request.before)

    def __enter__(self) -> _Place:
        return self

    def __exit__(self, *_: object) -> None:
        self.cache.close()

    def flops(self, history: int, new: int) -> int:
        """Of the layers, for one request of whose history `new` tokens are computed."""
        config, rows = self.config, new + self.candidates
        projected = 2 * config.num_heads * (config.qk_dim + config.v_dim) + config.num_heads * config.v_dim
        pairs = new * (history - new) + new * (new + 1) // 2 + self.candidates * (history + 1)
        attention = 2 * pairs * config.num_heads * (config.qk_dim + config.v_dim)
        return config.num_layers * (2 * rows * config.embedding_dim * projected + attention)

    def compare(self) -> tuple[float, float]:
        """The difference between cached and recomputed scores of the batch, and what another history makes."""
        batch, request = self.batch, next(iter(self.requests.values()))
        self._rewind(batch)
        error = difference(self.model(batch.whole), self._recomputed(batch.whole))
        want = self._recomputed(request.whole)
        return error, difference(self._recomputed(request.other), want)

    def round(self) -> _Round:
        gflops = self.gemm.flops / self.gemm.seconds() / 1e9
        one = _Round(gflops, {}, {}, {}, {}, 0.0, 0.0)
        for history, request in self.requests.items():
            one.recompute[history], want = timed(partial(self._recomputed, request.whole))
            self._rewind(request)
            with StepClock() as clock, _norms_timed():
                one.cached[history], got = timed(partial(self.model, request.whole))
            one.steps[history] = _breakdown(clock, one.cached[history])
            one.content_check[history] = one.steps[history][HASH] + self._comparison(request)
            one.error = max(one.error, difference(got, want))
        self._rewind(self.batch)
        one.batch, _ = timed(partial(self.model, self.batch.whole))
        return one

    def _users(self, users: list[int], length: int) -> dict[str, torch.Tensor]:
        total, draw = len(users) * length, self.generator
        gaps = torch.randint(1, 100_000, (len(users), length), generator=draw)
        return {
            "item": torch.randint(self.config.num_items, (total,), generator=draw),
            "action": torch.randint(self.config.num_actions, (total,), generator=draw),
            "time": gaps.cumsum(1).view(-1),
            "candidate": torch.randint(self.config.num_items, (len(users) * self.candidates,), generator=draw),
        }

    def _recomputed(self, features: KeyedJaggedTensor) -> torch.Tensor:
        self.model.cache = self.recompute
        try:
            return self.model(features)
        finally:
            self.model.cache = self.cache

    def _rewind(self, request: _Request) -> None:
        """A history that lost its newest tokens is cut in the cache, so that they are a delta again."""
        self.model(request.before)
        for user in request.users:
            found = self.cache.lengths(user)
            if found is None or found["device"] != request.stored:
                raise CacheError(f"the cache holds {found} of {request.stored} tokens; this measures nothing")

    def _comparison(self, request: _Request) -> float:
        """Milliseconds that `begin` takes longer when it compares hashes."""
        users, lengths = request.whole["user"].values(), request.whole["item"].lengths()

        def begin_and_abort(hashes: torch.Tensor | None) -> None:
            self.cache.abort(self.cache.begin(users, lengths, num_candidates=self.candidates, token_hashes=hashes))

        hashes = self.model._token_hashes(request.whole, self.cache)
        compared, plain = (best(partial(begin_and_abort, given))[0] for given in (hashes, None))
        return max(0.0, compared - plain)


class _Request:
    """Features of one batch: the whole histories, these without their last `delta` tokens, and others as long."""

    def __init__(self, columns: dict[str, torch.Tensor], users: list[int], length: int, delta: int) -> None:
        self.users = users
        self.stored = length - delta
        self.whole = self._features(columns, length)
        self.before = self._features(columns, self.stored)
        self.other = self._features(columns | {"item": columns["item"].flip(0)}, length)

    def _features(self, columns: dict[str, torch.Tensor], length: int) -> KeyedJaggedTensor:
        rows = len(self.users)
        history = {key: columns[key].view(rows, -1)[:, :length].reshape(-1) for key in ("item", "action", "time")}
        return build_features(
            user=self.users,
            **history,
            history_lengths=[length] * rows,
            candidate=columns["candidate"],
            num_candidates=columns["candidate"].numel() // rows,
            now=columns["time"].view(rows, -1)[:, -1] + 3600,
        )


class _Gemm:
    """The machine's peak, as far as torch reaches it."""

    flops = 2 * _GEMM**3

    def __init__(self) -> None:
        self.a, self.b, self.out = (torch.ones(_GEMM, _GEMM) for _ in range(3))

    def seconds(self) -> float:
        return best(lambda: torch.mm(self.a, self.b, out=self.out))[0] / 1e3


def _breakdown(clock: StepClock, whole: float) -> dict[str, float]:
    """Milliseconds by step; those within the layers are parts of them, the rest belongs to no step."""
    spent = {name: 1e3 * clock.seconds[name] for name in (*STEPS, _NORM) if name in clock.seconds}
    return spent | {_REST: whole - sum(took for name, took in spent.items() if not name.startswith(_WITHIN))}


@contextmanager
def _norms_timed() -> Iterator[None]:
    """Counts the norms, parts of the steps before and after attention, as a step of their own; the head's too."""
    inner = F.layer_norm

    def told(*arguments: Any, **named: Any) -> torch.Tensor:
        with step(_NORM):
            return inner(*arguments, **named)

    F.layer_norm = told
    try:
        yield
    finally:
        F.layer_norm = inner
