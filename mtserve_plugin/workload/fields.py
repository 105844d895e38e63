"""Fields: the columns of a piece of delimited text as byte positions, and vectorised parsers for them."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mtserve_plugin.errors import InputError
from mtserve_plugin.workload.draws import UInt64s, mix
from mtserve_plugin.workload.trace import Bools, Int64s

_SEPARATOR = b"\x1f"
_NEWLINE, _MINUS, _ZERO = 10, 45, 48
# 19 digits always fit in an unsigned word; whether they fit in a signed one is checked.
_MAX_DIGITS = 19


@dataclass(frozen=True)
class Fields:
    """One column of some lines: line i's field is `text[start[i]:end[i]]`, without surrounding blanks.

    Attributes:
        text: uint8, the whole piece of text, with a newline at its end.
        start: int64 `[n]`.
        end: int64 `[n]`.
        line: int64 `[n]`, line numbers in the file, for messages.
        file: name of the file, for messages.
        column: name of the column, for messages.
    """

    text: npt.NDArray[np.uint8]
    start: Int64s
    end: Int64s
    line: Int64s
    file: str
    column: str

    def __len__(self) -> int:
        return len(self.start)

    def get(self, i: int) -> bytes:
        return self.text[self.start[i] : self.end[i]].tobytes()

    def fail(self, i: int, problem: str) -> InputError:
        """An error that names the file, the line, the column and the text of field i."""
        text = self.get(i).decode("utf-8", "replace")
        return InputError(f"{self.file}: line {self.line[i]}: column {self.column!r}: {text!r} {problem}")


def split_lines(
    text: bytes, first_line: int, delimiter: bytes, names: list[str], wanted: list[str], file: str
) -> dict[str, Fields]:
    """Splits whole lines into fields.

    Args:
        text: complete lines, each ended by a newline.
        first_line: number of the first line in the file.
        delimiter: one or more bytes.
        names: all columns of the file, in order.
        wanted: the columns to return.
        file: name of the file, for messages.

    Raises:
        InputError: a line has another number of fields than `names`, or its quotes are unbalanced.
    """
    if b'"' in text:
        return _split_quoted(text, first_line, delimiter, names, wanted, file)
    if len(delimiter) > 1:
        text = text.replace(delimiter, _SEPARATOR)
        delimiter = _SEPARATOR
    buffer = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(buffer == _NEWLINE)
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1])
    # Bytes to cut off at both ends of a field; most files have none of them.
    blanks = [blank[0] for blank in (b"\r", b" ") if blank in text and blank != delimiter]
    starts, ends = _trim(buffer, starts, ends, blanks)
    line = first_line + np.arange(len(ends), dtype=np.int64)
    filled = ends > starts
    if not filled.all():
        starts, ends, line = starts[filled], ends[filled], line[filled]
    cuts = np.flatnonzero(buffer == delimiter[0])
    found = np.searchsorted(cuts, ends) - np.searchsorted(cuts, starts)
    if (found != len(names) - 1).any():
        bad = int(np.argmax(found != len(names) - 1))
        raise _ragged(file, int(line[bad]), int(found[bad]) + 1, names)
    grid = cuts.reshape(len(ends), len(names) - 1)
    columns = {}
    for name in wanted:
        at = names.index(name)
        start = starts if at == 0 else grid[:, at - 1] + 1
        end = ends if at == len(names) - 1 else grid[:, at]
        columns[name] = Fields(buffer, *_trim(buffer, start, end, blanks), line, file, name)
    return columns


def parse_ids(fields: Fields) -> Int64s:
    """Integers as they are, any other text as a stable 64-bit hash (FNV-1a, mixed).

    Raises:
        InputError: a field is empty.
    """
    if (empty := fields.end == fields.start).any():
        raise fields.fail(int(np.argmax(empty)), "is empty; give every row an id, or remove the row")
    values, plain = _integers(fields)
    if not plain.all():
        other = np.flatnonzero(~plain)
        values[other] = _hashes(fields, other).view(np.int64)
    return values


def parse_numbers(fields: Fields) -> npt.NDArray[np.float64]:
    """Finite numbers; integers below 2**53 are exact.

    Raises:
        InputError: a field is no finite number.
    """
    integers, plain = _integers(fields)
    values = integers.astype(np.float64)
    if not plain.all():
        for i in np.flatnonzero(~plain).tolist():
            try:
                values[i] = float(fields.get(i))
            except ValueError:
                raise fields.fail(i, "is not a number; mend the row or choose another column") from None
        if not (finite := np.isfinite(values)).all():
            raise fields.fail(int(np.argmin(finite)), "is not a finite number; mend or remove the row")
    return values


def distinct(fields: Fields, limit: int) -> tuple[list[bytes], Int64s]:
    """The distinct texts of a column with few of them, and which one each field is, `[n]` int64.

    Raises:
        InputError: there are more than `limit`.
    """
    hashes = _hashes(fields, np.arange(len(fields)))
    _, first, which = np.unique(hashes, return_index=True, return_inverse=True)
    if len(first) > limit:
        raise fields.fail(
            int(np.sort(first)[limit]),
            f"is value number {limit + 1} of an action column; choose a column with fewer",
        )
    return [fields.get(i) for i in first.tolist()], which.astype(np.int64)


# ---- inside ------------------------------------------------------------------------------------------------


def _trim(text: npt.NDArray[np.uint8], start: Int64s, end: Int64s, blanks: list[int]) -> tuple[Int64s, Int64s]:
    """The ranges without any of `blanks` at either end; carriage returns come last in a line, so they go first."""
    for blank in blanks:
        while (cut := (start < end) & (text[np.maximum(end - 1, 0)] == blank)).any():
            end = end - cut
        while (cut := (start < end) & (text[start] == blank)).any():
            start = start + cut
    return start, end


def _integers(fields: Fields) -> tuple[Int64s, Bools]:
    """Values, and where the field is a plain decimal integer that fits in 64 bits; 0 elsewhere."""
    text, start = fields.text, fields.start
    if not len(fields):
        return np.zeros(0, np.int64), np.zeros(0, np.bool_)
    negative = (fields.end > start) & (text[start] == _MINUS)
    start = start + negative
    digits = fields.end - start
    plain = (digits > 0) & (digits <= _MAX_DIGITS)
    value = np.zeros(len(fields), np.uint64)
    last = len(text) - 1
    for place in range(min(int(digits.max()), _MAX_DIGITS)):
        inside = place < digits
        digit = text[np.minimum(start + place, last)] - np.uint8(_ZERO)
        plain &= ~inside | (digit <= 9)
        value = np.where(inside, value * np.uint64(10) + digit, value)
    plain &= value <= np.uint64(2**63 - 1) + negative
    value[~plain] = 0
    signed = value.view(np.int64)
    return np.where(negative, -signed, signed), plain


def _hashes(fields: Fields, rows: Int64s) -> UInt64s:
    start, length = fields.start[rows], (fields.end - fields.start)[rows]
    value = np.full(len(rows), 0xCBF29CE484222325, np.uint64)
    last = len(fields.text) - 1
    for place in range(int(length.max(initial=0))):
        byte = fields.text[np.minimum(start + place, last)]
        value = np.where(place < length, (value ^ byte) * np.uint64(0x100000001B3), value)
    return mix(value)


def _split_quoted(
    text: bytes, first_line: int, delimiter: bytes, names: list[str], wanted: list[str], file: str
) -> dict[str, Fields]:
    """The slow path for text with quotes: `csv` takes lines apart, then fields are split like plain ones."""
    lines = text.decode("utf-8", "surrogateescape").split("\n")[:-1]
    options: dict[str, Any] = {"strict": True, "delimiter": delimiter.decode()}
    if len(delimiter) > 1:
        lines = [line.replace(delimiter.decode(), _SEPARATOR.decode()) for line in lines]
        options["delimiter"] = _SEPARATOR.decode()
    plain: list[str] = []
    for offset, line in enumerate(lines):
        number = first_line + offset
        try:
            row = next(csv.reader([line.rstrip("\r")], **options), [])
        except csv.Error as error:
            raise InputError(
                f"{file}: line {number}: {error}; close the quotes, and keep each row on one line"
            ) from None
        if row and len(row) != len(names):
            raise _ragged(file, number, len(row), names)
        chosen = [row[names.index(name)].replace("\x1f", " ") for name in wanted] if row else []
        plain.append(_SEPARATOR.decode().join(chosen))
    joined = ("\n".join(plain) + "\n").encode("utf-8", "surrogateescape")
    return split_lines(joined.replace(b'"', b"'"), first_line, _SEPARATOR, list(wanted), list(wanted), file)


def _ragged(file: str, line: int, found: int, names: list[str]) -> InputError:
    return InputError(
        f"{file}: line {line}: {found} fields where {len(names)} columns are expected ({', '.join(names)}); "
        "mend the line, or give the right delimiter"
    )
