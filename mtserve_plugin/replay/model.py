"""The model that a replay runs, and its input."""

from __future__ import annotations

from torchrec import KeyedJaggedTensor

from mtserve_plugin.cache import NoCache
from mtserve_plugin.models.features import build_features as to_features
from mtserve_plugin.models.hstu import HSTURanker, HSTURankerConfig
from mtserve_plugin.replay.options import ModelShape
from mtserve_plugin.workload import Features, Trace

# Item ids are folded into so many rows: a catalogue of millions would measure the memory of the table.
MOST_ITEMS = 200_000


def build_model(trace: Trace, shape: ModelShape, longest: int, seed: int) -> HSTURanker:
    """An HSTU ranker for this trace's items, with positions for histories of up to `longest` tokens."""
    config = HSTURankerConfig(
        num_items=min(trace.num_items, MOST_ITEMS),
        num_actions=trace.num_actions,
        embedding_dim=shape.heads * shape.dim,
        num_layers=shape.layers,
        num_heads=shape.heads,
        qk_dim=shape.dim,
        v_dim=shape.dim,
        # One row more than there are positions, so that a shifted position is another row.
        max_positions=longest + 2,
        num_time_buckets=512,
        attn_norm_len=1 << (longest - 1).bit_length(),
        dtype=shape.dtype,
    )
    return HSTURanker(config, NoCache(config.cache_config()), seed=seed).eval()


def to_kjt(features: Features, num_items: int) -> KeyedJaggedTensor:
    """A fresh `KeyedJaggedTensor` of these features: torchrec keeps what it computes from one inside it."""
    return to_features(
        user=features.user,
        item=features.item % num_items,
        action=features.action,
        time=features.time,
        history_lengths=features.lengths,
        candidate=features.candidate % num_items,
        num_candidates=features.candidate_lengths,
        now=features.now,
    )
