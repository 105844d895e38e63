"""An HSTU ranker on torchrec whose forward is the paper's Algorithm 1, with any `KVCache`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from mtserve_plugin import dependencies, jagged
from mtserve_plugin.batch import CacheBatch
from mtserve_plugin.cache import KVCache, NoCache
from mtserve_plugin.config import CacheConfig
from mtserve_plugin.errors import CacheError, ConfigError, OnloadError
from mtserve_plugin.graphs import LayerGraphs
from mtserve_plugin.models.features import HISTORY_KEYS, build_features, read_request
from mtserve_plugin.models.layer import HSTULayer
from mtserve_plugin.models.workbench import Workbench
from mtserve_plugin.positions import AppendStableEncoder, places
from mtserve_plugin.steps import EMBED, HASH, LAYERS, LAYOUT, OUTPUT, POSTPROCESS, PROJECT, step

dependencies.require_torchrec()

from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor  # noqa: E402

__all__ = ["HSTURanker", "HSTURankerConfig", "build_features"]


@dataclass(frozen=True)
class HSTURankerConfig:
    """Size of an `HSTURanker`, frozen.

    Args:
        num_items: rows of the item table, for history and candidates.
        num_actions: rows of the action table; actions belong to the history only.
        embedding_dim: D, of the tables and of the layers.
        num_layers: HSTU layers.
        num_heads: attention heads per layer.
        qk_dim: dimension of a query or key head.
        v_dim: dimension of a value head.
        max_positions: rows of the position table; later tokens share the last row.
        num_time_buckets: buckets of the gap to the previous event.
        attn_norm_len: the constant by which attention divides.
        dtype: of the layers and the encoder, and of keys and values; tables and head are float32.
        max_attn_len: attention window, 0 for all.
        time_bucket_fn: "sqrt" or "log".

    Raises:
        ConfigError: an option is out of range.
    """

    num_items: int
    num_actions: int
    embedding_dim: int
    num_layers: int
    num_heads: int
    qk_dim: int
    v_dim: int
    max_positions: int
    num_time_buckets: int
    attn_norm_len: int
    dtype: str = "float32"
    max_attn_len: int = 0
    time_bucket_fn: str = "sqrt"

    def __post_init__(self) -> None:
        for name in ("num_items", "num_actions", "embedding_dim", "max_positions", "num_time_buckets"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.time_bucket_fn not in ("sqrt", "log"):
            raise ConfigError(f"time_bucket_fn={self.time_bucket_fn!r} is unknown; use 'sqrt' or 'log'")
        self.cache_config()

    @classmethod
    def small(cls, **changes: Any) -> HSTURankerConfig:
        """A model for tests: 3 layers, 2 heads, K and V of different size."""
        small = cls(
            num_items=1000,
            num_actions=8,
            embedding_dim=32,
            num_layers=3,
            num_heads=2,
            qk_dim=16,
            v_dim=24,
            max_positions=512,
            num_time_buckets=64,
            attn_norm_len=128,
        )
        return replace(small, **changes)

    @classmethod
    def paper(cls, **changes: Any) -> HSTURankerConfig:
        """The paper's model (5.1, appendix C): 8 layers, 4 heads of 128, bfloat16, histories up to 20,000.

        The paper gives no table sizes: 100,000 items keep the float32 table at 200 MB.
        """
        paper = cls(
            num_items=100_000,
            num_actions=16,
            embedding_dim=512,
            num_layers=8,
            num_heads=4,
            qk_dim=128,
            v_dim=128,
            max_positions=20_480,
            num_time_buckets=2048,
            attn_norm_len=20_480,
            dtype="bfloat16",
        )
        return replace(paper, **changes)

    def cache_config(self, **sizes: Any) -> CacheConfig:
        """A `CacheConfig` with this model's geometry; `sizes` are its other options, e.g. `num_pages`."""
        return CacheConfig(**{name: getattr(self, name) for name in _GEOMETRY}, **sizes)


# What a cache and its model have to agree on.
_GEOMETRY = ("num_layers", "num_heads", "qk_dim", "v_dim", "attn_norm_len", "dtype", "max_attn_len")


class HSTURanker(nn.Module):
    """Scores candidates for users from their histories, through a cache of keys and values.

    For inference: no gradient is recorded, and a cache that stores is refused in training mode, where weights
    change under it. Without a cache (`NoCache`) the same code recomputes everything. A batch whose cached
    keys and values fail to arrive is run again uncached. What the submodules return is overwritten later in the
    forward: a hook that keeps it has to clone it.

    Args:
        config: the sizes.
        cache: its geometry has to be `config.cache_config()`; the model is placed on its device. The
            attribute `cache` may be set to another one at any time between two forwards.
        seed: weights are random, of trained size, and the same for the same seed.
        content_check: give the cache a hash of every history token, so that edited, deleted and slid
            histories are found out; without it a history is taken to have only grown.
        workbench_tokens: rows of the `Workbench`; larger batches allocate for themselves. `None`: twice
            `max_positions`, a longest history and its candidates; 0: none. `mtserve plan` says how many a batch has.
        graphs: runs the layers of small batches through CUDA graphs, where it can; see `LayerGraphs`.

    Attributes:
        workbench: memory for the layers' projections.
        version: names the weights; keys and values of another version are never used. Change it with the
            weights.

    Example:
        >>> config = HSTURankerConfig.small()
        >>> model = HSTURanker(config, NoCache(config.cache_config()), seed=0).eval()
        >>> features = build_features(
        ...     user=[7], item=[3, 4], action=[0, 1], time=[100, 160], history_lengths=[2],
        ...     candidate=[5, 6, 8], num_candidates=3, now=[200])
        >>> model(features).shape
        torch.Size([3])
    """

    def __init__(
        self,
        config: HSTURankerConfig,
        cache: KVCache,
        *,
        seed: int = 0,
        content_check: bool = True,
        workbench_tokens: int | None = None,
        graphs: LayerGraphs | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.cache = cache
        self.content_check = content_check
        self.graphs = graphs
        self.version = ""
        dim = config.embedding_dim
        self.embeddings = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name="item",
                    embedding_dim=dim,
                    num_embeddings=config.num_items,
                    feature_names=["item", "candidate"],
                    init_fn=_leave,
                ),
                EmbeddingConfig(
                    name="action",
                    embedding_dim=dim,
                    num_embeddings=config.num_actions,
                    feature_names=["action"],
                    init_fn=_leave,
                ),
            ]
        )
        self.encoder = AppendStableEncoder(config.max_positions, config.num_time_buckets, dim, config.time_bucket_fn)
        self.layers = nn.ModuleList(
            HSTULayer(dim, config.num_heads, config.qk_dim, config.v_dim) for _ in range(config.num_layers)
        )
        # float32 whatever the dtype: bfloat16 scores would tie.
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, 1))
        _randomize(self, seed)
        dtype = config.cache_config().torch_dtype
        self.layers.to(dtype)
        self.encoder.to(dtype)
        self.to(cache.device)
        tokens = 2 * config.max_positions if workbench_tokens is None else workbench_tokens
        self.workbench = Workbench(config, tokens, cache.device)

    @property
    def cache(self) -> KVCache:
        """The cache in use."""
        return self._cache

    @cache.setter
    def cache(self, cache: KVCache) -> None:
        mine, theirs = self.config.cache_config(), cache.config
        for name in (*_GEOMETRY, "scale"):
            if getattr(mine, name) != getattr(theirs, name):
                raise ConfigError(
                    f"the cache has {name}={getattr(theirs, name)!r}, the model {getattr(mine, name)!r}; "
                    "build it with model.config.cache_config(...)"
                )
        self._cache = cache

    @torch.no_grad()
    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Scores of all candidates.

        Args:
            features: int64, stride B, keys "user", "item", "action", "time", "candidate", "now" as
                `build_features` makes them. Best on the host: cached tokens are stripped there and only the
                rest moves to the device.

        Returns:
            float32 `[sum of candidates]`, row after row, on the model's device.

        Raises:
            InputError: the features are incomplete or disagree with each other; the cache is unchanged.
            CacheError: the model is in training mode and the cache would store.
        """
        if self.training and not isinstance(self.cache, NoCache):
            raise CacheError(
                "the model is in training mode, where keys and values are not reusable; "
                "call model.eval(), or set model.cache = NoCache(...)"
            )
        try:
            return self._score(features, self.cache)
        except OnloadError:
            return self._score(features, NoCache(self.cache.config, self.cache.device))

    def _score(self, features: KeyedJaggedTensor, cache: KVCache) -> torch.Tensor:
        """The paper's Algorithm 1; numbers are its steps (6 and 7 are part of `attend`)."""
        request = read_request(features)
        # 1, 2: fetch cached lengths, prepare metadata, start the onload
        with cache.batch(
            request.users,
            request.history_lengths,
            num_candidates=request.candidates,
            token_hashes=self._token_hashes(features, cache),
            version=self.version,
        ) as batch:
            # 3: strip cached tokens
            stripped, boundary = batch.strip(features, HISTORY_KEYS)
            # 4, 5: embed, transform the layout
            with step(EMBED):
                stripped = stripped.to(self._device, non_blocking=True)
                embedded = self.embeddings(stripped)
            with step(LAYOUT):
                x, candidates = self._lay_out(embedded, stripped, boundary, batch)
            # 8: the layers
            x = self._run_layers(x, batch)
        # 9 was the end of the batch; 10: scores
        with step(POSTPROCESS):
            return self.head(x.index_select(0, candidates).float()).squeeze(-1)

    @property
    def _device(self) -> torch.device:
        return self.embeddings.embeddings["item"].weight.device

    @step.of(LAYERS)
    def _run_layers(self, x: torch.Tensor, batch: CacheBatch) -> torch.Tensor:
        """`x` `[T, D]` is overwritten."""
        # The cache has the layers' dtype, whatever else the caller's autocast is for.
        with torch.autocast(x.device.type, enabled=False):
            if self.graphs is not None and (done := self.graphs.run(self.layers, x, batch)) is not None:
                return done
            return self._run_eagerly(x, batch)

    def _run_eagerly(self, x: torch.Tensor, batch: CacheBatch) -> torch.Tensor:
        with self.workbench.lend(x) as projections:
            for index, layer in enumerate(cast(Iterable[HSTULayer], self.layers)):
                with step(PROJECT):
                    u, q, k, v = layer.project(x, out=projections)
                attended = batch.attend(index, q, k, v)
                with step(OUTPUT):
                    x = layer.output(attended, u, x, out=x)
        return x

    def _lay_out(
        self,
        embedded: dict[str, JaggedTensor],
        features: KeyedJaggedTensor,
        boundary: dict[str, torch.Tensor],
        batch: CacheBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings, which it uses up, to dense tokens, each row its delta, then its candidates; and where these are.

        It lets go early of what it has read: here a batch without any hit takes most memory.
        """
        device = self._device
        delta, candidates = batch.delta_lengths, batch.num_candidates
        order = jagged.concat_order(delta, candidates, device)
        history = embedded.pop("item").values().add_(embedded.pop("action").values())
        x = jagged.concat(history, embedded.pop("candidate").values(), order)
        del history
        x = x.to(self.encoder.dtype)
        where = places(
            features["time"].values(),
            boundary["time"].to(device, non_blocking=True),
            features["now"].values(),
            batch.cached_lengths,
            delta,
            candidates,
            order,
        )
        return self.encoder(x, where.positions, where.gaps), batch.candidate_rows.to(device, non_blocking=True)

    @step.of(HASH)
    def _token_hashes(self, features: KeyedJaggedTensor, cache: KVCache) -> torch.Tensor | None:
        if not self.content_check or isinstance(cache, NoCache):
            return None
        return jagged.token_hashes(features, HISTORY_KEYS)


def _leave(_: torch.Tensor) -> None:
    """Leaves a table as allocated; `_randomize` fills it."""


def _randomize(model: HSTURanker, seed: int) -> None:
    """Weights of the size that training leaves: items, positions and times of like weight, no zero biases."""
    generator = torch.Generator().manual_seed(seed)
    dim = model.config.embedding_dim
    for name, weight in model.named_parameters():
        if "norm" in name or name.startswith("head.0"):
            mean, std = (1.0 if name.endswith("weight") else 0.0), 0.1
        elif weight.dim() == 1:
            mean, std = 0.0, 0.1
        elif name.startswith("encoder"):
            mean, std = 0.0, 0.5
        elif name.startswith("embeddings"):
            # The encoder multiplies by sqrt(dim).
            mean, std = 0.0, dim**-0.5
        elif name.startswith("head"):
            mean, std = 0.0, weight.shape[1] ** -0.5
        else:
            mean, std = 0.0, weight.shape[0] ** -0.5
        with torch.no_grad():
            weight.normal_(mean, std, generator=generator)
