"""Reports where a trained model is, and registers it in MLflow on request."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

from triaccel_ray.service.console import err, out
from triaccel_ray.service.runs.record import RunRecord
from triaccel_ray.service.storage.layout import MODEL
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.service.storage.store import Store
from triaccel_ray.service.tracking.model_registry import register
from triaccel_ray.service.tracking.shipped import read_shipped
from triaccel_ray.service.tracking.tracking import Tracker


def deliver_model(run: RunRecord, place: StoragePath, tracker: Tracker, resume_command: str) -> bool:
    """Prints where the trained model of a finished run is, and registers it if the run has `register` set.

    Returns False if registering failed. The run still counts as finished, and `resume_command` retries.
    """
    if run.end is None or run.end.kept_epoch is None:
        return True
    out.print(f"model:    {place}/{MODEL} ({_origin(run, run.end.kept_epoch)})", soft_wrap=True)
    name = run.spec.register
    if name is None:
        return True
    try:
        tracker.check()  # fails within 3 s; a call to a server that hangs would block for 40 s
        shipped = read_shipped(run.folder)
        if shipped is None or shipped.run_id is None:
            raise RuntimeError(f"the run is not yet recorded in {tracker.uri}")
        tags = {"task": run.spec.task, "epoch": str(run.end.kept_epoch)}
        version = register(tracker, shipped.run_id, name, lambda: trained_model(run, place), tags)
    except Exception as error:  # from MLflow, its store, the network, the disk, or the task's own code
        why = f"{type(error).__name__}: {error}"
        text = f"the model is not registered as {name} ({why}). Nothing is lost: `{resume_command}` registers it"
        err.print(text, style="yellow", soft_wrap=True)
        return False
    out.print(f"          models:/{name}/{version} in {tracker.uri}", soft_wrap=True)
    return True


def trained_model(run: RunRecord, place: StoragePath) -> nn.Module:
    """Returns the model of the run's task, in evaluation mode, with the weights that the run saved at `place`.

    Raises:
        FileNotFoundError, StoreError: the weights are missing.
        Exception: anything that the task's own code raises.
    """
    spec = run.spec
    model = spec.load_task().model()
    with tempfile.TemporaryDirectory() as scratch:
        path = run.folder / MODEL
        if place.uri is not None:  # perhaps trained on another machine
            path = Path(scratch, MODEL)
            Store(place.uri).read(f"{place.name}/{MODEL}", path)
        model.load_state_dict(torch.load(path, weights_only=True))
    return model.eval()


def _origin(run: RunRecord, kept_epoch: int) -> str:
    """Returns which epoch the weights are from; for the best epoch, also its metric."""
    if run.spec.keep != "best":
        return f"epoch {kept_epoch}, the last"
    goal, num_epochs = run.start.goal, run.epochs[-1].epoch
    figure = next(epoch.held_out(goal) for epoch in run.epochs if epoch.epoch == kept_epoch)
    assert figure is not None
    return f"epoch {kept_epoch}, the best of {num_epochs}: {goal.named(figure)}"
