"""The patches on a clone of the host's checkout; skipped unless GENERATIVE_RECOMMENDERS names one."""

from __future__ import annotations

import copy
import itertools
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

NORM = 64
pytestmark = pytest.mark.filterwarnings("ignore")


def offsets(lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def stack(modules: SimpleNamespace, *, heads: int = 4, layers: int = 2, **options: object) -> torch.nn.Module:
    """Layers with trained-size weights; attention matters, so that a wrong divisor shows."""
    torch.manual_seed(0)
    config = modules.stu.STULayerConfig(
        embedding_dim=16, num_heads=heads, hidden_dim=8, attention_dim=12, output_dropout_ratio=0.0, **options
    )
    stu = modules.stu.STUStack([modules.stu.STULayer(config, True) for _ in range(layers)], is_inference=True)
    for parameter in stu.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    stu.set_hammer_kernel(modules.common.HammerKernel.PYTORCH)
    return stu.eval()


class Batch:
    """Random rows of the given history and target lengths."""

    def __init__(self, history: list[int], targets: list[int], seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.history, self.targets = torch.tensor(history), torch.tensor(targets)
        self.lengths = self.history + self.targets
        self.offsets = offsets(self.lengths)
        self.x = torch.randn(int(self.lengths.sum()), 16)

    def row(self, number: int) -> Batch:
        one = copy.copy(self)
        one.history, one.targets = self.history[number : number + 1], self.targets[number : number + 1]
        one.lengths = one.history + one.targets
        one.offsets = offsets(one.lengths)
        one.x = self.of(number, self.x)
        return one

    def of(self, number: int, values: torch.Tensor) -> torch.Tensor:
        return values[self.offsets[number] : self.offsets[number + 1]]

    def behind(self, kept: torch.Tensor) -> torch.Tensor:
        """Indices of the rows behind the first `kept` of every sequence."""
        spans = zip(self.offsets[:-1] + kept, self.offsets[1:], strict=True)
        return torch.cat([torch.arange(int(start), int(end)) for start, end in spans])

    def arguments(self) -> dict[str, object]:
        longest = int(self.lengths.max())
        return {
            "x_lengths": self.lengths,
            "x_offsets": self.offsets,
            "max_seq_len": longest,
            "num_targets": self.targets,
        }


# ---- apply.py ------------------------------------------------------------------------------------


def test_every_order_applies_and_comes_off(tool: ModuleType, clone: Callable[[], Path]) -> None:
    checkout = clone()
    patches = tool.read_patches()
    names = [patch.name for patch in patches]
    whole: set[str] = set()
    for order in itertools.islice(itertools.permutations(names), 0, None, 5):
        for name in order:
            assert tool.run(checkout, patches, [name]) == {name: "applied"}
        diff = subprocess.run(["git", "-C", str(checkout), "diff"], capture_output=True, check=True, text=True)
        whole.add(diff.stdout)
        assert set(tool.run(checkout, patches).values()) == {"already applied"}
        for name in order[:2]:
            tool.run(checkout, patches, [name], reverse=True)
        tool.run(checkout, patches, reverse=True)
        status = subprocess.run(["git", "-C", str(checkout), "status", "--porcelain"], capture_output=True, check=True)
        assert status.stdout == b""
    assert len(whole) == 1


def test_each_patch_alone_is_a_plain_git_patch(tool: ModuleType, clone: Callable[[], Path]) -> None:
    checkout = clone()
    for patch in tool.read_patches():
        file = tool.HERE / f"{patch.name}.patch"
        subprocess.run(["git", "-C", str(checkout), "apply", "--unidiff-zero", str(file)], check=True)
        states = tool.run(checkout, tool.read_patches(), check=True)
        assert [name for name, state in states.items() if state == "already applied"] == [patch.name]
        for path in patch.hunks:
            compile((checkout / path).read_text(), path, "exec")
        subprocess.run(["git", "-C", str(checkout), "checkout", "-q", "."], check=True)


# ---- attn_norm_len -------------------------------------------------------------------------------


def alone_and_together(modules: SimpleNamespace, **options: object) -> float:
    """How far the last row of a batch is from the same row alone."""
    stu = stack(modules, **options)
    batch = Batch([40, 3, 17], [5, 9, 4])
    one = batch.row(2)
    with torch.inference_mode():
        together = stu(x=batch.x, **batch.arguments())
        return relative(stu(x=one.x, **one.arguments()), batch.of(2, together))


def test_a_pinned_divisor_makes_rows_independent_of_the_batch(patched: SimpleNamespace) -> None:
    assert alone_and_together(patched) > 1e-2
    assert alone_and_together(patched, attn_norm_len=NORM) < 1e-6
    assert alone_and_together(patched, attn_norm_len=NORM, contextual_seq_len=2, max_attn_len=6) < 1e-6


def test_the_pinned_divisor_is_the_divisor(patched: SimpleNamespace) -> None:
    """With the batch's own length as the constant, nothing changes; with twice that, attention is halved."""
    batch = Batch([12, 3], [4, 9])
    arguments = batch.arguments()
    longest = int(batch.lengths.max())
    with torch.inference_mode():
        plain = stack(patched)(x=batch.x, **arguments)
        same = stack(patched, attn_norm_len=longest)(x=batch.x, **arguments)
        assert torch.equal(plain, same)
        halved = stack(patched, attn_norm_len=2 * longest, layers=1)
        seen = []
        original = patched.stu.hstu_compute_output

        def spy(**options: torch.Tensor) -> torch.Tensor:
            seen.append(options["attn"])
            return original(**options)

        patched.stu.hstu_compute_output = spy
        try:
            halved(x=batch.x, **arguments)
            stack(patched, layers=1)(x=batch.x, **arguments)
        finally:
            patched.stu.hstu_compute_output = original
    torch.testing.assert_close(seen[0] * 2, seen[1], rtol=1e-6, atol=0)


def test_a_pinned_divisor_trains(patched: SimpleNamespace) -> None:
    batch = Batch([12, 3], [4, 9])
    x = batch.x.clone().requires_grad_()
    stack(patched, attn_norm_len=NORM)(x=x, **batch.arguments()).square().sum().backward()
    assert x.grad is not None
    # A finite difference along one direction.
    step, direction = 1e-2, torch.randn_like(x)
    values = [
        stack(patched, attn_norm_len=NORM)(x=batch.x + sign * step * direction, **batch.arguments())
        .double()
        .square()
        .sum()
        for sign in (1, -1)
    ]
    slope = (values[0] - values[1]) / (2 * step)
    torch.testing.assert_close((x.grad.double() * direction).sum(), slope, rtol=1e-2, atol=1e-3)


def test_without_options_the_patched_layers_are_the_host_s(host: SimpleNamespace, patched: SimpleNamespace) -> None:
    batch = Batch([12, 0, 3], [4, 2, 9])
    for options in ({}, {"use_group_norm": True}, {"target_aware": False}, {"contextual_seq_len": 2}):
        before, after = stack(host, **options), stack(patched, **options)
        assert list(before.state_dict()) == list(after.state_dict())
        with torch.inference_mode():
            assert torch.equal(before(x=batch.x, **batch.arguments()), after(x=batch.x, **batch.arguments()))


def test_the_model_s_configuration_reaches_every_layer(patched: SimpleNamespace) -> None:
    from generative_recommenders.modules.multitask_module import MultitaskTaskType, TaskConfig

    options = {"hstu_attn_num_layers": 2, "hstu_transducer_embedding_dim": 16, "hstu_embedding_table_dim": 16}
    options["multitask_configs"] = [TaskConfig("like", 1, MultitaskTaskType.BINARY_CLASSIFICATION)]
    for value, expected in (({"hstu_attn_norm_len": 777}, 777), ({}, 0)):
        config = patched.dlrm.DlrmHSTUConfig(**options, **value)
        model = patched.dlrm.DlrmHSTU(config, embedding_tables={}, is_inference=True, is_dense=True)
        layers = [module for module in model.modules() if isinstance(module, patched.stu.STULayer)]
        assert [layer._attn_norm_len for layer in layers] == [expected, expected]
    assert config.kv_cache is None
    assert patched.dlrm.DlrmHSTUConfig(kv_cache="NoCache").kv_cache == "NoCache"


# ---- cached_forward ------------------------------------------------------------------------------


def prefilled(
    modules: SimpleNamespace, batch: Batch, kept: torch.Tensor, **options: object
) -> tuple[torch.nn.Module, torch.Tensor]:
    """A stack that caches the first `kept` rows of every sequence, and its result for all rows."""
    stu = stack(modules, **options)
    full = stu(x=batch.x, **batch.arguments(), kv_caching_lengths=kept)
    return stu, full


@pytest.mark.parametrize(("rows", "heads"), [(1, 4), (1, 1), (3, 4)])
@pytest.mark.parametrize("norm", [None, NORM])
def test_cached_forward_is_the_full_forward(patched: SimpleNamespace, rows: int, heads: int, norm: int | None) -> None:
    batch = Batch([9, 7, 20][:rows], [4, 4, 4][:rows])
    with torch.inference_mode():
        stu, full = prefilled(patched, batch, batch.history, heads=heads, attn_norm_len=norm)
        new = batch.behind(batch.history)
        got = stu.cached_forward(delta_x=batch.x[new], num_targets=batch.targets, delta_lengths=batch.targets)
    assert relative(got, full[new]) < 1e-6


def test_one_sequence_with_several_heads_raises_without_the_patch(host: SimpleNamespace) -> None:
    batch = Batch([9], [4])
    with torch.inference_mode():
        stu, _ = prefilled(host, batch, batch.history)
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            stu.cached_forward(delta_x=batch.x[9:], num_targets=batch.targets)


@pytest.mark.parametrize("rows", [1, 2])
def test_cached_forward_appends(host: SimpleNamespace, patched: SimpleNamespace, rows: int) -> None:
    """Two steps: three new events and the targets, of which the events stay cached; then other targets."""
    batch = Batch([12, 8][:rows], [4, 4][:rows])
    kept = batch.history - 3
    new = batch.behind(kept)
    step = {"delta_x": batch.x[new], "num_targets": batch.targets, "kv_caching_lengths": batch.history}
    with torch.inference_mode():
        stu, full = prefilled(patched, batch, kept, attn_norm_len=NORM)
        assert relative(stu.cached_forward(**step), full[new]) < 1e-6
        targets = batch.behind(batch.history)
        again = stu.cached_forward(delta_x=batch.x[targets], num_targets=batch.targets)
        assert relative(again, full[targets]) < 1e-6

        stu, _ = prefilled(host, batch, kept)
        with pytest.raises((RuntimeError, IndexError)):
            stu.cached_forward(**step)


def test_a_jagged_batch_raises(host: SimpleNamespace, patched: SimpleNamespace) -> None:
    jagged = Batch([9, 7], [2, 6])
    new = jagged.behind(jagged.history)
    with torch.inference_mode():
        # Without the patch the total divides by two, and the result is silently wrong.
        stu, full = prefilled(host, jagged, jagged.history)
        assert relative(stu.cached_forward(delta_x=jagged.x[new], num_targets=jagged.targets), full[new]) > 1e-2

        stu, _ = prefilled(patched, jagged, jagged.history)
        with pytest.raises(AssertionError, match="is jagged"):
            stu.cached_forward(delta_x=jagged.x[new], num_targets=jagged.targets)

        # New history as well: only delta_lengths can tell.
        kept = jagged.history - torch.tensor([2, 4])
        new = jagged.behind(kept)
        stu, _ = prefilled(patched, jagged, kept)
        with pytest.raises(AssertionError, match="is jagged"):
            stu.cached_forward(delta_x=jagged.x[new], num_targets=jagged.targets, delta_lengths=jagged.lengths - kept)


def test_equal_deltas_with_unequal_targets_pass(patched: SimpleNamespace) -> None:
    """Five new rows each, and as many or as few targets as the host allows, cached ones included."""
    for targets in ([2, 5], [2, 8]):
        batch = Batch([20, 20], targets)
        kept = batch.lengths - 5
        new = batch.behind(kept)
        with torch.inference_mode():
            stu, full = prefilled(patched, batch, kept, attn_norm_len=NORM)
            arguments = {"delta_x": batch.x[new], "num_targets": batch.targets}
            if sum(targets) == len(new):
                with pytest.raises(AssertionError, match="pass delta_lengths"):
                    stu.cached_forward(**arguments)
                arguments["delta_lengths"] = torch.tensor([5, 5])
            assert relative(stu.cached_forward(**arguments), full[new]) < 1e-6


# ---- stu_hook ------------------------------------------------------------------------------------


def transducer(modules: SimpleNamespace, **options: object) -> torch.nn.Module:
    torch.manual_seed(3)
    preprocessor = modules.preprocessors.ContextualPreprocessor(
        input_embedding_dim=16,
        hidden_dim=8,
        output_embedding_dim=16,
        contextual_feature_to_max_length={},
        contextual_feature_to_min_uih_length={},
    )
    model = modules.transducer.HSTUTransducer(stack(modules), preprocessor, **options)
    model.set_hammer_kernel(modules.common.HammerKernel.PYTORCH)
    return model.eval()


def score(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    candidates, _ = model(
        max_uih_len=int(batch.history.max()),
        max_targets=int(batch.targets.max()),
        total_uih_len=int(batch.history.sum()),
        total_targets=int(batch.targets.sum()),
        seq_lengths=batch.lengths,
        seq_embeddings=batch.x,
        seq_timestamps=torch.arange(len(batch.x)),
        num_targets=batch.targets,
        seq_payloads={"cache_rows": torch.tensor([7])},
    )
    return candidates


def test_the_hook_stands_around_the_layers(host: SimpleNamespace, patched: SimpleNamespace) -> None:
    batch = Batch([12, 3], [4, 9])
    with torch.inference_mode():
        before, model = transducer(host), transducer(patched)
        assert list(before.state_dict()) == list(model.state_dict())
        plain = score(before, batch)
        assert torch.equal(score(model, batch), plain)

        calls = []

        def hook(module: Any, *, seq_timestamps: Any, seq_payloads: Any, **arguments: Any) -> torch.Tensor:
            calls.append((module, seq_timestamps, seq_payloads))
            return module(**arguments) * 2

        model.stu_hook = hook
        # The postprocessor normalises, so doubling must not show, and adding must.
        torch.testing.assert_close(score(model, batch), plain)
        module, times, payloads = calls.pop()
        assert module is model._stu_module
        assert torch.equal(times, torch.arange(len(batch.x)))
        assert payloads["cache_rows"].tolist() == [7]

        other = transducer(patched, stu_hook=lambda module, **arguments: arguments["x"])
        assert relative(score(other, batch), plain) > 1e-2


# ---- time buckets --------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "width"), [(40, 8), (5, 32)])
def test_time_buckets_are_bounded_by_the_table_s_length(
    host: SimpleNamespace, patched: SimpleNamespace, length: int, width: int
) -> None:
    ages = torch.tensor([10.0**8, 30.0**2 * 60, 6.0**2 * 60, 2.0**2 * 60, 0.0])
    table = torch.arange(1.0, length + 1)[:, None].expand(length, width).contiguous()
    arguments = {
        "seq_embeddings": torch.zeros(len(ages), width),
        "seq_offsets": torch.tensor([0, len(ages)]),
        "pos_embeddings": torch.zeros(10, width),
        "ts_embeddings": table,
        "timestamps": (10.0**8 - ages).long(),
        "max_seq_len": len(ages),
        "max_contextual_seq_len": 0,
        "seq_lengths": torch.tensor([len(ages)]),
        "num_targets": None,
        "interleave_targets": False,
        "time_bucket_fn": "sqrt",
    }
    got = patched.position.pytorch_add_timestamp_positional_embeddings(**arguments)[:, 0] - 1
    expected = torch.tensor([10**9, 30, 6, 2, 0]).clamp(max=length - 1)
    assert got.tolist() == expected.tolist()
    if width > length:
        with pytest.raises((IndexError, RuntimeError)):
            host.position.pytorch_add_timestamp_positional_embeddings(**arguments)
    else:
        wrong = host.position.pytorch_add_timestamp_positional_embeddings(**arguments)[:, 0] - 1
        assert wrong.tolist() == [width - 1, width - 1, 6, 2, 0]
