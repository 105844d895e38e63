import copy
import doctest
import importlib
import math
import random

import pytest
import torch

from mtserve_plugin import CacheError, ConfigError, HierarchicalKVCache, NoCache
from mtserve_plugin.models import HSTURankerConfig
from mtserve_plugin.models.sasrec import SASRec, SASRecConfig
from mtserve_plugin.models.softmax import SoftmaxAttention
from mtserve_plugin.stability.demo import FromEndSASRec
from tests.models.reference import Events, features_of, relative_error

PAGE, CHUNK = 4, 16
MIB = 1 << 20


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make():
    """Builds a model on a small cache, and a copy of it that recomputes; closes and checks the cache at the end."""
    caches = []

    def build(seed=0, *, kind=SASRec, num_pages=200, onload_pages=40, host_bytes=MIB, content_check=True, **changes):
        config = SASRecConfig.small(**changes)
        sizes = {"num_pages": num_pages, "onload_pages": onload_pages, "host_bytes": host_bytes}
        cache = HierarchicalKVCache(config.cache_config(page_size=PAGE, chunk_size=CHUNK, **sizes))
        # Whatever is read without having been written shows.
        cache.table.fill_(float("nan"))
        caches.append(cache)
        cached = kind(config, cache, seed=seed, content_check=content_check).eval()
        recomputing = copy.deepcopy(cached)
        recomputing.cache = NoCache(config.cache_config())
        return cached, recomputing

    yield build
    for cache in caches:
        cache.flush()
        cache.check()
        cache.close()


def new_events(seed):
    return Events(seed, HSTURankerConfig.small())


def compare(cached, recomputing, rows):
    features = features_of(rows)
    assert relative_error(cached(features), recomputing(features)) <= 1e-6


def reference_scores(model, rows):
    """Scores in float64, one user and one head at a time, from the weights and nothing else."""
    w = {name: weight.double() for name, weight in model.state_dict().items()}
    items, config = w["embeddings.embeddings.item.weight"], model.config

    def norm(x, name):
        return torch.nn.functional.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    scores = []
    for row in rows:
        n, dim = len(row["item"]), config.embedding_dim
        if n == 0:
            scores.append(torch.zeros(len(row["candidate"]), dtype=torch.float64))
            continue
        x = items[row["item"]] * math.sqrt(dim)
        x = x + w["positions"][[min(i, config.max_positions - 1) for i in range(n)]]
        for index in range(config.num_layers):
            name, head = f"layers.{index}", dim // config.num_heads
            q, k, v = linear(norm(x, f"{name}.attention_norm"), f"{name}.qkv").split(dim, 1)
            out = []
            for h in range(config.num_heads):
                part = slice(h * head, (h + 1) * head)
                logits = q[:, part] @ k[:, part].T / math.sqrt(head)
                logits = logits.masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
                out.append(logits.softmax(1) @ v[:, part])
            x = x + linear(torch.cat(out, 1), f"{name}.attention_out")
            hidden = linear(norm(x, f"{name}.ffn_norm"), f"{name}.ffn_in").relu()
            x = x + linear(hidden, f"{name}.ffn_out")
        scores.append(items[row["candidate"]] @ norm(x, "norm")[-1])
    return torch.cat(scores)


def test_the_textbook_model(make):
    _, model = make(1, max_positions=20)
    events = new_events(2)
    for user, length in enumerate([0, 1, 2, 19, 33]):
        events.grow(user, length)
    rows = [events.row(user, candidates=user + 1) for user in range(5)]
    got = model(features_of(rows))
    assert got[0] == 0
    assert relative_error(got, reference_scores(model, rows)) <= 1e-6


@pytest.mark.parametrize(
    ("sizes", "least_hit_ratio"),
    [
        ({}, 0.5),
        ({"num_pages": 60, "onload_pages": 30}, 0.3),
        ({"num_pages": 60, "onload_pages": 0, "host_bytes": 0}, 0.05),
        ({"num_pages": 9, "onload_pages": 3}, 0.0),
        ({"max_positions": 10}, 0.5),
    ],
    ids=["roomy", "two tiers", "device only", "tiny", "few positions"],
)
def test_streams_of_growing_histories(make, sizes, least_hit_ratio):
    cached, recomputing = make(3, **sizes)
    events, rng = new_events(4), random.Random(5)
    users = [rng.randint(-(2**63), 2**63 - 1) for _ in range(8)]
    scores = []
    for step in range(40):
        # With repetition: the same user may stand twice in a batch, once with a shorter history.
        batch = rng.choices(users, k=rng.randint(1, 5))
        for user in set(batch):
            events.grow(user, rng.choice([0, 0, 1, 3, PAGE, CHUNK]))
        rows = [events.row(user, candidates=rng.randint(0, 4)) for user in batch]
        if step % 7 == 0 and len(batch) > 1:
            rows.append(events.row(batch[0], length=len(rows[0]["item"]) // 2))
        if step % 11 == 5:
            cached.cache.evict([rng.choice(users)])
        features = features_of(rows)
        scores.append((cached(features), recomputing(features)))
    got, want = (torch.cat(side) for side in zip(*scores, strict=True))
    assert relative_error(got, want) <= 1e-6
    # Both agree, and at the end of the stream they are right.
    rows = [events.row(user) for user in users]
    assert relative_error(cached(features_of(rows)), reference_scores(recomputing, rows)) <= 1e-6
    assert least_hit_ratio <= cached.cache.stats()["total_hit_ratio"] <= 1


@pytest.mark.parametrize("length", [0, 1, 2, PAGE, PAGE + 1, CHUNK + 1, 3 * CHUNK])
def test_a_second_visit_without_new_events(make, length):
    cached, recomputing = make(6)
    events = new_events(7)
    events.grow(1, length)
    compare(cached, recomputing, [events.row(1), grown(events, 9)])
    before = cached.cache.stats()["hit_tokens"]
    features = features_of([events.row(1), grown(events, 8)])
    assert relative_error(cached(features), recomputing(features)) <= 1e-6
    assert cached.cache.stats()["hit_tokens"] - before == max(length - 1, 0)


def grown(events, user):
    events.grow(user, 5)
    return events.row(user)


def test_scores_do_come_from_the_pages(make):
    cached, recomputing = make(8, host_bytes=0, onload_pages=0)
    events = new_events(9)
    events.grow(1, 3 * PAGE)
    row = events.row(1)
    compare(cached, recomputing, [row])
    cached.cache.table.nan_to_num_(0.0).mul_(-1.0)
    assert relative_error(cached(features_of([row])), recomputing(features_of([row]))) > 1e-2


def test_positions_from_the_end_are_seen_by_this_comparison(make):
    cached, recomputing = make(10, kind=FromEndSASRec)
    events = new_events(11)
    events.grow(1, 30)
    compare(cached, recomputing, [events.row(1)])
    events.grow(1, 5)
    features = features_of([events.row(1)])
    assert relative_error(cached(features), recomputing(features)) > 1e-2


def test_an_edited_item_is_found_out_and_an_edited_action_does_not_matter(make):
    cached, recomputing = make(12)
    events = new_events(13)
    events.grow(1, 40)
    compare(cached, recomputing, [events.row(1)])
    events.action[1][10] ^= 1
    compare(cached, recomputing, [events.row(1)])
    assert cached.cache.stats()["hit_tokens"] == 39
    events.item[1][10] ^= 1
    compare(cached, recomputing, [events.row(1)])
    assert cached.cache.stats()["hit_tokens"] == 39 + 10 // PAGE * PAGE


def test_a_poisoned_neighbour_stays_alone(make):
    _, model = make(14)
    events = new_events(15)
    # The shorter row is padded to the poisoned one's length.
    events.grow(1, 9)
    events.grow(2, 3)
    rows = [events.row(1) | {"item": [999] * 9}, events.row(2)]
    rows[1]["item"] = [item % 999 for item in rows[1]["item"]]
    rows[1]["candidate"] = [item % 999 for item in rows[1]["candidate"]]
    with torch.no_grad():
        model.embeddings.embeddings["item"].weight[999] = float("inf")
    scores = model(features_of(rows))
    assert not scores[:20].isfinite().any()
    assert scores[20:].isfinite().all()


def test_many_candidates_per_row_in_one_attention():
    """The attention by itself, with several candidates, against one mask per row."""
    config = SASRecConfig.small(num_layers=1).cache_config(page_size=PAGE, chunk_size=CHUNK, num_pages=100)
    generator = torch.Generator().manual_seed(16)
    with HierarchicalKVCache(config) as cache:
        cache.table.fill_(float("nan"))
        kept = {user: torch.randn(2, 40, 2, 16, generator=generator) for user in range(4)}
        lengths = torch.tensor([0, 5, 8, 17])
        for grow in (0, 3):
            now = lengths + torch.tensor([0, grow, 0, grow])
            counts = torch.tensor([2, 0, 3, 1])
            with cache.batch([0, 1, 2, 3], now, num_candidates=counts) as batch:
                assert grow == 0 or batch.cached_lengths.equal(lengths)
                extra = torch.randn(3, batch.num_rows, 2, 16, generator=generator)
                q, k, v = extra
                want = torch.empty_like(v)
                for user, (start, end) in enumerate(zip(batch.offsets[:-1], batch.offsets[1:], strict=True)):
                    n, c = int(now[user]), int(batch.cached_lengths[user])
                    k[start : start + n - c], v[start : start + n - c] = kept[user][:, c:n]
                    for t in range(int(start), int(end)):
                        i = c + t - int(start)
                        keys, values = kept[user][:, : min(i + 1, n)]
                        if i >= n:
                            keys, values = torch.cat((keys, k[t : t + 1])), torch.cat((values, v[t : t + 1]))
                        weights = (torch.einsum("hd,mhd->hm", q[t], keys) / 4).softmax(1)
                        want[t] = torch.einsum("hm,mhd->hd", weights, values)
                got = SoftmaxAttention(batch, config.scale).attend(0, q, k, v)
            assert relative_error(got, want) <= 1e-6


def test_what_is_refused(make):
    cached, _ = make(17)
    events = new_events(18)
    events.grow(1, 4)
    cached.train()
    with pytest.raises(CacheError, match="training mode"):
        cached(features_of([events.row(1)]))
    with pytest.raises(ConfigError, match="num_layers"):
        cached.cache = NoCache(SASRecConfig.small(num_layers=2).cache_config())
    with pytest.raises(ConfigError, match="multiple of num_heads"):
        SASRecConfig.small(num_heads=3)


def test_examples_run():
    module = importlib.import_module("mtserve_plugin.models.sasrec")
    result = doctest.testmod(module, extraglobs={"torch": torch} | vars(module))
    assert result.attempted > 0
    assert result.failed == 0
