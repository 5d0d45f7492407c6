"""A real MLflow server that can be stopped, and functions to read back its runs."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.service.ray_head import free_ports
from tests.service.waiting import wait_until
from triaccel_ray.records.events import Interruption, Start, read_events
from triaccel_ray.service.tracking.metrics import metrics_of, step_of
from triaccel_ray.service.tracking.shipper import ParentRun, Shipper
from triaccel_ray.service.tracking.tracker import Tracker, TrackingUnavailableError


@dataclass
class Server:
    """An MLflow server on this machine, with one worker and a SQLite file; it can be stopped and started again."""

    folder: Path
    port: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def uri(self) -> str:
        """The server's tracking URI."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts the server process; `wait` returns when it answers."""
        self.port = self.port or free_port()
        words = ["--host=127.0.0.1", f"--port={self.port}", "--workers=1"]
        words += [f"--backend-store-uri=sqlite:///{self.folder / 'server.db'}"]
        words += [f"--artifacts-destination={self.folder / 'server-artifacts'}"]
        command = [sys.executable, "-m", "mlflow", "server", *words]
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self) -> None:
        """Returns when the server answers, after seven seconds on an idle machine."""
        wait_until(self._answers, say=(self.folder / "server.log").read_text)

    def _answers(self) -> bool:
        assert self._process is not None
        try:
            Tracker(self.uri, self.folder).check()
        except TrackingUnavailableError:
            assert self._process.poll() is None, (self.folder / "server.log").read_text()
            return False
        return True

    def stop(self) -> None:
        """Ends the server and its worker."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """Suspends the server: it accepts connections but answers only after the context has ended."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGCONT)


@dataclass(frozen=True)
class Recorded:
    """One run as recorded in MLflow."""

    id: str
    name: str
    status: str
    start_ms: int
    end_ms: int | None
    params: Mapping[str, str]
    tags: Mapping[str, str]
    keys: frozenset[str]
    """Names of the metrics."""


def runs(tracker: Tracker, experiment: str) -> list[Recorded]:
    """Returns all runs of the experiment that are not deleted, oldest first."""
    found: list[Any] = tracker.client.search_runs([tracker.experiment_id(experiment)], order_by=["start_time ASC"])
    return [
        Recorded(
            id=run.info.run_id,
            name=run.info.run_name,
            status=run.info.status,
            start_ms=run.info.start_time,
            end_ms=run.info.end_time,
            params=run.data.params,
            tags=run.data.tags,
            keys=frozenset(run.data.metrics),
        )
        for run in found
    ]


def only_run(tracker: Tracker, experiment: str) -> Recorded:
    """Returns the experiment's only run."""
    (run,) = runs(tracker, experiment)
    return run


def history(tracker: Tracker, run_id: str, key: str) -> list[tuple[int, int, float]]:
    """Returns all points of a metric as (step, time in milliseconds, value), by time."""
    points = tracker.client.get_metric_history(run_id, key)
    return sorted(((point.step, point.timestamp, point.value) for point in points), key=lambda point: point[1])


def assert_equals_log(tracker: Tracker, run: Recorded, log: Path) -> int:
    """Asserts that the run's history holds every value of the log once and no others; returns their number."""
    expected: dict[str, list[tuple[int, int, float]]] = {}
    for event in read_events(log):
        if not isinstance(event.record, Start | Interruption):
            for key, value in metrics_of(event.record).items():
                expected.setdefault(key, []).append((step_of(event.record), event.time_ms, value))
    assert run.keys == set(expected)
    for key, points in expected.items():
        assert sorted(history(tracker, run.id, key)) == sorted(set(points)), key  # a tick and its epoch may agree
    return sum(map(len, expected.values()))


def free_port() -> int:
    """Returns a free port of this machine."""
    return free_ports(1)[0]


def ship(tracker: Tracker, root: Path, experiment: str, parent: ParentRun | None = None) -> int:
    """Ships as a new process would, that has read nothing yet."""
    shipper = Shipper(tracker, root, experiment=experiment, parent=parent)
    num_events = shipper.ship_once()
    assert shipper.last_error is None
    return num_events
