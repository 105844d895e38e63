"""Progress on stderr, which leaves stdout to the tables: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mtserve_plugin.report import console

_SECONDS_PER_FRAME = 0.2
_SECONDS_PER_LINE = 30.0


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Yields a function that is told what is being done, the steps done and the steps in all.

    The bar is drawn by that call alone, a few times a second: a thread that draws it would be timed too.
    """
    out = console(stderr=True)
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=out, auto_refresh=False, transient=True, disable=not out.is_terminal)
    with bar:
        task = bar.add_task("starting", total=None)
        begun = bar.get_time()
        shown = 0.0 if out.is_terminal else begun

        def step(text: str, done: int, total: int) -> None:
            nonlocal shown
            bar.update(task, description=text, completed=done, total=total)
            # The clock of a task stops where its steps are all done; here others follow.
            bar.tasks[0].finished_time = None
            now = bar.get_time()
            if out.is_terminal and now - shown > _SECONDS_PER_FRAME:
                shown = now
                bar.refresh()
            elif not out.is_terminal and now - shown > _SECONDS_PER_LINE:
                shown = now
                out.print(f"{text}: {done:,} of {total:,}, {now - begun:.0f} s", markup=False, soft_wrap=True)

        yield step
