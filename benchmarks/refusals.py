"""What each refusal of `attach` protects from: its message, and the drift of a model that ignores it.

    python benchmarks/refusals.py [--json FILE]

Small rankers of `generative_recommenders`, from the checkout that GENERATIVE_RECOMMENDERS names, or else from the
stand-ins in tests/doubles. Each model has one factor and nothing else that moves keys and values: positions count from
the start and the divisor is pinned, unless these are the factor. Three measures:

- K/V: `audit`, the largest drift of a prefix's keys and values over everything that it changes, per layer; and the
  scores of one reuse against a recompute.
- scores: of what the cache's attention would make of the model, against those of the model, where that is the harm.
- none: the factor does not drift; the refusal keeps from a mistake, or from what is not known.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from ranking_service import CHECKOUT, HOST, Service, serving

from mtserve_plugin import AttachError, CacheConfig, HierarchicalKVCache, attach, audit, detach, jagged
from mtserve_plugin.commands.progress import progress_bar
from mtserve_plugin.machine import describe_machine
from mtserve_plugin.positions import AppendStablePositionalEncoder
from mtserve_plugin.report import check_writable, console, write_json
from mtserve_plugin.stability import Encoding, Histories
from mtserve_plugin.stability.adapters import adapter_for, watched
from mtserve_plugin.stability.measure import compare, compare_scores

NORM_LEN = 256
LENGTHS, CANDIDATES = (60, 90, 40, 75), 40
WINDOW, LAST = 12, 4


@dataclass(frozen=True)
class Result:
    """One row.

    Attributes:
        factor: what the model has.
        refused: names in the `AttachError`; empty where attach does not refuse.
        answer: what attach does instead.
        message: its first paragraph.
        layers: drift of K and V, the larger, per layer; `None` for a layer that keeps no rows of old tokens.
        scores: relative difference.
        tau: Kendall's, of the order of a row's candidates.
        top10: share of the best ten that stay.
        causes: that the audit names.
        breaks: reuse would not be exact without attach's answer.
        reused_tokens: behind the figure for the scores.
        note: what the figures are, or why there are none.
    """

    factor: str
    refused: tuple[str, ...]
    message: str
    breaks: bool
    answer: str = "accepts"
    reused_tokens: int = 0
    layers: tuple[float | None, ...] = ()
    scores: float | None = None
    tau: float | None = None
    top10: float | None = None
    causes: tuple[str, ...] = ()
    note: str = ""

    @property
    def worst(self) -> float:
        """The largest drift; 0 where none was measured."""
        return max([0.0, *(drift for drift in self.layers if drift is not None), self.scores or 0.0])


Plant = Callable[[Any], object]


@dataclass(frozen=True)
class Factor:
    """One factor, how a model gets it, and how its harm is measured.

    Args:
        plant: changes the model.
        measure: one of the functions below; a string says why there is nothing to measure.
        breaks: reuse would not be exact without attach's answer.
        host_only: the stand-ins lack it.
        cache: options in which the cache differs from the model.
        options: of attach.
        prepare: called before attach.
    """

    name: str
    plant: Plant
    measure: Callable[[Bench, Any], dict[str, Any]] | str
    breaks: bool = True
    host_only: bool = False
    cache: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Bench, HierarchicalKVCache], None] = lambda bench, cache: None


class Bench:
    """Models and requests of one service."""

    def __init__(self, service: Service) -> None:
        self.service = service
        model = service.build()
        self.users = service.users(model, 1)
        for user, length in enumerate(LENGTHS):
            self.users.add(user)
            self.users.grow(user, length)
        self.sample = self.users.request(list(range(len(LENGTHS))), [CANDIDATES] * len(LENGTHS))

    def model(self, seed: int = 0) -> Any:
        """A model whose prefixes keep their keys and values but for the divisor, which attach pins."""
        model = self.service.build(seed)
        transducer = model._hstu_transducer
        old = transducer._positional_encoder
        positions, times = old._position_embeddings_weight, old._timestamp_embeddings_weight
        new = AppendStablePositionalEncoder(
            positions.shape[0], times.shape[0] - 1, positions.shape[1], contextual_seq_len=old._contextual_seq_len
        )
        new.load_state_dict(old.state_dict())
        transducer._positional_encoder = new.eval()
        return model

    def cache(self, model: Any, **changes: Any) -> HierarchicalKVCache:
        sizes = {"attn_norm_len": NORM_LEN, "page_size": 8, "chunk_size": 16, "num_pages": 100}
        return HierarchicalKVCache(CacheConfig.for_model(model, **sizes).replace(**changes))

    def run(self, factor: Factor) -> Result:
        model = self.model()
        with self.cache(model, **factor.cache) as cache:
            factor.plant(model)
            factor.prepare(self, cache)
            refused, message = (), ""
            try:
                attach(model, cache, **({"user_feature": "user_id"} | factor.options))
            except AttachError as error:
                refused, message = error.factors, str(error).partition("\n\n")[0]
            made = Result(factor.name, refused, message, factor.breaks)
            if isinstance(factor.measure, str):
                return replace(made, note=factor.measure)
            return replace(made, **factor.measure(self, model))


# ---- measures --------------------------------------------------------------------------------------------------


def audited(bench: Bench, model: Any) -> dict[str, Any]:
    """The audit of a model that was refused, or of one that is attached."""
    pin(model)
    return _audit(model, bench.sample)


def audited_with_its_divisor(bench: Bench, model: Any) -> dict[str, Any]:
    """Attach would have pinned it."""
    return _audit(detach(model), bench.sample) | {"answer": "pinned"}


def audited_under(planted: Callable[[Any], AbstractContextManager[object]]) -> Callable[[Bench, Any], dict[str, Any]]:
    """With a function of the host replaced while the audit runs."""

    def measure(bench: Bench, model: Any) -> dict[str, Any]:
        with planted(model):
            return audited(bench, model)

    return measure


def audited_rows(rows_per_event: int, note: str) -> Callable[[Bench, Any], dict[str, Any]]:
    """The audit of a model whose layers have other rows than one per event; layers with too few are left out."""

    def measure(bench: Bench, model: Any) -> dict[str, Any]:
        pin(model)
        adapter, histories = adapter_for(model, bench.sample)
        rows = RowsAdapter(model, adapter, rows_per_event)
        return _audit(rows, histories, rows) | {"note": note}

    return measure


def scores_as_cached(undo: Plant) -> Callable[[Bench, Any], dict[str, Any]]:
    """The model's own scores against those of the model that the cache would make of it."""

    def measure(bench: Bench, model: Any) -> dict[str, Any]:
        pin(model)
        with torch.no_grad():
            own = model(*bench.sample)[3][0]
            undo(model)
            made = model(*bench.sample)[3][0]
        drift = compare_scores(made, own, torch.full((len(LENGTHS),), CANDIDATES), 0)
        return {
            "scores": drift.max_rel_difference,
            "tau": drift.kendall_tau,
            "top10": drift.top10_overlap,
            "note": "what the cache's attention would make of the model, against the model",
        }

    return measure


def context_below_its_minimum(bench: Bench, model: Any) -> dict[str, Any]:
    """Few events and few candidates, then more: the context rows begin to count."""
    sample = bench.users.request([0], [2], [24])
    adapter, histories = adapter_for(pin(detach(model)), sample)
    short, whole = (adapter.encode(some) for some in (histories.cut(torch.tensor([12])), histories))
    drift = compare(replace(short, identity=None), replace(whole, identity=None))
    return {"layers": drift.worst, "answer": "in the identity"}


def other_weights(bench: Bench, model: Any) -> dict[str, Any]:
    encodings = []
    for one in (model, bench.model(1)):
        adapter, histories = adapter_for(pin(one), bench.sample)
        encodings.append(adapter.encode(histories))
    drift = compare(*encodings)
    return {"layers": drift.worst, "note": "K/V of the one set of weights against those of the other"}


def _audit(model: Any, sample: Any, rows: RowsAdapter | None = None) -> dict[str, Any]:
    report = audit(model, sample, show=False)
    # Drift that is not seen between two visits may be seen by company, or by a later request.
    layers: list[float | None] = [
        max(drifts) for drifts in zip(*(d.worst for d in report.probes.values()), strict=True)
    ]
    for index in rows.left_out if rows is not None else ():
        layers.insert(index, None)
    scores = report.scores
    return {
        "layers": tuple(layers),
        "reused_tokens": 0 if scores is None else scores.reused_tokens,
        "scores": None if scores is None else scores.max_rel_difference,
        "tau": None if scores is None else scores.kendall_tau,
        "top10": None if scores is None else scores.top10_overlap,
        "causes": tuple(cause.name for cause in report.causes),
    }


class RowsAdapter:
    """Watches the layers of a model that has `rows_per_event` rows per event of a history, one per candidate."""

    def __init__(self, model: Any, inner: Any, rows_per_event: int) -> None:
        self._model = model
        self._inner = inner
        self._rows_per_event = rows_per_event
        self.left_out: list[int] = []

    def encode(self, histories: Histories) -> Encoding:
        lengths = self._rows_per_event * histories.lengths + context_rows(self._model)
        starts = jagged.offsets(lengths + histories.num_candidates)
        shift = starts[:-1] - jagged.offsets(lengths)[:-1]
        kept = torch.arange(int(lengths.sum())) + jagged.spread(shift, lengths)
        layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        left_out: list[int] = []

        def tap(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if k.shape[0] == int(starts[-1]):
                layers.append((k[kept], v[kept]))
            else:
                left_out.append(len(layers) + len(left_out))
            return k, v

        with watched(tap):
            output = self._model(*self._inner.arguments(histories))
        self.left_out = left_out
        return Encoding(layers, lengths, output[3][0], self._inner.identity(histories))


# ---- factors ---------------------------------------------------------------------------------------------------


def layers_of(model: Any) -> Any:
    return model._hstu_transducer._stu_module._stu_layers


def context_rows(model: Any) -> int:
    return int(model._hstu_transducer._input_preprocessor._max_contextual_seq_len)


def pin(model: Any) -> Any:
    """Divides by one constant, as an attached model does; the host takes one number for padding and divisor."""
    stack = model._hstu_transducer._stu_module
    inner = stack.forward
    if not hasattr(type(stack), "_mtserve_base"):
        stack.forward = lambda **arguments: inner(**(arguments | {"max_seq_len": NORM_LEN}))
    return model


def in_layers(name: str, value: Any, only: int | None = None) -> Plant:
    def plant(model: Any) -> None:
        for index, layer in enumerate(layers_of(model)):
            if only is None or index == only:
                setattr(layer, name, value)

    return plant


def in_transducer(name: str, value: Any) -> Plant:
    return lambda model: setattr(model._hstu_transducer, name, value)


def own_class(name: str) -> Plant:
    """A part of a class that nobody knows."""

    def plant(model: Any) -> None:
        part = getattr(model._hstu_transducer, name)
        part.__class__ = type(f"Own{type(part).__name__}", (type(part),), {})

    return plant


def plain(model: Any) -> None:
    """No factor."""


def host_encoder(model: Any) -> None:
    mine = model._hstu_transducer._positional_encoder
    kind = sys.modules[f"{HOST}.modules.positional_encoder"].HSTUPositionalEncoder
    positions, times = mine._position_embeddings_weight, mine._timestamp_embeddings_weight
    sizes = (positions.shape[0], times.shape[0] - 1, positions.shape[1], mine._contextual_seq_len)
    theirs = kind(*sizes, is_inference=True)
    theirs.load_state_dict(mine.state_dict())
    theirs.set_hammer_kernel(model.hammer_kernel())
    model._hstu_transducer._positional_encoder = theirs.eval()


def contextual_layers(model: Any) -> None:
    in_layers("_contextual_seq_len", context_rows(model))(model)


def windowed(model: Any) -> None:
    in_layers("_max_attn_len", WINDOW)(model)


def full_attention(model: Any) -> None:
    in_layers("_min_full_attn_seq_len", LAST)(model)
    windowed(model)


def newest_only(model: Any) -> None:
    layers = layers_of(model)
    kind = sys.modules[f"{HOST}.modules.dynamic_stu"].L2STU
    layers[1] = kind(layers[1], max_l2_len=16, is_inference=True, contextual_seq_len=context_rows(model)).eval()
    layers[1].set_hammer_kernel(model.hammer_kernel())


def stochastic_depth(model: Any) -> None:
    layers = layers_of(model)
    layers[1] = sys.modules[f"{HOST}.modules.dynamic_stu"].SDSTU(layers[1], is_inference=True).eval()


def same_layer_twice(model: Any) -> None:
    layers = layers_of(model)
    layers[1] = layers[0]


def interleaved(model: Any) -> None:
    """The host's own preprocessor for it, whose module asks for a package that is not published."""
    transducer = model._hstu_transducer
    old, modules = transducer._input_preprocessor, f"{HOST}.modules"
    if importlib.util.find_spec("libfb") is None:
        for name in ("libfb", "libfb.py", "libfb.py.pyre"):
            sys.modules[name] = ModuleType(name)
        sys.modules["libfb.py.pyre"].none_throws = lambda value: value  # type: ignore[attr-defined]
    mlps, found, content = (
        importlib.import_module(f"{modules}.{name}")
        for name in ("contextualize_mlps", "contextual_interleave_preprocessor", "content_encoder")
    )

    def mlp(width: int, out: int, context: int, is_inference: bool) -> Any:
        return mlps.SimpleContextualizedMLP(width, out, 48, is_inference)

    new = found.ContextualInterleavePreprocessor(
        input_embedding_dim=old._input_embedding_dim,
        output_embedding_dim=old._output_embedding_dim,
        contextual_feature_to_max_length=old._contextual_feature_to_max_length,
        contextual_feature_to_min_uih_length=old._contextual_feature_to_min_uih_length,
        content_encoder=content.ContentEncoder(old._input_embedding_dim, is_inference=True),
        content_contextualize_mlp_fn=mlp,
        action_encoder=old._action_encoder,
        action_contextualize_mlp_fn=mlp,
        enable_interleaving=True,
        is_inference=True,
    )
    new.set_hammer_kernel(model.hammer_kernel())
    transducer._input_preprocessor = new.eval()


def drop_tables(model: Any) -> None:
    del model._embedding_collection


def version_is_taken(bench: Bench, cache: HierarchicalKVCache) -> None:
    attach(bench.model(1), cache, user_feature="user_id", version="7")


@contextmanager
def patched(module: str, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """One function of the host replaced by `make(function)`."""
    owner = sys.modules[module]
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


MASKS = f"{HOST}.ops.pytorch.pt_hstu_attention"
DOUBLES_MASKS = f"{HOST}.ops.hstu_compute"


def both_ways(model: Any) -> AbstractContextManager[object]:
    """The host's layers refuse to run without causality; its mask does it."""
    in_layers("_causal", True)(model)
    if MASKS in sys.modules:
        return host_mask(causal=False)

    def make(visible: Any) -> Any:
        def seen(*args: Any) -> torch.Tensor:
            forwards = visible(*args)
            return forwards | forwards.t()

        return seen

    return patched(DOUBLES_MASKS, "visible", make)


def last_rows_see_all(model: Any) -> AbstractContextManager[object]:
    """The host's mask does it; its layers have no option for it at this commit."""
    if MASKS in sys.modules:
        return host_mask(min_full_attn_seq_len=LAST)

    def make(visible: Any) -> Any:
        def seen(offsets: torch.Tensor, num_targets: torch.Tensor, window: int, context: int) -> torch.Tensor:
            lengths = offsets.diff()
            place = torch.arange(int(offsets[-1])) - jagged.spread(offsets[:-1], lengths)
            last = place >= jagged.spread(lengths - num_targets - LAST, lengths)
            wide, narrow = (visible(offsets, num_targets, most, context) for most in (0, window))
            return torch.where(last[:, None], wide, narrow)

        return seen

    return patched(DOUBLES_MASKS, "visible", make)


def host_mask(**options: Any) -> AbstractContextManager[object]:
    return patched(MASKS, "_get_valid_attn_mask", lambda mask: lambda *args, **named: mask(*args, **(named | options)))


STABLE = {"positions": "append_stable"}
COUNTS = "old K/V stay, but the cache would count other tokens than the layers have"

FACTORS = [
    Factor("append-stable encoder", plain, audited, breaks=False),
    Factor('host\'s encoder, positions="append_stable"', host_encoder, audited, breaks=False, options=STABLE),
    Factor("max_attn_len, the same in all layers", windowed, audited, breaks=False, cache={"max_attn_len": WINDOW}),
    Factor("SDSTU in eval mode", stochastic_depth, audited, breaks=False, host_only=True),
    Factor("positions from the end, times from the query", host_encoder, audited),
    Factor("divisor is the batch's longest row", plain, audited_with_its_divisor),
    Factor("context features below their minimum length", plain, context_below_its_minimum),
    Factor("training mode", lambda model: model.train(), audited),
    Factor("contextual_seq_len of the layers", contextual_layers, audited),
    Factor("causal=False", in_layers("_causal", False), audited_under(both_ways)),
    Factor(
        "min_full_attn_seq_len",
        full_attention,
        audited_under(last_rows_see_all),
        cache={"max_attn_len": WINDOW},
    ),
    Factor("L2STU layer", newest_only, audited_rows(1, "layer 1 keeps no K/V of old tokens"), host_only=True),
    Factor("other weights, same version", plain, other_weights, options={"version": "7"}, prepare=version_is_taken),
    Factor("target_aware=False", in_layers("_target_aware", False), scores_as_cached(in_layers("_target_aware", True))),
    Factor(
        "one layer has a window", in_layers("_max_attn_len", WINDOW, 1), scores_as_cached(in_layers("_max_attn_len", 0))
    ),
    Factor(
        "cache with another attn_scale",
        plain,
        scores_as_cached(in_layers("_attn_alpha", 1.0)),
        cache={"attn_scale": 1.0},
    ),
    Factor("interleaving preprocessor", interleaved, audited_rows(2, COUNTS), breaks=False, host_only=True),
    Factor("preprocessor of its own", own_class("_input_preprocessor"), "what it looks at is not known", breaks=False),
    Factor(
        "postprocessor of its own",
        own_class("_output_postprocessor"),
        "old K/V stay; it gets payloads without the cached events",
        breaks=False,
    ),
    Factor(
        "return_full_embeddings",
        in_transducer("_return_full_embeddings", True),
        "asks for outputs of cached tokens, which are not computed",
        breaks=False,
    ),
    Factor(
        "listwise training",
        in_transducer("_listwise_training", True),
        "hides which rows are candidates; the host allows it in training alone",
        breaks=False,
    ),
    Factor("stu_hook is set", in_transducer("stu_hook", print), "what the hook does is not known", breaks=False),
    Factor("the same layer twice", same_layer_twice, "one layer's place in the cache would hold two", breaks=False),
    Factor("half of a split model", drop_tables, "a mistake in the call: nothing could be stripped", breaks=False),
    Factor(
        "no user_feature",
        plain,
        "a mistake in the call: whose history it is would not be known",
        breaks=False,
        options={"user_feature": None},
    ),
]


def run(service: Service, step: Callable[[str, int, int], None] = lambda *_: None) -> tuple[list[Result], list[str]]:
    """The rows, and the names of factors that only the host itself has."""
    bench, has_host = Bench(service), MASKS in sys.modules
    chosen = [factor for factor in FACTORS if has_host or not factor.host_only]
    results = []
    for done, factor in enumerate(chosen):
        step(factor.name, done, len(chosen))
        results.append(bench.run(factor))
    return results, [factor.name for factor in FACTORS if factor not in chosen]


def show(results: list[Result], skipped: list[str], name: str) -> None:
    out = console()
    out.print(Text(f"models: {name}\n"))
    for row in results:
        if row.refused:
            out.print(Text.assemble((row.factor, "bold"), "\n", row.message, "\n"))
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("factor")
    table.add_column("attach")
    for column in ("K/V of old tokens, per layer", "scores", "tau", "top 10"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in results:
        if row.layers or row.scores is not None:
            table.add_row(row.factor, answer(row), *cells(row))
    out.print(table)
    out.print("Drift is max|a-b| / max|b|. Notes:")
    for row in results:
        if row.note and (row.layers or row.scores is not None):
            out.print(Text(f"  {row.factor}: {row.note}"))
    out.print("\nNothing to measure:")
    for row in results:
        if not row.layers and row.scores is None:
            out.print(Text(f"  {row.factor} ({', '.join(row.refused)}): not applicable, {row.note}"))
    if skipped:
        out.print(Text(f"\nOnly with a checkout ({CHECKOUT}): {', '.join(skipped)}"))


def answer(row: Result) -> str:
    return f"refuses: {', '.join(row.refused)}" if row.refused else row.answer


def cells(row: Result) -> tuple[str, str, str, str]:
    return (
        "  ".join("none" if drift is None else number(drift) for drift in row.layers) or "-",
        "-" if row.scores is None else number(row.scores),
        "-" if row.tau is None else f"{row.tau:.3f}",
        "-" if row.top10 is None else f"{row.top10:.0%}",
    )


def number(drift: float) -> str:
    return f"{drift:.1e}" if drift else "0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE")
    options = parser.parse_args()
    check_writable(options.json)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with serving(os.environ.get(CHECKOUT)) as service, progress_bar() as step:
        results, skipped = run(service, step)
    show(results, skipped, service.name)
    rows = [asdict(row) for row in results]
    write_json(options.json, {"models": service.name, "machine": describe_machine(), "rows": rows, "skipped": skipped})


if __name__ == "__main__":
    main()
