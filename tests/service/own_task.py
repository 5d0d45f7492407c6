"""Modules with tasks of the tests' own, as a user would write them."""

import sys
from pathlib import Path

import pytest

from triaccel_ray.config import BatchConfig, ControlConfig
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.trainables.task import Recipe

RECIPE = Recipe(epochs=3, lr=0.05, warmup_epochs=1.0)
CONTROL = ControlConfig(
    every_steps=2,
    revert_slowdowns=False,
    batch=BatchConfig(start=32, minimum=16, maximum=64, granularity=16, step_up=16, step_down=16),
)
MODULE = """
import weakref
from pathlib import Path

import torch
from torch import nn
from tests.build import ConvNet, blobs, images, mlp, shift_and_noise
from tests.service.own_task import CONTROL, RECIPE
from triaccel_ray.trainables.task import Purpose, Splits, Task
from triaccel_ray.data.sources import TensorSource

FITS = [32]  # samples that pass at once through the model of InParts, while it trains
READS = []  # (purpose, index) of every held-out sample that was read
READ = Path(__file__).with_name("read.txt")  # numbers of test samples of Guarded that were read, by any process
DATA = Path(__file__).with_name("data.txt")  # what for the samples of Guarded were read, by any process


class Watched(TensorSource):
    purpose = None

    def batch(self, indices, generator):
        READS.extend((self.purpose, index) for index in indices.tolist())
        return super().batch(indices, generator)

    def to(self, device):
        return self


class Blobs(Task):
    recipe = RECIPE
    control = CONTROL

    def model(self):
        return mlp(seed=torch.initial_seed())

    def data(self, purpose):
        held_out = Watched(*blobs(50, seed=1))
        held_out.purpose = purpose.value
        return Splits(train=TensorSource(*blobs(160)), held_out=held_out)


class Turned(TensorSource):
    def views(self, inputs):
        return inputs, -inputs


class TwoViews(Blobs):
    def data(self, purpose):
        return Splits(train=TensorSource(*blobs(160)), held_out=Turned(*blobs(50, seed=1)))


class Pictures(Task):
    # convolutions, normalization, dropout, augmentation: what depends on state and chance
    recipe = RECIPE

    def model(self):
        return ConvNet(seed=torch.initial_seed())

    def data(self, purpose):
        train = TensorSource(*images(160), augment=shift_and_noise)
        return Splits(train=train, held_out=TensorSource(*images(50, seed=1)))


class Sealed(TensorSource):
    # test samples: they raise when touched for anything but a final run, and note how many were read
    purpose = None

    def _touch(self):
        if self.purpose != "final":
            raise RuntimeError(f"test samples were touched for {self.purpose}")

    def __len__(self):
        self._touch()
        return super().__len__()

    def batch(self, indices, generator):
        self._touch()
        with READ.open("a") as file:
            file.write(f"{len(indices)}\\n")
        return super().batch(indices, generator)

    def to(self, device):
        self._touch()
        return self


class Guarded(Blobs):
    def data(self, purpose):
        with DATA.open("a") as file:
            file.write(f"{purpose.value}\\n")
        test = Sealed(*blobs(50, seed=1))
        test.purpose = purpose.value
        validation = TensorSource(*blobs(48, seed=2))
        final = purpose is Purpose.FINAL
        return Splits(train=TensorSource(*blobs(160)), held_out=test if final else validation)


class Large(Blobs):
    # 100 MiB of samples
    def data(self, purpose):
        samples, targets = torch.ones(160, 160 * 1024), torch.arange(160) % 4
        source = TensorSource(samples, targets, prepare=lambda inputs: inputs[:, :8])
        return Splits(train=source, held_out=source)


MODELS = weakref.WeakSet()
AT_ONCE = []  # models of Counted in existence at each making of one, itself included


class Counted(Blobs):
    def model(self):
        model = super().model()
        MODELS.add(model)
        AT_ONCE.append(len(MODELS))
        return model


class Diverging(Blobs):
    def loss(self, outputs, targets, recipe):
        return super().loss(outputs, targets, recipe) * float("nan")


class Poisoned(Blobs):
    # trains well, and is worth nothing: an overflow has reached the moving averages of its norm
    def model(self):
        norm = nn.BatchNorm1d(8)
        norm.running_var.fill_(float("inf"))
        norm.running_mean.fill_(float("inf"))
        return nn.Sequential(norm, super().model())


class Unjudged(Blobs):
    # trains well, but what its loss makes of samples to be judged is no number
    def loss(self, outputs, targets, recipe):
        return super().loss(outputs, targets, recipe) * (1.0 if torch.is_grad_enabled() else float("nan"))


class Failing(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.linear, self.error = nn.Linear(8, 4), error

    def forward(self, inputs):
        if self.training and (len(inputs) > 2 or isinstance(self.error, torch.OutOfMemoryError)):
            raise self.error
        return self.linear(inputs)


class TooLarge(Blobs):
    def model(self):
        return Failing(torch.OutOfMemoryError("not even one sample fits"))


class Narrow(Failing):
    def forward(self, inputs):
        if self.training and len(inputs) > FITS[0]:
            raise self.error
        return self.linear(inputs)


class InParts(Blobs):
    # as many samples as FITS says pass at once
    def model(self):
        return Narrow(torch.OutOfMemoryError("no more samples fit"))


class HugeModel(Blobs):
    def model(self):
        raise torch.OutOfMemoryError("not even the model fits")


class Mistaken(Blobs):
    def model(self):
        return Failing(ValueError("the shapes do not fit"))


class Unbuildable(Blobs):
    def model(self):
        return nn.Linear("eight", 4)
"""


def write_module(folder: Path, monkeypatch: pytest.MonkeyPatch, more: str = "") -> str:
    """Writes the module, and `more`, into `folder`, makes it importable and returns its name, unique in all tests."""
    name = f"own_tasks_{abs(hash(folder))}"
    (folder / f"{name}.py").write_text(MODULE + more)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def own_spec(task: str, **settings: object) -> RunSpec:
    """The spec of a run of one of the tasks above."""
    return RunSpec(**{"task": task, "recipe": RECIPE, "control": CONTROL, "device": "cpu", **settings})  # type: ignore[arg-type]
