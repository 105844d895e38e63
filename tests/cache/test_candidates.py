"""The last layer for candidates alone, against the layer for everybody."""

import random

import pytest
import torch

from mtserve_plugin import HierarchicalKVCache, NoCache, ops
from mtserve_plugin.errors import InputError
from tests.cache.driver import Request, begin, dense, history_of, serve, tiny_config

LAST = 1


def layers(cache, requests, seen, *, alone, context):
    """The output of the last layer's candidates; `seen` gets the number of queries that were computed."""
    with begin(cache, requests, context=context) as batch:
        for layer in range(LAST + 1):
            q, k, v = (dense(cache.config, batch, requests, layer, name) for name in "qkv")
            if layer == LAST and alone:
                seen.clear()
                out = batch.attend_candidates(layer, q, k, v)
            else:
                out = batch.attend(layer, q, k, v)
        rows = batch.candidate_rows
        if alone:
            whole = batch.at_candidates(out)
            assert whole.shape == v.shape
            assert torch.equal(batch.candidates_of(whole), out)
            assert torch.equal(whole[rows], out)
            assert whole.count_nonzero() == out.count_nonzero()
        return (out if alone else out[rows]), batch.num_rows, len(rows)


@pytest.fixture
def seen(monkeypatch):
    counts, real = [], ops.paged_hstu_attention

    def spy(q, *rest):
        counts.append(len(q))
        return real(q, *rest)

    monkeypatch.setattr(ops, "paged_hstu_attention", spy)
    return counts


@pytest.mark.parametrize("kind", ["cache", "few pages", "two tiers", "window", "none"])
@pytest.mark.parametrize("context", [0, 2])
def test_candidates_are_those_of_the_whole_layer_bit_by_bit(seen, kind, context):
    config = tiny_config(
        num_pages={"few pages": 12, "two tiers": 40}.get(kind, 200),
        max_attn_len=5 if kind == "window" else 0,
        chunks=30 if kind == "two tiers" else 0,
    )
    make = NoCache if kind == "none" else HierarchicalKVCache
    rng, lengths, skipped, whole = random.Random(context), {}, 0, 0
    with make(config) as cache, make(config) as twin:
        for turn in range(60):
            users = rng.choices(range(6), k=rng.choice([1, 1, 2, 4]))
            requests = []
            for user in users:
                lengths[user] = lengths.get(user, rng.randrange(20)) + rng.choice([0, 0, 1, 7])
                requests.append(Request(user, history_of(user, lengths[user]), rng.choice([0, 1, 3]), context))
            want, rows, chosen = layers(cache, requests, seen, alone=False, context=context)
            got, *_ = layers(twin, requests, seen, alone=True, context=context)
            assert torch.equal(got, want), turn
            skipped += 0 < chosen < rows and seen == [chosen]
            whole += 0 < chosen < rows and seen == [rows]
        if kind == "two tiers":
            assert twin.stats()["onload_tokens"] > 0
        assert (skipped > 15) == (kind != "none")
        assert (whole > 5) == (kind in ("none", "few pages")) or kind == "two tiers"
        if context == 0 and kind in ("cache", "few pages", "two tiers"):
            # What was appended is what the next visit finds: every byte of it is checked.
            for user, length in lengths.items():
                serve(twin, [Request(user, history_of(user, length + 1), 2)])


def test_the_same_checks_as_attend():
    with NoCache(tiny_config()) as cache, cache.batch([1], [5], num_candidates=2) as batch:
        x, y = torch.zeros(7, 2, 4), torch.zeros(7, 2, 6)
        for bad in ((x[:6], x, y), (x, x.double(), y), (x, x, x)):
            with pytest.raises(InputError):
                batch.attend_candidates(0, *bad)
