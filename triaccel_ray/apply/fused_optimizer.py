"""SGD, Adam and AdamW as one kernel launch over all parameters, their state and their low-precision copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
"""Elements from which on a parameter's state may be kept in 8 bits: of smaller ones it takes next to nothing."""


def is_supported(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether `FusedOptimizer` steps `optimizer` on a GPU: it has its rule, and all parameters lie there."""
    return has_kernel(optimizer) and all(p.is_cuda for group in optimizer.param_groups for p in group["params"])


def has_kernel(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether the kernels compute what `optimizer` would, wherever its parameters lie.

    Exactly SGD, Adam or AdamW on FP32 parameters, without dampening, amsgrad, maximize, differentiable, a learning rate
    in a tensor or step hooks. Adam and AdamW must be `fused` or `capturable`: the others count their steps on the host.
    """
    are_fp32 = all(p.dtype is torch.float32 for group in optimizer.param_groups for p in group["params"])
    return type(optimizer) in _STATE and are_fp32 and _obstacle(optimizer) is None


def _obstacle(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns what the kernels could not do as the optimizer now does it; None if there is nothing of the kind."""
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
    return None


class FusedOptimizer:
    """Steps the parameters of a supported optimizer; state stays where the optimizer and its checkpoints keep it."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        watched: Sequence[nn.Parameter],
        layer_of: Mapping[int, str],
        buckets: Sequence[Sequence[int]] | None = None,
        *,
        in_8_bits: bool = False,
    ) -> None:
        """Allocates the optimizer's state ahead, zero as it starts, so that no step allocates.

        `watched` are the parameters whose gradients a step brings; `layer_of` maps the id of a weight to its layer's
        name. `buckets` are the indices of those that are stepped in one launch, each in one; all in one by default.
        State is kept `in_8_bits` of parameters that are large enough.
        """
        self._optimizer = optimizer
        self._num_parameters = sum(len(group["params"]) for group in optimizer.param_groups)
        indices = [range(len(watched))] if buckets is None else buckets
        self._buckets = [
            _Bucket(optimizer, [watched[index] for index in bucket], layer_of, in_8_bits=in_8_bits)
            for bucket in indices
        ]
        self._lr_factor = torch.ones((), device=watched[0].device)
        self._last_factor = 1.0
        self._last_rates: tuple[Any, ...] = ()
        self._last_scale: Mapping[str, float] | None = None
        self._last_companions: Mapping[int, Tensor] | None = None

    def prepare(self, lr_factor: float, lr_scale: Mapping[str, float], companions: Mapping[int, Tensor]) -> str | None:
        """Brings to the device what has changed: learning rates, and where state and companions lie.

        `companions` are what lies beside parameters, by their ids: low-precision copies, or low words (int16).
        Returns why the optimizer would by now do something else than the kernels, having brought nothing; else None.

        Raises:
            ValueError: the optimizer has been given parameters, or has lost some, since this was built.
        """
        groups = self._optimizer.param_groups
        if sum(len(group["params"]) for group in groups) != self._num_parameters:
            raise ValueError(
                "the optimizer has other parameters than when the control loop was built: build another loop, and let "
                "it take over this one's state_dict"
            )
        obstacle = _obstacle(self._optimizer)
        if obstacle is not None:
            return obstacle
        rates = tuple(tuple(value for key, value in group.items() if key != "params") for group in groups)
        if lr_factor != self._last_factor:
            self._lr_factor.fill_(lr_factor)
            self._last_factor = lr_factor
        new_rates = (lr_scale is not self._last_scale and lr_scale != self._last_scale) or rates != self._last_rates
        self._last_scale, self._last_rates = lr_scale, rates
        for bucket in self._buckets:
            if new_rates:
                bucket.set_hyperparameters(lr_scale)
            if companions is not self._last_companions:
                bucket.set_companions(companions)
            bucket.find_state()
        self._last_companions = companions
        return None

    def release(self) -> None:
        """Leaves all state in FP32, as the optimizer itself reads it."""
        for bucket in self._buckets:
            bucket.in_codes.clear()
            bucket.find_state()

    def launch(self, gradients: Gradients, *, loss_scale: Tensor, found_nonfinite: Tensor, bucket: int = 0) -> None:
        """Updates a bucket's parameters, state and companions; device work alone."""
        scalars = {"lr_factor": self._lr_factor, "loss_scale": loss_scale, "found_nonfinite": found_nonfinite}
        self._buckets[bucket].launch(gradients, scalars)
        # What schedulers look at: they warn where no step has gone before.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # set by PyTorch's schedulers themselves


class _Bucket:
    """Parameters that are stepped in one launch, and the tables that it reads."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        watched: Sequence[nn.Parameter],
        layer_of: Mapping[int, str],
        *,
        in_8_bits: bool,
    ) -> None:
        self._optimizer, self._watched, self._layer_of = optimizer, watched, layer_of
        self.in_codes = {id(p) for p in watched if in_8_bits and p.numel() >= MIN_ELEMENTS_IN_CODES}
        self._group_number = {
            id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]
        }
        self._names = _STATE[type(optimizer)]
        device, sizes = watched[0].device, [p.numel() for p in watched]
        self._parameters, self._companions, *self._states = (
            TensorTable(len(sizes), device) for _ in range(2 + len(self._names))
        )
        self._kernel: SgdStep | AdamWStep
        self._kernel = (SgdStep if type(optimizer) is torch.optim.SGD else AdamWStep)(sizes, device)
        self._held: list[Tensor | None] = []
        self._places: list[Any] = []
        self._allocate()

    def set_companions(self, companions: Mapping[int, Tensor]) -> None:
        """Names what lies beside the parameters."""
        self._companions.point_to([companions.get(id(p)) for p in self._watched])

    def launch(self, gradients: Gradients, scalars: dict[str, Tensor]) -> None:
        """Steps the parameters."""
        self._kernel.step(self._parameters, gradients.table, self._states, self._companions, **scalars)

    def _group_of(self, parameter: nn.Parameter) -> dict[str, Any] | None:
        """Returns the optimizer's group that holds the parameter; None if none does."""
        number = self._group_number.get(id(parameter))
        return None if number is None else self._optimizer.param_groups[number]

    def _allocate(self) -> None:
        for parameter in self._watched:
            group = self._group_of(parameter)
            if group is None or not parameter.requires_grad:
                continue
            if self._names[0] == "momentum_buffer" and not group["momentum"]:
                continue
            state = self._optimizer.state[parameter]
            for name in self._names:
                if state.get(name) is not None:
                    continue
                if name == "step":
                    state[name] = torch.zeros((), device=parameter.device)
                elif id(parameter) in self.in_codes:
                    size = num_bytes(parameter.numel())
                    state[name] = torch.zeros(size, dtype=torch.uint8, device=parameter.device)
                else:
                    state[name] = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)

    def find_state(self) -> None:
        """Names the tensors of parameters and state anew where a checkpoint, say, has replaced one."""
        is_own = [id(p) in self._group_number and p.requires_grad for p in self._watched]
        places: list[Any] = [
            (p.data_ptr(), p.dtype, id(p) in self.in_codes) if own else None
            for p, own in zip(self._watched, is_own, strict=True)
        ]
        found = self._state()
        is_same = len(found) == len(self._held) and all(a is b for a, b in zip(found, self._held, strict=True))
        if is_same and places == self._places:
            return
        self._allocate()
        found, state, number = self._state(), self._optimizer.state, len(self._watched)
        # Not `detach`: no version is raised on a GPU, and so not by the reference either.
        self._parameters.point_to([p.data if own else None for p, own in zip(self._watched, is_own, strict=True)])
        for index, table in enumerate(self._states):
            part = found[index * number : (index + 1) * number]
            name = self._names[index]
            aligned = [
                _as_kept(tensor, p, signed=name != _UNSIGNED, in_codes=name != "step" and id(p) in self.in_codes)
                for tensor, p in zip(part, self._watched, strict=True)
            ]
            for p, tensor in zip(self._watched, aligned, strict=True):
                if tensor is not None:
                    state[p][name] = tensor
            table.point_to(aligned)
        self._held, self._places = self._state(), places

    def _state(self) -> list[Tensor | None]:
        """Returns the optimizer's state tensors, all of one name first."""
        state = self._optimizer.state
        return [state[p].get(name) if p in state else None for name in self._names for p in self._watched]

    def set_hyperparameters(self, lr_scale: Mapping[str, float]) -> None:
        """Brings learning rates, momenta and the like to the device."""
        groups = [self._group_of(p) for p in self._watched]

        def each(value: Callable[[dict[str, Any]], float]) -> list[float]:
            return [0.0 if group is None else float(value(group)) for group in groups]

        scales = [lr_scale.get(self._layer_of.get(id(p), ""), 1.0) for p in self._watched]
        lr = [rate * scale for rate, scale in zip(each(itemgetter("lr")), scales, strict=True)]
        weight_decay = each(itemgetter("weight_decay"))
        if isinstance(self._kernel, SgdStep):
            nesterov = [bool(value) for value in each(itemgetter("nesterov"))]
            momentum = each(itemgetter("momentum"))
            self._kernel.set(lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov)
            return
        is_adamw = type(self._optimizer) is torch.optim.AdamW
        self._kernel.set(
            lr=lr,
            weight_decay=weight_decay,
            beta1=each(lambda group: group["betas"][0]),
            beta2=each(lambda group: group["betas"][1]),
            eps=each(itemgetter("eps")),
            decoupled=[bool(value) for value in each(lambda group: is_adamw or group.get("decoupled_weight_decay", 0))],
        )


def _as_kept(tensor: Tensor | None, parameter: nn.Parameter, *, signed: bool, in_codes: bool) -> Tensor | None:
    """Returns state as the kernels keep it, in codes or in FP32; a checkpoint may bring the other."""
    number = parameter.numel()
    if tensor is not None and number and tensor.shape == (num_bytes(number),):  # which is more than the parameter has
        codes = tensor.to(parameter.device, torch.uint8)  # an optimizer's `load_state_dict` has made them FP32
        if in_codes:
            return codes
        return decode(codes, number, signed=signed).as_strided(parameter.shape, parameter.stride())
    laid_out = _as_laid_out(tensor, parameter)
    if laid_out is None or not in_codes:
        return laid_out
    return encode(laid_out.as_strided((number,), (1,)), None if signed else torch.zeros((), device=laid_out.device))


def _as_laid_out(tensor: Tensor | None, parameter: nn.Parameter) -> Tensor | None:
    """Returns state in the memory layout of its parameter, as FP32 on its device; a checkpoint may bring another."""
    if tensor is None or tensor.dim() == 0:
        return None if tensor is None else tensor.to(parameter.device, torch.float32)
    is_placed = tensor.dtype is torch.float32 and tensor.device == parameter.device
    if is_placed and have_equal_dense_strides(tensor, parameter):
        return tensor
    return torch.empty_like(parameter, dtype=torch.float32, requires_grad=False).copy_(tensor)
