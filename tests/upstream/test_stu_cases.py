"""The host's cases for its layers on the CPU: what Triton computes there, an attached stack computes here.

`STUStack` in the host's test module is replaced by `Stack`, which holds the host's own stack. Set to the kernel PYTORCH
it is just that; otherwise it is a copy attached to a cache, which answers three times: without anything cached, with
random prefixes of the histories cached, and with the histories removed, which has to be seen. The divisor is pinned to
the one number that a case gives, its `max_seq_len`. `test_cached_forward` builds its layers under
`torch.inference_mode`, where weights have no version and `attach` refuses them; here it is `no_grad`.

What is not compared, but seen to be refused:
- `contextual_seq_len` of the layers: the first rows see the whole history, so that nothing of it could be kept;
- `has_multiple_targets=False` as it is built, `target_aware=False`: candidates would count as history. The cases mean
  rows that are all history, which the same layers with `target_aware=True` and no candidates compute, and these are
  compared.
Gradients are not: attached models are for inference. The cases' own variants of recomputation in the backward pass
change nothing here.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtserve_plugin import CacheConfig, HierarchicalKVCache, attach
from mtserve_plugin.errors import AttachError
from tests.upstream.converted import Compared, load, place_in_row, relative_error, with_no_gradient

pytestmark = pytest.mark.filterwarnings("ignore")

CASES = "modules/tests/stu_test.py"


class Seen:
    """What the attached copies of one test did."""

    def __init__(self) -> None:
        self.compare = Compared({torch.float32: 1e-6})
        self.random = random.Random(2)
        self.hit_tokens = 0
        self.controls: list[float] = []
        self.refused: dict[str, int] = {}
        self.cached_forwards = 0


class Stack(torch.nn.Module):
    """The host's stack, or an attached copy of it; `host` and `seen` are set on a subclass per test."""

    host: SimpleNamespace
    seen: Seen

    def __init__(self, stu_list: list[torch.nn.Module], is_inference: bool) -> None:
        super().__init__()
        self.plain = self.host.stu.STUStack(stu_list=stu_list, is_inference=is_inference)
        self.plain.recursive_setattr("_hammer_kernel", self.host.common.HammerKernel.PYTORCH)
        self.is_attached = True
        self.primed: Any = None

    def recursive_setattr(self, name: str, value: Any) -> None:
        assert name == "_hammer_kernel"
        self.is_attached = value.name != "PYTORCH"

    def forward(self, x, x_lengths, x_offsets, max_seq_len, num_targets, **caching):
        with torch.no_grad():
            shared = {"x_lengths": x_lengths, "x_offsets": x_offsets, "max_seq_len": max_seq_len}
            out = self.plain(x=x, **shared, num_targets=num_targets, **caching)
            if self.is_attached:
                out = self._cached(x, shared, num_targets, out, keep="kv_caching_lengths" in caching)
        return with_no_gradient(out, x)

    def cached_forward(self, delta_x, num_targets):
        """The case primed each row with its history and some candidates; the delta holds the other candidates."""
        theirs = self.plain.cached_forward(delta_x=delta_x, num_targets=num_targets)
        if self.primed is None:
            return theirs
        stack, cache, users, histories = self.primed
        size = delta_x.shape[0] // users.numel()
        assert int(num_targets.min()) >= size
        with cache.batch(users, histories, num_candidates=size) as batch:
            assert torch.equal(batch.cached_lengths, histories)
            out = run(stack, batch, delta_x)
        cache.close()
        self.seen.cached_forwards += 1
        self.seen.compare(theirs, out)
        return out

    def _cached(self, x, shared, num_targets, plain, keep):
        """With a cache: cold, then with prefixes; rows that were cached are not computed, and keep the cold result."""
        seen, stack, lengths = self.seen, copy.deepcopy(self.plain).eval(), shared["x_lengths"]
        layers = list(stack._stu_layers)
        config = {"attn_norm_len": shared["max_seq_len"], "page_size": 4, "chunk_size": 16, "num_pages": 800}
        with self._refused(stack, "contextual_seq_len", layers[0]._contextual_seq_len > 0) as refused:
            pass
        if refused:
            self.primed = None
            return plain
        candidates = num_targets
        with self._refused(stack, "target_aware", not layers[0]._target_aware):
            if not layers[0]._target_aware:
                candidates = torch.zeros_like(num_targets)
                for layer in layers:
                    layer._target_aware = True
        cache = HierarchicalKVCache(CacheConfig.for_model(stack, **config))
        cache.table.fill_(float("nan"))
        attach(stack, cache)
        histories, users = lengths - candidates, torch.arange(lengths.numel())
        if keep:
            with cache.batch(users, histories, num_candidates=candidates) as batch:
                seen.compare(plain, run(stack, batch, x))
            self.primed = (stack, cache, users, histories)
            return plain
        place = place_in_row(shared["x_offsets"])
        row = users.repeat_interleave(lengths)
        with cache.batch(users, histories, num_candidates=candidates) as batch:
            cold = run(stack, batch, x)
        seen.compare(plain, cold)

        others = users + 1000
        prefix = torch.tensor([seen.random.randint(0, int(n)) for n in histories])
        with cache.batch(others, prefix, num_candidates=0) as batch:
            run(stack, batch, x[place < prefix[row]])
        with cache.batch(others, histories, num_candidates=candidates) as batch:
            assert torch.equal(batch.cached_lengths, prefix)
            left = place >= prefix[row]
            hit = run(stack, batch, x[left])
        seen.hit_tokens += int(prefix.sum())
        seen.compare(plain[left], hit)

        # Of rows without candidates the newest token is looked at.
        kept = (candidates == 0).long().minimum(histories)
        last = place >= (histories - kept)[row]
        with cache.batch(users + 2000, kept, num_candidates=candidates) as batch:
            seen.controls.append(relative_error(run(stack, batch, x[last]), plain[last]))
        cache.check()
        cache.close()
        return cold.index_put((left,), hit)

    @contextmanager
    def _refused(self, stack, factor: str, expected: bool) -> Iterator[bool]:
        if expected:
            self.seen.refused[factor] = self.seen.refused.get(factor, 0) + 1
            any_cache = HierarchicalKVCache(CacheConfig.for_model(stack, attn_norm_len=1, num_pages=1))
            with pytest.raises(AttachError, match=factor):
                attach(stack, any_cache)
            any_cache.close()
        yield expected


def run(stack, batch, x: torch.Tensor) -> torch.Tensor:
    """Lengths as the batch has them; none of them is the divisor."""
    lengths = batch.offsets.diff()
    return stack(
        x=x,
        x_lengths=lengths,
        x_offsets=batch.offsets,
        max_seq_len=max(1, int(lengths.max())),
        num_targets=batch.num_candidates,
    )


@pytest.fixture
def seen(host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Seen:
    found = Seen()
    monkeypatch.setattr(Stack, "host", host, raising=False)
    monkeypatch.setattr(Stack, "seen", found, raising=False)
    torch.manual_seed(0)
    return found


@pytest.mark.parametrize("case", ["test_triton", "test_target_invariance", "test_cached_forward"])
def test_case(seen: Seen, case: str, record_property) -> None:
    no_grad = [(r"torch\.inference_mode\(\)", "torch.no_grad()")]
    # What the case compares itself: a refused one returns the host's own result there.
    of_case = Compared(seen.compare.tolerances)
    module = load(CASES, 20, *no_grad, compare=of_case, STUStack=Stack)
    split = module.split_2D_jagged
    module.split_2D_jagged = lambda kernel, **arguments: split(**arguments)
    getattr(module.StuTest(case), case)()
    errors = seen.compare.errors[torch.float32]
    record_property(f"largest relative error of {len(errors)}", max(errors))
    record_property("history removed, least difference", min(seen.controls))
    record_property("refused", str(seen.refused))
    assert sum(map(len, of_case.errors.values())) > 0
    assert min(seen.controls) > 1e-2
    assert seen.hit_tokens > 50
    assert ("contextual_seq_len" in seen.refused) == (case != "test_target_invariance")
    assert ("target_aware" in seen.refused) == (case == "test_triton")
    assert bool(seen.cached_forwards) == (case == "test_cached_forward")
