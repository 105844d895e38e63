"""How a command ends: 0 done, 1 a check failed, 2 it was asked for something that cannot be done, 130 Ctrl-C."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.text import Text

from mtserve_plugin.errors import CacheError, ConfigError, InputError, MissingDependencyError
from mtserve_plugin.report import console

FAILED_CHECK = 1
BAD_USAGE = 2
STOPPED = 130


@contextmanager
def reported() -> Iterator[None]:
    """Ends the command without a traceback on Ctrl-C and this package's errors; others pass, as defects."""
    try:
        yield
    except CacheError as error:
        console(stderr=True).print(Text(f"error: {error}"), soft_wrap=True)
        asked = isinstance(error, ConfigError | InputError | MissingDependencyError)
        raise typer.Exit(BAD_USAGE if asked else FAILED_CHECK) from None
    except KeyboardInterrupt:
        console(stderr=True).print("stopped before the end; no file was written")
        raise typer.Exit(STOPPED) from None
