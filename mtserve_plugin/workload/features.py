"""Features: what a ranking model is given for a batch of requests, as numpy arrays."""

from __future__ import annotations

from dataclasses import dataclass

from mtserve_plugin.workload.candidates import CandidateSampler
from mtserve_plugin.workload.trace import Int64s, Requests, Trace


@dataclass(frozen=True)
class Features:
    """A batch of B requests; int64 arrays, jagged ones row after row.

    Attributes:
        user: `[B]` user ids.
        now: `[B]` times of the requests, in seconds.
        lengths: `[B]` history lengths.
        item, action, time: `[sum(lengths)]` histories, oldest first; times in seconds.
        candidate_lengths: `[B]`.
        candidate: `[sum(candidate_lengths)]` item ids.
    """

    user: Int64s
    now: Int64s
    lengths: Int64s
    item: Int64s
    action: Int64s
    time: Int64s
    candidate_lengths: Int64s
    candidate: Int64s

    def __len__(self) -> int:
        return len(self.user)


def build_features(trace: Trace, requests: Requests, sampler: CandidateSampler) -> Features:
    """The features of a batch of requests of `trace`; one concatenation or gather per feature."""
    item, action, time = trace.histories(requests)
    candidate, candidate_lengths = sampler(requests)
    return Features(
        requests.user,
        requests.time,
        requests.history_length,
        item,
        action,
        time,
        candidate_lengths,
        candidate,
    )
