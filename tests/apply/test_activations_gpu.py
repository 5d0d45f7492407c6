"""Activation checkpointing on a real NVIDIA GPU: in captured, compiled, fused and eager steps."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.apply.captured import fixed, loop_of, run, sgd
from triaccel_ray.records.plan import FaultKind, Precision
from triaccel_ray.trainables.models import resnet18
from triaccel_ray.trainables.text import GPT

pytestmark = pytest.mark.gpu

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


@pytest.mark.parametrize("level", [Precision.BF16, Precision.FP32])
@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize(
    "execution", [{"compile": "auto"}, {"compile": "auto", "capture": False}, {"fuse": False, "compile": "off"}]
)
@pytest.mark.parametrize("name", ["resnet18", "gpt"])
def test_captured_compiled_fused_and_eager_steps_compute_again_what_they_do_not_keep(
    name: str, execution: Any, lean: bool, level: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    leanly: Any = {"weights": "split", "step_in_backward": True} if lean else {}
    found, peaks = [], []
    for checkpoints in (False, True):
        config = fixed(level, activations="recompute" if checkpoints else "keep", **execution)
        model, data, loss = job(name)
        loop = loop_of(model, replace(config, every_steps=100, **leanly), sgd, data, loss=loss)
        run(loop, 8)
        torch.cuda.synchronize()
        assert loop._training.steps.num_captured == execution.get("capture", True)
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


@pytest.mark.parametrize(
    ("widths", "dropout", "compile_", "kept", "compiled"),
    [
        ([64, 64, 64], 0.5, "auto", "activations of 1, 2 are kept", ""),  # of blocks that draw random numbers
        ([64, 64, 64], 0.5, "off", "activations of 1, 2 are kept", ""),
        (
            [64, 128, 256],
            0.0,
            "auto",
            "",
            "what becomes of their activations can be chosen",
        ),  # else compiled as a whole
    ],
)
def test_what_a_captured_step_checkpoints_and_how_it_is_compiled(
    widths: list[int], dropout: float, compile_: str, kept: str, compiled: str
) -> None:
    torch.manual_seed(0)
    blocks = [Block(*pair, dropout) for pair in itertools.pairwise(widths)]
    model = nn.Sequential(nn.Linear(16, widths[0]), *blocks, nn.Linear(widths[-1], 10)).cuda()
    config = fixed(Precision.BF16, activations="recompute", compile=compile_)
    loop = loop_of(model, replace(config, every_steps=100), data=(torch.randn(512, 16), torch.randint(0, 10, (512,))))
    run(loop, 4)
    told = {fault.kind: fault.detail for fault in loop.tick().observation.faults}
    assert kept in told.get(FaultKind.ACTIVATIONS_KEPT, "")
    assert (FaultKind.ACTIVATIONS_KEPT in told) == bool(kept)
    assert compiled in told.get(FaultKind.COMPILED, "")
    assert loop._training.steps.num_captured == 1
    loop.close()
