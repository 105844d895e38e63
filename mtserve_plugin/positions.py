"""Encoders of position and time under which a prefix of a history keeps its keys and values."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn

from mtserve_plugin import jagged
from mtserve_plugin.errors import ConfigError, InputError

# Upstream's `time_bucket_increments`: gaps are measured in minutes before the bucket function is applied.
_BUCKET_SECONDS = 60
_INT64_MAX = 2**63 - 1


class AppendStableEncoder(nn.Module):
    """Adds learned embeddings of position and time that do not change when the history grows.

    Drop-in for the tables of upstream's `HSTUPositionalEncoder`: the same two parameters with the same
    shapes, the same factor `sqrt(embedding_dim)` on the input, and the same time buckets (square root or
    logarithm of minutes). What differs, and why a model has to be trained with it:

    - a token's position counts from the *start* of the history (upstream: from its end), clamped to the
      table; candidates stand at position = length of the history;
    - a token's time is the gap to the *previous event* (upstream: to the query); for candidates, from the
      last event to now.

    Upstream's values of an old token change with every request, and with them its keys and values in every
    layer. Buckets are found by comparing integers, so that one gap has one bucket on every device and at
    every place of a tensor (upstream's bucket edges depend on the rounding of a float32 logarithm or root);
    the last bucket takes all longer gaps (upstream's PyTorch op clamps by the table's width instead of its
    length).

    Args:
        num_position_buckets: rows of the position table; positions beyond share the last row.
        num_time_buckets: the time table has one row more, for gaps beyond the last bucket.
        embedding_dim: D.
        time_bucket_fn: "sqrt" or "log".

    Example:
        >>> encoder = AppendStableEncoder(num_position_buckets=8, num_time_buckets=4, embedding_dim=16)
        >>> encoder(torch.zeros(3, 16), torch.tensor([0, 1, 2]), torch.tensor([0, 30, 90])).shape
        torch.Size([3, 16])
    """

    _edges: torch.Tensor

    def __init__(
        self,
        num_position_buckets: int,
        num_time_buckets: int,
        embedding_dim: int,
        time_bucket_fn: str = "sqrt",
    ) -> None:
        super().__init__()
        for name, value in (
            ("num_position_buckets", num_position_buckets),
            ("num_time_buckets", num_time_buckets),
            ("embedding_dim", embedding_dim),
        ):
            if value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
        self._position_embeddings_weight = _table(num_position_buckets, embedding_dim, num_position_buckets)
        self._timestamp_embeddings_weight = _table(num_time_buckets + 1, embedding_dim, num_time_buckets)
        # Not persistent, so that state_dict has upstream's keys and no others.
        self.register_buffer("_edges", time_bucket_edges(num_time_buckets, time_bucket_fn), persistent=False)

    @classmethod
    def sharing(
        cls, position_weight: nn.Parameter, timestamp_weight: nn.Parameter, time_bucket_fn: str = "sqrt"
    ) -> AppendStableEncoder:
        """An encoder on existing tables, `[positions, D]` and `[num_time_buckets + 1, D]`, not copied."""
        encoder = cls(1, timestamp_weight.shape[0] - 1, 1, time_bucket_fn)
        encoder._position_embeddings_weight = position_weight
        encoder._timestamp_embeddings_weight = timestamp_weight
        encoder._edges = encoder._edges.to(timestamp_weight.device)
        return encoder

    def forward(self, x: torch.Tensor, positions: torch.Tensor, gaps: torch.Tensor) -> torch.Tensor:
        """Args:
            x: `[T, D]` token embeddings.
            positions: `[T]` int64, tokens from the start of the history; a model with C context rows gives
                these the positions 0 to C - 1 and adds C to the others, as upstream does.
            gaps: `[T]` int64, seconds since the previous event; negative ones count as 0.

        Returns:
            `[T, D]` in the dtype of `x`.

        Raises:
            InputError: `positions` or `gaps` is not int64 `[T]`.
        """
        for name, index in (("positions", positions), ("gaps", gaps)):
            if index.dtype != torch.int64 or index.shape != x.shape[:1]:
                raise InputError(f"{name} is {index.dtype} {tuple(index.shape)}; expected int64 [{x.shape[0]}]")
        return add_embeddings(
            x,
            positions,
            gaps,
            self._position_embeddings_weight,
            self._timestamp_embeddings_weight,
            self._edges,
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of the tables."""
        return self._position_embeddings_weight.dtype


class AppendStablePositionalEncoder(AppendStableEncoder):
    """`AppendStableEncoder` with the constructor and the forward of upstream's `HSTUPositionalEncoder`.

    For training a model that is to be served with a cache: give it to `HSTUTransducer` in place of upstream's
    encoder. `state_dict` keys and shapes are the same. Context rows stand at positions 0 to
    `contextual_seq_len` - 1 as they do upstream, the history behind them; their time is the last bucket,
    where upstream puts them too (their timestamp is 0).

    Args:
        num_position_buckets: rows of the position table; positions beyond share the last row.
        num_time_buckets: the time table has one row more, for gaps beyond the last bucket.
        embedding_dim: D.
        contextual_seq_len: context rows in front of every history.
        is_inference: as upstream's modules have it; without effect.
        time_bucket_fn: "sqrt" or "log".
    """

    def __init__(
        self,
        num_position_buckets: int,
        num_time_buckets: int,
        embedding_dim: int,
        contextual_seq_len: int,
        is_inference: bool = True,
        time_bucket_fn: str = "sqrt",
    ) -> None:
        super().__init__(num_position_buckets, num_time_buckets, embedding_dim, time_bucket_fn)
        self._embedding_dim = embedding_dim
        self._contextual_seq_len = contextual_seq_len
        self._is_inference = is_inference

    def forward(  # type: ignore[override]
        self,
        max_seq_len: int,
        seq_lengths: torch.Tensor,
        seq_offsets: torch.Tensor,
        seq_timestamps: torch.Tensor,
        seq_embeddings: torch.Tensor,
        num_targets: torch.Tensor | None,
    ) -> torch.Tensor:
        """Args:
            max_seq_len: not used.
            seq_lengths: `[B]`, rows with their context rows, history and targets.
            seq_offsets: not used; follows from `seq_lengths`.
            seq_timestamps: `[T]`, seconds.
            seq_embeddings: `[T, D]`.
            num_targets: `[B]`; `None` for rows without targets.

        Returns:
            `[T, D]` in the dtype of `seq_embeddings`.
        """
        targets = torch.zeros_like(seq_lengths) if num_targets is None else num_targets
        where = sequence_places(
            seq_timestamps,
            seq_timestamps.new_zeros(seq_lengths.shape),
            torch.zeros_like(seq_lengths),
            seq_lengths,
            targets,
            self._contextual_seq_len,
        )
        return super().forward(seq_embeddings, where.positions, where.gaps)


def add_embeddings(
    x: torch.Tensor,
    positions: torch.Tensor,
    gaps: torch.Tensor,
    position_table: torch.Tensor,
    time_table: torch.Tensor,
    edges: torch.Tensor,
) -> torch.Tensor:
    """`x * sqrt(D)` plus the rows of both tables, which are added first and rounded to the dtype of `x` once.

    Args:
        x: `[T, D]`.
        positions: `[T]` int64.
        gaps: `[T]` int64, seconds.
        position_table: `[P, D]`; positions beyond share its last row.
        time_table: `[N + 1, D]`.
        edges: `time_bucket_edges(N)` on the device of the gaps.
    """
    position = position_table.index_select(0, positions.clamp(0, position_table.shape[0] - 1))
    time = time_table.index_select(0, torch.bucketize(gaps, edges, right=True))
    return x * math.sqrt(position_table.shape[1]) + (time + position).to(x.dtype)


class Places(NamedTuple):
    """Where the dense tokens of a batch stand; int64 `[T]` each, on the device of the times."""

    positions: torch.Tensor
    gaps: torch.Tensor


def places(
    times: torch.Tensor,
    boundary: torch.Tensor,
    now: torch.Tensor,
    cached: torch.Tensor,
    delta: torch.Tensor,
    candidates: torch.Tensor,
    order: torch.Tensor,
) -> Places:
    """Positions and gaps of a stripped batch's tokens, for `AppendStableEncoder`.

    Args:
        times: `[sum of delta]` int64, seconds, the stripped time feature.
        boundary: `[B]` int64, time of the last stripped event per row.
        now: `[B]` int64, time of each request.
        cached: `[B]` int64 on the host, stripped tokens per row.
        delta: `[B]` int64 on the host, tokens left per row.
        candidates: `[B]` int64 on the host.
        order: `jagged.concat_order(delta, candidates)` on the device of the times.

    Returns:
        Places of all dense tokens, row after row, each row its delta, then its candidates. The gap of a
        history's first event, and of candidates without any history, is 0.
    """
    device = times.device
    starts = jagged.offsets(delta)[:-1]
    history = cached + delta

    # The event before each row's first one: stripped, or (at the start of a history) itself, which makes the
    # gap 0.
    filled = (delta > 0).nonzero().view(-1)
    first = starts[filled].to(device)
    previous = times.roll(1)
    own = (cached[filled] == 0).to(device)
    previous[first] = torch.where(own, times[first], boundary[filled.to(device)])

    # The last event of each row: in the delta, or stripped, or none, in which case now makes the gap 0.
    row = torch.arange(delta.numel())
    last = torch.where(delta > 0, starts + delta - 1, times.numel() + row).to(device)
    latest = torch.where((history > 0).to(device), torch.cat((times, boundary))[last], now)

    flat = torch.arange(times.numel(), device=device)
    positions = jagged.concat(
        flat + jagged.spread((cached - starts).to(device), delta),
        jagged.spread(history.to(device), candidates),
        order,
    )
    gaps = jagged.concat(times - previous, jagged.spread(now - latest, candidates), order)
    return Places(positions, gaps)


def sequence_places(
    timestamps: torch.Tensor,
    boundary: torch.Tensor,
    cached: torch.Tensor,
    lengths: torch.Tensor,
    candidates: torch.Tensor,
    context_rows: int,
) -> Places:
    """Positions and gaps of rows that hold context rows, history and candidates, as upstream's modules have
    it.

    Args:
        timestamps: `[T]`, seconds, of all tokens; those of context rows do not matter.
        boundary: `[B]`, time of the last stripped event per row.
        cached: `[B]` int64, history tokens that were stripped; on the same device as `lengths`, which is best
            the
            host: nothing is synchronised then.
        lengths: `[B]` int64, context rows, history that is left, and candidates.
        candidates: `[B]` int64.
        context_rows: the same for all rows.

    Returns:
        Places on the device of the timestamps. The gap of a history's first event, and of candidates without
        any history, is 0; that of a context row is the longest.
    """
    total = timestamps.numel()
    lengths, candidates = lengths.to(torch.int64), candidates.to(torch.int64)
    starts = jagged.offsets(lengths)[:-1] + context_rows
    row = torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths, output_size=total)
    token = torch.arange(total, device=lengths.device)
    place = token - starts[row]
    kept = (lengths - candidates - context_rows)[row]
    before = cached.to(torch.int64)[row]
    is_candidate = place >= kept

    # The event before: for candidates the last one of the history, at the front of a row the last stripped
    # one, and where there is none the token itself, which makes the gap 0.
    previous = torch.where(is_candidate, (starts[row] + kept - 1).clamp_(min=0), (token - 1).clamp_(min=0))
    front = torch.where(is_candidate, kept == 0, place == 0)
    previous = torch.where(front, torch.where(before > 0, total + row, token), previous)

    device = timestamps.device
    times = timestamps.to(torch.int64)
    gaps = times - torch.cat((times, boundary.to(times))).index_select(0, previous.to(device))
    positions = torch.where(place < 0, place, before + torch.minimum(place, kept)) + context_rows
    if context_rows:
        gaps = gaps.masked_fill((place < 0).to(device), _INT64_MAX)
    return Places(positions.to(device), gaps)


def time_bucket_edges(num_time_buckets: int, time_bucket_fn: str = "sqrt") -> torch.Tensor:
    """The least gap of each bucket but the first, in whole seconds: int64 `[num_time_buckets]`, ascending.

    Bucket k holds the gaps with `floor(f(gap / 60)) = k`, where f is the square root or the natural logarithm
    (upstream `pytorch_add_timestamp_positional_embeddings`); bucket 0 holds what is shorter, the last what is
    longer.

    Raises:
        ConfigError: `time_bucket_fn` is neither "sqrt" nor "log".
    """
    numbers = range(1, num_time_buckets + 1)
    if time_bucket_fn == "sqrt":
        edges = [_BUCKET_SECONDS * k * k for k in numbers]
    elif time_bucket_fn == "log":
        # e^40 minutes exceed int64 seconds; buckets beyond stay empty.
        edges = [math.ceil(_BUCKET_SECONDS * math.exp(k)) if k < 40 else _INT64_MAX for k in numbers]
    else:
        raise ConfigError(f"time_bucket_fn={time_bucket_fn!r} is unknown; use 'sqrt' or 'log'")
    return torch.tensor(edges, dtype=torch.int64)


def _table(rows: int, dim: int, buckets: int) -> nn.Parameter:
    bound = math.sqrt(1.0 / buckets)
    return nn.Parameter(torch.empty(rows, dim).uniform_(-bound, bound))
