"""The attention layers."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch

from tests.doubles.common import HammerModule
from tests.doubles.hstu_compute import hstu_compute_output, hstu_preprocess_and_attention


class STU(HammerModule, abc.ABC):
    def cached_forward(
        self,
        delta_x: torch.Tensor,
        num_targets: torch.Tensor,
        max_kv_caching_len: int = 0,
        kv_caching_lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        raise NotImplementedError("the host's own cache is not part of the doubles")

    @abc.abstractmethod
    def forward(
        self,
        x: torch.Tensor,
        x_lengths: torch.Tensor,
        x_offsets: torch.Tensor,
        max_seq_len: int,
        num_targets: torch.Tensor,
        max_kv_caching_len: int = 0,
        kv_caching_lengths: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


@dataclass
class STULayerConfig:
    embedding_dim: int
    num_heads: int
    hidden_dim: int
    attention_dim: int
    output_dropout_ratio: float = 0.3
    causal: bool = True
    target_aware: bool = True
    max_attn_len: int | None = None
    attn_alpha: float | None = None
    use_group_norm: bool = False
    recompute_normed_x: bool = True
    recompute_uvqk: bool = True
    recompute_y: bool = True
    sort_by_length: bool = True
    contextual_seq_len: int = 0


class STULayer(STU):
    def __init__(self, config: STULayerConfig, is_inference: bool = False) -> None:
        super().__init__(is_inference=is_inference)
        self.reset_kv_cache()
        self._num_heads = config.num_heads
        self._embedding_dim = config.embedding_dim
        self._hidden_dim = config.hidden_dim
        self._attention_dim = config.attention_dim
        self._output_dropout_ratio = config.output_dropout_ratio
        self._target_aware = config.target_aware
        self._causal = config.causal
        self._max_attn_len = config.max_attn_len or 0
        self._attn_alpha = config.attn_alpha or config.attention_dim**-0.5
        self._use_group_norm = config.use_group_norm
        self._recompute_normed_x = config.recompute_normed_x
        self._recompute_uvqk = config.recompute_uvqk
        self._recompute_y = config.recompute_y
        self._sort_by_length = config.sort_by_length
        self._contextual_seq_len = config.contextual_seq_len

        width = config.embedding_dim
        rows = 2 * (config.hidden_dim + config.attention_dim) * config.num_heads
        v_row = config.hidden_dim * config.num_heads
        norm = config.num_heads if config.use_group_norm else v_row
        self._uvqk_weight = torch.nn.Parameter(torch.empty(width, rows))
        self._uvqk_beta = torch.nn.Parameter(torch.zeros(rows))
        self._input_norm_weight = torch.nn.Parameter(torch.ones(width))
        self._input_norm_bias = torch.nn.Parameter(torch.zeros(width))
        self._output_weight = torch.nn.Parameter(torch.empty(3 * v_row, width))
        self._output_norm_weight = torch.nn.Parameter(torch.ones(norm))
        self._output_norm_bias = torch.nn.Parameter(torch.zeros(norm))
        for weight in (self._uvqk_weight, self._output_weight):
            torch.nn.init.xavier_uniform_(weight)

    def reset_kv_cache(self) -> None:
        self.k_cache: torch.Tensor | None = None
        self.v_cache: torch.Tensor | None = None
        self.kv_caching_offsets: torch.Tensor | None = None
        self.max_kv_caching_len = 0

    def forward(
        self,
        x: torch.Tensor,
        x_lengths: torch.Tensor,
        x_offsets: torch.Tensor,
        max_seq_len: int,
        num_targets: torch.Tensor,
        max_kv_caching_len: int = 0,
        kv_caching_lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if kv_caching_lengths is not None:
            raise NotImplementedError("the host's own cache is not part of the doubles")
        u, attention, _, _ = hstu_preprocess_and_attention(
            x=x,
            norm_weight=self._input_norm_weight.to(x.dtype),
            norm_bias=self._input_norm_bias.to(x.dtype),
            norm_eps=1e-6,
            num_heads=self._num_heads,
            attn_dim=self._attention_dim,
            hidden_dim=self._hidden_dim,
            uvqk_weight=self._uvqk_weight.to(x.dtype),
            uvqk_bias=self._uvqk_beta.to(x.dtype),
            max_seq_len=max_seq_len,
            seq_offsets=x_offsets,
            attn_alpha=self._attn_alpha,
            causal=self._causal,
            num_targets=num_targets if self._target_aware else None,
            max_attn_len=self._max_attn_len,
            contextual_seq_len=self._contextual_seq_len,
            recompute_uvqk_in_backward=self._recompute_uvqk,
            recompute_normed_x_in_backward=self._recompute_normed_x,
            sort_by_length=self._sort_by_length,
            kernel=self.hammer_kernel(),
        )
        return hstu_compute_output(
            attn=attention,
            u=u,
            x=x,
            norm_weight=self._output_norm_weight.to(x.dtype),
            norm_bias=self._output_norm_bias.to(x.dtype),
            norm_eps=1e-6,
            output_weight=self._output_weight.to(x.dtype),
            num_heads=self._num_heads,
            linear_dim=self._hidden_dim,
            dropout_ratio=self._output_dropout_ratio,
            training=self.training,
            concat_u=True,
            concat_x=True,
            mul_u_activation_type="none",
            group_norm=self._use_group_norm,
            recompute_y_in_backward=self._recompute_y,
            kernel=self.hammer_kernel(),
        )


class STUStack(STU):
    def __init__(self, stu_list: list[STU], is_inference: bool = False) -> None:
        super().__init__(is_inference=is_inference)
        self._stu_layers = torch.nn.ModuleList(stu_list)

    def forward(
        self,
        x: torch.Tensor,
        x_lengths: torch.Tensor,
        x_offsets: torch.Tensor,
        max_seq_len: int,
        num_targets: torch.Tensor,
        max_kv_caching_len: int = 0,
        kv_caching_lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        for layer in self._stu_layers:
            x = layer(
                x=x,
                x_lengths=x_lengths,
                x_offsets=x_offsets,
                max_seq_len=max_seq_len,
                num_targets=num_targets,
                max_kv_caching_len=max_kv_caching_len,
                kv_caching_lengths=kv_caching_lengths,
            )
        return x
