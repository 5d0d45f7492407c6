"""A task that several ranks train, and what its samples and its log say of them."""

import os
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.build import blobs, mlp
from tests.service.own_task import RECIPE, own_spec
from triaccel_ray.config import BatchConfig, ControlConfig, CurvatureConfig, PrecisionConfig
from triaccel_ray.data.sources import TensorSource
from triaccel_ray.records.events import Epoch, Tick, read_events
from triaccel_ray.records.goal import Goal
from triaccel_ray.records.plan import Plan, Precision
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.storage.layout import EVENTS
from triaccel_ray.trainables.task import Purpose, Splits, Task

NUM_SAMPLES = 160
CONTROL = ControlConfig(
    every_steps=2,
    revert_slowdowns=False,
    precision=PrecisionConfig(enabled=False, initial=Precision.FP32),
    curvature=CurvatureConfig(enabled=False),  # each rank measures on samples of its own
    batch=BatchConfig(start=32, minimum=16, maximum=64, granularity=16, step_up=16, step_down=16),
)
SEEN = "seen"
"""Folder below the data folder in which each process notes the samples that it trains on."""


class Noting(TensorSource):
    """Notes attempt, epoch and samples of every batch that is trained on, if there is a folder to note them in."""

    epoch: int | None = None  # until training begins: two samples are tried before
    folder: Path | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        super().set_epoch(epoch)

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        if None not in (generator, self.folder, self.epoch):
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / str(os.getpid())).open("a") as file:
                attempt = os.environ.get("MASTER_PORT", "0")  # which all ranks of a group share
                file.write(" ".join(map(str, [attempt, self.epoch, *indices.tolist()])) + "\n")
        return super().batch(indices, generator)

    def to(self, device: torch.device) -> TensorSource:
        return self


class Several(Task):
    recipe = RECIPE
    control = CONTROL

    def model(self) -> nn.Module:
        return mlp(seed=torch.initial_seed())

    def data(self, purpose: Purpose) -> Splits:
        train = Noting(*blobs(NUM_SAMPLES))
        train.folder = None if self.data_dir is None else self.data_dir / SEEN
        return Splits(train=train, held_out=TensorSource(*blobs(50, seed=1)))


def several_spec(task: str = "Several", **settings: object) -> RunSpec:
    own = {"control": CONTROL, "gpus": "2"}
    return own_spec(task if ":" in task else f"{__name__}:{task}", **{**own, **settings})


def told(folder: Path) -> tuple[list[Plan], list[float]]:
    """Plans of all ticks, and losses and metrics of ticks and epochs, of a run's log."""
    plans, figures = list[Plan](), list[float]()
    for event in read_events(folder / EVENTS):
        record = event.record
        if isinstance(record, Tick):
            plans.append(record.applied.plan)
            figures.append(record.observation.loss or 0.0)
            figures.extend(layer.variance or 0.0 for layer in record.observation.layers)
        elif isinstance(record, Epoch):
            figures += [record.train_loss, record.held_out_loss or 0.0, record.held_out(Goal()) or 0.0]
    return plans, figures


def attempts_at_epochs(folder: Path) -> dict[int, list[list[int]]]:
    """The samples that each attempt at each epoch, in order, has trained on, of all ranks, sorted."""
    samples: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    written: defaultdict[str, float] = defaultdict(float)
    for path in (folder / SEEN).iterdir():
        for line in path.read_text().splitlines():
            attempt, epoch, *indices = line.split()
            samples[int(epoch)][attempt] += map(int, indices)
            written[attempt] = max(written[attempt], path.stat().st_mtime)
    return {
        epoch: [sorted(found[attempt]) for attempt in sorted(found, key=lambda each: written[each])]
        for epoch, found in samples.items()
    }


def samples_of_epochs(folder: Path) -> dict[int, list[int]]:
    """The samples that the last attempt at each epoch has trained on, of all ranks, sorted."""
    return {epoch: attempts[-1] for epoch, attempts in attempts_at_epochs(folder).items()}
