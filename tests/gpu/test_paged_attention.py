"""The Triton kernel on a CUDA device: the cases of the interpreter, and what only a device can show."""

from __future__ import annotations

from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from mtserve_plugin import CacheConfig, NoCache, ops
from mtserve_plugin.triton_kernels import launch
from tests.kernels.reference import jagged_batch, random_batch, relative_error
from tests.triton.cases import TOLERANCE, Cases

DTYPES = list(TOLERANCE)
SHAPES = [(2, 16, 16, 8), (1, 7, 20, 4), (4, 128, 128, 32), (2, 64, 128, 32), (1, 256, 256, 16), (2, 65, 130, 32)]


class TestOnDevice(Cases):
    device = "cuda"

    def run(self, arguments: dict[str, Any], **options: Any) -> torch.Tensor:
        if options:
            return super().run(arguments, **options)
        return ops.paged_hstu_attention(*map(self.on_device, arguments.values())).cpu()

    def large_table(self, pages: int, elements: int) -> torch.Tensor:
        if torch.cuda.mem_get_info()[0] < 2 * pages * elements + (1 << 30):
            pytest.skip("the device has no 5 GiB left")
        return torch.zeros(1, pages, elements, dtype=torch.float16, device="cuda")

    @pytest.mark.parametrize("window", [0, 13])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_every_dtype_and_shape(self, shape, dtype, window):
        heads, qk_dim, v_dim, page_size = shape
        batch = jagged_batch(page_size, heads=heads, qk_dim=qk_dim, v_dim=v_dim, window=window, dtype=dtype)
        assert relative_error(self.attend(batch), batch.expected()) <= TOLERANCE[dtype]

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_no_choice_of_warps_stages_and_blocks_changes_a_bit(self, dtype):
        shape = {"heads": 4, "qk_dim": 128, "v_dim": 128, "page_size": 32, "dtype": dtype}
        cold = random_batch([2500, 600], [40, 9], [0, 0], **shape)
        expected = self.attend(cold)
        assert relative_error(expected, cold.expected()) <= TOLERANCE[dtype]
        cached = cold.split([2471, 600])
        rows = torch.cat([expected[2471:2540], expected[3140:]])
        for split in (False, True):
            for config in launch.choose_blocks(dtype, 128, 128).configs:
                assert torch.equal(self.attend(cold, split=split, config=config), expected), (split, config)
                assert torch.equal(self.attend(cached, split=split, config=config), rows), (split, config)

    def test_nothing_waits_for_the_device(self, monkeypatch):
        monkeypatch.setenv("MTSERVE_TRITON_AUTOTUNE", "0")
        batch = random_batch([700, 20], [9, 2], [690, 16], dtype=torch.float16)
        arguments = [self.on_device(x) for x in batch.arguments().values()]
        ops.paged_hstu_attention(*arguments)  # compiles
        fresh = [x.clone() if isinstance(x, torch.Tensor) and not x.is_cuda else x for x in arguments]
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = ops.paged_hstu_attention(*fresh)
        finally:
            torch.cuda.set_sync_debug_mode(before)
        assert relative_error(out.cpu(), batch.expected()) <= TOLERANCE[torch.float16]

    def test_a_graph_replays_a_batch_whose_plan_was_made(self):
        batch = random_batch([700, 20], [9, 2], [690, 16], dtype=torch.float16)
        arguments = [self.on_device(x) for x in batch.arguments().values()]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            expected = ops.paged_hstu_attention(*arguments)
            with torch.cuda.graph(graph, stream=stream):
                out = ops.paged_hstu_attention(*arguments)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)

    def test_lengths_on_the_device_are_refused(self):
        arguments = random_batch([20], [2], [16]).arguments()
        arguments["paged_lens"] = arguments["paged_lens"].cuda()
        with pytest.raises(RuntimeError, match="paged_lens is on cuda"):
            self.run(arguments)

    def test_a_batch_without_a_cache(self):
        shape = {"num_layers": 2, "num_heads": 2, "qk_dim": 16, "v_dim": 16, "attn_norm_len": 50, "num_pages": 8}
        q, k, v = (torch.randn(40, 2, 16) for _ in range(3))
        outs = {}
        for device in ("cpu", "cuda"):
            cache = NoCache(CacheConfig(**shape, dtype="float32"), device=device)
            with cache.batch(torch.tensor([1, 2]), torch.tensor([30, 4]), num_candidates=3) as batch:
                outs[device] = [batch.attend(layer, *(x.to(device) for x in (q, k, v))).cpu() for layer in range(2)]
        for ours, theirs in zip(outs["cuda"], outs["cpu"], strict=True):
            assert relative_error(ours, theirs.double()) <= TOLERANCE[torch.float32]
