"""The parts of a model, found by type; what is not understood is refused."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mtserve_plugin.errors import AttachError
from mtserve_plugin.integrations.generative_recommenders.host import Host, class_chain
from mtserve_plugin.positions import AppendStablePositionalEncoder

_SPLIT = "HSTUSparseInferenceModule"


@dataclass(frozen=True)
class Parts:
    """Modules of one model.

    Attributes:
        root: what was attached: `dlrm`, `transducer` or `stack`.
        sparse: the `DlrmHSTU` whose `preprocess` is called; `dlrm` itself unless the model is split in two.
        encoder: of positions and times.
    """

    root: nn.Module
    dlrm: nn.Module | None
    sparse: nn.Module | None
    transducer: nn.Module | None
    preprocessor: nn.Module | None
    encoder: nn.Module | None
    postprocessor: nn.Module | None
    stack: nn.Module
    layers: tuple[nn.Module, ...]

    @property
    def context_rows(self) -> int:
        """Context rows that the model puts in front of every history."""
        return int(getattr(self.preprocessor, "_max_contextual_seq_len", 0))

    def replaced(self) -> Iterator[nn.Module]:
        """Every module whose class may change."""
        for part in (self.dlrm, self.transducer, self.encoder, self.stack, *self.layers):
            if part is not None:
                yield part
        if self.sparse is not None and self.sparse is not self.dlrm:
            yield self.sparse

    def weights(self) -> list[nn.Module]:
        """Modules on whose weights a history's keys and values depend."""
        tables = getattr(self.sparse, "_embedding_collection", None)
        return [part for part in (tables, self.preprocessor, self.encoder, self.stack) if part is not None]


def find_parts(model: nn.Module, host: Host, sparse: nn.Module | None = None, *, need_tables: bool = True) -> Parts:
    """Args:
        sparse: as for `attach`.
        need_tables: refuse the dense half of a split model without the other one.

    Raises:
        AttachError: the model is of another shape than those that are known.
    """
    root = find_root(model, host)
    dlrm = root if isinstance(root, host.DlrmHSTU) else None
    feeding = _sparse_of(dlrm, sparse, host, need_tables)
    transducer: nn.Module | None = None
    if dlrm is not None:
        transducer = _only(dlrm, host.HSTUTransducer)
    elif not isinstance(root, host.STUStack):
        transducer = root
    roles: dict[str, nn.Module | None] = dict.fromkeys(("preprocessor", "encoder", "postprocessor", "stack"))
    if transducer is None:
        roles["stack"] = root
    else:
        _assign_roles(transducer, host, roles)
    stack = roles["stack"]
    assert stack is not None
    parts = Parts(
        root=root,
        dlrm=dlrm,
        sparse=feeding,
        transducer=transducer,
        preprocessor=roles["preprocessor"],
        encoder=roles["encoder"],
        postprocessor=roles["postprocessor"],
        stack=stack,
        layers=_layers_of(stack, host),
    )
    for part in parts.replaced():
        _check_own_methods(part, host)
    return parts


def find_root(model: nn.Module, host: Host) -> nn.Module:
    """The outermost known module in `model`.

    Raises:
        AttachError: there is none, there are several, or what stands around it is compiled.
    """
    for module in model.modules():
        compiled = _compiled_by(module)
        if compiled:
            raise AttachError(
                f"compiled: {type(module).__name__} is made by {compiled}, which fixes the code of the "
                "forward; what is "
                "changed in the modules afterwards has no effect, or half of it. Attach the eager model",
                ("compiled",),
            )
    if type(model).__name__ == _SPLIT:
        raise AttachError(
            f"split: {_SPLIT} holds a whole model but calls its preprocess alone. Attach the model whose "
            "main_forward is "
            "called, and name this one: attach(dense_model, cache, sparse=this_module, ...)",
            ("split",),
        )
    for kind in host.kinds():
        found = [module for module in model.modules() if isinstance(module, kind)]
        if len(found) == 1:
            return found[0]
        if found:
            raise _unknown(type(model).__name__, f"holds {len(found)} {kind.__name__}; attach each by itself")
    known = ", ".join(kind.__name__ for kind in host.kinds())
    raise _unknown(type(model).__name__, f"holds none of the known modules: {known}")


def _compiled_by(module: nn.Module) -> str:
    if isinstance(module, torch.jit.ScriptModule):
        return "torch.jit"
    if isinstance(module, torch.fx.GraphModule):
        return "torch.fx"
    if type(module).__name__ == "OptimizedModule":
        return "torch.compile"
    return ""


def _sparse_of(dlrm: nn.Module | None, sparse: nn.Module | None, host: Host, need_tables: bool) -> nn.Module | None:
    if dlrm is None:
        if sparse is not None:
            raise AttachError("split: sparse= belongs to a DlrmHSTU; leave it out", ("split",))
        return None
    if sparse is None:
        feeding = dlrm
    else:
        found = [module for module in sparse.modules() if isinstance(module, host.DlrmHSTU)]
        if len(found) != 1:
            raise _unknown(f"sparse={type(sparse).__name__}", f"holds {len(found)} DlrmHSTU; it must hold one")
        feeding = found[0]
    if need_tables and getattr(feeding, "_embedding_collection", None) is None:
        raise AttachError(
            "split: this DlrmHSTU is the dense half (is_dense=True) and has no embedding tables, so that "
            "nothing can be "
            "stripped before the lookup. Name the half that looks them up: attach(model, cache, sparse=..., "
            "...)",
            ("split",),
        )
    return feeding


def _only(owner: nn.Module, kind: type) -> nn.Module:
    found = [child for child in owner.children() if isinstance(child, kind)]
    if len(found) != 1:
        raise _unknown(type(owner).__name__, f"has {len(found)} {kind.__name__} among its children; one is expected")
    return found[0]


def _assign_roles(transducer: nn.Module, host: Host, roles: dict[str, nn.Module | None]) -> None:
    kinds: dict[str, tuple[type, ...]] = {
        "stack": (host.STU,),
        "preprocessor": (host.InputPreprocessor,),
        "postprocessor": (host.OutputPostprocessor,),
        "encoder": (host.HSTUPositionalEncoder, AppendStablePositionalEncoder),
    }
    for name, child in transducer.named_children():
        role = next((role for role, kind in kinds.items() if isinstance(child, kind)), None)
        if role is None or roles[role] is not None:
            raise _unknown(
                f"{type(transducer).__name__}.{name}",
                f"is {type(child).__name__}; whether a prefix of the history keeps its keys and values under "
                "it is not "
                "known",
            )
        roles[role] = child
    if not isinstance(roles["stack"], host.STUStack):
        raise _unknown(type(transducer).__name__, f"runs {type(roles['stack']).__name__} where a STUStack is expected")


def _layers_of(stack: nn.Module, host: Host) -> tuple[nn.Module, ...]:
    lists = list(stack.children())
    if len(lists) != 1 or not isinstance(lists[0], nn.ModuleList) or len(lists[0]) == 0:
        raise _unknown(type(stack).__name__, "is expected to hold one list of layers")
    layers = []
    for index, layer in enumerate(lists[0]):
        if type(layer) is host.SDSTU:
            # Stochastic depth is the identity around its layer in eval mode.
            layer = _only(layer, host.STU)
        if not isinstance(layer, host.STULayer):
            raise AttachError(
                f"layer {index}: {type(layer).__name__} is not a STULayer. {_why_not(layer, host)}",
                ("layer type",),
            )
        layers.append(layer)
    if len(set(map(id, layers))) != len(layers):
        raise _unknown(type(stack).__name__, "holds the same layer twice")
    return tuple(layers)


def _why_not(layer: nn.Module, host: Host) -> str:
    if type(layer).__name__ == "L2STU":
        return (
            "It runs on the newest tokens only and leaves the older ones as they are, so that every append "
            "changes "
            "which tokens are which, and old keys and values with them (measured: 0.7). Use plain STULayers"
        )
    if isinstance(layer, host.DynamicSTU):
        return "It changes rows or lengths between layers, which was not measured. Use plain STULayers"
    return "What its keys and values depend on is not known. Use plain STULayers"


def _check_own_methods(part: nn.Module, host: Host) -> None:
    """Refuses subclasses and instances that bring methods of their own where a known one is replaced."""
    kinds = (*host.kinds(), host.STULayer, host.HSTUPositionalEncoder, AppendStablePositionalEncoder)
    kind = next(kind for kind in kinds if isinstance(part, kind))
    known = {name for cls in kind.__mro__ if cls is not nn.Module for name in vars(cls)} | {"__call__"}
    known -= set(vars(object)) | {"__module__", "__annotations__", "__parameters__"}
    for cls in class_chain(part, kind):
        own = sorted(name for name, value in vars(cls).items() if name in known and _is_code(value))
        if own:
            raise _unknown(cls.__name__, f"overrides {kind.__name__}.{own[0]}")
    patched = sorted(name for name, value in vars(part).items() if name in known and callable(value))
    if patched:
        raise _unknown(type(part).__name__, f"has its {patched[0]} replaced on the instance")


def _is_code(value: Any) -> bool:
    return inspect.isroutine(value) or isinstance(value, property | classmethod | staticmethod)


def _unknown(where: str, what: str) -> AttachError:
    return AttachError(
        f"shape: {where} {what}. Only what is known to keep a prefix's keys and values can be cached. Attach "
        "the part of "
        "the model that is known, or call the cache by hand with batch.attend(...)",
        ("shape",),
    )
