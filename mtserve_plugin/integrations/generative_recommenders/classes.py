"""What the attached modules do instead: one mixin per known class, put in front of the module's own class."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mtserve_plugin.errors import AttachError, CacheError
from mtserve_plugin.integrations.generative_recommenders import run as runs
from mtserve_plugin.integrations.generative_recommenders.run import BOUNDARY, Run, entered
from mtserve_plugin.positions import add_embeddings

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from mtserve_plugin.integrations.generative_recommenders.host import Host
    from mtserve_plugin.integrations.generative_recommenders.state import State

# Where an attached model's root (and the other half of a split one) holds its state.
STATE = "_mtserve_state"

_LEAST_ROWS = 8


class Attached:
    """Marks a generated class."""

    _mtserve_base: type
    _mtserve_host: Host


class CachedLayer(Attached):
    """`STULayer`: projections, attention over pages and new rows, output."""

    def forward(
        self: Any,
        x: torch.Tensor,
        x_lengths: torch.Tensor,
        x_offsets: torch.Tensor,
        max_seq_len: int,
        num_targets: torch.Tensor,
        max_kv_caching_len: int = 0,
        kv_caching_lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        run = _run_of(self)
        if kv_caching_lengths is not None:
            raise CacheError("kv_caching_lengths asks for the host's own cache; an attached model has no use for it")
        rows = x.shape[0]
        x = _at_least(x)
        u, q, k, v = self._mtserve_host.hstu_compute_uqvk(
            x=x,
            norm_weight=self._input_norm_weight.to(x.dtype),
            norm_bias=self._input_norm_bias.to(x.dtype),
            norm_eps=1e-6,
            num_heads=self._num_heads,
            attn_dim=self._attention_dim,
            hidden_dim=self._hidden_dim,
            uvqk_weight=self._uvqk_weight.to(x.dtype),
            uvqk_bias=self._uvqk_beta.to(x.dtype),
            kernel=self.hammer_kernel(),
        )
        layer = run.next_layer()
        only_targets = run.only_targets(layer)
        attend = run.batch.attend_candidates if only_targets else run.batch.attend
        attention = attend(layer, q[:rows], k[:rows], v[:rows])
        if only_targets:
            u, x = (_at_least(run.batch.candidates_of(one[:rows])) for one in (u, x))
        out = self._mtserve_host.hstu_compute_output(
            attn=_at_least(attention.flatten(1)),
            u=u,
            x=x,
            norm_weight=self._output_norm_weight.to(x.dtype),
            norm_bias=self._output_norm_bias.to(x.dtype),
            norm_eps=1e-6,
            dropout_ratio=self._output_dropout_ratio,
            output_weight=self._output_weight.to(x.dtype),
            group_norm=self._use_group_norm,
            num_heads=self._num_heads,
            linear_dim=self._hidden_dim,
            concat_u=True,
            concat_x=True,
            mul_u_activation_type="none",
            training=self.training,
            kernel=self.hammer_kernel(),
            recompute_y_in_backward=self._recompute_y,
        )
        out = out[: attention.shape[0]]
        return run.batch.at_candidates(out) if only_targets else out


class CachedStack(Attached):
    """`STUStack`: runs the layers on the batch's rows, without the context rows that are cached."""

    def forward(
        self: Any,
        x: torch.Tensor,
        x_lengths: torch.Tensor,
        x_offsets: torch.Tensor,
        max_seq_len: int,
        num_targets: torch.Tensor,
        max_kv_caching_len: int = 0,
        kv_caching_lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        inner = super().forward  # type: ignore[misc]

        def layers(x: torch.Tensor, lengths: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            return inner(
                x=x,
                x_lengths=lengths,
                x_offsets=offsets,
                max_seq_len=max_seq_len,
                num_targets=num_targets,
                max_kv_caching_len=max_kv_caching_len,
                kv_caching_lengths=kv_caching_lengths,
            )

        with _enclosing(self) as run:
            return run.through_layers(x, num_targets, layers)


class AppendStablePositions(Attached):
    """`HSTUPositionalEncoder` or `AppendStablePositionalEncoder`, counting from the start of the whole
    history.
    """

    def forward(
        self: Any,
        max_seq_len: int,
        seq_lengths: torch.Tensor,
        seq_offsets: torch.Tensor,
        seq_timestamps: torch.Tensor,
        seq_embeddings: torch.Tensor,
        num_targets: torch.Tensor | None,
    ) -> torch.Tensor:
        where = _run_of(self).places(seq_timestamps, self._contextual_seq_len)
        times = self._timestamp_embeddings_weight
        edges = self._edges if hasattr(self, "_edges") else _edges(times.shape[0] - 1, str(times.device))
        return add_embeddings(
            seq_embeddings, where.positions, where.gaps, self._position_embeddings_weight, times, edges
        )


class CachedTransducer(Attached):
    """`HSTUTransducer`: takes the enclosing batch when it was attached alone."""

    def forward(
        self: Any,
        max_uih_len: int,
        max_targets: int,
        total_uih_len: int,
        total_targets: int,
        seq_lengths: torch.Tensor,
        seq_embeddings: torch.Tensor,
        seq_timestamps: torch.Tensor,
        num_targets: torch.Tensor,
        seq_payloads: dict[str, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        _check_eval(self)
        with _enclosing(self, (seq_payloads or {}).get(BOUNDARY)) as run:
            run.targets_only = not self._return_full_embeddings
            return super().forward(  # type: ignore[misc]
                max_uih_len=max_uih_len,
                max_targets=max_targets,
                total_uih_len=total_uih_len,
                total_targets=total_targets,
                seq_lengths=seq_lengths,
                seq_embeddings=seq_embeddings,
                seq_timestamps=seq_timestamps,
                num_targets=num_targets,
                seq_payloads=seq_payloads,
            )


class CachedDlrm(Attached):
    """`DlrmHSTU`: begins a batch from the features, strips them, and runs the rest on what is left."""

    def forward(self: Any, uih_features: KeyedJaggedTensor, candidates_features: KeyedJaggedTensor) -> tuple[Any, ...]:
        _check_eval(self)
        state = _state_of(self)
        inner = super().forward  # type: ignore[misc]
        if state.split:
            return inner(uih_features=uih_features, candidates_features=candidates_features)

        def serve(stripped: KeyedJaggedTensor) -> tuple[Any, ...]:
            return inner(uih_features=stripped, candidates_features=candidates_features)

        return state.serve(uih_features, candidates_features, serve)

    def preprocess(
        self: Any, uih_features: KeyedJaggedTensor, candidates_features: KeyedJaggedTensor
    ) -> tuple[Any, ...]:
        state = _state_of(self)
        inner = super().preprocess  # type: ignore[misc]
        if not state.split:
            return inner(uih_features=uih_features, candidates_features=candidates_features)

        def look_up(stripped: KeyedJaggedTensor) -> tuple[Any, ...]:
            return inner(uih_features=stripped, candidates_features=candidates_features)

        return state.begin_split(uih_features, candidates_features, look_up)

    def main_forward(
        self: Any,
        seq_embeddings: dict[str, Any],
        payload_features: dict[str, torch.Tensor],
        max_uih_len: int,
        uih_seq_lengths: torch.Tensor,
        max_num_candidates: int,
        num_candidates: torch.Tensor,
    ) -> tuple[Any, ...]:
        _check_eval(self)
        state = _state_of(self)
        inner = super().main_forward  # type: ignore[misc]
        names = (
            "seq_embeddings",
            "payload_features",
            "max_uih_len",
            "uih_seq_lengths",
            "max_num_candidates",
            "num_candidates",
        )

        def dense(*values: Any) -> tuple[Any, ...]:
            named = dict(zip(names, values, strict=True))
            if torch.is_inference_mode_enabled():
                return inner(**named)
            # Nobody's gradients are wanted here, and without their bookkeeping every operator costs less.
            with torch.inference_mode():
                out = inner(**named)
            return _ordinary(out)

        values = (
            seq_embeddings,
            payload_features,
            max_uih_len,
            uih_seq_lengths,
            max_num_candidates,
            num_candidates,
        )
        if not state.split:
            return dense(*values)
        if self is not state.root:
            raise CacheError("this model is attached as the sparse half of another one: call that one's main_forward")
        return state.finish_split(values, dense)


def _ordinary(value: Any) -> Any:
    """Copies of what inference mode made, which the caller may change in place and use with autograd."""
    if isinstance(value, torch.Tensor):
        return value.clone() if value.is_inference() else value
    if isinstance(value, dict):
        return {key: _ordinary(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        parts = [_ordinary(one) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def attached_class(mixin: type, base: type, host: Host) -> type:
    """A subclass of `base` with its name, whose methods come from `mixin` first."""
    return _attached_class(mixin, base, id(host.hstu_compute_uqvk), host)


_classes: dict[tuple[type, type, int], type] = {}


def _attached_class(mixin: type, base: type, operators: int, host: Host) -> type:
    key = (mixin, base, operators)
    made = _classes.get(key)
    if made is None:
        body = {
            "__module__": base.__module__,
            # Pickling looks it up, fails, and shows it.
            "__qualname__": f"{base.__qualname__} (attached to a cache: detach before pickling)",
            "__doc__": base.__doc__,
            "_mtserve_base": base,
            "_mtserve_host": host,
        }
        made = _classes[key] = types.new_class(
            base.__name__, (mixin, base), exec_body=lambda namespace: namespace.update(body)
        )
    return made


def _at_least(x: torch.Tensor) -> torch.Tensor:
    """`x` with zero rows behind it up to the number from which a matrix product is independent of it.

    For one to three rows MKL sums in another way, three times less exact (7e-7 against 2.5e-7 at 512
    columns), and keys and values from there would stay in the cache.
    """
    missing = _LEAST_ROWS - x.shape[0]
    if missing <= 0 or x.device.type != "cpu":
        return x
    return torch.nn.functional.pad(x, (0, 0, 0, missing))


@cache
def _edges(buckets: int, device: str) -> torch.Tensor:
    from mtserve_plugin.positions import time_bucket_edges

    return time_bucket_edges(buckets).to(device)


def _state_of(module: nn.Module) -> State:
    return vars(module)[STATE]


def _check_eval(module: nn.Module) -> None:
    if module.training:
        raise AttachError(
            f"training: {type(module).__name__} was put into training mode after attach; call model.eval()",
            ("training",),
        )


def _run_of(module: nn.Module) -> Run:
    _check_eval(module)
    run = runs.current_run()
    if run is None:
        raise CacheError(
            f"{type(module).__name__} is attached to a cache and was called outside of a batch; call the "
            "model that was "
            "attached, or detach it first"
        )
    return run


@contextmanager
def _enclosing(module: Any, boundary: torch.Tensor | None = None) -> Iterator[Run]:
    """The current run; for a part that was attached alone, one for the `with cache.batch(...)` around its
    call.
    """
    state = vars(module).get(STATE)
    if state is None:
        yield _run_of(module)
        return
    _check_eval(module)
    with torch.no_grad(), state.enclosing_run(boundary) as run, entered(run):
        yield run
