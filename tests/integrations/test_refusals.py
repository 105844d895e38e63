"""Every factor that decides whether reuse is exact is found in the model, and refused with a reason."""

from __future__ import annotations

import functools

import pytest
import torch

from mtserve_plugin import CacheConfig, HierarchicalKVCache, NoCache, attach
from mtserve_plugin.errors import AttachError, CacheError, ConfigError
from mtserve_plugin.positions import AppendStablePositionalEncoder
from tests.doubles import positional_encoder, postprocessors, preprocessors, stu
from tests.integrations import dlrm_double
from tests.integrations.conftest import NORM_LEN

STABLE = {"user_feature": "user_id", "positions": "append_stable"}


class L2STU(stu.STU):
    def __init__(self, inner):
        super().__init__(is_inference=True)
        self._stu = inner

    def forward(self, x, x_lengths, x_offsets, max_seq_len, num_targets, **_):
        return x


class Interleaving(preprocessors.ContextualPreprocessor):
    def interleave_targets(self):
        return True


class OwnPostprocessor(postprocessors.OutputPostprocessor):
    def forward(self, seq_embeddings, seq_timestamps, seq_payloads):
        return seq_embeddings


class OwnLayer(stu.STULayer):
    def forward(self, x, **arguments):
        return super().forward(x=x * 2, **arguments)


def of_layers(model):
    return model._hstu_transducer._stu_module._stu_layers


def in_layer(name, value):
    return lambda model: setattr(of_layers(model)[1], name, value)


def in_transducer(name, value):
    return lambda model: setattr(model._hstu_transducer, name, value)


def change_class(name, kind):
    return lambda model: setattr(getattr(model._hstu_transducer, name), "__class__", kind)


def wrap_layer(model):
    layers = of_layers(model)
    layers[1] = L2STU(layers[1])


def repeat_layer(model):
    layers = of_layers(model)
    layers[1] = layers[0]


def own_layer(model):
    of_layers(model)[1].__class__ = OwnLayer


def patch_forward(model):
    layer = of_layers(model)[1]
    layer.forward = functools.partial(stu.STULayer.forward, layer)


def own_postprocessor(model):
    model._hstu_transducer._output_postprocessor = OwnPostprocessor(is_inference=True)


def own_encoder(model):
    class Encoder(positional_encoder.HSTUPositionalEncoder):
        def forward(self, **arguments):
            return super().forward(**arguments) * 2

    model._hstu_transducer._positional_encoder.__class__ = Encoder


def add_module(model):
    model._hstu_transducer.extra = torch.nn.Linear(2, 2)


def stack_in_stack(model):
    transducer = model._hstu_transducer
    transducer._stu_module = of_layers(model)[0]


def drop_tables(model):
    del model._embedding_collection


REFUSED = {
    "training": (lambda model: of_layers(model)[1].train(), "training", "Call model.eval"),
    "context in layers": (in_layer("_contextual_seq_len", 3), "contextual_seq_len", "layer 1"),
    "target_aware": (in_layer("_target_aware", False), "target_aware", "target_aware=True"),
    "causal": (in_layer("_causal", False), "causal", "causal=True"),
    "full attention": (in_layer("_min_full_attn_seq_len", 2), "min_full_attn_seq_len", "without it"),
    "l2": (wrap_layer, "layer type", "L2STU.*measured: 0.7"),
    "own layer": (own_layer, "shape", "OwnLayer overrides STULayer.forward"),
    "patched": (patch_forward, "shape", "forward replaced on the instance"),
    "repeated": (repeat_layer, "shape", "same layer twice"),
    "interleaved": (change_class("_input_preprocessor", Interleaving), "preprocessor", "two tokens"),
    "own postprocessor": (own_postprocessor, "postprocessor", "OwnPostprocessor"),
    "own encoder": (own_encoder, "shape", "Encoder overrides HSTUPositionalEncoder.forward"),
    "extra part": (add_module, "shape", "HSTUTransducer.extra is Linear"),
    "no stack": (stack_in_stack, "shape", "STULayer where a STUStack"),
    "full embeddings": (in_transducer("_return_full_embeddings", True), "outputs", "return_full_embeddings"),
    "listwise": (in_transducer("_listwise_training", True), "outputs", "listwise"),
    "hook": (in_transducer("stu_hook", print), "outputs", "stu_hook"),
    "windows differ": (in_layer("_max_attn_len", 9), "geometry", "layer 1 has _max_attn_len=9"),
    "scales differ": (in_layer("_attn_alpha", 0.5), "geometry", "_attn_alpha"),
    "dense half": (drop_tables, "split", "sparse="),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(make_model, make_cache, name):
    change, factor, text = REFUSED[name]
    model = make_model()
    cache = make_cache(model)
    change(model)
    types = [type(module) for module in model.modules()]
    with pytest.raises(AttachError, match=text) as error:
        attach(model, cache, **STABLE)
    assert isinstance(error.value, CacheError)
    assert factor in error.value.factors
    assert [type(module) for module in model.modules()] == types


def test_the_host_s_encoder_needs_a_word(make_model, make_cache):
    model = make_model()
    cache = make_cache(model)
    with pytest.raises(AttachError, match="from the end of the history") as error:
        attach(model, cache, user_feature="user_id")
    assert error.value.factors == ("positions",)
    for wrong in ({"approximate": {"divisor"}}, {"positions": "stable"}):
        with pytest.raises(AttachError, match=r"divisor|stable"):
            attach(model, cache, user_feature="user_id", **wrong)
    model._hstu_transducer._positional_encoder = None
    with pytest.raises(AttachError, match="there is none"):
        attach(model, cache, **STABLE)
    attach(model, cache, user_feature="user_id")


def test_all_obstacles_are_told_at_once(make_model, make_cache):
    model = make_model()
    cache = make_cache(model)
    model.train()
    in_layer("_causal", False)(model)
    with pytest.raises(AttachError) as error:
        attach(model, cache, user_feature="user_id")
    assert error.value.factors == ("training", "positions", "causal")
    assert str(error.value).count("\n\n") == 2


def test_user_feature(make_model, make_cache):
    model = make_model()
    cache = make_cache(model)
    with pytest.raises(AttachError, match="user_feature='user_id'"):
        attach(model, cache, positions="append_stable")
    with pytest.raises(AttachError, match="runs along the history"):
        attach(model, cache, user_feature="item_id", positions="append_stable")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_layers", 4),
        ("num_heads", 1),
        ("qk_dim", 16),
        ("v_dim", 8),
        ("max_attn_len", 5),
        ("attn_scale", 0.25),
        ("dtype", "bfloat16"),
    ],
)
def test_a_cache_of_other_geometry_or_dtype(make_model, name, value):
    model = make_model()
    fitting = CacheConfig.for_model(model, attn_norm_len=NORM_LEN, page_size=8, num_pages=8, chunk_size=16)
    cache = HierarchicalKVCache(fitting.replace(**{name: value}))
    with pytest.raises(AttachError, match=f"{name}.*for_model") as error:
        attach(model, cache, **STABLE)
    assert error.value.factors == ("cache",)
    with pytest.raises(AttachError, match="on cpu, the cache is on meta"):
        attach(model, NoCache(fitting, "meta"), **STABLE)


def test_for_model(make_model):
    model = make_model(hstu_num_heads=3, hstu_attn_qk_dim=4)
    config = CacheConfig.for_model(model, attn_norm_len=77, num_pages=9)
    wanted = {"num_layers": 3, "num_heads": 3, "qk_dim": 4, "v_dim": 12, "num_pages": 9, "attn_norm_len": 77}
    assert {name: getattr(config, name) for name in wanted} == wanted
    assert config.dtype == "float32"
    assert config.scale == 0.5
    with pytest.raises(ConfigError, match="attn_norm_len"):
        CacheConfig.for_model(model)
    for layer in of_layers(model):
        layer._attn_norm_len, layer._attn_alpha, layer._max_attn_len = 300, 0.2, 6
    config = CacheConfig.for_model(model.bfloat16())
    assert (config.attn_norm_len, config.scale, config.max_attn_len) == (300, 0.2, 6)
    assert config.dtype == "bfloat16"
    with pytest.raises(AttachError, match="attn_norm_len=301"):
        attach(model, NoCache(config.replace(attn_norm_len=301)), **STABLE)
    # Half of a split model knows its geometry too, and so does a model that is attached.
    dense = dlrm_double.DlrmHSTU(dlrm_double.DlrmHSTUConfig(), is_dense=True)
    whole = make_model()
    fitting = CacheConfig.for_model(whole, attn_norm_len=1)
    assert CacheConfig.for_model(dense, attn_norm_len=1) == fitting
    assert CacheConfig.for_model(attach(whole, NoCache(fitting), **STABLE), attn_norm_len=1) == fitting


def test_models_of_no_known_code_base(make_model, make_cache):
    cache = make_cache(make_model())
    with pytest.raises(AttachError, match="by hand"):
        attach(torch.nn.Linear(2, 2), cache)
    with pytest.raises(AttachError, match="by hand"):
        CacheConfig.for_model(torch.nn.Linear(2, 2))
    with pytest.raises(AttachError, match="holds none of the known modules"):
        attach(of_layers(make_model())[0], cache)
    with pytest.raises(AttachError, match="holds 2 DlrmHSTU"):
        attach(torch.nn.ModuleList([make_model(), make_model()]), cache)
    with pytest.raises(AttachError, match=r"torch\.jit"):
        attach(torch.nn.ModuleList([make_model(), torch.jit.script(torch.nn.Linear(2, 2))]), cache)
    with pytest.raises(AttachError, match=r"no torch\.nn\.Module"):
        attach(object(), cache)
    family = type("ModelFamilyDenseDist", (), {})
    with pytest.raises(AttachError, match="chooses the worker"):
        attach(family(), cache)
    with pytest.raises(AttachError, match=r"torch\.compile"):
        attach(torch.compile(make_model()), cache)


def test_a_model_inside_of_another_module(make_model, make_cache):
    model = make_model()
    wrapper = torch.nn.ModuleDict({"ranker": model, "other": torch.nn.Linear(2, 2)})
    assert attach(wrapper, make_cache(model), **STABLE) is wrapper
    assert type(model) is not dlrm_double.DlrmHSTU


def test_another_version_of_the_host(make_model, make_cache, monkeypatch):
    model = make_model()
    cache = make_cache(model)

    def forward(self, x, offsets):
        raise NotImplementedError

    monkeypatch.setattr(stu.STULayer, "forward", forward)
    with pytest.raises(AttachError, match=r"STULayer\.forward .* takes x, offsets; .* is missing"):
        attach(model, cache, **STABLE)


def test_weights_without_version_counters(make_model, make_cache):
    with torch.inference_mode():
        model = make_model()
    with pytest.raises(AttachError, match="inference_mode"):
        attach(model, make_cache(model), **STABLE)


def test_an_encoder_that_is_append_stable_already(make_model, make_cache):
    model = make_model()
    transducer = model._hstu_transducer
    keys = list(model.state_dict())
    stable = AppendStablePositionalEncoder(500, 60, 24, contextual_seq_len=3)
    stable.load_state_dict(transducer._positional_encoder.state_dict())
    transducer._positional_encoder = stable.eval()
    assert list(model.state_dict()) == keys
    attach(model, make_cache(model), user_feature="user_id")
