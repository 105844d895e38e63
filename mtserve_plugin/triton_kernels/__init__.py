"""Kernels for CUDA tensors, written in Triton; nothing of it is imported before the first such tensor comes.

attention.py holds the device code, launch.py what surrounds it on the host.
"""

from __future__ import annotations

import importlib
import threading
from types import ModuleType

from mtserve_plugin.errors import MissingDependencyError

# Held while a graph is recorded or a kernel tuned: tuning waits for the device, which breaks a recording in any thread,
# and torch records one graph at a time.
ALONE = threading.Lock()


def launch_module() -> ModuleType:
    """Imports `triton_kernels.launch`.

    Raises:
        MissingDependencyError: triton is not installed, or cannot be imported.
    """
    try:
        importlib.import_module("triton")
    except ImportError as error:
        raise MissingDependencyError(
            f"paged_hstu_attention: attention on CUDA tensors needs triton, which cannot be imported ({error}). "
            "Fix: pip install 'triton>=3.4' (CUDA builds of torch bring theirs along)"
        ) from error
    return importlib.import_module("mtserve_plugin.triton_kernels.launch")
