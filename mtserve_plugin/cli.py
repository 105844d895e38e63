"""The `mtserve` command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

try:
    import typer

    from mtserve_plugin import __version__
    from mtserve_plugin.commands.audit import audit
    from mtserve_plugin.commands.bench import bench
    from mtserve_plugin.commands.doctor import doctor
    from mtserve_plugin.commands.plan import plan
    from mtserve_plugin.commands.replay import replay
    from mtserve_plugin.commands.simulate import simulate
except KeyboardInterrupt:
    # Nobody is there yet to end the command without a traceback.
    raise SystemExit(130) from None

_HELP = """A two-tier key/value cache for generative recommenders.

First steps:

    mtserve doctor                is everything there that it needs?
    mtserve replay                what it gains here, on synthetic requests
    mtserve replay --trace LOG    the same on a log of yours
    mtserve simulate --trace LOG  hit ratios of the whole log, at any size
    mtserve plan --trace LOG      memory to give, configuration to paste
    mtserve audit --help          does your model allow exact reuse?

Then attach(model, cache) in your server, as the README shows. Each command's --help has examples.
"""

app = typer.Typer(
    help=_HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="markdown",
)
app.command()(doctor)
app.command()(replay)
app.command()(simulate)
app.command()(plan)
app.command()(audit)
app.add_typer(bench, name="bench")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the `mtserve` script."""
    # A script's path lacks the current folder, where a reader's own --module or --trace package.module:name lies.
    sys.path.append(str(Path.cwd()))
    app()
