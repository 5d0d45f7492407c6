"""Fused batch normalization as a differentiable function that launches the kernels."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from triaccel_ray.kernels.batch_norm_act import triton as kernels
from triaccel_ray.kernels.batch_norm_act.reference import Activation, RunningStatistics


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Launch parameters of one kind of kernel."""

    tile: int
    """Elements that a program processes at a time."""
    num_warps: int
    per_multiprocessor: int
    """Programs to launch per multiprocessor."""
    num_stages: int
    """Pipeline stages: tiles in flight from memory. 1 means no prefetching."""


# Measured on an H200 over the norms of ResNet-18 and EfficientNet-B0. Reductions and exponentials leave few registers,
# so they prefetch through shared memory; the others keep more loads in flight with more warps.
REDUCING = Shape(tile=2048, num_warps=4, per_multiprocessor=4, num_stages=3)
APPLYING = Shape(tile=2048, num_warps=8, per_multiprocessor=4, num_stages=1)
APPLYING_EXPONENTIALS = Shape(tile=2048, num_warps=4, per_multiprocessor=8, num_stages=3)
_FINISHING_CHANNELS, _FINISHING_PARTS = 8, 256
"""Block read from the table of partial results: 32 bytes wide, and as long as most tables."""
_INTERPRETED_MULTIPROCESSORS = 2
"""Number assumed when Triton interprets kernels on a CPU, which takes a millisecond per program."""


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
    Matrix(x).apply(kernels.normalize, x, residual, y, mean, rstd, weight, bias, activation=call.activation)
    return y


class _BatchNormAct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None) -> Any:
        mean, rstd = Matrix(x).statistics(call)
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
        matrix, per_channel = Matrix(x), (mean, rstd, weight, bias)
        # The residual's gradient is dz. If the first pass writes it, the second need not read what dz is computed from.
        writes_dz = residual_dtype is not None and (activation != "none" or fork is not None)
        dz = torch.empty_like(dy) if writes_dz else None
        tensors = (dy, fork, x, kept, dz)
        dweight, dbias = matrix.gradient_sums(tensors, per_channel, activation)
        if dz is not None:
            activation, dy, fork, kept = "none", dz, None, None
        dresidual = None
        if residual_dtype is not None:
            dresidual = dy if dy.dtype is residual_dtype else torch.empty_like(dy, dtype=residual_dtype)
        dx = torch.empty_like(x)
        matrix.apply(
            kernels.gradient, dy, fork, x, kept, dx, None if dresidual is dy else dresidual, *per_channel,
            dweight, dbias, activation=activation,
        )  # fmt: skip
        return None, dx, dweight.to(weight.dtype), dbias.to(bias.dtype), dresidual


class Matrix:
    """Launches kernels on x as a matrix of pixels (rows) and channels, divided among programs."""

    def __init__(self, x: Tensor, num_matrices: int = 1) -> None:
        """Divides x [n, c, h, w] in channels_last memory into `num_matrices` matrices of rows, each among programs."""
        self._x = x
        self._num_channels = x.shape[1]
        self._unit = math.gcd(self._num_channels, 8)
        self._num_matrices = num_matrices
        self._num_rows = x.numel() // self._num_channels // num_matrices
        # 32 channels are 64 bytes of a pixel in half precision, the least that memory transfers. More leave lanes idle
        # for 96 or 144 channels and lengthen the table of partial results, for 2% more speed on large maps of 64.
        self._block_channels = 16 if self._num_channels <= 16 else 32
        _, self.num_parts = self._grid(REDUCING)
        """Programs that share a matrix's rows in a reduction, and so the number of partial results."""
        early = can_start_early(x.device)
        # Fusion of multiply-adds is set explicitly: Triton warns about its default, which 3.10 turns off.
        self._launching = {"EARLY": early, "enable_fp_fusion": True, **({"launch_pdl": True} if early else {})}

    def statistics(self, call: Call) -> tuple[Tensor, Tensor]:
        """Returns the channels' mean and reciprocal standard deviation, fp32 [C]; updates the running statistics."""
        partials, running = self._partials(), call.running
        mean, rstd = self._per_channel(), self._per_channel()
        self.start(kernels.statistics, REDUCING, self._x, partials)
        self._finish(
            kernels.finish_statistics, partials, mean, rstd, running.mean, running.var, running.num_batches,
            tile_rows=REDUCING.tile // self._block_channels, num_rows=self._num_rows,
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
        return torch.empty(self._num_channels, dtype=torch.float32, device=self._x.device)

    def _partials(self) -> Tensor:
        shape = (2, self.num_parts, self._num_channels)
        return torch.empty(shape, dtype=torch.float32, device=self._x.device)

    def _grid(self, shape: Shape) -> tuple[int, int]:
        """Returns the number of programs along channels, the fastest axis, and along rows; each has at least one tile.

        In a block of channels, program i of n takes tiles i, i + n, i + 2 n, ... of the rows. There is no autotuning.
        """
        num_blocks = _ceil(self._num_channels, self._block_channels)
        num_tiles = _ceil(self._num_rows, shape.tile // self._block_channels)
        multiprocessors = _ceil(num_multiprocessors(self._x.device), self._num_matrices)
        return num_blocks, min(num_tiles, max(1, shape.per_multiprocessor * multiprocessors // num_blocks))

    def start(self, kernel: Any, shape: Shape, *tensors: Tensor | float | None, **constants: Any) -> None:
        """Launches a kernel with the matrices along the grid's third axis."""
        with torch.cuda.device_of(self._x):  # triton launches on the current device, not on that of the tensors
            kernel[(*self._grid(shape), self._num_matrices)](
                *tensors,
                num_rows=self._num_rows,
                channel_units=self._num_channels // self._unit,
                UNIT=self._unit,
                BLOCK_ROWS=shape.tile // self._block_channels,
                BLOCK_CHANNELS=self._block_channels,
                STAGES=shape.num_stages,
                num_warps=shape.num_warps,
                **self._launching,
                **constants,
            )

    def _finish(self, kernel: Any, *tensors: Tensor | None, **sizes: Any) -> None:
        with torch.cuda.device_of(self._x):
            kernel[(_ceil(self._num_channels, _FINISHING_CHANNELS),)](
                *tensors,
                num_parts=self.num_parts,
                channel_units=self._num_channels // self._unit,
                UNIT=self._unit,
                BLOCK_PARTS=_FINISHING_PARTS,
                BLOCK_CHANNELS=_FINISHING_CHANNELS,
                **self._launching,
                **sizes,
            )


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Returns the number of multiprocessors that work is divided among."""
    if device.type != "cuda":
        return _INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def can_start_early(device: torch.device) -> bool:
    """Returns whether a kernel can start while its predecessor ends (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _ceil(value: int, divisor: int) -> int:
    return -(-value // divisor)
