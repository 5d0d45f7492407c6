"""Workers in this process, what becomes of them, and what their logs say."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from triaccel_ray.records.events import End, Epoch, Record, Tick, read_events
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.runs.batch_tuner import BatchTuner
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.runs.worker import Worker
from triaccel_ray.service.storage.layout import EVENTS

Begin = Callable[..., Any]
"""Of a worker of one of the tests' own tasks; the fixture `start`."""


class WorkerFactory:
    """Makes workers, and closes those that a test leaves open."""

    def __init__(self) -> None:
        self._made: list[Worker | BatchTuner] = []

    def build(self, spec: RunSpec, folder: Path) -> Any:
        """Returns a worker, or the tuner of batch sizes that the spec asks for."""
        self._made.append((BatchTuner if spec.method == "tune-batch" else Worker)(spec, folder))
        return self._made[-1]

    def start(self, spec: RunSpec, folder: Path) -> Any:
        worker = self.build(spec, folder)
        worker.resume()
        return worker

    def close(self) -> None:
        for worker in self._made:
            if hasattr(worker, "loop"):
                worker.close()


def records(folder: Path) -> list[Record]:
    return [event.record for event in read_events(folder / EVENTS)]


def last_of(folder: Path) -> End:
    end = records(folder)[-1]
    assert isinstance(end, End)
    return end


def decided(folder: Path) -> list[Any]:
    """What the log says of decisions and learning; seconds and bytes differ from run to run."""
    told: list[Any] = []
    for record in records(folder):
        if isinstance(record, Tick):
            seen, made = record.observation, record.decision
            told.append((seen.step, seen.loss, seen.layers, made.plan, made.state, record.applied))
        elif isinstance(record, Epoch):
            told.append((record.epoch, record.step, record.train_loss, record.held_out(Goal()), record.held_out_loss))
    return told


def train(worker: Worker) -> Worker:
    while not worker.finished:
        worker.advance()
    return worker
