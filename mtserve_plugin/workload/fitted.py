"""Synthetic traces whose sessions are fitted to the hit ratios that the paper reports, for `mtserve simulate`.

`docs/simulate.md` tells what was fitted, to what, and what the data could not decide. `load_trace` without
`shapes` gives `KUAIRAND_LIKE` and `MT_LIKE`, which a replay scales down to what a model serves in a minute.
"""

from __future__ import annotations

from mtserve_plugin.workload.synthetic_config import KUAIRAND_LIKE, MT_LIKE, SyntheticConfig

KUAIRAND_FITTED = KUAIRAND_LIKE.replace(
    session_requests=18.0, min_gap_s=288, mean_gap_s=338.0, activity_sigma=0.15, pace_sigma=0.6
)
"""The paper's KuaiRand-1K: long sessions, a request every few minutes, and users who differ in how much they see in
between. Those with much have the longest histories and the longest gaps, so the histories that an LRU drops are long
ones: without this the paper's policy would lose more tails than its total hit ratio allows."""

MT_FITTED = MT_LIKE.replace(session_requests=2.3, new_tokens=0.45, pace_sigma=0.5, start_multiple=1024)
"""The paper's MT trace. Histories start at multiples of 1024 and grow slowly: with any length as likely as any other
the tail behind the last full chunk has 512 tokens on average, and a policy that keeps full chunks alone cannot
exceed a total hit ratio of 97 % at a device hit ratio of 62 %."""

TEN_MILLION = SyntheticConfig(
    name="ten-million",
    users=10_000_000,
    requests=30_000_000,
    min_history=16,
    mean_history=400.0,
    max_history=4_000,
    new_tokens=8.0,
    activity_sigma=2.0,
    session_requests=3.0,
)
"""Ten million users, nothing fitted: the busiest hundredth makes a quarter of the requests, most users come once in a
month."""

FITTED: dict[str, SyntheticConfig] = {c.name: c for c in (KUAIRAND_FITTED, MT_FITTED, TEN_MILLION)}
