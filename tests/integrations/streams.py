"""Streams of requests for a `DlrmHSTU` of any configuration, and its embeddings computed another way."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import torch
from torchrec import KeyedJaggedTensor

START = 1_600_000_000


class Users:
    """A few users whose histories grow, are edited and are cut; events are rows of one value per feature.

    Args:
        sizes: ids per embedded feature, by name; other features take a bit mask below 256.
    """

    def __init__(self, config: Any, sizes: dict[str, int], seed: int = 0, user_feature: str = "user_id"):
        self.config = config
        self.sizes = sizes
        self.user_feature = user_feature
        self.random = random.Random(seed)
        self.history = [uih for uih, _ in config.merge_uih_candidate_feature_mapping]
        self.events: dict[int, list[dict[str, int]]] = {}
        self.context: dict[int, dict[str, list[int]]] = {}

    def add(self, user: int) -> None:
        self.events[user] = []
        self.context[user] = {
            name: [self._value(name) for _ in range(self.random.randint(0, length))]
            for name, length in self.config.contextual_feature_to_max_length.items()
        }
        self.context[user][self.user_feature] = [user]

    def grow(self, user: int, count: int) -> None:
        events = self.events[user]
        for _ in range(count):
            time = events[-1][self.config.uih_action_time_feature_name] if events else START
            event = {name: self._value(name) for name in self.history}
            # Bursts of seconds and pauses of weeks.
            event[self.config.uih_action_time_feature_name] = time + int(math.exp(self.random.uniform(0, 14)))
            events.append(event)

    def edit(self, user: int, index: int, name: str | None = None) -> None:
        name = name or self.config.uih_post_id_feature_name
        event = self.events[user][index]
        self.events[user][index] = event | {name: (event[name] + 1) % self.sizes.get(name, 256)}

    def request(
        self, users: list[int], candidates: list[int], lengths: list[int] | None = None
    ) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
        """Features of one batch; `lengths` cuts the histories to their first tokens."""
        config = self.config
        rows = [self.events[user][: None if lengths is None else lengths[b]] for b, user in enumerate(users)]
        uih: dict[str, list[list[int]]] = {}
        for name in config.hstu_uih_feature_names:
            if name in self.history:
                uih[name] = [[event[name] for event in row] for row in rows]
            else:
                uih[name] = [self.context[user][name] for user in users]
        query = config.candidates_querytime_feature_name
        time = config.uih_action_time_feature_name
        now = [(row[-1][time] if row else START) + self.random.randrange(10_000) for row in rows]
        chosen = {
            name: [
                [now[b] if name == query else self._value(name) for _ in range(count)]
                for b, count in enumerate(candidates)
            ]
            for name in config.hstu_candidate_feature_names
        }
        return features(uih, len(users)), features(chosen, len(users))

    def _value(self, name: str) -> int:
        return self.random.randrange(self.sizes.get(name, 256))


def features(columns: dict[str, list[list[int]]], rows: int) -> KeyedJaggedTensor:
    flat = [value for column in columns.values() for row in column for value in row]
    lengths = [len(row) for column in columns.values() for row in column]
    return KeyedJaggedTensor(
        keys=list(columns),
        values=torch.tensor(flat, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        stride=rows,
    )


def trained_size(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Weights as large as training leaves them, so that every input tells in the output."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            norm = "norm" in name or ("mlp" in name and weight.dim() == 1)
            if norm and name.endswith("weight"):
                mean, std = 1.0, 0.1
            elif weight.dim() == 1:
                mean, std = 0.0, 0.1
            elif "embedding" in name and "mlp" not in name:
                # Tables: of ids, positions, times and actions.
                mean, std = 0.0, 0.5
            elif name.endswith("contextual_linear_weights"):
                mean, std = 0.0, weight.shape[1] ** -0.5
            elif "uvqk" in name or "_output_weight" in name:
                mean, std = 0.0, weight.shape[0] ** -0.5
            else:
                mean, std = 0.0, max(weight.shape[-1], 1) ** -0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * std + mean)
    return model


class ReferenceEncoder(torch.nn.Module):
    """The append-stable encoding written out in loops: whole rows, nothing cached.

    Args:
        shift: added to history positions, to show that a wrong position would be seen.
    """

    def __init__(self, encoder: torch.nn.Module, context_rows: int, shift: int = 0):
        super().__init__()
        self._position_embeddings_weight = copy.deepcopy(encoder._position_embeddings_weight)
        self._timestamp_embeddings_weight = copy.deepcopy(encoder._timestamp_embeddings_weight)
        self.context_rows = context_rows
        self.shift = shift

    def forward(
        self,
        max_seq_len: int,
        seq_lengths: torch.Tensor,
        seq_offsets: torch.Tensor,
        seq_timestamps: torch.Tensor,
        seq_embeddings: torch.Tensor,
        num_targets: torch.Tensor,
    ) -> torch.Tensor:
        table, time_table = self._position_embeddings_weight, self._timestamp_embeddings_weight
        last, width = time_table.shape[0] - 1, table.shape[1]
        index, bucket = [], []
        times, start = seq_timestamps.tolist(), 0
        for length, targets in zip(seq_lengths.tolist(), num_targets.tolist(), strict=True):
            context, end = start + self.context_rows, start + length - targets
            for t in range(start, start + length):
                if t < context:
                    index.append(t - start)
                    bucket.append(last)
                    continue
                before = min(t, end) - 1
                gap = times[t] - times[before] if before >= context else 0
                index.append(min(t, end) - start + self.shift)
                bucket.append(min(math.floor(math.sqrt(max(gap, 0) / 60)), last))
            start += length
        added = time_table[bucket] + table[[min(i, table.shape[0] - 1) for i in index]]
        return seq_embeddings * math.sqrt(width) + added.to(seq_embeddings.dtype)


def reference(model: torch.nn.Module, norm_len: int, shift: int = 0) -> torch.nn.Module:
    """A copy of an unattached model that recomputes with its own attention, the pinned divisor and that
    encoding.

    The host's attention takes one number for padding and divisor: with `norm_len` in its place it computes
    what an attached model has to.
    """
    twin = copy.deepcopy(model)
    transducer = getattr(twin, "_hstu_transducer", twin)
    stack, encoder = transducer._stu_module, transducer._positional_encoder
    rows = transducer._input_preprocessor._max_contextual_seq_len
    inner = stack.forward

    def pinned(**arguments: Any) -> torch.Tensor:
        assert arguments["max_seq_len"] <= norm_len
        return inner(**(arguments | {"max_seq_len": norm_len}))

    stack.forward = pinned
    if encoder is not None:
        transducer._positional_encoder = ReferenceEncoder(encoder, rows, shift)
    return twin


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    if want.numel() == 0:
        return 0.0
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).abs().max() / want.abs().max())


def run_stream(
    attached: torch.nn.Module,
    recomputing: torch.nn.Module,
    users: Users,
    *,
    batches: int,
    seed: int,
    num_users: int = 20,
    longest: int = 70,
) -> float:
    """The relative error of the candidates' user embeddings over a stream of mixed requests: max|a-b| /
    max|b|.

    A single batch may hold one candidate with small numbers; its own relative error is bounded three times
    wider.
    """
    draw = random.Random(seed)
    ids = [draw.randrange(users.sizes[users.user_feature]) for _ in range(10 * num_users)]
    ids = list(dict.fromkeys(ids))[:num_users]
    for user in ids:
        users.add(user)
    worst, pairs = 0.0, []
    for _ in range(batches):
        batch = draw.choices(ids, k=draw.randint(1, 4))
        if len(batch) > 1 and draw.random() < 0.25:
            batch[1] = batch[0]
        for user in set(batch):
            events = users.events[user]
            kind = draw.random()
            if kind < 0.08 and events:
                users.edit(user, draw.randrange(len(events)), draw.choice(users.history))
            elif kind < 0.14 and events:
                # Deleted at the end, or anywhere.
                del events[draw.randrange(len(events)) :]
            elif kind < 0.17 and events:
                del events[draw.randrange(len(events))]
            users.grow(user, min(draw.choice([0, 0, 1, 2, 5, 16]), longest - len(events)))
        lengths = [len(users.events[user]) for user in batch]
        if draw.random() < 0.15:
            lengths[-1] = draw.randint(0, lengths[-1])
        candidates = [draw.choice([0, 1, 2, 7]) for _ in batch]
        # The host's position operator wants a token in the batch; its head wants a candidate.
        candidates[0] = max(candidates[0], 1)
        request = users.request(batch, candidates, lengths)
        with torch.no_grad():
            got, want = attached(*request)[0], recomputing(*request)[0]
        assert got.shape == want.shape
        worst = max(worst, relative_error(got, want))
        pairs.append((got, want))
    error = relative_error(*(torch.cat(side) for side in zip(*pairs, strict=True)))
    if error <= 1e-6:
        assert worst <= 3e-6
    return error
