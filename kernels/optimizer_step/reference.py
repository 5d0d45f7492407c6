"""Optimizer steps in plain PyTorch, tensor by tensor: the specification of the kernels, also used on CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triaccel_ray.kernels.eight_bits import decode, encode
from triaccel_ray.kernels.split_words import join, split

Tensors = Sequence[Tensor | None]


@dataclass(frozen=True)
class Scalars:
    """Scalars that apply to a whole step, fp32 on the parameters' device."""

    lr_factor: Tensor
    """Multiplies every learning rate."""
    loss_scale: Tensor
    """The factor that gradients carry."""
    found_nonfinite: Tensor
    """If not 0, the step is skipped: nothing is written."""


def sgd(
    parameters: Tensors, gradients: Tensors, momenta: Tensors, companions: Tensors, *, rows: Tensor, by: Scalars
) -> None:
    """Steps like torch.optim.SGD with dampening 0.

    g <- g + weight_decay p; m <- momentum m + g; p <- p - lr m, or p - lr (g + momentum m) with Nesterov. `rows` hold
    lr, weight decay, momentum and Nesterov's flag.
    """
    if by.found_nonfinite:
        return
    for index, (stored, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        if stored is None or gradient is None:
            continue
        parameter = _read(stored, companions[index])
        lr, weight_decay, momentum, nesterov = rows[:, index]
        direction = gradient.float() / by.loss_scale + weight_decay * parameter
        stored_buffer = momenta[index]
        if stored_buffer is not None:
            buffer = _read_state(stored_buffer, parameter, signed=True)
            buffer.mul_(momentum).add_(direction)
            direction = direction + momentum * buffer if nesterov else buffer
            _write_state(stored_buffer, buffer)
        parameter.sub_(lr * by.lr_factor * direction)
        _write(stored, companions[index], parameter)


def adamw(
    parameters: Tensors,
    gradients: Tensors,
    means: Tensors,
    squares: Tensors,
    steps: Tensors,
    companions: Tensors,
    *,
    rows: Tensor,
    by: Scalars,
) -> None:
    """Steps like torch.optim.AdamW or Adam; `means` and `squares` are its exp_avg and exp_avg_sq.

    Loshchilov and Hutter 2019, Algorithm 2. `rows` hold lr, weight decay, beta1, 1 - beta1, log beta1, the same for
    beta2, eps and the flag of decoupled weight decay.
    """
    if by.found_nonfinite:
        return
    for index, (stored, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        mean, square, step = means[index], squares[index], steps[index]
        if stored is None or gradient is None or mean is None or square is None or step is None:
            continue
        parameter = _read(stored, companions[index])
        first = _read_state(mean, parameter, signed=True)
        second = _read_state(square, parameter, signed=False)
        lr, weight_decay, _, rate1, log_beta1, beta2, rate2, log_beta2, eps, decoupled = rows[:, index]
        lr = lr * by.lr_factor
        step += 1
        scaled = gradient.float() / by.loss_scale
        if decoupled:
            parameter.mul_(1.0 - lr * weight_decay)
        else:
            scaled = scaled + weight_decay * parameter
        first.lerp_(scaled, rate1)
        second.mul_(beta2).add_(rate2 * scaled.square())
        correction1 = -torch.expm1(step.double() * log_beta1.double())  # 1 - beta1^step
        correction2 = -torch.expm1(step.double() * log_beta2.double())
        denominator = second.sqrt() / correction2.sqrt().float() + eps
        parameter.sub_((lr / correction1).float() * first / denominator)
        _write_state(mean, first)
        _write_state(square, second, step)
        _write(stored, companions[index], parameter)


def _read(stored: Tensor, companion: Tensor | None) -> Tensor:
    """Returns the parameter in fp32: itself, or its words joined."""
    return stored if companion is None or companion.dtype is not torch.int16 else join(stored, companion)


def _write(stored: Tensor, companion: Tensor | None, parameter: Tensor) -> None:
    """Stores the new value, as words if the parameter is split, otherwise in its copy: it was stepped in place."""
    if companion is not None and companion.dtype is torch.int16:
        high, low = split(parameter)
        stored.copy_(high)
        companion.copy_(low)
    elif companion is not None:
        companion.copy_(parameter)


def _read_state(stored: Tensor, parameter: Tensor, *, signed: bool) -> Tensor:
    """Returns the state in fp32, in its parameter's memory layout: itself, or its codes decoded."""
    if stored.dtype is not torch.uint8:
        return stored
    numbers = decode(stored, parameter.numel(), signed=signed)
    return numbers.as_strided(parameter.shape, parameter.stride())


def _write_state(stored: Tensor, state: Tensor, step: Tensor | None = None) -> None:
    """Stores the new state, encoded if it is kept in 8 bits: as unsigned codes if a `step` is given."""
    if stored.dtype is torch.uint8:
        stored.copy_(encode(state.as_strided((state.numel(),), (1,)), step))
