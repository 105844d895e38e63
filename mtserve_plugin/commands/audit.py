"""`mtserve audit`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from mtserve_plugin.commands import quiet_imports
from mtserve_plugin.commands.outcome import FAILED_CHECK, reported
from mtserve_plugin.commands.progress import progress_bar
from mtserve_plugin.errors import ConfigError
from mtserve_plugin.report import check_writable, console, write_json

_MODELS = ("hstu", "sasrec")
_ENCODERS = ("append-stable", "from-end", "now")
_PLANTS = ("none", "batch-divisor", "bidirectional", "dropout")


def audit(
    model: Annotated[str, typer.Option(help=f"Small model to audit: {' or '.join(_MODELS)}.")] = "hstu",
    encoder: Annotated[
        str,
        typer.Option(
            help="How positions and times enter: append-stable, from-end (positions count from the end of the "
            "history) or now (times count from the request)."
        ),
    ] = "append-stable",
    plant: Annotated[
        str,
        typer.Option(
            help="Another factor that breaks reuse: batch-divisor (attention divides by the batch's longest row), "
            "bidirectional (with --model sasrec), dropout, or none."
        ),
    ] = "none",
    module: Annotated[
        str | None,
        typer.Option(
            metavar="PACKAGE.MODULE:FACTORY",
            help="Audit your own model instead: a function without arguments that returns the model (or an adapter) "
            "and its sample, as for mtserve_plugin.audit.",
        ),
    ] = None,
    rows: Annotated[int, typer.Option(help="Histories in the sample.", min=1)] = 6,
    length: Annotated[int, typer.Option(help="Longest history in the sample, in tokens.", min=2, max=500)] = 120,
    candidates: Annotated[int, typer.Option(help="Items to score per history.", min=1)] = 64,
    delta: Annotated[int, typer.Option(help="Tokens that each history grows by.")] = 8,
    tolerance: Annotated[
        float | None,
        typer.Option(help="Drift that counts as rounding.", show_default="1e-5, 2e-2 in 16-bit dtypes"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the weights and the sample.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the report here.")] = None,
) -> None:
    """Does a history keep its keys and values when it grows? Only then is a cache exact.

    A cache keeps the keys and values of a history's first tokens. They must not change when events are appended, when
    time passes, or with who else is in the batch. This command encodes P tokens, then P + delta, compares layer by
    layer, changes one thing at a time, and says what is to blame. It also compares the scores of a request that reuses
    the prefix with those of a full recompute.

    Where the drift begins tells much: in layer 0 it comes from positions or times, from layer 1 on out of attention.

    The exit code is 1 when the model is not stable. The default model is stable; the other variants show what unstable
    ones look like.

    Examples:

        mtserve audit

        mtserve audit --encoder from-end

        mtserve audit --plant batch-divisor

        mtserve audit --model sasrec --plant bidirectional --json audit.json

        mtserve audit --module my_package.models:for_audit
    """
    with reported():
        check_writable(json_file)
        for name, value, known in (
            ("--model", model, _MODELS),
            ("--encoder", encoder, _ENCODERS),
            ("--plant", plant, _PLANTS),
        ):
            if value not in known:
                raise ConfigError(f"{name} {value!r} is not known; use one of {', '.join(known)}")
        quiet_imports()
        with progress_bar() as step:
            step("importing torch, building the model", 0, 2)
            from mtserve_plugin.stability import audit as run_audit

            if module is None:
                from mtserve_plugin.stability.adapters import ranker_features
                from mtserve_plugin.stability.demo import build_demo, sample_histories

                audited: Any = build_demo(model, encoder, plant, seed)
                sample: Any = ranker_features(sample_histories(rows, length, candidates, seed + 1))
            else:
                audited, sample = _call(_factory(module), module)
            step("encoding histories", 1, 2)
            report = run_audit(audited, sample, delta=delta, tolerance=tolerance, show=False)
        write_json(json_file, report.to_json())
        report.print(console())
        if not report.stable:
            raise typer.Exit(FAILED_CHECK)


def _factory(name: str) -> Callable[[], Any]:
    path, _, attribute = name.partition(":")
    if not path or not attribute:
        raise ConfigError(f"--module {name!r} is not of the form package.module:factory")
    try:
        found = getattr(importlib.import_module(path), attribute, None)
    except ModuleNotFoundError as error:
        raise ConfigError(f"--module {name}: {error}; give a module that Python can import from here") from None
    if not callable(found):
        raise ConfigError(f"--module {name}: {path} has no function {attribute!r}")
    return found


def _call(factory: Callable[[], Any], name: str) -> tuple[Any, Any]:
    made = factory()
    if not isinstance(made, tuple) or len(made) != 2:
        raise ConfigError(f"--module {name} returned {type(made).__name__}; it has to return (model, sample)")
    return made
