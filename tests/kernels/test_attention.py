"""paged_hstu_attention against its definition in float64, and its promises about bits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mtserve_plugin import ops
from tests.kernels.reference import jagged_batch, random_batch, relative_error

# One rounding to the dtype, besides the error of float32.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2**-11 + 1e-6, torch.bfloat16: 2**-8 + 1e-6}
DTYPES = list(TOLERANCE)
# Bits of the significand, exponent of the smallest normal number.
HALF_FORMATS = {torch.float16: (11, -14), torch.bfloat16: (8, -126)}
# From the narrowest on.
ISAS = ["baseline", "avx2", "avx512", "avx512_bf16", "amx"]
# heads, qk_dim, v_dim, page_size
SHAPES = [
    (2, 16, 16, 8),
    (1, 7, 20, 5),
    (3, 20, 7, 16),
    (2, 5, 3, 8),
    (2, 33, 48, 3),
    (4, 1, 1, 1),
    (2, 65, 130, 32),
    (1, 128, 64, 32),
]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(20)


@pytest.mark.parametrize("window", [0, 1, 13, 1000])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(d, s) for d in (torch.float32, torch.bfloat16) for s in SHAPES] + [(torch.float16, s) for s in SHAPES[:3]],
)
def test_matches_the_definition(dtype, shape, window):
    heads, qk_dim, v_dim, page_size = shape
    batch = jagged_batch(page_size, heads=heads, qk_dim=qk_dim, v_dim=v_dim, window=window, dtype=dtype)
    out = batch.attend()
    expected = batch.expected()
    assert out.dtype == dtype
    assert out.is_contiguous()
    assert out.shape == expected.shape
    assert relative_error(out, expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("window", [0, 700])
def test_long_history_stays_accurate(window):
    batch = random_batch([5000, 3000], [40, 1], [4900, 0], heads=1, qk_dim=64, v_dim=32, page_size=32, window=window)
    assert relative_error(batch.attend(), batch.expected()) < 1e-6


@pytest.mark.parametrize(
    ("histories", "candidates", "paged"),
    [([], [], []), ([0], [0], [0]), ([5], [0], [5]), ([0], [3], [0]), ([1], [0], [0]), ([200], [1], [200])],
)
def test_smallest_batches(histories, candidates, paged):
    if histories:
        batch = random_batch(histories, candidates, paged)
        assert relative_error(batch.attend(), batch.expected()) < 1e-6
        assert batch.attend().shape == batch.expected().shape
    else:
        x, none = torch.empty(0, 2, 4), torch.zeros(0, dtype=torch.int64)
        table = torch.empty(1, 0, 8 * 2 * 8)
        ids = none.to(torch.int32)
        zero = torch.zeros(1, dtype=torch.int64)
        out = ops.paged_hstu_attention(x, x, x, table, 0, zero, none, none, ids, zero.to(torch.int32), 8, 1.0, 1.0, 0)
        assert out.shape == (0, 2, 4)


def test_zeros_come_out_where_nothing_is_seen():
    batch = random_batch([0], [2], [0])
    batch.v[0][:] = 0
    assert batch.attend().count_nonzero() == 0


def test_silu_over_its_whole_range():
    # A candidate without history sees itself alone, so that the operator is silu(q * k) * v.
    x = torch.cat([torch.linspace(-100, 100, 40_001), torch.logspace(-30, 2, 500), -torch.logspace(-30, 2, 500)])
    one = torch.ones(len(x), 1, 1)
    out = _candidates_alone(x.view(-1, 1, 1), one, one, norm_len=1.0).flatten().double()
    expected = torch.nn.functional.silu(x.double())
    moderate = x.abs() < 80
    assert ((out - expected).abs() <= 4e-7 * expected.abs())[moderate].all()
    assert ((out - expected).abs() <= 4e-7 * expected.abs() + 1e-33).all()
    special = torch.tensor([float("inf"), float("nan"), 0.0]).view(-1, 1, 1)
    out = _candidates_alone(special, one[:3], one[:3], norm_len=1.0).flatten()
    assert out[0] == float("inf")
    assert out[1].isnan()
    assert out[2] == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("factor", [1, 3])
def test_every_half_precision_number_is_read_and_rounded(dtype, factor):
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    values = values[(values.float().abs() < 2.0**110) | ~values.isfinite()].view(-1, 1, 1)
    # silu(128) is 128: times a value and divided by 128 it is that value again; three times a value has two bits
    # more, so that all kinds of ties occur.
    q = torch.full_like(values, 128.0 * factor)
    out = _candidates_alone(q, torch.ones_like(values), values, norm_len=128.0)
    expected = (values.float() * factor).to(dtype)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out[~out.isnan()], expected[~expected.isnan()])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("norm_len", [3.0, 1e-4, 1e7])
def test_half_precision_is_float32_rounded_once(dtype, norm_len):
    batch = jagged_batch(dtype=dtype, qk_dim=20, norm_len=norm_len)
    arguments = batch.arguments()
    wide = [x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments.values()]
    expected = ops.paged_hstu_attention(*wide)
    out = batch.attend()
    if dtype == torch.bfloat16 and ops.cpu_isa() in ("avx512_bf16", "amx"):
        # Pairs of dims are summed up in another order, so that what lies at a tie may be rounded the other way.
        assert (out != expected.to(dtype)).double().mean() < 0.01
        assert_rounded_once(out, batch.expected(), 1e-6 * float(expected.abs().max()))
    else:
        assert torch.equal(out, expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_are_not_rounded_before_they_meet_values(dtype):
    # Keys come in pairs that are almost the same and have opposite values: what is left of their scores' sum is far
    # smaller than the rounding of a score would be.
    batch = random_batch([600], [40], [500], heads=1, qk_dim=33, v_dim=20, scale=1.0, dtype=dtype)
    k, v = batch.k[0], batch.v[0]
    k[1:600:2] = k[0:600:2] * (1 + 2.0**-7)
    v[1:600:2] = -v[0:600:2]
    batch = batch.split([500])
    sums = batch.magnitudes()
    assert (sums > 50 * batch.expected().abs()).double().mean() > 0.3
    assert_rounded_once(batch.attend(), batch.expected(), 1e-6 * sums)


def assert_rounded_once(out, exact, float32_error):
    """Every number is within half a unit of its last place, besides the error of float32."""
    bits, smallest = HALF_FORMATS[out.dtype]
    half_unit = 2.0 ** (exact.abs().log2().floor().clamp(min=smallest) - bits)
    assert ((out.double() - exact).abs() <= half_unit + float32_error).all()


def _candidates_alone(q, k, v, norm_len):
    n = len(q)
    zero = torch.zeros(1, dtype=torch.int64)
    return ops.paged_hstu_attention(
        q,
        k,
        v,
        torch.empty(1, 0, 4 * (q.shape[2] + v.shape[2]), dtype=q.dtype),
        0,
        torch.tensor([0, n]),
        torch.tensor([n]),
        zero,
        zero[:0].to(torch.int32),
        torch.zeros(2, dtype=torch.int32),
        4,
        1.0,
        norm_len,
        0,
    )


# ---- promises about bits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, 150])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cached_and_recomputed_are_bit_equal(dtype, window):
    history, candidates = 500, 19
    cold = random_batch([history], [candidates], [0], qk_dim=21, v_dim=12, window=window, dtype=dtype)
    expected = cold.attend()
    assert relative_error(expected, cold.expected()) <= TOLERANCE[dtype]
    for paged in (1, 7, 8, 9, 100, 127, 128, 129, 255, 256, 257, 499, 500):
        assert torch.equal(cold.split([paged]).attend(), expected[paged:]), paged


def test_a_row_does_not_depend_on_the_rest_of_the_batch():
    histories, candidates, paged = [140, 3, 0, 500, 33], [5, 0, 60, 100, 1], [128, 0, 0, 401, 33]
    batch = random_batch(histories, candidates, paged, qk_dim=20, v_dim=24)
    out, offsets = batch.attend(), batch.offsets.tolist()
    for b in range(len(paged)):
        alone = random_batch([histories[b]], [candidates[b]], [paged[b]], qk_dim=20, v_dim=24)
        for mine, whole in ((alone.q, batch.q), (alone.k, batch.k), (alone.v, batch.v)):
            mine[0][:] = whole[b]
        assert torch.equal(alone.split([paged[b]]).attend(), out[offsets[b] : offsets[b + 1]]), b


def test_candidates_may_be_scored_in_parts():
    batch = random_batch([90], [40], [80])
    out = batch.attend()
    part = random_batch([90], [3], [80])
    for mine, whole in ((part.q, batch.q), (part.k, batch.k), (part.v, batch.v)):
        mine[0][:] = torch.cat([whole[0][:90], whole[0][101:104]])
    assert torch.equal(part.split([80]).attend()[10:], out[21:24])


def test_does_not_depend_on_the_number_of_threads():
    batch = random_batch([700, 10], [40, 3], [100, 0], heads=3)
    before = torch.get_num_threads()
    try:
        outs = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            outs += [batch.attend() for _ in range(3)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(out, outs[0]) for out in outs)


# ---- what must not be read or copied -----------------------------------------------------------------------


def test_what_is_not_visible_is_not_read():
    batch = jagged_batch()
    assert batch.table.isnan().any()
    assert batch.attend().isfinite().all()
    # A candidate's key and value belong to itself alone.
    clean = batch.attend()
    offsets = batch.offsets.tolist()
    for b, count in enumerate(batch.candidates):
        if count:
            batch.k[b][-1] = float("nan")
            batch.v[b][-1] = float("inf")
    out = batch.attend()
    spoiled = torch.zeros(len(out), dtype=torch.bool)
    spoiled[[offsets[b + 1] - 1 for b, count in enumerate(batch.candidates) if count]] = True
    assert torch.equal(out[~spoiled], clean[~spoiled])
    assert not out[spoiled].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_of_one_projection(dtype):
    batch = jagged_batch(heads=3, qk_dim=9, v_dim=11, dtype=dtype)
    arguments = batch.arguments()
    q, k, v = (arguments[name] for name in "qkv")
    expected = ops.paged_hstu_attention(*arguments.values())
    projection = torch.full((len(q), 5 + 3 * (9 + 9 + 11)), float("nan"), dtype=dtype)
    parts = projection[:, 5:].split([27, 27, 33], dim=1)
    for part, x in zip(parts, (q, k, v), strict=True):
        part.copy_(x.flatten(1))
    slices = [part.unflatten(1, (3, -1)) for part in parts]
    assert not any(x.is_contiguous() for x in slices)
    assert torch.equal(ops.paged_hstu_attention(*slices, *list(arguments.values())[3:]), expected)
    # Heads apart, rows apart, even dims apart.
    scattered = [x.permute(1, 0, 2).contiguous().permute(1, 0, 2) for x in (q, k, v)]
    assert torch.equal(ops.paged_hstu_attention(*scattered, *list(arguments.values())[3:]), expected)
    scattered = [x.permute(2, 1, 0).contiguous().permute(2, 1, 0) for x in (q, k, v)]
    assert torch.equal(ops.paged_hstu_attention(*scattered, *list(arguments.values())[3:]), expected)


def test_strided_table_and_lists():
    batch = jagged_batch()
    arguments = batch.arguments()
    expected = ops.paged_hstu_attention(*arguments.values())
    table = batch.table
    apart = torch.full((table.shape[1], table.shape[0], table.shape[2] + 3), float("nan"))
    apart[:, :, :-3] = table.transpose(0, 1)
    arguments["table"] = apart[:, :, :-3].transpose(0, 1)
    for name in ("offsets", "num_candidates", "paged_lens", "page_indices", "page_indptr"):
        arguments[name] = torch.stack([arguments[name], torch.full_like(arguments[name], -7)], 1)[:, 0]
    assert torch.equal(ops.paged_hstu_attention(*arguments.values()), expected)


# ---- instruction sets --------------------------------------------------------------------------------------


@pytest.mark.skipif("MTSERVE_CPU_ISA" in os.environ, reason="the outer run tries every instruction set")
@pytest.mark.parametrize("isa", ISAS[:-1])
def test_narrower_instruction_sets_keep_every_promise(isa):
    if ISAS.index(ops.cpu_isa()) <= ISAS.index(isa):
        pytest.skip(f"the tests themselves run on {ops.cpu_isa()}")
    kept = "definition or silu or half or rounded or bit_equal or visible"
    arguments = [__file__, "-q", "-x", "-p", "no:cacheprovider", "-k", kept]
    program = (
        "import sys, pytest; from mtserve_plugin import ops; "
        f"assert ops.cpu_isa() == {isa!r}; sys.exit(pytest.main({arguments!r}))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"MTSERVE_CPU_ISA": isa, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
