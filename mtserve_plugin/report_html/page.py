"""The page: one HTML file without scripts, fonts or pictures from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from mtserve_plugin.report_html import replay, simulate
from mtserve_plugin.report_html.section import Section
from mtserve_plugin.report_html.tables import facts, flat


class _Kind(NamedTuple):
    title: str
    sections: Iterable[Section]


def write_report(path: Path | None, result: dict[str, Any]) -> None:
    """Writes the page; nothing without a path."""
    if path is not None:
        path.write_text(render_report(result), encoding="utf-8")


def render_report(result: dict[str, Any]) -> str:
    """The page for the JSON of `mtserve replay` or `mtserve simulate`, the same for the same JSON.

    A replay's JSON without `detail` gives a page without plots.
    """
    is_replay = "controls" in result
    kind = (
        _Kind(f"Replay of {result['config']['trace']}", replay.sections(result))
        if is_replay
        else _Kind(f"Simulation of {result['config']['options']['trace']}", simulate.sections(result))
    )
    sections = [*kind.sections, *_environment(result)]
    links = "\n".join(f'<a href="#{section.key}">{escape(section.title)}</a>' for section in sections)
    body = "\n".join(section.to_html() for section in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(kind.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{escape(kind.title)}</h1>\n<nav>{links}</nav>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _environment(result: dict[str, Any]) -> Iterable[Section]:
    rows = list(flat(result["config"]))
    yield Section(
        "configuration",
        "Configuration",
        f"<details><summary>All {len(rows)} values that repeat this run</summary>\n{facts(rows)}\n</details>",
    )
    yield Section("machine", "Machine", facts(flat(result["machine"])))


_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: #1a1a1a; font: 16px/1.45 system-ui, sans-serif; }
main { max-width: 764px; margin: 0 auto; padding: 12px; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; line-height: 1.2; margin: .4em 0; }
h2 { font-size: 1.2rem; margin: 2em 0 .5em; padding-top: .6em; border-top: 2px solid #1a1a1a; }
nav { display: flex; flex-wrap: wrap; gap: 0 1em; }
nav a { color: #1f4468; line-height: 2; }
figure { margin: 1em 0 2em; }
figcaption { font-weight: bold; margin-bottom: .7em; }
svg { display: block; width: 100%; height: auto; font-family: system-ui, sans-serif; }
svg.narrow { max-width: 520px; margin: 0 auto; }
svg.wide { display: none; }
@media (min-width: 724px), print { svg.narrow { display: none; } svg.wide { display: block; } }
.reading, .note { color: #3a3a3a; font-size: .92rem; }
.failed { font-weight: bold; border: 2px solid #1a1a1a; padding: .4em .6em; }
.scroll { overflow-x: auto; margin: .5em 0 1em; }
table { border-collapse: collapse; font-size: .86rem; }
th, td { padding: .25em .45em; border-bottom: 1px solid #d4d4d4; text-align: left; vertical-align: top; }
th { font-weight: 600; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
td.number { white-space: nowrap; }
@media (max-width: 480px) { table { font-size: .8rem; } th, td { padding: .25em .25em; } }
.facts { width: 100%; table-layout: fixed; }
.facts th { width: 30%; font-weight: 400; color: #3a3a3a; overflow-wrap: anywhere; }
.facts td { overflow-wrap: anywhere; }
summary { cursor: pointer; padding: .4em 0; }
"""
