"""append_pages, gather_pages and scatter_pages: what they write, and above all what they leave alone."""

import pytest
import torch

from mtserve_plugin import ops

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# heads, qk_dim, v_dim, page_size
SHAPES = [(2, 8, 8, 8), (1, 7, 20, 5), (3, 5, 1, 1), (4, 128, 64, 32)]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(21)


def random_table(layers, pages, shape, dtype):
    heads, qk_dim, v_dim, page_size = shape
    return torch.randn(layers, pages, page_size * heads * (qk_dim + v_dim)).to(dtype)


def token_rows(page, k_row, page_size):
    """A page's tokens, [page_size, k_row + v_row]."""
    split = page_size * k_row
    return torch.cat([page[:split].view(page_size, -1), page[split:].view(page_size, -1)], 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("in_order", [False, True])
def test_append(dtype, shape, strided, in_order):
    heads, qk_dim, v_dim, page_size = shape
    pages, tokens = 9, 40
    table = random_table(3, pages, shape, dtype)
    before = table.clone()
    # In order, rows run from one page into the next, with gaps.
    slots = 3 + torch.arange(tokens) if in_order else torch.randperm(max(pages * page_size, tokens))[:tokens]
    slots[(slots >= pages * page_size) | (torch.rand(tokens) < (0.1 if in_order else 0.3))] = -1
    if strided:
        wide = torch.randn(tokens, heads * (qk_dim + v_dim) + 3).to(dtype)
        k = wide[:, : heads * qk_dim].unflatten(1, (heads, qk_dim))
        v = wide[:, heads * qk_dim + 3 :].unflatten(1, (heads, v_dim))
    else:
        k = torch.randn(tokens, heads, qk_dim).to(dtype)
        v = torch.randn(tokens, heads, v_dim).to(dtype)
    ops.append_pages(table, 1, k, v, slots, page_size)
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page = before[1, slot // page_size]
            split, row = page_size * heads * qk_dim, slot % page_size
            page[:split].view(page_size, heads, qk_dim)[row] = k[t]
            page[split:].view(page_size, heads, v_dim)[row] = v[t]
    assert torch.equal(table, before)


def test_append_takes_rows_of_any_layout():
    k, v = torch.randn(6, 2, 3), torch.randn(6, 2, 5)
    slots = torch.tensor([3, -1, 0, 7, 5, -1])
    expected = torch.zeros(1, 2, 4 * 16)
    ops.append_pages(expected, 0, k, v, slots, 4)
    table = torch.zeros(1, 2, 4 * 16)
    apart = [x.permute(2, 1, 0).contiguous().permute(2, 1, 0) for x in (k, v)]
    ops.append_pages(table, 0, *apart, torch.stack([slots, slots], 1)[:, 0], 4)
    assert expected.count_nonzero() == 4 * 16
    assert torch.equal(table, expected)


def test_append_of_nothing():
    table = torch.randn(1, 2, 64)
    before = table.clone()
    none = torch.empty(0, 2, 4)
    ops.append_pages(table, 0, none, none, torch.empty(0, dtype=torch.int64), 4)
    ops.append_pages(table, 0, torch.ones(1, 2, 4), torch.ones(1, 2, 4), torch.tensor([-1]), 4)
    assert torch.equal(table, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gather_and_scatter_copy_valid_rows_only(dtype, shape):
    heads, qk_dim, _, page_size = shape
    k_row = heads * qk_dim
    layers, pages = 3, 12
    table = random_table(layers, pages, shape, dtype)
    ids = torch.randperm(pages)[:7].to(torch.int32)
    ids[[2, 5]] = -1
    rows = torch.tensor([0, 1, page_size, page_size - 1, page_size, 1, page_size // 2], dtype=torch.int32)
    dense = random_table(layers, 7, shape, dtype)

    out, target = dense.clone(), table.clone()
    ops.gather_pages(table, out, ids, rows, k_row, page_size)
    ops.scatter_pages(target, dense, ids, rows, k_row, page_size)
    expected_out, expected_target = dense.clone(), table.clone()
    for layer in range(layers):
        for i, (page, count) in enumerate(zip(ids.tolist(), rows.tolist(), strict=True)):
            if page < 0:
                continue
            for part in (slice(0, page_size * k_row), slice(page_size * k_row, None)):
                outer = expected_out[layer, i, part].view(page_size, -1)
                outer[:count] = table[layer, page, part].view(page_size, -1)[:count]
                inner = expected_target[layer, page, part].view(page_size, -1)
                inner[:count] = dense[layer, i, part].view(page_size, -1)[:count]
    assert torch.equal(out, expected_out)
    assert torch.equal(target, expected_target)
    assert not torch.equal(out, dense)


def test_gather_and_scatter_with_strides():
    page_size, k_row, v_row = 4, 6, 10
    elements = page_size * (k_row + v_row)
    table = torch.randn(5, 2, elements + 2)[:, :, 1:-1].transpose(0, 1)  # layers and pages swapped, pages apart
    out = torch.zeros(3, 2, elements + 1)[:, :, 1:].transpose(0, 1)
    ids, rows = torch.tensor([4, 0, 3], dtype=torch.int32), torch.tensor([4, 2, 3], dtype=torch.int32)
    ops.gather_pages(table, out, ids, rows, k_row, page_size)
    expected = torch.zeros(2, 3, elements)
    ops.gather_pages(table.contiguous(), expected, ids, rows, k_row, page_size)
    assert torch.equal(out, expected)
    back = table.clone()
    target = torch.zeros(5, 2, elements + 2)[:, :, 1:-1].transpose(0, 1)
    ops.scatter_pages(target, out, ids, rows, k_row, page_size)
    for layer in range(2):
        for page, count in zip(ids.tolist(), rows.tolist(), strict=True):
            mine = token_rows(target[layer, page], k_row, page_size)
            assert torch.equal(mine[:count], token_rows(back[layer, page], k_row, page_size)[:count])
            assert mine[count:].count_nonzero() == 0
    assert target[:, [1, 2]].count_nonzero() == 0


def test_empty_transfers():
    table = torch.randn(2, 3, 64)
    before = table.clone()
    none = torch.empty(0, dtype=torch.int32)
    ops.gather_pages(table, torch.empty(2, 0, 64), none, none, 8, 4)
    ops.scatter_pages(table, torch.empty(2, 0, 64), none, none, 8, 4)
    ops.scatter_pages(table, torch.zeros(2, 1, 64), torch.tensor([1]).int(), torch.tensor([0]).int(), 8, 4)
    assert torch.equal(table, before)


@pytest.mark.parametrize("offset", [0, 1])
def test_large_transfers(offset):
    """Big enough for stores that pass the caches by, whose addresses may or may not be aligned for them."""
    page_size, row = 32, 260
    elements = 2 * page_size * row
    count = (33 << 20) // (4 * elements)
    storage = torch.full((offset + count * elements,), float("nan"))
    out = storage[offset:].view(1, count, elements)
    table = torch.randn(1, count, elements)
    ids = torch.randperm(count).to(torch.int32)
    rows = torch.full((count,), page_size, dtype=torch.int32)
    rows[::3] = 17
    ops.gather_pages(table, out, ids, rows, row, page_size)
    valid = (torch.arange(page_size)[None, :] < rows[:, None])[:, None, :, None]
    parts = table[0, ids.long()].view(count, 2, page_size, row)
    got = out.view(count, 2, page_size, row)
    assert torch.equal(got.nan_to_num(0.0), torch.where(valid, parts, torch.zeros(())))
    assert got.isnan().eq(~valid).all()
    back = torch.full_like(table, float("nan"))
    ops.scatter_pages(back, out, ids, rows, row, page_size)
    assert torch.equal(back[0, ids.long()].nan_to_num(0.0), out[0].nan_to_num(0.0))


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("strided", [False, True])
def test_large_appends(offset, strided):
    """As large transfers."""
    page_size, row = 32, 130
    elements = 2 * page_size * row
    pages = (10 << 20) // (4 * elements)
    storage = torch.full((offset + pages * elements,), float("nan"))
    table = storage[offset:].view(1, pages, elements)
    k, v = torch.randn(pages * page_size, 2 * row).split(row, dim=1)
    if not strided:
        k, v = k.contiguous(), v.contiguous()
    ids = torch.randperm(pages)
    slots = (ids[:, None] * page_size + torch.arange(page_size)).flatten()
    slots[::100] = -1
    ops.append_pages(table, 0, k.unflatten(1, (2, 65)), v.unflatten(1, (2, 65)), slots, page_size)
    got = table[0, ids].view(pages, 2, page_size, row).transpose(0, 1).reshape(2, -1, row)
    kept = slots >= 0
    assert torch.equal(got[:, kept], torch.stack([k, v])[:, kept])
    assert got[:, ~kept].isnan().all()
