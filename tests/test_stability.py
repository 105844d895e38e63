"""The audit: what is stable, what is not, and why; on models of this package, of the host, and on toys."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mtserve_plugin import CacheConfig, HierarchicalKVCache, InputError, NoCache, attach, audit, jagged
from mtserve_plugin.cli import app
from mtserve_plugin.models import HSTURanker, HSTURankerConfig
from mtserve_plugin.stability.adapters import HostAdapter, adapter_for, ranker_features
from mtserve_plugin.stability.demo import build_demo, sample_histories
from mtserve_plugin.stability.histories import Histories
from mtserve_plugin.stability.measure import AuditReport, Encoding, Reuse, compare_scores, kendall_tau, relative
from tests import doubles
from tests.doubles.common import HammerKernel
from tests.integrations import dlrm_double, streams

UNSTABLE = 1e-4


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def names(report: AuditReport) -> list[str]:
    return [cause.name for cause in report.causes]


def first(report: AuditReport, probe: str = "visit") -> int | None:
    return report.probes[probe].first_above(report.tolerance)


# ---- models of this package ------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["hstu", "sasrec"])
def test_the_models_of_this_package_are_stable(model: str) -> None:
    histories = sample_histories(5, 60, 32, seed=1)
    report = audit(build_demo(model, "append-stable", "none", 2), ranker_features(histories), delta=7, show=False)
    assert report.stable
    assert report.causes == ()
    assert max(max(drift.worst) for drift in report.probes.values()) <= 1e-6
    assert report.scores is not None
    assert report.scores.max_rel_difference <= 1e-6
    assert report.scores.kendall_tau == report.scores.top10_overlap == 1
    assert report.scores.reused_tokens == report.prefix_tokens > 100
    assert report.delta_tokens == 5 * 7


@pytest.mark.parametrize(
    ("model", "encoder", "plant", "cause", "layer"),
    [
        ("hstu", "from-end", "none", "positions", 0),
        ("hstu", "now", "none", "query time", 0),
        ("hstu", "append-stable", "batch-divisor", "batch divisor", 1),
        ("hstu", "append-stable", "dropout", "randomness", 1),
        ("sasrec", "from-end", "none", "positions", 0),
        ("sasrec", "append-stable", "bidirectional", "bidirectional", 1),
    ],
)
@pytest.mark.parametrize("seed", [3, 4])
def test_planted_factors_are_found_and_named(
    model: str, encoder: str, plant: str, cause: str, layer: int, seed: int
) -> None:
    audited = build_demo(model, encoder, plant, seed)
    report = audit(audited, ranker_features(sample_histories(5, 60, 32, seed)), show=False)
    assert not report.stable
    assert names(report) == [cause]
    assert first(report) == layer
    assert min(report.layers.worst[layer:]) > UNSTABLE
    assert report.scores is not None
    assert report.scores.max_rel_difference > UNSTABLE


def test_two_factors_at_once() -> None:
    audited = build_demo("hstu", "now", "batch-divisor", 5)
    report = audit(audited, ranker_features(sample_histories(4, 40, 16, 6)), show=False)
    assert names(report) == ["query time", "batch divisor"]


def test_lower_precision_has_a_wider_tolerance() -> None:
    for kind, stable in ((HSTURanker, True), (None, False)):
        config = HSTURankerConfig.small(dtype="bfloat16")
        model = HSTURanker(config, NoCache(config.cache_config()), seed=7).eval()
        if kind is None:
            model.encoder.__class__ = type(build_demo("hstu", "from-end", "none", 0).encoder)
        report = audit(model, ranker_features(sample_histories(4, 60, 16, 8)), show=False)
        assert report.tolerance == 2e-2
        assert report.stable == stable


def test_a_model_that_refuses_the_cache_is_measured_all_the_same() -> None:
    model = build_demo("hstu", "append-stable", "none", 9).train()
    features = ranker_features(sample_histories(4, 40, 16, 10))
    report = audit(model, features, show=False)
    assert report.scores is None
    assert "training mode" in report.scores_refused
    assert report.stable
    with HierarchicalKVCache(model.config.cache_config(num_pages=8)) as cache:
        model.eval().cache = cache
        assert audit(model, features, show=False).stable
        assert model.cache is cache
        assert cache.stats()["requests"] == 0


@pytest.mark.parametrize(("length", "rows"), [(2, 1), (3, 2), (9, 1)])
def test_short_histories(length: int, rows: int) -> None:
    for encoder, stable in (("append-stable", True), ("from-end", False)):
        features = ranker_features(sample_histories(rows, length, 3, 11))
        report = audit(build_demo("hstu", encoder, "none", 12), features, delta=100, show=False)
        assert report.stable == stable


def test_what_is_refused() -> None:
    model = build_demo("hstu", "append-stable", "none", 13)
    histories = sample_histories(3, 1, 4, 14)
    with pytest.raises(InputError, match="no history has a prefix"):
        audit(model, ranker_features(histories), show=False)
    features = ranker_features(sample_histories(3, 9, 4, 14))
    with pytest.raises(InputError, match="delta=0"):
        audit(model, features, delta=0, show=False)
    with pytest.raises(InputError, match="Linear is no model that the audit knows; write an adapter"):
        audit(torch.nn.Linear(1, 1), features, show=False)
    with pytest.raises(InputError, match="sample has 2 parts"):
        audit(model, (features, features), show=False)
    with pytest.raises(InputError, match="takes Histories"):
        audit(Toy(), features, show=False)
    twice = sample_histories(2, 9, 4, 15)
    with pytest.raises(InputError, match="occurs twice"):
        audit(Toy(), Histories(**vars(twice) | {"users": torch.tensor([1, 1])}), show=False)
    with pytest.raises(InputError, match="item has 0 values"):
        Histories(**vars(twice) | {"tokens": {"item": torch.tensor([])}, "time": ""})


# ---- an adapter of one's own -----------------------------------------------------------------------------------


class Toy:
    """Two layers on numbers, with one factor."""

    def __init__(self, factor: str = "") -> None:
        self.factor = factor

    def encode(self, histories: Histories) -> Encoding:
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(1000, 4, generator=generator)
        rows = histories.tokens["item"].split(histories.lengths.tolist())
        chosen = histories.candidates["candidate"].split(histories.num_candidates.tolist())
        first, second, scores = [], [], []
        for row, candidates in zip(rows, chosen, strict=True):
            x, n = table[row], row.numel()
            if self.factor == "looks ahead":
                x = x + torch.cat((x[1:], x[-1:]))
            if self.factor == "padding":
                x = x + int(histories.lengths.max()) - n
            summed = x.cumsum(0) / (max(n, 1) if self.factor == "own divisor" else 10)
            if self.factor == "candidates":
                summed = summed + table[candidates].sum(0)
            first.append(x[:, None])
            second.append(summed[:, None])
            scores.append(table[candidates] @ (x.sum(0) + summed[-1]))
        layers = [(torch.cat(first), -torch.cat(first)), (torch.cat(second), -torch.cat(second))]
        return Encoding(layers, histories.lengths, torch.cat(scores))


@pytest.mark.parametrize(
    ("factor", "layer"), [("looks ahead", 0), ("padding", 0), ("own divisor", 1), ("candidates", 1), ("", None)]
)
def test_factors_of_a_model_with_its_own_adapter(factor: str, layer: int | None) -> None:
    report = audit(Toy(factor), sample_histories(4, 30, 6, 16), show=False)
    # A divisor's change between two visits is all that shows; a candidate's, only with other candidates.
    assert names(report) == ([factor] if factor else [])
    worst = {probe: drift.first_above(report.tolerance) for probe, drift in report.probes.items()}
    assert layer in worst.values()
    assert report.stable == (factor == "")
    assert report.scores is None
    assert "no method reuse" in report.scores_refused


def test_scores_that_look_at_old_tokens_by_another_way() -> None:
    class Pooled(Toy):
        def reuse(self, before: Histories, after: Histories) -> Reuse:
            return Reuse(self.encode(after).scores * 1.01, tokens=int(before.lengths.sum()))

    report = audit(Pooled(), sample_histories(4, 30, 6, 17), show=False)
    assert names(report) == ["scores"]
    assert not report.stable
    assert report.scores is not None
    assert report.scores.kendall_tau == 1


def test_missing_numbers_are_no_agreement() -> None:
    class Broken(Toy):
        runs = itertools.count()

        def encode(self, histories: Histories) -> Encoding:
            encoding = super().encode(histories)
            if next(self.runs) > 0:
                encoding.layers[1][0].fill_(float("nan"))
            return encoding

    report = audit(Broken(), sample_histories(4, 30, 6, 18), show=False)
    assert not report.stable
    assert report.probes["repeat"].k == (0, math.inf)


# ---- generative_recommenders -----------------------------------------------------------------------------------


@pytest.fixture
def host() -> Iterator[None]:
    with doubles.installed():
        sys.modules[f"{doubles.HOST}.modules.dlrm_hstu"] = dlrm_double
        yield


def dlrm(seed: int, **changes: Any) -> Any:
    model = dlrm_double.DlrmHSTU(dlrm_double.DlrmHSTUConfig(**changes), 200)
    model.set_hammer_kernel(HammerKernel.PYTORCH)
    return streams.trained_size(model, seed).eval()


def dlrm_sample(model: Any, lengths: list[int], seed: int = 0) -> Any:
    embedded = ("item_id", "candidate_id", "category_id", "candidate_category_id", "user_id", "cities")
    users = streams.Users(model._hstu_configs, dict.fromkeys(embedded, 200), seed)
    for user, length in enumerate(lengths):
        users.add(user)
        users.grow(user, length)
    return users.request(list(range(len(lengths))), [30] * len(lengths))


@pytest.mark.usefixtures("host")
def test_the_host_as_it_is() -> None:
    model = dlrm(20)
    report = audit(model, dlrm_sample(model, [40, 55, 28]), show=False)
    assert names(report) == ["query time", "positions", "batch divisor"]
    assert first(report) == 0
    assert min(report.layers.worst) > 1e-3
    assert first(report, "company") == 1
    assert report.scores is not None
    assert report.scores.max_rel_difference > UNSTABLE
    assert report.prefix_tokens == 40 + 55 + 28 - 3 * 8 + 3 * 3
    # It runs as before.
    assert not hasattr(model, "cache")


@pytest.mark.usefixtures("host")
def test_an_attached_host() -> None:
    for positions, causes in (("append_stable", []), ("model", ["query time", "positions"])):
        model = dlrm(21)
        sample = dlrm_sample(model, [40, 55, 28])
        cache = HierarchicalKVCache(CacheConfig.for_model(model, attn_norm_len=128, num_pages=400))
        attach(model, cache, user_feature="user_id", positions=positions, approximate={"positions"})
        report = audit(model, sample, show=False)
        assert names(report) == causes
        assert report.scores is not None
        assert report.scores.reused_tokens == 40 + 55 + 28 - 3 * 8
        if causes:
            assert min(report.layers.worst) > 1e-3
            assert report.scores.max_rel_difference > UNSTABLE
        else:
            assert report.stable
            assert max(max(drift.worst) for drift in report.probes.values()) <= 1e-6
            assert report.scores.max_rel_difference <= 1e-6
        assert cache.stats()["requests"] == 0
        cache.close()


@pytest.mark.usefixtures("host")
def test_context_rows_of_a_layer_that_see_everything() -> None:
    model = dlrm(22)
    for part in model._hstu_transducer._stu_module._stu_layers:
        part._contextual_seq_len = 3
    report = audit(model, dlrm_sample(model, [30, 40]), show=False)
    assert "bidirectional" in names(report)
    assert first(report, "edit") == 1


@pytest.mark.usefixtures("host")
def test_rows_whose_context_begins_to_count_are_not_compared() -> None:
    model = dlrm(23, contextual_feature_to_min_uih_length={"user_id": 50 + 30})
    sample = dlrm_sample(model, [55, 40])
    cache = HierarchicalKVCache(CacheConfig.for_model(model, attn_norm_len=128, num_pages=400))
    attach(model, cache, user_feature="user_id", positions="append_stable")
    report = audit(model, sample, show=False)
    cache.close()
    assert report.stable
    assert report.prefix_tokens == 40 - 8 + 3
    assert report.scores is not None
    assert report.scores.reused_tokens == 40 - 8


@pytest.mark.usefixtures("host")
def test_emulated_reuse_is_what_a_cache_does() -> None:
    """With the divisor pinned for both, the watched operator and the real cache give the same inexact scores."""
    model = dlrm(24)
    sample = dlrm_sample(model, [40, 55, 28])
    adapter, after = adapter_for(model, sample)
    assert isinstance(adapter, HostAdapter)
    before = after.visit(after.lengths - 8)
    stack = model._hstu_transducer._stu_module
    inner = stack.forward
    stack.forward = lambda **arguments: inner(**(arguments | {"max_seq_len": 128}))
    emulated, full = adapter.reuse(before, after), adapter.encode(after).scores
    del stack.forward
    cache = HierarchicalKVCache(CacheConfig.for_model(model, attn_norm_len=128, num_pages=400))
    attach(model, cache, user_feature="user_id", approximate={"positions"})
    cached = adapter_for(model, sample)[0]
    assert emulated.scores is not None
    assert relative(emulated.scores, full) > UNSTABLE
    assert emulated.tokens == int(before.lengths.sum())
    # The double's encoder counts from the end of what it is given, which is the same for stripped rows.
    assert relative(emulated.scores, cached.reuse(before, after).scores) <= 1e-5  # type: ignore[attr-defined]
    cache.close()


@pytest.mark.usefixtures("host")
def test_emulated_reuse_leaves_rows_with_other_context_alone() -> None:
    model = dlrm(28, contextual_feature_to_min_uih_length={"user_id": 50 + 30})
    adapter, after = adapter_for(model, dlrm_sample(model, [55, 40]))
    assert isinstance(adapter, HostAdapter)
    reuse, full = adapter.reuse(after.visit(after.lengths - 8), after), adapter.encode(after).scores
    assert reuse.scores is not None
    assert reuse.tokens == 40 - 8
    assert relative(reuse.scores[:30], full[:30]) == 0
    assert relative(reuse.scores[30:], full[30:]) > 1e-5


@pytest.mark.usefixtures("host")
def test_layers_on_other_rows_are_refused() -> None:
    model = dlrm(29)
    adapter, histories = adapter_for(model, dlrm_sample(model, [30, 40]))
    adapter._context_rows = 0  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=r"layer 0 runs on 136 rows where .* are 130"):
        adapter.encode(histories)


@pytest.mark.usefixtures("host")
def test_a_fused_kernel_gives_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = dlrm(25)
    stack = model._hstu_transducer._stu_module
    monkeypatch.setattr(stack, "forward", lambda x, **_: x, raising=False)
    with pytest.raises(InputError, match="set_hammer_kernel"):
        audit(model, dlrm_sample(model, [30, 40]), show=False)


# ---- parts -----------------------------------------------------------------------------------------------------


def test_kendall_tau_against_pairs() -> None:
    rng = random.Random(26)
    for count in (2, 3, 20):
        a, b = ([rng.randrange(8) for _ in range(count)] for _ in range(2))
        a[0], a[1], b[0], b[1] = 1, 2, 3, 4
        signs = [
            ((x > y) - (x < y), (u > w) - (u < w))
            for (x, u), (y, w) in itertools.combinations(zip(a, b, strict=True), 2)
        ]
        norm = math.sqrt(sum(s != 0 for s, _ in signs) * sum(t != 0 for _, t in signs))
        want = sum(s * t for s, t in signs) / norm
        assert kendall_tau(torch.tensor(a).float(), torch.tensor(b).float()) == pytest.approx(want)
    rising = torch.arange(5.0)
    assert (kendall_tau(rising, rising), kendall_tau(rising, -rising)) == (1, -1)
    assert (kendall_tau(rising * 0, rising * 0), kendall_tau(rising * 0, rising)) == (1, 0)


def test_scores_are_compared_row_by_row() -> None:
    full = torch.cat((torch.arange(40.0), torch.tensor([7.0]), torch.arange(4.0)))
    counts = torch.tensor([40, 1, 0, 4])
    same = compare_scores(full, full, counts, 3)
    assert (same.max_rel_difference, same.kendall_tau, same.top10_overlap, same.reused_tokens) == (0, 1, 1, 3)
    other = full.clone()
    # One of the first row's best ten falls out; the last row is reversed.
    other[35] = 0.5
    other[41:] = full[41:].flip(0)
    changed = compare_scores(other, full, counts, 3)
    assert changed.top10_overlap == pytest.approx((0.9 + 0) / 2)
    assert changed.kendall_tau == pytest.approx(((780 - 2 * 34) / 780 - 1) / 2)
    assert changed.max_rel_difference == pytest.approx(34.5 / 39)


def test_histories_are_cut_edited_and_selected() -> None:
    histories = Histories(
        users=torch.tensor([5, 6, 7]),
        lengths=torch.tensor([3, 0, 2]),
        tokens={"item": torch.tensor([1, 2, 3, 8, 9]), "time": torch.tensor([10, 20, 30, 40, 50])},
        candidates={"candidate": torch.tensor([100, 101, 102, 103])},
        num_candidates=torch.tensor([2, 1, 1]),
        now=torch.tensor([35, 1, 55]),
        time="time",
        context={"city": (torch.tensor([4, 4, 5]), torch.tensor([2, 0, 1]))},
    )
    visit = histories.visit(torch.tensor([1, 0, 2]))
    assert visit.tokens["item"].tolist() == [1, 8, 9]
    assert visit.now.tolist() == [20, 1, 55]
    assert histories.cut(torch.tensor([1, 0, 2])).now.tolist() == [35, 1, 55]
    edited = histories.edited(torch.tensor([1, 0, 1])).tokens
    assert edited["item"].tolist() == [1, 1, 1, 8, 8]
    assert edited["time"] is histories.tokens["time"]
    assert histories.other_candidates().candidates["candidate"].tolist() == [100, 100, 101, 101]
    assert histories.asked(9).now.tolist() == [39, 1, 59]
    chosen = histories.select(torch.tensor([True, False, True]))
    assert chosen.tokens["item"].tolist() == [1, 2, 3, 8, 9]
    assert chosen.candidates["candidate"].tolist() == [100, 101, 103]
    assert chosen.context["city"][0].tolist() == [4, 4, 5]
    assert jagged.offsets(histories.select(torch.tensor([False, True, True])).lengths).tolist() == [0, 0, 2]


# ---- the command -----------------------------------------------------------------------------------------------


def run(*words: str) -> tuple[int, str]:
    small = ["--rows", "4", "--length", "30", "--candidates", "16"]
    result = CliRunner().invoke(app, ["audit", *words, *(small if "--help" not in words else [])])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(result.output.split())


def test_the_command(tmp_path: Any) -> None:
    file = tmp_path / "audit.json"
    code, text = run("--json", str(file))
    assert code == 0
    assert "STABLE: a prefix keeps" in text
    assert "layer 2" in text
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["stable"]
    assert written["scores"]["kendall_tau"] == 1

    code, text = run("--encoder", "from-end", "--json", str(file))
    assert code == 1
    assert "UNSTABLE" in text
    assert "positions: The first layer's keys and values change" in text
    written = json.loads(file.read_text(encoding="utf-8"))
    assert not written["stable"]
    assert [cause["name"] for cause in written["causes"]] == ["positions"]
    assert min(written["probes"]["visit"]["k"]) > UNSTABLE
    assert run("--encoder", "from-end", "--tolerance", "10")[0] == 0


def toy_for_the_command() -> tuple[Toy, Histories]:
    return Toy("own divisor"), sample_histories(3, 20, 5, 27)


def test_the_command_with_a_model_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "toys", sys.modules[__name__])
    code, text = run("--module", "toys:toy_for_the_command")
    assert code == 1
    assert "own divisor" in text
    assert "not compared: the adapter has no method reuse" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--encoder", "sinus"], "--encoder 'sinus' is not known; use one of append-stable, from-end, now"),
        (["--model", "bert"], "'bert' is not known"),
        (["--plant", "weeds"], "'weeds' is not known"),
        (["--plant", "bidirectional"], "needs --model sasrec"),
        (["--model", "sasrec", "--encoder", "now"], "needs --model hstu"),
        (["--module", "nothing"], "is not of the form package.module:factory"),
        (["--module", "no.such.module:x"], "give a module that Python can import"),
        (["--module", "json:nothing"], "json has no function 'nothing'"),
        (["--module", "os:getcwd"], "it has to return (model, sample)"),
        (["--delta", "0"], "delta=0 must be at least 1"),
        (["--json", "no/such/folder/a.json"], "does not exist"),
    ],
)
def test_bad_usage_is_explained(words: list[str], message: str) -> None:
    code, text = run(*words)
    assert code == 2
    assert message in text


def test_help_teaches_and_imports_nothing_heavy() -> None:
    text = run("--help")[1]
    for wanted in ("mtserve audit --encoder from-end", "exit code is 1", "PACKAGE.MODULE:FACTORY", "layer 0"):
        assert wanted in text
    check = (
        "import sys; from typer.testing import CliRunner; from mtserve_plugin.cli import app;"
        "assert CliRunner().invoke(app, ['audit', '--help']).exit_code == 0;"
        "assert not {'torch', 'torchrec', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
