"""Drawing: a small SVG, made of the few shapes that the report's plots need."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

INK, SOFT, GRID = "#1a1a1a", "#4a4a4a", "#d4d4d4"
DARK, MID, LIGHT = "#1f4468", "#6f93b3", "#cfdeea"
"""Shades that stay apart in grey: their luminances are about 0.05, 0.27 and 0.71."""

FONT_SIZE = 12
"""In units of the drawing; a narrow drawing is never shown smaller than its own size on a 360 pixel screen."""
LETTER = 6.6
"""Mean width of a letter at `FONT_SIZE`, on the safe side."""

Point = tuple[float, float]


class Drawing:
    """Shapes in the order in which they are painted; units are CSS pixels at natural size.

    Args:
        key: unique in the page; prefixes the ids of patterns.
        width, height: natural size.
        label: what the picture shows, for those who cannot see it.
    """

    def __init__(self, key: str, width: float, height: float, label: str) -> None:
        self.width, self.height = width, height
        self._key, self._label = key, label
        self._parts: list[str] = []

    @property
    def hatch(self) -> str:
        """A fill of diagonal stripes."""
        return f"url(#{self._key}-hatch)"

    def text(
        self, x: float, y: float, words: str, anchor: str = "start", *, bold: bool = False, fill: str = INK
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}" fill="{fill}"{weight}>{escape(words)}</text>'
        )

    def sideways(self, x: float, y: float, words: str) -> None:
        """Text from bottom to top, centred at a point."""
        self._parts.append(
            f'<text transform="translate({_n(x)} {_n(y)}) rotate(-90)" text-anchor="middle" fill="{INK}">'
            f"{escape(words)}</text>"
        )

    def line(self, begin: Point, end: Point, *, stroke: str = INK, width: float = 1, dash: str = "") -> None:
        self.path([begin, end], stroke=stroke, width=width, dash=dash)

    def rect(self, x: float, y: float, width: float, height: float, *, fill: str, stroke: str = "none") -> None:
        self._parts.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" fill="{fill}" stroke="{stroke}"/>'
        )

    def rects(self, boxes: Iterable[tuple[float, float, float, float]], *, fill: str, stroke: str = "none") -> None:
        """Many rectangles (x, y, width, height) as one path."""
        d = "".join(f"M{_n(x)} {_n(y)}h{_n(w)}v{_n(h)}h{_n(-w)}z" for x, y, w, h in boxes)
        if d:
            self._parts.append(f'<path d="{d}" fill="{fill}" stroke="{stroke}"/>')

    def path(
        self,
        points: Sequence[Point],
        *,
        fill: str = "none",
        stroke: str = "none",
        width: float = 1,
        dash: str = "",
        closed: bool = False,
    ) -> None:
        d = "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in points) + ("z" if closed else "")
        pattern = f' stroke-dasharray="{dash}"' if dash else ""
        style = f'stroke="{stroke}" stroke-width="{_n(width)}" stroke-linejoin="round"{pattern}'
        self._parts.append(f'<path d="{d}" fill="{fill}" {style}/>')

    def marker(self, x: float, y: float, shape: str, *, fill: str = INK, size: float = 4) -> None:
        """A "circle", "square", "triangle", "diamond" or "cross" around a point."""
        s = size
        if shape == "circle":
            self._parts.append(
                f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(s)}" fill="{fill}" stroke="{INK}" stroke-width="1"/>'
            )
        elif shape == "cross":
            self.line((x - s, y - s), (x + s, y + s), width=2)
            self.line((x - s, y + s), (x + s, y - s), width=2)
        else:
            corners = {
                "square": [(-s, -s), (s, -s), (s, s), (-s, s)],
                "triangle": [(0.0, -s * 1.2), (s * 1.1, s * 0.9), (-s * 1.1, s * 0.9)],
                "diamond": [(0.0, -s * 1.3), (s * 1.3, 0.0), (0.0, s * 1.3), (-s * 1.3, 0.0)],
            }[shape]
            self.path([(x + dx, y + dy) for dx, dy in corners], fill=fill, stroke=INK, closed=True)

    def to_svg(self, css_class: str) -> str:
        hatch = (
            f'<pattern id="{self._key}-hatch" width="5" height="5" patternUnits="userSpaceOnUse" '
            f'patternTransform="rotate(45)"><rect width="5" height="5" fill="#fff"/>'
            f'<rect width="2" height="5" fill="{DARK}"/></pattern>'
        )
        body = "\n".join(self._parts)
        defs = f"<defs>{hatch}</defs>\n" if self.hatch in body else ""
        return (
            f'<svg class="{css_class}" viewBox="0 0 {_n(self.width)} {_n(self.height)}" role="img" '
            f'aria-label="{escape(self._label)}" font-size="{FONT_SIZE}">\n{defs}{body}\n</svg>'
        )


def nice_ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers from `low` to `high`, at most `most` of them and at least one."""
    span = max(high - low, 1e-12)
    step = 10.0 ** math.floor(math.log10(span / max(most, 1)))
    factor = next(f for f in (1, 2, 5, 10, 20, 50, 100) if span / (step * f) <= most - 1 or f == 100)
    step *= factor
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)] or [low]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Ticks for a logarithmic axis: of every decade 1, 2, 5 or fewer; equal steps where it spans too little."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for leads in ((1, 2, 5), (1, 3), (1,)):
        ticks = [lead * 10.0**d for d in decades for lead in leads if low <= lead * 10.0**d <= high]
        if 3 <= len(ticks) <= most:
            return ticks
    return nice_ticks(low, high, most)


def plain(value: float) -> str:
    """A number for an axis: no trailing zeros, no exponent, thousands apart."""
    text = f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _n(value: float) -> str:
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text
