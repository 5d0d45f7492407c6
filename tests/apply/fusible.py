"""Small models with something to fuse, for tests of the fusion and of the trace that it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.build import values
from triaccel_ray.apply.fuse import Fusion, fuse
from triaccel_ray.model.layers import find_layers
from triaccel_ray.model.pytree import map_tensors


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The modules that the fusion leaves as they are."""
    return [module for layer in find_layers(model) for module in layer.modules]


class Block(nn.Module):
    """Convolution, norm and what a test makes of them."""

    def __init__(self, rest: Callable[[Block, Tensor], Any] | None = None, **parts: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.other = nn.Conv2d(4, 4, 1)
        for name, part in parts.items():
            setattr(self, name, part)
        self._rest = rest or (lambda block, x: torch.relu(block.norm(block.conv(x))))

    def forward(self, x: Tensor) -> Any:
        return self._rest(self, x)


def fused(model: nn.Module, **options: Any) -> Fusion:
    fusion = fuse(model, layers_of(model), **options)
    assert isinstance(fusion, Fusion), fusion
    return fusion


def step(run: nn.Module, owner: nn.Module, x: Tensor) -> dict[str, Any]:
    """Outputs, gradients and buffers of a step in training mode."""
    torch.manual_seed(1)
    for parameter in owner.parameters():
        parameter.grad = None
    x = x.clone().requires_grad_()
    outputs = run(x)
    sum(part.float().square().mean() for part in (outputs if isinstance(outputs, tuple) else (outputs,))).backward()
    return {
        "outputs": map_tensors(Tensor.detach, outputs), "x": x.grad,
        "gradients": [p.grad for p in owner.parameters()], "buffers": values(owner),
    }  # fmt: skip
