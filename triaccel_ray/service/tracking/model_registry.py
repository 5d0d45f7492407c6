"""MLflow's model registry: the trained model of a recorded run, once."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from triaccel_ray.service.tracking.tracking import Tracker

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from torch import nn

ARTIFACT = "model"
"""Folder among the artifacts of the run."""


def register(tracker: Tracker, run_id: str, name: str, build: Callable[[], nn.Module], tags: Mapping[str, str]) -> str:
    """Returns the version under which the model of the run `run_id` is registered as `name`; `build` makes the model.

    A version with the run's id and these `tags` is looked for first, so that a model is registered once however often
    this is tried. One that a lost answer has made twice is deleted, unless it has an alias.

    Raises:
        Exception: whatever MLflow, its store, the network or `build` raise.
    """
    # `mlflow.pytorch.log_model` would go by MLflow's process-wide tracking URI, which is the user's.
    from mlflow.exceptions import MlflowException

    versions = _versions(tracker, run_id, name, tags)
    if not versions:
        source = _upload(tracker, run_id, build())
        try:
            tracker.client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        tracker.client.create_model_version(name, source, run_id, tags=dict(tags), await_creation_for=0)
        versions = _versions(tracker, run_id, name, tags)
    for twin in versions[1:]:
        if not twin.aliases:
            tracker.client.delete_model_version(name, str(twin.version))
    return str(versions[0].version)


def _versions(tracker: Tracker, run_id: str, name: str, tags: Mapping[str, str]) -> list[ModelVersion]:
    """Returns the versions of the model `name` that were made of the run with these tags, oldest first."""
    found = tracker.client.search_model_versions(f"run_id = '{run_id}'")
    ours = [each for each in found if each.name == name and tags.items() <= each.tags.items()]
    return sorted(ours, key=lambda version: int(version.version))


def _upload(tracker: Tracker, run_id: str, model: nn.Module) -> str:
    """Makes the model an artifact of the run, and returns where it is."""
    import mlflow.pytorch
    from mlflow.models import Model

    # It warns of pickle, the one format that keeps a module of any class.
    logging.getLogger("mlflow.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of MLflow's own imports
        folder = Path(scratch, ARTIFACT)
        mlflow.pytorch.save_model(
            model,
            str(folder),
            mlflow_model=Model(artifact_path=ARTIFACT, run_id=run_id),
            pip_requirements=mlflow.pytorch.get_default_pip_requirements(),  # else looked for by loading it elsewhere
            serialization_format="pickle",
        )
        tracker.client.log_artifacts(run_id, str(folder), artifact_path=ARTIFACT)
    return f"{tracker.client.get_run(run_id).info.artifact_uri}/{ARTIFACT}"
