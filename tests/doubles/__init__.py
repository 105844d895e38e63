"""Stand-ins for the host's HSTU modules, for tests in environments without its checkout.

Written for this project in plain PyTorch; nothing is imported from the host. What they share with it is what
an attach mechanism can see: class names, signatures, parameter and attribute names, the order of calls, the
numbers on the CPU, and what decides whether a prefix can be reused: attention divides by the batch's
longest row, positions count from the end of the history, times from the last token.

Left out: the host's own one-prefix cache (`cached_forward` raises) and `DlrmHSTU` with its embedding tables.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from tests.doubles import (
    common,
    hstu_compute,
    hstu_transducer,
    jagged_tensors,
    layer_norm,
    positional_encoder,
    postprocessors,
    preprocessors,
    stu,
)

HOST = "generative_recommenders"
MODULES: dict[str, ModuleType] = {
    f"{HOST}.common": common,
    f"{HOST}.modules.hstu_transducer": hstu_transducer,
    f"{HOST}.modules.positional_encoder": positional_encoder,
    f"{HOST}.modules.postprocessors": postprocessors,
    f"{HOST}.modules.preprocessors": preprocessors,
    f"{HOST}.modules.action_encoder": preprocessors,
    f"{HOST}.modules.stu": stu,
    f"{HOST}.ops.hstu_compute": hstu_compute,
    f"{HOST}.ops.jagged_tensors": jagged_tensors,
    f"{HOST}.ops.layer_norm": layer_norm,
}


@contextmanager
def installed() -> Iterator[None]:
    """Lets `import generative_recommenders...` find the doubles; a real one comes back afterwards."""
    saved = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == HOST}
    for name in saved:
        del sys.modules[name]
    packages = {name: ModuleType(name) for name in (HOST, f"{HOST}.modules", f"{HOST}.ops")}
    for package in packages.values():
        package.__path__ = []
    for name, module in (packages | MODULES).items():
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(packages[parent], child, module)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == HOST]:
            del sys.modules[name]
        sys.modules.update(saved)
