"""The same measurement on a `DlrmHSTU` of `generative_recommenders`, as it is and attached."""

from __future__ import annotations

import copy
import importlib
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mtserve_plugin.bench.timing import difference, timed
from mtserve_plugin.cache import HierarchicalKVCache, NoCache
from mtserve_plugin.config import CacheConfig
from mtserve_plugin.errors import CacheError, ConfigError
from mtserve_plugin.integrations import attach

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor

ENVIRONMENT = "GENERATIVE_RECOMMENDERS"
_HOST = "generative_recommenders"
_DATASET, _USER_FEATURE = "streaming-400m", "user_id"
_ROWS = 10_000
_PAGE = 32
_START = 1_600_000_000

Millis = dict[int, float]


@dataclass(frozen=True)
class HostBench:
    """Medians, by length of history.

    Attributes:
        recompute_ms: upstream's model as it is, which recomputes.
        cached_ms: the same model attached to a cache that holds the history but its delta.
        recompute_over_cached: the ratio, taken within each round.
        max_rel_error: the candidates' embeddings, attached with the cache to attached without (`NoCache`).
    """

    recompute_ms: Millis
    cached_ms: Millis
    recompute_over_cached: Millis
    max_rel_error: float

    def to_json(self) -> dict[str, Any]:
        longest = max(self.recompute_ms)
        values: dict[str, Any] = {
            "upstream_max_rel_error": self.max_rel_error,
            "upstream_recompute_ms": self.recompute_ms[longest],
            "upstream_cached_ms": self.cached_ms[longest],
        }
        for name, rows in (
            ("upstream_recompute_ms", self.recompute_ms),
            ("upstream_cached_ms", self.cached_ms),
            ("upstream_over_cached", self.recompute_over_cached),
        ):
            values |= {f"{name}_{history}": value for history, value in rows.items()}
        return values

    def table(self, our_cached_ms: Millis) -> list[tuple[str, str, str]]:
        rows = []
        for history, cached in self.cached_ms.items():
            recompute = self.recompute_ms[history]
            rows += [
                (f"upstream, {history}", f"{recompute:.1f} ms", "DlrmHSTU as it is"),
                ("  attached", f"{cached:.2f} ms", "to a cache with the history but its delta"),
                ("  over attached", f"{self.recompute_over_cached[history]:.1f}", "what attaching gains"),
                ("  over our cached", f"{recompute / our_cached_ms[history]:.1f}", "our model with the same sizes"),
            ]
        rows.append(("difference", f"{self.max_rel_error:.1e}", "embeddings, attached with and without the cache"))
        return rows


def checkout() -> str | None:
    """The checkout that the environment names.

    Raises:
        ConfigError: there is none at that path.
    """
    path = os.environ.get(ENVIRONMENT)
    if not path:
        return None
    if not os.path.isdir(os.path.join(path, _HOST)):
        raise ConfigError(f"{ENVIRONMENT}={path} has no folder {_HOST}; name a checkout, or unset it")
    return path


def bench_host(
    *,
    histories: Sequence[int],
    delta: int,
    candidates: int,
    layers: int,
    heads: int,
    dim: int,
    rounds: int,
    on_step: Callable[[str, int], None],
) -> HostBench:
    """See `bench_forward`; the configuration is `streaming-400m` with other sizes and tables of 10,000 rows.

    Raises:
        ConfigError: no checkout is named.
        CacheError: the cache did not hold what was to be found in it.
    """
    on_step("importing upstream", 0)
    longest = max(histories)
    model = _build(layers, heads, dim)
    config = CacheConfig.for_model(
        model,
        attn_norm_len=longest,
        page_size=_PAGE,
        num_pages=sum(histories) // _PAGE + 4 * len(histories),
    )
    with torch.no_grad(), HierarchicalKVCache(config) as cache:
        attached, uncached = copy.deepcopy(model), copy.deepcopy(model)
        for twin, hook in ((attached, cache), (uncached, NoCache(config))):
            attach(twin, hook, user_feature=_USER_FEATURE, positions="append_stable")
        requests = {history: _Request(model, history, delta, candidates) for history in histories}
        worst = 0.0
        for request in requests.values():
            attached(*request.before)
            got, want = attached(*request.whole)[0], uncached(*request.whole)[0]
            worst = max(worst, difference(got, want))
        recompute: dict[int, list[float]] = {history: [] for history in histories}
        cached: dict[int, list[float]] = {history: [] for history in histories}
        for turn in range(rounds):
            on_step(f"upstream, round {turn + 1}", 1 + turn)
            for history, request in requests.items():
                recompute[history].append(timed(partial(model, *request.whole))[0])
                # A history that lost its newest events is cut in the cache, so that they are a delta again.
                attached(*request.before)
                found = cache.stats()["hit_tokens"]
                cached[history].append(timed(partial(attached, *request.whole))[0])
                if cache.stats()["hit_tokens"] - found != history - delta:
                    raise CacheError("the history was not found in the cache; this measures nothing")
    return HostBench(
        {history: statistics.median(spent) for history, spent in recompute.items()},
        {history: statistics.median(spent) for history, spent in cached.items()},
        {
            history: statistics.median(a / b for a, b in zip(recompute[history], cached[history], strict=True))
            for history in histories
        },
        worst,
    )


def _build(layers: int, heads: int, dim: int) -> Any:
    path = checkout()
    if path is None:
        raise ConfigError(f"{ENVIRONMENT} names no checkout of {_HOST}")
    import fbgemm_gpu  # noqa: F401  (the host's operators expect it to be loaded)

    sys.path.insert(0, path)
    try:
        common, configs, inference = (
            importlib.import_module(f"{_HOST}.{name}")
            for name in ("common", "dlrm_v3.configs", "dlrm_v3.inference.inference_modules")
        )
    finally:
        sys.path.remove(path)
    config, tables = configs.get_hstu_configs(_DATASET), configs.get_embedding_table_config(_DATASET)
    config.hstu_num_heads = heads
    config.hstu_attn_linear_dim = config.hstu_attn_qk_dim = dim
    config.hstu_attn_num_layers = layers
    config.hstu_embedding_table_dim = config.hstu_transducer_embedding_dim = heads * dim
    for table in tables.values():
        table.embedding_dim = heads * dim
    torch.manual_seed(layers * heads * dim)
    model = inference.get_hstu_model(tables, config, table_device="cpu", max_hash_size=_ROWS)
    model.set_hammer_kernel(common.HammerKernel.PYTORCH)
    return model


class _Request:
    """Features of one user, with the whole history and before its last `delta` events."""

    def __init__(self, model: Any, history: int, delta: int, candidates: int) -> None:
        config = model._hstu_configs
        draw = torch.Generator().manual_seed(history)
        events = [name for name, _ in config.merge_uih_candidate_feature_mapping]
        rows = {feature: table.num_embeddings for table in _tables(model) for feature in table.feature_names}

        def values(name: str, count: int) -> torch.Tensor:
            return torch.randint(rows.get(name, 256), (count,), generator=draw)

        times = _START + torch.randint(1, 100_000, (history,), generator=draw).cumsum(0)
        past = {name: values(name, history) for name in events}
        past[config.uih_action_time_feature_name] = times
        context = {
            name: torch.tensor([history % _ROWS]) for name in config.hstu_uih_feature_names if name not in events
        }
        chosen = {name: values(name, candidates) for name in config.hstu_candidate_feature_names}
        chosen[config.candidates_querytime_feature_name] = (times[-1] + 3600).expand(candidates)
        asked = _features(chosen)
        order = config.hstu_uih_feature_names
        self.whole = (_features({name: (past | context)[name] for name in order}), asked)
        short = {name: column[: history - delta] for name, column in past.items()}
        self.before = (_features({name: (short | context)[name] for name in order}), asked)


def _tables(model: Any) -> list[Any]:
    return list(model._embedding_collection.embedding_configs())


def _features(columns: dict[str, torch.Tensor]) -> KeyedJaggedTensor:
    from torchrec import KeyedJaggedTensor

    return KeyedJaggedTensor(
        keys=list(columns),
        values=torch.cat(list(columns.values())),
        lengths=torch.tensor([column.numel() for column in columns.values()]),
        stride=1,
    )
