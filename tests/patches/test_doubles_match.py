"""The doubles against the host they stand in for; skipped unless GENERATIVE_RECOMMENDERS names a checkout."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import doubles
from tests.doubles import hstu_compute, jagged_tensors

pytestmark = pytest.mark.filterwarnings("ignore")
DIM = 16
TABLE = 10
CONTEXT = {"user": 1, "city": 2}
OURS = SimpleNamespace(
    common=doubles.common,
    stu=doubles.stu,
    transducer=doubles.hstu_transducer,
    positional_encoder=doubles.positional_encoder,
    preprocessors=doubles.preprocessors,
    postprocessors=doubles.postprocessors,
    action_encoder=doubles.preprocessors,
    hstu_compute=hstu_compute,
    jagged_tensors=jagged_tensors,
    layer_norm=doubles.layer_norm,
)
CLASSES = {
    "common": ["HammerModule"],
    "stu": ["STU", "STULayerConfig", "STULayer", "STUStack"],
    "transducer": ["HSTUTransducer"],
    "positional_encoder": ["HSTUPositionalEncoder"],
    "preprocessors": ["InputPreprocessor", "ContextualPreprocessor"],
    "postprocessors": [
        "OutputPostprocessor",
        "L2NormPostprocessor",
        "LayerNormPostprocessor",
        "TimestampLayerNormPostprocessor",
    ],
    "action_encoder": ["ActionEncoder"],
    "layer_norm": ["LayerNorm", "SwishLayerNorm"],
}
FUNCTIONS = {
    "hstu_compute": ["hstu_compute_uqvk", "hstu_preprocess_and_attention", "hstu_compute_output"],
    "jagged_tensors": ["concat_2D_jagged", "split_2D_jagged"],
}


def shape(function: Any) -> list[tuple[str, str]]:
    """Names and defaults of a callable's parameters; the types differ in spelling only."""
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, str(getattr(p.default, "name", p.default))) for p in parameters]


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in CLASSES.items() for n in names])
def test_signatures(host: SimpleNamespace, module: str, name: str) -> None:
    ours, theirs = getattr(getattr(OURS, module), name), getattr(getattr(host, module), name)
    assert shape(ours) == shape(theirs)
    own = [key for key, value in vars(ours).items() if inspect.isfunction(value) and key != "__init__"]
    public = [
        "forward",
        "_preprocess",
        "_hstu_compute",
        "_postprocess",
        "cached_forward",
        "interleave_targets",
    ]
    public += [
        "hammer_kernel",
        "recursive_setattr",
        "set_hammer_kernel",
        "set_is_inference",
        "reset_kv_cache",
    ]
    for method in public:
        if hasattr(ours, method) and (method in own or method == "forward"):
            assert shape(getattr(ours, method)) == shape(getattr(theirs, method)), method


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in FUNCTIONS.items() for n in names])
def test_operators_have_the_same_signature(host: SimpleNamespace, module: str, name: str) -> None:
    assert shape(getattr(getattr(OURS, module), name)) == shape(getattr(getattr(host, module), name))


def model(
    modules: SimpleNamespace,
    *,
    context: bool = True,
    actions: bool = True,
    additional: bool = False,
    postprocessor: str = "time",
    positions: bool = True,
    full: bool = False,
    buckets: tuple[int, int] = (50, 40),
    layers: int = 2,
    is_inference: bool = True,
    **layer: object,
) -> torch.nn.Module:
    mode = {"is_inference": is_inference}
    config = modules.stu.STULayerConfig(
        embedding_dim=DIM, num_heads=2, hidden_dim=8, attention_dim=12, output_dropout_ratio=0.0, **layer
    )
    stack = modules.stu.STUStack([modules.stu.STULayer(config, **mode) for _ in range(layers)], **mode)
    features = CONTEXT if context else {}
    preprocessor = modules.preprocessors.ContextualPreprocessor(
        input_embedding_dim=TABLE,
        hidden_dim=11,
        output_embedding_dim=DIM,
        contextual_feature_to_max_length=features,
        contextual_feature_to_min_uih_length={"city": 12} if context else {},
        action_embedding_dim=4,
        action_feature_name="action",
        action_weights=[1, 2, 8] if actions else None,
        additional_embedding_features=["shop"] if additional else [],
        **mode,
    )
    make = {
        "none": lambda: None,
        "l2": lambda: modules.postprocessors.L2NormPostprocessor(**mode),
        "norm": lambda: modules.postprocessors.LayerNormPostprocessor(DIM, **mode),
        "time": lambda: modules.postprocessors.TimestampLayerNormPostprocessor(DIM, [(3600, 24), (86400, 7)], **mode),
    }
    built = modules.transducer.HSTUTransducer(
        stack,
        preprocessor,
        make[postprocessor](),
        input_dropout_ratio=0.0,
        positional_encoder=(
            modules.positional_encoder.HSTUPositionalEncoder(*buckets, DIM, sum(features.values()), **mode)
            if positions
            else None
        ),
        return_full_embeddings=full,
        **mode,
    )
    built.set_hammer_kernel(modules.common.HammerKernel.PYTORCH)
    return built.eval()


def request(history: list[int], targets: list[int], seed: int) -> dict[str, Any]:
    """Arguments of the transducer's forward, with payloads for every feature that a model may ask for."""
    random = torch.Generator().manual_seed(seed)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random)

    past, new = torch.tensor(history), torch.tensor(targets)
    lengths = past + new
    total = int(lengths.sum())
    gaps = torch.randint(0, 5000, (total,), generator=random)
    # Seconds; small numbers, so that a float32 keeps them exact.
    times = 10_000_000 + gaps.cumsum(0)
    payloads = {
        "action": torch.randint(0, 16, (int(past.sum()),), generator=random),
        "shop": randn(total, TABLE),
    }
    for name, longest in CONTEXT.items():
        # Shorter and longer than the feature's maximum.
        counts = torch.randint(0, longest + 2, (len(history),), generator=random)
        payloads[name] = randn(int(counts.sum()), TABLE)
        payloads[f"{name}_offsets"] = jagged_tensors.complete_cumsum(counts)
    return {
        "max_uih_len": int(past.max()),
        "max_targets": int(new.max()),
        "total_uih_len": int(past.sum()),
        "total_targets": int(new.sum()),
        "seq_lengths": lengths,
        "seq_embeddings": randn(total, TABLE),
        "seq_timestamps": times,
        "num_targets": new,
        "seq_payloads": payloads,
    }


OPTIONS: list[dict[str, Any]] = [
    {},
    {"context": False, "actions": False, "postprocessor": "none"},
    {"additional": True, "postprocessor": "norm", "use_group_norm": True},
    {"full": True, "postprocessor": "l2", "max_attn_len": 6, "attn_alpha": 0.7},
    {"contextual_seq_len": 3, "max_attn_len": 4},
    {"context": False, "target_aware": False, "positions": False},
    {"buckets": (8, 15), "is_inference": False},
]


@pytest.mark.parametrize("number", range(len(OPTIONS)))
def test_same_weights_same_numbers(host: SimpleNamespace, number: int) -> None:
    options = OPTIONS[number]
    torch.manual_seed(number)
    theirs, ours = model(host, **options), model(OURS, **options)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    state = theirs.state_dict()
    assert {key: (value.shape, value.dtype) for key, value in state.items()} == {
        key: (value.shape, value.dtype) for key, value in ours.state_dict().items()
    }
    assert list(state) == list(ours.state_dict())
    ours.load_state_dict(state)
    sizes = [([20, 3, 11], [4, 9, 1]), ([7], [5]), ([0, 15], [3, 2])]
    with torch.inference_mode():
        for history, targets in sizes:
            arguments = request(history, targets, seed=number)
            expected, got = theirs(**arguments), ours(**arguments)
            for a, b in zip(got, expected, strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    assert a.shape == b.shape
                    assert float((a - b).abs().max() / b.abs().max()) < 1e-6


def test_attributes_that_an_attach_reads(host: SimpleNamespace) -> None:
    def names(module: torch.nn.Module) -> dict[str, set[str]]:
        plain = set(vars(torch.nn.Module()))
        return {name or "self": set(vars(part)) - plain for name, part in module.named_modules()}

    theirs, ours = names(model(host)), names(model(OURS))
    assert list(theirs) == list(ours)
    for name, attributes in theirs.items():
        missing = attributes - ours[name]
        # The action encoder's watch time thresholds are left out of the doubles.
        assert not {one for one in missing if "watchtime" not in one}, name


def test_without_a_gpu_kernel_choice_both_refuse(host: SimpleNamespace) -> None:
    arguments = request([5], [2], seed=0)
    for modules in (host, OURS):
        built = model(modules)
        built.recursive_setattr("_hammer_kernel", None)
        built.recursive_setattr("_use_triton_cc", False)
        with pytest.raises(Exception, match=r"GPU|CUDA|device|driver|kernel"):
            built(**arguments)


def test_installed_and_gone_again() -> None:
    before = {name: module for name, module in sys.modules.items() if name.startswith(doubles.HOST)}
    with doubles.installed():
        stu = importlib.import_module("generative_recommenders.modules.stu")
        assert stu is doubles.stu
        from generative_recommenders.ops.hstu_compute import hstu_compute_uqvk

        assert hstu_compute_uqvk is hstu_compute.hstu_compute_uqvk
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("generative_recommenders.modules.dlrm_hstu")
    assert before == {name: module for name, module in sys.modules.items() if name.startswith(doubles.HOST)}


def test_doubles_alone_run_and_are_not_append_stable() -> None:
    """Without a checkout: the encoder moves old tokens, and the divisor couples the rows of a batch."""
    torch.manual_seed(0)
    built = model(OURS)
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    arguments = request([20, 3], [4, 9], seed=1)
    with torch.inference_mode():
        candidates, _ = built(**arguments)
        assert candidates.shape == (13, DIM)
        assert bool(candidates.isfinite().all())
        encoder = built._positional_encoder
        long = torch.randn(9, DIM)
        times = torch.arange(9) * 100_000
        one = {"max_seq_len": 9, "num_targets": torch.tensor([1])}

        def encode(count: int) -> torch.Tensor:
            span = {"seq_lengths": torch.tensor([count]), "seq_offsets": torch.tensor([0, count])}
            return encoder(seq_timestamps=times[:count], seq_embeddings=long[:count], **span, **one)

        assert float((encode(9)[3:5] - encode(8)[3:5]).abs().max()) > 1e-2
