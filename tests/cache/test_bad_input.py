"""Arguments that cannot be: each a clear error that names the argument, and nothing changed."""

import pytest
import torch

from mtserve_plugin import HierarchicalKVCache, NoCache
from mtserve_plugin.errors import CacheError, InputError
from tests.cache.driver import Request, begin, history_of, tiny_config, visit
from tests.cache.scenario import attend_all_layers

K, V = (2, 4), (2, 6)  # heads and dims of tiny_config


@pytest.fixture(params=["hierarchical", "none"])
def cache(request):
    config = tiny_config(chunks=10)
    cache = HierarchicalKVCache(config) if request.param == "hierarchical" else NoCache(config)
    visit(cache, (1, 20), (2, 9))
    cache.flush()
    yield cache
    cache.close()


def call(cache, **changes):
    arguments = {"user_ids": [1, 2], "history_lengths": [3, 4], "num_candidates": 2} | changes
    users, lengths = arguments.pop("user_ids"), arguments.pop("history_lengths")
    return cache.begin(users, lengths, **arguments)


BAD = {
    "more lengths than ids": ({"history_lengths": [3, 4, 5]}, "history_lengths"),
    "fewer lengths": ({"history_lengths": [3]}, "history_lengths"),
    "negative length": ({"history_lengths": [3, -1]}, "history_lengths"),
    "huge length": ({"history_lengths": [3, 2**40]}, "history_lengths"),
    "float lengths": ({"history_lengths": [3.0, 4.0]}, "history_lengths"),
    "float tensor": ({"history_lengths": torch.tensor([3.0, 4.0])}, "history_lengths"),
    "bool lengths": ({"history_lengths": torch.tensor([True, False])}, "history_lengths"),
    "two-dimensional ids": ({"user_ids": torch.tensor([[1], [2]])}, "user_ids"),
    "scalar id": ({"user_ids": torch.tensor(1)}, "user_ids"),
    "float ids": ({"user_ids": torch.tensor([1.0, 2.0])}, "user_ids"),
    "ids beyond 64 bit": ({"user_ids": [1, 2**64]}, "user_ids"),
    "ids that are strings": ({"user_ids": ["a", "b"]}, "user_ids"),
    "no ids": ({"user_ids": None}, "user_ids"),
    "negative candidates": ({"num_candidates": torch.tensor([1, -2])}, "num_candidates"),
    "one negative number": ({"num_candidates": -1}, "num_candidates"),
    "wrong number of candidates": ({"num_candidates": torch.tensor([1])}, "num_candidates"),
    "float candidates": ({"num_candidates": 2.0}, "num_candidates"),
    "negative context": ({"context_tokens": -1}, "context_tokens"),
    "float context": ({"context_tokens": 1.5}, "context_tokens"),
    "huge context": ({"context_tokens": 2**40}, "context_tokens"),
    "too few hashes": ({"token_hashes": torch.zeros(6, dtype=torch.int64)}, "token_hashes"),
    "too many hashes": ({"token_hashes": torch.zeros(8, dtype=torch.int64)}, "token_hashes"),
    "hashes per row": ({"token_hashes": torch.zeros(2, 4, dtype=torch.int64)}, "token_hashes"),
    "float hashes": ({"token_hashes": torch.zeros(7)}, "token_hashes"),
    "wrong number of context keys": ({"context_keys": torch.zeros(3, dtype=torch.int64)}, "context_keys"),
    "float context keys": ({"context_keys": torch.zeros(2)}, "context_keys"),
}


@pytest.mark.parametrize("case", BAD)
def test_begin_refuses(cache, case):
    changes, name = BAD[case]
    call(cache)  # the rest of the call is fine
    before = cache.stats()
    with pytest.raises(InputError, match=name):
        call(cache, **changes)
    if isinstance(cache, HierarchicalKVCache):
        assert cache.stats() == before
        cache.check()
        assert cache.lengths(1)["committed"] == 3 or cache.abort_all() >= 0


def test_narrow_integers_and_views_are_fine(cache):
    wide = torch.arange(20)
    for ids in (torch.tensor([1, 2], dtype=torch.int32), wide[1:3], wide[1:5:2] - torch.tensor([0, 1]), (1, 2)):
        batch = call(cache, user_ids=ids, history_lengths=torch.tensor([20, 9], dtype=torch.int16))
        if isinstance(cache, HierarchicalKVCache):
            assert batch.cached_lengths.tolist() == [20, 9]
        cache.abort(batch)


BAD_TENSORS = {
    "too many heads": ("k", {"k": (5, 3, 4)}),
    "wrong head dim": ("k", {"k": (5, 2, 5)}),
    "v with k's dim": ("v", {"v": (5, 2, 4)}),
    "a row missing": ("v", {"v": (4, 2, 6)}),
    "a row too many": ("k", {"k": (6, 2, 4)}),
    "flat, wrong width": ("k", {"k": (5, 9)}),
    "four dimensions": ("k", {"k": (1, 5, 2, 4)}),
    "q of another shape": ("q", {"q": (5, 2, 6)}),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_attend_and_append_refuse_shapes(cache, case):
    name, shapes = BAD_TENSORS[case]
    batch = cache.begin([7], [4], num_candidates=1)
    good = {"q": (5, *K), "k": (5, *K), "v": (5, *V)}
    q, k, v = (torch.zeros((good | shapes)[n]) for n in "qkv")
    with pytest.raises(InputError, match=rf"^{name} has shape.*expected \[5, 2, "):
        batch.attend(0, q, k, v)
    if name != "q":
        with pytest.raises(InputError, match=rf"^{name} has shape"):
            batch.append(0, k, v)
    # Nothing was appended by the refused calls.
    for layer in range(2):
        batch.attend(layer, *(torch.zeros(good[n]) for n in "qkv"))
    cache.commit(batch)


@pytest.mark.parametrize("name", "qkv")
def test_a_dtype_that_the_cache_does_not_hold(cache, name):
    batch = cache.begin([7], [4], num_candidates=1)
    tensors = {"q": torch.zeros(5, *K), "k": torch.zeros(5, *K), "v": torch.zeros(5, *V)}
    tensors[name] = tensors[name].bfloat16()
    with pytest.raises(InputError, match=rf"^{name} is torch.bfloat16.*float32"):
        batch.attend(0, **tensors)
    cache.abort(batch)


@pytest.mark.parametrize("layer", [-1, 2, 100])
def test_a_layer_that_does_not_exist(cache, layer):
    batch = cache.begin([7], [0], num_candidates=1)
    x, y = torch.zeros(1, *K), torch.zeros(1, *V)
    for use in (lambda: batch.wait(layer), lambda: batch.append(layer, x, y), lambda: batch.attend(layer, x, x, y)):
        with pytest.raises(InputError, match="layer"):
            use()
    cache.abort(batch)


def test_a_layer_appended_twice(cache):
    requests = [Request(7, history_of(7, 5), 1)]
    batch = begin(cache, requests)
    attend_all_layers(cache, batch, requests)
    x, y = torch.zeros(6, *K), torch.zeros(6, *V)
    with pytest.raises(InputError, match="layer=1 was appended before"):
        batch.append(1, x, y)
    with pytest.raises(InputError, match="layer=0 was appended before"):
        batch.attend(0, x, x, y)
    cache.commit(batch)
    # What was appended first stayed.
    visit(cache, (7, 6))


@pytest.mark.parametrize("missing", [0, 1])
def test_commit_without_all_layers(missing):
    with HierarchicalKVCache(tiny_config()) as cache:
        batch = cache.begin([7], [4], num_candidates=1)
        batch.append(1 - missing, torch.zeros(5, *K), torch.zeros(5, *V))
        before = cache.stats()
        with pytest.raises(CacheError, match="layer"):
            cache.commit(batch)
        after = cache.stats()
        assert not batch.is_open
        assert (after["commits"], after["stored_tokens"]) == (before["commits"], before["stored_tokens"])
        assert (after["aborts"], after["pages_free"]) == (before["aborts"] + 1, after["pages_total"])
        assert cache.lengths(7) is None
        with pytest.raises(CacheError, match="layer"), cache.batch([7], [4], num_candidates=1):
            pass


def test_a_batch_that_stores_nothing_needs_no_append(cache):
    with cache.batch([1], [20], num_candidates=1) as batch:
        batch.wait(0)
    assert not batch.is_open


def test_a_batch_is_finished_once(cache):
    requests = [Request(7, history_of(7, 5), 1)]
    with begin(cache, requests) as batch:
        attend_all_layers(cache, batch, requests)
    cache.drain()
    before = cache.stats()
    x, y = torch.zeros(6, *K), torch.zeros(6, *V)
    uses = (
        lambda: cache.commit(batch),
        lambda: batch.wait(0),
        lambda: batch.append(0, x, y),
        lambda: batch.attend(0, x, x, y),
    )
    for use in uses:
        with pytest.raises(CacheError, match="committed or aborted before"):
            use()
    cache.abort(batch)  # safe to call twice
    cache.abort(batch)
    assert cache.stats() == before


def test_a_batch_of_another_cache():
    with HierarchicalKVCache(tiny_config()) as cache, HierarchicalKVCache(tiny_config()) as other:
        requests = [Request(7, history_of(7, 5), 1)]
        batch = begin(other, requests)
        attend_all_layers(other, batch, requests)
        before = cache.stats()
        for use in (cache.commit, cache.abort):
            with pytest.raises(CacheError, match="another cache"):
                use(batch)
        assert batch.is_open
        assert cache.stats() == before
        other.commit(batch)
        assert other.lengths(7)["committed"] == 5
        assert cache.lengths(7) is None


def test_include_delta_needs_room_for_the_delta():
    config = tiny_config(num_pages=3)
    with HierarchicalKVCache(config) as cache:
        requests = [Request(1, history_of(1, 8), 1), Request(2, history_of(2, 8), 1)]
        batch = begin(cache, requests)
        with pytest.raises(InputError, match="include_delta"):
            batch.wait(0, include_delta=True)
        cache.abort(batch)
        with begin(cache, requests[:1]) as batch:
            table = batch.wait(0, include_delta=True)
            assert table.indptr.tolist() == [0, 2]
            assert table.last_page_lens.tolist() == [4]
            assert batch.wait(0).indices.numel() == 0
            attend_all_layers(cache, batch, requests[:1])
    with NoCache(config).batch([1], [8], num_candidates=1) as batch, pytest.raises(InputError, match="include_delta"):
        batch.wait(0, include_delta=True)


@pytest.mark.parametrize("use", ["prefetch", "evict"])
def test_lists_of_users_that_cannot_be(use):
    with HierarchicalKVCache(tiny_config()) as cache:
        visit(cache, (1, 20))
        before = cache.stats()
        for users in ([1.5], torch.zeros(1, 1, dtype=torch.int64), ["x"], [2**64]):
            with pytest.raises(InputError, match="user_ids"):
                getattr(cache, use)(users)
        getattr(cache, use)([])
        getattr(cache, use)([5, 5, -5])
        assert cache.stats() == before
