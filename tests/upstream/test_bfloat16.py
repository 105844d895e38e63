"""Streams in bfloat16 on the four configurations: cached against our own cold path, bit by bit."""

from __future__ import annotations

import copy

import pytest
import torch

from mtserve_plugin import NoCache, attach
from tests.integrations.streams import run_stream
from tests.integrations.test_split import NAMES
from tests.upstream.conftest import DATASETS
from tests.upstream.test_attach import stable


class Halves(torch.nn.Module):
    """The call of the host's sparse module, its move to bfloat16, then the dense half; outputs are kept."""

    def __init__(self, host, sparse, dense):
        super().__init__()
        self.move = host.inference.move_sparse_output_to_device
        self.sparse, self.dense, self.outputs = sparse, dense, []

    def forward(self, uih, candidates):
        values = self.sparse.preprocess(uih_features=uih, candidates_features=candidates)
        found, payload, longest, lengths, most, counts = values
        found, payload, lengths, counts = self.move(found, payload, lengths, counts, torch.device("cpu"))
        moved = (found, payload, longest, lengths, most, counts)
        out = self.dense.main_forward(**dict(zip(NAMES, moved, strict=True)))
        self.outputs.append(out[0])
        return out


@pytest.mark.parametrize("dataset", DATASETS)
def test_cached_outputs_are_those_of_the_cold_path(host, make_model, make_cache, dataset, record_property):
    whole, users = make_model(dataset, 9)
    dense, _ = make_model(dataset, 9, is_dense=True)
    dense.load_state_dict({key: one for key, one in whole.state_dict().items() if key in dense.state_dict()})
    dense.to(torch.bfloat16)
    cache = make_cache(dense, page_size=8, num_pages=120)
    cold, tables = copy.deepcopy(dense), copy.deepcopy(whole)
    attach(cold, NoCache(cache.config), sparse=tables, **stable(users))
    attach(dense, cache, sparse=whole, **stable(users))
    cached, recomputed = Halves(host, whole, dense), Halves(host, tables, cold)
    run_stream(cached, recomputed, users, batches=100, seed=10)
    found, want = (torch.cat([one.flatten() for one in watched.outputs]) for watched in (cached, recomputed))
    assert found.dtype == torch.bfloat16
    # Neighbouring numbers of one sign are neighbouring integers.
    apart = (found.view(torch.int16).int() - want.view(torch.int16).int()).abs()
    equal = float((found == want).float().mean())
    record_property("share of equal outputs", equal)
    assert equal >= 0.999
    assert int(apart[found != want].max() if equal < 1 else 0) <= 1
    assert cache.stats()["total_hit_ratio"] > 0.2
