"""Where logs lie: files, folders, archives (wheels among them) and installed packages."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from mtserve_plugin.errors import InputError, MissingDependencyError

KUAIRAND_FILES = ("log_standard_4_08_to_4_21_1k.csv", "log_standard_4_22_to_5_08_1k.csv")
_KUAIRAND_SOURCE = "https://zenodo.org/records/10439422/files/KuaiRand-1K.tar.gz"
_ML_100K = "ml-100k"
_ML_100K_FILE = "dataset_example/ml-100k/ml-100k.inter"

# What a folder or an archive is searched for, in this order; the first kind that is there is taken.
_KNOWN = ("*.inter", "ratings.csv", "ratings.dat", "u.data", "*.csv", "*.tsv")

Paths = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class LogFile:
    """A file of events: its name, for messages, and a way to open it anew."""

    name: str
    open: Callable[[], BinaryIO]


def find_log_files(source: Paths) -> list[LogFile]:
    """The files that a user means.

    Args:
        source: a file, a list of files, a folder (KuaiRand-1K's own, one with an `.inter` file, MovieLens'
            own, or one with a single CSV or TSV), an archive (`.zip`, `.whl`) that holds one of these, or
            "ml-100k" for the small MovieLens that the installed package `recbole` brings along.

    Raises:
        InputError: something is missing or ambiguous; the message names it and the fix.
        MissingDependencyError: "ml-100k" without `recbole`.
    """
    if not isinstance(source, str | Path):
        if not source:
            raise InputError("source is an empty list; give at least one file")
        return [file for part in source for file in find_log_files(part)]
    path = Path(source).expanduser()
    if path.is_dir():
        return [_plain(p) for p in _in_folder(path)]
    if path.is_file():
        return [_in_archive(path)] if path.suffix.lower() in (".whl", ".zip") else [_plain(path)]
    if source == _ML_100K:
        return [_plain(_in_recbole())]
    raise InputError(
        f"{source}: no such file or folder; give the path of a log file, of a folder or an archive that "
        f"holds one, or {_ML_100K!r}"
    )


def is_kuairand(files: Iterable[LogFile]) -> bool:
    return all(Path(file.name).name in KUAIRAND_FILES for file in files)


def _plain(path: Path) -> LogFile:
    return LogFile(str(path), lambda: path.open("rb"))


def _in_folder(folder: Path) -> list[Path]:
    for place in (folder, folder / "data"):
        paths = [place / name for name in KUAIRAND_FILES]
        missing = [path for path in paths if not path.is_file()]
        if not missing:
            return paths
        if len(missing) < len(paths):
            raise InputError(
                f"{missing[0]}: no such file, though the other half of KuaiRand-1K is there; unpack all of "
                f"{_KUAIRAND_SOURCE}, or pass a list with the one file to use it alone"
            )
    for pattern in _KNOWN:
        found = sorted(folder.glob(pattern))
        if found:
            return [_only(str(folder), found)]
    raise InputError(
        f"{folder}: holds no log; expected {' and '.join(KUAIRAND_FILES)} (from {_KUAIRAND_SOURCE}), "
        f"or one of {', '.join(_KNOWN)}; give the folder that holds them, or the files themselves"
    )


def _in_archive(path: Path) -> LogFile:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError) as error:
        raise InputError(f"{path}: cannot be read as an archive ({error}); fetch it again") from None
    for pattern in _KNOWN:
        found = [Path(name) for name in names if Path(name).match(pattern)]
        if found:
            member = _only(str(path), found).as_posix()
            return LogFile(f"{path}/{member}", partial(_open_member, path, member))
    raise InputError(f"{path}: holds no log; expected a member named like one of {', '.join(_KNOWN)}")


def _open_member(path: Path, member: str) -> BinaryIO:
    # The member keeps the archive's file open for as long as it needs it.
    return zipfile.ZipFile(path).open(member)  # type: ignore[return-value]


def _only(place: str, found: list[Path]) -> Path:
    if len(found) == 1:
        return found[0]
    names = ", ".join(path.name for path in found[:4])
    raise InputError(
        f"{place}: holds {len(found)} logs ({names}{', ...' if len(found) > 4 else ''}); name the one to use"
    )


def _in_recbole() -> Path:
    # Found without being imported: the package itself pulls in much that is not needed for one file.
    spec = find_spec("recbole")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        if (path := Path(folder) / _ML_100K_FILE).is_file():
            return path
    raise MissingDependencyError(
        f"{_ML_100K!r} is read from the package recbole, which is "
        f"{'not installed' if spec is None else 'installed without ' + _ML_100K_FILE}; run "
        "`pip install --no-deps recbole==1.2.1`, or give the path of its wheel, of an ml-100k.inter or u.data"
    )
