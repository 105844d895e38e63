"""The `mtserve` command."""

from __future__ import annotations

from typing import Annotated

import typer

from mtserve_plugin import __version__
from mtserve_plugin.commands.audit import audit
from mtserve_plugin.commands.bench import bench
from mtserve_plugin.commands.doctor import doctor
from mtserve_plugin.commands.plan import plan
from mtserve_plugin.commands.replay import replay
from mtserve_plugin.commands.simulate import simulate

app = typer.Typer(
    help="A two-tier key/value cache for generative recommenders. Start with: mtserve doctor, mtserve replay",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="markdown",
)
app.command()(replay)
app.command()(simulate)
app.command()(plan)
app.command()(audit)
app.add_typer(bench, name="bench")
app.command()(doctor)


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
    app()
