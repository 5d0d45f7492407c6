"""Steps SGD, Adam and AdamW in one kernel launch over all parameters, their state and low-precision copies."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from triaccel_ray.kernels.eight_bits import decode, encode, num_bytes
from triaccel_ray.kernels.multi_tensor import TensorTable, have_equal_dense_strides
from triaccel_ray.kernels.optimizer_step.api import AdamWStep, SgdStep
from triaccel_ray.model.gradients import Gradients

_STATE = {
    torch.optim.SGD: ("momentum_buffer",),
    torch.optim.Adam: ("exp_avg", "exp_avg_sq", "step"),
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq", "step"),
}
_UNSIGNED = "exp_avg_sq"
MIN_ELEMENTS_IN_CODES = 4096
"""Smallest number of elements of a parameter with state in 8 bits: state of smaller ones takes little memory."""


def is_supported(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether `FusedOptimizer` can step `optimizer`: the kernels support it and its parameters are on a GPU."""
    on_gpu = all(p.is_cuda for group in optimizer.param_groups for p in group["params"])
    return on_gpu and not without_kernel_because(optimizer)


def without_kernel_because(optimizer: torch.optim.Optimizer) -> str:
    """Returns why the kernels do not compute the same step as `optimizer`, on whatever device; empty if they do.

    They step exactly SGD, Adam or AdamW on FP32 parameters, without dampening, amsgrad, maximize, differentiable, step
    hooks or a learning rate in a tensor. Adam and AdamW must be `fused` or `capturable`: others count their steps on
    the host.
    """
    if type(optimizer) not in _STATE:
        return f"no kernel steps {type(optimizer).__name__}"
    if any(p.dtype is not torch.float32 for group in optimizer.param_groups for p in group["params"]):
        return "parameters are not FP32"
    return obstacle_of(optimizer)


def state_bytes(optimizer: torch.optim.Optimizer, *, in_8_bits: bool) -> int:
    """Returns the bytes of state that `FusedOptimizer` keeps for `optimizer`, which has a kernel."""
    total = 0
    for group in optimizer.param_groups:
        num_moments = len([name for name in _STATE[type(optimizer)] if name != "step"])
        if type(optimizer) is torch.optim.SGD and not group["momentum"]:
            num_moments = 0
        sizes = [p.numel() for p in group["params"] if p.requires_grad]
        total += num_moments * sum(
            num_bytes(size) if in_8_bits and size >= MIN_ELEMENTS_IN_CODES else 4 * size for size in sizes
        )
    return total


def obstacle_of(optimizer: torch.optim.Optimizer) -> str:
    """Returns why the kernels do not support the optimizer as it is configured now; empty if they do."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "the optimizer has step hooks"
    for group in optimizer.param_groups:
        for name in ("dampening", "amsgrad", "maximize", "differentiable"):
            if group.get(name):
                return f"the optimizer has {name} = {group[name]}"
        if isinstance(group["lr"], Tensor):
            return "the optimizer has its learning rate in a tensor"
        if type(optimizer) is not torch.optim.SGD and not (group.get("fused") or group.get("capturable")):
            return "the optimizer is neither fused nor capturable"
    return ""


class FusedOptimizer:
    """Steps parameters of a supported optimizer in one launch; the state stays in `optimizer.state`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        watched: Sequence[nn.Parameter],
        layer_of: Mapping[int, str],
        *,
        in_8_bits: bool = False,
        without: Iterable[nn.Parameter] = (),
    ) -> None:
        """Allocates the state in advance, as zeros, so that no step allocates memory.

        `watched` are the parameters whose gradients `launch` gets; `layer_of` maps the id of a weight to its layer's
        name. With `in_8_bits`, parameters of `MIN_ELEMENTS_IN_CODES` elements or more have their state in 8 bits. The
        parameters `without` are not stepped, and have no state.
        """
        self._optimizer, self._watched = optimizer, watched
        self._layers = [layer_of.get(id(p), "") for p in watched]
        self._in_codes = {id(p) for p in watched if in_8_bits and p.numel() >= MIN_ELEMENTS_IN_CODES}
        # Groups by their index: loading a checkpoint replaces the groups themselves.
        number_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        for parameter in without:
            del number_of[id(parameter)]
        self._group_numbers = [number_of.get(id(p)) for p in watched]
        self._names = _STATE[type(optimizer)]
        device, sizes = watched[0].device, [p.numel() for p in watched]
        self._parameters, self._companions = TensorTable(len(sizes), device), TensorTable(len(sizes), device)
        self._state_tables = [TensorTable(len(sizes), device) for _ in self._names]
        is_sgd = type(optimizer) is torch.optim.SGD
        self._kernel: SgdStep | AdamWStep = SgdStep(sizes, device) if is_sgd else AdamWStep(sizes, device)
        self._known_state: list[Tensor | None] = []
        self._known_places: list[Any] = []
        self.find_state()

    def set_companions(self, companions: Mapping[int, Tensor]) -> None:
        """Sets the tensors to write beside parameters, by parameter id: low-precision copies, or low words (int16)."""
        self._companions.point_to([companions.get(id(p)) for p in self._watched])

    def launch(self, gradients: Gradients, *, lr_factor: Tensor, loss_scale: Tensor, found_nonfinite: Tensor) -> None:
        """Updates parameters, state and companions; device work alone. All scalars are fp32."""
        scalars = {"lr_factor": lr_factor, "loss_scale": loss_scale, "found_nonfinite": found_nonfinite}
        self._kernel.step(self._parameters, gradients.table, self._state_tables, self._companions, **scalars)
        # Schedulers read this and warn if no step has been made before theirs.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # set by PyTorch's schedulers themselves

    def written(self, gradients: Gradients) -> list[nn.Parameter]:
        """Returns the parameters that `launch` writes: those that the optimizer updates and that have a gradient."""
        pairs = zip(self._group_numbers, gradients.tensors, strict=True)
        is_written = [number is not None and gradient is not None for number, gradient in pairs]
        return list(itertools.compress(self._watched, is_written))

    def release(self) -> None:
        """Converts all state to FP32, which the optimizer itself can use."""
        self._in_codes.clear()
        self.find_state()

    def set_hyperparameters(self, lr_scale: Mapping[str, float]) -> None:
        """Uploads learning rates, momenta and other hyperparameters to the device."""

        def per_parameter(value: Callable[[dict[str, Any]], float]) -> list[float]:
            return [0.0 if group is None else float(value(group)) for group in self._groups()]

        scales = [lr_scale.get(layer, 1.0) for layer in self._layers]
        lr = [rate * scale for rate, scale in zip(per_parameter(itemgetter("lr")), scales, strict=True)]
        weight_decay = per_parameter(itemgetter("weight_decay"))
        if isinstance(self._kernel, SgdStep):
            nesterov = [bool(value) for value in per_parameter(itemgetter("nesterov"))]
            momentum = per_parameter(itemgetter("momentum"))
            self._kernel.set(lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov)
            return
        is_adamw = type(self._optimizer) is torch.optim.AdamW
        decoupled = per_parameter(lambda group: is_adamw or group.get("decoupled_weight_decay", 0))
        self._kernel.set(
            lr=lr,
            weight_decay=weight_decay,
            beta1=per_parameter(lambda group: group["betas"][0]),
            beta2=per_parameter(lambda group: group["betas"][1]),
            eps=per_parameter(itemgetter("eps")),
            decoupled=[bool(value) for value in decoupled],
        )

    def find_state(self) -> None:
        """Updates the kernels' tables if parameters or state have moved to new tensors, as a checkpoint moves them."""
        num_watched, state = len(self._watched), self._optimizer.state
        own = [p if group is not None and p.requires_grad else None for p, group in self._pairs()]
        places = [None if p is None else (p.data_ptr(), p.dtype, id(p) in self._in_codes) for p in own]
        if places == self._known_places:
            pairs = zip(self._state_tensors(), self._known_state, strict=True)
            if all(tensor is known for tensor, known in pairs):
                return
        for (p, group), name in itertools.product(self._pairs(), self._names):
            tensor = state[p].get(name) if p in state else None
            if tensor is not None:
                state[p][name] = self._converted(tensor, p, name)
            elif group is not None and p.requires_grad and (name != "momentum_buffer" or group["momentum"]):
                state[p][name] = self._zeros(p, name)
        # Not `detach`: kernels on a GPU raise no version counters, so the reference must not either.
        self._parameters.point_to([None if p is None else p.data for p in own])
        self._known_state, self._known_places = self._state_tensors(), places
        for index, table in enumerate(self._state_tables):
            table.point_to(self._known_state[index * num_watched : (index + 1) * num_watched])

    def _groups(self) -> list[dict[str, Any] | None]:
        """Returns for each parameter the optimizer's group that holds it; None if none does."""
        groups = self._optimizer.param_groups
        return [None if number is None else groups[number] for number in self._group_numbers]

    def _pairs(self) -> list[tuple[nn.Parameter, dict[str, Any] | None]]:
        return list(zip(self._watched, self._groups(), strict=True))

    def _state_tensors(self) -> list[Tensor | None]:
        """Returns the optimizer's state tensors, ordered by name, then by parameter."""
        state = self._optimizer.state
        return [state[p].get(name) if p in state else None for name in self._names for p in self._watched]

    def _zeros(self, parameter: nn.Parameter, name: str) -> Tensor:
        if name == "step":
            return torch.zeros((), device=parameter.device)
        if id(parameter) in self._in_codes:
            return torch.zeros(num_bytes(parameter.numel()), dtype=torch.uint8, device=parameter.device)
        return torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)

    def _converted(self, tensor: Tensor, parameter: nn.Parameter, name: str) -> Tensor:
        """Converts state, such as a checkpoint's, for the kernels: to codes, or to FP32 laid out as its parameter."""
        number, signed = parameter.numel(), name != _UNSIGNED
        in_codes = name != "step" and id(parameter) in self._in_codes
        if number and tensor.shape == (num_bytes(number),):  # codes have more elements than the parameter
            codes = tensor.to(parameter.device, torch.uint8)  # an optimizer's `load_state_dict` casts them to FP32
            if in_codes:
                return codes
            return decode(codes, number, signed=signed).as_strided(parameter.shape, parameter.stride())
        laid_out = tensor.to(parameter.device, torch.float32)
        if laid_out.dim() and not have_equal_dense_strides(laid_out, parameter):
            laid_out = torch.empty_like(parameter, dtype=torch.float32, requires_grad=False).copy_(laid_out)
        if not in_codes:
            return laid_out
        return encode(laid_out.as_strided((number,), (1,)), None if signed else torch.zeros((), device=laid_out.device))
