"""Reads and checks the arguments of `begin`, the same way for every cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from mtserve_plugin.errors import InputError

Ids = torch.Tensor | Sequence[int]

LONGEST = 2**30
"""Tokens that a row may have, context rows included."""


class BatchRequest(NamedTuple):
    """What `begin` was asked for; contiguous int64 on the host, `[B]` each, `token_hashes` one per history token."""

    users: torch.Tensor
    lengths: torch.Tensor
    candidates: torch.Tensor
    context_tokens: int
    token_hashes: torch.Tensor | None
    context_keys: torch.Tensor | None

    @property
    def rows(self) -> int:
        return self.users.numel()


def read_request(
    user_ids: Ids,
    history_lengths: Ids,
    num_candidates: int | torch.Tensor,
    context_tokens: int,
    token_hashes: torch.Tensor | None,
    context_keys: torch.Tensor | None,
) -> BatchRequest:
    """Shapes and dtypes checked; the range of lengths is left to whoever walks over them next.

    Raises:
        InputError: names the argument and what was expected.
    """
    users = host_int64("user_ids", user_ids)
    rows = users.numel()
    lengths = host_int64("history_lengths", history_lengths, rows)
    if isinstance(num_candidates, bool):
        raise InputError(f"num_candidates={num_candidates} must be an integer or [B] int64")
    if isinstance(num_candidates, int):
        candidates = torch.full((rows,), num_candidates, dtype=torch.int64)
    else:
        candidates = host_int64("num_candidates", num_candidates, rows)
    if isinstance(context_tokens, bool) or not isinstance(context_tokens, int):
        raise InputError(f"context_tokens={context_tokens!r} must be an integer")
    if not 0 <= context_tokens <= LONGEST:
        raise InputError(f"context_tokens={context_tokens} must be between 0 and 2**30")
    if token_hashes is not None:
        token_hashes = host_int64("token_hashes", token_hashes, int(lengths.sum()), "history token")
    if context_keys is not None:
        context_keys = host_int64("context_keys", context_keys, rows)
    return BatchRequest(users, lengths, candidates, context_tokens, token_hashes, context_keys)


def check_values(request: BatchRequest) -> None:
    """The range of lengths and candidates.

    Raises:
        InputError: names the argument, the row and the range.
    """
    for row, length in enumerate(request.lengths.tolist()):
        if length < 0 or length + request.context_tokens > LONGEST:
            raise InputError(
                f"history_lengths[{row}] is {length}; lengths must be between 0 and 2**30, context rows included"
            )
    for row, count in enumerate(request.candidates.tolist()):
        if count < 0:
            raise InputError(f"num_candidates[{row}] is {count}; it cannot be negative")


def host_int64(name: str, values: Ids, size: int | None = None, one_per: str = "user id") -> torch.Tensor:
    """`values` as a contiguous int64 `[B]` tensor on the host.

    Raises:
        InputError: not integers, not one-dimensional, or not of the given size.
    """
    if not isinstance(values, torch.Tensor):
        try:
            values = torch.as_tensor(values)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise InputError(f"{name} cannot be read as int64: {error}") from None
        if values.numel() == 0:
            values = values.to(torch.int64)
    if values.dtype != torch.int64:
        if values.dtype not in (torch.int32, torch.int16, torch.uint8, torch.int8):
            raise InputError(f"{name} is {values.dtype}; expected int64")
        values = values.to(torch.int64)
    if values.device.type != "cpu":
        values = values.cpu()
    if values.dim() != 1:
        raise InputError(f"{name} has shape {tuple(values.shape)}; expected one dimension [B]")
    if size is not None and values.numel() != size:
        raise InputError(f"{name} has {values.numel()} entries; expected {size}, one per {one_per}")
    return values if values.is_contiguous() else values.contiguous()
