"""Any PyTorch optimizer with a learning rate per layer, and a step that an overflow skips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from triaccel_ray.layers import Layer


class LayerwiseOptimizer:
    """Steps the user's optimizer with its learning rates scaled per layer.

    The optimizer's own parameter groups, and so its schedulers and checkpoints, never see the scaling: groups are
    split for the time of one step and put back. Parameters of equal scale stay in one group, so that with no scaling
    nothing is split and fused implementations launch as often as before.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, layers: Sequence[Layer]) -> None:
        """Remembers which parameter belongs to which layer, and allocates SGD's momentum ahead of the first step."""
        self.optimizer = optimizer
        self._layer_of = {id(weight): layer.name for layer in layers for weight in layer.weights}
        self._skips_on_device = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        _allocate_momentum(optimizer)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Every parameter the optimizer updates."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def step(
        self,
        lr_factor: float,
        lr_scale: Mapping[str, float],
        *,
        loss_scale: Tensor | None,
        found_nonfinite: Tensor,
    ) -> None:
        """Updates the parameters, once, with lr = group lr x `lr_factor` x the layer's scale.

        With a `loss_scale` (scalar tensor) gradients are divided by it first, and the step is skipped when
        `found_nonfinite` is 1: on the device where the optimizer is fused, else by asking the host.
        """
        own_groups = self.optimizer.param_groups
        split = [self._split(group, lr_factor, lr_scale) for group in own_groups]
        self.optimizer.param_groups = [part for parts in split for part in parts]
        try:
            self._step(loss_scale, found_nonfinite)
        finally:
            self.optimizer.param_groups = own_groups
            for group, parts in zip(own_groups, split, strict=True):
                _keep_state(group, parts)

    def _step(self, loss_scale: Tensor | None, found_nonfinite: Tensor) -> None:
        if loss_scale is None:
            self.optimizer.step()
        elif self._skips_on_device:
            # Attributes that PyTorch's fused optimizers read; torch.amp.GradScaler sets the same.
            vars(self.optimizer).update(grad_scale=loss_scale, found_inf=found_nonfinite)
            try:
                self.optimizer.step()
            finally:
                vars(self.optimizer).update(grad_scale=None, found_inf=None)
        elif not found_nonfinite.item():
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            torch._foreach_mul_(gradients, 1.0 / loss_scale)
            self.optimizer.step()

    def _split(self, group: dict[str, Any], lr_factor: float, lr_scale: Mapping[str, float]) -> list[dict[str, Any]]:
        """Returns `group` as one group for each distinct learning rate."""
        by_scale: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            scale = lr_scale.get(self._layer_of.get(id(parameter), ""), 1.0)
            by_scale.setdefault(scale, []).append(parameter)
        return [
            {**group, "params": parameters, "lr": group["lr"] * lr_factor * scale}
            for scale, parameters in by_scale.items()
        ]


def _keep_state(group: dict[str, Any], parts: Sequence[dict[str, Any]]) -> None:
    """Takes over what the optimizer wrote into a group's parts: some count steps or adapt factors there."""
    for part in parts:
        group.update({name: value for name, value in part.items() if name not in ("params", "lr")})


def _allocate_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Gives SGD zero momentum buffers where it has none.

    The first step then computes the same values, without allocating when memory is tightest; and a fused first step
    that is skipped for an overflow does not leave its momentum uninitialised, as it would in PyTorch 2.11 to 2.15.
    """
    if type(optimizer) is not torch.optim.SGD:
        return
    for group in optimizer.param_groups:
        # With dampening the first step differs from the others: leave it to the optimizer.
        if group["momentum"] == 0 or group["dampening"] != 0:
            continue
        for parameter in group["params"]:
            if parameter.requires_grad and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
