"""What `test_paged_attention.py` runs under TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch

from mtserve_plugin.graphs.buckets import Tiling
from mtserve_plugin.graphs.metadata import Metadata
from tests.graphs.plans import Now, send, work_of
from tests.kernels.reference import random_batch
from tests.triton.cases import Cases


class TestInterpreted(Cases):
    def test_the_plan_of_a_batch_is_made_once(self, monkeypatch):
        from mtserve_plugin.triton_kernels import launch

        made = []
        make = launch.make_plan
        monkeypatch.setattr(launch, "make_plan", lambda *a, **k: made.append(1) or make(*a, **k))
        batch = random_batch([20], [2], [16])
        arguments = batch.arguments()
        outs = [self.run(arguments | {"layer": layer}) for layer in (1, 1)]
        assert torch.equal(*outs)
        assert len(made) == 1
        # One token less of the history, one more candidate: other tensors beside the same offsets are another batch,
        arguments["num_candidates"] = arguments["num_candidates"] + 1
        assert not torch.equal(self.run(arguments), outs[0])
        assert len(made) == 2
        # and so are the same tensors with other content.
        arguments["num_candidates"] -= 1
        assert torch.equal(self.run(arguments), outs[0])
        assert len(made) == 3
        del arguments
        assert not [key for key in launch._plans if key.numel() == 2]

    @pytest.mark.parametrize(
        ("name", "change", "message"),
        [
            ("page_indices", lambda x: x + 10**6, "page_indices has an entry"),
            ("page_indices", lambda x: x - 10**6, "page_indices has an entry"),
            ("page_indptr", lambda x: x // 2, "paged_lens has an entry"),
            ("page_indptr", lambda x: x + 5, "page_indptr must rise"),
            ("offsets", lambda x: x + 1, "offsets"),
            ("offsets", lambda x: x - x, "offsets ends"),
            ("offsets", lambda x: x.int(), "offsets is torch.int32"),
            ("num_candidates", lambda x: x + 50, "num_candidates"),
            ("num_candidates", lambda x: x[:0], "num_candidates"),
            ("paged_lens", lambda x: -x, "paged_lens"),
            ("layer", lambda x: 3, "layer is 3"),
            ("k", lambda x: x[:, :1], "k has shape"),
            ("v", lambda x: x.half(), "v is torch.float16"),
            ("page_size", lambda x: 9, "table has pages"),
            ("norm_len", lambda x: 0.0, "norm_len"),
            ("max_attn_len", lambda x: -1, "max_attn_len"),
            ("paged_lens", lambda x: x.to("meta"), "paged_lens is on meta"),
        ],
    )
    def test_bad_arguments_are_named(self, name, change, message):
        arguments = random_batch([20, 9], [2, 1], [16, 8]).arguments()
        arguments[name] = change(arguments[name])
        with pytest.raises(RuntimeError, match=f"paged_hstu_attention: {message}"):
            self.run(arguments)


class TestPlanned:
    """`planned_attention` on a bucket's buffers, filled by batch after batch."""

    @pytest.mark.parametrize(("window", "split", "dtype"), [(0, None, torch.float32), (13, True, torch.float16)])
    def test_it_is_the_batch_and_nothing_beside_it(self, window, split, dtype):
        from mtserve_plugin.triton_kernels import launch

        torch.manual_seed(8)
        options = {"qk_dim": 20, "v_dim": 24, "window": window, "dtype": dtype, "page_size": 8}
        blocks = launch.choose_blocks(dtype, 20, 24)
        tiling = Tiling(blocks.queries, blocks.many_queries, 8)
        metadata, buckets = None, set()
        for histories, candidates, paged in (
            ([560, 33, 0, 7], [9, 0, 3, 0], [540, 30, 0, 7]),
            ([540], [2], [530]),
            ([0, 0, 5], [0, 1, 30], [0, 0, 4]),
        ):
            batch = random_batch(histories, candidates, paged, **options)
            work, bucket = work_of(batch, tiling, split)
            if bucket not in buckets:
                metadata = Metadata(bucket, torch.device("cpu"), Now())
            buckets.add(bucket)
            out = launch.planned_attention(*send(metadata, bucket, batch, work))
            tokens = int(batch.offsets[-1])
            assert torch.equal(out[:tokens], launch.paged_hstu_attention(*batch.arguments().values()))
            assert (bucket.split_tiles > 0) == work.split
        # The first two share a bucket under splitting, so that the second meets what the first left.
        assert len(buckets) == 2

    @pytest.mark.parametrize(
        ("place", "value", "message"),
        [
            (5, torch.zeros(9), "plan is torch.float32"),
            (10, 10**6, "plan has"),
            (4, 3, "layer is 3"),
            (14, 0.0, "norm"),
        ],
    )
    def test_bad_arguments_are_named(self, place, value, message):
        from mtserve_plugin.triton_kernels import launch

        batch = random_batch([20, 9], [2, 1], [16, 8])
        work, bucket = work_of(batch, Tiling(32, 32, 8))
        arguments = [*send(Metadata(bucket, torch.device("cpu"), Now()), bucket, batch, work)]
        arguments[place] = value
        with pytest.raises(RuntimeError, match=message):
            launch.planned_attention(*arguments)
