"""Section: a heading of the page and what stands below it."""

from __future__ import annotations

from html import escape
from typing import NamedTuple


class Section(NamedTuple):
    """Attributes:
    key: the heading's anchor.
    title: the heading.
    body: HTML.
    """

    key: str
    title: str
    body: str

    def to_html(self) -> str:
        return f'<section id="{self.key}">\n<h2>{escape(self.title)}</h2>\n{self.body}\n</section>'


def paragraph(text: str, css: str = "note") -> str:
    return f'<p class="{css}">{escape(text)}</p>'
