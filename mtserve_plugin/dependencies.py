"""Optional packages: imported late, and diagnosed without being imported.

fbgemm is bound to one torch minor and comes in variants (cpu, cuda, rocm) that share their files; neither its
metadata nor torchrec's says so, and a wrong one fails at import with a loader error. Everything here reads
files and metadata only, so that a broken installation can still be explained.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Literal

from mtserve_plugin.errors import MissingDependencyError

Status = Literal["ok", "warn", "error"]


@dataclass(frozen=True)
class Finding:
    """What is known about one part of the environment.

    Attributes:
        name: "python", "torch", "cuda", "fbgemm", "torchrec", "native", "cpu", "gpu" or "nvcc".
        version: its version or variant; empty when there is none.
        status: "ok"; "warn": works, with a loss that `text` states; "error": does not work.
        text: one sentence.
        fix: the command or step that mends it; empty when nothing is to be done.
    """

    name: str
    version: str
    status: Status
    text: str
    fix: str = ""


@dataclass(frozen=True)
class _Fit:
    """What was measured to work with one torch minor."""

    fbgemm: str
    torchrec_from: str
    torchrec_to: str


_FITS = {
    "2.11": _Fit("1.6", "1.6.1", "1.6.1"),
    "2.12": _Fit("1.7", "1.6.1", "1.9.2"),
    "2.13": _Fit("1.8", "1.6.1", "1.9.2"),
    "2.14": _Fit("1.9", "1.8.0", "1.9.2"),
}
_RECOMMENDED_TORCH = "2.13"
# What torchrec needs besides fbgemm, for installations that keep pip from choosing the fbgemm variant.
_TORCHREC_NEEDS = 'tensordict "torchmetrics==1.0.3" tqdm pyre-extensions'


def require_fbgemm() -> ModuleType:
    """Imports `fbgemm_gpu`, whose operators register under `torch.ops.fbgemm`.

    Raises:
        MissingDependencyError: it is absent, of the wrong variant or made for another torch; the message says
            which and holds the command that mends it.
    """
    return _require("fbgemm_gpu", ("torch", "fbgemm"))


def require_torchrec() -> ModuleType:
    """Imports `torchrec`, after a check of the fbgemm that it needs.

    Raises:
        MissingDependencyError: torchrec or fbgemm is absent or does not fit.
    """
    return _require("torchrec", ("torch", "fbgemm", "torchrec"))


def diagnose(path: Sequence[str] | None = None, *, cpuinfo: str = "/proc/cpuinfo") -> list[Finding]:
    """Examines the environment without importing anything but torch.

    Args:
        path: folders to search for packages, like `sys.path`; `None` is `sys.path` itself.
        cpuinfo: where the features of the CPU are listed.

    Returns:
        One finding per part: python, torch, cuda, fbgemm, torchrec, native, cpu, gpu, nvcc.
    """
    torch = _torch_facts(path)
    return [
        _python(),
        _torch(torch),
        _cuda(torch),
        _fbgemm(torch, path),
        _torchrec(torch, path),
        _native(torch, path),
        _cpu(cpuinfo),
        _gpu(torch),
        _nvcc(torch),
    ]


@cache
def _require(module: str, names: tuple[str, ...]) -> ModuleType:
    if module in sys.modules:
        return sys.modules[module]
    if finding := _first_error(names, None):
        raise MissingDependencyError(f"{module} cannot be used: {finding.text}. Fix: {finding.fix}")
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise MissingDependencyError(
            f"{module} is installed but does not import ({error}). Fix: {_reinstall(_torch_facts(None))}"
        ) from error


def _first_error(names: Sequence[str], path: Sequence[str] | None) -> Finding | None:
    torch = _torch_facts(path)
    checks = {
        "torch": lambda: _torch(torch),
        "fbgemm": lambda: _fbgemm(torch, path),
        "torchrec": lambda: _torchrec(torch, path),
    }
    return next((found for found in (checks[name]() for name in names) if found.status == "error"), None)


# ---- torch ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TorchFacts:
    """What `torch/version.py` says; empty strings where torch is absent or the field is None."""

    version: str = ""
    cuda: str = ""
    hip: str = ""

    @property
    def minor(self) -> str:
        return _minor(self.version)

    @property
    def variant(self) -> str:
        """The fbgemm variant that belongs to this torch."""
        return "cuda" if self.cuda else "rocm" if self.hip else "cpu"


def _torch_facts(path: Sequence[str] | None) -> _TorchFacts:
    folder = _folder("torch", path)
    if folder is None:
        return _TorchFacts()
    try:
        source = (folder / "version.py").read_text(encoding="utf-8")
    except OSError:
        return _TorchFacts(version=_installed("torch", path) or "")
    found = dict(re.findall(r"^(__version__|cuda|hip)\b[^=\n]*=\s*['\"]([^'\"]*)['\"]", source, re.MULTILINE))
    return _TorchFacts(found.get("__version__", ""), found.get("cuda", ""), found.get("hip", ""))


def _python() -> Finding:
    return Finding("python", ".".join(map(str, sys.version_info[:3])), "ok", sys.executable or "python")


def _torch(torch: _TorchFacts) -> Finding:
    install = f'pip install "torch=={_RECOMMENDED_TORCH}.*"'
    if not torch.version:
        return Finding("torch", "", "error", "torch is not installed", install)
    if torch.minor not in _FITS:
        text = f"torch {torch.version} is untested; tested are {', '.join(_FITS)}"
        return Finding("torch", torch.version, "warn", text, install)
    return Finding("torch", torch.version, "ok", f"built for {torch.variant}")


def _cuda(torch: _TorchFacts) -> Finding:
    if torch.cuda:
        return Finding("cuda", torch.cuda, "ok", "torch was built with CUDA")
    if torch.hip:
        return Finding("cuda", f"hip {torch.hip}", "warn", "torch was built for ROCm; only the CPU kernels run there")
    return Finding("cuda", "", "ok", "torch was built for the CPU only; the device tier is host memory")


# ---- fbgemm and torchrec -------------------------------------------------------------------------


def _fbgemm(torch: _TorchFacts, path: Sequence[str] | None) -> Finding:
    fix = _reinstall(torch)
    folder = _folder("fbgemm_gpu", path)
    if folder is None:
        return Finding("fbgemm", "", "error", "fbgemm (the package fbgemm_gpu) is not installed", fix)
    version, variant = _fbgemm_target(folder)
    shown = f"{version} {variant}".strip()
    both = _installed("fbgemm-gpu", path), _installed("fbgemm-gpu-cpu", path)
    if not variant:
        text = f"fbgemm in {folder} does not say its variant; a build from source is assumed to fit this torch"
        return Finding("fbgemm", version or both[0] or both[1] or "", "warn", text)
    if variant not in ("cpu", torch.variant):
        text = f"the {variant} build of fbgemm {version} is installed beside torch {torch.version}, "
        text += f"which needs the {torch.variant} build"
        if all(both):
            text += "; torchrec depends on fbgemm-gpu, whose files replaced those of fbgemm-gpu-cpu"
        return Finding("fbgemm", shown, "error", text, fix)
    fit = _FITS.get(torch.minor)
    made_for = next((minor for minor, known in _FITS.items() if known.fbgemm == _minor(version)), "")
    if made_for != torch.minor and not _is_nightly(version):
        if made_for:
            text = f"fbgemm {version} was made for torch {made_for}; installed is torch {torch.version}"
            return Finding("fbgemm", shown, "error", text, fix)
        if fit:
            text = f"fbgemm {version} is not known to fit torch {torch.version}, "
            text += f"which goes with fbgemm {fit.fbgemm}"
            return Finding("fbgemm", shown, "error", text, fix)
        text = f"fbgemm {version} with torch {torch.version} is untested; fbgemm fits one torch minor only"
        return Finding("fbgemm", shown, "warn", text, fix)
    if variant != torch.variant:
        text = (
            f"the cpu build of fbgemm beside a torch for {torch.variant}: its operators run on the CPU only, "
            "tensors on the device take the slower torch path"
        )
        return Finding("fbgemm", shown, "warn", text, fix)
    return Finding("fbgemm", shown, "ok", f"fits torch {torch.version}")


def _torchrec(torch: _TorchFacts, path: Sequence[str] | None) -> Finding:
    version = _installed("torchrec", path)
    fit = _FITS.get(torch.minor)
    wanted = fit.torchrec_to if fit else _FITS[_RECOMMENDED_TORCH].torchrec_to
    install = f'pip install --no-deps "torchrec=={wanted}" && pip install {_TORCHREC_NEEDS}'
    if version is None and _folder("torchrec", path) is None:
        return Finding("torchrec", "", "error", "torchrec is not installed", f"{install} && {_install_fbgemm(torch)}")
    if not version:
        return Finding("torchrec", "", "warn", "torchrec has no metadata; its version cannot be checked")
    if fit and not _numbers(fit.torchrec_from) <= _numbers(version) <= _numbers(fit.torchrec_to):
        known = f"{fit.torchrec_from} to {fit.torchrec_to}" if fit.torchrec_from != fit.torchrec_to else wanted
        status: Status = "error" if _numbers(version) < _numbers("1.6.1") else "warn"
        text = f"torchrec {version} with torch {torch.version} is untested; tested: {known}"
        return Finding("torchrec", version, status, text, install)
    return Finding("torchrec", version, "ok", f"fits torch {torch.version}" if fit else "torch is untested with it")


def _fbgemm_target(folder: Path) -> tuple[str, str]:
    """Version and variant from the file that fbgemm's own loader reads; empty strings when it is absent."""
    try:
        # JSON despite its suffix.
        target = json.loads((folder / "docs" / "target.default.json.py").read_text(encoding="utf-8"))
        return str(target.get("version", "")), str(target.get("variant", ""))
    except (OSError, ValueError, AttributeError):
        return "", ""


def _is_nightly(version: str) -> bool:
    return "+git" in version or re.match(r"\d{4}\.\d{1,2}\.\d{1,2}", version) is not None


def _install_fbgemm(torch: _TorchFacts) -> str:
    fit = _FITS.get(torch.minor) or _FITS[_RECOMMENDED_TORCH]
    package = "fbgemm-gpu-cpu" if torch.variant == "cpu" else "fbgemm-gpu"
    install = f'pip install "{package}=={fit.fbgemm}.*"'
    return install if torch.minor in _FITS else f'pip install "torch=={_RECOMMENDED_TORCH}.*" && {install}'


def _reinstall(torch: _TorchFacts) -> str:
    """The command that leaves the one fbgemm that fits; both go first, because they share their files."""
    return f"pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && {_install_fbgemm(torch)}"


# ---- this package and the machine ----------------------------------------------------------------


def _native(torch: _TorchFacts, path: Sequence[str] | None) -> Finding:
    names = sorted(file.name for folder in _folders("mtserve_plugin", path) for file in folder.glob("*.so"))
    if not names:
        return Finding("native", "", "error", "the native libraries are not built", "pip install -e . in the sources")
    with_cuda = any("cuda" in name for name in names)
    if torch.cuda and not with_cuda:
        text = f"{', '.join(names)}; torch has CUDA, but the CUDA library was not built"
        return Finding("native", "cpu", "warn", text, "reinstall with -C cmake.define.MTSERVE_CUDA=ON (needs nvcc)")
    return Finding("native", "cpu and cuda" if with_cuda else "cpu", "ok", ", ".join(names))


def _cpu(cpuinfo: str) -> Finding:
    try:
        text = Path(cpuinfo).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return Finding("cpu", "", "warn", f"{cpuinfo} cannot be read; the kernels find out by themselves")
    match = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    flags = set(match.group(1).split()) if match else set()
    useful = {"avx2": "avx2", "avx512": "avx512f", "avx512_bf16": "avx512_bf16", "amx": "amx_bf16"}
    found = [name for name, flag in useful.items() if flag in flags]
    absent = [name for name in useful if name not in found]
    if "avx2" not in found:
        return Finding("cpu", " ".join(found), "warn", "no avx2: the portable kernels are several times slower")
    return Finding("cpu", " ".join(found), "ok", f"absent: {', '.join(absent)}" if absent else "all that is used")


def _gpu(torch: _TorchFacts) -> Finding:
    if not torch.cuda:
        return Finding("gpu", "", "ok", "none is used: torch was built without CUDA")
    try:
        import torch as module

        count = module.cuda.device_count() if module.cuda.is_available() else 0
        names = sorted({module.cuda.get_device_name(index) for index in range(count)})
    except (ImportError, OSError, RuntimeError) as error:
        return Finding("gpu", "", "error", f"CUDA does not start: {error}", "check the driver with nvidia-smi")
    if not count:
        return Finding("gpu", "", "warn", "torch sees no GPU; only device='cpu' works", "check nvidia-smi")
    return Finding("gpu", f"{count} x {', '.join(names)}", "ok", "torch sees it")


def _nvcc(torch: _TorchFacts) -> Finding:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    program = shutil.which("nvcc", path=str(Path(home) / "bin") if home else None) or shutil.which("nvcc")
    if program is None:
        return Finding("nvcc", "", "ok", "not found; it is needed only to build the CUDA library")
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("nvcc", "", "warn", f"{program} does not run: {error}")
    match = re.search(r"release (\d+\.\d+)", said)
    version = match.group(1) if match else ""
    if version and torch.cuda and _numbers(version) > _numbers(torch.cuda):
        text = (
            f"the toolkit ({version}) is newer than torch's ({torch.cuda}): a library built with it needs "
            f"a driver for CUDA {version}, which torch itself does not"
        )
        return Finding(
            "nvcc",
            version,
            "warn",
            text,
            f"build with the CUDA {torch.cuda} toolkit: set CUDACXX to its nvcc",
        )
    return Finding("nvcc", version, "ok", program)


# ---- looking packages up -------------------------------------------------------------------------


def _folders(name: str, path: Sequence[str] | None) -> list[Path]:
    """The folders of a top-level package, found without importing it."""
    try:
        spec = importlib.util.find_spec(name) if path is None else PathFinder.find_spec(name, list(path))
    except (ImportError, ValueError):
        return []
    if spec is None or spec.submodule_search_locations is None:
        return []
    return [Path(folder) for folder in spec.submodule_search_locations]


def _folder(name: str, path: Sequence[str] | None) -> Path | None:
    folders = _folders(name, path)
    return folders[0] if folders else None


def _installed(name: str, path: Sequence[str] | None) -> str | None:
    """Version of a distribution; `None` when there is none."""
    if path is None:
        found = importlib.metadata.distributions(name=name)
    else:
        found = importlib.metadata.distributions(name=name, path=list(path))
    return next((distribution.version for distribution in found), None)


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])
