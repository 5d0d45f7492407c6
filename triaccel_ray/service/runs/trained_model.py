"""Saves a run's trained model to a file: the weights after the last epoch, or after the best one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from triaccel_ray.records.checkpoint import save_durably
from triaccel_ray.records.codec import decode, encode
from triaccel_ray.records.events import Epoch
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.failures import reporting_full_disk
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.storage.layout import MODEL


class TrainedModel:
    """The file MODEL of one run, and the epoch that its weights are from.

    The best epoch's weights are written at once. Later checkpoints hold them too, and a run that resumes from one
    rewrites the file. So the file matches the checkpoint, and never holds an epoch that is no longer in the log.
    """

    def __init__(self, spec: RunSpec, folder: Path, confirm: Callable[[], None]) -> None:
        """Writes nothing yet; before the file is replaced, `confirm` is called, and may raise."""
        self._confirm = confirm
        self._keep, self._goal, self._path = spec.keep, spec.goal, folder / MODEL
        self._best: Epoch | None = None

    def after_epoch(self, epoch: Epoch, model: nn.Module) -> None:
        """Writes the weights if the run keeps the best ones and this epoch is the best so far."""
        if self._keep == "best" and (self._best is None or is_better(epoch, self._best, self._goal)):
            self._write(model.state_dict())
            self._best = epoch

    def finish(self, last: Epoch, model: nn.Module) -> int | None:
        """Writes the last weights if the run keeps those; returns the epoch of the kept weights, None if none are."""
        if self._keep == "last":
            self._write(model.state_dict())
            return last.epoch
        return None if self._best is None else self._best.epoch

    def state_dict(self, last: Epoch | None) -> dict[str, Any] | None:
        """Returns the state for a checkpoint after `last`: the best epoch, with its weights unless it is `last`."""
        if self._best is None or last is None:
            return None
        is_last = self._best.epoch == last.epoch
        weights = None if is_last else torch.load(self._path, mmap=True, weights_only=True)
        return {"epoch": encode(self._best), "weights": weights}

    def load_state_dict(self, state: Mapping[str, Any] | None, model: nn.Module) -> None:
        """Restores what `state_dict` returned, and rewrites the file; `model` has the weights of that checkpoint."""
        if state is not None:
            self._write(model.state_dict() if state["weights"] is None else state["weights"])
            self._best = decode(Epoch, state["epoch"])

    def _write(self, weights: dict[str, Any]) -> None:
        for name, value in weights.items():  # in place: the mapping carries the versions of its modules
            weights[name] = value.cpu() if isinstance(value, Tensor) else value
        with reporting_full_disk(self._path.parent):
            save_durably(self._path, weights, confirm=self._confirm)


def is_better(epoch: Epoch, earlier: Epoch, goal: Goal) -> bool:
    """Returns whether `epoch` has a better validation metric than `earlier`; an equal one, or NaN, is not better."""
    value, best = epoch.held_out(goal), earlier.held_out(goal)
    assert value is not None
    assert best is not None  # a run that keeps the best epoch validates after each
    if math.isnan(best):
        return not math.isnan(value)
    return value > best if goal.maximize else value < best
