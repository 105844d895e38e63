"""What an attached model leaves out: history in the last layer, and autograd's bookkeeping."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from mtserve_plugin import CacheBatch, attach
from mtserve_plugin.integrations.generative_recommenders.classes import _ordinary
from tests.integrations.conftest import NORM_LEN
from tests.integrations.streams import reference, relative_error

STABLE = {"user_feature": "user_id", "positions": "append_stable"}

pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor")


@pytest.fixture
def calls(monkeypatch):
    """Layer and number of rows of every attention, and whether it was for candidates alone."""
    seen = []
    for name in ("attend", "attend_candidates"):
        real = getattr(CacheBatch, name)

        def spy(batch, layer, q, k, v, real=real, name=name):
            seen.append((name, layer))
            return real(batch, layer, q, k, v)

        monkeypatch.setattr(CacheBatch, name, spy)
    return seen


@pytest.mark.parametrize("counts", [[7], [3, 0, 5], [0, 0]], ids=str)
def test_the_last_layer_is_run_for_candidates_alone(make_model, make_cache, make_users, calls, counts):
    model = make_model(1)
    last = len(model._hstu_transducer._stu_module._stu_layers) - 1
    recomputing = reference(model, NORM_LEN)
    attach(model, make_cache(model), **STABLE)
    users, names = make_users(model, 2), list(range(1, len(counts) + 1))
    for name in names:
        users.add(name)
    for _ in range(3):
        calls.clear()
        request = users.request(names, counts)
        got, want = model(*request), recomputing(*request)
        alone = "attend_candidates" if sum(counts) else "attend"
        assert calls == [*(("attend", layer) for layer in range(last)), (alone, last)]
        if sum(counts):
            assert relative_error(got[0], want[0]) <= 1e-6
        for name in names:
            users.grow(name, 4)


def test_outputs_are_ordinary_tensors(make_model, make_cache, make_users):
    model = make_model(3)
    attach(model, make_cache(model), **STABLE)
    users = make_users(model, 4)
    users.add(1)
    request = users.request([1], [7])
    for _ in range(2):
        out = model(*request)
        for tensor in (out[0], out[1], out[3]):
            assert not tensor.is_inference()
            assert not tensor.requires_grad
        # A head of the caller's own, trained on what was served; saving an inference tensor for backward would raise.
        weight = torch.ones(out[0].shape[1], requires_grad=True)
        ((out[0] * weight).sum() + (out[1] * weight).sum()).backward()
        assert relative_error(weight.grad, (out[0] + out[1]).sum(0)) <= 1e-6
        out[0].add_(1)


def test_whatever_a_forward_returns_comes_out_ordinary():
    class Named(NamedTuple):
        first: torch.Tensor
        second: None

    with torch.inference_mode():
        made = torch.ones(2)
    out = _ordinary({"a": (made, [made]), "b": Named(made, None)})
    assert type(out["b"]) is Named
    assert out["b"].second is None
    for one in (out["a"][0], out["a"][1][0], out["b"].first):
        assert not one.is_inference()
        assert torch.equal(one, made)
