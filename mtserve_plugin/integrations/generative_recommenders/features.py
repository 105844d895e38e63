"""What the cache is told about a batch, read from the features of a `DlrmHSTU`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from mtserve_plugin import jagged
from mtserve_plugin.errors import AttachError, InputError

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

# The odd constants of splitmix64's finaliser, as signed integers: int64 arithmetic on arrays wraps around.
_MIX = np.int64(-7046029254386353131)
_MIX_AGAIN = np.int64(-4658895280553007687)
_NOT_MET = np.int64(0x5EED)


class Request(NamedTuple):
    """The arguments of `begin`; int64 on the host, `[B]` each but for the hashes.

    Attributes:
        context_keys: `None` for a model without context features.
        token_hashes: one per history token, row after row, or `None` without the content check.
        times: in seconds, of each row's last token, from which the model's own encoder counts; `None` unless asked for.
    """

    users: torch.Tensor
    history_lengths: torch.Tensor
    candidates: torch.Tensor
    context_keys: torch.Tensor | None
    token_hashes: torch.Tensor | None
    times: torch.Tensor | None = None


class Context(NamedTuple):
    """A context feature: how many values per row count, and how long a row must be for them to count."""

    name: str
    max_length: int
    min_uih_length: int


@dataclass(frozen=True)
class FeatureSpec:
    """Which feature is what.

    Attributes:
        user: holds one id per row.
        post_id: the history feature whose lengths the model takes for those of the history.
        time: when each history event happened, in seconds.
        query: when each candidate is asked for, in seconds; a feature of the candidates.
        history: all features that run along the history, `post_id` and `time` among them.
        context: in the order of the context rows.
    """

    user: str
    post_id: str
    time: str
    query: str
    history: tuple[str, ...]
    context: tuple[Context, ...]

    def read(
        self,
        features: KeyedJaggedTensor,
        candidates: KeyedJaggedTensor,
        *,
        content_check: bool,
        with_times: bool = False,
    ) -> Request:
        """Reads a batch. Features on a device cost synchronisations: keep them on the host.

        Raises:
            InputError: a feature is absent, or the user feature has not one value per row.
        """
        keys = features.keys()
        for key in (self.user, *self.history, *(one.name for one in self.context)):
            if key not in keys:
                raise InputError(f"uih_features has no key {key!r}; it has {', '.join(keys)}")
        rows = features.stride()
        lengths = features.lengths().to(device="cpu", dtype=torch.int64).view(len(keys), rows)
        by_key = dict(zip(keys, lengths.unbind(0), strict=True))
        if bool((by_key[self.user] != 1).any()):
            row = int((by_key[self.user] != 1).int().argmax())
            raise InputError(
                f"uih_features[{self.user!r}] has {int(by_key[self.user][row])} values in row {row}; the "
                "user feature "
                "holds one id per row"
            )
        if candidates.stride() != rows:
            raise InputError(f"candidates_features has {candidates.stride()} rows, uih_features has {rows}")
        counts = candidates.lengths().to(device="cpu", dtype=torch.int64)[:rows]
        histories = by_key[self.post_id]
        context_keys = None
        if self.context:
            mixed = np.zeros(rows, dtype=np.int64)
            tokens = (histories + counts).numpy()
            for one in self.context:
                values = jagged.column(features, one.name).to(device="cpu", dtype=torch.int64).numpy()
                met = tokens >= one.min_uih_length
                mixed = _mix_context(mixed, values, by_key[one.name].numpy(), one.max_length, met)
            context_keys = torch.from_numpy(mixed)
        hashes = jagged.token_hashes(features, self.history).cpu() if content_check else None
        users = jagged.column(features, self.user).to(device="cpu", dtype=torch.int64)
        times = self._times(features, candidates, histories, counts) if with_times else None
        return Request(users, histories, counts, context_keys, hashes, times)

    def _times(
        self, features: KeyedJaggedTensor, candidates: KeyedJaggedTensor, histories: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        keys = candidates.keys()
        if self.query not in keys:
            raise InputError(f"candidates_features has no key {self.query!r}; it has {', '.join(keys)}")
        asked, events = jagged.column(candidates, self.query), jagged.column(features, self.time)
        if not torch.equal(candidates[self.query].lengths().to(device="cpu", dtype=torch.int64), counts):
            raise InputError(f"candidates_features[{self.query!r}] has not one value per candidate")
        none = torch.zeros(1, dtype=torch.int64)
        asked, events = (torch.cat((none, one.to(device="cpu", dtype=torch.int64))) for one in (asked, events))
        # With the zero in front, the end of a row is the place of its last value.
        last_event = events[torch.where(histories > 0, histories.cumsum(0), 0)]
        return torch.where(counts > 0, asked[counts.cumsum(0)], last_event)


def read_spec(config: Any, user_feature: str | None) -> FeatureSpec:
    """Args: config: the model's `DlrmHSTUConfig`.

    Raises:
        AttachError: `user_feature` is missing, or the configuration describes no known arrangement.
    """
    history = tuple(uih for uih, _ in config.merge_uih_candidate_feature_mapping)
    context = tuple(
        Context(name, length, config.contextual_feature_to_min_uih_length.get(name, 0))
        for name, length in config.contextual_feature_to_max_length.items()
    )
    if not user_feature:
        fitting = [name for name in config.hstu_uih_feature_names if name not in history]
        raise AttachError(
            "user_feature: the cache has to know whose history a row is. Name the feature that holds the "
            "user's id: "
            f"attach(..., user_feature={fitting[0] if fitting else 'user_id'!r})",
            ("user_feature",),
        )
    if user_feature in history:
        raise AttachError(
            f"user_feature: {user_feature!r} runs along the history. Name a feature with one value per row",
            ("user_feature",),
        )
    for what in ("uih_post_id_feature_name", "uih_action_time_feature_name"):
        if getattr(config, what) not in history:
            raise AttachError(
                f"features: {what}={getattr(config, what)!r} is not in merge_uih_candidate_feature_mapping, "
                "so that it "
                "would not be stripped with the history. Add it there",
                ("features",),
            )
    for one in context:
        if one.name in history:
            raise AttachError(
                f"features: {one.name!r} is a context feature and runs along the history too. Use two features",
                ("features",),
            )
    return FeatureSpec(
        user_feature,
        config.uih_post_id_feature_name,
        config.uih_action_time_feature_name,
        config.candidates_querytime_feature_name,
        history,
        context,
    )


def _mix_context(
    keys: np.ndarray, values: np.ndarray, lengths: np.ndarray, max_length: int, met: np.ndarray
) -> np.ndarray:
    """Folds one context feature into each row's key; below the minimum length its values do not count."""
    starts = lengths.cumsum() - lengths
    padded = np.append(values, 0)
    mixed = _mix(keys, np.minimum(lengths, max_length))
    for place in range(max_length):
        mixed = _mix(mixed, padded[np.where(place < lengths, starts + place, values.size)])
    return mixed if met.all() else np.where(met, mixed, _mix(keys, _NOT_MET))


def _mix(keys: np.ndarray, values: np.ndarray | np.int64) -> np.ndarray:
    mixed = (keys ^ values) * _MIX
    mixed = (mixed ^ (mixed >> 29)) * _MIX_AGAIN
    return mixed ^ (mixed >> 32)
