"""The paper's figures at the points that are simulated (tables 1, 3, 5 and 6)."""

from __future__ import annotations

from typing import Any

from mtserve_plugin.simulate.options import BASE, Point

_DEVICE = {
    "kuairand-like": {1: 63.52, 4: 63.92, 8: 64.36},
    "mt-like": {1: 60.26, 4: 60.69, 8: 61.73},
}
_TOTAL = {
    "kuairand-like": {1: 94.66, 4: 98.57, 8: 98.59},
    "mt-like": {1: 96.73, 4: 97.44, 8: 98.71},
}
# The sweeps are KuaiRand-1K's: their 47.3 ms are those of table 1.
_LATENCY_OF_PAGES = {20_480: 84.7, 30_720: 58.9, 40_960: 47.3, 51_200: 41.3, 61_440: 37.0}
_STEP_8_OF_CHUNK = {512: (34.64, 12.66), 1024: (23.11, 13.35), 2048: (22.22, 14.79), 4096: (19.09, 17.74)}


def paper_figures(trace: str, policy: str, point: Point) -> dict[str, Any]:
    """What the paper reports for a point: hit ratios (shares), latency, waiting and computing (ms); often nothing."""
    if trace not in _DEVICE or policy not in ("device", "paper"):
        return {}
    found: dict[str, Any] = {}
    if (point.pages, point.chunk) == BASE[1:] and point.batch_size in _DEVICE[trace]:
        device, total = _DEVICE[trace][point.batch_size], _TOTAL[trace][point.batch_size]
        found["device_hit_ratio"] = device / 100
        found["total_hit_ratio"] = (device if policy == "device" else total) / 100
    if trace != "kuairand-like" or policy != "paper" or point.batch_size != BASE.batch_size:
        return found
    if point.chunk == BASE.chunk and point.pages in _LATENCY_OF_PAGES:
        found["latency_ms"] = _LATENCY_OF_PAGES[point.pages]
    if point.pages == BASE.pages and point.chunk in _STEP_8_OF_CHUNK:
        found["wait_ms"], found["compute_ms"] = _STEP_8_OF_CHUNK[point.chunk]
    return found


def status(trace: str, policy: str, point: Point) -> str:
    """ "calibrated" where the trace was fitted to the paper, "predicted" elsewhere, "-" for traces without a fit."""
    if trace not in _DEVICE:
        return "-"
    return "calibrated" if policy == "paper" and point == BASE else "predicted"
