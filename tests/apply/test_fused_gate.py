from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.apply.fusible import Block, fused, step
from tests.build import same
from triaccel_ray.apply import fused_gate
from triaccel_ray.apply.fuse import Fusion
from triaccel_ray.apply.fused_gate import Multiply, Pool

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Gate(nn.Module):
    """Squeeze-and-excitation as a module, which calls `gate(self, x)`."""

    def __init__(self, gate: Callable[[Gate, Tensor], Tensor]) -> None:
        super().__init__()
        self.pool, self.fc, self.linear = nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 4, 1), nn.Linear(4, 4)
        self._gate = gate

    def forward(self, x: Tensor) -> Tensor:
        return self._gate(self, x)


def _senet(gate: Gate, x: Tensor) -> Tensor:
    n, c, _, _ = x.size()
    y = torch.sigmoid(gate.linear(gate.pool(x).view(n, c))).view(n, c, 1, 1)
    return x * y.expand_as(x)


def _linear(gate: Gate, x: Tensor) -> Tensor:
    return torch.mul(x, gate.linear(x.mean(dim=(-2, -1))).sigmoid()[:, :, None, None])


FUSED: dict[str, Callable[[Gate, Tensor], Tensor]] = {
    "module": lambda gate, x: torch.sigmoid(gate.fc(gate.pool(x))) * x,
    "function": lambda gate, x: x.mul(gate.fc(F.adaptive_avg_pool2d(x, (1, 1))).sigmoid()),
    "method": lambda gate, x: x * gate.fc(F.relu(x.mean((2, 3), keepdim=True), inplace=True)),
    "mean": lambda gate, x: x * gate.fc(torch.mean(x, [2, 3], True)),
    "view": _senet,
    "linear": _linear,
    "by shape": lambda gate, x: x * gate.linear(gate.pool(x).flatten(1)).view(x.shape[0], 4, 1, 1),
    "mean itself": lambda gate, x: x * x.mean((-1, -2), keepdim=True),
    "one per sample": lambda gate, x: x * gate.fc(gate.pool(x))[:, :1],  # no kernel for this product
    "one per pixel": lambda gate, x: x * gate.fc(gate.pool(x)).expand(-1, -1, 6, 6),
}
UNFUSED: dict[str, Callable[[Gate, Tensor], Tensor]] = {
    "of channels": lambda gate, x: x * x.mean((1, 2), keepdim=True),
    "of four": lambda gate, x: x * gate.fc(F.adaptive_avg_pool2d(x, 2)).mean((2, 3), keepdim=True),
    "in double precision": lambda gate, x: (x * x.mean((2, 3), keepdim=True, dtype=torch.float64)).float(),
    "two products": lambda gate, x: x * gate.fc(gate.pool(x)) + x * 2,
    "another reader": lambda gate, x: x * gate.fc(gate.pool(x)) + x.tanh(),
    "a write in between": lambda gate, x: gate.fc(gate.pool(x)) * x.add_(1),
    "into a buffer": lambda gate, x: torch.mul(x, gate.pool(x), out=None),
}
IMAGES = torch.randn(3, 4, 6, 6, generator=torch.Generator().manual_seed(0)).to(
    DEVICE, memory_format=torch.channels_last
)


def _model(gate: Callable[[Gate, Tensor], Tensor], *, inline: bool) -> nn.Module:
    """A norm and a gate, which is a module or part of the block."""

    def rest(block: Block, x: Tensor) -> Tensor:
        y = block.norm(block.conv(x))
        return block.other(gate(block.gate, y) if inline else block.gate(y))  # type: ignore[arg-type, operator]

    return Block(rest, gate=Gate(gate)).to(DEVICE, memory_format=torch.channels_last)


def _fused(model: nn.Module) -> tuple[Fusion, list[nn.Module]]:
    """The model's fusion, and the parts of it that are for gates."""
    fusion = fused(model)
    return fusion, [part for part in fusion.module.modules() if isinstance(part, Pool | Multiply)]


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("name", FUSED)
def test_gates_in_all_spellings(name: str, inline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(FUSED[name], inline=inline)
    twin = copy.deepcopy(model)
    fusion, parts = _fused(model)
    assert [type(part) for part in parts] == [Pool, Multiply]
    passed_on: list[bool] = []
    parts[0].register_forward_hook(lambda module, args, output: passed_on.append(isinstance(output[1], Tensor)))
    if DEVICE == "cpu":
        assert same(step(fusion.module, model, IMAGES), step(twin, twin, IMAGES))
        assert passed_on.pop()
        monkeypatch.setattr(fused_gate, "is_kernel_input", lambda value: True)  # through the interpreter
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        steps = step(fusion.module, model, IMAGES), step(twin, twin, IMAGES)
    torch.testing.assert_close(*steps, rtol=1e-4, atol=1e-6)
    assert passed_on == [False]


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("name", UNFUSED)
def test_what_is_no_gate_stays_as_it_is(name: str, inline: bool) -> None:
    model = _model(UNFUSED[name], inline=inline)
    twin = copy.deepcopy(model)
    fusion, parts = _fused(model)
    assert parts == []
    if DEVICE == "cpu":
        assert same(step(fusion.module, model, IMAGES), step(twin, twin, IMAGES))


def test_a_gate_that_is_not_known_to_be_one_is_called_as_it_is() -> None:
    def decides(gate: Gate, x: Tensor) -> Tensor:
        return FUSED["module"](gate, x) if x.sum() > 0 else x

    hooked = _model(FUSED["module"], inline=False)
    hooked.gate.register_forward_hook(lambda module, args, output: None)  # type: ignore[union-attr]
    for model in (hooked, _model(decides, inline=False)):
        fusion, parts = _fused(model)
        assert parts == []
        assert model.gate in fusion.module.modules()


def test_hooks_are_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_gate, "is_kernel_input", lambda value: True)
    model = _model(FUSED["module"], inline=False)
    fusion, _ = _fused(model)
    gate: Any = model.gate
    calls: list[nn.Module] = []
    gate.pool.register_forward_hook(lambda module, args, output: calls.append(module))
    step(fusion.module, model, IMAGES)
    assert calls == [gate.pool]
    assert fusion.holds()
    gate.register_forward_hook(lambda module, args, output: None)
    assert not fusion.holds()
