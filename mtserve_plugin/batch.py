"""CacheBatch: one batch in flight, from `begin` to `commit` or `abort` (paper, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from mtserve_plugin import jagged, ops
from mtserve_plugin.errors import CacheError, InputError, OnloadError
from mtserve_plugin.steps import APPEND, ATTEND, STRIP, WAIT, step

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from mtserve_plugin.cache import KVCache


_entered: ContextVar[CacheBatch | None] = ContextVar("mtserve_batch", default=None)


def entered_batch() -> CacheBatch | None:
    """The innermost batch whose `with` block this thread or task is in; how attached modules find theirs."""
    return _entered.get()


class PageTable(NamedTuple):
    """Where a batch's cached tokens lie in the device table.

    Attributes:
        indices: `[n]` int32, page ids of all rows, row after row.
        indptr: `[B + 1]` int32, row b owns `indices[indptr[b]:indptr[b + 1]]`.
        last_page_lens: `[B]` int32, tokens in a row's last page; 0 for a row without pages.
    """

    indices: torch.Tensor
    indptr: torch.Tensor
    last_page_lens: torch.Tensor


class BatchLayout(NamedTuple):
    """How a batch's tokens are spread over pages and dense rows; int64 `[B]` each, `offsets` `[B + 1]`, on the host.

    A row's dense tensors hold, in this order: its context rows (unless they are cached), its delta, its candidates.
    """

    cached: torch.Tensor
    context: torch.Tensor
    delta: torch.Tensor
    paged: torch.Tensor
    candidates: torch.Tensor
    offsets: torch.Tensor


class _Native(Protocol):
    """What a batch needs from the cache's native side; `NoCache` has none of it."""

    def wait(self, layer: int, in_pages: bool) -> bool: ...
    def stores(self) -> bool: ...
    def write_slots(self, address: int, page_size: int) -> None: ...
    def write_table(self, address: int, page_size: int, include_delta: bool) -> None: ...
    def table_size(self, page_size: int, include_delta: bool) -> int: ...


class CacheBatch:
    """One batch of requests between `begin` and `commit`.

    Use it as a context manager: it commits when the block ends well and aborts when the block raises. All tensors it
    hands out describe the batch as `begin` saw it and do not change.

    Attributes:
        history_lengths: `[B]` int64 on the host, history tokens of each row as asked for.
        table: the device table `[layers, pages, page_elements]`, or an empty tensor without a cache.
    """

    def __init__(
        self,
        cache: KVCache,
        history_lengths: torch.Tensor,
        layout: torch.Tensor,
        table: torch.Tensor,
        page_table: torch.Tensor,
        native: _Native | None,
    ) -> None:
        """Args: layout: `[6, B + 1]` int64, rows as in `BatchLayout`; page_table: int32, `indptr`, lens, `indices`."""
        self.history_lengths = history_lengths
        self.table = table
        self._cache = cache
        self._layout = layout
        self._page_table = page_table
        self._native = native
        self._appended = 0
        self._open = True
        self._outer: CacheBatch | None = None
        self._candidates_there: torch.Tensor | None = None
        self._config = cache.config

    # ---- what the model needs to know -------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        """Layers of the cache, and of the model: the last one may be run by `attend_candidates`."""
        return self._config.num_layers

    @property
    def batch_size(self) -> int:
        return self.history_lengths.numel()

    @cached_property
    def layout(self) -> BatchLayout:
        cached, context, delta, paged, candidates = self._layout[:5, :-1].unbind(0)
        return BatchLayout(cached, context, delta, paged, candidates, offsets=self._layout[5])

    @property
    def cached_lengths(self) -> torch.Tensor:
        """`[B]` int64 on the host: history tokens whose keys and values are cached (context rows not counted)."""
        return self.layout.cached

    @property
    def delta_lengths(self) -> torch.Tensor:
        """`[B]` int64 on the host: history tokens that have to be computed."""
        return self.layout.delta

    @property
    def num_candidates(self) -> torch.Tensor:
        """`[B]` int64 on the host."""
        return self.layout.candidates

    @property
    def context_lengths(self) -> torch.Tensor:
        """`[B]` int64 on the host: context rows that have to be computed: all of them, or 0 where they are cached."""
        return self.layout.context

    @property
    def offsets(self) -> torch.Tensor:
        """`[B + 1]` int64 on the host: row b's dense tokens are `offsets[b]:offsets[b + 1]`."""
        return self.layout.offsets

    @cached_property
    def num_rows(self) -> int:
        """Dense rows of the whole batch: the first dimension of q, k and v."""
        return int(self._layout[5, -1])

    @cached_property
    def candidate_rows(self) -> torch.Tensor:
        """`[sum of candidates]` int64 on the host: which dense rows are candidates, the last ones of each row."""
        counts, ends = self.layout.candidates.numpy(), self.layout.offsets[1:].numpy()
        shift = (ends - counts.cumsum()).repeat(counts)
        return torch.from_numpy(shift + np.arange(shift.size))

    def candidates_of(self, x: torch.Tensor) -> torch.Tensor:
        """The rows `candidate_rows` of `x` `[num_rows, ...]`; a view where the batch is one row."""
        if self.batch_size == 1:
            return x[self.num_rows - self.num_all_candidates :]
        return x.index_select(0, self._candidates_on(x.device))

    def at_candidates(self, x: torch.Tensor) -> torch.Tensor:
        """`[num_rows, ...]`, zero but for its candidates, which are the rows of `x`: undoes `candidates_of`."""
        out = x.new_zeros((self.num_rows, *x.shape[1:]))
        if self.batch_size == 1:
            out[self.num_rows - self.num_all_candidates :] = x
            return out
        return out.index_copy_(0, self._candidates_on(x.device), x)

    @cached_property
    def num_all_candidates(self) -> int:
        """Candidates of all rows together."""
        return int(self.layout.candidates.sum())

    # ---- step 2 -----------------------------------------------------------------------------------------------

    @step.of(STRIP)
    def strip(
        self, features: KeyedJaggedTensor, keys: Sequence[str]
    ) -> tuple[KeyedJaggedTensor, dict[str, torch.Tensor]]:
        """Removes the cached tokens from the front of the history features (Algorithm 1, step 3).

        Args:
            features: stride B; each of `keys` holds `history_lengths` values per row, oldest first.
            keys: the features that run along the history; the others pass through untouched.

        Returns:
            The stripped features, keys in the same order, and for each of `keys` the last stripped value per row,
            `[B]` in the feature's dtype, 0 where nothing was stripped (encoders that use time gaps need it).

        Raises:
            InputError: a key is absent, or its lengths disagree with the history lengths given to `begin`.
        """
        self._check_open()
        return jagged.strip(features, keys, self.history_lengths, self.cached_lengths)

    # ---- steps 5 to 7 -----------------------------------------------------------------------------------------

    @step.of(WAIT)
    def wait(self, layer: int, *, include_delta: bool = False) -> PageTable:
        """Waits until this layer's cached keys and values are on the device; the only way to a page table.

        Args:
            layer: 0 to `num_layers - 1`.
            include_delta: count the delta's pages too, for kernels that read the delta from pages after `append`.

        Raises:
            OnloadError: the copy of this layer failed; abort and run the batch again uncached.
            InputError: `include_delta` although a row has no room for its delta.
        """
        self._check_layer(layer)
        if self._native is not None and not self._native.wait(layer, include_delta):
            raise OnloadError(f"the cached keys and values of layer {layer} did not arrive; run this batch uncached")
        return self._table_with_delta if include_delta else self._table_of_cached

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes the delta's (and uncached context rows') keys and values to this layer's pages.

        Args:
            layer: 0 to `num_layers - 1`, each exactly once, after `wait(layer)`.
            k: `[num_rows, num_heads, qk_dim]` or `[num_rows, num_heads * qk_dim]`, candidates included (not stored).
            v: the same with `v_dim`.

        Raises:
            InputError: a shape or dtype disagrees with the configuration, or the layer was appended before.
        """
        self._check_layer(layer)
        self._append(layer, self._heads("k", k, self._config.qk_dim), self._heads("v", v, self._config.v_dim))

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """One layer's attention: waits, attends over pages and new rows, appends the new rows (steps 5 to 7).

        Args:
            layer: 0 to `num_layers - 1`.
            q: `[num_rows, num_heads, qk_dim]` or `[num_rows, num_heads * qk_dim]`, the model's dtype.
            k: shaped like `q`.
            v: `[num_rows, num_heads, v_dim]` or `[num_rows, num_heads * v_dim]`.

        Returns:
            The attention's output, shaped like `v`.

        Raises:
            InputError: a shape or dtype disagrees with the configuration.
            OnloadError: this layer's cached keys and values did not arrive.
        """
        config = self._config
        q_heads = self._heads("q", q, config.qk_dim)
        k_heads = self._heads("k", k, config.qk_dim)
        v_heads = self._heads("v", v, config.v_dim)
        table = self.wait(layer)
        out = self._attention(layer, q_heads, k_heads, v_heads, table, self.offsets, self.layout.paged)
        self._append(layer, k_heads, v_heads)
        return out if v.dim() == 3 else out.flatten(1)

    def attend_candidates(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """`attend` for a model's last layer, behind which nothing reads the history: candidates attend alone.

        Their rows come out as `attend` has them, bit by bit, and all new rows are appended. Where every row has pages
        for its delta, the delta's queries are not computed.

        Args:
            layer: as for `attend`; q, k, v: as for `attend`, `[num_rows, ...]`.

        Returns:
            `[sum of candidates, ...]`, the rows `candidate_rows` of what `attend` returns.

        Raises:
            InputError, OnloadError: as `attend`.
        """
        if self.num_all_candidates in (0, self.num_rows) or not self._delta_in_pages:
            return self.candidates_of(self.attend(layer, q, k, v))
        q_heads = self._heads("q", q, self._config.qk_dim)
        k_heads = self._heads("k", k, self._config.qk_dim)
        v_heads = self._heads("v", v, self._config.v_dim)
        table = self.wait(layer, include_delta=True)
        self._append(layer, k_heads, v_heads)
        q_heads, k_heads, v_heads = (self.candidates_of(x) for x in (q_heads, k_heads, v_heads))
        paged = self.layout.paged + self.layout.context + self.layout.delta
        out = self._attention(layer, q_heads, k_heads, v_heads, table, jagged.offsets(self.layout.candidates), paged)
        return out if v.dim() == 3 else out.flatten(1)

    # ---- step 8 -----------------------------------------------------------------------------------------------

    def __enter__(self) -> CacheBatch:
        self._outer = _entered.get()
        _entered.set(self)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        _entered.set(self._outer)  # not reset: the block may end in another context than it began in
        if not self._open:
            return
        if kind is None:
            self._cache.commit(self)
        else:
            self._cache.abort(self)

    @property
    def is_open(self) -> bool:
        """True until commit or abort."""
        return self._open

    @property
    def is_complete(self) -> bool:
        """True when every layer was appended, or no row stores anything."""
        return self._appended == (1 << self._config.num_layers) - 1 or not self._stores

    def _close(self) -> None:
        self._open = False

    # ---- inside -----------------------------------------------------------------------------------------------

    @cached_property
    def _stores(self) -> bool:
        return self._native is not None and self._native.stores()

    @cached_property
    def _slots(self) -> torch.Tensor:
        """`[num_rows]` int64: the page slot of each dense row, -1 for what is not stored."""
        slots = torch.empty(self.num_rows, dtype=torch.int64)
        assert self._native is not None
        self._native.write_slots(slots.data_ptr(), self._config.page_size)
        return slots

    def _candidates_on(self, device: torch.device) -> torch.Tensor:
        rows = self.candidate_rows
        if device.type == "cpu":
            return rows
        if self._candidates_there is None:
            self._candidates_there = rows.to(device, non_blocking=True)
        return self._candidates_there

    @cached_property
    def _delta_in_pages(self) -> bool:
        return self._native is not None and self._native.table_size(self._config.page_size, True) >= 0

    @cached_property
    def _table_of_cached(self) -> PageTable:
        return self._split(self._page_table)

    @cached_property
    def _table_with_delta(self) -> PageTable:
        if self._native is None:
            raise InputError("include_delta=True needs a cache with pages; this batch runs without one")
        size = self._native.table_size(self._config.page_size, True)
        if size < 0:
            raise InputError(
                "include_delta=True: a row of this batch has no pages for its delta; "
                "read its delta from the dense tensors instead"
            )
        packed = torch.empty(2 * self.batch_size + 1 + size, dtype=torch.int32)
        self._native.write_table(packed.data_ptr(), self._config.page_size, True)
        return self._split(packed)

    def _split(self, packed: torch.Tensor) -> PageTable:
        rows = self.batch_size
        return PageTable(packed[2 * rows + 1 :], packed[: rows + 1], packed[rows + 1 : 2 * rows + 1])

    @step.of(ATTEND)
    def _attention(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        table: PageTable,
        offsets: torch.Tensor,
        paged: torch.Tensor,
    ) -> torch.Tensor:
        config = self._config
        return ops.paged_hstu_attention(
            q,
            k,
            v,
            self.table,
            layer,
            offsets,
            self.layout.candidates,
            paged,
            table.indices,
            table.indptr,
            config.page_size,
            config.scale,
            float(config.attn_norm_len),
            config.max_attn_len,
        )

    @step.of(APPEND)
    def _append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        if self._appended >> layer & 1:
            raise InputError(f"layer={layer} was appended before; append each layer once per batch")
        if self._stores:
            ops.append_pages(self.table, layer, k, v, self._slots, self._config.page_size)
        self._appended |= 1 << layer

    def _heads(self, name: str, x: torch.Tensor, dim: int) -> torch.Tensor:
        heads = self._config.num_heads
        if x.dtype != self._config.torch_dtype:
            raise InputError(
                f"{name} is {x.dtype}, the cache was built for dtype={self._config.dtype!r}; "
                f"build it with CacheConfig(dtype={str(x.dtype).removeprefix('torch.')!r})"
            )
        if x.dim() == 2 and x.shape[1] == heads * dim:
            x = x.unflatten(1, (heads, dim))
        if x.shape != (self.num_rows, heads, dim):
            raise InputError(
                f"{name} has shape {tuple(x.shape)}; expected [{self.num_rows}, {heads}, {dim}] "
                f"(rows of this batch, num_heads, {'v_dim' if name == 'v' else 'qk_dim'})"
            )
        return x

    def _check_layer(self, layer: int) -> None:
        self._check_open()
        if not 0 <= layer < self._config.num_layers:
            raise InputError(f"layer={layer} is out of range; the cache has num_layers={self._config.num_layers}")

    def _check_open(self) -> None:
        if not self._open:
            raise CacheError("this batch was committed or aborted before; begin a new one")
        self._cache.check_process()

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheBatch:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a CacheBatch cannot be pickled: it belongs to a cache of this process")
