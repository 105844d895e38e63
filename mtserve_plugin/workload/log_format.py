"""LogFormat: which columns of a log file mean what, detected from its first line or told by the user."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from mtserve_plugin.errors import ConfigError, InputError

# Bits of KuaiRand's action codes, lowest first; the order of upstream's action weights 1, 2, 4, ... 128.
FLAGS = (
    "is_click",
    "is_like",
    "is_follow",
    "is_comment",
    "is_forward",
    "is_hate",
    "long_view",
    "is_profile_enter",
)

# Names by which a column is recognised, in order of preference, compared without case, "_", "-" and " ".
_USUAL = {
    "user": ("userid", "user", "uid", "visitorid", "customerid", "reviewerid", "sessionid"),
    "item": ("itemid", "videoid", "movieid", "productid", "item", "iid", "asin", "photoid", "articleid"),
    "time": ("timems", "timestamp", "unixtimestamp", "ts", "time", "eventtime"),
    "action": ("action", "behaviortype", "behavior", "behaviour", "eventtype", "event", "rating", "label"),
}
_MOVIELENS = {"u.data": b"\t", "ratings.dat": b"::"}
_MOVIELENS_COLUMNS = ("user_id", "item_id", "rating", "timestamp")
_DELIMITERS = (b"::", b"\t", b",", b";", b"|", b" ")
TIME_UNITS = {"s": 1000.0, "ms": 1.0, "us": 1e-3, "ns": 1e-6}


@dataclass(frozen=True)
class LogFormat:
    """What a user tells about a log; what is `None` is detected from each file's first line.

    Args:
        user: name of the column with the user's id.
        item: name of the column with the item's id.
        time: name of the column with the Unix time.
        action: name of the column with the kind of event or the rating, of few distinct values; "" for none.
        delimiter: what separates fields, one or more characters.
        columns: names of all columns, for files without a header line.
        time_unit: "s", "ms", "us", "ns", or "auto": told from the size of the latest time.

    Raises:
        ConfigError: an option is out of range.
    """

    user: str | None = None
    item: str | None = None
    time: str | None = None
    action: str | None = None
    delimiter: str | None = None
    columns: tuple[str, ...] | None = None
    time_unit: str = "auto"

    def __post_init__(self) -> None:
        if self.time_unit not in ("auto", *TIME_UNITS):
            raise ConfigError(f"time_unit={self.time_unit!r} is not known; use 'auto', 's', 'ms', 'us' or 'ns'")
        if self.delimiter is not None and (not self.delimiter or set(self.delimiter) & set('\r\n"')):
            raise ConfigError(f"delimiter={self.delimiter!r} must be at least one character, no quote, no line end")
        if self.columns is not None and len(set(self.columns)) != len(self.columns):
            raise ConfigError(f"columns={self.columns!r} must be distinct")


@dataclass(frozen=True)
class Layout:
    """What the columns of one file mean.

    Attributes:
        delimiter: what separates fields.
        names: all columns, in order.
        has_header: the first line holds the names.
        user, item, time: names of these columns.
        action: name of the column of actions, or "".
        flags: names of 0/1 columns whose bits make up the action, lowest first; a name that the file lacks is
            "".
    """

    delimiter: bytes
    names: list[str]
    has_header: bool
    user: str
    item: str
    time: str
    action: str
    flags: tuple[str, ...]

    @property
    def wanted(self) -> list[str]:
        """The columns to read."""
        return list(dict.fromkeys(n for n in (self.user, self.item, self.time, self.action, *self.flags) if n))


def detect_layout(first_line: bytes, file: str, told: LogFormat) -> Layout:
    """What the columns of a file mean, from its first line and from what the user told.

    RecBole's types ("user_id:token") are left off the names.

    Raises:
        InputError: the names cannot be told, or a column is missing or ambiguous; names file, line and fix.
    """
    if not first_line.strip():
        raise InputError(f"{file}: line 1: is empty; give a file with a header line and at least one row")
    text = first_line.decode("utf-8-sig", "replace").rstrip("\r\n")
    known = _MOVIELENS.get(PurePath(file).name)
    delimiter = told.delimiter.encode() if told.delimiter else known or _guess_delimiter(text)
    cells = [cell.strip().strip('"') for cell in text.split(delimiter.decode())]
    if told.columns is not None or known is not None:
        names, has_header = list(told.columns or _MOVIELENS_COLUMNS), False
    else:
        names, has_header = [cell.partition(":")[0] for cell in cells], True
        if all(_is_number(cell) for cell in cells):
            raise InputError(
                f"{file}: line 1: looks like data, not like column names ({text[:60]}); name them with "
                "columns=('user_id', 'item_id', ...)"
            )
    if len(names) != len(cells):
        raise InputError(
            f"{file}: line 1: {len(cells)} fields where {len(names)} columns are expected "
            f"({', '.join(names)}); give the right columns or delimiter"
        )
    user, item, time = (_find(role, getattr(told, role), names, file) for role in ("user", "item", "time"))
    flags: tuple[str, ...] = ()
    action = ""
    if told.action is None and FLAGS[0] in names:
        flags = tuple(flag if flag in names else "" for flag in FLAGS)
    elif told.action != "":
        action = _find("action", told.action, names, file, optional=told.action is None)
    if len({user, item, time}) < 3:
        raise InputError(f"{file}: line 1: user={user!r}, item={item!r} and time={time!r} must be different columns")
    return Layout(delimiter, names, has_header, user, item, time, action, flags)


def _guess_delimiter(text: str) -> bytes:
    # A tab outranks whatever else occurs inside names.
    for delimiter in _DELIMITERS:
        if text.count(delimiter.decode()) >= 2:
            return delimiter
    return b","


def _find(role: str, told: str | None, names: list[str], file: str, *, optional: bool = False) -> str:
    if told is not None:
        if (name := told.partition(":")[0]) in names:
            return name
        raise InputError(f"{file}: line 1: column {told!r} ({role}) is missing; found {', '.join(names)}")
    plain = [name.lower().replace("_", "").replace("-", "").replace(" ", "") for name in names]
    for usual in _USUAL[role]:
        if usual in plain:
            return names[plain.index(usual)]
    if optional:
        return ""
    raise InputError(
        f"{file}: line 1: no column for the {role} was recognised among {', '.join(names)}; "
        f"name it with {role}='...', or give the delimiter or the columns if the names are not right"
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
