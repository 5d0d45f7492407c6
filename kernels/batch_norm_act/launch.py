"""Fused batch normalization as a differentiable function that launches the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from triaccel_ray.kernels.batch_norm_act import triton as kernels
from triaccel_ray.kernels.batch_norm_act.reference import Activation, RunningStatistics
from triaccel_ray.kernels.channels_last import APPLYING, APPLYING_EXPONENTIALS, REDUCING, Matrix, ceil_div

_FINISHING_CHANNELS, _FINISHING_PARTS = 8, 256
"""Block read from the table of partial results: 32 bytes wide, and as long as most tables."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """Arguments of one call that have no gradient."""

    running: RunningStatistics
    eps: float
    activation: Activation
    output_dtype: torch.dtype
    forked: bool = False
    """Whether to return the output twice, each with its own gradient."""


def launch(call: Call, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None) -> Tensor | tuple[Tensor, ...]:
    """Returns the output, twice if forked; see `batch_norm_act.api` for the arguments."""
    outputs: Tensor | tuple[Tensor, ...] = _BatchNormAct.apply(call, x, weight, bias, residual)
    return outputs


def _recomputed(node: Any) -> Tensor:
    x, weight, bias, mean, rstd, _ = node.saved_tensors
    return _normalized(node.call, x, weight, bias, mean, rstd, None)


def _normalized(
    call: Call, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, residual: Tensor | None
) -> Tensor:
    y = torch.empty_like(x, dtype=call.output_dtype, memory_format=torch.channels_last)
    _Norm(x).apply(kernels.normalize, x, residual, y, mean, rstd, weight, bias, activation=call.activation)
    return y


class _BatchNormAct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None) -> Any:
        mean, rstd = _Norm(x).statistics(call)
        y = _normalized(call, x, weight, bias, mean, rstd, residual)
        kept = None
        if residual is not None and call.activation != "none":
            kept = y if call.activation == "relu" else residual
        ctx.save_for_backward(x, weight, bias, mean, rstd, kept)
        ctx.call = call
        ctx.recompute = _recomputed if residual is None and not call.forked else None
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.set_materialize_grads(False)
        return (y, y.view_as(y)) if call.forked else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        x, weight, bias, mean, rstd, kept = ctx.saved_tensors
        present = [g.contiguous(memory_format=torch.channels_last) for g in gradients if g is not None]
        if not present:
            return None, None, None, None, None
        dy, fork = present[0], present[1] if len(present) > 1 else None
        activation, residual_dtype = ctx.call.activation, ctx.residual_dtype if ctx.needs_input_grad[4] else None
        norm, per_channel = _Norm(x), (mean, rstd, weight, bias)
        # The residual's gradient is dz. If the first pass writes it, the second need not read what dz is computed from.
        writes_dz = residual_dtype is not None and (activation != "none" or fork is not None)
        dz = torch.empty_like(dy) if writes_dz else None
        tensors = (dy, fork, x, kept, dz)
        dweight, dbias = norm.gradient_sums(tensors, per_channel, activation)
        if dz is not None:
            activation, dy, fork, kept = "none", dz, None, None
        dresidual = None
        if residual_dtype is not None:
            dresidual = dy if dy.dtype is residual_dtype else torch.empty_like(dy, dtype=residual_dtype)
        dx = torch.empty_like(x)
        norm.apply(
            kernels.gradient, dy, fork, x, kept, dx, None if dresidual is dy else dresidual, *per_channel,
            dweight, dbias, activation=activation,
        )  # fmt: skip
        return None, dx, dweight.to(weight.dtype), dbias.to(bias.dtype), dresidual


class _Norm(Matrix):
    """Launches the kernels of fused batch normalization on x."""

    def statistics(self, call: Call) -> tuple[Tensor, Tensor]:
        """Returns the channels' mean and reciprocal standard deviation, fp32 [C]; updates the running statistics."""
        partials, running = self._partials(), call.running
        mean, rstd = self._per_channel(), self._per_channel()
        self.start(kernels.statistics, REDUCING, self.x, partials)
        self._finish(
            kernels.finish_statistics, partials, mean, rstd, running.mean, running.var, running.num_batches,
            tile_rows=REDUCING.tile // self.block_channels, num_rows=self.num_rows,
            momentum=running.momentum, eps=call.eps,
        )  # fmt: skip
        return mean, rstd

    def gradient_sums(
        self, tensors: tuple[Tensor | None, ...], per_channel: tuple[Tensor, ...], activation: Activation
    ) -> tuple[Tensor, Tensor]:
        """Returns the gradients of weight and bias, fp32 [C]."""
        partials, dweight, dbias = self._partials(), self._per_channel(), self._per_channel()
        self.start(kernels.gradient_sums, REDUCING, *tensors, partials, *per_channel, ACTIVATION=activation)
        self._finish(kernels.finish_sums, partials, dweight, dbias)
        return dweight, dbias

    def apply(self, kernel: Any, *tensors: Tensor | None, activation: Activation) -> None:
        """Launches a kernel that writes tensors of x's shape."""
        shape = APPLYING_EXPONENTIALS if activation == "silu" else APPLYING
        self.start(kernel, shape, *tensors, ACTIVATION=activation)

    def _per_channel(self) -> Tensor:
        return torch.empty(self.num_channels, dtype=torch.float32, device=self.x.device)

    def _partials(self) -> Tensor:
        return torch.empty((2, self.num_parts, self.num_channels), dtype=torch.float32, device=self.x.device)

    def _finish(self, kernel: Any, *tensors: Tensor | None, **sizes: Any) -> None:
        with torch.cuda.device_of(self.x):
            kernel[(ceil_div(self.num_channels, _FINISHING_CHANNELS),)](
                *tensors,
                num_parts=self.num_parts,
                BLOCK_PARTS=_FINISHING_PARTS,
                BLOCK_CHANNELS=_FINISHING_CHANNELS,
                **self.arguments,
                **sizes,
            )
