"""What the kernels for CUDA tensors promise, for whatever runs them: a device, or triton's interpreter."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch

from tests.kernels.reference import Batch, jagged_batch, random_batch, relative_error

# Scores are rounded to the dtype before they meet the values, and the sum is rounded once more.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2 * 2**-11, torch.bfloat16: 2 * 2**-8}
# dtype, heads, qk_dim, v_dim, page_size, window
DEFINITIONS = [
    (torch.float32, 2, 16, 16, 8, 0),
    (torch.float32, 1, 7, 20, 4, 13),
    (torch.float32, 1, 65, 33, 32, 1),
    (torch.float16, 2, 32, 32, 8, 13),
    (torch.float16, 3, 20, 7, 24, 0),
    (torch.bfloat16, 1, 64, 128, 32, 0),
    (torch.bfloat16, 2, 16, 24, 128, 1000),
]
LONG = {"heads": 1, "page_size": 32}


class Cases:
    """Subclasses say where the tensors are and how many of the slow cases they can afford."""

    device = "cpu"

    @pytest.fixture(autouse=True)
    def _seed(self):
        torch.manual_seed(31)

    def on_device(self, x: Any) -> Any:
        return x.to(self.device) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    def run(self, arguments: dict[str, Any], **options: Any) -> torch.Tensor:
        from mtserve_plugin.triton_kernels import launch

        return launch.paged_hstu_attention(*map(self.on_device, arguments.values()), **options).cpu()

    def attend(self, batch: Batch, **options: Any) -> torch.Tensor:
        return self.run(batch.arguments(), **options)

    @pytest.mark.parametrize(("dtype", "heads", "qk_dim", "v_dim", "page_size", "window"), DEFINITIONS)
    def test_matches_the_definition(self, dtype, heads, qk_dim, v_dim, page_size, window):
        batch = jagged_batch(page_size, heads=heads, qk_dim=qk_dim, v_dim=v_dim, window=window, dtype=dtype)
        out, expected = self.attend(batch), batch.expected()
        assert (out.dtype, out.shape, out.is_contiguous()) == (dtype, expected.shape, True)
        assert relative_error(out, expected) <= TOLERANCE[dtype]

    @pytest.mark.parametrize(("dtype", "window"), [(torch.float16, 0), (torch.float32, 100)])
    def test_cached_and_recomputed_are_bit_equal(self, dtype, window):
        history, candidates = 560, 19
        cold = random_batch([history], [candidates], [0], window=window, dtype=dtype, **LONG)
        expected = self.attend(cold, split=False)
        assert relative_error(expected, cold.expected()) <= TOLERANCE[dtype]
        for paged, split in ((1, True), (511, False), (513, True), (559, None), (560, True)):
            out = self.attend(cold.split([paged]), split=split)
            assert torch.equal(out, expected[paged:]), (paged, split)

    @pytest.mark.parametrize("window", [0, 150])
    def test_splitting_changes_no_bit(self, window):
        # Rows without any history, within one segment, at its end and beyond it.
        histories, candidates, paged = [0, 0, 7, 512, 540, 1040], [0, 3, 0, 1, 2, 2], [0, 0, 7, 512, 513, 1030]
        batch = random_batch(histories, candidates, paged, window=window, v_dim=20, **LONG)
        out = self.attend(batch, split=False)
        assert relative_error(out, batch.expected()) <= TOLERANCE[torch.float32]
        assert torch.equal(self.attend(batch, split=True), out)

    def test_a_row_does_not_depend_on_the_rest_of_the_batch(self):
        histories, candidates, paged = [140, 0, 330, 33], [5, 60, 100, 1], [128, 0, 301, 33]
        batch = random_batch(histories, candidates, paged, v_dim=24, dtype=torch.float16, **LONG)
        out, offsets = self.attend(batch), batch.offsets.tolist()
        for b in range(len(paged)):
            alone = random_batch([histories[b]], [candidates[b]], [paged[b]], v_dim=24, dtype=torch.float16, **LONG)
            for mine, whole in ((alone.q, batch.q), (alone.k, batch.k), (alone.v, batch.v)):
                mine[0][:] = whole[b]
            assert torch.equal(self.attend(alone.split([paged[b]])), out[offsets[b] : offsets[b + 1]]), b

    @pytest.mark.parametrize(
        ("histories", "candidates", "paged"),
        [([], [], []), ([0], [0], [0]), ([5], [0], [5]), ([0], [3], [0]), ([1], [0], [0]), ([200], [1], [200])],
    )
    def test_smallest_batches(self, histories, candidates, paged):
        if histories:
            batch = random_batch(histories, candidates, paged, dtype=torch.float16)
            assert relative_error(self.attend(batch), batch.expected()) <= TOLERANCE[torch.float16]
            return
        arguments = random_batch([0], [0], [0]).arguments()
        none = torch.zeros(0, dtype=torch.int64)
        arguments |= {"offsets": torch.zeros(1, dtype=torch.int64), "num_candidates": none, "paged_lens": none}
        arguments["page_indptr"] = torch.zeros(1, dtype=torch.int32)
        assert self.run(arguments).shape == (0, 2, 16)

    def test_what_is_not_visible_is_not_read(self):
        batch = random_batch([3, 40, 70], [2, 9, 66], [3, 33, 0])
        assert batch.table.isnan().any()
        clean = self.attend(batch)
        assert clean.isfinite().all()
        # A candidate's key and value belong to itself alone.
        for k, v in zip(batch.k, batch.v, strict=True):
            k[-1], v[-1] = float("nan"), float("inf")
        out = self.attend(batch)
        spoiled = torch.zeros(len(out), dtype=torch.bool)
        spoiled[batch.offsets[1:] - 1] = True
        assert torch.equal(out[~spoiled], clean[~spoiled])
        assert not out[spoiled].isfinite().any()

    def test_slices_of_one_projection_and_strided_tables(self):
        batch = random_batch([50, 20], [3, 2], [33, 0], heads=3, qk_dim=9, v_dim=11)
        arguments = batch.arguments()
        expected = self.run(arguments)
        projection = torch.full((len(expected), 5 + 3 * (9 + 9 + 11)), float("nan"), device=self.device)
        slices = dict(zip("qkv", projection[:, 5:].split([27, 27, 33], dim=1), strict=True))
        for name, part in slices.items():
            part.copy_(arguments[name].flatten(1))
        assert torch.equal(self.run(arguments | {n: x.unflatten(1, (3, -1)) for n, x in slices.items()}), expected)
        for order in ((1, 0, 2), (2, 1, 0)):
            moved = {n: self.on_device(arguments[n]).permute(order).contiguous().permute(order) for n in "qkv"}
            assert torch.equal(self.run(arguments | moved), expected)
        table = batch.table
        apart = torch.full((table.shape[1], table.shape[0], table.shape[2] + 3), float("nan"), device=self.device)
        apart[:, :, :-3] = table.transpose(0, 1)
        lists = {
            name: torch.stack([arguments[name], torch.full_like(arguments[name], -7)], 1)[:, 0]
            for name in ("offsets", "num_candidates", "paged_lens", "page_indices", "page_indptr")
        }
        assert torch.equal(self.run(arguments | lists | {"table": apart[:, :, :-3].transpose(0, 1)}), expected)

    def test_page_addresses_need_64_bits(self):
        dim, page_size = 16, 32
        elements = 2 * page_size * dim
        pages = 2**31 // elements + 1000
        table = self.large_table(pages, elements)
        ids = [pages - 1, 3, pages - 400]
        whole = random_batch([70], [3], [0], heads=1, dtype=torch.float16)
        near = random_batch([70], [3], [70], heads=1, dtype=torch.float16, page_size=page_size)
        for mine, theirs in ((near.q, whole.q), (near.k, whole.k), (near.v, whole.v)):
            mine[0][:] = theirs[0]
        arguments = near.split([70]).arguments()
        small = arguments["table"][1, arguments["page_indices"].long()].nan_to_num()
        table[0, ids] = small.to(self.device)
        arguments |= {"table": table, "layer": 0, "page_indices": torch.tensor(ids, dtype=torch.int32)}
        assert torch.equal(self.run(arguments), self.attend(whole)[70:])

    def large_table(self, pages: int, elements: int) -> torch.Tensor:
        no_reserve = 0x4000  # address space alone: pages that are never written cost nothing
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
        return torch.frombuffer(mmap.mmap(-1, 2 * pages * elements, flags=flags), dtype=torch.float16).view(
            1, pages, -1
        )
