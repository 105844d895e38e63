"""What the MTServe paper reports, as rows of plain values; shares for hit ratios, milliseconds for times.

Modes have the names of `mtserve replay`: "recompute" is the paper's Recomp. (RE), "device" its GPU-Only, "paper" its
MTServe.
"""

from __future__ import annotations

from typing import Any

from mtserve_plugin.steps import COMMIT, EMBED, LAYERS, LAYOUT, POSTPROCESS, PREPARE, STRIP

MODES = ("recompute", "device", "paper")
NAMES = {"recompute": "Recomp.", "device": "GPU-Only", "paper": "MTServe"}
"""The paper's names of the modes."""

HARDWARE = "one NVIDIA A100 (80 GB), 184 CPU cores, 928 GB of RAM"
"""Section 5.1."""

LAYERS_OF_MODEL, PAGE_SIZE, PAGES, CHUNK = 8, 32, 40_960, 1024
"""Section 5.1; the model has 4 heads of 128 and is bfloat16 (appendix C)."""

DATASETS = {"kuairand-like": "KuaiRand-1K", "mt-like": "MT"}
USERS = {"kuairand-like": 1_000, "mt-like": 2_884}
MEAN_HISTORY = {"kuairand-like": 6_375, "mt-like": 5_189}
MAX_HISTORY = {"kuairand-like": 20_000, "mt-like": 6_000}
"""Table 4 (appendix B)."""

AWAIT, UPDATE = "6 await metadata", "7 update metadata"
STEPS = (PREPARE, STRIP, EMBED, LAYOUT, AWAIT, UPDATE, LAYERS, COMMIT, POSTPROCESS)
"""Those of tables 2 and 5; 6 and 7 do not occur in this package."""

RECOMPUTE_MS = 143.6
"""Reference of table 6; also table 1, KuaiRand-1K at batch size 8."""

_BATCH_SIZES = (1, 4, 8)


def _rows(trace: str, latency: str, speedup: str, device: str, total: str) -> list[dict[str, Any]]:
    """Lines of a table as it is printed, split into a row per batch size and mode."""
    columns = zip(latency.split(), speedup.split(), device.split(), total.split(), strict=True)
    rows = []
    for at, (milliseconds, factor, in_pages, in_both) in enumerate(columns):
        row = {
            "trace": trace,
            "batch_size": _BATCH_SIZES[at // len(MODES)],
            "mode": MODES[at % len(MODES)],
            "latency_ms": float(milliseconds),
            "speedup": float(factor),
        }
        row |= {
            name: round(float(share) / 100, 4)
            for name, share in (("device_hit_ratio", in_pages), ("total_hit_ratio", in_both))
            if share != "-"
        }
        rows.append(row)
    return rows


def _steps(rows: list[dict[str, Any]], taken: dict[int, dict[str, str]]) -> list[dict[str, Any]]:
    """The rows with `steps_ms`; a step that the paper marks with a dash is absent."""
    return [
        {
            **row,
            "steps_ms": {
                name: float(value)
                for name, value in zip(STEPS, taken[row["batch_size"]][row["mode"]].split(), strict=True)
                if value != "-"
            },
        }
        for row in rows
    ]


TABLE_1 = [
    *_rows(
        "kuairand-like",
        "21.2 17.4 14.4  72.8 42.1 33.5  143.6 72.9 47.3",
        "1.00 1.22 1.47  1.00 1.73 2.17  1.00 1.97 3.04",
        "- 63.52 63.52  - 63.92 63.92  - 64.36 64.36",
        "- 63.52 94.66  - 63.92 98.57  - 64.36 98.59",
    ),
    *_rows(
        "mt-like",
        "14.1 12.8 11.7  43.6 28.9 17.3  82.4 48.6 26.6",
        "1.00 1.10 1.21  1.00 1.51 2.52  1.00 1.70 3.10",
        "- 60.26 60.26  - 60.69 60.69  - 61.73 61.73",
        "- 60.26 96.73  - 60.69 97.44  - 61.73 98.71",
    ),
]

TABLE_2 = _steps(
    TABLE_1[:9],
    {
        1: {
            "recompute": "- - 2.2 1.9 - - 16.7 - 0.5",
            "device": "0.1 0.4 1.2 1.6 0.01 0.05 13.5 - 0.5",
            "paper": "0.1 0.5 1.5 2.0 0.1 0.2 9.4 0.03 0.5",
        },
        4: {
            "recompute": "- - 5.0 3.4 - - 63.9 - 0.6",
            "device": "0.1 0.4 1.3 2.4 0.1 0.05 37.1 - 0.6",
            "paper": "0.1 0.6 1.5 2.9 0.1 0.4 27.1 0.03 0.6",
        },
        8: {
            "recompute": "- - 9.7 5.7 - - 127.4 - 0.8",
            "device": "0.1 0.5 1.5 3.6 0.1 0.05 66.3 - 0.7",
            "paper": "0.1 0.6 1.5 3.6 0.1 0.7 39.8 0.03 0.7",
        },
    },
)
"""The steps of table 2, with the latencies that table 1 has for the same runs."""

TABLE_3 = [
    {
        "trace": "kuairand-like",
        "batch_size": 8,
        "mode": "paper",
        "chunk": chunk,
        "wait_ms": wait,
        "compute_ms": compute,
        "latency_ms": latency,
    }
    for chunk, wait, compute, latency in (
        (512, 34.64, 12.66, 57.6),
        (1024, 23.11, 13.35, 47.3),
        (2048, 22.22, 14.79, 49.2),
        (4096, 19.09, 17.74, 49.9),
    )
]
"""Trace and batch size are not given; the latency at 1024 is that of table 1 for these."""

_TABLE_5 = _rows(
    "kuairand-like",
    "21.2 10.8 9.2  37.4 23.7 16.7  72.4 39.9 27.0",
    "1.00 1.96 2.30  1.00 1.58 2.24  1.00 1.81 2.68",
    # Table 5 has no line for the device's hits; without a host tier they are all there are.
    "- 63.52 -  - 63.92 -  - 64.34 -",
    "- 63.52 98.56  - 63.92 98.57  - 64.34 98.59",
)
TABLE_5 = [{**row, "layers": 8} for row in TABLE_1[:9]] + [
    {**row, "layers": 4}
    for row in _steps(
        _TABLE_5,
        {
            1: {
                "recompute": "- - 2.2 1.9 - - 16.7 - 0.5",
                "device": "0.1 0.4 1.2 1.6 0.1 0.05 6.9 - 0.5",
                "paper": "0.1 0.5 1.2 1.6 0.1 0.1 5.1 0.02 0.5",
            },
            4: {
                "recompute": "- - 1.5 3.4 - - 31.9 - 0.6",
                "device": "0.1 0.4 1.3 2.4 0.1 0.05 18.7 - 0.5",
                "paper": "0.1 0.5 1.3 2.5 0.1 0.2 11.3 0.03 0.6",
            },
            8: {
                "recompute": "- - 1.9 5.7 - - 64.1 - 0.7",
                "device": "0.1 0.5 1.5 3.6 0.1 0.05 33.4 - 0.6",
                "paper": "0.1 0.6 1.3 3.3 0.1 0.4 20.4 0.03 0.7",
            },
        },
    )
]
"""Those of table 1 for the whole model, then table 5 for half of its layers."""

TABLE_6 = [
    {
        "trace": "kuairand-like",
        "batch_size": 8,
        "mode": "paper",
        "pages": pages,
        "table_gb": gigabytes,
        "latency_ms": latency,
        "speedup": RECOMPUTE_MS / latency,
    }
    for pages, gigabytes, latency in (
        (20_480, 10, 84.7),
        (30_720, 15, 58.9),
        (40_960, 20, 47.3),
        (51_200, 25, 41.3),
        (61_440, 30, 37.0),
    )
]
"""The speed-up is the table's recompute latency divided by each latency; the trace is that of its latency at 40,960."""

FIGURE_1 = {"requests": 3, "recompute_tokens": 4_031, "reuse_tokens": 529}

FIGURES: dict[str, list[dict[str, Any]]] = {
    "table1": TABLE_1,
    "table2": TABLE_2,
    "table3": TABLE_3,
    "table5": TABLE_5,
    "table6": TABLE_6,
    "figure1": [FIGURE_1],
}

_TWO_RATIOS = "In the paper KuaiRand-1K's total hit ratio at batch size 1 is 94.66 % in table 1 and 98.56 % in table 5."
FOOTNOTES: dict[str, list[str]] = {
    "table1": [_TWO_RATIOS],
    "table3": ["For chunks of 4096 the paper's table says 19.09 ms of waiting, its text 17.09 ms."],
    "table5": [
        _TWO_RATIOS,
        "At batch size 1 the paper's recompute column for 4 layers is the one of its table 2 for 8 layers, step by "
        "step; the speed-ups of that batch size rest on it.",
    ],
    "table6": [
        "The paper's speed-ups: 143.6 ms of recompute divided by its latencies; for 20,480 pages the text has 1.69.",
        "The paper's figure 5 plots hit ratios and waiting times of this sweep; the text has no numbers for them.",
        "The paper's gigabytes are the primary cache alone. Its onload region, which this replay does without, has "
        "10,008 pages in appendix C, where ⌈320,064 / 32⌉ is 10,002.",
    ],
    "figure1": [
        "The paper does not say whether its tokens include candidates, nor how each request shares in the two sums.",
    ],
}
"""Where the paper's figures need a word; most are places at which it contradicts itself."""
