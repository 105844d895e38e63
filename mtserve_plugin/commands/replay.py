"""`mtserve replay`."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated

import typer

from mtserve_plugin.commands import quiet_imports
from mtserve_plugin.commands.outcome import FAILED_CHECK, reported
from mtserve_plugin.commands.progress import progress_bar
from mtserve_plugin.errors import ConfigError
from mtserve_plugin.replay.options import MODELS, MODES, ReplayOptions, parse_bytes, parse_names, parse_numbers
from mtserve_plugin.report import check_writable, console, print_problems, print_replay, write_json
from mtserve_plugin.report_html import write_report

_DEFAULT = ReplayOptions()
_DEFAULT_SIZES = ",".join(map(str, _DEFAULT.batch_sizes))
_DEFAULT_MODES = ",".join(_DEFAULT.modes)
_SIZES = ", ".join(
    f"{name} ({shape.layers} layers, {shape.heads} heads of {shape.dim}, {shape.dtype})"
    for name, shape in MODELS.items()
)

Trace = Annotated[
    str,
    typer.Option(
        help="kuairand-like or mt-like (synthetic, shaped like the paper's datasets), ml-100k (needs recbole), "
        "or a path: a folder with KuaiRand-1K, MovieLens or RecBole files, or any CSV with user, item and time.",
    ),
]
Requests = Annotated[int, typer.Option(help="Timed requests per mode and batch size: the last ones of the trace.")]
BatchSizes = Annotated[str, typer.Option(help="Requests per batch, each measured on the same requests.")]
Modes = Annotated[str, typer.Option(help=f"Some of {', '.join(MODES)}; recompute is always run.")]
Model = Annotated[str, typer.Option(help=f"Size of the HSTU model: {_SIZES}.")]
Layers = Annotated[int | None, typer.Option(help="Layers, instead of the model's.", show_default="model's")]
Heads = Annotated[int | None, typer.Option(help="Heads per layer, instead of the model's.", show_default="model's")]
Dim = Annotated[int | None, typer.Option(help="Dimension per head, instead of the model's.", show_default="model's")]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16, instead of the model's.", show_default="model's")
]
Candidates = Annotated[int, typer.Option(help="Items to score per request.")]
Pages = Annotated[
    int | None,
    typer.Option(help="Pages of the device tier.", show_default="a fifth of what the trace's users need"),
]
PageSize = Annotated[int, typer.Option(help="Tokens per page.")]
HostBytes = Annotated[
    str | None,
    typer.Option(help="Host tier of the hierarchical mode, e.g. 2GiB.", show_default="room for all users"),
]
Chunk = Annotated[int, typer.Option(help="Tokens per host chunk; a multiple of the page size.")]
Users = Annotated[int, typer.Option(help="Users of a synthetic trace.")]
MeanHistory = Annotated[
    int | None,
    typer.Option(help="Mean history of a synthetic trace, in tokens.", show_default="956, mt-like 1730"),
]
MaxHistory = Annotated[
    int | None,
    typer.Option(help="Longest history, in tokens.", show_default="3000, mt-like 2000, files 20000"),
]
AtCap = Annotated[
    str,
    typer.Option(
        help="What happens at the longest history: stop (later events are left out), slide (the oldest event goes, "
        "which invalidates the whole prefix), step:N (the N oldest go at once)."
    ),
]
Seed = Annotated[int, typer.Option(help="Of the synthetic trace, the candidates and the weights.")]
Threads = Annotated[int | None, typer.Option(help="Threads of torch.", show_default="torch's choice")]
Breakdown = Annotated[
    bool, typer.Option("--breakdown", help="Time each step of the paper's Algorithm 1 too (its table 2).")
]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write config, machine and rows here.")]
Report = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE", help="Write one HTML page here: plots, tables, config and machine."),
]
Paper = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Run an experiment of the paper, its own figures beside ours: table1, table2, table3, table5, table6 or "
        "figure1. Options that are given replace the experiment's.",
    ),
]
Scale = Annotated[
    str,
    typer.Option(help="Of --paper: small (a few minutes on two cores), or full (the paper's sizes, if they fit)."),
]


def replay(
    ctx: typer.Context,
    trace: Trace = _DEFAULT.trace,
    requests: Requests = _DEFAULT.requests,
    batch_sizes: BatchSizes = _DEFAULT_SIZES,
    modes: Modes = _DEFAULT_MODES,
    model: Model = _DEFAULT.model,
    layers: Layers = None,
    heads: Heads = None,
    dim: Dim = None,
    dtype: Dtype = None,
    candidates: Candidates = _DEFAULT.candidates,
    pages: Pages = None,
    page_size: PageSize = _DEFAULT.page_size,
    host_bytes: HostBytes = None,
    chunk: Chunk = _DEFAULT.chunk,
    users: Users = _DEFAULT.users,
    mean_history: MeanHistory = None,
    max_history: MaxHistory = None,
    at_cap: AtCap = _DEFAULT.at_cap,
    seed: Seed = _DEFAULT.seed,
    threads: Threads = None,
    breakdown: Breakdown = False,
    json_file: Json = None,
    report_file: Report = None,
    paper: Paper = None,
    scale: Scale = "small",
) -> None:
    """Serve a trace with and without the cache: latency, speed-up, hit ratios, score differences.

    The same requests go through a model four times: recompute encodes every history anew, device keeps keys and
    values in pages alone, paper has host memory behind the pages that full chunks reach (the paper's policy),
    hierarchical writes the tails back too. Every score is compared with recompute's, and two planted errors must show
    in that comparison; the exit code is 1 if one does not, or if scores differ.

    Caches are filled with each user's latest earlier request before timing. The modes take turns batch by batch, and
    background copies end between two turns, outside the latency.

    Examples:

        mtserve replay

        mtserve replay --batch-sizes 8 --pages 400 --host-bytes 2GiB --json replay.json

        mtserve replay --batch-sizes 8 --breakdown --report replay.html

        mtserve replay --trace ./KuaiRand-1K/data --requests 1000 --max-history 4000

        mtserve replay --paper table1
    """
    with reported():
        check_writable(json_file)
        check_writable(report_file, "--report")
        options = ReplayOptions(
            trace=trace,
            requests=requests,
            batch_sizes=parse_numbers("--batch-sizes", batch_sizes),
            modes=parse_names(modes),
            model=model,
            layers=layers,
            heads=heads,
            dim=dim,
            dtype=dtype,
            candidates=candidates,
            pages=pages,
            page_size=page_size,
            host_bytes=None if host_bytes is None else parse_bytes(host_bytes),
            chunk=chunk,
            users=users,
            mean_history=mean_history,
            max_history=max_history,
            at_cap=at_cap,
            seed=seed,
            threads=threads,
            breakdown=breakdown,
            detail=report_file is not None,
        )
        given = [name for name in ctx.params if _on_command_line(ctx, name)]
        if paper is not None:
            _replay_paper(paper, scale, options, given, json_file)
            return
        if "scale" in given:
            raise ConfigError("--scale belongs to --paper; add --paper table1, or leave it out")
        with progress_bar() as step:
            step("importing torch and torchrec", 0, 1)
            _before_torch()
            from mtserve_plugin.replay.run import run_replay

            result = run_replay(options, step)
        values = result.to_json()
        write_json(json_file, values)
        write_report(report_file, values)
        print_replay(console(), values)
        if result.problems:
            print_problems(console(stderr=True), result.problems)
            raise typer.Exit(FAILED_CHECK)


def _on_command_line(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _replay_paper(name: str, scale: str, options: ReplayOptions, given: list[str], json_file: Path | None) -> None:
    if "report_file" in given:
        raise ConfigError("--report does not go with --paper; write its values with --json")
    fields = {field.name for field in dataclasses.fields(options)}
    with progress_bar() as step:
        step("importing torch and torchrec", 0, 1)
        _before_torch()
        from mtserve_plugin.replay.paper.measure import run_experiment
        from mtserve_plugin.replay.paper.tables import print_experiment

        values = run_experiment(
            name,
            scale,
            {option: getattr(options, option) for option in given if option in fields},
            step,
            lambda text: console(stderr=True).print(text),
        )
    write_json(json_file, values)
    print_experiment(console(), values)
    if values["problems"]:
        print_problems(console(stderr=True), values["problems"])
        raise typer.Exit(FAILED_CHECK)


def _before_torch() -> None:
    # Threads of OpenMP that wait by spinning take cores from the transfer workers, and from whatever else runs on
    # the machine: with two busy cores a small batch took 80 times longer. The user's own setting wins.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    quiet_imports()
