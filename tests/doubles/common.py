"""Base class and kernel choice of the host's modules."""

from __future__ import annotations

import abc
from enum import Enum
from typing import Any

import torch


class HammerKernel(Enum):
    TRITON = "TRITON"
    TLX = "TLX"
    PYTORCH = "PYTORCH"
    CUDA = "CUDA"
    TRITON_CC = "TRITON_CC"
    CUTEDSL = "CUTEDSL"


class HammerModule(torch.nn.Module, abc.ABC):
    """Like the host's, the kernel is a GPU one until `set_hammer_kernel(HammerKernel.PYTORCH)` is called."""

    def __init__(
        self,
        is_inference: bool,
        training_dytpe: torch.dtype = torch.float32,
        use_triton_cc: bool = True,
        hammer_kernel: HammerKernel | None = None,
    ) -> None:
        super().__init__()
        self._is_inference = is_inference
        self._training_dtype = training_dytpe
        self._use_triton_cc = use_triton_cc
        self._hammer_kernel = hammer_kernel

    def hammer_kernel(self) -> HammerKernel:
        if self._hammer_kernel is not None:
            return self._hammer_kernel
        return HammerKernel.TRITON_CC if self._is_inference and self._use_triton_cc else HammerKernel.TRITON

    def recursive_setattr(self, name: str, value: Any) -> None:
        for module in self.modules():
            if hasattr(module, name):
                setattr(module, name, value)

    def set_use_triton_cc(self, use_triton_cc: bool) -> None:
        self.recursive_setattr("_use_triton_cc", use_triton_cc)

    def set_is_inference(self, is_inference: bool) -> None:
        self.recursive_setattr("_is_inference", is_inference)

    def set_training_dtype(self, training_dtype: torch.dtype) -> None:
        self.recursive_setattr("_training_dtype", training_dtype)

    def set_hammer_kernel(self, hammer_kernel: HammerKernel) -> None:
        self.recursive_setattr("_hammer_kernel", hammer_kernel)

    @property
    def is_inference(self) -> bool:
        return self._is_inference

    @property
    def is_eval(self) -> bool:
        return not self._is_inference and not self.training

    @property
    def is_train(self) -> bool:
        return not self._is_inference and self.training


def require_pytorch(kernel: HammerKernel) -> None:
    """Raises where the host would look for a GPU."""
    if kernel is not HammerKernel.PYTORCH:
        raise AssertionError(f"{kernel} needs a GPU; call set_hammer_kernel(HammerKernel.PYTORCH)")
