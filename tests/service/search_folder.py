"""A search's folder as a search leaves it, on a simulated device: baselines, and trials all over the thresholds."""

import random
from dataclasses import replace
from pathlib import Path

from tests.service.build import CONTROL, SimulatedRun
from tests.service.records import RUN_SPEC
from triaccel_ray.config import ControlConfig
from triaccel_ray.service.runs.objective import Objective
from triaccel_ray.service.search.search import Prepared
from triaccel_ray.service.search.spec import SearchSpec
from triaccel_ray.service.storage.layout import BASELINES, PREPARED, SEARCH, SPEC, TRIALS, write_value


def controls(num_trials: int) -> list[ControlConfig]:
    """As many configurations, all of the four thresholds drawn."""
    chance = random.Random(0)
    drawn = []
    for _ in range(num_trials):
        low, high = 10.0 ** chance.uniform(-7.5, -5.0), chance.uniform(0.4, 0.95)
        precision = replace(CONTROL.precision, tau_low=low, tau_high=low * 10.0 ** chance.uniform(0.3, 3.0))
        batch = replace(CONTROL.batch, rho_high=high, rho_low=high * chance.uniform(0.3, 0.9))
        drawn.append(replace(CONTROL, precision=precision, batch=batch))
    return drawn


def simulated_search(folder: Path, num_trials: int, *, num_epochs: int = 3, task: str = RUN_SPEC.task) -> Path:
    """Writes a search of which every third trial was stopped after its first epoch; returns its folder."""
    base = replace(RUN_SPEC, task=task, recipe=replace(RUN_SPEC.recipe, epochs=num_epochs))
    runs = {f"{BASELINES}/{method}": replace(base, method=method, control=CONTROL) for method in ("fp32", "amp")}
    for index, control in enumerate(controls(num_trials)):
        runs[f"{TRIALS}/trial{index:02}"] = replace(base, method="triaccel", control=control)
    for index, (name, spec) in enumerate(runs.items()):
        run = SimulatedRun(folder / name, control=spec.control, seed=index)
        run.info = {**run.info, "task": spec.task, "method": spec.method}
        stopped = spec.method == "triaccel" and index % 3 == 0
        run.start(epochs=1 if stopped else num_epochs)
        run.end("stopped" if stopped else "finished")
        write_value(run.folder / SPEC, spec)
    reference = tuple(60.0 for _ in range(num_epochs))
    prepared = Prepared(objective=Objective(reference=reference), calibration=None, headroom_bytes=None)
    write_value(folder / SEARCH, SearchSpec(base=base, num_trials=num_trials))
    write_value(folder / PREPARED, prepared)
    return SimulatedRun(folder).complete(epochs=0)
