"""CacheConfig: the geometry, sizes and policies of a cache, checked when it is built."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from mtserve_plugin.errors import ConfigError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

STRATEGIES = ("direct", "staged")
ONLOAD_STRATEGIES = (*STRATEGIES, "kernel")

# The host arena's allocation unit at the paper's chunk size: small enough that a user of 40 tokens wastes little.
_SLOT_TOKENS = 128
_SLOTS_PER_CHUNK = 8


@dataclass(frozen=True)
class CacheConfig:
    """Everything a cache needs to know, frozen.

    Args:
        num_layers: attention layers of the model.
        num_heads: attention heads per layer.
        qk_dim: dimension of a query or key head.
        v_dim: dimension of a value head; may differ from `qk_dim`.
        attn_norm_len: the constant by which attention divides. A divisor that depends on the batch (upstream's
            default) would make a user's keys and values depend on who else was in the batch.
        dtype: "float32", "float16" or "bfloat16", of the model's keys and values.
        attn_scale: factor on q·k; `None` means `qk_dim ** -0.5`.
        max_attn_len: attention window in tokens: a query sees keys at a distance of at most this; 0 means all.
        page_size: tokens per device page (paper 4.1).
        num_pages: device pages for users (paper: N_p).
        onload_pages: pages at the end of the table where onloads may land (paper: N_o).
        chunk_size: tokens per host chunk; a multiple of `page_size`.
        host_bytes: total size of the host tier in bytes; 0 keeps the cache on the device alone.
        offload_quota_tokens: bound on tokens queued for offload (paper 4.2, offload capacity control).
        tail_write_back: write users near the cold end to the host before eviction reaches them, so that no tail is
            lost; `False` is the paper's policy (full chunks only).
        onload_strategy: "direct" (host blocks straight into pages) or "staged" (through staging buffers and the onload
            region, then scattered; paper 4.2). Staged needs `onload_pages`. "kernel" is direct by a kernel that reads
            pinned host memory instead of a copy engine; on a CPU the same as direct.
        read_onload_region: batches read what they bring where it lands in the onload region, before it is scattered
            (paper 4.1), and rows for which there are no pages are read from there alone. Needs staged onloads.
        offload_strategy: "direct" or "staged" (gathered into a transient buffer first; paper 4.2).
        busy_wait_ms: how long `begin` may wait for pages that are busy; 0 means that a row without pages is computed
            without being cached.
        max_open_batches: batches that may be open at once; one more is served uncached, with a warning.

    Raises:
        ConfigError: an option is out of range or contradicts another; the message names it and the fix.
    """

    num_layers: int
    num_heads: int
    qk_dim: int
    v_dim: int
    attn_norm_len: int
    dtype: str = "bfloat16"
    attn_scale: float | None = None
    max_attn_len: int = 0
    page_size: int = 32
    num_pages: int = 40_960
    onload_pages: int = 0
    chunk_size: int = 1024
    host_bytes: int = 0
    offload_quota_tokens: int = 65_536
    tail_write_back: bool = True
    onload_strategy: str = "direct"
    read_onload_region: bool = False
    offload_strategy: str = "direct"
    busy_wait_ms: int = 0
    max_open_batches: int = 64

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            _check_int(name, getattr(self, name), least)
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r} is not supported; use one of {', '.join(DTYPES)}")
        if self.attn_scale is not None and not _is_positive(self.attn_scale):
            raise ConfigError(f"attn_scale={self.attn_scale!r} must be a positive number, or None for qk_dim ** -0.5")
        for name in ("tail_write_back", "read_onload_region"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be True or False")
        for name, known in (("onload_strategy", ONLOAD_STRATEGIES), ("offload_strategy", STRATEGIES)):
            if not isinstance(getattr(self, name), str) or getattr(self, name) not in known:
                raise ConfigError(f"{name}={getattr(self, name)!r} is unknown; use one of {', '.join(known)}")
        if self.onload_strategy == "staged" and self.host_bytes and not self.onload_pages:
            raise ConfigError("onload_strategy='staged' needs an onload region; set onload_pages or use 'direct'")
        if self.read_onload_region and self.onload_strategy != "staged":
            raise ConfigError(
                "read_onload_region=True reads what is staged; set onload_strategy='staged' or leave it out"
            )
        if self.page_size * self.element_size % 16:
            raise ConfigError(
                f"page_size={self.page_size} x {self.element_size} bytes ({self.dtype}) is not a multiple of 16 bytes; "
                f"use a page_size that is a multiple of {16 // self.element_size}"
            )
        if self.chunk_size % self.page_size:
            raise ConfigError(
                f"page_size={self.page_size} does not divide chunk_size={self.chunk_size}; "
                f"use a chunk_size that is a multiple of {self.page_size}"
            )
        if self.num_pages + self.onload_pages > 2**31 - 1:
            raise ConfigError(
                f"num_pages={self.num_pages} + onload_pages={self.onload_pages} exceed 2**31 - 1 page ids"
            )
        if 0 < self.host_bytes < self.chunk_bytes:
            raise ConfigError(
                f"host_bytes={self.host_bytes} holds not even one chunk ({self.chunk_bytes} bytes); "
                f"use 0 (device only) or at least {self.chunk_bytes}"
            )
        if self.host_bytes and self.offload_quota_tokens < self.chunk_size:
            raise ConfigError(
                f"offload_quota_tokens={self.offload_quota_tokens} admits not even one chunk "
                f"(chunk_size={self.chunk_size}); nothing would ever reach the host tier"
            )
        if self.num_chunks * (self.chunk_size // self.slot_tokens) > 2**31 - 1:
            raise ConfigError(f"host_bytes={self.host_bytes} needs more than 2**31 - 1 slots; use a larger chunk_size")

    @classmethod
    def from_dict(cls, options: dict[str, Any]) -> CacheConfig:
        """A configuration from a mapping, e.g. parsed JSON.

        Raises:
            ConfigError: an option is unknown or missing, besides what the constructor checks.
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ConfigError(f"unknown option {unknown[0]!r}; known options: {', '.join(known)}")
        missing = [n for n, f in known.items() if f.default is dataclasses.MISSING and n not in options]
        if missing:
            raise ConfigError(f"option {missing[0]!r} is missing; it has no default")
        return cls(**options)

    @classmethod
    def for_model(cls, model: Any, **sizes: Any) -> CacheConfig:
        """The configuration that fits a model which `attach` knows.

        Args:
            model: an `nn.Module`; layers, heads, dimensions, dtype, scale and window are read from it.
            sizes: the other options. `attn_norm_len` is one of them, unless the model's layers pin their divisor:
                it is the constant the model was trained with, or else a typical length of its training batches.

        Raises:
            AttachError: the model is not known.
            ConfigError: as the constructor.
        """
        from mtserve_plugin.integrations import integration_of

        return cls.from_dict(integration_of(model).geometry(model) | sizes)

    def replace(self, **changes: Any) -> CacheConfig:
        """A copy with some options changed, checked like a new one."""
        return CacheConfig.from_dict(dataclasses.asdict(self) | changes)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def element_size(self) -> int:
        """Bytes per element."""
        return 4 if self.dtype == "float32" else 2

    @property
    def scale(self) -> float:
        """The factor on q·k that is in force."""
        return self.qk_dim**-0.5 if self.attn_scale is None else float(self.attn_scale)

    @property
    def k_row(self) -> int:
        """Elements of one token's keys in one layer."""
        return self.num_heads * self.qk_dim

    @property
    def v_row(self) -> int:
        """Elements of one token's values in one layer."""
        return self.num_heads * self.v_dim

    @property
    def page_elements(self) -> int:
        """Elements of one page in one layer: its K block, then its V block."""
        return self.page_size * (self.k_row + self.v_row)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers (16 KiB at the paper's size)."""
        return self.num_layers * (self.k_row + self.v_row) * self.element_size

    @property
    def table_shape(self) -> tuple[int, int, int]:
        """Shape of the device table: layers, pages, elements of a page."""
        return (self.num_layers, self.num_pages + self.onload_pages, self.page_elements)

    @property
    def table_bytes(self) -> int:
        """Bytes of the device table."""
        layers, pages, elements = self.table_shape
        return layers * pages * elements * self.element_size

    @property
    def slot_tokens(self) -> int:
        """Tokens of a host slot: the chunk halved until a slot is near 128 tokens, never below a page."""
        floor = max(self.page_size, min(_SLOT_TOKENS, self.chunk_size // _SLOTS_PER_CHUNK))
        slot = self.chunk_size
        while slot % 2 == 0 and slot // 2 >= floor and (slot // 2) % self.page_size == 0:
            slot //= 2
        return slot

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a full chunk over all layers."""
        return self.chunk_size * self.token_bytes

    @property
    def num_chunks(self) -> int:
        """Full chunks that the host tier holds."""
        return self.host_bytes // self.chunk_bytes


_LEAST = {
    "num_layers": 1,
    "num_heads": 1,
    "qk_dim": 1,
    "v_dim": 1,
    "attn_norm_len": 1,
    "max_attn_len": 0,
    "page_size": 1,
    "num_pages": 1,
    "onload_pages": 0,
    "chunk_size": 1,
    "host_bytes": 0,
    "offload_quota_tokens": 0,
    "busy_wait_ms": 0,
    "max_open_batches": 1,
}


def _check_int(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}={value!r} must be an integer")
    if value < least:
        raise ConfigError(f"{name}={value} must be at least {least}")


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
