import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from mtserve_plugin import jagged
from mtserve_plugin.errors import InputError

HISTORY = ["item", "time"]


@pytest.fixture(params=["fbgemm", "torch"])
def path(request, monkeypatch):
    """Runs a test twice: on fbgemm's operators, and as on a device that has none of them."""
    if request.param == "torch":
        monkeypatch.setattr(jagged, "_has_kernel", lambda name, device_type: False)
    return request.param


class Case:
    """Random features over 4 keys, of which 2 run along the history, as nested lists and as a
    KeyedJaggedTensor.
    """

    def __init__(self, seed, rows, lengths_dtype=torch.int64, values_dtype=torch.int64, weights_dtype=None):
        rng = random.Random(seed)
        self.history = [rng.choice([0, 1, 2, 31, 32, 33]) for _ in range(rows)]
        self.cached = [rng.choice([0, n, rng.randint(0, n)]) for n in self.history]
        # History features neither first nor adjacent.
        self.lists = {
            "user": [[rng.randint(1, 200)] for _ in range(rows)],
            "item": [[rng.randint(1, 200) for _ in range(n)] for n in self.history],
            "candidate": [[rng.randint(1, 200) for _ in range(rng.randint(0, 3))] for _ in range(rows)],
            "time": [[rng.randint(1, 200) for _ in range(n)] for n in self.history],
        }
        flat = [value for key in self.lists.values() for row in key for value in row]
        self.features = KeyedJaggedTensor(
            keys=list(self.lists),
            values=torch.tensor(flat, dtype=values_dtype),
            weights=None if weights_dtype is None else torch.tensor(flat, dtype=weights_dtype) / 2,
            lengths=torch.tensor([len(r) for key in self.lists.values() for r in key], dtype=lengths_dtype),
            stride=rows,
        )
        self.history_lengths = torch.tensor(self.history, dtype=torch.int64)
        self.cached_lengths = torch.tensor(self.cached, dtype=torch.int64)

    def strip(self, keys=HISTORY):
        return jagged.strip(self.features, keys, self.history_lengths, self.cached_lengths)


@pytest.mark.parametrize("rows", [0, 1, 2, 17])
@pytest.mark.parametrize(
    ("lengths_dtype", "values_dtype", "weights_dtype"),
    [
        (torch.int64, torch.int64, None),
        (torch.int32, torch.int64, torch.float32),
        (torch.int64, torch.float32, torch.float64),
        (torch.int64, torch.float64, None),  # fbgemm has no kernel for these two
        (torch.int32, torch.int32, torch.float16),
    ],
)
def test_strip_removes_exactly_the_cached_tokens(path, rows, lengths_dtype, values_dtype, weights_dtype):
    for seed in range(5):
        case = Case(seed, rows, lengths_dtype, values_dtype, weights_dtype)
        stripped, boundary = case.strip()
        assert stripped.keys() == list(case.lists)
        assert stripped.stride() == rows
        assert stripped.lengths().dtype == lengths_dtype
        assert stripped.values().dtype == values_dtype
        for key, lists in case.lists.items():
            cut = case.cached if key in HISTORY else [0] * rows
            kept = [row[n:] for row, n in zip(lists, cut, strict=True)]
            got = stripped[key]
            assert got.lengths().tolist() == [len(row) for row in kept]
            assert got.values().tolist() == [value for row in kept for value in row]
            if weights_dtype is not None:
                assert got.weights().dtype == weights_dtype
                assert torch.equal(got.weights(), got.values().to(weights_dtype) / 2)
        assert list(boundary) == HISTORY
        for key in HISTORY:
            last = [row[n - 1] if n else 0 for row, n in zip(case.lists[key], case.cached, strict=True)]
            assert boundary[key].tolist() == last
            assert boundary[key].dtype == values_dtype


def test_strip_of_nothing_and_of_everything(path):
    case = Case(1, 8)
    case.cached_lengths = torch.zeros(8, dtype=torch.int64)
    stripped, boundary = case.strip()
    assert torch.equal(stripped.values(), case.features.values())
    assert boundary["time"].tolist() == [0] * 8
    case.cached_lengths = case.history_lengths.clone()
    stripped, boundary = case.strip(["time", "item"])
    assert stripped["item"].values().numel() == stripped["time"].values().numel() == 0
    assert torch.equal(stripped["candidate"].values(), case.features["candidate"].values())
    assert list(boundary) == ["time", "item"]


def _one_more_time_in_row_3(case):
    lists = {key: [list(row) for row in rows] for key, rows in case.lists.items()}
    lists["time"][3].append(1)
    case.features = KeyedJaggedTensor(
        keys=list(lists),
        values=torch.tensor([value for rows in lists.values() for row in rows for value in row]),
        lengths=torch.tensor([len(row) for rows in lists.values() for row in rows]),
    )


def _too_few_values(case):
    lengths, values = case.features.lengths(), case.features.values()
    case.features = KeyedJaggedTensor(keys=list(case.lists), values=values[:-1], lengths=lengths)


def _fewer_rows(case):
    case.history_lengths, case.cached_lengths = case.history_lengths[1:], case.cached_lengths[1:]


def _cached_beyond_history(case):
    case.cached_lengths = case.history_lengths + 1


@pytest.mark.parametrize(
    ("spoil", "keys", "named"),
    [
        (None, ["item", "absent"], "absent"),
        (None, "item", "list of keys"),
        (_one_more_time_in_row_3, HISTORY, "'time'.*row 3"),
        (_too_few_values, HISTORY, "sum to"),
        (_fewer_rows, HISTORY, "stride 6.*5 rows.*'item'"),
        (_cached_beyond_history, HISTORY, r"cached_lengths\[0\]"),
        (None, ["item", "candidate"], "'candidate'"),
    ],
)
def test_strip_refuses_features_that_disagree(spoil, keys, named):
    case = Case(3, 6)
    if spoil:
        spoil(case)
    before = case.features.values().clone(), case.features.lengths().clone()
    with pytest.raises(InputError, match=named):
        case.strip(keys)
    assert torch.equal(case.features.values(), before[0])
    assert torch.equal(case.features.lengths(), before[1])


class _Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_strip_runs_on_fbgemm_with_as_many_operators_for_many_rows_as_for_few():
    counts = []
    for rows in (4, 64):
        case = Case(5, rows)
        case.cached_lengths = case.history_lengths // 2 + case.history_lengths % 2
        with _Count() as seen:
            case.strip()
        counts.append(len(seen.names))
        assert seen.names.count("fbgemm.permute_1D_sparse_data.default") == 1
    assert counts[0] == counts[1]


@pytest.mark.parametrize("width", [(), (3,)])
def test_concat_is_row_wise(path, width):
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        rows = [0, 1, 5, 40][seed % 4]
        left = torch.randint(0, 4, (rows,), generator=generator)
        right = torch.randint(0, 3, (rows,), generator=generator)
        a = torch.randn(int(left.sum()), *width, generator=generator)
        b = torch.randn(int(right.sum()), *width, generator=generator)
        parts = zip(a.split(left.tolist()), b.split(right.tolist()), strict=True)
        expected = torch.cat([part for pair in parts for part in pair] or [a])
        assert torch.equal(jagged.concat(a, b, jagged.concat_order(left, right)), expected)


def test_offsets(path):
    assert jagged.offsets(torch.tensor([2, 0, 3], dtype=torch.int32)).tolist() == [0, 2, 2, 5]
    assert jagged.offsets(torch.empty(0, dtype=torch.int64)).tolist() == [0]
    # int32 lengths whose sum is beyond int32
    big = jagged.offsets(torch.full((3,), 2**30, dtype=torch.int32))
    assert big.dtype == torch.int64
    assert int(big[-1]) == 3 * 2**30


def test_token_hashes_see_every_value_and_nothing_else():
    case = Case(7, 9)
    hashes = jagged.token_hashes(case.features, HISTORY)
    assert hashes.dtype == torch.int64
    assert hashes.numel() == sum(case.history)
    assert torch.equal(hashes, jagged.token_hashes(case.features, HISTORY))
    values = case.features.values()
    starts = dict(zip(case.lists, case.features.offset_per_key(), strict=False))
    for key, position, changed in (("item", 4, [4]), ("time", 7, [7]), ("user", 0, []), ("candidate", 0, [])):
        other = values.clone()
        other[starts[key] + position] ^= 1
        edited = KeyedJaggedTensor(keys=list(case.lists), values=other, lengths=case.features.lengths())
        differs = jagged.token_hashes(edited, HISTORY) != hashes
        assert differs.nonzero().view(-1).tolist() == changed
    assert not torch.equal(hashes, jagged.token_hashes(case.features, HISTORY[::-1]))
    dense = KeyedJaggedTensor(keys=["a", "b"], values=torch.arange(100).repeat(2), lengths=torch.full((2,), 100))
    grid = KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.cat((torch.arange(300).repeat_interleave(300), torch.arange(300).repeat(300))),
        lengths=torch.full((2,), 90_000),
    )
    assert jagged.token_hashes(dense, "ab").unique().numel() == 100
    assert jagged.token_hashes(grid, "ab").unique().numel() == 90_000


@pytest.mark.parametrize(
    ("keys", "named"), [(["absent"], "absent"), (["item", "candidate"], "candidate"), ([], "empty")]
)
def test_token_hashes_refuse(keys, named):
    with pytest.raises(InputError, match=named):
        jagged.token_hashes(Case(8, 5).features, keys)
