"""The workbench changes where projections lie and nothing else; `mtserve plan` counts what it takes."""

import copy
import itertools
import random
import threading

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from mtserve_plugin import HierarchicalKVCache, NoCache
from mtserve_plugin.errors import ConfigError, OnloadError
from mtserve_plugin.models import HSTURanker, HSTURankerConfig
from mtserve_plugin.plan.memory import Geometry, divide
from mtserve_plugin.replay.options import ModelShape
from tests.models.reference import Events, features_of

MIB = 1 << 20


def make(tokens, seed=0, **changes):
    config = HSTURankerConfig.small(**changes)
    return HSTURanker(config, NoCache(config.cache_config()), seed=seed, workbench_tokens=tokens).eval()


def requests(config, seed, count, lengths=(40,)):
    """Features of one row each, of users of their own."""
    events = Events(seed, config)
    for user in range(count):
        events.grow(user, lengths[user % len(lengths)])
    return [features_of([events.row(user, candidates=5)]) for user in range(count)]


def poison(model):
    model.workbench._buffer.fill_(float("nan"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [4000, 30], ids=["roomy", "too small for some"])
def test_a_stream_with_and_without_are_equal_bit_by_bit(dtype, tokens):
    config = HSTURankerConfig.small(dtype=dtype)
    sizes = {"num_pages": 60, "page_size": 8, "chunk_size": 32, "host_bytes": MIB}
    with (
        HierarchicalKVCache(config.cache_config(**sizes)) as first,
        HierarchicalKVCache(config.cache_config(**sizes)) as second,
    ):
        on = HSTURanker(config, first, seed=1, workbench_tokens=tokens).eval()
        off = HSTURanker(config, second, seed=1, workbench_tokens=0).eval()
        events, rng, kept = Events(2, config), random.Random(3), []
        for _ in range(30):
            users = rng.sample(range(8), rng.randint(1, 4))
            for user in users:
                events.grow(user, rng.choice([0, 1, 3, 20]))
            features = features_of([events.row(user, candidates=rng.randint(1, 4)) for user in users])
            poison(on)
            got, want = on(features), off(features)
            poison(on)
            kept.append((got, want))
        # Only now, so that scores that lie in the workbench are overwritten.
        assert all(torch.equal(got, want) for got, want in kept)
        assert first.stats()["hit_tokens"] == second.stats()["hit_tokens"] > 0
        assert (off.workbench.lent, off.workbench.fallbacks, off.workbench.bytes) == (0, 30, 0)
        assert on.workbench.lent + on.workbench.fallbacks == 30
        assert (on.workbench.fallbacks == 0) == (tokens == 4000)
        assert on.workbench.lent > 0


def test_as_many_rows_as_it_has_and_one_more():
    model, plain = make(45), make(0)
    fits, exceeds = requests(model.config, 1, 2, (40, 41))  # and five candidates
    assert torch.equal(model(fits), plain(fits))
    assert (model.workbench.lent, model.workbench.fallbacks) == (1, 0)
    assert torch.equal(model(exceeds), plain(exceeds))
    assert (model.workbench.lent, model.workbench.fallbacks) == (1, 1)
    with pytest.raises(ConfigError, match="workbench_tokens=-1"):
        make(-1)


def test_all_layers_project_into_it_and_allocate_no_other():
    model = make(100)
    (features,) = requests(model.config, 2, 1)
    seen = []
    for layer in model.layers:
        layer.project = lambda x, out, project=layer.project: seen.append(project(x, out=out)) or seen[-1]
    model(features)
    begin = model.workbench._buffer.data_ptr()
    assert {part.untyped_storage().data_ptr() for parts in seen for part in parts} == {begin}
    assert len(seen) == model.config.num_layers


def test_batches_that_meet_inside_the_layers_do_not_share_it():
    model, plain = make(100), make(0)
    first, second = requests(model.config, 3, 2)
    want = [plain(first), plain(second)]
    inner, got = model.layers[0].output, []

    def interrupted(*args, **named):
        model.layers[0].output = inner
        thread = threading.Thread(target=lambda: got.append(model(second)))
        thread.start()
        thread.join()
        return inner(*args, **named)

    model.layers[0].output = interrupted
    got.append(model(first))
    assert torch.equal(got[1], want[0])
    assert torch.equal(got[0], want[1])
    assert (model.workbench.lent, model.workbench.fallbacks) == (1, 1)


def test_threads():
    model, plain = make(100), make(0)
    batches = requests(model.config, 4, 12, (10, 25, 60))
    want = [plain(features) for features in batches]
    wrong = []

    def serve(part):
        for number in itertools.chain(*[part] * 8):
            if not torch.equal(model(batches[number]), want[number]):
                wrong.append(number)

    threads = [threading.Thread(target=serve, args=(range(at, 12, 3),)) for at in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert model.workbench.lent + model.workbench.fallbacks == 96


def test_a_batch_that_fails_gives_it_back():
    model, plain = make(100), make(0)
    (features,) = requests(model.config, 5, 1)

    class Failing(NoCache):
        def begin(self, *args, **options):
            batch = super().begin(*args, **options)
            attend = batch.attend

            def failing(layer, *qkv):
                if layer == 1:
                    raise OnloadError
                return attend(layer, *qkv)

            batch.attend = failing
            return batch

    model.cache = Failing(model.cache.config)
    assert torch.equal(model(features), plain(features))
    assert (model.workbench.lent, model.workbench.fallbacks) == (2, 0)


def test_it_follows_the_model():
    model, plain = make(100), make(0)
    (features,) = requests(model.config, 6, 1)
    want = plain(features)
    twin = copy.deepcopy(model)
    assert twin.workbench._buffer.data_ptr() != model.workbench._buffer.data_ptr()
    with torch.inference_mode():
        twin.workbench._allocate(torch.bfloat16, torch.device("cpu"))  # the next batch makes it float32 again
        assert torch.equal(twin(features), want)
    assert torch.equal(twin(features), want)
    assert (twin.workbench.lent, twin.workbench.fallbacks) == (2, 0)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert make(None).workbench.max_tokens == 2 * model.config.max_positions


def test_with_gradients_there_is_none():
    model = make(100)
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(7))
    with model.workbench.lend(x) as out:
        assert out is None
    layer = model.layers[0]
    weights = {name: weight.detach().double().requires_grad_() for name, weight in layer.named_parameters()}
    want = plain_layer(x.double(), weights)
    u, _, _, v = layer.project(x)
    layer.output(v, u, x).square().sum().backward()
    want.square().sum().backward()
    for name, weight in layer.named_parameters():
        torch.testing.assert_close(weight.grad.double(), weights[name].grad, rtol=1e-4, atol=1e-4, msg=name)


def plain_layer(x, weights):
    """The layer with values in place of attention."""
    norm = torch.nn.functional.layer_norm
    w = {name.removeprefix("_"): weight for name, weight in weights.items()}
    normed = norm(x, x.shape[-1:], w["input_norm_weight"], w["input_norm_bias"], 1e-6)
    u, v = torch.nn.functional.silu(normed @ w["uvqk_weight"] + w["uvqk_beta"]).split([48, 48, 32, 32], 1)[:2]
    return x + norm(v, v.shape[-1:], w["output_norm_weight"], w["output_norm_bias"], 1e-6) * u @ w["output_weight"]


@pytest.fixture
def one_thread():
    """torch's operators take scratch memory for each further one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_counts_what_a_forward_takes(dtype):
    shape = ModelShape(1, 4, 64, dtype)
    memory = divide(Geometry(shape, 16), 64 * MIB, 4, 200)
    assert memory.workbench_tokens == 800
    model = make(800, dtype=dtype, embedding_dim=256, num_layers=1, num_heads=4, qk_dim=64, v_dim=64)
    assert model.workbench.bytes == memory.workbench_bytes == 800 * 1024 * (4 if dtype == "float32" else 2)
    events = Events(8, model.config)
    for user in range(4):
        events.grow(user, 199)
    features = features_of([events.row(user, candidates=1) for user in range(4)])
    # Index vectors are not counted.
    assert memory.transient_bytes <= peak_bytes(lambda: model(features)) < 1.04 * memory.transient_bytes

    run_layers, in_layers = model._run_layers, []
    model._run_layers = lambda x, batch: in_layers.append(peak_bytes(lambda: run_layers(x, batch)) + x.nbytes) or x
    model(features)
    assert memory.transient_bytes / 2 <= in_layers[0] < 1.1 * memory.transient_bytes / 2
    assert model.workbench.fallbacks == 0


def peak_bytes(run):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    changes = [event.nbytes() for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(changes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_callers_autocast_changes_nothing_in_the_layers(dtype):
    """`out=` and autocast do not go together: layers keep to the dtype of the cache."""
    config = HSTURankerConfig.small(dtype=dtype)
    [features] = requests(config, 4, 1)
    for tokens in (None, 0):
        with HierarchicalKVCache(config.cache_config(num_pages=60)) as cache:
            model = HSTURanker(config, cache, seed=1, workbench_tokens=tokens).eval()
            kept = Keeps(model)
            model(features)
            cache.clear()
            with torch.autocast("cpu", torch.bfloat16):
                model(features)
            assert torch.equal(kept.layers[0], kept.layers[1])


class Keeps:
    """Keeps what the layers of a model return."""

    def __init__(self, model):
        self.layers = []
        self.run = model._run_layers
        model._run_layers = self

    def __call__(self, x, batch):
        self.layers.append(self.run(x, batch).clone())
        return self.layers[-1]
