"""Jagged tensors: stripping cached tokens, offsets, and row-wise concatenation.

A jagged tensor here is a flat `values` tensor, row after row, with one length per row. Lengths stay on the
host, where the cache decides; values stay where they are. Everything reduces to one operation,
`select_segments`, which is a single fbgemm call where fbgemm has a kernel for the device and the dtype, and a
gather in plain torch elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from mtserve_plugin.errors import InputError

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

# What `permute_1D_sparse_data` is compiled for; anything else takes the torch path.
_FBGEMM_VALUES = (torch.int64, torch.int32, torch.float32, torch.bfloat16)
_FBGEMM_WEIGHTS = (torch.float32, torch.float64)

# Odd multiplier of the 64-bit golden ratio, as a signed integer: int64 arithmetic in torch wraps around.
_MIX = -7046029254386353131

# fbgemm's kernels seen so far, by operator and device. A "no" is not kept: fbgemm can still be imported
# later.
_kernels: set[tuple[str, str]] = set()


def offsets(lengths: torch.Tensor) -> torch.Tensor:
    """Where each row starts, from 0 to the sum: `[n + 1]` int64; `lengths` `[n]` of any integer dtype."""
    lengths = lengths.to(torch.int64)
    if _has_kernel("asynchronous_complete_cumsum", lengths.device.type):
        return torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)
    out = lengths.new_zeros(lengths.numel() + 1)
    torch.cumsum(lengths, 0, out=out[1:])
    return out


def select_segments(
    values: torch.Tensor,
    lengths: torch.Tensor,
    selected: torch.Tensor,
    total: int,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Concatenates some segments of `values`, in a given order.

    Args:
        values: `[n]` or `[n, ...]`, cut into consecutive segments.
        lengths: `[s]` int32 or int64, lengths of all segments, on the device of `values`; they sum to n.
        selected: `[r]` int32 on the same device, the segments wanted, in the order wanted.
        total: how many values they hold together; given, so that no device has to be asked.
        weights: `[n]` or `[n, ...]`, cut like `values`.

    Returns:
        The selected values `[total, ...]` and weights.
    """
    if _fits_fbgemm(values, weights):
        values, weights = torch.ops.fbgemm.permute_1D_sparse_data(selected, lengths, values, weights, total)[1:]
        return values, weights
    index = _segment_index(lengths, selected, total)
    return values.index_select(0, index), None if weights is None else weights.index_select(0, index)


def concat_order(
    left_lengths: torch.Tensor, right_lengths: torch.Tensor, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """The order that makes `torch.cat((left, right))` row-wise: row b is `left_b` followed by `right_b`.

    Args:
        left_lengths: `[B]` int64 on the host.
        right_lengths: `[B]` int64 on the host.
        device: where the values are.

    Returns:
        `[sum of both]` int64 on `device`, for `concat`; compute it once per batch.
    """
    rows = left_lengths.numel()
    lengths = torch.cat((left_lengths, right_lengths))
    total = int(lengths.sum())
    selected = torch.arange(2 * rows, dtype=torch.int32).view(2, rows).t().reshape(-1)
    flat = torch.arange(total, device=device)
    return select_segments(flat, lengths.to(device), selected.to(device), total)[0]


def concat(left: torch.Tensor, right: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Row-wise concatenation of jagged `[n, ...]` and `[m, ...]`, in an order from `concat_order`."""
    return torch.cat((left, right)).index_select(0, order)


def spread(rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Repeats row b of `rows` `[B, ...]` `lengths[b]` times; `lengths` `[B]` int64 on the host."""
    total = int(lengths.sum())
    return torch.repeat_interleave(rows, lengths.to(rows.device), dim=0, output_size=total)


def strip(
    features: KeyedJaggedTensor,
    keys: Sequence[str],
    history_lengths: torch.Tensor,
    cached_lengths: torch.Tensor,
) -> tuple[KeyedJaggedTensor, dict[str, torch.Tensor]]:
    """Removes the cached tokens from the front of the history features (paper, Algorithm 1, step 3).

    Args:
        features: stride B, lengths int32 or int64, on any device. Features on a device cost one
            synchronisation, for their lengths: strip first and move what is left.
        keys: the features that run along the history, each with `history_lengths` values per row, oldest
            first. The others pass through untouched.
        history_lengths: `[B]` int64 on the host.
        cached_lengths: `[B]` int64 on the host, 0 to `history_lengths`.

    Returns:
        The stripped features: the same keys in the same order, weights too where there are some. And the
        boundary: for each of `keys` the last stripped value per row, `[B]` in the feature's dtype and on its
            device, 0 where nothing
        was stripped.

    Raises:
        InputError: a key is absent, the stride is not B, a key's lengths disagree with `history_lengths`, the
            values disagree with the lengths, or `cached_lengths` is out of range; nothing was changed.
    """
    lengths, chosen = _checked(features, keys, history_lengths, cached_lengths)
    values, weights = features.values(), features.weights_or_none()
    cached = cached_lengths.numpy()
    if not cached.any():
        return features, {key: values.new_zeros((cached.size, *values.shape[1:])) for key in keys}

    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    # On small host arrays numpy's calls cost a fraction of torch's, and this is between the request and its layers.
    segments = np.zeros((*lengths.shape, 2), dtype=np.int64)
    segments[chosen, :, 0] = cached
    kept = np.subtract(lengths, segments[..., 0], out=segments[..., 1])
    odd = torch.arange(1, segments.size, 2, dtype=torch.int32)
    starts = (lengths.cumsum() - lengths.reshape(-1)).reshape(lengths.shape)
    last = torch.from_numpy(np.maximum(starts[chosen] + cached - 1, 0))

    device = values.device
    kept_values, kept_weights = select_segments(
        values, torch.from_numpy(segments).view(-1).to(device), odd.to(device), int(kept.sum()), weights
    )
    edge = values.index_select(0, last.view(-1).to(device)).view(*last.shape, *values.shape[1:])
    nothing = torch.from_numpy(cached == 0).to(device).view(-1, *[1] * (values.dim() - 1))
    edge = edge.masked_fill(nothing, 0)
    per_key = kept.sum(1).tolist()
    out = KeyedJaggedTensor(
        keys=features.keys(),
        values=kept_values,
        weights=kept_weights,
        lengths=torch.from_numpy(kept.reshape(-1)).to(device=device, dtype=features.lengths().dtype),
        stride=cached.size,
        length_per_key=per_key,
    )
    return out, dict(zip(keys, edge.unbind(0), strict=True))


def column(features: KeyedJaggedTensor, key: str) -> torch.Tensor:
    """The values of one feature, row after row: what `features[key].values()` gives, without a jagged tensor around it.

    Raises:
        InputError: there is no such feature.
    """
    keys = features.keys()
    if key not in keys:
        raise InputError(f"features has no key {key!r}; it has {', '.join(keys)}")
    place, ends = keys.index(key), features.offset_per_key()
    return features.values()[ends[place] : ends[place + 1]]


def token_hashes(features: KeyedJaggedTensor, keys: Sequence[str]) -> torch.Tensor:
    """One hash per history token over several features, for the cache's check of content.

    Args:
        features: as for `strip`; each of `keys` has the same lengths and holds integers.
        keys: the features whose values make up a token, in a fixed order: another order gives other hashes.

    Returns:
        int64 on the device of the features, one per token, row after row.

    Raises:
        InputError: a key is absent, holds no integers, or has another number of values than the first.
    """
    hashes: torch.Tensor | None = None
    for key in keys:
        values = column(features, key)
        if values.dtype not in (torch.int64, torch.int32):
            raise InputError(f"features[{key!r}] is {values.dtype}; token_hashes needs integers: leave the key out")
        if hashes is None:
            hashes = values.to(torch.int64) * _MIX
        else:
            if values.numel() != hashes.numel():
                raise InputError(
                    f"features[{key!r}] has {values.numel()} values, {keys[0]!r} has {hashes.numel()}; "
                    "the features of a token have one value each"
                )
            hashes = hashes.bitwise_xor_(values).mul_(_MIX)
        hashes = hashes.bitwise_xor_(hashes >> 29)
    if hashes is None:
        raise InputError("keys is empty; name at least one feature")
    return hashes


def _checked(
    features: KeyedJaggedTensor, keys: Sequence[str], history: torch.Tensor, cached: torch.Tensor
) -> tuple[np.ndarray, list[int]]:
    """All lengths `[F, B]` int64, and the places of `keys` among them."""
    rows = history.numel()
    if cached.shape != history.shape:
        raise InputError(f"cached_lengths has shape {tuple(cached.shape)}, history_lengths {tuple(history.shape)}")
    wanted, stripped = history.numpy(), cached.numpy()
    if (outside := (stripped < 0) | (stripped > wanted)).any():
        row = int(outside.argmax())
        raise InputError(f"cached_lengths[{row}]={stripped[row]} is not within 0 and {wanted[row]}")
    if isinstance(keys, str):
        raise InputError(f"keys={keys!r} is one string; pass a list of keys")
    place = {key: index for index, key in enumerate(features.keys())}
    for key in keys:
        if key not in place:
            raise InputError(f"features has no key {key!r}; it has {', '.join(features.keys())}")
    if features.variable_stride_per_key() or features.stride() != rows:
        stride = "variable" if features.variable_stride_per_key() else features.stride()
        raise InputError(f"features has stride {stride}; the batch has {rows} rows: key {next(iter(keys), '')!r}")
    lengths = features.lengths().to(device="cpu", dtype=torch.int64).view(len(place), rows).numpy()
    chosen = [place[key] for key in keys]
    if (wrong := lengths[chosen] != wanted).any():
        which, row = divmod(int(wrong.argmax()), rows)
        raise InputError(
            f"features[{keys[which]!r}] has {lengths[chosen[which], row]} values in row {row}, but "
            f"history_lengths[{row}] is {wanted[row]}; give begin the lengths of the history features"
        )
    if (total := int(lengths.sum())) != features.values().shape[0]:
        raise InputError(f"features holds {features.values().shape[0]} values; its lengths sum to {total}")
    return lengths, chosen


def _segment_index(lengths: torch.Tensor, selected: torch.Tensor, total: int) -> torch.Tensor:
    chosen = selected.to(torch.int64)
    sizes = lengths.to(torch.int64).index_select(0, chosen)
    starts = lengths.to(torch.int64).cumsum(0).index_select(0, chosen) - sizes
    shift = starts - (sizes.cumsum(0) - sizes)
    flat = torch.arange(total, device=lengths.device)
    return flat + torch.repeat_interleave(shift, sizes, output_size=total)


def _fits_fbgemm(values: torch.Tensor, weights: torch.Tensor | None) -> bool:
    return (
        values.dim() == 1
        and values.dtype in _FBGEMM_VALUES
        and (weights is None or (weights.dim() == 1 and weights.dtype in _FBGEMM_WEIGHTS))
        and _has_kernel("permute_1D_sparse_data", values.device.type)
    )


def _has_kernel(name: str, device_type: str) -> bool:
    if (name, device_type) in _kernels:
        return True
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device_type)
    try:
        found = key is not None and torch._C._dispatch_has_kernel_for_dispatch_key(f"fbgemm::{name}", key)
    except RuntimeError:
        # The operator itself is unknown: fbgemm is not imported.
        return False
    if found:
        _kernels.add((name, device_type))
    return found
