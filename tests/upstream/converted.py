"""The host's own test modules, read from its checkout and made to run on the CPU with our side in the place of Triton.

Nothing of them is kept here: the text is read when a test runs, and a few words of it are replaced. What a case draws,
how it builds its inputs and which two results it holds against each other stay the host's.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests.upstream.conftest import HOST

# (pattern, what takes its place); the device, the decorators that skip without a GPU, and how much is run and printed.
_EVERYWHERE = (
    (r'torch\.cuda\.get_device_capability\(torch\.device\("cuda"\)\)', "(8, 0)"),
    (r'torch\.device\("cuda"\)', 'torch.device("cpu")'),
    (r"@unittest\.skipIf\(\*gpu_unavailable\)", ""),
    (r"verbosity=Verbosity\.verbose", "verbosity=Verbosity.quiet, derandomize=True, database=None"),
    (r"torch\.testing\.assert_close\(", "compare("),
)


class Compared:
    """Takes the place of `torch.testing.assert_close`, whose absolute tolerance of 1e-5 is as large as some outputs.

    Args:
        tolerances: of max|a-b| / max|b|, by dtype.

    Attributes:
        errors: all that were seen, by dtype.
    """

    def __init__(self, tolerances: dict[torch.dtype, float]) -> None:
        self.tolerances = tolerances
        self.errors: dict[torch.dtype, list[float]] = {dtype: [] for dtype in tolerances}

    def __call__(
        self, want: torch.Tensor, got: torch.Tensor, atol: float | None = None, rtol: float | None = None
    ) -> None:
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        if not want.any():
            # Gradients, which are not ours: both sides leave them zero.
            assert not got.any()
            return
        error, most = relative_error(got, want), self.tolerances[got.dtype]
        assert error <= most, f"{got.dtype}: relative error {error:.2e}, at most {most:.0e} passes"
        self.errors[got.dtype].append(error)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """max|a-b| / max|b|; infinite where a number is missing."""
    got, want = got.detach().double(), want.detach().double()
    if want.numel() == 0:
        return 0.0
    error = float((got - want).abs().max() / want.abs().max())
    return float("inf") if error != error else error


def place_in_row(offsets: torch.Tensor) -> torch.Tensor:
    """Of every token of a jagged batch, its place in its row."""
    return torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(offsets.diff())


def load(path: str, examples: int, *more: tuple[str, str], **names: Any) -> ModuleType:
    """The test module at `path` of the checkout; `names` are put over its own.

    Args:
        examples: hypothesis examples per test, in the place of the number there.
        more: replacements that this module needs besides.
    """
    file = Path(os.environ["GENERATIVE_RECOMMENDERS"], HOST, path)
    text = file.read_text(encoding="utf-8")
    for pattern, replacement in (*_EVERYWHERE, *more, (r"max_examples=\d+", f"max_examples={examples}")):
        text, found = re.subn(pattern, replacement, text)
        assert found, f"{file} has nothing like {pattern}: it is of another commit than db1bf8f"
    module = ModuleType(f"converted_{file.stem}")
    exec(compile(text, str(file), "exec"), vars(module))
    vars(module).update(names)
    return module


def with_no_gradient(out: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    """`out` as a function of the inputs whose gradients are zero: the cases call backward, and ours has none."""
    return out + sum((0.0 * x.sum()).to(out.dtype) for x in inputs)
