"""Training runs that each rank of a group makes, and what they have in common."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.apply.captured import fault_messages
from tests.build import QUIET, blobs, loop_of, mlp, run
from triaccel_ray.config import BatchConfig, ControlConfig
from triaccel_ray.loop import ControlLoop
from triaccel_ray.records.codec import encode
from triaccel_ray.records.events import Tick
from triaccel_ray.trainables.images import ImageSource, Preparation


def fixed(size: int, *, accumulate: int = 1) -> ControlConfig:
    """Returns settings for batches of one size, in FP32."""
    batch = BatchConfig(
        enabled=False, start=size, minimum=size, maximum=size, accumulate=accumulate, granularity=1, step_up=1,
        step_down=1,
    )  # fmt: skip
    return replace(QUIET, batch=batch)


def listed(model: nn.Module) -> list[list[float]]:
    """Returns the parameters as lists, which processes can send."""
    return [p.detach().flatten().tolist() for p in model.parameters()]


def outcome(loop: ControlLoop, ticks: Sequence[Tick] = ()) -> dict[str, Any]:
    """Closes the loop, and returns what ranks compare of it."""
    steps = loop._training.steps
    found = {
        "loss": loop.epoch_loss.tolist(),
        "skipped": loop.num_skipped,
        "parts": steps.step.num_micro_batches,
        "enabled": steps.enabled,
        "captured": steps.num_captured,
        "decisions": [encode(tick.decision) for tick in ticks],
        "faults": fault_messages(list(ticks)),
    }
    loop.close()
    return found | {"weights": listed(loop.model)}


def trained(
    rank: int, num_samples: int, config: ControlConfig, num_steps: int, state: Any = None, clip: bool = False
) -> dict[str, Any]:
    """Returns outcome, state and evaluation after some steps; each rank begins with weights of its own."""
    loop, _ = loop_of(mlp(seed=rank), blobs(num_samples), replace(config, clip_norm=0.5 if clip else None))
    if state is not None:
        loop.load_state_dict(copy.deepcopy(state))  # it arrives in memory that the ranks share
    run(loop, num_steps)
    saved, evaluation = loop.state_dict(), loop.evaluate(blobs(31, seed=1))
    figures = [evaluation.loss, evaluation.metrics["accuracy"], evaluation.num_samples]
    return {**outcome(loop), "state": saved, "evaluation": figures}


def assert_close(first: list[list[float]], second: list[list[float]], *, within: float = 1e-5) -> None:
    """Checks that no parameter differs by more than this share of its norm."""
    for one, other in zip(first, second, strict=True):
        a, b = torch.tensor(one), torch.tensor(other)
        assert (a - b).norm() <= within * b.norm()


def trained_on_images(rank: int, config: ControlConfig, num_steps: int) -> list[list[float]]:
    """Returns the parameters after some steps on images of 8 bits, which are prepared on the device."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))
    if torch.cuda.is_available():
        model.cuda()
    images, targets = torch.randint(256, (98, 3, 8, 8), dtype=torch.uint8), torch.randint(4, (98,))
    preparation = Preparation(mean=[0.5] * 3, std=[0.25] * 3)
    loop, _ = loop_of(model, ImageSource(images, targets, preparation), config)
    run(loop, num_steps)
    return outcome(loop)["weights"]


class Unsteady(nn.Module):
    """Has a branch that training reaches only while `is_open`, on rank 1 alone."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.trunk, self.branch = mlp(), nn.Linear(4, 4)
        self.is_open = rank == 1

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.trunk(inputs)
        return self.branch(outputs) if self.is_open else outputs
