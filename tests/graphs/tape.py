"""A recorder for the CPU: logs each operator that a body calls and calls it again, on the same tensors, at each replay.

It is stricter than a CUDA graph. It refuses what cannot be recorded (a value that comes to the host) and what must not
be (a tensor that is neither a weight, the table, a bucket's buffer nor a result of the recording), and it spoils with
NaN whatever a shared memory pool may hand to somebody else.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

# Operators whose result the host has to see.
_TO_HOST = ("_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero", "_assert_async", "lift_fresh")


class NoEvent:
    """The CPU has done everything when a call returns."""

    def record(self) -> None: ...
    def wait(self) -> None: ...
    def synchronize(self) -> None: ...


def storage(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


class Tape(TorchDispatchMode):
    """One recording."""

    def __init__(self, recorder: TapeRecorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self.made: list[torch.Tensor] = []  # results, each with memory of its own
        self.read: set[int] = set()
        self.handed_out: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if name in _TO_HOST:
            raise RuntimeError(f"{name} brings a value to the host while recording")
        for x in tensors((args, kwargs)):
            self._check_input(name, x)
        out = func(*args, **kwargs)
        known = {storage(x) for x in tensors((args, kwargs))}
        fresh = [x for x in tensors(out) if storage(x) not in known]
        self.made += [x.detach() for x in fresh]
        if fresh or func._schema.is_mutable:  # views stand as they are
            keep = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
            self.calls.append((func, *keep, [x.detach() for x in fresh]))
        return out

    def _check_input(self, name: str, x: torch.Tensor) -> None:
        place = storage(x)
        if any(place == storage(y) for y in self.made):
            return
        self.read.add(place)
        if not self.recorder.is_static(x):
            raise RuntimeError(f"{name} reads a tensor {tuple(x.shape)} that belongs to one batch")

    def replay(self) -> None:
        self.recorder.before_replay(self)
        for x in self.made:
            if x.is_floating_point():
                x.fill_(float("nan"))
        for func, args, kwargs, outputs in self.calls:
            out = func(*args, **kwargs)
            fresh = [x for x in tensors(out) if any(x.shape == y.shape for y in outputs)] if outputs else []
            for to, x in zip(outputs, fresh, strict=True):
                to.copy_(x)


class TapeRecorder:
    """Stands in for `CudaRecorder`; `static` lists what belongs to the model and the cache.

    Attributes:
        fail: recordings to come that fail, counted from the next one.
        num_recordings: how many were made.
        replays: how many were replayed.
        supported: what `supports` answers.
        recorded_by_others: what `is_recorded` answers.
    """

    def __init__(self, static: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._static = static
        self._buffers: set[int] = set()
        self._first: int | None = None
        self._tapes: list[Tape] = []
        self.fail: list[bool] = []
        self.supported = True
        self.recorded_by_others = False
        self.num_recordings = 0
        self.replays = 0

    def __call__(self) -> TapeRecorder:
        return self

    # ---- Recorder --------------------------------------------------------------------------------------------------

    def supports(self, device: torch.device) -> bool:
        return self.supported

    def is_recorded(self) -> bool:
        return self.recorded_by_others

    def record(self, body: Callable[[], Any]) -> tuple[Tape, Any]:
        tape = Tape(self)
        if self.fail and self.fail.pop(0):
            raise RuntimeError("this cannot be recorded")
        with tape:
            out = body()
        # What the caller holds is an alias, so that it shows whether somebody still holds it.
        aliases = tuple(x.detach() for x in out)
        tape.handed_out = [weakref.ref(x) for x in aliases]
        self._tapes.append(tape)
        self.num_recordings += 1
        return tape, aliases

    def event(self) -> NoEvent:
        return NoEvent()

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        if storage(to) not in self._buffers:  # a new bucket, whose first recording reads its activations
            self._buffers.add(storage(to))
            self._first = None
        to.copy_(source)

    def renew(self) -> None:
        self._tapes.clear()

    # ---- for the tape ----------------------------------------------------------------------------------------------

    def is_static(self, x: torch.Tensor) -> bool:
        place = storage(x)
        if place in self._buffers or any(place == storage(y) for y in self._static()):
            return True
        if any(place == storage(y) for tape in self._tapes for y in tape.made):
            return True
        if self._first is None:
            self._first = place
        return place == self._first

    def before_replay(self, tape: Tape) -> None:
        """Others that share the pool may have written where nothing is referenced any more."""
        self.replays += 1
        for other in self._tapes:
            if other is tape:
                continue
            alive = {storage(x) for ref in other.handed_out if (x := ref()) is not None}
            for x in other.made:
                if storage(x) not in alive | tape.read and x.is_floating_point():
                    x.fill_(float("nan"))
