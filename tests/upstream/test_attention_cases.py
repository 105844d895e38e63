"""The host's attention cases on the CPU: what Triton computes there, the paged operator computes here.

`hstu_mha` and `delta_hstu_mha` of the host are replaced by functions that send the kernel TRITON to the paged operator
and everything else to the host's PyTorch operators. The operator runs twice: with all keys dense, and with a part of
them in pages, out of order, in a table that holds NaN wherever no key was written.

What is not compared, because the operator does not have it:
- context rows of `contextual_seq_len`, which see the whole history (`attach` refuses such layers);
- with `contextual_seq_len` and a window, the rows whose window reaches into the context rows: the host counts all of
  them as one position;
- gradients: the operator is for inference;
- `test_attn_triton_long_seqs`, which compares nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
import torch

from mtserve_plugin import ops
from tests.upstream.converted import Compared, load, place_in_row, relative_error, with_no_gradient

pytestmark = pytest.mark.filterwarnings("ignore")

CASES = "ops/tests/hstu_attention_test.py"
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
# One rounding of an exact result to bfloat16.
ONE_ROUNDING = 2.0**-8
PAGE = 8


class Paged:
    """The paged operator behind the signatures of the host's two attention functions."""

    def __init__(self, host: ModuleType) -> None:
        self.host = host
        self.mha, self.delta_mha = host.pytorch_hstu_mha, host.pytorch_cached_hstu_mha
        self.random = random.Random(1)
        self.compare = Compared(TOLERANCE)
        self.rounded: list[float] = []
        self.paged_tokens = 0
        self.controls: list[float] = []
        self.context_rows: list[float] = []
        self.not_compared = 0

    def hstu_mha(self, *, q, k, v, kernel=None, **case):
        """The host's `hstu_mha`."""
        with torch.no_grad():
            out = self._plain(q, k, v, case)
            if kernel is not None and kernel.name == "TRITON":
                lengths = case["seq_offsets"].diff()
                candidates = self._candidates(lengths, case["num_targets"])
                paged = torch.tensor([self.random.randint(0, int(n)) for n in lengths - candidates])
                out = self._only_supported(self._both(q, k, v, case, paged), out, case)
                self._check_dtype(out, q, k, v, case, self._plain)
        return with_no_gradient(out, q, k, v)

    def delta_hstu_mha(self, *, delta_q, k, v, kernel=None, **case):
        """The host's `delta_hstu_mha`: everything before the delta comes from pages."""
        with torch.no_grad():
            if kernel is None or kernel.name != "TRITON":
                return self._plain_delta(delta_q, k, v, case)
            lengths = case["seq_offsets"].diff()
            size = delta_q.shape[0] // lengths.numel()
            last = place_in_row(case["seq_offsets"]) >= (lengths - size).repeat_interleave(lengths)
            q = k.new_zeros(k.shape)
            q[last] = delta_q
            out = self._both(q, k, v, case, lengths - size)
            reference = torch.zeros_like(out)
            reference[last] = self._plain_delta(delta_q, k, v, case)
            out = self._only_supported(out, reference, case)[last]
            self._check_dtype(out, delta_q, k, v, case, self._plain_delta)
            return out

    # ---- the host's side -----------------------------------------------------------------------------------

    def _plain(self, q, k, v, case):
        names = ("max_seq_len", "alpha", "seq_offsets", "causal", "num_targets", "max_attn_len", "contextual_seq_len")
        return self.mha(q=q, k=k, v=v, training=False, **{name: case[name] for name in names})

    def _plain_delta(self, q, k, v, case):
        names = ("max_seq_len", "alpha", "seq_offsets", "num_targets", "max_attn_len", "contextual_seq_len")
        return self.delta_mha(delta_q=q, k=k, v=v, **{name: case[name] for name in names})

    # ---- our side ------------------------------------------------------------------------------------------

    def _both(self, q, k, v, case, paged):
        """All dense, then with the first `paged[b]` keys of each row in pages: the same bits for the rows left."""
        cold = attend(q, k, v, case, torch.zeros_like(paged))
        left = place_in_row(case["seq_offsets"]) >= paged.repeat_interleave(case["seq_offsets"].diff())
        hit = attend(q, k, v, case, paged)
        assert torch.equal(hit, cold[left])
        self.paged_tokens += int(paged.sum())
        lengths = case["seq_offsets"].diff()
        candidates = self._candidates(lengths, case["num_targets"])
        is_last = place_in_row(case["seq_offsets"]) >= (lengths - candidates.clamp(min=1)).repeat_interleave(lengths)
        with_history = (paged > 0).repeat_interleave(lengths) & is_last
        if with_history.any() and not case["max_attn_len"]:
            without = attend(q, k, torch.where(left[:, None, None], v, 0), case, torch.zeros_like(paged))
            self.controls.append(relative_error(without[with_history], cold[with_history]))
        return cold

    def _only_supported(self, out, reference, case):
        """Rows that the operator does not know are taken from the host, and are seen to differ."""
        context, window = case["contextual_seq_len"], case["max_attn_len"]
        if not context:
            return out
        lengths = case["seq_offsets"].diff()
        place = place_in_row(case["seq_offsets"])
        history = (lengths - self._candidates(lengths, case["num_targets"])).repeat_interleave(lengths)
        place = torch.minimum(place, history)
        unknown = place < context
        if window:
            unknown |= place < context + window
        elif unknown.any() and reference[unknown].any():
            self.context_rows.append(relative_error(out[unknown], reference[unknown]))
        self.not_compared += int(unknown.sum())
        return torch.where(unknown[:, None, None], reference, out)

    def _check_dtype(self, out, q, k, v, case, plain: Callable) -> None:
        """In bfloat16 the host rounds scores and weights too; in float32, on the same inputs, it does not."""
        if out.dtype == torch.bfloat16 and not case["contextual_seq_len"]:
            self.rounded.append(relative_error(out, plain(q.float(), k.float(), v.float(), case)))

    @staticmethod
    def _candidates(lengths, num_targets):
        return torch.zeros_like(lengths) if num_targets is None else num_targets


def attend(q, k, v, case, paged: torch.Tensor) -> torch.Tensor:
    """The operator; the result has the rows that are not in pages."""
    offsets = case["seq_offsets"]
    lengths = offsets.diff()
    candidates = Paged._candidates(lengths, case["num_targets"])
    place = place_in_row(offsets)
    in_pages = place < paged.repeat_interleave(lengths)
    pages = -(-paged // PAGE)
    indptr = torch.cat((torch.zeros(1, dtype=torch.int64), pages.cumsum(0)))
    total = int(indptr[-1])
    indices = torch.randperm(total + 3)[:total]
    width = k.shape[1] * (k.shape[2] + v.shape[2])
    table = torch.full((2, total + 3, PAGE * width), float("nan"), dtype=k.dtype)
    page = indices[(indptr[:-1].repeat_interleave(lengths) + place // PAGE)[in_pages]]
    slots = page * PAGE + place[in_pages] % PAGE
    ops.append_pages(table, 1, k[in_pages], v[in_pages], slots, PAGE)
    dense = ~in_pages
    return ops.paged_hstu_attention(
        q[dense],
        k[dense],
        v[dense],
        table,
        1,
        torch.cat((torch.zeros(1, dtype=torch.int64), (lengths - paged).cumsum(0))),
        candidates,
        paged,
        indices.to(torch.int32),
        indptr.to(torch.int32),
        PAGE,
        case["alpha"],
        float(case["max_seq_len"]),
        case["max_attn_len"],
    )


@pytest.fixture
def paged(host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Paged:
    import generative_recommenders.ops.hstu_attention as attention

    ours = Paged(attention)
    monkeypatch.setattr(attention, "hstu_mha", ours.hstu_mha)
    monkeypatch.setattr(attention, "delta_hstu_mha", ours.delta_hstu_mha)
    torch.manual_seed(0)
    random.seed(0)
    return ours


@pytest.mark.parametrize("case", ["test_attn_triton", "test_delta_attn_triton", "test_cache"])
def test_case(paged, case, record_property):
    module = load(CASES, 16, compare=paged.compare)
    split = module.split_2D_jagged
    module.split_2D_jagged = lambda kernel, **arguments: split(**arguments)
    getattr(module.HSTUAttentionTest(case), case)()
    for dtype, errors in paged.compare.errors.items():
        assert len(errors) >= 4
        record_property(f"{dtype}: largest relative error of {len(errors)}", max(errors))
    record_property("bfloat16 to float32 on the same inputs", max(paged.rounded))
    assert max(paged.rounded) <= ONE_ROUNDING
    record_property("history removed, least difference", min(paged.controls))
    assert min(paged.controls) > 1e-2
    assert paged.paged_tokens > 1000
    if paged.context_rows:
        record_property("context rows, least difference", min(paged.context_rows))
        assert min(paged.context_rows) > 1e-2
