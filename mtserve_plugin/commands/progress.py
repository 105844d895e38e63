"""A progress bar on stderr, which leaves stdout to the tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mtserve_plugin.report import console


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Yields a function that is told what is being done, the steps done and the steps in all.

    The bar is drawn by that call alone, a few times a second: a thread that draws it would be timed too.
    """
    out = console(stderr=True)
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out, auto_refresh=False, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        shown = 0.0

        def step(text: str, done: int, total: int) -> None:
            nonlocal shown
            bar.update(task, description=text, completed=done, total=total)
            if out.is_terminal and (now := bar.get_time()) - shown > 0.2:
                shown = now
                bar.refresh()

        yield step
