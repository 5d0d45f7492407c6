"""Sets of runs on logical GPUs: which process each has."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import nn

from tests.build import blobs, mlp
from tests.service.own_task import own_spec
from trainables.task import Purpose, Splits, Task
from triaccel_ray.service.failures import RunFailedError
from triaccel_ray.service.runs.record import read_run
from triaccel_ray.service.runs.runs import run_all
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.storage.place import Place
from triaccel_ray.sources import TensorSource

pytestmark = pytest.mark.usefixtures("own_ray")


class Noted(Task):
    """Notes the process that builds its model, in its data folder."""

    name = "noted"

    def model(self) -> nn.Module:
        assert self.data_dir is not None
        with (self.data_dir / "processes").open("a") as file:
            file.write(f"{os.getpid()}\n")
        return mlp()

    def data(self, purpose: Purpose) -> Splits:
        return Splits(train=TensorSource(*blobs(160)), held_out=TensorSource(*blobs(50, seed=1)))


class FailingFirst(Noted):
    """Its first model cannot be trained."""

    def model(self) -> nn.Module:
        model = super().model()
        return model if self.num_made() > 1 else nn.Sequential(model, Refusing())

    def num_made(self) -> int:
        assert self.data_dir is not None
        return len((self.data_dir / "processes").read_text().split())


class Refusing(nn.Module):
    def forward(self, inputs: object) -> object:
        if self.training:
            raise ValueError("a mistake in the model")
        return inputs


def specs_of(task: str, folder: Path, *methods: str, num_seeds: int) -> dict[str, RunSpec]:
    return {
        f"{method}-seed{seed}": own_spec(f"{__name__}:{task}", data_dir=str(folder), method=method, seed=seed)
        for seed in range(num_seeds)
        for method in methods
    }


def run(specs: Mapping[str, RunSpec], folder: Path, num_gpus: float) -> dict[str, Mapping[str, float] | Exception]:
    return run_all(specs, Place(str(folder)), num_gpus=num_gpus, on_glance=lambda glance: None, resume=True)


def processes(folder: Path) -> list[str]:
    return (folder / "processes").read_text().split()


def test_on_gpus_runs_of_one_method_share_a_process_and_are_what_they_are_apart(tmp_path: Path) -> None:
    together, apart = tmp_path / "together", tmp_path / "apart"
    for folder, methods, num_gpus in ((together, ("fp32", "engine-amp"), 1), (apart, ("engine-amp",), 0)):
        folder.mkdir()
        run(specs_of("Noted", folder, *methods, num_seeds=2), folder, num_gpus)
    assert len(processes(together)) == 4
    assert len(set(processes(together))) == 2
    assert len(set(processes(apart))) == 2
    for seed in range(2):
        one, other = (read_run(folder / f"engine-amp-seed{seed}") for folder in (together, apart))
        assert (one.status, other.status) == ("finished", "finished")
        assert [e.train_loss for e in one.epochs] == pytest.approx([e.train_loss for e in other.epochs], rel=1e-6)


def test_a_process_whose_run_failed_is_not_used_again(tmp_path: Path) -> None:
    outcomes = run(specs_of("FailingFirst", tmp_path, "fp32", num_seeds=2), tmp_path, 2)  # one after the other
    failed = [name for name, outcome in outcomes.items() if isinstance(outcome, RunFailedError)]
    assert len(failed) == 1
    assert len(set(processes(tmp_path))) == 2
