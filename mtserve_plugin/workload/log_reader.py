"""Reads log files piece by piece into columns of numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mtserve_plugin.errors import InputError
from mtserve_plugin.workload.fields import Fields, distinct, parse_ids, parse_numbers, split_lines
from mtserve_plugin.workload.log_files import LogFile, Paths, find_log_files
from mtserve_plugin.workload.log_format import FLAGS, TIME_UNITS, Layout, LogFormat, detect_layout
from mtserve_plugin.workload.trace import Int64s

_PIECE_BYTES = 8 << 20
_MOST_ACTIONS = 65_536


@dataclass(frozen=True)
class Log:
    """Events in the order of their files, one array per column, `[n]` each.

    Attributes:
        files: names of the files.
        user: int64 ids; text that is no integer is hashed.
        item: int64 ids, likewise.
        action: uint16 codes, `0..num_actions - 1`.
        time_ms: int64, Unix time in milliseconds.
        num_actions: number of action codes.
        actions: what the codes mean: one text per code, or the flags whose bits make up a code, or nothing.
    """

    files: tuple[str, ...]
    user: Int64s
    item: Int64s
    action: npt.NDArray[np.uint16]
    time_ms: Int64s
    num_actions: int
    actions: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.user)


def read_log(source: Paths, told: LogFormat | None = None) -> Log:
    """Reads a log: KuaiRand-1K, RecBole `.inter`, MovieLens, or any delimited text with user, item and time.

    KuaiRand's 0/1 columns become the bits of one action code; another action column's distinct values become
    codes in ascending order. Files are read a few megabytes at a time; what is kept is 26 bytes per event.

    Args:
        source: see `find_log_files`.
        told: what detection does not find, or finds wrongly.

    Raises:
        InputError: a file is missing or malformed; the message names file, line, column and fix.
    """
    told = told or LogFormat()
    files = find_log_files(source)
    actions = _Actions()
    parts: list[_Part] = []
    for file in files:
        parts.extend(_read_file(file, told, actions))
    if not parts:
        raise InputError(f"{files[0].name}: holds no events; give a file with at least one row")
    recode, names = actions.codes()
    return Log(
        files=tuple(file.name for file in files),
        user=np.concatenate([part.user for part in parts]),
        item=np.concatenate([part.item for part in parts]),
        action=recode[np.concatenate([part.action for part in parts])],
        time_ms=_milliseconds(np.concatenate([part.time for part in parts]), told.time_unit, files[0].name),
        num_actions=max(1, 1 << len(FLAGS) if actions.flags else len(names)),
        actions=names,
    )


@dataclass(frozen=True)
class _Part:
    user: Int64s
    item: Int64s
    action: npt.NDArray[np.uint16]
    time: npt.NDArray[np.float64]


class _Actions:
    """Collects what actions there are, over all pieces of all files."""

    def __init__(self) -> None:
        self.flags = False
        self._codes: dict[bytes, int] = {}

    def read(self, columns: dict[str, Fields], layout: Layout, rows: int) -> npt.NDArray[np.uint16]:
        if layout.flags:
            self.flags = True
            code = np.zeros(rows, np.uint16)
            for bit, flag in enumerate(layout.flags):
                if flag:
                    code |= (parse_numbers(columns[flag]) != 0).astype(np.uint16) << np.uint16(bit)
            return code
        if not layout.action:
            return np.zeros(rows, np.uint16)
        fields = columns[layout.action]
        texts, which = distinct(fields, _MOST_ACTIONS)
        codes = [self._codes.setdefault(text, len(self._codes)) for text in texts]
        if len(self._codes) > _MOST_ACTIONS:
            raise fields.fail(0, f"brings the action column to more than {_MOST_ACTIONS} values; choose another column")
        return np.array(codes, np.int64)[which].astype(np.uint16)

    def differ(self, layout: Layout) -> bool:
        """Whether a file's kind of action column differs from that of the files before."""
        return (self.flags and not layout.flags) or (bool(self._codes) and bool(layout.flags))

    def codes(self) -> tuple[npt.NDArray[np.uint16], tuple[str, ...]]:
        """From codes in order of appearance to codes in order of value, and what they mean."""
        if self.flags:
            return np.arange(1 << 16, dtype=np.uint16), FLAGS
        texts = sorted(self._codes, key=_by_value)
        recode = np.zeros(max(1, len(texts)), np.uint16)
        recode[[self._codes[text] for text in texts]] = np.arange(len(texts), dtype=np.uint16)
        return recode, tuple(text.decode("utf-8", "replace") for text in texts)


def _by_value(text: bytes) -> tuple[Any, ...]:
    try:
        return (0, float(text), text)
    except ValueError:
        return (1, 0.0, text)


def _read_file(file: LogFile, told: LogFormat, actions: _Actions) -> Iterator[_Part]:
    layout: Layout | None = None
    for first_line, text in _pieces(file):
        if layout is None:
            head, _, body = text.partition(b"\n")
            layout = detect_layout(head, file.name, told)
            if actions.differ(layout):
                raise InputError(f"{file.name}: line 1: has other action columns than the files before; read it alone")
            if layout.has_header:
                first_line, text = first_line + 1, body
        text = text.removeprefix(b"\xef\xbb\xbf")
        if not text:
            continue
        columns = split_lines(text, first_line, layout.delimiter, layout.names, layout.wanted, file.name)
        user = parse_ids(columns[layout.user])
        if len(user):
            item = parse_ids(columns[layout.item])
            time = _times(columns[layout.time])
            yield _Part(user, item, actions.read(columns, layout, len(user)), time)
    if layout is None:
        raise InputError(f"{file.name}: is empty; give a file with a header line and at least one row")


def _pieces(file: LogFile) -> Iterator[tuple[int, bytes]]:
    """Whole lines of a file, a few megabytes at a time, with the number of the first of them."""
    line = 1
    rest = b""
    with file.open() as stream:
        while True:
            data = stream.read(_PIECE_BYTES)
            if not data:
                break
            cut = data.rfind(b"\n") + 1
            if not cut:
                rest += data
                continue
            text = rest + data[:cut]
            rest = data[cut:]
            yield line, text
            line += text.count(b"\n")
    if rest:
        yield line, rest + b"\n"


def _times(fields: Fields) -> npt.NDArray[np.float64]:
    times = parse_numbers(fields)
    if (bad := times < 0).any():
        raise fields.fail(int(np.argmax(bad)), "is a negative time; mend or remove the row")
    return times


def _milliseconds(times: npt.NDArray[np.float64], unit: str, file: str) -> Int64s:
    latest = float(times.max())
    if unit == "auto":
        # Seconds reach 1e11 in the year 5138, milliseconds in 1973; the same gap lies between the next units.
        unit = "s" if latest < 1e11 else "ms" if latest < 1e14 else "us" if latest < 1e17 else "ns"
    if latest * TIME_UNITS[unit] >= 1e16:
        raise InputError(f"{file}: the latest time is {latest:.0f}, beyond any date in {unit!r}; give time_unit='...'")
    return np.rint(times * TIME_UNITS[unit]).astype(np.int64)
