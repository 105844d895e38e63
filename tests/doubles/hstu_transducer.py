"""Preprocessor, positional encoder, attention layers, postprocessor: one after the other."""

from __future__ import annotations

import torch

from tests.doubles.common import HammerModule
from tests.doubles.jagged_tensors import complete_cumsum, split_2D_jagged
from tests.doubles.positional_encoder import HSTUPositionalEncoder
from tests.doubles.postprocessors import L2NormPostprocessor, OutputPostprocessor
from tests.doubles.preprocessors import InputPreprocessor, Payloads, Preprocessed
from tests.doubles.stu import STU


class HSTUTransducer(HammerModule):
    def __init__(
        self,
        stu_module: STU,
        input_preprocessor: InputPreprocessor,
        output_postprocessor: OutputPostprocessor | None = None,
        input_dropout_ratio: float = 0.0,
        positional_encoder: HSTUPositionalEncoder | None = None,
        is_inference: bool = True,
        return_full_embeddings: bool = False,
        listwise: bool = False,
    ) -> None:
        super().__init__(is_inference=is_inference)
        self._stu_module = stu_module
        self._input_preprocessor = input_preprocessor
        self._output_postprocessor = output_postprocessor or L2NormPostprocessor(is_inference=is_inference)
        self._positional_encoder = positional_encoder
        self._input_dropout_ratio = input_dropout_ratio
        self._return_full_embeddings = return_full_embeddings
        self._listwise_training = listwise and self.is_train
        assert input_preprocessor.is_inference == is_inference, "input_preprocessor must have the same mode"

    def _preprocess(
        self,
        max_uih_len: int,
        max_targets: int,
        total_uih_len: int,
        total_targets: int,
        seq_lengths: torch.Tensor,
        seq_timestamps: torch.Tensor,
        seq_embeddings: torch.Tensor,
        num_targets: torch.Tensor,
        seq_payloads: Payloads,
    ) -> Preprocessed:
        prepared = self._input_preprocessor(
            max_uih_len=max_uih_len,
            max_targets=max_targets,
            total_uih_len=total_uih_len,
            total_targets=total_targets,
            seq_lengths=seq_lengths,
            seq_timestamps=seq_timestamps,
            seq_embeddings=seq_embeddings,
            num_targets=num_targets,
            seq_payloads=seq_payloads if seq_payloads is not None else {},
        )
        max_seq_len, uih, targets, lengths, offsets, timestamps, embeddings, num_targets, payloads = prepared
        if self._positional_encoder is not None:
            embeddings = self._positional_encoder(
                max_seq_len=max_seq_len,
                seq_lengths=lengths,
                seq_offsets=offsets,
                seq_timestamps=timestamps,
                seq_embeddings=embeddings,
                num_targets=None if self._listwise_training else num_targets,
            )
        embeddings = torch.nn.functional.dropout(embeddings, self._input_dropout_ratio, self.training)
        return max_seq_len, uih, targets, lengths, offsets, timestamps, embeddings, num_targets, payloads

    def _hstu_compute(
        self,
        max_seq_len: int,
        seq_lengths: torch.Tensor,
        seq_offsets: torch.Tensor,
        seq_timestamps: torch.Tensor,
        seq_embeddings: torch.Tensor,
        num_targets: torch.Tensor,
    ) -> torch.Tensor:
        return self._stu_module(
            max_seq_len=max_seq_len,
            x=seq_embeddings,
            x_lengths=seq_lengths,
            x_offsets=seq_offsets,
            num_targets=None if self._listwise_training else num_targets,
        )

    def _postprocess(
        self,
        max_seq_len: int,
        max_uih_len: int,
        max_targets: int,
        total_uih_len: int,
        total_targets: int,
        seq_lengths: torch.Tensor,
        seq_timestamps: torch.Tensor,
        seq_embeddings: torch.Tensor,
        num_targets: torch.Tensor,
        seq_payloads: Payloads,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        def candidates(values: torch.Tensor) -> torch.Tensor:
            _, right = split_2D_jagged(
                max_seq_len=max_seq_len,
                values=values,
                offsets_left=complete_cumsum(seq_lengths - num_targets),
                offsets_right=complete_cumsum(num_targets),
                kernel=self.hammer_kernel(),
            )
            return right.unflatten(0, (-1, 2))[:, 0] if self._input_preprocessor.interleave_targets() else right

        def process(embeddings: torch.Tensor, timestamps: torch.Tensor) -> torch.Tensor:
            return self._output_postprocessor(
                seq_embeddings=embeddings, seq_timestamps=timestamps, seq_payloads=seq_payloads
            )

        if self._return_full_embeddings:
            full = process(seq_embeddings, seq_timestamps)
            return full, candidates(full)
        return None, process(candidates(seq_embeddings), candidates(seq_timestamps[:, None])[:, 0])

    def forward(
        self,
        max_uih_len: int,
        max_targets: int,
        total_uih_len: int,
        total_targets: int,
        seq_lengths: torch.Tensor,
        seq_embeddings: torch.Tensor,
        seq_timestamps: torch.Tensor,
        num_targets: torch.Tensor,
        seq_payloads: Payloads,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The candidates' embeddings `[sum(num_targets), D]`, and all rows' if `return_full_embeddings`."""
        dtype = seq_embeddings.dtype
        if not self._is_inference:
            seq_embeddings = seq_embeddings.to(self._training_dtype)
        (
            max_seq_len,
            total_uih_len,
            total_targets,
            lengths,
            offsets,
            timestamps,
            embeddings,
            num_targets,
            payloads,
        ) = self._preprocess(
            max_uih_len=max_uih_len,
            max_targets=max_targets,
            total_uih_len=total_uih_len,
            total_targets=total_targets,
            seq_lengths=seq_lengths,
            seq_timestamps=seq_timestamps,
            seq_embeddings=seq_embeddings,
            num_targets=num_targets,
            seq_payloads=seq_payloads,
        )
        encoded = self._hstu_compute(
            max_seq_len=max_seq_len,
            seq_lengths=lengths,
            seq_offsets=offsets,
            seq_timestamps=timestamps,
            seq_embeddings=embeddings,
            num_targets=num_targets,
        )
        full, candidates = self._postprocess(
            max_seq_len=max_seq_len,
            max_uih_len=max_uih_len,
            max_targets=max_targets,
            total_uih_len=total_uih_len,
            total_targets=total_targets,
            seq_lengths=lengths,
            seq_timestamps=timestamps,
            seq_embeddings=encoded,
            num_targets=num_targets,
            seq_payloads=payloads,
        )
        if not self._is_inference:
            candidates = candidates.to(dtype)
            full = None if full is None else full.to(dtype)
        return candidates, full
