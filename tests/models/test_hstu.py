import copy

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torchrec import KeyedJaggedTensor

from mtserve_plugin import NoCache
from mtserve_plugin.errors import ConfigError, InputError, OnloadError
from mtserve_plugin.models import HSTURanker, HSTURankerConfig, build_features
from tests.models.reference import Events, features_of, reference_scores, relative_error

LENGTHS = [0, 1, 2, 31, 32, 33, 70]


def make(seed=0, **changes):
    config = HSTURankerConfig.small(**changes)
    return HSTURanker(config, NoCache(config.cache_config()), seed=seed).eval()


def make_rows(model, seed, lengths=LENGTHS, candidates=20):
    events = Events(seed, model.config)
    for user, length in enumerate(lengths):
        events.grow(user, length)
    return [events.row(user, candidates=candidates) for user in range(len(lengths))]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_attn_len": 7},
        {"time_bucket_fn": "log", "num_time_buckets": 9, "max_positions": 20},
        {"num_heads": 1, "qk_dim": 24, "v_dim": 16, "num_layers": 1},
    ],
    ids=["small", "window", "clamped tables", "one head"],
)
def test_forward_equals_the_reference(changes):
    for seed in range(3):
        model = make(seed, **changes)
        rows = make_rows(model, seed)
        assert relative_error(model(features_of(rows)), reference_scores(model, rows)) <= 1e-6


def test_bfloat16_is_near_the_reference():
    model = make(1, dtype="bfloat16")
    rows = make_rows(model, 1)
    scores = model(features_of(rows))
    assert scores.dtype == torch.float32
    assert 1e-5 < relative_error(scores, reference_scores(model, rows)) < 3e-2


def test_a_batch_is_its_rows_in_any_order():
    model = make(2)
    rows = make_rows(model, 2)
    together = model(features_of(rows)).view(len(rows), -1)
    alone = torch.stack([model(features_of([row])) for row in rows])
    assert relative_error(alone, together) <= 1e-6
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = model(features_of([rows[i] for i in order])).view(len(rows), -1)
    assert relative_error(shuffled, together[order]) <= 1e-6


def test_candidates_do_not_see_each_other():
    model = make(3)
    (row,) = make_rows(model, 3, [40], candidates=6)
    scores = model(features_of([row]))
    one_by_one = [model(features_of([row | {"candidate": [c]}])) for c in row["candidate"]]
    assert relative_error(torch.cat(one_by_one), scores) <= 1e-6
    assert scores.unique().numel() == 6
    assert model(features_of([row | {"candidate": []}])).shape == (0,)


def test_an_empty_batch():
    assert make()(features_of([])).shape == (0,)


def test_history_position_and_time_matter():
    model = make(4)
    (row,) = make_rows(model, 4, [40], candidates=20)
    scores = model(features_of([row]))
    without = row | {key: [] for key in ("item", "action", "time")}
    assert relative_error(model(features_of([without])), scores) > 1e-2
    later = row | {"now": row["now"] + 100_000}
    assert relative_error(model(features_of([later])), scores) > 1e-2
    for key in ("item", "action"):
        edited = row | {key: [row[key][0] ^ 1, *row[key][1:]]}
        assert relative_error(model(features_of([edited])), scores) > 1e-5

    shifted = copy.deepcopy(model)
    encode = shifted.encoder.forward
    shifted.encoder.forward = lambda x, positions, gaps: encode(x, positions + 1, gaps)
    assert relative_error(shifted(features_of([row])), scores) > 1e-2


def test_the_seed_decides_the_weights():
    first, again, other = make(5), make(5), make(6)
    for (name, a), b, c in zip(first.state_dict().items(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert not torch.equal(a, c), name
        assert 0.05 < float((a - a.mean()).abs().mean()) < 1 or a.numel() == 1, name


def test_build_features_takes_arrays_of_all_kinds():
    plain = {
        "user": [-5, 2**62],
        "item": [3, 4, 5],
        "action": [0, 1, 2],
        "time": [100, 160, 170],
        "history_lengths": [0, 3],
        "candidate": [7, 8, 9, 10],
        "now": [90, 200],
    }
    expected = build_features(**plain, num_candidates=2)
    assert expected.keys() == ["user", "item", "action", "time", "candidate", "now"]
    assert expected["user"].values().tolist() == plain["user"]
    assert expected["candidate"].lengths().tolist() == [2, 2]
    for convert in (np.array, torch.tensor, lambda v: np.array(v)[::-1][::-1], tuple):
        other = build_features(
            **{name: convert(value) for name, value in plain.items()}, num_candidates=convert([2, 2])
        )
        assert torch.equal(other.values(), expected.values())
        assert torch.equal(other.lengths(), expected.lengths())
    for name, value, named in (
        ("item", [3, 4], "item has 2 values"),
        ("now", [1], "now"),
        ("history_lengths", [-1, 4], "negative"),
        ("time", [1.5, 2.5, 3.5], "time is torch.float"),
        ("candidate", [1], "candidate has 1 values"),
    ):
        with pytest.raises(InputError, match=named):
            build_features(**(plain | {name: value}), num_candidates=2)


def _without(features, key):
    keys = [k for k in features.keys() if k != key]  # noqa: SIM118
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat([features[k].values() for k in keys]),
        lengths=torch.cat([features[k].lengths() for k in keys]),
    )


def _with_lengths(features, key, row, length):
    lengths = features.lengths().clone().view(6, -1)
    lengths[features.keys().index(key), row] = length
    values = torch.zeros(int(lengths.sum()), dtype=torch.int64)
    return KeyedJaggedTensor(keys=features.keys(), values=values, lengths=lengths.view(-1))


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        *[(lambda f, key=key: _without(f, key), f"no key '{key}'") for key in ("user", "time", "candidate", "now")],
        (lambda f: _with_lengths(f, "action", 3, 30), "'action'.*row 3"),
        (lambda f: _with_lengths(f, "time", 2, 4), "'time'.*row 2"),
        (lambda f: _with_lengths(f, "user", 1, 0), "'user'.*row 1"),
        (lambda f: _with_lengths(f, "now", 0, 2), "'now'.*row 0"),
        (lambda f: KeyedJaggedTensor(f.keys(), f.values()[:-1], lengths=f.lengths()), "lengths sum to"),
    ],
)
def test_wrong_features_are_refused_before_the_cache_sees_them(spoil, named):
    model = make()
    features = features_of(make_rows(model, 6))
    with pytest.raises(InputError, match=named):
        model(spoil(features))
    assert model.cache.stats()["requests"] == 0


def test_a_failing_lookup_aborts_the_batch():
    model = make()
    batches = []
    begin = model.cache.begin
    model.cache.begin = lambda *args, **options: batches.append(begin(*args, **options)) or batches[-1]
    (row,) = make_rows(model, 7, [4])
    with pytest.raises(IndexError):
        model(features_of([row | {"candidate": [model.config.num_items]}]))
    assert [batch.is_open for batch in batches] == [False]


def test_training_mode_needs_no_refusal_where_nothing_is_stored():
    model = make()
    features = features_of(make_rows(model, 8))
    expected = model(features)
    assert not expected.requires_grad
    assert torch.equal(model.train()(features), expected)


def test_a_batch_whose_onload_fails_is_scored_uncached():
    model = make()
    features = features_of(make_rows(model, 9))
    expected = model(features)
    batches = []

    class Failing(NoCache):
        def begin(self, *args, **options):
            batch = super().begin(*args, **options)
            attend = batch.attend

            def fail_in_layer_1(layer, q, k, v):
                if layer == 1:
                    raise OnloadError("layer 1 did not arrive")
                return attend(layer, q, k, v)

            batch.attend = fail_in_layer_1
            batches.append(batch)
            return batch

    model.cache = Failing(model.cache.config)
    assert torch.equal(model(features), expected)
    assert [batch.is_open for batch in batches] == [False]


@pytest.mark.parametrize("name", ["num_layers", "qk_dim", "dtype", "attn_norm_len", "max_attn_len", "attn_scale"])
def test_a_cache_of_another_geometry_is_refused_when_it_is_set(name):
    model = make()
    other = {"dtype": "bfloat16", "attn_scale": 0.5}.get(name, 5)
    config = model.config.cache_config().replace(**{name: other})
    with pytest.raises(ConfigError, match="scale" if name == "attn_scale" else name):
        model.cache = NoCache(config)
    with pytest.raises(ConfigError):
        HSTURanker(model.config, NoCache(config))


def test_configurations():
    paper = HSTURankerConfig.paper()
    # 16 KiB of keys and values per token (paper, 1: 1,000 users of 10,000 tokens need 160 GB)
    assert paper.cache_config().token_bytes == 16 * 1024
    assert (paper.num_layers, paper.num_heads, paper.qk_dim, paper.v_dim) == (8, 4, 128, 128)
    assert paper.cache_config(num_pages=7, host_bytes=1 << 30).num_pages == 7
    for bad in ({"num_items": 0}, {"num_heads": 0}, {"dtype": "int8"}, {"time_bucket_fn": "tanh"}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            HSTURankerConfig.small(**bad)


def _profiled(model, features):
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        model(features)
    return {event.key: event.count for event in seen.key_averages()}


def test_the_request_path_has_fbgemm_operators_and_no_loop_over_rows():
    model = make(8)
    few, many = (_profiled(model, features_of(make_rows(model, 10, [3, 5] * n))) for n in (2, 32))
    assert few["fbgemm::permute_1D_sparse_data"] >= 1
    assert few["fbgemm::asynchronous_complete_cumsum"] >= 1
    for name in ("aten::item", "aten::_local_scalar_dense", "aten::select", "aten::addmm"):
        assert few.get(name) == many.get(name), name
    # A few more may come from operators that split large tensors among threads.
    assert sum(many.values()) <= sum(few.values()) + 8


def test_keys_and_values_reach_attention_as_views():
    model = make(9)
    seen = []

    class Watching(NoCache):
        def begin(self, *args, **options):
            batch = super().begin(*args, **options)
            attend = batch.attend
            batch.attend = lambda layer, q, k, v: seen.append((q, k, v)) or attend(layer, q, k, v)
            return batch

    model.cache = Watching(model.cache.config)
    model(features_of(make_rows(model, 11)))
    assert len(seen) == model.config.num_layers
    for q, k, v in seen:
        assert len({x.untyped_storage().data_ptr() for x in (q, k, v)}) == 1
        assert not q.is_contiguous()
        assert q.stride() == k.stride() == v.stride()
