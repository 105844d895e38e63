"""A ranking request as one `KeyedJaggedTensor`: how to build it, how it is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from mtserve_plugin import dependencies
from mtserve_plugin.arguments import host_int64
from mtserve_plugin.errors import InputError

dependencies.require_torchrec()

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor  # noqa: E402

HISTORY_KEYS = ("item", "action", "time")
KEYS = ("user", *HISTORY_KEYS, "candidate", "now")

Array = torch.Tensor | np.ndarray | Sequence[int]


class Request(NamedTuple):
    """What the cache is told about a batch, on the host.

    Attributes:
        users: `[B]` int64.
        history_lengths: `[B]` int64.
        candidates: `[B]` int64, candidates per row.
    """

    users: torch.Tensor
    history_lengths: torch.Tensor
    candidates: torch.Tensor


def build_features(
    *,
    user: Array,
    item: Array,
    action: Array,
    time: Array,
    history_lengths: Array,
    candidate: Array,
    num_candidates: int | Array,
    now: Array,
) -> KeyedJaggedTensor:
    """Flat arrays, row after row, as the features that the models here take.

    Args:
        user: `[B]`, any 64-bit ids.
        item: `[sum of history_lengths]` item ids, oldest first.
        action: `[sum of history_lengths]` what the user did with each item.
        time: `[sum of history_lengths]` when, in seconds.
        history_lengths: `[B]`, 0 included.
        candidate: `[sum of num_candidates]` item ids.
        num_candidates: `[B]`, or one number for all rows.
        now: `[B]`, time of each request in seconds.

    Returns:
        int64 features on the host with stride B and the keys "user", "item", "action", "time", "candidate",
        "now".

    Raises:
        InputError: an array holds no integers, or its size disagrees with the lengths.

    Example:
        >>> features = build_features(
        ...     user=[7], item=[3, 4], action=[0, 1], time=[100, 160], history_lengths=[2],
        ...     candidate=[5, 6, 8], num_candidates=3, now=[200])
        >>> features["item"].values()
        tensor([3, 4])
    """
    users = host_int64("user", _tensor(user))
    rows = users.numel()
    histories = host_int64("history_lengths", _tensor(history_lengths), rows)
    if isinstance(num_candidates, int | np.integer):
        counts = torch.full((rows,), int(num_candidates))
    else:
        counts = host_int64("num_candidates", _tensor(num_candidates), rows)
    ones = torch.ones(rows, dtype=torch.int64)
    columns = {
        "user": (users, ones),
        "item": (item, histories),
        "action": (action, histories),
        "time": (time, histories),
        "candidate": (candidate, counts),
        "now": (now, ones),
    }
    values = []
    for name, (array, lengths) in columns.items():
        if rows and int(lengths.min()) < 0:
            raise InputError(f"lengths of {name!r} cannot be negative")
        column = host_int64(name, _tensor(array))
        if column.numel() != int(lengths.sum()):
            raise InputError(f"{name} has {column.numel()} values; its lengths sum to {int(lengths.sum())}")
        values.append(column)
    return KeyedJaggedTensor(
        keys=list(columns),
        values=torch.cat(values),
        lengths=torch.cat([lengths for _, lengths in columns.values()]),
        stride=rows,
        length_per_key=[column.numel() for column in values],
    )


def read_request(features: KeyedJaggedTensor) -> Request:
    """Checks the features and takes out what the cache is told, before the cache sees any of it.

    Features on a device cost one synchronisation.

    Raises:
        InputError: a key is absent, "user" or "now" has not one value per row, "action" or "time" has other
            lengths than "item", or the values are not int64 or not as many as the lengths say.
    """
    keys = features.keys()
    for key in KEYS:
        if key not in keys:
            raise InputError(f"features has no key {key!r}; it has {', '.join(keys)}")
    if features.variable_stride_per_key():
        raise InputError("features has a stride per key; give every key the same number of rows")
    if features.values().dtype != torch.int64:
        raise InputError(f"features holds {features.values().dtype}; expected int64 ids and seconds")
    rows = features.stride()
    lengths = features.lengths().to(device="cpu", dtype=torch.int64).view(len(keys), rows)
    sizes = lengths.sum(1).tolist()
    if (total := sum(sizes)) != features.values().numel():
        raise InputError(f"features holds {features.values().numel()} values; its lengths sum to {total}")
    by_key = dict(zip(keys, lengths.unbind(0), strict=True))
    one = torch.ones_like(by_key["item"])
    for key, expected in (("user", one), ("now", one), ("action", by_key["item"]), ("time", by_key["item"])):
        if not torch.equal(by_key[key], expected):
            row = int((by_key[key] != expected).int().argmax())
            what = "as many as 'item'" if key in HISTORY_KEYS else "1"
            raise InputError(f"features[{key!r}] has {int(by_key[key][row])} values in row {row}; expected {what}")
    # A slice: `features["user"]` would work out the lengths and offsets of all keys again.
    first = sum(sizes[: keys.index("user")])
    users = features.values()[first : first + rows].cpu()
    return Request(users, by_key["item"], by_key["candidate"])


def _tensor(array: Array) -> torch.Tensor | Sequence[int]:
    if isinstance(array, np.ndarray):
        # torch refuses read-only and non-native arrays half-heartedly, with a warning; a copy is safe and
        # small.
        return torch.from_numpy(np.array(array, order="C"))
    return array
