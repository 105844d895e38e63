"""`mtserve plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtserve_plugin.commands.outcome import reported
from mtserve_plugin.commands.progress import progress_bar
from mtserve_plugin.plan.options import PlanOptions, parse_duration
from mtserve_plugin.plan.table import print_appendix_c, print_plan
from mtserve_plugin.replay.options import MODELS, parse_bytes
from mtserve_plugin.report import check_writable, console, write_json

_DEFAULT = PlanOptions()
_SIZES = ", ".join(MODELS)

Trace = Annotated[
    str | None,
    typer.Option(help="Your log, or a trace as mtserve simulate takes it, instead of the five numbers below."),
]
Users = Annotated[int, typer.Option(help="Users who come back.")]
Tokens = Annotated[int, typer.Option(help="Mean history of a request, in tokens.")]
MaxHistory = Annotated[int | None, typer.Option(help="Longest history, in tokens.", show_default="3 x --tokens")]
NewTokens = Annotated[float, typer.Option(help="New tokens between two requests of a user, mean.")]
Interval = Annotated[str, typer.Option(help="Time between two requests of a user, mean: 90s, 15min, 1.5h, 2d.")]
Model = Annotated[str, typer.Option(help=f"Shape of the model: {_SIZES}.")]
Layers = Annotated[int | None, typer.Option(help="Layers, instead of the model's.", show_default="model's")]
Heads = Annotated[int | None, typer.Option(help="Heads per layer, instead of the model's.", show_default="model's")]
Dim = Annotated[int | None, typer.Option(help="Dimension per head, instead of the model's.", show_default="model's")]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16, instead of the model's.", show_default="model's")
]
DeviceMemory = Annotated[str, typer.Option(help="Device memory for pages, workbench and forwards, e.g. 24GiB.")]
HostMemory = Annotated[str, typer.Option(help="Host memory for the cache, e.g. 256GiB; 0 for none.")]
BatchSize = Annotated[int, typer.Option(help="Requests per batch.")]
PageSize = Annotated[int, typer.Option(help="Tokens per page.")]
Chunk = Annotated[int, typer.Option(help="Tokens per host chunk; a multiple of the page size.")]
Staged = Annotated[bool, typer.Option("--staged", help="Plan an onload region for staged onloads.")]
AppendixC = Annotated[bool, typer.Option("--appendix-c", help="Print the paper's own memory table, and end.")]
Seed = Annotated[int, typer.Option(help="Of the simulated requests.")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the plan here.")]


def plan(
    trace: Trace = None,
    users: Users = _DEFAULT.users,
    tokens: Tokens = _DEFAULT.tokens,
    max_history: MaxHistory = None,
    new_tokens: NewTokens = _DEFAULT.new_tokens,
    interval: Interval = "1h",
    model: Model = _DEFAULT.model,
    layers: Layers = None,
    heads: Heads = None,
    dim: Dim = None,
    dtype: Dtype = None,
    device_memory: DeviceMemory = "24GiB",
    host_memory: HostMemory = "256GiB",
    batch_size: BatchSize = _DEFAULT.batch_size,
    page_size: PageSize = _DEFAULT.page_size,
    chunk: Chunk = _DEFAULT.chunk,
    staged: Staged = False,
    appendix_c: AppendixC = False,
    seed: Seed = _DEFAULT.seed,
    json_file: Json = None,
) -> None:
    """Size a cache for your users: memory, hit ratios to expect, traffic between the tiers, a configuration to paste.

    Tell it five things (users, tokens per user, return interval, model, memory), or give it a log. Memory is
    arithmetic; hit ratios come from the index that would serve, run over the log or over imagined requests.

    Examples:

        mtserve plan --users 50000 --tokens 4000 --interval 2h --device-memory 40GiB --host-memory 1TiB

        mtserve plan --model paper --layers 4 --users 2000 --json plan.json

        mtserve plan --trace mt-like --device-memory 60GiB

        mtserve plan --appendix-c
    """
    with reported():
        if appendix_c:
            print_appendix_c(console())
            return
        check_writable(json_file)
        options = PlanOptions(
            trace=trace,
            users=users,
            tokens=tokens,
            max_history=max_history,
            new_tokens=new_tokens,
            interval_s=parse_duration(interval),
            model=model,
            layers=layers,
            heads=heads,
            dim=dim,
            dtype=dtype,
            device_bytes=parse_bytes(device_memory),
            host_bytes=parse_bytes(host_memory),
            batch_size=batch_size,
            page_size=page_size,
            chunk=chunk,
            staged=staged,
            seed=seed,
        )
        with progress_bar() as step:
            step("importing torch", 0, 1)
            from mtserve_plugin.plan.run import make_plan

            result = make_plan(options, step).to_json()
        write_json(json_file, result)
        print_plan(console(), result)
