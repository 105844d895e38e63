"""A transducer or a stack attached alone: users and lengths come from the enclosing batch."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from mtserve_plugin import NoCache, attach, detach
from mtserve_plugin.batch import entered_batch
from mtserve_plugin.errors import AttachError, CacheError, InputError
from mtserve_plugin.integrations.generative_recommenders.features import read_spec
from tests.doubles.jagged_tensors import complete_cumsum, rows_and_positions
from tests.integrations.conftest import NORM_LEN
from tests.integrations.streams import reference, relative_error, run_stream
from tests.integrations.test_split import NAMES


class ByHand(torch.nn.Module):
    """A model whose owner talks to the cache; only its transducer is attached."""

    def __init__(self, model, cache, version=""):
        super().__init__()
        self.model, self.cache, self.version = model, cache, version
        self.tells_boundary = True
        self.spec = read_spec(model._hstu_configs, "user_id")

    def forward(self, uih, candidates):
        request = self.spec.read(uih, candidates, content_check=True)
        with self.cache.batch(
            request.users,
            request.history_lengths,
            num_candidates=request.candidates,
            context_tokens=3,
            token_hashes=request.token_hashes,
            context_keys=request.context_keys,
            version=self.version,
        ) as batch:
            stripped, boundary = batch.strip(uih, self.spec.history)
            values = self.model.preprocess(stripped, candidates)
            if self.tells_boundary:
                values[1]["mtserve_boundary"] = boundary["action_timestamp"]
            return self.model.main_forward(**dict(zip(NAMES, values, strict=True)))


def visit(users, user, grow=0):
    if user not in users.events:
        users.add(user)
    users.grow(user, grow)
    return users.request([user], [7])


def test_transducer(make_model, make_cache, make_users):
    model = make_model(1)
    recomputing = reference(model, NORM_LEN)
    cache = make_cache(model._hstu_transducer, num_pages=100, host_bytes=1 << 20)
    attach(model._hstu_transducer, cache, positions="append_stable")
    assert run_stream(ByHand(model, cache), recomputing, make_users(model, 2), batches=60, seed=3) <= 1e-6
    assert cache.stats()["total_hit_ratio"] > 0.4
    detach(model._hstu_transducer)


def test_transducer_needs_its_batch(make_model, make_cache, make_users):
    model = make_model(4)
    transducer = model._hstu_transducer
    cache = make_cache(transducer)
    attach(transducer, cache, positions="append_stable")
    users = make_users(model, 5)
    request = visit(users, 1, 20)
    hand = ByHand(model, cache)
    hand(*request)
    with pytest.raises(CacheError, match=r"with cache\.batch"):
        model(*request)
    other = ByHand(model, make_cache(transducer))
    with pytest.raises(CacheError, match="another cache"):
        other(*request)
    with torch.no_grad(), NoCache(cache.config).batch([1], [20], num_candidates=7, context_tokens=3):
        model(*request)
    with pytest.raises(InputError, match="context_tokens=3"), cache.batch([9], [23], num_candidates=7):
        model(*request)
    with (
        pytest.raises(InputError, match=r"20 rows|30 rows"),
        cache.batch([9], [19], num_candidates=7, context_tokens=3),
    ):
        model(*request)
    hand.tells_boundary = False
    with pytest.raises(InputError, match="mtserve_boundary"):
        hand(*request)
    with torch.no_grad():
        transducer._stu_module._stu_layers[0]._uvqk_weight.mul_(2)
    with pytest.raises(CacheError, match="changed in place"):
        hand(*request)
    assert entered_batch() is None


def test_options_that_belong_to_a_whole_model(make_model, make_cache):
    model = make_model(6)
    cache = make_cache(model)
    with pytest.raises(AttachError, match="sparse="):
        attach(model._hstu_transducer, cache, positions="append_stable", sparse=model)


@pytest.mark.parametrize("context", [0, 2])
@pytest.mark.parametrize("dropped_by", ["caller", "stack"])
def test_stack(make_model, make_cache, context, dropped_by):
    stack = make_model(7)._hstu_transducer._stu_module
    recompute = copy.deepcopy(stack)
    cache = make_cache(stack, num_pages=60)
    attach(stack, cache)
    draw, rows = random.Random(8), {}
    torch.manual_seed(9)
    got, want = [], []
    for _ in range(40):
        users = draw.choices(range(6), k=draw.randint(1, 4))
        for user in users:
            old = rows.get(user, torch.randn(context, 24))
            rows[user] = torch.cat((old, torch.randn(draw.choice([0, 1, 5]), 24)))
        candidates = torch.tensor([draw.choice([0, 1, 3]) for _ in users])
        new = [torch.randn(int(count), 24) for count in candidates]
        full = torch.cat([torch.cat((rows[user], one)) for user, one in zip(users, new, strict=True)])
        lengths = torch.tensor([len(rows[user]) for user in users]) + candidates
        offsets = complete_cumsum(lengths)
        row, place = rows_and_positions(offsets)
        shared = {"max_seq_len": NORM_LEN, "num_targets": candidates}
        with torch.no_grad():
            reference_out = recompute(x=full, x_lengths=lengths, x_offsets=offsets, **shared)
        histories = lengths - candidates - context
        with cache.batch(users, histories, num_candidates=candidates, context_tokens=context) as batch:
            cached = batch.cached_lengths[row]
            there = (place >= context + cached) | (place < context)
            if dropped_by == "caller":
                there &= (cached == 0) | (place >= context)
            kept = full[there]
            # Offsets and lengths of the host are those of stripped rows; the batch knows them itself.
            out = stack(x=kept, x_lengths=lengths, x_offsets=offsets, **shared)
        assert out.shape == kept.shape
        is_candidate = place >= (context + histories)[row]
        got.append(out[is_candidate[there]])
        want.append(reference_out[is_candidate])
        if dropped_by == "stack":
            assert not out[(place < context)[there] & (cached[there] > 0)].any()
    assert relative_error(torch.cat(got), torch.cat(want)) <= 1e-6
    assert cache.stats()["total_hit_ratio"] > 0.3


def test_stack_refuses_another_batch_s_rows(make_model, make_cache):
    stack = make_model(10)._hstu_transducer._stu_module
    cache = make_cache(stack)
    attach(stack, cache)

    def run(rows, targets):
        return stack(
            x=torch.randn(rows, 24),
            x_lengths=torch.tensor([rows]),
            x_offsets=torch.tensor([0, rows]),
            max_seq_len=rows,
            num_targets=torch.tensor([targets]),
        )

    with pytest.raises(InputError, match="x has 12 rows"), cache.batch([1], [9], num_candidates=2):
        run(12, 2)
    with pytest.raises(InputError, match=r"num_targets\[0\] is 3"), cache.batch([1], [9], num_candidates=2):
        run(11, 3)
    with cache.batch([1], [9], num_candidates=2):
        assert run(11, 2).shape == (11, 24)
    assert cache.lengths(1)["committed"] == 9
