"""Device memory by arithmetic: pages, onload region, workbench (paper, appendix C). Imports neither torch nor numpy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mtserve_plugin.errors import ConfigError
from mtserve_plugin.replay.options import ModelShape

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

# u, q, k and v of one layer.
_PROJECTIONS = 4
# Attention's output and the layer's.
_OUTPUTS = 2


@dataclass(frozen=True)
class Geometry:
    """Bytes that follow from a model's shape; heads have one dimension for queries, keys and values.

    Args:
        shape: layers, heads, dimension, dtype.
        page_size: tokens per page.
    """

    shape: ModelShape
    page_size: int = 32

    @property
    def width(self) -> int:
        """Elements of one token's keys in one layer."""
        return self.shape.heads * self.shape.dim

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token, all layers."""
        return 2 * self.shape.layers * self.width * ELEMENT_BYTES[self.shape.dtype]

    @property
    def page_bytes(self) -> int:
        """One page of all layers."""
        return self.page_size * self.token_bytes

    def workbench_bytes(self, tokens: int, layers: int = 1) -> int:
        """Intermediate results of `tokens` rows: projections and outputs (appendix C.2).

        Args:
            tokens: rows that are computed at once.
            layers: that keep buffers of their own. One reuses them for all; the paper gives each layer its own.
        """
        row = (_PROJECTIONS + _OUTPUTS) * self.width * ELEMENT_BYTES[self.shape.dtype]
        return layers * tokens * row


@dataclass(frozen=True)
class DeviceMemory:
    """How device memory is divided.

    Attributes:
        pages: of users.
        onload_pages: of the onload region.
        pages_bytes, onload_bytes, workbench_bytes: their sizes.
    """

    pages: int
    onload_pages: int
    pages_bytes: int
    onload_bytes: int
    workbench_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.pages_bytes + self.onload_bytes + self.workbench_bytes


def onload_pages(batch_size: int, longest: int, page_size: int) -> int:
    """Pages for a batch of the longest histories, all of them coming from the host (appendix C.1)."""
    return math.ceil(batch_size * longest / page_size)


def divide(
    geometry: Geometry, device_bytes: int, batch_size: int, longest: int, *, staged: bool = False
) -> DeviceMemory:
    """Gives to pages what the workbench of a batch without any hit, and the onload region, leave.

    Args:
        geometry: of the model.
        device_bytes: for the cache and the workbench; the model's weights are not part of it.
        batch_size: requests per batch.
        longest: longest history, in tokens.
        staged: whether onloads go through the onload region.

    Raises:
        ConfigError: nothing is left for a batch's pages.
    """
    workbench = geometry.workbench_bytes(batch_size * longest)
    region = onload_pages(batch_size, longest, geometry.page_size) if staged else 0
    left = device_bytes - workbench - region * geometry.page_bytes
    pages = max(left, 0) // geometry.page_bytes
    least = math.ceil(longest / geometry.page_size)
    if pages < least:
        need = (least + region) * geometry.page_bytes + workbench
        raise ConfigError(
            f"--device-memory {device_bytes} leaves {pages} pages beside a workbench of {workbench} bytes, and one "
            f"history of {longest} tokens needs {least}; give {need} or more, a smaller --batch-size or --max-history"
        )
    return DeviceMemory(
        pages=pages,
        onload_pages=region,
        pages_bytes=pages * geometry.page_bytes,
        onload_bytes=region * geometry.page_bytes,
        workbench_bytes=workbench,
    )
