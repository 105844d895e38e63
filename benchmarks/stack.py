"""A ranker's layers without torchrec, so that benchmarks and tests run where only torch is installed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from mtserve_plugin.cache import KVCache
from mtserve_plugin.config import CacheConfig
from mtserve_plugin.graphs import LayerGraphs
from mtserve_plugin.models.layer import HSTULayer

Ids = npt.NDArray[np.int64]


class Stack(nn.Module):
    """Embedding, HSTU layers, a head; tokens are item ids, positions add nothing. For inference.

    Args:
        config: geometry and dtype of the layers; their embedding dimension is heads * v_dim.
        num_items: rows of the table.
        device: where it lives.
        seed: of the weights.

    Attributes:
        graphs: runs the layers where it can; `None` at first.
    """

    def __init__(self, config: CacheConfig, num_items: int, device: torch.device | str, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        dim = config.num_heads * config.v_dim
        self.items = nn.Embedding(num_items, dim)
        self.layers = nn.ModuleList(
            HSTULayer(dim, config.num_heads, config.qk_dim, config.v_dim) for _ in range(config.num_layers)
        )
        self.head = nn.Linear(dim, 1)
        self.to(device=device, dtype=config.torch_dtype)
        self.head.float()
        self.graphs: LayerGraphs | None = None

    @torch.inference_mode()
    def forward(self, cache: KVCache, users: Sequence[int], histories: Sequence[Ids], candidates: Ids) -> torch.Tensor:
        """Scores `[B, n]` float32 on the device.

        Args:
            cache: any.
            users: `[B]` ids.
            histories: item ids per user, oldest first.
            candidates: `[B, n]` item ids.
        """
        count = candidates.shape[1]
        lengths = torch.tensor([len(history) for history in histories])
        with cache.batch(torch.tensor(list(users)), lengths, num_candidates=count) as batch:
            cached = batch.cached_lengths.tolist()
            rows = [part for row, at in enumerate(cached) for part in (histories[row][at:], candidates[row])]
            ids = torch.from_numpy(np.concatenate(rows)).to(self.items.weight.device, non_blocking=True)
            x = self.items(ids)
            recorded = self.graphs.run(self.layers, x, batch) if self.graphs is not None else None
            if recorded is not None:
                x = recorded
            for index, layer in enumerate(self.layers if recorded is None else ()):
                u, q, k, v = layer.project(x)  # type: ignore[operator]
                x = layer.output(batch.attend(index, q, k, v), u, x)  # type: ignore[operator]
            ends = batch.offsets[1:, None] - count + torch.arange(count)
            chosen = x.index_select(0, ends.flatten().to(x.device, non_blocking=True))
        return self.head(chosen.float()).view(len(cached), count)
