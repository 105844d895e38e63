"""Figure: a drawing with the sentence that it proves above it and how to read it below."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from mtserve_plugin.report_html.svg import Drawing

NARROW, WIDE = 336, 700
"""Natural widths. 336 is what a screen of 360 pixels has left beside the page's margins."""


@dataclass(frozen=True)
class Figure:
    """One plot.

    Attributes:
        key: unique in the page.
        finding: what the plot shows in this run, as a sentence.
        reading: how to read it.
        draw: given a key, a width and a label, the drawing at that width.
    """

    key: str
    finding: str
    reading: str
    draw: Callable[[str, float, str], Drawing]

    def to_html(self) -> str:
        drawings = "\n".join(
            self.draw(f"{self.key}-{name}", width, self.finding).to_svg(name)
            for name, width in (("narrow", NARROW), ("wide", WIDE))
        )
        return (
            f"<figure>\n<figcaption>{_prose(self.finding)}</figcaption>\n{drawings}\n"
            f'<p class="reading">{_prose(self.reading)}</p>\n</figure>'
        )


def _prose(text: str) -> str:
    return escape(text[:1].upper() + text[1:]).replace(" %", "&nbsp;%")
