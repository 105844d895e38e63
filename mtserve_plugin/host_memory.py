"""Makes the host tier resident before serving starts, in parallel and with progress shown."""

from __future__ import annotations

import sys
import time
from typing import Any

_SLICE = 1 << 30
_SHOW_AFTER_SECONDS = 2.0


def make_resident(engine: Any, host_bytes: int) -> None:
    """Touches the whole host tier; on a terminal a progress bar appears when it takes longer than two seconds."""
    capacity = engine.host_capacity()
    done = 0
    started = time.monotonic()
    bar = None
    try:
        while done < capacity:
            done = engine.touch_arena(_SLICE)
            if bar is None and sys.stderr.isatty() and time.monotonic() - started > _SHOW_AFTER_SECONDS:
                bar = _start_bar(capacity)
            if bar is not None:
                bar.update(bar.task_ids[0], completed=done)
    finally:
        if bar is not None:
            bar.stop()


def _start_bar(capacity: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    bar = Progress(
        TextColumn("host tier"), BarColumn(), DownloadColumn(binary_units=True), console=Console(stderr=True)
    )
    bar.add_task("host tier", total=capacity)
    bar.start()
    return bar
