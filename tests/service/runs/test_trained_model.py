"""What a run leaves behind: whose weights, under which names, and what becomes of them when it goes on elsewhere."""

import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.service.own_task import own_spec, write_module
from tests.service.records import run_of
from tests.service.worker_factory import Begin, WorkerFactory, decided, last_of, records, train
from triaccel_ray.records.checkpoint import load_checkpoint
from triaccel_ray.records.events import End, Interruption, TakenOverError
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.runs.trained_model import is_better
from triaccel_ray.service.storage.layout import CHECKPOINT, MODEL
from triaccel_ray.trainables.task import Purpose, Recipe

PASSING = """

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 4, bias=False)
        self.second.weight = self.first.weight
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.register_buffer("scale", torch.full((), 3, dtype=torch.int64))

    def get_extra_state(self):
        return {"version": 2}

    def set_extra_state(self, state):
        assert state == {"version": 2}

    def forward(self, x):
        return self.normed(self.first(x) + self.scale * self.second(x))


class OfAllKinds(Blobs):
    def model(self):
        return Tied()


class Passing(Task):
    # learns y = 2 x and is judged by y = x: best halfway
    metrics = {}
    objective = "loss"

    def model(self):
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def optimizer(self, model, recipe):
        return torch.optim.SGD(model.parameters(), lr=recipe.lr)

    def loss(self, outputs, targets, recipe):
        return (outputs - targets).square().mean()

    def data(self, purpose):
        x = torch.ones(64, 1)
        return Splits(train=TensorSource(x, 2 * x), held_out=TensorSource(x, x))
"""
BEST = 4


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with the two tasks above, too."""
    return write_module(tmp_path, monkeypatch, PASSING)


def passing(module: str, **settings: Any) -> RunSpec:
    """A run whose weight goes from 0 to 2, and whose best is epoch BEST."""
    goal = Goal(name="loss", maximize=False, unit="")
    spec = own_spec(f"{module}:Passing", goal=goal, keep="best", **settings)
    batch, curvature = replace(spec.control.batch, enabled=False), replace(spec.control.curvature, enabled=False)
    recipe = Recipe(epochs=7, lr=0.052, warmup_epochs=0.0)
    return replace(spec, recipe=recipe, control=replace(spec.control, batch=batch, curvature=curvature))


def weight(folder: Path) -> float:
    return float(torch.load(folder / MODEL, weights_only=True)["weight"])


@pytest.mark.parametrize("method", ["triaccel", "amp"])
@pytest.mark.parametrize("task", ["Pictures", "OfAllKinds"])
def test_the_weights_are_the_models_own(start: Begin, module: str, tmp_path: Path, task: str, method: str) -> None:
    worker = train(start(task, method=method, keep="last"))
    assert not (tmp_path / MODEL).exists()
    worker.finish()
    assert last_of(tmp_path).kept_epoch == 3
    model = getattr(sys.modules[module], task)().model()
    found = torch.load(tmp_path / MODEL, weights_only=True)
    assert list(found) == list(model.state_dict())
    assert {each.device.type for each in found.values() if isinstance(each, torch.Tensor)} == {"cpu"}
    model.load_state_dict(found)
    for name, value in worker.loop.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], value) if isinstance(value, torch.Tensor) else value == found[name]


def test_a_run_that_cannot_leave_its_weights_has_not_finished(start: Begin, tmp_path: Path) -> None:
    worker = train(start(keep="last"))
    (tmp_path / MODEL).mkdir()
    with pytest.raises(IsADirectoryError):
        worker.finish()
    assert not any(isinstance(record, End) for record in records(tmp_path))
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(("purpose", "keep", "kept"), [(Purpose.SEARCH, None, None), (Purpose.FINAL, "last", 3)])
def test_a_trial_leaves_no_weights_and_a_final_run_its_last(
    start: Begin, tmp_path: Path, purpose: Purpose, keep: str | None, kept: int | None
) -> None:
    train(start(purpose=purpose, keep=keep)).finish()
    assert (last_of(tmp_path).kept_epoch, (tmp_path / MODEL).exists()) == (kept, kept is not None)


def test_the_better_epoch_is_the_earlier_of_equals_and_has_a_figure() -> None:
    for maximize, ascending in ((True, (math.nan, 90.0, 91.0)), (False, (math.nan, 0.5, 0.4))):
        epochs = [run_of("run", accuracy=value).epochs[0] for value in ascending]
        for (i, earlier), (j, later) in itertools.product(enumerate(epochs), repeat=2):
            assert is_better(later, earlier, Goal(maximize=maximize, unit="")) == (j > i)


@pytest.mark.parametrize("method", ["triaccel", "fp32"])
def test_the_best_epochs_weights_are_there_at_once_and_stay(
    worker_factory: WorkerFactory, module: str, tmp_path: Path, method: str
) -> None:
    worker, kept, reached = worker_factory.start(passing(module, method=method), tmp_path), [], []
    while not worker.finished:
        worker.advance()
        reached.append(worker.loop.model.weight.item())
        kept.append(weight(tmp_path))
    assert min(reached, key=lambda each: abs(each - 1.0)) == reached[BEST - 1]
    assert kept == [*reached[:BEST], *[reached[BEST - 1]] * 3]
    worker.finish()
    assert last_of(tmp_path).kept_epoch == BEST
    assert weight(tmp_path) == reached[BEST - 1]


@pytest.mark.parametrize(
    ("saved", "lost", "left"),
    [(2, 1, "as it was"), (BEST - 1, 3, "torn"), (BEST, 2, "as it was"), (BEST + 2, 0, "gone")],
)
def test_a_run_that_goes_on_leaves_what_it_would_have_left(
    worker_factory: WorkerFactory, module: str, tmp_path: Path, saved: int, lost: int, left: str
) -> None:
    spec, folder = passing(module), tmp_path / "run"
    train(worker_factory.start(spec, tmp_path / "whole")).finish()
    first = worker_factory.start(spec, folder)
    for _ in range(saved):
        first.advance()
    at_checkpoint = weight(folder)
    first.checkpoint()
    for _ in range(lost):
        first.advance()
    first.close()
    if left == "torn":
        (folder / MODEL).write_bytes(b"torn")
    elif left == "gone":
        (folder / MODEL).unlink()
    (folder / f".{MODEL}.123.partial").write_bytes(b"half a model")
    second = worker_factory.build(spec, folder)
    assert second.resume() == saved
    assert weight(folder) == at_checkpoint
    train(second).finish()
    assert weight(folder) == weight(tmp_path / "whole")
    assert last_of(folder).kept_epoch == BEST
    assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize(
    ("step", "keep"), [("advance", "best"), ("checkpoint", "best"), ("stop", "best"), ("finish", "last")]
)
def test_a_process_that_outlives_its_run_writes_nothing_more(
    worker_factory: WorkerFactory, module: str, tmp_path: Path, step: str, keep: str
) -> None:
    spec, folder = replace(passing(module), keep=keep), tmp_path / "run"
    train(worker_factory.start(spec, tmp_path / "whole"))
    outliving = worker_factory.start(spec, folder)
    outliving.advance()
    outliving.checkpoint()
    if step == "finish":
        train(outliving)
    worker = worker_factory.build(spec, folder)
    assert worker.resume() == 1
    worker.advance()
    worker.checkpoint()
    (folder / MODEL).write_bytes(b"of the process that goes on")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(TakenOverError):
        getattr(outliving, step)()
    assert outliving.log.ended == (step in ("advance", "stop"))
    outliving.close()
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    train(worker).finish()
    assert decided(folder) == decided(tmp_path / "whole")
    assert [record.cause for record in records(folder) if isinstance(record, Interruption)] == ["preempted"]


def test_a_checkpoint_holds_the_best_weights_once(worker_factory: WorkerFactory, module: str, tmp_path: Path) -> None:
    worker, states = worker_factory.start(passing(module), tmp_path), []
    while not worker.finished:
        worker.advance()
        worker.checkpoint()
        states.append(load_checkpoint(tmp_path / CHECKPOINT)["trained_model"])
    assert [state["epoch"]["epoch"] for state in states] == [1, 2, 3, *[BEST] * 4]
    assert [state["weights"] for state in states[:BEST]] == [None] * BEST
    assert [float(state["weights"]["weight"]) for state in states[BEST:]] == [weight(tmp_path)] * 3
