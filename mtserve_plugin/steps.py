"""The paper's steps (Algorithm 1, table 2) as ranges in the code that carries them out.

torch's profiler shows them by these names, and a `StepClock` adds up how long they take. Without either a range costs
a fraction of a microsecond.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import ParamSpec, TypeVar

import torch

PREPARE = "1-2 prepare metadata"
STRIP = "3 strip tokens"
EMBED = "4 embedding"
LAYOUT = "5 data layout"
LAYERS = "8 HSTU layers"
PROJECT = "8.1 compute q, k, v"
APPEND = "8.2 append"
WAIT = "8.3 wait for layer"
ATTEND = "8.4 attention"
OUTPUT = "8.5 output"
COMMIT = "9 commit, offload"
POSTPROCESS = "10 postprocess"
HASH = "content check"

STEPS = (HASH, PREPARE, STRIP, EMBED, LAYOUT, LAYERS, PROJECT, APPEND, WAIT, ATTEND, OUTPUT, COMMIT, POSTPROCESS)
"""In the order in which a batch comes through them; the steps 8.x are parts of step 8. The paper's steps 6 and 7 (await
and update the metadata) are no steps here: metadata is prepared inline, in 1-2, and published in 9."""

P = ParamSpec("P")
R = TypeVar("R")


class StepClock:
    """Adds up the time of each step while it is entered, on the thread that entered it.

    On a device whose work is asynchronous these are times of the host.

    Attributes:
        seconds: by step, of all batches since it was entered; a step that did not occur is absent.
        spans: name, begin and end of every step, in seconds of `time.perf_counter`; only if asked for.
    """

    def __init__(self, *, keep_spans: bool = False) -> None:
        self.seconds: dict[str, float] = {}
        self.spans: list[tuple[str, float, float]] | None = [] if keep_spans else None
        self._token: Token[StepClock | None] | None = None

    def __enter__(self) -> StepClock:
        self._token = _clock.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        _clock.reset(self._token)


class step:
    """`with step(STRIP): ...` marks a range; `@step.of(STRIP)` a whole function."""

    __slots__ = ("_began", "_clock", "_name", "_range")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._range = None
        if torch.autograd._profiler_enabled():
            self._range = torch.profiler.record_function(self._name)
            self._range.__enter__()
        self._clock = _clock.get()
        if self._clock is not None:
            self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        if self._clock is not None:
            end, seconds = time.perf_counter(), self._clock.seconds
            seconds[self._name] = seconds.get(self._name, 0.0) + end - self._began
            if self._clock.spans is not None:
                self._clock.spans.append((self._name, self._began, end))
        if self._range is not None:
            self._range.__exit__(*error)

    @staticmethod
    def of(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """A decorator: every call of the function is a range."""

        def mark(function: Callable[P, R]) -> Callable[P, R]:
            @functools.wraps(function)
            def marked(*args: P.args, **kwargs: P.kwargs) -> R:
                with step(name):
                    return function(*args, **kwargs)

            return marked

        return mark


_clock: ContextVar[StepClock | None] = ContextVar("mtserve_step_clock", default=None)
