"""`mtserve simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtserve_plugin.commands.outcome import reported
from mtserve_plugin.commands.progress import progress_bar
from mtserve_plugin.replay.options import MODELS, parse_bytes, parse_names, parse_numbers
from mtserve_plugin.report import check_writable, console, write_json
from mtserve_plugin.report_html import write_report
from mtserve_plugin.simulate.options import BASE, FITTED_TRACES, POLICIES, SimulateOptions
from mtserve_plugin.simulate.table import print_simulation

_DEFAULT = SimulateOptions()
_DEFAULT_POLICIES = ",".join(_DEFAULT.policies)
_POINTS = "the paper's for kuairand-like and mt-like, else "

Trace = Annotated[
    str,
    typer.Option(help=f"{', '.join(FITTED_TRACES)} (synthetic), or a path to a log as in mtserve replay."),
]
Policy = Annotated[str, typer.Option(help=f"Some of {', '.join(POLICIES)}.")]
BatchSizes = Annotated[
    str | None, typer.Option(help="Requests per batch, e.g. 1,4,8.", show_default=f"{_POINTS}{BASE.batch_size}")
]
Pages = Annotated[
    str | None, typer.Option(help="Pages of the device tier, e.g. 20480,40960.", show_default=f"{_POINTS}{BASE.pages}")
]
Chunks = Annotated[
    str | None, typer.Option(help="Tokens per host chunk, e.g. 512,1024.", show_default=f"{_POINTS}{BASE.chunk}")
]
PageSize = Annotated[int, typer.Option(help="Tokens per page.")]
HostBytes = Annotated[str, typer.Option(help="Host tier of the policies paper and ours.")]
Model = Annotated[str, typer.Option(help=f"Whose keys and values count bytes: {', '.join(MODELS)}.")]
OffloadDelay = Annotated[int, typer.Option(help="Batches until what a batch writes back has reached the host.")]
Limit = Annotated[int | None, typer.Option(help="Only the first so many requests.", show_default="all")]
Users = Annotated[int | None, typer.Option(help="Users of a synthetic trace.", show_default="the trace's")]
Requests = Annotated[int | None, typer.Option(help="Requests of a synthetic trace.", show_default="the trace's")]
Seed = Annotated[int | None, typer.Option(help="Of a synthetic trace.", show_default="0")]
Plot = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Draw the time between two requests of a user here (SVG).")
]
Report = Annotated[
    Path | None, typer.Option("--report", metavar="FILE", help="Write one HTML page here: plots, tables, machine.")
]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write config, machine and rows here.")]


def simulate(
    trace: Trace = _DEFAULT.trace,
    policy: Policy = _DEFAULT_POLICIES,
    batch_sizes: BatchSizes = None,
    pages: Pages = None,
    chunks: Chunks = None,
    page_size: PageSize = _DEFAULT.page_size,
    host_bytes: HostBytes = f"{_DEFAULT.host_bytes >> 30}GiB",
    model: Model = _DEFAULT.model,
    offload_delay: OffloadDelay = _DEFAULT.offload_delay,
    limit: Limit = None,
    users: Users = None,
    requests: Requests = None,
    seed: Seed = None,
    plot: Plot = None,
    json_file: Json = None,
    report_file: Report = None,
) -> None:
    """Run a whole trace through the index and its policies, without keys, values or a model.

    Millions of requests in minutes on one core: hit ratios, tokens lost and bytes moved at any number of pages, chunk
    size, batch size and host memory. Without --batch-sizes, --pages and --chunks the two traces that are calibrated to
    the paper run at the paper's points, with its figures beside them; else every combination runs.

    Policies: recompute keeps nothing, device has pages alone, paper writes full chunks to the host as they fill, ours
    writes tails too before eviction reaches them (mtserve replay calls it hierarchical).

    Examples:

        mtserve simulate

        mtserve simulate --trace mt-like --policy paper,ours --json mt.json

        mtserve simulate --trace ten-million --policy ours --host-bytes 64TiB

        mtserve simulate --trace ./KuaiRand-1K/data --pages 20480,40960 --batch-sizes 8
    """
    with reported():
        check_writable(json_file)
        check_writable(plot, "--plot")
        check_writable(report_file, "--report")
        options = SimulateOptions(
            trace=trace,
            policies=parse_names(policy),
            batch_sizes=_numbers("--batch-sizes", batch_sizes),
            pages=_numbers("--pages", pages),
            chunks=_numbers("--chunks", chunks),
            page_size=page_size,
            host_bytes=parse_bytes(host_bytes),
            model=model,
            offload_delay=offload_delay,
            limit=limit,
            users=users,
            requests=requests,
            seed=seed,
        )
        with progress_bar() as step:
            step("importing torch", 0, 1)
            from mtserve_plugin.simulate.run import open_trace, run_simulation

            result = run_simulation(options, step).to_json()
            if plot is not None:
                from mtserve_plugin.simulate.intervals import draw_intervals

                step("drawing return intervals", 0, 1)
                draw_intervals(open_trace(options), plot)
        write_json(json_file, result)
        write_report(report_file, result)
        print_simulation(console(), result)


def _numbers(name: str, text: str | None) -> tuple[int, ...] | None:
    return None if text is None else parse_numbers(name, text)
