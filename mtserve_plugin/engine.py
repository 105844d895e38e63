"""The native side of a cache: what it is built from."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from mtserve_plugin.config import CacheConfig
from mtserve_plugin.errors import ConfigError


def build_engine(config: CacheConfig, table: torch.Tensor, cuda_library: str = "") -> Any:
    """The native side of a cache over this page table."""
    from mtserve_plugin import _core

    return _core.Engine.create(
        index_config(config),
        num_layers=config.num_layers,
        k_row_bytes=config.k_row * config.element_size,
        v_row_bytes=config.v_row * config.element_size,
        table=table.data_ptr(),
        table_pages=table.shape[1],
        staged_onload=config.onload_strategy == "staged",
        staged_offload=config.offload_strategy == "staged",
        busy_wait_ms=config.busy_wait_ms,
        read_region=config.read_onload_region,
        cuda_library=cuda_library,
        device=table.device.index or 0,
        kernel_onloads=config.onload_strategy == "kernel",
    )


def index_config(config: CacheConfig) -> Any:
    """The part of a configuration that the control plane knows."""
    from mtserve_plugin import _core

    index = _core.IndexConfig()
    index.page_size = config.page_size
    index.num_pages = config.num_pages
    index.chunk_tokens = config.chunk_size
    index.slot_tokens = config.slot_tokens
    index.num_chunks = config.num_chunks
    index.offload_quota_tokens = config.offload_quota_tokens
    index.tail_write_back = config.tail_write_back
    index.max_open_batches = config.max_open_batches
    return index


def cuda_library(device: torch.device) -> tuple[str, torch.device]:
    """Path of the library that serves the device, empty for the CPU, and the device with its number.

    Raises:
        ConfigError: this build does not serve the device, or there is none.
    """
    if device.type == "cpu":
        return "", device
    spec = importlib.util.find_spec("mtserve_plugin._cuda_api")
    if device.type != "cuda" or spec is None or spec.origin is None:
        raise ConfigError(
            f"device={str(device)!r} is not served by this build; use device='cpu', or build the CUDA part: "
            "pip install . -C cmake.define.MTSERVE_CUDA=ON"
        )
    if not torch.cuda.is_available():
        raise ConfigError(f"device={str(device)!r}: torch finds no CUDA device; mtserve doctor says why")
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return spec.origin, device
