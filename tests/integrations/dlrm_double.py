"""A stand-in for the host's `DlrmHSTU`, for tests without its checkout: same names, same order of calls.

Written for this project. Left out: tasks and labels beyond one binary prediction.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from tests.doubles.common import HammerModule
from tests.doubles.hstu_transducer import HSTUTransducer
from tests.doubles.jagged_tensors import complete_cumsum, concat_2D_jagged
from tests.doubles.layer_norm import mlp
from tests.doubles.positional_encoder import HSTUPositionalEncoder
from tests.doubles.postprocessors import TimestampLayerNormPostprocessor
from tests.doubles.preprocessors import ContextualPreprocessor
from tests.doubles.stu import STULayer, STULayerConfig, STUStack


class SequenceEmbedding(NamedTuple):
    lengths: torch.Tensor
    embedding: torch.Tensor


@dataclass
class DlrmHSTUConfig:
    hstu_num_heads: int = 2
    hstu_attn_linear_dim: int = 12
    hstu_attn_qk_dim: int = 8
    hstu_attn_num_layers: int = 3
    hstu_embedding_table_dim: int = 16
    hstu_transducer_embedding_dim: int = 24
    contextual_feature_to_max_length: dict[str, int] = field(default_factory=lambda: {"user_id": 1, "cities": 2})
    contextual_feature_to_min_uih_length: dict[str, int] = field(default_factory=lambda: {"user_id": 20})
    candidates_weight_feature_name: str = "item_action_weights"
    candidates_watchtime_feature_name: str = "item_rating"
    candidates_querytime_feature_name: str = "item_query_time"
    user_embedding_feature_names: list[str] = field(
        default_factory=lambda: ["item_id", "user_id", "cities", "category_id"]
    )
    item_embedding_feature_names: list[str] = field(default_factory=lambda: ["candidate_id", "candidate_category_id"])
    uih_post_id_feature_name: str = "item_id"
    uih_action_time_feature_name: str = "action_timestamp"
    uih_weight_feature_name: str = "item_weights"
    hstu_uih_feature_names: list[str] = field(
        default_factory=lambda: [
            "user_id",
            "cities",
            "item_id",
            "rating",
            "action_timestamp",
            "item_weights",
            "category_id",
        ]
    )
    hstu_candidate_feature_names: list[str] = field(
        default_factory=lambda: [
            "candidate_id",
            "item_rating",
            "item_query_time",
            "item_action_weights",
            "candidate_category_id",
        ]
    )
    merge_uih_candidate_feature_mapping: list[tuple[str, str]] = field(
        default_factory=lambda: [
            ("item_id", "candidate_id"),
            ("rating", "item_rating"),
            ("action_timestamp", "item_query_time"),
            ("item_weights", "item_action_weights"),
            ("category_id", "candidate_category_id"),
        ]
    )
    action_weights: list[int] | None = field(default_factory=lambda: [1, 2, 4])


def tables(config: DlrmHSTUConfig, rows: int) -> list[EmbeddingConfig]:
    features = {
        "item": ["item_id", "candidate_id"],
        "category": ["category_id", "candidate_category_id"],
        "user": ["user_id"],
        "city": ["cities"],
    }
    dim = config.hstu_embedding_table_dim
    return [
        EmbeddingConfig(name=name, embedding_dim=dim, num_embeddings=rows, feature_names=names)
        for name, names in features.items()
    ]


class DlrmHSTU(HammerModule):
    def __init__(
        self, hstu_configs: DlrmHSTUConfig, rows: int = 200, is_inference: bool = True, is_dense: bool = False
    ) -> None:
        super().__init__(is_inference=is_inference)
        self._hstu_configs = config = hstu_configs
        if not is_dense:
            self._embedding_collection = EmbeddingCollection(tables(config, rows))
        mapping = config.merge_uih_candidate_feature_mapping
        self._additional = [
            uih
            for uih, candidate in mapping
            if candidate in config.item_embedding_feature_names and uih != config.uih_post_id_feature_name
        ]
        dim, mode = config.hstu_transducer_embedding_dim, {"is_inference": is_inference}
        context = config.contextual_feature_to_max_length
        layer = STULayerConfig(
            embedding_dim=dim,
            num_heads=config.hstu_num_heads,
            hidden_dim=config.hstu_attn_linear_dim,
            attention_dim=config.hstu_attn_qk_dim,
        )
        self._hstu_transducer = HSTUTransducer(
            STUStack([STULayer(layer, **mode) for _ in range(config.hstu_attn_num_layers)], **mode),
            ContextualPreprocessor(
                input_embedding_dim=config.hstu_embedding_table_dim,
                hidden_dim=20,
                output_embedding_dim=dim,
                contextual_feature_to_max_length=context,
                contextual_feature_to_min_uih_length=config.contextual_feature_to_min_uih_length,
                action_feature_name=config.uih_weight_feature_name,
                action_weights=config.action_weights,
                additional_embedding_features=self._additional,
                **mode,
            ),
            TimestampLayerNormPostprocessor(dim, [(3600, 24), (86_400, 7)], **mode),
            input_dropout_ratio=0.2,
            positional_encoder=HSTUPositionalEncoder(500, 60, dim, sum(context.values()), **mode),
            **mode,
        )
        width = config.hstu_embedding_table_dim * len(config.item_embedding_feature_names)
        self._item_embedding_mlp = mlp(width, 32, dim)
        self._head = torch.nn.Linear(dim, 1)

    def preprocess(self, uih_features: KeyedJaggedTensor, candidates_features: KeyedJaggedTensor) -> tuple[Any, ...]:
        config = self._hstu_configs
        merged = KeyedJaggedTensor.from_lengths_sync(
            keys=uih_features.keys() + candidates_features.keys(),
            values=torch.cat([uih_features.values(), candidates_features.values()]),
            lengths=torch.cat([uih_features.lengths(), candidates_features.lengths()]),
        )
        embedded = self._embedding_collection(merged)
        counts = candidates_features.lengths().view(len(candidates_features.keys()), -1)[0]
        lengths = uih_features[config.uih_post_id_feature_name].lengths()
        payload: dict[str, torch.Tensor] = {}
        hidden = (config.candidates_weight_feature_name, config.candidates_watchtime_feature_name)
        for uih, candidate in config.merge_uih_candidate_feature_mapping:
            if candidate not in config.item_embedding_feature_names:
                payload[uih] = uih_features[uih].values()
                values = candidates_features[candidate].values()
                payload[candidate] = torch.zeros_like(values) if candidate in hidden else values
        payload["uih_offsets"] = complete_cumsum(lengths)
        payload["candidate_offsets"] = complete_cumsum(counts)
        names = config.user_embedding_feature_names + config.item_embedding_feature_names
        sequences = {name: SequenceEmbedding(embedded[name].lengths(), embedded[name].values()) for name in names}
        return sequences, payload, int(lengths.max()), lengths, int(counts.max()), counts

    def main_forward(
        self,
        seq_embeddings: dict[str, SequenceEmbedding],
        payload_features: dict[str, torch.Tensor],
        max_uih_len: int,
        uih_seq_lengths: torch.Tensor,
        max_num_candidates: int,
        num_candidates: torch.Tensor,
    ) -> tuple[Any, ...]:
        config = self._hstu_configs

        def join(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return concat_2D_jagged(
                max_uih_len + max_num_candidates,
                left,
                right,
                offsets_left=complete_cumsum(uih_seq_lengths),
                offsets_right=complete_cumsum(num_candidates),
                kernel=self.hammer_kernel(),
            )

        for uih, candidate in config.merge_uih_candidate_feature_mapping:
            if uih in seq_embeddings:
                # As in the host, the caller's dict is changed.
                seq_embeddings[uih] = SequenceEmbedding(
                    uih_seq_lengths + num_candidates,
                    join(seq_embeddings[uih].embedding, seq_embeddings[candidate].embedding),
                )
        items = [seq_embeddings[name].embedding for name in config.item_embedding_feature_names]
        items = self._item_embedding_mlp(torch.cat(items, dim=-1))
        times = join(
            payload_features[config.uih_action_time_feature_name][:, None],
            payload_features[config.candidates_querytime_feature_name][:, None],
        )[:, 0]
        context = config.contextual_feature_to_max_length
        first = seq_embeddings[config.uih_post_id_feature_name]
        users, _ = self._hstu_transducer(
            max_uih_len=max_uih_len,
            max_targets=max_num_candidates,
            total_uih_len=times.numel() - int(num_candidates.sum()),
            total_targets=int(num_candidates.sum()),
            seq_embeddings=first.embedding,
            seq_lengths=first.lengths,
            seq_timestamps=times,
            seq_payloads={
                **payload_features,
                **{name: seq_embeddings[name].embedding for name in (*context, *self._additional)},
                **{f"{name}_offsets": complete_cumsum(seq_embeddings[name].lengths) for name in context},
            },
            num_targets=num_candidates,
        )
        return users, items, {}, torch.sigmoid(self._head(users * items)).t(), None, None

    def forward(self, uih_features: KeyedJaggedTensor, candidates_features: KeyedJaggedTensor) -> tuple[Any, ...]:
        values = self.preprocess(uih_features=uih_features, candidates_features=candidates_features)
        names = ("seq_embeddings", "payload_features", "max_uih_len", "uih_seq_lengths")
        names += ("max_num_candidates", "num_candidates")
        return self.main_forward(**dict(zip(names, values, strict=True)))
