"""Figure 1: the tokens that three consecutive requests of one user have encoded, with and without a cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from mtserve_plugin.bench.timing import torch_threads
from mtserve_plugin.cache import HierarchicalKVCache, KVCache, NoCache
from mtserve_plugin.errors import InputError
from mtserve_plugin.models.hstu import HSTURanker
from mtserve_plugin.replay.checks import TOLERANCE, Difference
from mtserve_plugin.replay.model import build_model, to_kjt
from mtserve_plugin.replay.options import ReplayOptions
from mtserve_plugin.replay.paper.figures import FIGURE_1
from mtserve_plugin.replay.run import OnStep
from mtserve_plugin.workload import CandidateSampler, Requests, Trace, build_features, load_trace


class OneUser(NamedTuple):
    """What was run, a row per request, and what is wrong with it."""

    scale: dict[str, Any]
    rows: list[dict[str, Any]]
    problems: list[str]


def replay_one_user(options: ReplayOptions, on_step: OnStep) -> OneUser:
    """Serves one user's visits with `NoCache` and with `HierarchicalKVCache`; the visit before them fills the cache.

    Rows count tokens: `history` (asked for), `candidates`, `encoded` by mode (history tokens that were not found, from
    the cache's counters) and `processed` by mode (rows that went into the model's encoder, candidates among them).

    Raises:
        InputError: no user of the trace comes often enough.
    """
    with torch_threads(options.threads):
        on_step("reading the trace", 0, 1)
        trace = load_trace(options.trace, **options.trace_options())
        visits = choose_visits(trace, FIGURE_1["requests"])
        on_step("building the model", 0, 1)
        longest = int(visits.history_length.max())
        model = build_model(trace, options.shape, longest, options.seed)
        config = model.config.cache_config(
            page_size=options.page_size, num_pages=-(-longest // options.page_size) + 1, chunk_size=options.chunk
        )
        sampler = CandidateSampler(trace, options.candidates, seed=options.seed)
        host_bytes = (longest // options.chunk + 2) * config.chunk_bytes
        with HierarchicalKVCache(config.replace(host_bytes=host_bytes)) as cache:
            caches = {"recompute": NoCache(config), "reuse": cache}
            served = {mode: _Served(model, each, trace, sampler) for mode, each in caches.items()}
            served["reuse"].visit(visits.take(slice(0, 1)))
            rows, difference = [], Difference()
            for number in range(1, len(visits)):
                on_step(f"request {number}", number - 1, len(visits) - 1)
                visit = visits.take(slice(number, number + 1))
                counts = {mode: one.visit(visit) for mode, one in served.items()}
                difference.add(served["reuse"].scores, served["recompute"].scores)
                rows.append(
                    {
                        "request": number,
                        "history": int(visit.history_length[0]),
                        "candidates": int(served["reuse"].scores.numel()),
                        "encoded": {mode: count["encoded"] for mode, count in counts.items()},
                        "processed": {mode: count["processed"] for mode, count in counts.items()},
                    }
                )
    tolerance = TOLERANCE[options.shape.dtype]
    problems = []
    if not difference.value <= tolerance:
        problems.append(f"scores differ from recompute by {difference.value:.1e}, more than {tolerance:.0e}")
    shape = options.shape
    scale = {
        "trace": options.trace,
        "user": int(visits.user[0]),
        "filled_with": int(visits.history_length[0]),
        "candidates": options.candidates,
        "layers": shape.layers,
        "heads": shape.heads,
        "dim": shape.dim,
        "dtype": shape.dtype,
        "page_size": options.page_size,
        "chunk": options.chunk,
        "threads": options.threads or torch.get_num_threads(),
        "seed": options.seed,
    }
    return OneUser(scale, rows, problems)


def choose_visits(trace: Trace, count: int) -> Requests:
    """One user's visits, `count` and the one before, whose histories grow and add up to nearly the paper's tokens.

    Raises:
        InputError: there are none.
    """
    requests = Requests.concatenate(list(trace.blocks()))
    requests = requests.take(np.argsort(requests.user, kind="stable"))
    length, starts = requests.history_length, np.arange(max(len(requests) - count, 0))
    fits = (requests.user[starts] == requests.user[starts + count]) & (length[starts] > 0)
    for ahead in range(1, count + 1):
        fits &= (length[starts + ahead] > length[starts + ahead - 1]) & ~requests.invalidated[starts + ahead]
    if not fits.any():
        raise InputError(
            f"no user of {trace.name!r} has {count + 1} visits between which the history grows; use more --users or "
            "a larger --max-history"
        )
    asked = sum(length[starts + ahead] for ahead in range(1, count + 1))
    begin = int(np.where(fits, np.abs(asked - FIGURE_1["recompute_tokens"]), np.inf).argmin())
    return requests.take(slice(begin, begin + count + 1))


class _Served:
    """A cache that is visited by one user."""

    def __init__(self, model: HSTURanker, cache: KVCache, trace: Trace, sampler: CandidateSampler) -> None:
        self._model, self._cache, self._trace, self._sampler = model, cache, trace, sampler
        self.scores = torch.empty(0)

    def visit(self, request: Requests) -> dict[str, int]:
        before, rows = self._cache.stats(), []
        handle = self._model.encoder.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
        self._model.cache = self._cache
        try:
            self.scores = self._model(
                to_kjt(build_features(self._trace, request, self._sampler), self._model.config.num_items)
            )
        finally:
            handle.remove()
            self._model.cache = NoCache(self._cache.config)
        self._cache.drain()
        after = self._cache.stats()
        asked, found = (after[name] - before[name] for name in ("history_tokens", "hit_tokens"))
        return {"encoded": asked - found, "processed": sum(rows)}
