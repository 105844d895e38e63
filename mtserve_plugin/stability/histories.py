"""Histories: requests as plain columns that an audit can cut, edit and put to another time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from mtserve_plugin import jagged
from mtserve_plugin.errors import InputError


@dataclass(frozen=True)
class Histories:
    """One request per row, in columns; int64 on the host, row after row where rows have several values.

    Attributes:
        users: `[B]`, distinct.
        lengths: `[B]`, history tokens per row.
        tokens: what is known of each history token, `[sum of lengths]` each, oldest first.
        candidates: what is known of each candidate, `[sum of num_candidates]` each.
        num_candidates: `[B]`.
        now: `[B]`, time of each request in seconds.
        time: which of `tokens` is the event's time in seconds; empty for models without times.
        context: features with any number of values per row: values, and lengths `[B]`.

    Raises:
        InputError: a column's size disagrees with the lengths.
    """

    users: torch.Tensor
    lengths: torch.Tensor
    tokens: Mapping[str, torch.Tensor]
    candidates: Mapping[str, torch.Tensor]
    num_candidates: torch.Tensor
    now: torch.Tensor
    time: str = ""
    context: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = self.users.numel()
        sizes = {
            "lengths": (self.lengths, rows),
            "num_candidates": (self.num_candidates, rows),
            "now": (self.now, rows),
        }
        sizes |= {name: (column, int(self.lengths.sum())) for name, column in self.tokens.items()}
        sizes |= {name: (column, int(self.num_candidates.sum())) for name, column in self.candidates.items()}
        sizes |= {name: (values, int(lengths.sum())) for name, (values, lengths) in self.context.items()}
        for name, (column, size) in sizes.items():
            if column.numel() != size:
                raise InputError(f"{name} has {column.numel()} values; expected {size}")
        if self.time and self.time not in self.tokens:
            raise InputError(f"time={self.time!r} is not among the tokens' columns: {', '.join(self.tokens)}")

    def cut(self, kept: torch.Tensor) -> Histories:
        """Each row's first `kept[b]` tokens, the request itself unchanged."""
        row, place = self._tokens()
        chosen = place < kept[row]
        return replace(self, lengths=kept, tokens={name: column[chosen] for name, column in self.tokens.items()})

    def visit(self, kept: torch.Tensor) -> Histories:
        """The requests of before: each row's first `kept[b]` tokens, asked for when the next event happened."""
        earlier = self.cut(kept)
        if not self.time:
            return earlier
        following = torch.minimum(kept, self.lengths - 1).clamp_(min=0) + jagged.offsets(self.lengths)[:-1]
        times = torch.cat((self.tokens[self.time], self.now[:1]))[following]
        return replace(earlier, now=torch.where(kept < self.lengths, times, self.now))

    def asked(self, seconds: int) -> Histories:
        """The same histories, each asked for so long after its last event."""
        times = torch.cat((self.tokens[self.time], self.now[:1]))
        latest = times[(jagged.offsets(self.lengths)[1:] - 1).clamp(min=0)]
        return replace(self, now=torch.where(self.lengths > 0, latest + seconds, self.now))

    def edited(self, kept: torch.Tensor) -> Histories:
        """From token `kept[b]` on each event is a copy of the row's first one, at its own time."""
        row, place = self._tokens()
        first = jagged.offsets(self.lengths)[:-1][row]
        source = torch.where(place < kept[row], torch.arange(row.numel()), first)
        return replace(
            self,
            tokens={name: column if name == self.time else column[source] for name, column in self.tokens.items()},
        )

    def other_candidates(self) -> Histories:
        """As many candidates, but others: the first half of them all, each twice."""
        source = torch.arange(int(self.num_candidates.sum())) // 2
        return replace(self, candidates={name: column[source] for name, column in self.candidates.items()})

    def select(self, rows: torch.Tensor) -> Histories:
        """The rows that are True in `rows` `[B]`."""

        def jagged_part(column: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return column[jagged.spread(rows, lengths)]

        return Histories(
            users=self.users[rows],
            lengths=self.lengths[rows],
            tokens={name: jagged_part(column, self.lengths) for name, column in self.tokens.items()},
            candidates={name: jagged_part(column, self.num_candidates) for name, column in self.candidates.items()},
            num_candidates=self.num_candidates[rows],
            now=self.now[rows],
            time=self.time,
            context={
                name: (jagged_part(values, lengths), lengths[rows]) for name, (values, lengths) in self.context.items()
            },
        )

    def _tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Row of each token, and its place there."""
        row = jagged.spread(torch.arange(self.lengths.numel()), self.lengths)
        return row, torch.arange(row.numel()) - jagged.offsets(self.lengths)[:-1][row]
