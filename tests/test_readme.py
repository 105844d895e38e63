"""The README's Python runs, and its cache gives the scores of a recompute."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from mtserve_plugin import NoCache

README = Path(__file__).parents[1] / "README.md"


def test_the_example_scores_the_same_with_and_without_the_cache() -> None:
    code = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    torch.manual_seed(0)
    names: dict = {}
    exec(compile(code, str(README), "exec"), names)
    history, lengths = torch.randint(1000, (70,)), torch.tensor([30, 40])
    candidates = torch.randint(1000, (2, 5))
    users = torch.tensor([11, 12])
    names["score"](users, history, lengths, candidates)
    grown = torch.cat([history[:30], torch.tensor([1, 2, 3]), history[30:]])
    cached = names["score"](users, grown, lengths + torch.tensor([3, 0]), candidates)
    assert names["cache"].stats()["hit_tokens"] == 70
    names["cache"].close()
    names["cache"] = NoCache(names["config"])
    recomputed = names["score"](users, grown, lengths + torch.tensor([3, 0]), candidates)
    assert torch.allclose(cached, recomputed, rtol=1e-6, atol=1e-6)
