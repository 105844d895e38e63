"""What a measurement should say about the machine and the software it was made with."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

from mtserve_plugin import __version__


def describe_machine() -> dict[str, Any]:
    """CPU, cores that this process may use, memory, versions and torch's threads, as plain values."""
    return {
        "cpu": _first("/proc/cpuinfo", r"^model name\s*:\s*(.+)$") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": int(_first("/proc/meminfo", r"^MemTotal:\s*(\d+) kB$") or 0) * 1024,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mtserve_plugin": __version__,
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
    }


def resident_bytes() -> int:
    """Bytes of this process that are in memory; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _first(path: str, pattern: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    match = re.search(pattern, text, re.MULTILINE)
    return match.group(1).strip() if match else ""
