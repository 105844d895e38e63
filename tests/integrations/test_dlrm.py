"""A whole model attached: streams against a recompute by the host's own attention, and what goes wrong."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torchrec import JaggedTensor

from mtserve_plugin import CacheBatch, NoCache, attach, detach
from mtserve_plugin.errors import AttachError, CacheError, InputError, OnloadError
from tests.integrations.conftest import NORM_LEN
from tests.integrations.streams import features, reference, relative_error, run_stream

STABLE = {"user_feature": "user_id", "positions": "append_stable"}
CONTEXT = ["context", "no context"]

pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor")


@pytest.fixture
def served(make_model, make_cache, make_users):
    """An attached model, one that recomputes another way, and its users; seed and sizes as keywords."""

    def make(seed=0, **sizes):
        model = make_model(seed)
        recomputing = reference(model, NORM_LEN)
        attach(model, make_cache(model, **sizes), version="1", **STABLE)
        return model, recomputing, make_users(model, seed + 1)

    return make


def cache_of(model):
    return vars(model)["_mtserve_state"].options.cache


def hits(model):
    return cache_of(model).stats()["hit_tokens"]


def visit(users, user, grow=0, candidates=7):
    if user not in users.events:
        users.add(user)
    users.grow(user, grow)
    return users.request([user], [candidates])


def agree(model, recomputing, request):
    got, want = model(*request), recomputing(*request)
    assert relative_error(got[0], want[0]) <= 1e-6
    assert relative_error(got[3], want[3]) <= 1e-6
    assert not got[0].requires_grad


@pytest.mark.parametrize(
    ("sizes", "least_hit_ratio"),
    [({}, 0.5), ({"num_pages": 60, "host_bytes": 1 << 20}, 0.4), ({"num_pages": 30}, 0.01)],
    ids=["roomy", "two tiers", "tiny"],
)
@pytest.mark.parametrize("context", [True, False], ids=CONTEXT)
def test_streams(make_model, make_cache, make_users, sizes, least_hit_ratio, context):
    users = make_users(make_model(1), 2)
    model = make_model(1, **({} if context else {"contextual_feature_to_max_length": {}}))
    cache = make_cache(model, **sizes)
    recomputing = reference(model, NORM_LEN)
    attach(model, cache, **STABLE)
    assert run_stream(model, recomputing, users, batches=100, seed=3) <= 1e-6
    stats = cache.stats()
    assert least_hit_ratio <= stats["total_hit_ratio"] <= 1
    assert sizes == {} or stats["device_evicted_pages"] > 0


def test_the_measure_sees_a_wrong_history_and_a_wrong_position(served, make_model):
    model, recomputing, users = served(4)
    visit(users, 7, 40)
    request = visit(users, 7, 2, candidates=20)
    want = recomputing(*request)[0]
    agree(model, recomputing, request)
    users.events[7] = users.events[7][:1]
    without = users.request([7], [20])[0], request[1]
    assert relative_error(recomputing(*without)[0], want) > 1e-2
    shifted = reference(make_model(4), NORM_LEN, shift=1)
    assert relative_error(shifted(*request)[0], want) > 1e-2


def test_attach_keeps_and_detach_restores(make_model, make_cache, make_users):
    model = make_model(5)
    users = make_users(model)
    request = visit(users, 3, 30)
    before = model(*request)[0]
    keys, types = list(model.state_dict()), [type(module) for module in model.modules()]
    shown, attributes = repr(model), [set(vars(module)) for module in model.modules()]
    assert attach(model, make_cache(model), **STABLE) is model
    assert list(model.state_dict()) == keys
    assert repr(model) == shown
    assert all(isinstance(module, kind) for module, kind in zip(model.modules(), types, strict=True))
    assert [type(module) for module in model.modules()] != types
    assert relative_error(model(*request)[0], before) > 1e-4
    with pytest.raises(AttachError, match="detach it first"):
        attach(model, make_cache(model), **STABLE)
    assert detach(model) is model
    assert [type(module) for module in model.modules()] == types
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert torch.equal(model(*request)[0], before)
    with pytest.raises(AttachError, match="no cache is attached"):
        detach(model)


def test_recompute_through_the_same_code(make_model, make_users, make_cache):
    model = make_model(6)
    recomputing = reference(model, NORM_LEN)
    attach(model, NoCache(make_cache(model).config), **STABLE)
    users = make_users(model, 7)
    assert run_stream(model, recomputing, users, batches=15, seed=8) <= 1e-6


@pytest.mark.parametrize("failing", [0, 2])
def test_a_batch_whose_keys_do_not_arrive_runs_again_uncached(served, monkeypatch, failing):
    model, recomputing, users = served(9)
    agree(model, recomputing, visit(users, 1, 30))
    request = visit(users, 1, 3)
    wait = CacheBatch.wait
    failed = []

    def broken(batch, layer, **options):
        if layer == failing and bool(batch.cached_lengths.any()):
            failed.append(layer)
            raise OnloadError("planted")
        return wait(batch, layer, **options)

    with monkeypatch.context() as patch:
        patch.setattr(CacheBatch, "wait", broken)
        agree(model, recomputing, request)
    assert failed == [failing]
    assert cache_of(model).lengths(1, version="1")["committed"] == 30 + 3
    agree(model, recomputing, request)


def test_a_failure_publishes_nothing(served):
    model, recomputing, users = served(10)
    agree(model, recomputing, visit(users, 1, 30))
    stored = cache_of(model).lengths(1, version="1")
    request = visit(users, 1, 9)

    def fail(*_):
        raise RuntimeError("out of memory")

    last = model._hstu_transducer._stu_module._stu_layers[2]
    with last.register_forward_hook(fail), pytest.raises(RuntimeError, match="out of memory"):
        model(*request)
    # In the lookup, before the layers.
    wrong = request[1].keys(), request[1].values() + 1000, request[1].lengths()
    from torchrec import KeyedJaggedTensor

    with pytest.raises(IndexError):
        model(request[0], KeyedJaggedTensor(keys=wrong[0], values=wrong[1], lengths=wrong[2], stride=1))
    assert cache_of(model).lengths(1, version="1") == stored
    assert cache_of(model).stats()["open_batches"] == 0
    agree(model, recomputing, request)


def test_every_history_feature_is_checked(served):
    model, recomputing, users = served(11)
    for name in users.history:
        user = len(users.events) + 1
        agree(model, recomputing, visit(users, user, 30))
        before = hits(model)
        users.edit(user, 9, name)
        agree(model, recomputing, visit(users, user))
        # Three context rows and nine events before the edit fill three pages.
        assert hits(model) - before == 9, name


def test_without_the_content_check_an_edit_goes_unseen(make_model, make_cache, make_users):
    model = make_model(12)
    recomputing = reference(model, NORM_LEN)
    attach(model, make_cache(model), content_check=False, **STABLE)
    users = make_users(model, 13)
    agree(model, recomputing, visit(users, 1, 30))
    users.edit(1, 9)
    request = visit(users, 1)
    assert relative_error(model(*request)[0], recomputing(*request)[0]) > 1e-5


def test_context_values_belong_to_the_identity(served):
    model, recomputing, users = served(14)
    agree(model, recomputing, visit(users, 1, 30))
    for change in ([3, 5], [5, 3], [3], [], [0]):
        users.context[1]["cities"] = change
        before = hits(model)
        agree(model, recomputing, visit(users, 1))
        assert hits(model) == before
        agree(model, recomputing, visit(users, 1))
        assert hits(model) == before + 30


def test_the_minimum_history_of_context_features_counts_candidates(served):
    model, recomputing, users = served(15)
    # 20 is the minimum for "user_id": histories of 12 to 21 with 7 candidates or 1 stand on either side.
    met = None
    visit(users, 1, 11)
    for step in range(10):
        count = 7 if step % 2 else 1
        request = visit(users, 1, 1, candidates=count)
        before = hits(model)
        agree(model, recomputing, request)
        now = 12 + step + count >= 20
        assert (hits(model) > before) == (now == met)
        met = now


def test_weights_changed_in_place_are_noticed(served, make_model):
    model, recomputing, users = served(16)
    agree(model, recomputing, visit(users, 1, 30))
    before = hits(model)
    other = make_model(99)
    model.load_state_dict(other.state_dict())
    recomputing = reference(other, NORM_LEN)
    agree(model, recomputing, visit(users, 1))
    assert hits(model) == before
    agree(model, recomputing, visit(users, 1, 1))
    assert hits(model) == before + 30
    # One number, in a table, by another tensor on the same memory, and by other parameters.
    table = model._embedding_collection.embeddings["item"]
    layer = model._hstu_transducer._stu_module._stu_layers[1]
    event = users.events[1][0]["item_id"]

    def replace():
        layer._uvqk_weight = torch.nn.Parameter(layer._uvqk_weight.detach() * 1.5)

    def swap():
        layer._uvqk_beta.data = layer._uvqk_beta.detach() + 0.5

    with torch.no_grad():
        changes = [lambda: table.weight[event].add_(1), replace, swap]
        for change in changes:
            before = hits(model)
            change()
            recomputing.load_state_dict(model.state_dict())
            agree(model, recomputing, visit(users, 1))
            assert hits(model) == before


def test_a_batch_across_a_change_of_weights_is_not_published(served):
    model, recomputing, users = served(17)
    layers = model._hstu_transducer._stu_module._stu_layers

    def change(*_):
        with torch.no_grad():
            layers[0]._uvqk_weight.mul_(1.25)

    with layers[1].register_forward_hook(change):
        model(*visit(users, 1, 30))
    assert cache_of(model).stats()["entries"] == 0
    recomputing.load_state_dict(model.state_dict())
    agree(model, recomputing, visit(users, 1))
    assert hits(model) == 0


def test_a_version_names_one_set_of_weights(make_model, make_cache, make_users):
    one, same, other = make_model(18), make_model(18), make_model(19)
    cache = make_cache(one)
    attach(one, cache, version="a", **STABLE)
    attach(same, cache, version="a", **STABLE)
    approximate = {"user_feature": "user_id", "approximate": {"positions"}}
    for model, options in ((other, STABLE), (make_model(18), approximate)):
        with pytest.raises(AttachError, match="other weights, or other positions, were attached") as error:
            attach(model, cache, version="a", **options)
        assert error.value.factors == ("version",)
    attach(other, cache, version="b", **STABLE)
    users = make_users(one)
    request = visit(users, 1, 30)
    one(*request)
    same(*request)
    assert hits(one) == 30
    other(*request)
    assert hits(one) == 30


def test_a_made_up_version_is_shared_with_nobody(make_model, make_cache, make_users):
    one, other = make_model(20), make_model(21)
    cache = make_cache(one)
    request = visit(make_users(one), 1, 30)
    for model in (one, other):
        attach(model, cache, **STABLE)(*request)
    assert cache.stats()["hit_tokens"] == 0


def test_copies_share_the_cache_until_their_weights_differ(served, make_model):
    model, recomputing, users = served(22)
    twin = copy.deepcopy(model)
    request = visit(users, 1, 30)
    agree(model, recomputing, request)
    agree(twin, recomputing, request)
    assert hits(model) == 30
    third = copy.deepcopy(model)
    other = make_model(23)
    third.load_state_dict(other.state_dict())
    agree(third, reference(other, NORM_LEN), request)
    assert hits(model) == 30
    agree(model, recomputing, request)
    assert hits(model) == 60
    detach(third)
    detach(twin)
    agree(model, recomputing, request)
    with pytest.raises(pickle.PicklingError, match="detach before pickling"):
        pickle.dumps(model)


def test_training_mode_is_refused_at_attach_and_later(make_model, make_cache, make_users):
    model = make_model(24)
    cache = make_cache(model)
    for train in (model, model._hstu_transducer, model._hstu_transducer._stu_module._stu_layers[1]):
        train.train()
        with pytest.raises(AttachError, match="training mode") as error:
            attach(model, cache, **STABLE)
        assert error.value.factors == ("training",)
        model.eval()
    attach(model, cache, **STABLE)
    request = visit(make_users(model), 1, 30)
    for train in (model, model._hstu_transducer, model._hstu_transducer._stu_module._stu_layers[1]):
        train.train()
        with pytest.raises(CacheError, match=r"model\.eval"):
            model(*request)
        model.eval()
    assert cache.stats()["entries"] == 0
    model(*request)


def test_bfloat16_against_its_own_cold_path(make_model, make_cache, make_users):
    model = make_model(25).bfloat16()
    # Tables answer in float32 whatever their dtype; the host casts on the way to its dense half.
    for one in model._embedding_collection.embeddings.values():
        one.float()
    model._embedding_collection.register_forward_hook(
        lambda module, arguments, found: {
            name: JaggedTensor(values=one.values().bfloat16(), lengths=one.lengths()) for name, one in found.items()
        }
    )
    cold = copy.deepcopy(model)
    cache = make_cache(model, page_size=8)
    assert cache.config.dtype == "bfloat16"
    attach(model, cache, **STABLE)
    attach(cold, NoCache(cache.config), **STABLE)
    users = make_users(model, 26)
    assert run_stream(model, cold, users, batches=60, seed=27) <= 2e-2
    assert hits(model) > 0


def test_threads_do_not_see_each_others_batches(served):
    model, recomputing, users = served(28)
    requests = [[visit(users, user, 7) for _ in range(6)] for user in range(1, 5)]
    wanted = [[recomputing(*request)[0] for request in one] for one in requests]
    errors = []

    def work(index):
        for request, want in zip(requests[index], wanted[index], strict=True):
            errors.append(relative_error(model(*request)[0], want))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 24
    assert max(errors) <= 1e-6
    assert hits(model) > 0


def test_under_inference_mode_and_without(served):
    model, recomputing, users = served(34)
    for step in range(4):
        request = visit(users, 1, 9)
        with torch.inference_mode(step % 2 == 0):
            agree(model, recomputing, request)
    # Between the first two visits a context feature's minimum is reached.
    assert hits(model) == 18 + 27


def test_detach_waits_for_no_batch(served):
    model, recomputing, users = served(29)

    def midway(*_):
        with pytest.raises(CacheError, match="in flight"):
            detach(model)

    request = visit(users, 1, 20)
    with model._hstu_transducer.register_forward_hook(midway):
        agree(model, recomputing, request)
    detach(model)


def test_parts_outside_of_a_batch_say_so(served):
    model, _, users = served(30)
    request = visit(users, 1, 20)
    values = model.preprocess(*request)
    assert int(values[3]) == 20
    names = ("seq_embeddings", "payload_features", "max_uih_len", "uih_seq_lengths")
    names += ("max_num_candidates", "num_candidates")
    with pytest.raises(CacheError, match="outside of a batch"):
        model.main_forward(**dict(zip(names, values, strict=True)))


def test_bad_features_are_named(served):
    model, _, users = served(31)
    uih, candidates = visit(users, 1, 5)
    columns = {name: [uih[name].values().tolist()] for name in list(uih.keys())}
    with pytest.raises(InputError, match=r"'user_id'\] has 2 values"):
        model(features(columns | {"user_id": [[1, 2]]}, 1), candidates)
    with pytest.raises(InputError, match="rating"):
        model(features(columns | {"rating": [[1, 2]]}, 1), candidates)
    with pytest.raises(InputError, match="no key 'rating'"):
        model(features({key: value for key, value in columns.items() if key != "rating"}, 1), candidates)
    assert cache_of(model).stats()["open_batches"] == 0


def test_the_host_s_encoder_as_an_accepted_approximation(make_model, make_cache, make_users):
    model = make_model(32)
    cold = copy.deepcopy(model)
    cache = make_cache(model)
    options = {"user_feature": "user_id", "approximate": {"positions"}}
    attach(model, cache, **options)
    attach(cold, NoCache(cache.config), **options)
    users = make_users(model, 33)
    request = visit(users, 1, 30)
    model(*request)
    # At the same time and without new events nothing is stale.
    assert relative_error(model(*request)[0], cold(*request)[0]) <= 1e-6
    assert hits(model) == 30
    request = visit(users, 1, 3)
    assert 1e-5 < relative_error(model(*request)[0], cold(*request)[0]) < 0.5
