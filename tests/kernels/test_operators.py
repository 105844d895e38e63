"""Registration, argument checks, 64-bit addresses and the way in when the native library is missing."""

import importlib.util
import mmap
import sys
import threading
import time

import pytest
import torch
from torch.library import opcheck

from mtserve_plugin import ops
from mtserve_plugin.errors import MissingDependencyError
from tests.kernels.reference import jagged_batch, random_batch, relative_error

PAGE_SIZE, HEADS, QK_DIM, V_DIM = 4, 2, 3, 5
K_ROW, V_ROW = HEADS * QK_DIM, HEADS * V_DIM
ELEMENTS = PAGE_SIZE * (K_ROW + V_ROW)


def append_arguments():
    return {
        "table": torch.zeros(2, 3, ELEMENTS),
        "layer": 1,
        "k": torch.randn(5, HEADS, QK_DIM),
        "v": torch.randn(5, HEADS, V_DIM),
        "slots": torch.tensor([0, -1, 11, 7, 3]),
        "page_size": PAGE_SIZE,
    }


def transfer_arguments(dense):
    return {
        "table": torch.zeros(2, 3, ELEMENTS),
        dense: torch.randn(2, 2, ELEMENTS),
        "page_ids": torch.tensor([2, -1], dtype=torch.int32),
        "num_rows": torch.tensor([4, 1], dtype=torch.int32),
        "k_row": K_ROW,
        "page_size": PAGE_SIZE,
    }


def attention_arguments():
    torch.manual_seed(22)
    return random_batch([9, 2], [2, 1], [6, 0], heads=HEADS, qk_dim=QK_DIM, v_dim=V_DIM, page_size=4).arguments()


ARGUMENTS = {
    "append_pages": append_arguments,
    "gather_pages": lambda: transfer_arguments("out"),
    "scatter_pages": lambda: transfer_arguments("source"),
    "paged_hstu_attention": attention_arguments,
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_opcheck(name):
    operator = getattr(torch.ops.mtserve, name).default
    results = opcheck(operator, tuple(ARGUMENTS[name]().values()))
    assert set(results.values()) == {"SUCCESS"}
    # The wrappers take the schema's arguments in the schema's order.
    assert [a.name for a in operator._schema.arguments] == list(ARGUMENTS[name]())


def test_fake_attention_has_the_shape_and_dtype_of_the_real_one():
    batch = jagged_batch(heads=3, qk_dim=8, v_dim=6, dtype=torch.bfloat16)
    meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in batch.arguments().values()]
    out, real = ops.paged_hstu_attention(*meta), batch.attend()
    assert (out.shape, out.dtype, out.stride()) == (real.shape, real.dtype, real.stride())


def test_is_not_available_for_a_missing_library(monkeypatch):
    assert ops.is_available()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    problem = ops._load()
    assert problem is not None
    assert "pip install" in problem
    monkeypatch.setattr(ops, "_problem", problem)
    assert not ops.is_available()
    with pytest.raises(MissingDependencyError, match=r"append_pages: .*_ops is missing"):
        ops._operator("append_pages")(1, 2)
    monkeypatch.setattr(ops, "_problem", None)
    with pytest.raises(MissingDependencyError, match="older"):
        ops._operator("not_yet_written")()


def test_a_library_that_cannot_be_loaded_is_reported(monkeypatch, tmp_path):
    broken = tmp_path / "_ops.so"
    broken.write_bytes(b"no library")
    spec = importlib.util.spec_from_file_location("mtserve_plugin._ops", broken)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert "cannot be loaded into torch" in (ops._load() or "")


# ---- arguments ---------------------------------------------------------------------------------------------

F64, I32, I64 = torch.float64, torch.int32, torch.int64
BAD = [
    ("append_pages", "table", torch.zeros(3, ELEMENTS), "table has shape"),
    ("append_pages", "table", torch.zeros(2, 3, 2 * ELEMENTS)[:, :, ::2], "contiguous in its last dimension"),
    ("append_pages", "table", torch.zeros(2, 3, ELEMENTS + 1), "table has pages of 65 elements"),
    ("append_pages", "layer", 2, "layer is 2; the table has 2 layers"),
    ("append_pages", "layer", -1, "layer is -1"),
    ("append_pages", "k", torch.zeros(5, K_ROW), "k has shape"),
    ("append_pages", "k", torch.zeros(5, HEADS, QK_DIM, dtype=F64), "k is Double; expected Float"),
    ("append_pages", "v", torch.zeros(4, HEADS, V_DIM), "v has 4 token rows"),
    ("append_pages", "v", torch.zeros(5, HEADS, V_DIM).half(), "v is Half; expected Float"),
    ("append_pages", "slots", torch.zeros(5, dtype=I32), "slots is Int; expected Long"),
    ("append_pages", "slots", torch.zeros(4, dtype=I64), "slots has 4 entries"),
    ("append_pages", "slots", torch.tensor([0, 1, 12, 2, 3]), r"slots\[2\] is 12; the table has 12 slots"),
    ("append_pages", "slots", torch.tensor([0, 1, 2, -2, 3]), r"slots\[3\] is -2"),
    ("append_pages", "page_size", 0, "page_size is 0"),
    ("append_pages", "page_size", 2**60, "page_size is 1152921504606846976; expected 1 to 64"),
    (
        "gather_pages",
        "out",
        torch.zeros(2, 1, ELEMENTS),
        r"out has shape \[2, 1, 64\]; expected \[2, 2, 64\]",
    ),
    ("gather_pages", "out", torch.zeros(2, 2, ELEMENTS).half(), "out is Half"),
    ("gather_pages", "page_ids", torch.tensor([0, 3]).int(), r"page_ids\[1\] is 3; the table has 3 pages"),
    ("gather_pages", "page_ids", torch.tensor([0, 3]), "page_ids is Long; expected Int"),
    ("gather_pages", "num_rows", torch.tensor([0, 5]).int(), r"num_rows\[1\] is 5"),
    ("gather_pages", "num_rows", torch.tensor([-1, 0]).int(), r"num_rows\[0\] is -1"),
    ("gather_pages", "k_row", 17, "k_row is 17"),
    ("gather_pages", "page_size", 3, "page_size=3 does not divide"),
    ("scatter_pages", "source", torch.zeros(1, 2, ELEMENTS), "source has shape"),
    ("scatter_pages", "source", torch.zeros(2, 2, 2 * ELEMENTS)[:, :, ::2], "source must be contiguous"),
    ("scatter_pages", "page_ids", torch.tensor([-2, 1]).int(), r"page_ids\[0\] is -2"),
    ("scatter_pages", "num_rows", torch.tensor([1]).int(), "num_rows has 1 entries; expected 2"),
    ("paged_hstu_attention", "q", torch.zeros(8, K_ROW), "q has shape"),
    ("paged_hstu_attention", "q", torch.zeros(8, HEADS, QK_DIM, dtype=F64), "q is Double"),
    ("paged_hstu_attention", "k", torch.zeros(8, HEADS, QK_DIM + 1), "k has shape"),
    ("paged_hstu_attention", "k", torch.zeros(8, HEADS, QK_DIM).bfloat16(), "k is BFloat16; expected Float"),
    ("paged_hstu_attention", "v", torch.zeros(8, HEADS + 1, V_DIM), "v has shape"),
    ("paged_hstu_attention", "table", torch.zeros(3, 5, ELEMENTS - 1), "table has pages of 63 elements"),
    ("paged_hstu_attention", "table", torch.zeros(3, 5, ELEMENTS).half(), "table is Half"),
    ("paged_hstu_attention", "table", torch.zeros(3, 0, ELEMENTS), r"page_indices\[0\] is \d+; .* 0 pages"),
    ("paged_hstu_attention", "layer", 3, "layer is 3"),
    ("paged_hstu_attention", "offsets", torch.tensor([0, 5, 9]), "offsets ends at 9; q has 8 token rows"),
    ("paged_hstu_attention", "offsets", torch.tensor([1, 5, 8]), r"offsets\[0\] is 1"),
    ("paged_hstu_attention", "offsets", torch.tensor([0, 9, 8]), r"offsets\[2\] is 8, below offsets\[1\]"),
    ("paged_hstu_attention", "offsets", torch.tensor([], dtype=I64), "offsets is empty"),
    ("paged_hstu_attention", "offsets", torch.tensor([0, 5, 8]).int(), "offsets is Int; expected Long"),
    (
        "paged_hstu_attention",
        "num_candidates",
        torch.tensor([2, 4]),
        r"num_candidates\[1\] is 4; row 1 has 3",
    ),
    ("paged_hstu_attention", "num_candidates", torch.tensor([-1, 1]), r"num_candidates\[0\] is -1"),
    ("paged_hstu_attention", "num_candidates", torch.tensor([2]), "num_candidates has 1 entries"),
    (
        "paged_hstu_attention",
        "paged_lens",
        torch.tensor([9, 0]),
        r"paged_lens\[0\] is 9, which needs 3 pages",
    ),
    ("paged_hstu_attention", "paged_lens", torch.tensor([6, -1]), r"paged_lens\[1\] is -1"),
    (
        "paged_hstu_attention",
        "paged_lens",
        torch.tensor([2**62, 0]),
        r"paged_lens\[0\] is 4611686018427387904",
    ),
    ("paged_hstu_attention", "page_indices", torch.tensor([0, 5]).int(), r"page_indices\[1\] is 5"),
    ("paged_hstu_attention", "page_indices", torch.tensor([-1, 0]).int(), r"page_indices\[0\] is -1"),
    ("paged_hstu_attention", "page_indices", torch.tensor([0, 1]), "page_indices is Long; expected Int"),
    ("paged_hstu_attention", "page_indptr", torch.tensor([0, 3, 3]).int(), r"page_indptr\[1\] is 3"),
    ("paged_hstu_attention", "page_indptr", torch.tensor([0, 2, 1]).int(), r"page_indptr\[2\] is 1"),
    ("paged_hstu_attention", "page_indptr", torch.tensor([-1, 2, 2]).int(), r"page_indptr\[0\] is -1"),
    (
        "paged_hstu_attention",
        "page_indptr",
        torch.tensor([0, 2]).int(),
        "page_indptr has 2 entries; expected 3",
    ),
    ("paged_hstu_attention", "page_size", -4, "page_size is -4"),
    ("paged_hstu_attention", "norm_len", 0.0, "norm_len is 0"),
    ("paged_hstu_attention", "scale", float("nan"), "scale is nan"),
    ("paged_hstu_attention", "max_attn_len", -1, "max_attn_len is -1"),
]


@pytest.mark.parametrize(("name", "argument", "value", "message"), BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_bad_arguments_are_named(name, argument, value, message):
    arguments = ARGUMENTS[name]()
    getattr(ops, name)(*arguments.values())
    arguments = ARGUMENTS[name]() | {argument: value}
    before = {n: x.clone() for n, x in arguments.items() if isinstance(x, torch.Tensor)}
    with pytest.raises(RuntimeError, match=rf"{name}: .*{message}"):
        getattr(ops, name)(*arguments.values())
    for n, x in before.items():
        assert torch.equal(arguments[n].nan_to_num(), x.nan_to_num())


# ---- addresses ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="needs memory that is reserved but not backed")
def test_addresses_are_64_bits_wide():
    heads, dim, page_size = 4, 64, 32
    k_row = heads * dim
    elements = 2 * page_size * k_row
    pages = 2**31 // elements + 1000  # one layer alone exceeds 2^31 elements
    no_reserve = 0x4000
    size = 2 * pages * elements * 2
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    table = torch.frombuffer(memory, dtype=torch.bfloat16).view(2, pages, elements)
    assert table.stride(0) > 2**31

    history, candidates = 70, 3
    ids = [pages - 1, 3, pages - 400]
    batch = random_batch([history], [candidates], [0], heads=heads, qk_dim=dim, v_dim=dim, dtype=torch.bfloat16)
    k, v = batch.k[0][:history], batch.v[0][:history]
    slots = (torch.tensor(ids)[:, None] * page_size + torch.arange(page_size)).flatten()[:history]
    ops.append_pages(table, 1, k, v, slots, page_size)
    # By 64-bit arithmetic of torch, element by element of the first token of each page.
    for i, page in enumerate(ids):
        assert torch.equal(table[1, page, :k_row], k[i * page_size].flatten())

    arguments = batch.arguments() | {
        "q": batch.q[0][history:],
        "k": batch.k[0][history:],
        "v": batch.v[0][history:],
        "table": table,
        "offsets": torch.tensor([0, candidates]),
        "paged_lens": torch.tensor([history]),
        "page_indices": torch.tensor(ids, dtype=torch.int32),
        "page_indptr": torch.tensor([0, 3], dtype=torch.int32),
        "page_size": page_size,
    }
    out = ops.paged_hstu_attention(*arguments.values())
    assert torch.equal(out, batch.attend()[history:])
    assert relative_error(out, batch.expected()[history:]) < 2**-8

    copy = torch.zeros(2, 3, elements, dtype=torch.bfloat16)
    rows = torch.tensor([32, 32, 6], dtype=torch.int32)
    ops.gather_pages(table, copy, torch.tensor(ids, dtype=torch.int32), rows, k_row, page_size)
    assert torch.equal(copy[1, :, : page_size * k_row].reshape(96, heads, dim)[:history], k)
    moved = [pages - 2, 5, pages - 401]
    ops.scatter_pages(table, copy, torch.tensor(moved, dtype=torch.int32), rows, k_row, page_size)
    assert torch.equal(table[1, moved], copy[1])
    assert torch.equal(table[1, ids], copy[1])


# ---- threads -----------------------------------------------------------------------------------------------


def test_attention_releases_the_gil():
    arguments = list(random_batch([4000], [0], [0], heads=4, qk_dim=64, v_dim=64).arguments().values())
    span: list[float] = []

    def attend():
        span.append(time.perf_counter())
        ops.paged_hstu_attention(*arguments)
        span.append(time.perf_counter())

    thread = threading.Thread(target=attend)
    thread.start()
    ticks = []
    while thread.is_alive():
        ticks.append(time.perf_counter())
    # Were the lock held, this thread would stand still throughout the call.
    begin, end = span
    tenth = (end - begin) / 10
    assert any(begin + tenth < tick < end - tenth for tick in ticks)
