"""What the operators are defined to do, written plainly in float64, and random batches to try them on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mtserve_plugin import ops


@dataclass(frozen=True)
class Batch:
    """A jagged batch: every row's whole history and candidates, and how much of the history lies in pages."""

    q: list[torch.Tensor]  # per row [history + candidates, heads, qk_dim]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    paged: list[int]
    candidates: list[int]
    page_size: int
    scale: float
    norm_len: float
    window: int
    layer: int
    table: torch.Tensor  # [layers, pages, page_elements]
    page_ids: list[list[int]]

    def dense(self, rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([x[paged:] for x, paged in zip(rows, self.paged, strict=True)])

    @property
    def offsets(self) -> torch.Tensor:
        lengths = [len(x) - paged for x, paged in zip(self.q, self.paged, strict=True)]
        return torch.tensor([0, *lengths]).cumsum(0)

    def arguments(self) -> dict[str, object]:
        """The operator's arguments, in order."""
        page_counts = torch.tensor([0, *(len(ids) for ids in self.page_ids)])
        return {
            "q": self.dense(self.q),
            "k": self.dense(self.k),
            "v": self.dense(self.v),
            "table": self.table,
            "layer": self.layer,
            "offsets": self.offsets,
            "num_candidates": torch.tensor(self.candidates, dtype=torch.int64),
            "paged_lens": torch.tensor(self.paged, dtype=torch.int64),
            "page_indices": torch.tensor([i for ids in self.page_ids for i in ids], dtype=torch.int32),
            "page_indptr": page_counts.cumsum(0).to(torch.int32),
            "page_size": self.page_size,
            "scale": self.scale,
            "norm_len": self.norm_len,
            "max_attn_len": self.window,
        }

    def attend(self) -> torch.Tensor:
        return ops.paged_hstu_attention(*self.arguments().values())

    def expected(self) -> torch.Tensor:
        """float64 [T, heads, v_dim]."""
        rows = [
            row_attention(q, k, v, c, paged, self.scale, self.norm_len, self.window)
            for q, k, v, c, paged in zip(self.q, self.k, self.v, self.candidates, self.paged, strict=True)
        ]
        return torch.cat(rows)

    def magnitudes(self) -> torch.Tensor:
        """float64 [T, heads, v_dim]: sums of the magnitudes of what attention adds up."""
        rows = [
            row_attention(q, k, v.abs(), c, paged, self.scale, self.norm_len, self.window, magnitude=True)
            for q, k, v, c, paged in zip(self.q, self.k, self.v, self.candidates, self.paged, strict=True)
        ]
        return torch.cat(rows)

    def split(self, paged: list[int]) -> Batch:
        """The same tokens, with another part of each history in pages."""
        return with_pages(replace(self, paged=paged))


def row_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    candidates: int,
    first: int,
    scale: float,
    norm_len: float,
    window: int,
    magnitude: bool = False,
) -> torch.Tensor:
    """The queries of one row from `first` on, history and candidates, in float64; `magnitude`: of scores."""
    history = len(q) - candidates
    key = torch.arange(len(q))[None, :]
    query = torch.arange(first, len(q))[:, None]
    distance = query.clamp(max=history) - key
    seen = (key < history) & (distance >= 0)
    if window > 0:
        seen &= distance <= window
    seen |= query == key
    q, k, v = q[first:].double(), k.double(), v.double()
    scores = torch.nn.functional.silu(scale * torch.einsum("ihd,jhd->hij", q, k)) / norm_len
    scores = scores.masked_fill(~seen, 0.0)
    return torch.einsum("hij,jhd->ihd", scores.abs() if magnitude else scores, v)


def with_pages(batch: Batch) -> Batch:
    """The batch with a new table that holds what `paged` says, and NaN wherever nothing may be read."""
    layers, size = batch.table.shape[0], batch.page_size
    needed = [-(-paged // size) for paged in batch.paged]
    pages = sum(needed) + 3
    order = torch.randperm(pages).tolist()
    table = torch.full((layers, pages, batch.table.shape[2]), float("nan"), dtype=batch.table.dtype)
    page_ids = []
    for k, v, paged, count in zip(batch.k, batch.v, batch.paged, needed, strict=True):
        ids = [order.pop() for _ in range(count)]
        page_ids.append(ids)
        k_row = k.shape[1] * k.shape[2]
        for x, columns in ((k, slice(0, size * k_row)), (v, slice(size * k_row, None))):
            rows = x.new_full((count * size, *x.shape[1:]), float("nan"))
            rows[:paged] = x[:paged]
            table[batch.layer, ids, columns] = rows.view(count, size * x.shape[1] * x.shape[2])
    return replace(batch, table=table, page_ids=page_ids)


def random_batch(
    histories: list[int],
    candidates: list[int],
    paged: list[int],
    *,
    heads: int = 2,
    qk_dim: int = 16,
    v_dim: int = 16,
    page_size: int = 8,
    window: int = 0,
    dtype: torch.dtype = torch.float32,
    scale: float | None = None,
    norm_len: float = 50.0,
) -> Batch:
    """One row per entry of the lists; `paged` counts the history tokens that lie in pages."""
    lengths = [h + c for h, c in zip(histories, candidates, strict=True)]
    return with_pages(
        Batch(
            q=[torch.randn(n, heads, qk_dim).to(dtype) for n in lengths],
            k=[torch.randn(n, heads, qk_dim).to(dtype) for n in lengths],
            v=[torch.randn(n, heads, v_dim).to(dtype) for n in lengths],
            paged=paged,
            candidates=candidates,
            page_size=page_size,
            scale=2.0 * qk_dim**-0.5 if scale is None else scale,
            norm_len=norm_len,
            window=window,
            layer=1,
            table=torch.empty(3, 0, page_size * heads * (qk_dim + v_dim), dtype=dtype),
            page_ids=[],
        )
    )


def jagged_batch(page_size: int = 8, **options: object) -> Batch:
    """Rows at all the boundaries: paged 0, 1, a page and its neighbours, pages; no delta or candidates."""
    s = page_size
    paged = [0, 0, 1, s - 1, s, s + 1, 3 * s + 2, 150, 2 * s]
    delta = [0, 9, 3, 1, 2, 0, 0, 40, 0]
    cands = [0, 4, 0, 2, 1, 7, 30, 21, 0]
    histories = [p + d for p, d in zip(paged, delta, strict=True)]
    return random_batch(histories, cands, paged, page_size=page_size, **options)  # type: ignore[arg-type]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """max|a - b| / max|b|."""
    if expected.numel() == 0:
        return 0.0
    return float((actual.double() - expected).abs().max() / expected.abs().max())
