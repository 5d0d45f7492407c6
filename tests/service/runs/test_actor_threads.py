"""Which threads of a run's actor do what, on a real Ray."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import ray
from torch import Tensor, nn

from triaccel_ray.service.runs.actor import start_actor
from triaccel_ray.service.runs.spec import run_spec
from triaccel_ray.service.storage.place import Place
from triaccel_ray.trainables.digits import Digits
from triaccel_ray.trainables.task import Purpose, Recipe

pytestmark = pytest.mark.usefixtures("own_ray")

NOTES = "threads.txt"
SLOW = "slow"


class Witness(Digits):
    """Notes the threads that build and train it, and where they are; waits in the first step while there is `slow`."""

    def _note(self, what: str) -> None:
        assert self.data_dir is not None
        with (self.data_dir / NOTES).open("a") as notes:
            notes.write(f"{what} {threading.get_ident()}\n")

    def model(self) -> nn.Module:
        self._note("build")
        return super().model()

    def loss(self, outputs: Tensor, targets: Tensor, recipe: Recipe) -> Tensor:
        self._note("loss")
        while self.data_dir is not None and (self.data_dir / SLOW).exists():
            time.sleep(0.05)
        return super().loss(outputs, targets, recipe)


def test_one_thread_builds_trains_and_ends_a_run_while_another_answers(tmp_path: Path) -> None:
    spec = run_spec(f"{__name__}:Witness", data_dir=tmp_path, recipe={"epochs": 4}, purpose=Purpose.FINAL)
    actor = start_actor(spec, Place(str(tmp_path / "run")), num_gpus=0)
    ray.get(actor.setup.remote(resume=False))
    (tmp_path / SLOW).touch()
    training = actor.train_epoch.remote()
    status = ray.get(actor.status.remote(), timeout=60)
    assert status is not None
    assert not ray.wait([training], timeout=0)[0]
    (tmp_path / SLOW).unlink()
    ray.get(training)
    for _ in range(3):
        ray.get(actor.train_epoch.remote())
    ray.get(actor.finish.remote())  # judges the model, which computes losses too
    notes = [line.split() for line in (tmp_path / NOTES).read_text().splitlines()]
    assert {what for what, _ in notes} == {"build", "loss"}
    assert len({ident for _, ident in notes}) == 1
    ray.kill(actor)
