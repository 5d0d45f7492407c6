"""Trials in this process, without Ray."""

from typing import Any

from triaccel_ray.service.runs.shared_data import SharedSplits
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.runs.trial import NAME_KEY, RunTrial, TrialContext
from triaccel_ray.service.storage.storage_path import StoragePath


class LocalTrial(RunTrial):
    """A trial in this process, which is no actor: it outlives the trial."""

    context: TrialContext

    def setup(self, config: dict[str, Any], context: TrialContext | None = None) -> None:
        self._context = self.context
        self._configure(config)


def local_trial(context: TrialContext, config: dict[str, Any]) -> RunTrial:
    return type("Trial", (LocalTrial,), {"context": context})(config)


def local_run(spec: RunSpec, place: StoragePath, shared: SharedSplits | None = None) -> RunTrial:
    """A run of its own at `place`, which no search judges."""
    context = TrialContext(place=place.parent, spec_of=lambda config: spec, shared=shared)
    return local_trial(context, {NAME_KEY: place.base_name})


def trained(trial: RunTrial) -> dict[str, Any]:
    """Trains it to its end, and returns its last result."""
    result = trial.step()
    while not result["done"]:
        result = trial.step()
    trial.cleanup()
    return result
