"""How far the host's own encoder lets scores drift, and that a bound brings them back to those of a recompute."""

from __future__ import annotations

import copy

import pytest
import torch

from mtserve_plugin import NoCache, attach
from mtserve_plugin.integrations import stats
from tests.integrations.streams import relative_error

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 60


@pytest.mark.parametrize("bound", [None, 20, 5])
def test_refresh_after_tokens(make_model, make_cache, bound, record_property):
    model, users = make_model("streaming-400m", 1)
    cold, cache = copy.deepcopy(model), make_cache(model)
    options = {"user_feature": users.user_feature, "approximate": {"positions"}}
    attach(cold, NoCache(cache.config), **options)
    attach(model, cache, refresh_after_tokens=bound, **options)
    users.add(3)
    users.grow(3, 40)
    errors = []
    for step in range(STEPS + 1):
        users.grow(3, min(step, 1))
        request = users.request([3], [20])
        with torch.no_grad():
            errors.append(relative_error(model(*request)[0], cold(*request)[0]))
    fresh = errors[:: bound or STEPS + 1]
    worst, mean = max(errors), sum(errors) / len(errors)
    for name, value in (("largest", worst), ("mean", mean), ("after a refresh", max(fresh))):
        record_property(f"error, {name}", value)
    ratio = cache.stats()["total_hit_ratio"]
    record_property("total hit ratio", ratio)
    print(f"\n{bound}: largest {worst:.1e}, mean {mean:.1e}, refreshed {max(fresh):.1e}, hit ratio {ratio:.1%}")
    assert max(fresh) <= 1e-6
    assert worst > 1e-4
    assert stats(model)["refreshed_by_tokens"] == (STEPS // bound if bound else 0)
