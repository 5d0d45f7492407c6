"""The MLflow tracking store: checks that it is available, creates it, and finds or creates runs in it.

Everything goes through one `MlflowClient`. MLflow's process-wide state (tracking URI, active run) is never touched, so
a user's own MLflow code in the same process is unaffected. MLflow takes seconds to import, so it is imported at first
use: a command that records nothing does not wait for it.
"""

from __future__ import annotations

import contextlib
import getpass
import http.client
import logging
import os
import sqlite3
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from filelock import FileLock

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_SQLITE = "sqlite:///"
RUN_KEY_TAG = "triaccel.run_key"
"""Tag by which a run is found again if its id was lost after its creation, before it was saved."""

SUPERSEDED_TAG = "superseded"
_TAGS_OF_ONE_ATTEMPT = ("outcome", "failure", "interrupted", "resumed_from_step", SUPERSEDED_TAG, "mlflow.runName")

PROBE_TIMEOUT_S = 3.0

_ENVIRONMENT = {
    # The shipper retries later. MLflow's own seven retries would block a thread for minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # would garble the command's own output
    "MLFLOW_DISABLE_TELEMETRY": "true",  # send nothing on a user's behalf unasked
}
"""Settings of MLflow that only environment variables reach, unless the user has set them. They affect the whole process
and its children."""

_WAY_OUT = "start a server there (`mlflow server`), or record in a local file with --tracking-uri sqlite:///FILE"


def sqlite_path(uri: str) -> Path | None:
    """Returns the absolute path of a SQLite URI's file, else None."""
    name = uri.removeprefix(_SQLITE)
    if not uri.startswith(_SQLITE) or name in ("", ":memory:"):
        return None
    return Path(name).absolute()


class TrackingUnavailableError(ValueError):
    """The tracking store named by the user cannot be used; the message says which, why, and what to do."""


class Tracker:
    """Owns the client of one tracking store."""

    def __init__(self, uri: str, artifact_root: Path) -> None:
        """Stores the arguments; the store is opened at first use.

        Args:
            uri: `sqlite:///FILE`, `http://HOST:PORT` or `https://...`, checked by `locations.named_store`.
            artifact_root: folder of artifacts for a SQLite store; a server has its own.
        """
        path = sqlite_path(uri)
        self.uri = uri if path is None else f"{_SQLITE}{path}"
        self.artifact_root = artifact_root.absolute()
        self.asked_at: float | None = None
        """Monotonic time of the first call after the last successful one; None right after a success."""
        self._path = path

    def check(self) -> None:
        """Checks that the store can be used: a server answers within three seconds, or the file can be written.

        Raises:
            TrackingUnavailableError: it cannot.
        """
        if self._path is not None:
            self._check_file(self._path)
        else:
            self._check_server()

    def prepare(self) -> None:
        """Creates the store if it is new; any number of processes may call this at the same time.

        Raises:
            TrackingUnavailableError: the store cannot be used.
        """
        self.check()
        _ = self.client  # connecting creates it

    @cached_property
    def client(self) -> MlflowClient:
        """The client of the store, which it creates if needed; calls are timed (`asked_at`).

        Raises:
            TrackingUnavailableError: the SQLite file cannot be opened, or was made by another version of MLflow.
        """
        return cast("MlflowClient", _TimedClient(self, self._connect()))

    def _connect(self) -> MlflowClient:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        # This logger announces new tables, and logs a traceback for every error that MLflow raises.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
        from mlflow import MlflowClient

        if self._path is None:
            return MlflowClient(tracking_uri=self.uri)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.with_name(f"{self._path.name}.lock").touch()
        except OSError as error:  # the lock itself would retry forever
            raise self._unavailable(f"cannot be created ({error.strerror})") from error
        # First use creates the tables, which fails ("duplicate column name") in several processes at once.
        with FileLock(f"{self._path}.lock"):
            try:
                client = MlflowClient(tracking_uri=self.uri)
                client.search_experiments(max_results=1)
            except Exception as error:  # MLflow, SQLAlchemy and Alembic each raise their own
                raise self._unavailable(f"cannot be opened ({error})") from error
        return client

    def experiment_id(self, name: str) -> str:
        """Returns the id of the experiment, created if needed; others may create it at the same time.

        Raises:
            ValueError: it was deleted in MLflow and still holds its name.
        """
        from mlflow.exceptions import MlflowException

        found = self.client.get_experiment_by_name(name)
        if found is None:
            location = None if self._path is None else self.artifact_root.as_uri()
            try:
                tags = {"mlflow.experimentKind": "custom_model_development"}  # the UI opens on runs, not on chat traces
                return str(self.client.create_experiment(name, artifact_location=location, tags=tags))
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                found = self.client.get_experiment_by_name(name)
        if found is None or found.lifecycle_stage != "active":
            raise ValueError(
                f"experiment = {name!r}: was deleted in MLflow ({self.uri}); restore it with "
                "`mlflow experiments restore`, or choose another name"
            )
        return str(found.experiment_id)

    def find_run(self, run_id: str) -> Run | None:
        """Returns the run, even if deleted; None if the store does not have it."""
        from mlflow.exceptions import MlflowException

        try:
            return self.client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None

    def open_run(
        self,
        experiment: str,
        name: str,
        *,
        key: str,
        tags: Mapping[str, str],
        parent_id: str | None,
        start_ms: int,
    ) -> str:
        """Returns the id of the run that carries `key`, created (status RUNNING) if there is none.

        The key is unique in the experiment and has no quotes. Name, tags, parent and start (Unix time) apply to a
        new run only.
        """
        experiment_id = self.experiment_id(experiment)
        found = self._runs_with(experiment_id, key)
        if found:
            return found[0]
        all_tags = {**tags, RUN_KEY_TAG: key, "mlflow.user": _user_name(), "mlflow.source.name": "triaccel"}
        if parent_id is not None:
            all_tags["mlflow.parentRunId"] = parent_id
        run = self.client.create_run(experiment_id, start_time=start_ms, tags=all_tags, run_name=name)
        return str(run.info.run_id)

    def retire(self, run_id: str, name: str, tags: Mapping[str, str]) -> tuple[str, dict[str, str]]:
        """Deletes the run `run_id`, which a new one replaces, and returns the new run's name and tags.

        Name and tags are the old run's, which a user may have changed; `tags` override them, and `name` serves if the
        old run is gone. MLflow keeps a deleted run until `mlflow gc`.
        """
        from mlflow.exceptions import MlflowException

        new_tags, old = {**tags, "replaces": run_id}, self.find_run(run_id)
        if old is None:
            return name, new_tags
        if old.info.lifecycle_stage == "active":
            self.client.set_tag(run_id, SUPERSEDED_TAG, "cut off by an interruption; the run of this name goes on")
            self.client.set_tag(run_id, RUN_KEY_TAG, f"{old.data.tags.get(RUN_KEY_TAG)} superseded")
            try:
                self.client.delete_run(run_id)
            except MlflowException as error:
                if error.error_code != "PERMISSION_DENIED":
                    raise
                self.client.set_terminated(run_id, "KILLED")  # stays visible, marked by its tag
        kept = {tag: value for tag, value in old.data.tags.items() if tag not in _TAGS_OF_ONE_ATTEMPT}
        return str(old.info.run_name), {**kept, **new_tags}

    def delete_twins(self, run_id: str, key: str) -> None:
        """Deletes all other runs that carry `key`, in the experiment of the run `run_id`.

        Duplicates arise if a server's answer is lost and the call is retried, or a hanging server acts on a call late.
        """
        experiment_id = str(self.client.get_run(run_id).info.experiment_id)
        for twin in self._runs_with(experiment_id, key):
            if twin != run_id:
                self.client.delete_run(twin)

    def _runs_with(self, experiment_id: str, key: str) -> list[str]:
        found = self.client.search_runs([experiment_id], f"tags.`{RUN_KEY_TAG}` = '{key}'", max_results=100)
        return [str(run.info.run_id) for run in found]

    def _check_file(self, path: Path) -> None:
        existing = next(each for each in (path, *path.parents) if os.path.exists(each))
        if not os.access(existing, os.W_OK):
            raise self._unavailable("cannot be written; name a file in a folder of yours")
        if existing != path:
            return
        query = "SELECT name FROM sqlite_master WHERE type = 'table'"
        try:
            with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
                tables = sorted(str(name) for (name,) in connection.execute(query))
        except sqlite3.DatabaseError as error:
            raise self._unavailable(f"is not a SQLite database ({error}); name another file") from error
        if tables and "experiments" not in tables:
            raise self._unavailable(f"is a database of something else (tables {', '.join(tables[:3])}, ...)")

    def _check_server(self) -> None:
        try:
            urllib.request.urlopen(f"{self.uri.rstrip('/')}/health", timeout=PROBE_TIMEOUT_S).close()
        except urllib.error.HTTPError as error:
            raise self._unavailable(f"what answers there is no MLflow server (/health: {error.code})") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._unavailable(f"no MLflow server answers there ({error})") from error

    def _unavailable(self, rule: str) -> TrackingUnavailableError:
        return TrackingUnavailableError(f"tracking uri = {self.uri!r}: {rule}; {_WAY_OUT}")


class _TimedClient:
    """Proxy of a client that records in the tracker since when the store has not answered."""

    def __init__(self, tracker: Tracker, client: MlflowClient) -> None:
        self._tracker, self._client = tracker, client

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(*args: Any, **options: Any) -> Any:
            self._tracker.asked_at = self._tracker.asked_at or time.monotonic()
            result = method(*args, **options)
            self._tracker.asked_at = None
            return result

        return call if callable(method) else method


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container's user may have no name
        return "unknown"
