"""Causal softmax attention over a batch's pages and new rows, in plain torch: correct on any device, not fast."""

from __future__ import annotations

from functools import cached_property

import torch

from mtserve_plugin import jagged
from mtserve_plugin.batch import CacheBatch


class SoftmaxAttention:
    """Softmax attention for one batch, for models whose attention the paged HSTU operator does not compute.

    Visible are the same keys as in `CacheBatch.attend`: a history token sees its history up to itself, a candidate
    sees all of its history and itself. Pages are gathered and rows padded to the longest of the batch, so that memory
    is `B * heads * new rows * longest row`. Products and sums are float64 and rounded once: a row then gets the same
    output whatever stands beside it and whichever of its keys come from pages.

    Args:
        batch: open; each layer is attended exactly once, as with `attend`.
        scale: factor on q·k.
        causal: `False` lets every token of a row see all others. A prefix then loses its keys and values with every
            append; it is here so that the audit can show it.
    """

    def __init__(self, batch: CacheBatch, scale: float, *, causal: bool = True) -> None:
        self._batch = batch
        self._scale = scale
        self._causal = causal

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Waits for the layer, attends, appends the new rows.

        Args:
            layer: 0 to `num_layers - 1`.
            q: `[num_rows, heads, qk_dim]`.
            k: the same.
            v: `[num_rows, heads, v_dim]`.

        Returns:
            `[num_rows, heads, v_dim]` in the dtype of `q`.

        Raises:
            OnloadError: this layer's cached keys and values did not arrive.
        """
        paged_k, paged_v = self._gather(layer, k, v)
        self._batch.append(layer, k, v)
        if q.shape[0] == 0:
            return torch.empty_like(v)
        device = q.device
        queries, keys, visible = (index.to(device, non_blocking=True) for index in self._plan)
        every_k = torch.cat((paged_k, k)).double()[keys]
        every_v = torch.cat((paged_v, v)).double()[keys]
        logits = torch.einsum("bqhd,bmhd->bhqm", q.double()[queries] * self._scale, every_k)
        weights = logits.masked_fill_(~visible[:, None], float("-inf")).softmax(-1)
        out = torch.einsum("bhqm,bmhd->bqhd", weights, every_v).to(q.dtype)
        return out.flatten(0, 1).index_select(0, self._back.to(device, non_blocking=True))

    def _gather(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cached keys and values of the layer, row after row: `[sum of paged, heads, dim]` each."""
        table = self._batch.wait(layer)
        if table.indices.numel() == 0:
            return k[:0], v[:0]
        config = self._batch._config
        pages = self._batch.table[layer].index_select(0, table.indices.to(k.device))
        block = config.page_size * config.k_row
        # Rows of a page beyond the cached length hold anything; none of them is selected.
        tokens = self._paged_tokens(table.indptr).to(k.device)
        cached_k = pages[:, :block].reshape(-1, *k.shape[1:]).index_select(0, tokens)
        cached_v = pages[:, block:].reshape(-1, *v.shape[1:]).index_select(0, tokens)
        return cached_k, cached_v

    def _paged_tokens(self, indptr: torch.Tensor) -> torch.Tensor:
        """Where the paged tokens are among the token rows of the gathered pages: `[sum of paged]` int64."""
        paged = self._batch.layout.paged
        starts = indptr[:-1].to(torch.int64) * self._batch._config.page_size
        return torch.arange(int(paged.sum())) + jagged.spread(starts - jagged.offsets(paged)[:-1], paged)

    @cached_property
    def _plan(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`[B, Q]` dense row of each query, `[B, M]` row of each key in cat(paged, dense), `[B, Q, M]` what is seen.

        A padded query repeats the first row of all and sees something, which keeps it finite; nobody reads it.
        """
        layout = self._batch.layout
        dense, total = layout.offsets.diff(), int(layout.paged.sum())
        place = torch.arange(int(dense.max()))
        queries = (layout.offsets[:-1, None] + place).masked_fill(place >= dense[:, None], 0)

        position = torch.arange(int((layout.paged + dense).max()))
        from_pages = jagged.offsets(layout.paged)[:-1, None] + position
        from_dense = total + layout.offsets[:-1, None] + position - layout.paged[:, None]
        keys = torch.where(position < layout.paged[:, None], from_pages, from_dense)
        inside = position < (layout.paged + dense)[:, None]
        # Padding repeats a key of its own row: one user's infinities must not reach another through 0 * inf.
        keys = torch.where(inside, keys, keys[:, :1].masked_fill(~inside[:, :1], 0))

        own = (layout.paged[:, None] + place)[:, :, None]
        history = (layout.paged + dense - layout.candidates)[:, None, None]
        if self._causal:
            visible = (position == own) | ((position < history) & (position < own))
        else:
            visible = inside[:, None, :].expand(-1, place.numel(), -1).clone()
        padding = place >= dense[:, None]
        visible = torch.where(padding[:, :, None], position == 0, visible & inside[:, None, :])
        return queries, keys, visible

    @cached_property
    def _back(self) -> torch.Tensor:
        """`[num_rows]` int64: where the dense rows are among the padded queries."""
        dense = self._batch.offsets.diff()
        longest = int(dense.max())
        shift = torch.arange(dense.numel()) * longest - self._batch.offsets[:-1]
        return torch.arange(self._batch.num_rows) + jagged.spread(shift, dense)
