"""Mistakes in a task of a user's own: each is named before anything trains."""

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.build import blobs
from tests.service.local_trial import local_run, trained
from tests.service.own_task import own_spec
from tests.service.runs.several import Several
from triaccel_ray.config import ControlConfig
from triaccel_ray.model.dry_run import IN_YOUR_CODE, UserCodeError
from triaccel_ray.model.metrics import Metric
from triaccel_ray.service.failures import RunFailedError, cause_of, picklable
from triaccel_ray.service.runs.record import read_run
from triaccel_ray.service.runs.shared_data import share_splits
from triaccel_ray.service.runs.worker import Worker
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.trainables.registry import load_task
from triaccel_ray.trainables.task import Purpose, Recipe, Splits, Task

HERE = __name__


def task(name: str, base: type[Task] = Several, **attributes: Any) -> type[Task]:
    return type(name, (base,), {**attributes, "__module__": HERE})


class TwoOutputs(nn.Linear):
    def forward(self, inputs: Tensor) -> Any:
        return super().forward(inputs), None


def shifted(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return inputs, targets + 5


def numbers(self: Task, purpose: Purpose) -> Splits:
    samples = torch.randn(160, 8), torch.randn(160, 1)
    return Splits(train=samples, held_out=torch.utils.data.TensorDataset(*samples))


def within_half(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs() < 0.5


DataNone = task("DataNone", data=lambda self, purpose: None)
DataRaises = task("DataRaises", data=lambda self, purpose: Splits(train=self.samples, held_out=self.samples))
ModelNone = task("ModelNone", model=lambda self: None)
TupleOutputs = task("TupleOutputs", model=lambda self: TwoOutputs(8, 4))
Meta = task("Meta", model=lambda self: nn.Linear(8, 4, device="meta"))
OtherHeldOut = task("OtherHeldOut", data=lambda self, _: Splits(train=blobs(160), held_out=shifted(*blobs(50))))
Few = task("Few", data=lambda self, purpose: Splits(train=blobs(40), held_out=blobs(50)))
Regression = task(
    "Regression",
    model=lambda self: nn.Linear(8, 1),
    data=numbers,
    loss=lambda self, outputs, targets, recipe: nn.functional.mse_loss(outputs, targets),
)
Tolerant = task("Tolerant", Regression, metrics={"within_half": Metric(values=within_half)}, objective="within_half")
LossAlone = task("LossAlone", Regression, metrics={}, objective="loss")
Undecided = task("Undecided", metrics={})
Plain = task("Plain", metrics={"accuracy": lambda outputs, targets: outputs.argmax(1) == targets})
ControlDict = task("ControlDict", control={"every_steps": 2})
NoRecipe = task("NoRecipe", loss=lambda self, outputs, targets: None)


class ModelRaises(Several):
    def model(self) -> nn.Module:
        return {"mlp": super().model()}["cnn"]


class ExitsLater(Several):
    def loss(self, outputs: Tensor, targets: Tensor, recipe: Recipe) -> Tensor:
        if len(targets) > 2:
            sys.exit(3)
        return super().loss(outputs, targets, recipe)


class Unmakeable(Several):
    def __init__(self, data_dir: Path | None) -> None:
        super().__init__(data_dir)
        self.files = {}["train"]


@pytest.mark.parametrize(
    ("task", "kind", "needles"),
    [
        ("DataNone", TypeError, ["DataNone.data() returned None: must return Splits(train=..., held_out=...)"]),
        ("DataRaises", UserCodeError, ["DataRaises.data() raised AttributeError", "Splits(train=self.samples"]),
        ("ModelNone", TypeError, ["ModelNone.model() returned None: must return a torch.nn.Module"]),
        ("ModelRaises", UserCodeError, ["ModelRaises.model() raised KeyError: 'cnn'", IN_YOUR_CODE, "in model"]),
        ("TupleOutputs", TypeError, ["outputs tuple of float32 (2, 4), None: cross-entropy needs a tensor"]),
        ("Meta", UserCodeError, ["Meta.model().to('cpu') raised NotImplementedError"]),
        ("OtherHeldOut", UserCodeError, ["the loss raised IndexError: Target "]),
    ],
)
def test_a_mistake_is_named_before_anything_trains(
    tmp_path: Path, task: str, kind: type[Exception], needles: list[str]
) -> None:
    with pytest.raises(kind) as refused:
        Worker(own_spec(f"{HERE}:{task}"), tmp_path / "run")
    assert type(refused.value) is kind
    assert [needle for needle in needles if needle not in str(refused.value)] == []
    assert len(str(refused.value).splitlines()) <= 8
    assert not (tmp_path / "run").exists()


def test_a_search_hears_of_it_where_it_shares_the_samples() -> None:
    with pytest.raises(TypeError, match=r"DataNone.data\(\) returned None"):
        share_splits(own_spec(f"{HERE}:DataNone"))


def test_a_task_may_be_given_by_tensors_and_judged_its_own_way(tmp_path: Path) -> None:
    for task, objective, most in (("Tolerant", "within_half", 1.0), ("LossAlone", "loss", 10.0)):
        name, folder = f"{HERE}:{task}", tmp_path / task
        trained(local_run(own_spec(name, goal=load_task(name, None).goal), StoragePath.of(folder)))
        results = read_run(folder).end.results
        assert 0.0 < results[objective] <= most
        assert results["score"] > 0.0


def test_what_fails_later_shows_the_users_lines_across_processes(tmp_path: Path) -> None:
    result = trained(local_run(own_spec(f"{HERE}:ExitsLater"), StoragePath.of(tmp_path / "run")))
    traveled = pickle.loads(pickle.dumps(result["error"]))
    assert isinstance(traveled, UserCodeError)
    told = RunFailedError(tmp_path / "run", traveled)
    assert cause_of(told) == "bug"
    assert "the task's code called sys.exit(3): raise an error that says what is wrong" in str(told)
    assert str(told).count(IN_YOUR_CODE) == 1
    assert "in loss" in str(told)


def test_settings_that_do_not_fit_the_task_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="objective of the task = 'loss': the run is judged by accuracy"):
        Worker(own_spec(f"{HERE}:LossAlone"), tmp_path / "run")
    usual = ControlConfig()  # batches of 96, and of 512 at most
    Worker(own_spec(f"{HERE}:Several", control=usual), tmp_path / "a").close()
    with pytest.raises(ValueError, match=r"batch size = 96: must be .* samples, 40; give --batch-size 40"):
        Worker(own_spec(f"{HERE}:Few", control=usual), tmp_path / "b")


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("Undecided", "Undecided.objective = 'accuracy': must be one of Undecided.metrics, which has"),
        ("Plain", "must be a Metric, not a function"),
        ("ControlDict", r"ControlDict.control = .*: must be a ControlConfig, not a dict; write ControlConfig\(\*\*"),
        ("NoRecipe", r"NoRecipe.loss \(.*test_mistakes.py:\d+\) takes \(outputs, targets\): must take \(outputs, tar"),
        ("Unmakeable", r"Unmakeable\(data_dir\) raised KeyError: 'train' \(.*test_mistakes.py:\d+\)"),
    ],
)
def test_a_task_with_odd_attributes_is_refused(task: str, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        load_task(f"{HERE}:{task}", None)


class UntraveledError(Exception):
    """Cannot be made anew from its message."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} of {other}")


def test_an_error_that_cannot_travel_is_told_by_one_that_can() -> None:
    told = picklable(UntraveledError(1, 2))
    assert (type(told), str(told)) == (RuntimeError, "UntraveledError: 1 of 2")
    assert "UntraveledError: 1 of 2" in told.__notes__[0]
