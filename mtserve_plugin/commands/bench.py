"""`mtserve bench`: micro-benchmarks, one subcommand each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtserve_plugin.commands import quiet_imports
from mtserve_plugin.commands.outcome import FAILED_CHECK, reported
from mtserve_plugin.commands.progress import progress_bar
from mtserve_plugin.report import check_writable, console, print_measures, print_problems, write_json

bench = typer.Typer(help="Measure one part by itself.", no_args_is_help=True)


@bench.callback()
def _group() -> None:
    """Measure one part by itself."""


@bench.command()
def index(
    ids: Annotated[int, typer.Option(help="Distinct user ids to stream through an index of fixed size.")] = 10_000_000,
    users: Annotated[int, typer.Option(help="Users that count as many.")] = 1_000_000,
    visits: Annotated[int, typer.Option(help="Batches whose median is taken.")] = 400,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the measures here.")] = None,
) -> None:
    """Measure the index: what begin and commit cost, bytes per user, growth over millions of ids.

    A batch is 8 users with histories of 6,000 tokens, of which a dozen are new; begin looks them up, reserves pages and
    writes the page table, commit publishes. The exit code is 1 when memory grows with ids that are long forgotten.

    Examples:

        mtserve bench index

        mtserve bench index --ids 2000000 --json index.json
    """
    with reported():
        check_writable(json_file)
        with progress_bar() as step:
            step("importing torch", 0, 1)
            from mtserve_plugin.bench.index import bench_index

            result = bench_index(ids=ids, users=users, visits=visits, on_step=step)
        write_json(json_file, result.to_json())
        print_measures(console(), "index", result.table())
        if result.problems:
            print_problems(console(stderr=True), result.problems)
            raise typer.Exit(FAILED_CHECK)


@bench.command()
def transfer(
    users: Annotated[int, typer.Option(help="Users of a batch, all of whom return from the host tier.")] = 4,
    tokens: Annotated[int, typer.Option(help="History of each, a multiple of 1024.")] = 1024,
    layers: Annotated[int, typer.Option(help="Layers; more of them overlap more of a batch's copies.")] = 24,
    rounds: Annotated[int, typer.Option(help="Rounds whose median is taken.")] = 7,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the measures here.")] = None,
) -> None:
    """Measure onloads and offloads: shares of memcpy's bandwidth, and how much of them hides behind compute.

    Pages have the paper's size (32 tokens, 4 heads of 128, bfloat16: 64 KiB per layer). Needs two idle cores: one
    computes while the other copies. The exit code is 1 when bytes come back that were not stored.

    Examples:

        mtserve bench transfer

        mtserve bench transfer --layers 8 --rounds 15 --json transfer.json
    """
    with reported():
        check_writable(json_file)
        with progress_bar() as step:
            step("importing torch", 0, 1)
            from mtserve_plugin.bench.transfer import bench_transfer

            result = bench_transfer(users=users, tokens=tokens, layers=layers, rounds=rounds, on_step=step)
        write_json(json_file, result.to_json())
        print_measures(console(), "transfer", result.table())
        if result.problems:
            print_problems(console(stderr=True), result.problems)
            raise typer.Exit(FAILED_CHECK)


@bench.command()
def forward(
    history: Annotated[list[int], typer.Option(help="Tokens of a request's history; may be given several times.")] = [  # noqa: B006
        2000,
        4000,
    ],
    delta: Annotated[int, typer.Option(help="Of them, tokens that are not cached.")] = 32,
    candidates: Annotated[int, typer.Option(help="Candidates per request.")] = 64,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 4,
    heads: Annotated[int, typer.Option(help="Heads of a layer.")] = 4,
    dim: Annotated[int, typer.Option(help="Dimension of a head, for keys and for values.")] = 64,
    rounds: Annotated[int, typer.Option(help="Rounds whose median is taken.")] = 7,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the measures here.")] = None,
) -> None:
    """Measure whole requests, cached and recomputed, against the arithmetic that their layers need.

    One thread, float32. Where GENERATIVE_RECOMMENDERS names a checkout, a DlrmHSTU of the same sizes is measured too,
    as it is and attached. The exit code is 1 when scores with the cache differ from recomputed ones.

    Examples:

        mtserve bench forward

        mtserve bench forward --history 8000 --rounds 3 --json forward.json
    """
    with reported():
        check_writable(json_file)
        with progress_bar() as step:
            step("importing torch and torchrec", 0, 1)
            quiet_imports()
            from mtserve_plugin.bench.forward import bench_forward

            result = bench_forward(
                histories=history,
                delta=delta,
                candidates=candidates,
                layers=layers,
                heads=heads,
                dim=dim,
                rounds=rounds,
                on_step=step,
            )
        write_json(json_file, result.to_json())
        print_measures(console(), "forward", result.table())
        if result.problems:
            print_problems(console(stderr=True), result.problems)
            raise typer.Exit(FAILED_CHECK)


@bench.command()
def attention(
    queries: Annotated[int, typer.Option(help="Queries of a request: a third new tokens, the rest candidates.")] = 96,
    keys: Annotated[int, typer.Option(help="Tokens of its history; all but the new ones are cached.")] = 4096,
    heads: Annotated[int, typer.Option(help="Heads of a layer.")] = 4,
    dim: Annotated[int, typer.Option(help="Dimension of a head, for keys and for values.")] = 128,
    rounds: Annotated[int, typer.Option(help="Rounds whose median is taken.")] = 15,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the measures here.")] = None,
) -> None:
    """Measure attention over pages against matrix products, and copies of pages against memcpy.

    One thread, float32 and bfloat16. MTSERVE_CPU_ISA limits the instruction set of the kernel, not that of the matrix
    products. The exit code is 1 when attention differs from float64 by more than its dtype's rounding.

    Examples:

        mtserve bench attention

        MTSERVE_CPU_ISA=avx2 mtserve bench attention --keys 8192 --json attention.json
    """
    with reported():
        check_writable(json_file)
        with progress_bar() as step:
            step("importing torch", 0, 1)
            from mtserve_plugin.bench.attention import bench_attention

            result = bench_attention(queries=queries, keys=keys, heads=heads, dim=dim, rounds=rounds, on_step=step)
        write_json(json_file, result.to_json())
        print_measures(console(), "attention", result.table())
        if result.problems:
            print_problems(console(stderr=True), result.problems)
            raise typer.Exit(FAILED_CHECK)
