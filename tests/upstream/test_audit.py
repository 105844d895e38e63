"""The audit of the host's own models; with `-s` it prints the tables that docs/exactness.md quotes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mtserve_plugin import attach, audit, detach


@pytest.mark.parametrize("dataset", ["streaming-400m", "kuairand-1k"])
def test_as_it_is_and_attached(make_model: Callable[..., Any], make_cache: Callable[..., Any], dataset: str) -> None:
    model, users = make_model(dataset)
    model.eval()
    lengths = [60, 90, 40, 75]
    for user, length in enumerate(lengths):
        users.add(user)
        users.grow(user, length)
    sample = users.request(list(range(len(lengths))), [40] * len(lengths))

    report = audit(model, sample)
    assert [cause.name for cause in report.causes] == ["query time", "positions", "batch divisor"]
    assert min(report.layers.worst) > 1e-3

    cache = make_cache(model)
    attach(model, cache, user_feature=users.user_feature, positions="append_stable")
    report = audit(model, sample)
    assert report.stable
    assert max(max(drift.worst) for drift in report.probes.values()) <= 2e-6
    assert report.scores is not None
    assert report.scores.max_rel_difference <= 1e-6
    assert report.scores.reused_tokens == sum(lengths) - 8 * len(lengths)
    detach(model)

    attach(model, cache, user_feature=users.user_feature, approximate={"positions"})
    report = audit(model, sample)
    assert [cause.name for cause in report.causes] == ["query time", "positions"]
