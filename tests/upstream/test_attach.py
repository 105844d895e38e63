"""The host's own models attached, against their own recompute; skipped unless GENERATIVE_RECOMMENDERS is
set.
"""

from __future__ import annotations

import copy

import pytest
import torch

from mtserve_plugin import NoCache, attach, detach
from mtserve_plugin.errors import AttachError
from tests.integrations.streams import reference, relative_error, run_stream
from tests.integrations.test_split import NAMES
from tests.upstream.conftest import DATASETS, NORM_LEN

pytestmark = pytest.mark.filterwarnings("ignore")


def stable(users):
    return {"user_feature": users.user_feature, "positions": "append_stable"}


@pytest.mark.parametrize("dataset", DATASETS)
def test_streams(make_model, make_cache, dataset, record_property):
    model, users = make_model(dataset, 1)
    recomputing = reference(model, NORM_LEN)
    cache = make_cache(model, num_pages=90, host_bytes=1 << 20)
    keys, before = list(model.state_dict()), [type(module) for module in model.modules()]
    attach(model, cache, **stable(users))
    assert list(model.state_dict()) == keys
    error = run_stream(model, recomputing, users, batches=110, seed=2)
    record_property("max relative error", error)
    assert error <= 1e-6
    stats = cache.stats()
    record_property("total hit ratio", stats["total_hit_ratio"])
    assert stats["total_hit_ratio"] > 0.3
    assert stats["device_evicted_pages"] > 0
    assert stats["host_hit_tokens"] > 0
    detach(model)
    assert [type(module) for module in model.modules()] == before


@pytest.mark.parametrize("dataset", DATASETS)
def test_the_measure_sees_a_wrong_history_and_a_wrong_position(make_model, dataset, record_property):
    model, users = make_model(dataset, 3)
    users.add(5)
    users.grow(5, 45)
    request = users.request([5], [20])
    with torch.no_grad():
        want = reference(model, NORM_LEN)(*request)[0]
        shifted = reference(model, NORM_LEN, shift=1)(*request)[0]
        users.events[5] = users.events[5][:1]
        without = reference(model, NORM_LEN)(users.request([5], [20])[0], request[1])[0]
    for name, got in (("positions shifted", shifted), ("history removed", without)):
        record_property(name, relative_error(got, want))
        assert relative_error(got, want) > 1e-2


def test_the_divisor_of_the_host_moves_with_the_batch(make_model, make_cache):
    """Why it is pinned: the same request alone and in company; attached, company makes no difference."""
    model, users = make_model("kuairand-1k", 4)
    for user, length in ((1, 30), (2, 70)):
        users.add(user)
        users.grow(user, length)
    both = users.request([1, 2], [6, 6])
    alone = [features_of_row(one) for one in both]
    with torch.no_grad():
        assert relative_error(model(*both)[0][:6], model(*alone)[0]) > 1e-3
        cache = make_cache(model)
        attach(model, NoCache(cache.config), **stable(users))
        assert relative_error(model(*both)[0][:6], model(*alone)[0]) <= 1e-6


def features_of_row(both):
    """The first row of a batch of two."""
    lengths = both.lengths().view(-1, 2)
    columns = [both[key].values()[: int(one)] for key, one in zip(both.keys(), lengths[:, 0], strict=True)]
    return type(both)(keys=both.keys(), values=torch.cat(columns), lengths=lengths[:, 0].contiguous(), stride=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse_and_dense_halves(host, make_model, make_cache, dtype, record_property):
    whole, users = make_model("streaming-400m", 5)
    dense, _ = make_model("streaming-400m", 5, is_dense=True)
    dense.load_state_dict({key: one for key, one in whole.state_dict().items() if key in dense.state_dict()})
    dense.to(dtype)

    class Halves(torch.nn.Module):
        """`HSTUSparseInferenceModule`'s call, `move_sparse_output_to_device`, then the dense half."""

        def __init__(self, sparse, dense):
            super().__init__()
            self.sparse, self.dense = sparse, dense

        def forward(self, uih, candidates):
            values = self.sparse.preprocess(uih_features=uih, candidates_features=candidates)
            found, payload, longest, lengths, most, counts = values
            if dtype == torch.bfloat16:
                found, payload, lengths, counts = host.inference.move_sparse_output_to_device(
                    found, payload, lengths, counts, torch.device("cpu")
                )
            moved = (found, payload, longest, lengths, most, counts)
            return self.dense.main_forward(**dict(zip(NAMES, moved, strict=True)))

    cache = make_cache(dense, page_size=8, num_pages=120)
    if dtype == torch.float32:
        recomputing = Halves(copy.deepcopy(whole), reference(dense, NORM_LEN))
    else:
        cold, tables = copy.deepcopy(dense), copy.deepcopy(whole)
        attach(cold, NoCache(cache.config), sparse=tables, **stable(users))
        recomputing = Halves(tables, cold)
    attach(dense, cache, sparse=whole, **stable(users))
    error = run_stream(Halves(whole, dense), recomputing, users, batches=100, seed=6)
    record_property("max relative error", error)
    # In bfloat16 against our own cold path; one unit in the last place of the largest output.
    assert error <= (1e-6 if dtype == torch.float32 else 2**-8)
    assert cache.stats()["total_hit_ratio"] > 0.2


def test_stochastic_depth_is_exact_and_l2_is_refused(host, make_model, make_cache, record_property):
    model, users = make_model("debug", 7)
    layers = model._hstu_transducer._stu_module._stu_layers
    layers[1] = host.dynamic_stu.SDSTU(layers[1], is_inference=True)
    model.eval()
    recomputing = reference(model, NORM_LEN)
    cache = make_cache(model)
    attach(model, cache, **stable(users))
    error = run_stream(model, recomputing, users, batches=30, seed=8)
    record_property("max relative error", error)
    assert error <= 1e-6
    detach(model)
    layers[1] = host.dynamic_stu.L2STU(layers[1]._stu, max_l2_len=8, is_inference=True).eval()
    with pytest.raises(AttachError, match="L2STU"):
        attach(model, cache, **stable(users))
