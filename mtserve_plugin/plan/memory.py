"""Device memory by arithmetic: pages, onload region, workbench (paper, appendix C). Imports neither torch nor numpy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mtserve_plugin.errors import ConfigError
from mtserve_plugin.replay.options import ModelShape

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

# Of the paper's workbench, rows as wide as a token's keys: u, q, k, v, attention's output and the layer's.
_PAPERS_ROWS = 4 + 2
# What a forward of `HSTURanker` has beside its workbench when most is alive, in rows as wide: that is while tokens are
# embedded. In the layers it has three: their input, attention's output and the norm of that.
_TRANSIENT_ROWS = 6


def projection_row(num_heads: int, qk_dim: int, v_dim: int) -> int:
    """Elements of u, q, k and v of one token in one layer: a row of `mtserve_plugin.models.workbench.Workbench`."""
    return 2 * num_heads * (qk_dim + v_dim)


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
        return 2 * self.shape.layers * self.width * self.element_bytes

    @property
    def page_bytes(self) -> int:
        """One page of all layers."""
        return self.page_size * self.token_bytes

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.shape.dtype]

    def workbench_bytes(self, tokens: int) -> int:
        """A `Workbench` of `tokens` rows: projections of one layer, which all layers use in turn."""
        return tokens * projection_row(self.shape.heads, self.shape.dim, self.shape.dim) * self.element_bytes

    def transient_bytes(self, tokens: int) -> int:
        """What a forward of `HSTURanker` allocates and frees beside its workbench, at most at once.

        Index vectors and statistics of norms are not counted; they are a few numbers per row.
        """
        return tokens * _TRANSIENT_ROWS * self.width * self.element_bytes

    def paper_workbench_bytes(self, tokens: int, layers: int = 1) -> int:
        """The paper's preallocated projections and outputs of `tokens` rows (appendix C.2).

        Args:
            tokens: rows that are computed at once.
            layers: that have buffers of their own; in the paper all of them.
        """
        return layers * tokens * _PAPERS_ROWS * self.width * self.element_bytes


@dataclass(frozen=True)
class DeviceMemory:
    """How device memory is divided.

    Attributes:
        pages: of users.
        onload_pages: of the onload region.
        workbench_tokens: of the workbench: rows of a batch without any hit, candidates not counted.
        pages_bytes, onload_bytes, workbench_bytes: their sizes.
        transient_bytes: what a forward allocates for such a batch beside the workbench.
    """

    pages: int
    onload_pages: int
    workbench_tokens: int
    pages_bytes: int
    onload_bytes: int
    workbench_bytes: int
    transient_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.pages_bytes + self.onload_bytes + self.workbench_bytes + self.transient_bytes


def onload_pages(batch_size: int, longest: int, page_size: int) -> int:
    """Pages for a batch of the longest histories, all of them coming from the host (appendix C.1)."""
    return math.ceil(batch_size * longest / page_size)


def divide(
    geometry: Geometry, device_bytes: int, batch_size: int, longest: int, *, staged: bool = False
) -> DeviceMemory:
    """Gives to pages what a batch without any hit and the onload region leave.

    Args:
        geometry: of the model.
        device_bytes: for the cache and what forwards need; the model's weights are not part of it.
        batch_size: requests per batch.
        longest: longest history, in tokens.
        staged: whether onloads go through the onload region.

    Raises:
        ConfigError: nothing is left for a batch's pages.
    """
    tokens = batch_size * longest
    workbench, transient = geometry.workbench_bytes(tokens), geometry.transient_bytes(tokens)
    region = onload_pages(batch_size, longest, geometry.page_size) if staged else 0
    left = device_bytes - workbench - transient - region * geometry.page_bytes
    pages = max(left, 0) // geometry.page_bytes
    least = math.ceil(longest / geometry.page_size)
    if pages < least:
        need = (least + region) * geometry.page_bytes + workbench + transient
        raise ConfigError(
            f"--device-memory {device_bytes} leaves {pages} pages beside {workbench + transient} bytes for the forward "
            f"of a batch, and one history of {longest} tokens needs {least}; give {need} or more, a smaller "
            "--batch-size or --max-history"
        )
    return DeviceMemory(
        pages=pages,
        onload_pages=region,
        workbench_tokens=tokens,
        pages_bytes=pages * geometry.page_bytes,
        onload_bytes=region * geometry.page_bytes,
        workbench_bytes=workbench,
        transient_bytes=transient,
    )
