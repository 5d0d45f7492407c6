"""Registers the trained model of a recorded run in MLflow's model registry, once."""

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
    """Registers the model that `build` returns as `name`, once for the run `run_id`; returns the version.

    A version with the run's id and these `tags` is looked up first, so repeated calls register a model once. Duplicates
    that a lost answer has caused are deleted, unless they have an alias.

    Raises:
        Exception: any error of MLflow, its store, the network or `build`.
    """
    # `mlflow.pytorch.log_model` would use MLflow's process-wide tracking URI, which is the user's.
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
    """Returns the versions of the model `name` that come from the run and have these tags, oldest first."""
    of_run = tracker.client.search_model_versions(f"run_id = '{run_id}'")
    matching = [version for version in of_run if version.name == name and tags.items() <= version.tags.items()]
    return sorted(matching, key=lambda version: int(version.version))


def _upload(tracker: Tracker, run_id: str, model: nn.Module) -> str:
    """Uploads the model as an artifact of the run, and returns its URI."""
    import mlflow.pytorch
    from mlflow.models import Model

    # It warns about pickle, the only format that holds a module of any class.
    logging.getLogger("mlflow.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from MLflow's own imports
        folder = Path(scratch, ARTIFACT)
        mlflow.pytorch.save_model(
            model,
            str(folder),
            mlflow_model=Model(artifact_path=ARTIFACT, run_id=run_id),
            pip_requirements=mlflow.pytorch.get_default_pip_requirements(),  # else inferred by loading it elsewhere
            serialization_format="pickle",
        )
        tracker.client.log_artifacts(run_id, str(folder), artifact_path=ARTIFACT)
    return f"{tracker.client.get_run(run_id).info.artifact_uri}/{ARTIFACT}"
