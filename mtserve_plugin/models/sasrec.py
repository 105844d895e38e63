"""SASRec on torchrec: learned positions, causal softmax attention, the same pages as HSTU."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn

from mtserve_plugin import dependencies, jagged
from mtserve_plugin.batch import CacheBatch
from mtserve_plugin.cache import KVCache, NoCache
from mtserve_plugin.config import CacheConfig
from mtserve_plugin.errors import CacheError, ConfigError, OnloadError
from mtserve_plugin.models.features import build_features, read_request
from mtserve_plugin.models.softmax import SoftmaxAttention

dependencies.require_torchrec()

from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor  # noqa: E402

__all__ = ["SASRec", "SASRecConfig", "build_features"]

_GEOMETRY = ("num_layers", "num_heads", "qk_dim", "v_dim", "dtype", "max_attn_len")


@dataclass(frozen=True)
class SASRecConfig:
    """Size of a `SASRec`, frozen.

    Args:
        num_items: rows of the item table.
        embedding_dim: D; a multiple of `num_heads`.
        num_layers: attention layers.
        num_heads: attention heads per layer.
        max_positions: rows of the position table; later tokens share the last row.

    Raises:
        ConfigError: an option is out of range.
    """

    num_items: int
    embedding_dim: int
    num_layers: int
    num_heads: int
    max_positions: int

    def __post_init__(self) -> None:
        for name in ("num_items", "embedding_dim", "num_layers", "num_heads", "max_positions"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.embedding_dim % self.num_heads:
            raise ConfigError(f"embedding_dim={self.embedding_dim} is not a multiple of num_heads={self.num_heads}")
        self.cache_config()

    @classmethod
    def small(cls, **changes: Any) -> SASRecConfig:
        """A model for tests: 3 layers, 2 heads of 16."""
        small = cls(num_items=1000, embedding_dim=32, num_layers=3, num_heads=2, max_positions=512)
        return replace(small, **changes)

    def cache_config(self, **sizes: Any) -> CacheConfig:
        """A `CacheConfig` with this model's geometry; `sizes` are its other options, e.g. `num_pages`.

        Softmax has no divisor of its own: `attn_norm_len` is 1 and without effect.
        """
        head = self.embedding_dim // self.num_heads
        geometry: dict[str, Any] = {"num_layers": self.num_layers, "num_heads": self.num_heads, "dtype": "float32"}
        return CacheConfig(**geometry, qk_dim=head, v_dim=head, attn_norm_len=1, **sizes)


class SASRecLayer(nn.Module):
    """Norm, attention, residual; norm, two linear layers, residual.

    Args:
        embedding_dim: D.
        num_heads: attention heads H, of D / H each.
    """

    def __init__(self, embedding_dim: int, num_heads: int) -> None:
        super().__init__()
        self._heads = (num_heads, embedding_dim // num_heads)
        self.attention_norm = nn.LayerNorm(embedding_dim)
        self.qkv = nn.Linear(embedding_dim, 3 * embedding_dim)
        self.attention_out = nn.Linear(embedding_dim, embedding_dim)
        self.ffn_norm = nn.LayerNorm(embedding_dim)
        self.ffn_in = nn.Linear(embedding_dim, embedding_dim)
        self.ffn_out = nn.Linear(embedding_dim, embedding_dim)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`[T, D]` to q, k, v `[T, H, D / H]`."""
        q, k, v = self.qkv(self.attention_norm(x)).chunk(3, dim=1)
        return q.unflatten(1, self._heads), k.unflatten(1, self._heads), v.unflatten(1, self._heads)

    def output(self, attention: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`attention` `[T, H, D / H]` and the layer's input `[T, D]`, to `[T, D]`."""
        x = x + self.attention_out(attention.flatten(1))
        return x + self.ffn_out(F.relu(self.ffn_in(self.ffn_norm(x))))


class _Split(NamedTuple):
    """A history cut before its last event.

    Attributes:
        before: key "item", all events but the last.
        lengths: `[B]` int64 on the host, of `before`.
        last: `[rows with a history]` int64, the last events.
        has_last: `[B]` int64 on the host, 1 for a row with a history.
    """

    before: KeyedJaggedTensor
    lengths: torch.Tensor
    last: torch.Tensor
    has_last: torch.Tensor


class SASRec(nn.Module):
    """Scores items by the state of the user's last event (Kang and McAuley, 2018), through a cache of keys and values.

    The state is computed from the last event's query, so that this event cannot be stripped even when nothing is new.
    It is what the cache calls a candidate: it sees the whole history before it and itself, and is not stored. On the
    next visit it is part of the delta. A history of n events therefore has n - 1 cached tokens at most.

    Positions count from the start of the history. Implementations that pad histories on the left to a fixed length
    count from the end, and no prefix of theirs can be reused.

    For inference, like `HSTURanker`: no gradient is recorded, training mode is refused with a cache that stores, and a
    batch whose cached keys and values fail to arrive is run again uncached.

    Args:
        config: the sizes.
        cache: its geometry has to be `config.cache_config()`; may be set to another one between two forwards.
        seed: weights are random, of trained size, and the same for the same seed.
        content_check: give the cache a hash of every history token.

    Attributes:
        version: names the weights; keys and values of another version are never used.

    Example:
        >>> config = SASRecConfig.small()
        >>> model = SASRec(config, NoCache(config.cache_config()), seed=0).eval()
        >>> features = build_features(
        ...     user=[7], item=[3, 4], action=[0, 1], time=[100, 160], history_lengths=[2],
        ...     candidate=[5, 6, 8], num_candidates=3, now=[200])
        >>> model(features).shape
        torch.Size([3])
    """

    causal = True

    def __init__(self, config: SASRecConfig, cache: KVCache, *, seed: int = 0, content_check: bool = True) -> None:
        super().__init__()
        self.config = config
        self.cache = cache
        self.content_check = content_check
        self.version = ""
        dim = config.embedding_dim
        table = EmbeddingConfig(
            name="item", embedding_dim=dim, num_embeddings=config.num_items, feature_names=["item", "candidate"]
        )
        self.embeddings = EmbeddingCollection(tables=[table])
        self.positions = nn.Parameter(torch.empty(config.max_positions, dim))
        self.layers = nn.ModuleList(SASRecLayer(dim, config.num_heads) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(dim)
        _randomize(self, seed)
        self.to(cache.device)

    @property
    def cache(self) -> KVCache:
        """The cache in use."""
        return self._cache

    @cache.setter
    def cache(self, cache: KVCache) -> None:
        mine = self.config.cache_config()
        for name in _GEOMETRY:
            if getattr(mine, name) != getattr(cache.config, name):
                raise ConfigError(
                    f"the cache has {name}={getattr(cache.config, name)!r}, the model {getattr(mine, name)!r}; "
                    "build it with model.config.cache_config(...)"
                )
        self._cache = cache

    @torch.no_grad()
    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Scores of all candidates.

        Args:
            features: as `HSTURanker` takes them; "action", "time" and "now" are not looked at.

        Returns:
            float32 `[sum of candidates]`, row after row, on the model's device; 0 for rows without a history.

        Raises:
            InputError: the features are incomplete or disagree with each other; the cache is unchanged.
            CacheError: the model is in training mode and the cache would store.
        """
        if self.training and not isinstance(self.cache, NoCache):
            raise CacheError(
                "the model is in training mode, where weights change under what is cached; "
                "call model.eval(), or set model.cache = NoCache(...)"
            )
        try:
            return self._score(features, self.cache)
        except OnloadError:
            return self._score(features, NoCache(self.cache.config, self.cache.device))

    def place(self, batch: CacheBatch) -> torch.Tensor:
        """Positions of the dense rows, `[num_rows]` int64 on the host, from the start of the history."""
        own = batch.offsets.diff()
        return torch.arange(batch.num_rows) + jagged.spread(batch.cached_lengths - batch.offsets[:-1], own)

    def _score(self, features: KeyedJaggedTensor, cache: KVCache) -> torch.Tensor:
        request = read_request(features)
        split = _split(features, request.history_lengths)
        hashed = self.content_check and not isinstance(cache, NoCache)
        with cache.batch(
            request.users,
            split.lengths,
            num_candidates=split.has_last,
            token_hashes=jagged.token_hashes(split.before, ["item"]) if hashed else None,
            version=self.version,
        ) as batch:
            stripped, _ = batch.strip(split.before, ["item"])
            order = jagged.concat_order(batch.delta_lengths, split.has_last)
            items = jagged.concat(stripped["item"].values(), split.last, order)
            embedded = self._embed(items, features["candidate"].values())
            x = embedded[: items.numel()] * math.sqrt(self.config.embedding_dim)
            where = self.place(batch).clamp_(max=self.config.max_positions - 1)
            x = x + self.positions.index_select(0, where.to(x.device, non_blocking=True))
            attention = SoftmaxAttention(batch, batch._config.scale, causal=self.causal)
            for index, layer in enumerate(cast(Iterable[SASRecLayer], self.layers)):
                q, k, v = layer.project(x)
                x = layer.output(attention.attend(index, q, k, v), x)
        state = x.new_zeros((request.users.numel(), x.shape[1]))
        rows = split.has_last.nonzero().view(-1)
        ends = batch.offsets[1:].index_select(0, rows) - 1
        state[rows.to(x.device)] = self.norm(x.index_select(0, ends.to(x.device)))
        return (jagged.spread(state, request.candidates) * embedded[items.numel() :]).sum(-1)

    def _embed(self, items: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """One lookup: `[history rows + candidates, D]`."""
        looked_up = KeyedJaggedTensor(
            keys=["item", "candidate"],
            values=torch.cat((items, candidates)),
            lengths=torch.tensor([items.numel(), candidates.numel()]),
            stride=1,
        )
        embedded = self.embeddings(looked_up.to(self.positions.device, non_blocking=True))
        return torch.cat((embedded["item"].values(), embedded["candidate"].values()))


def _split(features: KeyedJaggedTensor, lengths: torch.Tensor) -> _Split:
    items, has_last = features["item"].values(), (lengths > 0).to(torch.int64)
    before = lengths - has_last
    segments = torch.stack((before, has_last), -1).view(-1).to(items.device)
    even = torch.arange(0, segments.numel(), 2, dtype=torch.int32, device=items.device)
    front = jagged.select_segments(items, segments, even, int(before.sum()))[0]
    last = jagged.select_segments(items, segments, even + 1, int(has_last.sum()))[0]
    jagged_front = KeyedJaggedTensor(keys=["item"], values=front, lengths=before, stride=lengths.numel())
    return _Split(jagged_front, before, last, has_last)


def _randomize(model: SASRec, seed: int) -> None:
    """Weights of the size that training leaves: items and positions of like weight, no zero biases."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "norm" in name:
            mean, std = (1.0 if name.endswith("weight") else 0.0), 0.1
        elif weight.dim() == 1:
            mean, std = 0.0, 0.1
        elif name == "positions":
            mean, std = 0.0, 0.5
        else:
            # Also the item table, which is multiplied by sqrt(D).
            mean, std = 0.0, weight.shape[1] ** -0.5
        with torch.no_grad():
            weight.normal_(mean, std, generator=generator)
