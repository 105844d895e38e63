import decimal
import math

import pytest
import torch

from mtserve_plugin import jagged
from mtserve_plugin.errors import ConfigError, InputError
from mtserve_plugin.positions import AppendStableEncoder, places, time_bucket_edges


@pytest.mark.parametrize("function", ["sqrt", "log"])
def test_buckets_are_those_of_the_formula_at_and_around_every_edge(function):
    edges = time_bucket_edges(30, function)
    gaps = torch.cat([edges + shift for shift in (-1, 0, 1)] + [torch.tensor([0, 1, 59, 60, 61, 10**15])])
    got = torch.bucketize(gaps, edges, right=True)
    # In 40 digits: a float64 logarithm rounds the second before an edge up to it.
    with decimal.localcontext(prec=40):
        minutes = [decimal.Decimal(max(gap, 1)) / 60 for gap in gaps.tolist()]
        values = [m.sqrt() if function == "sqrt" else m.ln() for m in minutes]
    expected = [min(max(math.floor(value), 0), 30) for value in values]
    assert got.tolist() == expected
    # More buckets than an int64 of seconds can reach.
    assert bool((time_bucket_edges(64, function).diff() >= 0).all())


def test_buckets_are_upstreams_for_gaps_of_up_to_a_year():
    gaps = torch.randint(0, 365 * 86_400, (20_000,), generator=torch.Generator().manual_seed(0))
    upstream = torch.sqrt(gaps.clamp(min=1e-6) / 60.0).clamp(min=0).int().clamp(max=2048)
    assert torch.equal(torch.bucketize(gaps, time_bucket_edges(2048), right=True).int(), upstream)


def test_encoder_adds_the_right_rows():
    encoder = AppendStableEncoder(10, 4, 16)
    assert {name: tuple(weight.shape) for name, weight in encoder.state_dict().items()} == {
        "_position_embeddings_weight": (10, 16),
        "_timestamp_embeddings_weight": (5, 16),
    }
    x = torch.randn(4, 16)
    out = encoder(x, torch.tensor([0, 9, 10, 5000]), torch.tensor([-5, 59, 60, 10**12]))
    position, time = encoder._position_embeddings_weight, encoder._timestamp_embeddings_weight
    torch.testing.assert_close(out, 4 * x + position[[0, 9, 9, 9]] + time[[0, 0, 1, 4]])
    assert encoder(x.bfloat16(), torch.arange(4), torch.zeros(4, dtype=torch.int64)).dtype == torch.bfloat16


def test_encoder_shares_tables():
    owner = AppendStableEncoder(10, 4, 16)
    encoder = AppendStableEncoder.sharing(owner._position_embeddings_weight, owner._timestamp_embeddings_weight)
    x, positions, gaps = torch.randn(3, 16), torch.tensor([0, 4, 9]), torch.tensor([0, 100, 1000])
    with torch.no_grad():
        owner._timestamp_embeddings_weight.add_(1)
    assert torch.equal(encoder(x, positions, gaps), owner(x, positions, gaps))


def test_encoder_refuses():
    encoder = AppendStableEncoder(10, 4, 16)
    good = torch.zeros(3, dtype=torch.int64)
    for positions, gaps, named in ((good.int(), good, "positions"), (good, good[:2], "gaps")):
        with pytest.raises(InputError, match=named):
            encoder(torch.zeros(3, 16), positions, gaps)
    with pytest.raises(ConfigError, match="time_bucket_fn"):
        AppendStableEncoder(10, 4, 16, time_bucket_fn="exp")
    with pytest.raises(ConfigError, match="num_time_buckets"):
        AppendStableEncoder(10, 0, 16)


@pytest.mark.parametrize("rows", [0, 1, 9])
def test_places_do_not_depend_on_what_is_cached(rows):
    generator = torch.Generator().manual_seed(rows)
    history = torch.randint(0, 6, (rows,), generator=generator)
    candidates = torch.randint(0, 4, (rows,), generator=generator)
    times = [torch.randint(0, 10**6, (n,), generator=generator).sort().values for n in history.tolist()]
    now = torch.randint(10**6, 2 * 10**6, (rows,), generator=generator)
    for cached in (history * 0, history, history // 2, (history - 1).clamp(min=0)):
        expected_positions, expected_gaps = [], []
        for b, (n, c) in enumerate(zip(history.tolist(), cached.tolist(), strict=True)):
            t = times[b].tolist()
            expected_positions += [*range(c, n), *[n] * int(candidates[b])]
            expected_gaps += [t[i] - t[i - 1] if i else 0 for i in range(c, n)]
            expected_gaps += [int(now[b]) - t[-1] if n else 0] * int(candidates[b])
        pairs = list(zip(times, cached.tolist(), strict=True))
        positions, gaps = places(
            torch.cat([t[c:] for t, c in pairs] or [now]),
            torch.tensor([int(t[c - 1]) if c else 0 for t, c in pairs], dtype=torch.int64),
            now,
            cached,
            history - cached,
            candidates,
            jagged.concat_order(history - cached, candidates),
        )
        assert positions.tolist() == expected_positions
        assert gaps.tolist() == expected_gaps
