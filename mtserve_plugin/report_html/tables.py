"""The report's tables: what the terminal shows, the configuration, the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

Cells = Mapping[str, Callable[[dict[str, Any]], str]]


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> str:
    """A table that scrolls sideways where it is too wide; the first `words` columns are words, the rest numbers."""
    cells = "".join(_cell("th", text, number >= words, ' scope="col"') for number, text in enumerate(head))
    body = "\n".join(
        "<tr>" + "".join(_cell("th" if n == 0 else "td", text, n >= words) for n, text in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table>\n<tr>{cells}</tr>\n{body}\n</table></div>'


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Names and values below each other."""
    rows = "\n".join(
        f'<tr><th scope="row">{_breakable(name)}</th><td class="value">{escape(value)}</td></tr>'
        for name, value in pairs
    )
    return f'<table class="facts">\n{rows}\n</table>'


def turned(rows: Sequence[dict[str, Any]], heads: Sequence[str], cells: Cells) -> str:
    """One column per row of `rows`, one line per cell function, as the terminal's tables are."""
    return table(["", *heads], ([name, *(cell(row) for row in rows)] for name, cell in cells.items()))


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested values as dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            yield f"{prefix}{name}", ", ".join(map(str, value))
        else:
            yield f"{prefix}{name}", str(value)


def _breakable(name: str) -> str:
    return escape(name).replace("_", "_<wbr>").replace(".", ".<wbr>")


def _words(text: str) -> str:
    """Long names may break on a phone, so that a mode's column is as narrow as its numbers."""
    html = escape(text).replace("\n", "<br>")
    return html.replace("hierarchical", "hierar&shy;chical").replace("recompute", "recom&shy;pute")


def _cell(tag: str, text: str, number: bool, more: str = "") -> str:
    css = ' class="number"' if number else ""
    return f"<{tag}{css}{more}>{_words(text)}</{tag}>"
