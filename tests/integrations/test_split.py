"""`preprocess` in one place, `main_forward` in another: the batch travels in the payload."""

from __future__ import annotations

import copy

import pytest
import torch

from mtserve_plugin import CacheBatch, CacheConfig, HierarchicalKVCache, attach, detach
from mtserve_plugin.errors import AttachError, CacheError, OnloadError
from tests.doubles.common import HammerKernel
from tests.integrations import dlrm_double
from tests.integrations.conftest import NORM_LEN
from tests.integrations.streams import reference, relative_error, run_stream

STABLE = {"user_feature": "user_id", "positions": "append_stable"}
NAMES = (
    "seq_embeddings",
    "payload_features",
    "max_uih_len",
    "uih_seq_lengths",
    "max_num_candidates",
    "num_candidates",
)


class Sparse(torch.nn.Module):
    """As the host's sparse module: a whole model of which only `preprocess` is called."""

    def __init__(self, model):
        super().__init__()
        self._hstu_model = model

    def forward(self, uih, candidates):
        return self._hstu_model.preprocess(uih_features=uih, candidates_features=candidates)


class Halves(torch.nn.Module):
    def __init__(self, sparse, dense, dtype=torch.float32):
        super().__init__()
        self.sparse, self.dense, self.dtype = sparse, dense, dtype

    def forward(self, uih, candidates):
        return self.dense.main_forward(**self.look_up(uih, candidates))

    def look_up(self, uih, candidates):
        """What the host does on the way: embeddings cast, the payload's dict changed in place."""
        values = dict(zip(NAMES, self.sparse(uih, candidates), strict=True))
        found = values["seq_embeddings"]
        for name, one in found.items():
            found[name] = one._replace(embedding=one.embedding.to(self.dtype))
        for name, value in values["payload_features"].items():
            values["payload_features"][name] = value.clone()
        return values


@pytest.fixture
def halves(make_model, make_cache, make_users):
    def make(seed=0, dtype=torch.float32, **sizes):
        whole = make_model(seed)
        dense = dlrm_double.DlrmHSTU(whole._hstu_configs, is_dense=True)
        dense.set_hammer_kernel(HammerKernel.PYTORCH)
        dense.load_state_dict(
            {key: one for key, one in whole.state_dict().items() if "_embedding_collection" not in key}
        )
        dense.eval().to(dtype)
        recomputing = Halves(Sparse(copy.deepcopy(whole)), reference(dense, NORM_LEN), dtype)
        both = Halves(Sparse(whole), dense, dtype)
        cache = make_cache(dense, **sizes)
        attach(dense, cache, sparse=both.sparse, version="1", **STABLE)
        return both, recomputing, make_users(whole, seed + 1), cache

    return make


def agree(both, recomputing, request):
    assert relative_error(both(*request)[0], recomputing(*request)[0]) <= 1e-6


def visit(users, user, grow=0):
    if user not in users.events:
        users.add(user)
    users.grow(user, grow)
    return users.request([user], [7])


def test_streams(halves):
    both, recomputing, users, cache = halves(1, num_pages=100, host_bytes=1 << 20)
    assert run_stream(both, recomputing, users, batches=100, seed=2) <= 1e-6
    assert cache.stats()["total_hit_ratio"] > 0.4


def test_bfloat16_dense_half(halves):
    both, _, users, cache = halves(3, torch.bfloat16, page_size=8)
    assert cache.config.dtype == "bfloat16"
    request = visit(users, 1, 30)
    cold = both(*request)[0]
    assert cold.dtype == torch.bfloat16
    assert relative_error(both(*request)[0], cold) <= 2e-2
    assert cache.stats()["hit_tokens"] == 30


def test_a_batch_whose_keys_do_not_arrive_runs_again_uncached(halves, monkeypatch):
    both, recomputing, users, _cache = halves(4)
    agree(both, recomputing, visit(users, 1, 30))
    request = visit(users, 1, 3)
    wait = CacheBatch.wait
    failed = []

    def broken(batch, layer, **options):
        if layer == 1 and bool(batch.cached_lengths.any()):
            failed.append(layer)
            raise OnloadError("planted")
        return wait(batch, layer, **options)

    with monkeypatch.context() as patch:
        patch.setattr(CacheBatch, "wait", broken)
        agree(both, recomputing, request)
    assert failed
    agree(both, recomputing, request)


def test_batches_overtake_each_other(halves):
    both, recomputing, users, cache = halves(5)
    requests = [visit(users, user, 20) for user in (1, 2, 3)]
    for request in requests:
        agree(both, recomputing, request)
    waiting = [both.look_up(*request) for request in requests]
    assert cache.stats()["open_batches"] == 3
    with pytest.raises(CacheError, match="3 batches of this model are in flight"):
        detach(both.dense)
    for request, values in reversed(list(zip(requests, waiting, strict=True))):
        assert relative_error(both.dense.main_forward(**values)[0], recomputing(*request)[0]) <= 1e-6
    assert cache.stats()["hit_tokens"] == 60
    with pytest.raises(CacheError, match="names no open batch"):
        both.dense.main_forward(**waiting[0])


def test_batches_that_never_come_are_bounded(halves, caplog):
    both, recomputing, users, cache = halves(6, max_open_batches=4)
    values = [both.look_up(*visit(users, 1, 3)) for _ in range(9)]
    assert cache.stats()["open_batches"] <= 4
    assert "never came to main_forward" in caplog.text
    with pytest.raises(CacheError, match="names no open batch"):
        both.dense.main_forward(**values[0])
    both.dense.main_forward(**values[-1])
    agree(both, recomputing, visit(users, 2, 3))


def test_features_of_elsewhere_are_refused(halves):
    both, recomputing, users, _ = halves(7)
    request = visit(users, 1, 3)
    with pytest.raises(CacheError, match="preprocess of the model"):
        both.dense.main_forward(**recomputing.look_up(*request))
    with pytest.raises(CacheError, match="sparse half"):
        both.sparse._hstu_model(*request)
    with pytest.raises(CacheError, match="detach it first"):
        copy.deepcopy(both.dense)


def test_a_failed_lookup_aborts(halves):
    both, _, users, cache = halves(8)
    uih, candidates = visit(users, 1, 3)
    uih = type(uih)(keys=uih.keys(), values=uih.values() + 1000, lengths=uih.lengths(), stride=1)
    with pytest.raises(IndexError):
        both(uih, candidates)
    assert cache.stats()["open_batches"] == 0


@pytest.mark.parametrize("by", ["dense", "sparse"])
def test_detach_restores_both(halves, by):
    both, _, users, _ = halves(9)
    detach(getattr(both, by))
    request = visit(users, 1, 3)
    both(*request)
    kinds = {type(module) for module in both.modules()}
    assert dlrm_double.DlrmHSTU in kinds
    assert not any("attached" in kind.__qualname__ for kind in kinds)
    with pytest.raises(AttachError):
        detach(both.sparse)


def test_one_model_by_hand(make_model, make_cache, make_users):
    model = make_model(10)
    recomputing = reference(model, NORM_LEN)
    cache = make_cache(model)
    attach(model, cache, sparse=model, **STABLE)
    users = make_users(model, 11)
    for _ in range(3):
        request = visit(users, 1, 9)
        values = dict(zip(NAMES, model.preprocess(*request), strict=True))
        want = recomputing(*request)[0]
        assert relative_error(model.main_forward(**values)[0], want) <= 1e-6
        assert relative_error(model(*request)[0], want) <= 1e-6
    assert cache.stats()["hit_tokens"] > 0


def test_the_sparse_module_alone_is_refused(make_model, make_cache):
    class HSTUSparseInferenceModule(Sparse):
        pass

    model = make_model()
    config = CacheConfig.for_model(model, attn_norm_len=NORM_LEN, page_size=4, chunk_size=16, num_pages=9)
    with pytest.raises(AttachError, match="sparse=this_module"):
        attach(HSTUSparseInferenceModule(model), HierarchicalKVCache(config), **STABLE)
