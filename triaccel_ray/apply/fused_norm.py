"""A batch normalization with the residual sum and activation after it, as one module."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from triaccel_ray.apply.trace import is_plain
from triaccel_ray.kernels.batch_norm_act import RunningStatistics, batch_norm_act, recomputer
from triaccel_ray.kernels.batch_norm_act.api import DTYPES
from triaccel_ray.kernels.batch_norm_act.reference import Activation

_HAS_TRITON = importlib.util.find_spec("triton") is not None
_MIN_CAPABILITY = (8, 0)
"""Lowest compute capability that Triton compiles for."""


class FusedNorm(nn.Module):
    """Computes activate(combine(norm(x), residual)), by a fused kernel if it applies.

    The kernel applies in training mode on a GPU, to 4-dimensional FP32, FP16 and BF16 tensors in channels_last memory.
    The norm must have weight, bias, moving averages and a momentum. Otherwise the original modules are called. If only
    the memory format rules out the kernel, `refused_because` says so.
    """

    def __init__(
        self,
        norm: nn.BatchNorm2d,
        combine: Callable[[Any, Any], Any] | None,
        activate: Callable[[Tensor], Tensor] | None,
        activation: Activation,
    ) -> None:
        """Shares `norm`, and `activate` if it is a module; `activation` is the kernel's name for `activate`."""
        super().__init__()
        self.norm, self.activate = norm, activate
        self._combine, self._activation = combine, activation
        self.output_dtype: torch.dtype | None = None
        """Dtype of the output, the same for all readers; None for that of the original modules."""
        self.keeps_dtype = False
        """Whether the sum has the dtype of x regardless of the residual's, as with `+=`."""
        self.forked = False
        """Whether the output is returned twice, for two readers."""
        self.following: tuple[nn.Module, ...] = ()
        """Layers that read the output, directly or through pooling, flattening and identities."""
        self.has_other_readers = False
        """Whether anything besides these layers and residual sums of fused norms reads the output."""
        self.refused_because = ""
        """Why the memory format of an argument ruled out the kernel, the first time; empty if it never did."""

    def forward(self, x: Any, residual: Any = None) -> Any:
        """Returns the output, twice if forked; `residual` is given exactly if there is a sum."""
        dtype = self._kernel_dtype(x, residual)
        if dtype is None:
            y = self._as_original(x, residual)
            return (y, y) if self.forked else y
        norm = self.norm
        running = RunningStatistics(
            mean=cast(Tensor, norm.running_mean),
            var=cast(Tensor, norm.running_var),
            num_batches=norm.num_batches_tracked,
            momentum=cast(float, norm.momentum),
        )
        return batch_norm_act(
            x, norm.weight, norm.bias, running, eps=norm.eps, activation=self._activation, residual=residual,
            output_dtype=dtype, forked=self.forked,
        )  # fmt: skip

    def _as_original(self, x: Any, residual: Any) -> Any:
        y: Any = self.norm(x)
        if self._combine is not None:
            y = self._combine(y, residual)
        if self.activate is not None:
            y = self.activate(y)
        return y if self.output_dtype is None else y.to(self.output_dtype)

    def _kernel_dtype(self, x: Any, residual: Any) -> torch.dtype | None:
        """Returns the output's dtype; None if the kernel does not apply to these arguments."""
        norm = self.norm
        needed = (norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.momentum)
        is_hooked = not is_plain(norm) or (isinstance(self.activate, nn.Module) and not is_plain(self.activate))
        if not norm.training or is_hooked or any(each is None for each in needed):
            return None
        if not is_kernel_input(x) or x.numel() <= x.shape[1]:  # one value per channel has no variance
            return None
        dtype: torch.dtype = x.dtype
        if self._combine is not None:
            if not (is_kernel_input(residual) and residual.shape == x.shape and residual.device == x.device):
                return None
            dtype = x.dtype if self.keeps_dtype else torch.promote_types(x.dtype, residual.dtype)
        dtype = self.output_dtype or dtype
        if dtype not in DTYPES or norm.weight.device != x.device:
            return None
        refusal = format_refusal(x, residual)
        self.refused_because = self.refused_because or refusal
        return None if refusal else dtype


class RecomputedInput(nn.Module):
    """Calls the only reader of a fused norm's output without saving that output for the backward pass.

    The kernels recompute the output, bit for bit, from tensors that the norm saves anyway. This costs one pass over
    memory and frees an activation (compare Rota Bulò et al. 2018, In-Place Activated BatchNorm).
    """

    def __init__(self, layer: nn.Module) -> None:
        """Shares `layer`."""
        super().__init__()
        self.layer = layer
        self.keeps_input = False
        """Whether the layer saves its input as usual."""

    def forward(self, y: Tensor) -> Any:
        """Returns the layer's output for y, the output of a fused norm."""
        recompute = None if self.keeps_input else recomputer(y)
        if recompute is None:
            return self.layer(y)
        memory = y.data_ptr(), y.shape, y.stride(), y.dtype

        def pack(saved: Tensor) -> Any:
            is_input = (saved.data_ptr(), saved.shape, saved.stride(), saved.dtype) == memory
            return recompute if is_input else saved

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            return self.layer(y)


def _unpack(kept: Any) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept()


def is_kernel_input(value: Any) -> bool:
    """Returns whether the kernels over pixels and channels can read `value`, apart from its memory format."""
    return (
        _HAS_TRITON
        and isinstance(value, Tensor)
        and value.is_cuda
        and value.dim() == 4
        and value.dtype in DTYPES
        and not torch._C._are_functorch_transforms_active()  # private: kernels have no rules for `torch.func`
        and torch.cuda.get_device_capability(value.device) >= _MIN_CAPABILITY
    )


def format_refusal(x: Tensor, residual: Tensor | None) -> str:
    """Returns why the kernel cannot read these tensors, and what to do about it; empty if it can."""
    for tensor in (x, residual):
        if tensor is not None and not tensor.is_contiguous(memory_format=torch.channels_last):
            return (
                f"activations of shape {tuple(tensor.shape)} have strides {tensor.stride()}: the kernel needs "
                "channels_last; keep activations in that memory format"
            )
    return ""
