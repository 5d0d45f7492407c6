"""A Tune trial is the actor that owns the GPU: a thin adapter around `Worker`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray import tune

from search_spaces.thresholds import Calibration, thresholds
from triaccel_ray.out_of_memory import is_out_of_memory
from triaccel_ray.service.objective import Objective
from triaccel_ray.service.shared_data import SharedSplits
from triaccel_ray.service.spec import RunSpec
from triaccel_ray.service.worker import CHECKPOINT, NonFiniteLossError, Worker

FAILED_OBJECTIVE = -1000.0
"""Objective of a configuration that diverged or never fitted: below every shortfall in percentage points."""


@dataclass(frozen=True, kw_only=True)
class TrialContext:
    """What all trials of a search have in common."""

    spec: RunSpec
    """Everything but the thresholds."""
    objective: Objective
    calibration: Calibration | None
    folder: str
    """Holds one folder a trial."""
    shared: SharedSplits | None = None
    """The samples; None where each trial reads them itself."""


class ThresholdTrial(tune.Trainable):
    """One configuration of thresholds, trained one epoch a step."""

    _worker: Worker | None = None
    _started = False

    def setup(self, config: dict[str, Any], context: TrialContext | None = None) -> None:
        """Builds the run that the sampled thresholds mean."""
        if context is None:
            raise TypeError("context = None: pass one by tune.with_parameters(ThresholdTrial, context=...)")
        self._context = context
        self._build(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Makes way for another configuration in the same actor, which keeps its CUDA context."""
        self._leave()
        self._build(new_config)
        return True

    def step(self) -> dict[str, Any]:
        """Trains one epoch; a configuration that diverges or never fits is a result, not an error."""
        worker = self._get()
        if not self._started:
            worker.start(replace_existing=True)
            self._started = True
        try:
            record = worker.train_epoch()
        except (NonFiniteLossError, RuntimeError, MemoryError) as error:
            if not isinstance(error, NonFiniteLossError) and not is_out_of_memory(error):
                raise
            epoch = worker.loop.feed.epoch
            failed = {"accuracy": 0.0, "seconds_per_epoch": 1e9, "peak_gb": 1e9, "score": 0.0}
            return {**failed, "epoch": epoch, "objective": FAILED_OBJECTIVE, "done": True}
        figures = worker.figures
        if worker.finished:
            worker.finish()
        return {
            "epoch": record.epoch,
            "accuracy": figures.accuracy,
            "seconds_per_epoch": figures.seconds,
            "peak_gb": figures.peak_gb,
            "score": figures.score,
            "objective": self._context.objective.value(record.epoch, figures),
            "done": worker.finished,
        }

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Writes the run's checkpoint."""
        self._get().save(Path(checkpoint_dir) / CHECKPOINT)

    def load_checkpoint(self, checkpoint: dict[str, Any] | str | None) -> None:
        """Goes on from the run's checkpoint."""
        self._get().restore(Path(str(checkpoint)) / CHECKPOINT)
        self._started = True

    def cleanup(self) -> None:
        """Ends the run's log and lets go of its memory."""
        self._leave()

    def _build(self, config: dict[str, Any]) -> None:
        context = self._context
        control = thresholds(config, context.spec.control, context.calibration)
        spec = replace(context.spec, control=control)
        splits = None if context.shared is None else context.shared.get()
        self._worker = Worker(spec, Path(context.folder) / self.trial_id, splits)
        self._started = False

    def _leave(self) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        if self._started and not worker.ended:
            worker.stop()
        worker.close()

    def _get(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("the trial has been cleaned up")
        return self._worker
