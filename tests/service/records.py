"""Runs and searches as they are read back, of whatever outcome a test needs; none has trained."""

from dataclasses import replace
from pathlib import Path

from tests.service.build import CONTROL, SimulatedRun
from triaccel_ray.config import BatchConfig, ControlConfig
from triaccel_ray.records.events import End, Start
from triaccel_ray.service.runs.objective import Objective
from triaccel_ray.service.runs.record import RunRecord
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.search.search import Prepared, SearchRecord
from triaccel_ray.service.search.spec import SearchSpec
from triaccel_ray.trainables.task import Purpose

RUN_SPEC = RunSpec(task="cifar10-resnet18", control=CONTROL)
FINAL_SPEC = replace(
    RUN_SPEC,
    purpose=Purpose.FINAL,
    control=ControlConfig(batch=BatchConfig(start=96, minimum=32, maximum=160, lr_rule="none")),
)


def run_of(
    name: str, *, accuracy: float = 90.0, num_epochs: int = 2, status: str = "finished", method: str = "triaccel"
) -> RunRecord:
    """A run with that outcome, every epoch of the same accuracy, 10 s and 0.5 GB."""
    made = SimulatedRun(Path(name))
    made.make_tick()
    epoch = replace(made.make_epoch(), held_out_metrics={"accuracy": accuracy}, seconds=10.0, peak_bytes=500_000_000)
    end = End(status=status, cause="non_finite" * (status == "failed"))
    return RunRecord(
        folder=Path(name),
        spec=replace(RUN_SPEC, method=method),
        start=Start(control=CONTROL),
        ticks=(),
        epochs=tuple(replace(epoch, epoch=number + 1) for number in range(num_epochs)),
        end=None if status == "unfinished" else end,
    )


def search_of(*trials: RunRecord, objective: Objective | None = None) -> SearchRecord:
    methods = {"fp32": "fp32", "amp": "amp", "probe": "probe"}
    return SearchRecord(
        folder=Path("search"),
        spec=SearchSpec(base=RUN_SPEC),
        prepared=None if objective is None else Prepared(objective=objective, calibration=None, headroom_bytes=None),
        baselines={name: run_of(name, method=method) for name, method in methods.items()},
        trials=trials,
    )


def ended(name: str, *, accuracy: float = 90.0, seconds: float = 10.0) -> RunRecord:
    """A finished trial of that outcome."""
    run = run_of(name, accuracy=accuracy)
    epochs = tuple(replace(epoch, seconds=seconds) for epoch in run.epochs)
    return replace(run, epochs=epochs, end=End(status="finished", results={"accuracy": accuracy, "loss": 1.0}))


def named(*runs: RunRecord) -> dict[str, RunRecord]:
    return {run.name: run for run in runs}
