"""Activation checkpointing on a real NVIDIA GPU: in captured, compiled, fused and eager steps."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from triaccel_ray.config import BatchConfig, ControlConfig, CurvatureConfig, ExecutionConfig, PrecisionConfig
from triaccel_ray.loop import ControlLoop
from triaccel_ray.records.plan import FaultKind, Precision
from triaccel_ray.trainables.models import resnet18
from triaccel_ray.trainables.text import GPT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

CONFIG = ControlConfig(
    every_steps=100,
    curvature=CurvatureConfig(enabled=False),
    precision=PrecisionConfig(enabled=False),
    batch=replace(BatchConfig().around(64), enabled=False),
)
PEAK_SHARE = {"resnet18": 0.9, "gpt": 0.8}
"""Below which the peak of a checkpointed step must be, of that of a step that keeps everything."""


def job(name: str) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    if name == "resnet18":
        data = torch.randn(512, 3, 32, 32), torch.randint(0, 10, (512,))
        return resnet18(10, "cifar").cuda(), data, nn.functional.cross_entropy
    text = torch.randint(0, 96, (512, 129))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    return GPT(layers=4, width=128, heads=4, context=128).cuda(), (text[:, :-1], text[:, 1:]), loss


def loop_of(parts: tuple[nn.Module, Any, Any], config: ControlConfig) -> ControlLoop:
    model, data, loss = parts
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    return ControlLoop(model, optimizer, loss, data, config=config)


@pytest.mark.parametrize("level", [Precision.BF16, Precision.FP32])
@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize(
    "execution", [ExecutionConfig(), ExecutionConfig(capture=False), ExecutionConfig(fuse=False, compile="off")]
)
@pytest.mark.parametrize("name", ["resnet18", "gpt"])
def test_captured_compiled_fused_and_eager_steps_compute_again_what_they_do_not_keep(
    name: str, execution: ExecutionConfig, lean: bool, level: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    config = replace(CONFIG, precision=PrecisionConfig(enabled=False, initial=level))
    if lean:
        config = replace(config, weights="split", step_in_backward=True)
    found, peaks = [], []
    for checkpoints in (False, True):
        execution = replace(execution, activation_checkpointing=checkpoints)
        loop = loop_of(job(name), replace(config, execution=execution))
        for _ in range(8):
            loop.step()
        torch.cuda.synchronize()
        assert loop._training.steps.num_captured == execution.capture
        found.append({key: value.clone() for key, value in loop.model.state_dict().items()})
        loop._training.make_room()
        torch.cuda.reset_peak_memory_stats()
        resting = torch.cuda.memory_allocated()
        loop.step()  # captured anew, since the graphs were dropped
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - resting)
        assert {fault.kind for fault in loop.tick().observation.faults} <= {FaultKind.COMPILED}
        loop.close()
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0] if key.endswith("num_batches_tracked"))
    assert peaks[1] < PEAK_SHARE[name] * peaks[0]


class Block(nn.Module):
    def __init__(self, width: int, following: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 256), nn.Linear(256, following)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(torch.relu(self.up(self.norm(x)))))


def kept_and_compiled(widths: list[int], dropout: float, execution: ExecutionConfig) -> tuple[ControlLoop, str, str]:
    torch.manual_seed(0)
    blocks = [Block(*pair, dropout) for pair in itertools.pairwise(widths)]
    model = nn.Sequential(nn.Linear(16, widths[0]), *blocks, nn.Linear(widths[-1], 10)).cuda()
    data = torch.randn(512, 16), torch.randint(0, 10, (512,))
    loop = loop_of((model, data, nn.functional.cross_entropy), replace(CONFIG, execution=execution))
    for _ in range(4):
        loop.step()
    told = {fault.kind: fault.detail for fault in loop.tick().observation.faults}
    return loop, told.get(FaultKind.ACTIVATIONS_KEPT, ""), told.get(FaultKind.COMPILED, "")


@pytest.mark.parametrize("compile_", ["auto", "off"])
def test_a_captured_step_keeps_the_activations_of_blocks_that_draw_random_numbers(compile_: Any) -> None:
    execution = ExecutionConfig(activation_checkpointing=True, compile=compile_)
    loop, kept, _ = kept_and_compiled([64, 64, 64], 0.5, execution)
    assert "activations of 1, 2 are kept" in kept
    assert loop._training.steps.num_captured == 1
    loop.close()


def test_blocks_are_compiled_one_by_one_where_otherwise_the_whole_model_would_be() -> None:
    loop, kept, compiled = kept_and_compiled([64, 128, 256], 0.0, ExecutionConfig(activation_checkpointing=True))
    assert not kept
    assert "their activations are checkpointed" in compiled
    assert loop._training.steps.num_captured == 1
    loop.close()
