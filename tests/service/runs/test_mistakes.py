"""Mistakes in a task of a user's own: each is named before anything trains."""

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.local_trial import local_run, trained
from tests.service.own_task import own_spec, write_module
from triaccel_ray.config import ControlConfig
from triaccel_ray.model.dry_run import IN_YOUR_CODE, UserCodeError
from triaccel_ray.service.failures import RunFailedError, cause_of, picklable
from triaccel_ray.service.runs.record import read_run
from triaccel_ray.service.runs.shared_data import share_splits
from triaccel_ray.service.runs.worker import Worker
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.trainables.registry import load_task

TASKS = """
import sys

from triaccel_ray.model.metrics import Metric


class DataNone(Blobs):
    def data(self, purpose):
        pass


class DataRaises(Blobs):
    def data(self, purpose):
        return Splits(train=self.samples, held_out=self.samples)


class ModelNone(Blobs):
    def model(self):
        super().model()


class ModelRaises(Blobs):
    def model(self):
        return {"mlp": super().model()}["cnn"]


class TupleOutputs(Blobs):
    def model(self):
        class Two(nn.Linear):
            def forward(self, inputs):
                return super().forward(inputs), None

        return Two(8, 4)


class Meta(Blobs):
    def model(self):
        return nn.Linear(8, 4, device="meta")


class OtherHeldOut(Blobs):
    def data(self, purpose):
        inputs, targets = blobs(50)
        return Splits(train=blobs(160), held_out=(inputs, targets + 5))


class Few(Blobs):
    def data(self, purpose):
        return Splits(train=blobs(40), held_out=blobs(50))


class ExitsLater(Blobs):
    def loss(self, outputs, targets, recipe):
        if len(targets) > 2:
            sys.exit(3)
        return super().loss(outputs, targets, recipe)


class Regression(Blobs):
    def model(self):
        return nn.Linear(8, 1)

    def data(self, purpose):
        samples = torch.randn(160, 8), torch.randn(160, 1)
        return Splits(train=samples, held_out=torch.utils.data.TensorDataset(*samples))

    def loss(self, outputs, targets, recipe):
        return nn.functional.mse_loss(outputs, targets)


class Tolerant(Regression):
    metrics = {"within_half": Metric(values=lambda outputs, targets: (outputs - targets).abs() < 0.5)}
    objective = "within_half"


class LossAlone(Regression):
    metrics = {}
    objective = "loss"


class Undecided(Blobs):
    metrics = {}


class Plain(Blobs):
    metrics = {"accuracy": lambda outputs, targets: outputs.argmax(1) == targets}


class ControlDict(Blobs):
    control = {"every_steps": 2}


class NoRecipe(Blobs):
    def loss(self, outputs, targets):
        pass


class Unmakeable(Blobs):
    def __init__(self, data_dir):
        super().__init__(data_dir)
        self.files = {}["train"]
"""


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The module's name."""
    with pytest.MonkeyPatch.context() as patch:
        yield write_module(tmp_path_factory.mktemp("mistakes"), patch, TASKS)


@pytest.mark.parametrize(
    ("task", "kind", "needles"),
    [
        ("DataNone", TypeError, ["DataNone.data() returned None: must return Splits(train=..., held_out=...)"]),
        ("DataRaises", UserCodeError, ["DataRaises.data() raised AttributeError", "return Splits(train=self.samples"]),
        ("ModelNone", TypeError, ["ModelNone.model() returned None: must return a torch.nn.Module"]),
        ("ModelRaises", UserCodeError, ["ModelRaises.model() raised KeyError: 'cnn'", IN_YOUR_CODE, "in model"]),
        ("TupleOutputs", TypeError, ["outputs tuple of float32 (2, 4), None: cross-entropy needs a tensor"]),
        ("Meta", UserCodeError, ["Meta.model().to('cpu') raised NotImplementedError"]),
        ("OtherHeldOut", UserCodeError, ["the loss raised IndexError: Target "]),
    ],
)
def test_a_mistake_is_named_before_anything_trains(
    mistakes: str, tmp_path: Path, task: str, kind: type[Exception], needles: list[str]
) -> None:
    with pytest.raises(kind) as refused:
        Worker(own_spec(f"{mistakes}:{task}"), tmp_path / "run")
    assert type(refused.value) is kind
    assert [needle for needle in needles if needle not in str(refused.value)] == []
    assert len(str(refused.value).splitlines()) <= 8
    assert not (tmp_path / "run").exists()


def test_a_search_hears_of_it_where_it_shares_the_samples(mistakes: str) -> None:
    with pytest.raises(TypeError, match=r"DataNone.data\(\) returned None"):
        share_splits(own_spec(f"{mistakes}:DataNone"))


def test_a_task_may_be_given_by_tensors_and_judged_its_own_way(mistakes: str, tmp_path: Path) -> None:
    for task, objective, most in (("Tolerant", "within_half", 1.0), ("LossAlone", "loss", 10.0)):
        name, folder = f"{mistakes}:{task}", tmp_path / task
        trained(local_run(own_spec(name, goal=load_task(name, None).goal), StoragePath.of(folder)))
        results = read_run(folder).end.results
        assert 0.0 < results[objective] <= most
        assert results["score"] > 0.0


def test_what_fails_later_shows_the_users_lines_across_processes(mistakes: str, tmp_path: Path) -> None:
    result = trained(local_run(own_spec(f"{mistakes}:ExitsLater"), StoragePath.of(tmp_path / "run")))
    traveled = pickle.loads(pickle.dumps(result["error"]))
    assert isinstance(traveled, UserCodeError)
    told = RunFailedError(tmp_path / "run", traveled)
    assert cause_of(told) == "bug"
    assert "the task's code called sys.exit(3): raise an error that says what is wrong" in str(told)
    assert str(told).count(IN_YOUR_CODE) == 1
    assert "in loss" in str(told)


def test_settings_that_do_not_fit_the_task_are_refused(mistakes: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="objective of the task = 'loss': the run is judged by accuracy"):
        Worker(own_spec(f"{mistakes}:LossAlone"), tmp_path / "run")
    usual = ControlConfig()  # batches of 96, and of 512 at most
    Worker(own_spec(f"{mistakes}:Blobs", control=usual), tmp_path / "a").close()
    with pytest.raises(ValueError, match=r"batch size = 96: must be .* samples, 40; give --batch-size 40"):
        Worker(own_spec(f"{mistakes}:Few", control=usual), tmp_path / "b")


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("Undecided", "Undecided.objective = 'accuracy': must be one of Undecided.metrics, which has"),
        ("Plain", "must be a Metric, not a function"),
        ("ControlDict", r"ControlDict.control = .*: must be a ControlConfig, not a dict; write ControlConfig\(\*\*"),
        ("NoRecipe", r"NoRecipe.loss \(.*own_tasks_\d+.py:\d+\) takes \(outputs, targets\): must take \(outputs, tar"),
        ("Unmakeable", r"Unmakeable\(data_dir\) raised KeyError: 'train' \(.*own_tasks_\d+.py:\d+\)"),
    ],
)
def test_a_task_with_odd_attributes_is_refused(mistakes: str, task: str, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        load_task(f"{mistakes}:{task}", None)


class UntraveledError(Exception):
    """Cannot be made anew from its message."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} of {other}")


def test_an_error_that_cannot_travel_is_told_by_one_that_can() -> None:
    told = picklable(UntraveledError(1, 2))
    assert (type(told), str(told)) == (RuntimeError, "UntraveledError: 1 of 2")
    assert "UntraveledError: 1 of 2" in told.__notes__[0]
