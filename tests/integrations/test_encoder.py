"""The append-stable encoder with upstream's signature, as a model is trained with it."""

from __future__ import annotations

import pytest
import torch

from mtserve_plugin.positions import AppendStablePositionalEncoder
from tests.integrations.streams import ReferenceEncoder


@pytest.mark.parametrize("context_rows", [0, 3])
@pytest.mark.parametrize("targets", [True, False])
def test_against_the_loops(context_rows, targets):
    torch.manual_seed(0)
    encoder = AppendStablePositionalEncoder(12, 9, 8, context_rows)
    history = torch.tensor([5, 0, 1, 20, 2])
    counts = torch.tensor([2, 3, 0, 4, 1]) if targets else torch.zeros(5, dtype=torch.int64)
    lengths = history + counts + context_rows
    total = int(lengths.sum())
    arguments = {
        "max_seq_len": 99,
        "seq_lengths": lengths,
        "seq_offsets": torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))),
        "seq_timestamps": torch.randint(0, 2000, (total,)).cumsum(0),
        "seq_embeddings": torch.randn(total, 8),
    }
    got = encoder(num_targets=counts if targets else None, **arguments)
    want = ReferenceEncoder(encoder, context_rows)(num_targets=counts, **arguments)
    assert torch.equal(got, want)
    got.sum().backward()
    assert encoder._position_embeddings_weight.grad.any()
    assert encoder._timestamp_embeddings_weight.grad.any()


def test_an_append_changes_no_token_of_before():
    encoder = AppendStablePositionalEncoder(50, 9, 8, 1)
    x, times = torch.randn(12, 8), torch.randint(1, 9000, (12,)).cumsum(0)
    shared = {"max_seq_len": 12, "num_targets": torch.tensor([1])}

    def encode(length):
        span = {"seq_lengths": torch.tensor([length]), "seq_offsets": torch.tensor([0, length])}
        return encoder(seq_timestamps=times[:length], seq_embeddings=x[:length], **span, **shared)

    # The last of nine is a candidate: it looks like the event that it would become.
    assert torch.equal(encode(12)[:9], encode(9))
