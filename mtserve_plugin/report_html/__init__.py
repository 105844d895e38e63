"""`report.html`: a replay or simulation as one file that needs nothing else. `page` is the place to start reading.

Takes the JSON of `--json` (plain values) and imports neither torch nor numpy. Drawings are SVG in the page: they scale
to a phone, print sharply and need no plotting package. Every drawing is made twice, for a narrow and a wide screen, so
that its letters keep their size; the style sheet shows one of the two.
"""

from mtserve_plugin.report_html.page import render_report, write_report

__all__ = ["render_report", "write_report"]
