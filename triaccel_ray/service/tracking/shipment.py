"""One run's event log on its way to one MLflow run, and what of it has arrived."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from triaccel_ray.events import End, Event, Interruption, LogError, Start, parse_event
from triaccel_ray.jsonable import decode
from triaccel_ray.service.reports.figures import run_figures
from triaccel_ray.service.reports.run_page import write_run_page
from triaccel_ray.service.runs.record import read_run
from triaccel_ray.service.storage.layout import ERROR, EVENTS, FIGURES, SPEC, write_value
from triaccel_ray.service.tracking.log_tail import LogTail
from triaccel_ray.service.tracking.metrics import metrics_of, params_of, step_of, tags_of
from triaccel_ray.service.tracking.tracking import Tracker

SHIPPED = "mlflow.json"
ARTIFACTS = (
    EVENTS,
    SPEC,
    "found.json",
    "comparison.json",
    "choices.json",
    "comparison.md",
    "report.html",
    ERROR,
    FIGURES,
)
"""What is uploaded of a run's folder when the run ends."""

LONGEST_PARAM = 6000
"""Characters after which MLflow cuts a value."""

LOCK_TIMEOUT_S = 10.0

_STATUS: Mapping[str, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Label:
    """What a new MLflow run is called."""

    experiment: str
    name: str
    key: str
    """What the run is found by again, once completed by the time at which it began."""
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """What has arrived of one folder's log: the content of its `mlflow.json`."""

    store: str
    """Where it has arrived: another store gets everything from the beginning."""
    key: str
    """Tag that the MLflow run is found by; on the disk before the run is created."""
    experiment: str | None = None
    """The MLflow experiment that it was created in; None in files from before this was noted."""
    run_id: str | None = None
    """None until MLflow has assigned it."""
    cursor: int = -1
    """Sequence of the last tick or epoch shipped. An end does not count: a resumed run writes on in its place."""
    cursor_ms: int = -1
    """Time of the newest tick or epoch shipped."""
    cursor_step: int = -1
    """Largest optimizer step of a tick or epoch shipped: what a resumed run does again is on record already."""
    start_ms: int | None = None
    """Time of the start record shipped."""
    end_ms: int | None = None
    """Time of the end record shipped; None while the run goes on."""


def read_shipped(folder: Path) -> Shipped | None:
    """Returns what has arrived of the log in `folder`; None where nothing was ever sent.

    Raises:
        ValueError: `mlflow.json` is damaged.
    """
    path = folder / SHIPPED
    try:
        return decode(Shipped, json.loads(path.read_text())) if path.exists() else None
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): delete it, the run is found by its tag") from error


class Shipment:
    """Ships one folder's log; every step may be repeated after a crash or an outage without a second effect.

    A repeated metric has the same name, step, time and value, which MLflow keeps once; a run is looked for by its key
    before it is created, and what was created twice all the same is deleted; tags, artifacts and the final status
    overwrite themselves.
    """

    def __init__(self, tracker: Tracker, folder: Path, label: Label) -> None:
        """Remembers what to do; `folder` must exist before anything is shipped."""
        self.folder = folder
        self._tracker, self._label = tracker, label
        self._tail = LogTail(folder / EVENTS)
        self._shipped: Shipped | None = None
        self._verified = False
        self._settled = False
        self._alone = True

    def open(self) -> str:
        """Returns the id of the MLflow run, created if need be before there is any event: for a run of runs."""
        if not self._verified or self._shipped is None or self._shipped.run_id is None:
            with self._lock():
                self._load()
                return self._open(None, time.time_ns() // 1_000_000)
        return self._shipped.run_id

    def ship(self, parent_id: str | None = None) -> int:
        """Ships what is new in the log and returns the number of events; a new run is shown under `parent_id`.

        Raises:
            LogError: the log is damaged.
            Exception: whatever MLflow, its store or the network raise; nothing is lost by it.
        """
        if self._settled and not self._tail.changed:
            return 0
        self._settled, self._alone = False, parent_id is None
        try:
            with self._lock():
                self._load()
                num_events = sum(self._ship_block(lines, parent_id) for lines in self._tail.blocks())
                num_events += self._settle()
        except Exception:
            self.verify_again()
            raise
        self._settled = True
        return num_events

    def verify_again(self) -> None:
        """Makes the next shipment ask whether the run is still there: a failed call may mean that it is not."""
        self._verified = False

    def _lock(self) -> FileLock:
        """Two drivers may follow one folder: one that was given up, and the one that took over."""
        return FileLock(self.folder / f".{SHIPPED}.lock", timeout=LOCK_TIMEOUT_S)

    def _ship_block(self, lines: Sequence[bytes], parent_id: str | None) -> int:
        events = [event for number, line in enumerate(lines) if (event := self._new_event(line, number))]
        if not events:
            return 0
        for event in events:
            if isinstance(event.record, Start):
                self._open(parent_id, event.time_ms)
                self._ship_start(event.record)
                self._save(start_ms=event.time_ms)
            elif isinstance(event.record, Interruption):
                self._ship_interruption(event.record)
        before = self._started()
        steps = [step_of(event.record) for event in events if not isinstance(event.record, Start | Interruption)]
        sequences = [event.sequence for event in events if not isinstance(event.record, Interruption)]
        self._log_metrics(events)
        self._save(
            cursor=max([before.cursor, *sequences]),
            cursor_ms=max(before.cursor_ms, events[-1].time_ms),
            cursor_step=max([before.cursor_step, *steps]),
        )
        return len(events)

    def _new_event(self, line: bytes, number: int) -> Event | None:
        """Returns the event of a line, None for one that has arrived and for the end of the run.

        Whole events are costly to decode, so what is not needed is recognised before.
        """
        where = f"event log {self._tail.path}, line {self._tail.num_lines + number + 1}"
        try:
            raw = json.loads(line)
            kind, sequence, time_ms = raw["kind"], raw["sequence"], raw["time_ms"]
        except (ValueError, KeyError, TypeError):
            return parse_event(line, where)  # says what is wrong
        shipped = self._shipped
        if kind == "end" or (shipped and kind == "start" and time_ms == shipped.start_ms):
            return None
        if shipped is None or kind == "start" or sequence > shipped.cursor:
            return parse_event(line, where)
        if time_ms <= shipped.cursor_ms:
            return None
        # A resumed run has written on at a sequence that was shipped before: only steps not yet on record are new.
        event = parse_event(line, where)
        again = not isinstance(event.record, Start | Interruption) and step_of(event.record) <= shipped.cursor_step
        return None if again else event

    def _settle(self) -> int:
        """Ends the MLflow run when the log's last record is a new end, or opens it again when there is none now."""
        last = json.loads(self._tail.last_line) if self._tail.last_line else {"kind": "none"}
        if last["kind"] == "end":
            if self._shipped is None or last["time_ms"] != self._shipped.end_ms:
                self._finish(parse_event(self._tail.last_line, f"event log {self._tail.path}, last line"))
                return 1
        elif self._shipped is not None and self._shipped.end_ms is not None:
            self._tracker.client.update_run(self._run_id, status="RUNNING")
            self._save(end_ms=None)
        return 0

    def _open(self, parent_id: str | None, start_ms: int) -> str:
        """Returns the id of the run; a new one bears a key that a lost `mlflow.json` would lead to again."""
        label = self._label
        shipped = self._shipped or Shipped(store=self._tracker.display_uri, key=f"{label.key}@{start_ms}")
        if shipped.run_id is not None:
            return shipped.run_id
        self._write(replace(shipped, experiment=label.experiment))
        run_id = self._tracker.open_run(
            label.experiment, label.name, key=shipped.key, tags=label.tags, parent_id=parent_id, start_ms=start_ms
        )
        self._save(run_id=run_id)
        self._verified = True
        return run_id

    def _ship_start(self, start: Start) -> None:
        """Logs settings and tags. Params are for ever: one that a resumed run has changed is named in a tag instead."""
        from mlflow.entities import Param, RunTag

        known = self._tracker.client.get_run(self._run_id).data.params
        params = {name: value[:LONGEST_PARAM] for name, value in params_of(start).items()}
        changed = [
            f"{name}: {known[name]} -> {value}" for name, value in params.items() if known.get(name, value) != value
        ]
        tags = tags_of(start) | ({"changed_params": "; ".join(changed)} if changed else {})
        self._log(
            params=[Param(name, value) for name, value in params.items() if name not in known],
            tags=[RunTag(name, value) for name, value in tags.items()],
        )

    def _ship_interruption(self, interruption: Interruption) -> None:
        from mlflow.entities import RunTag

        self._log(tags=[RunTag("interrupted", f"{interruption.cause}: {interruption.message}")])

    def _log_metrics(self, events: Sequence[Event]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, event.time_ms, step_of(event.record))
            for event in events
            if not isinstance(event.record, Start | Interruption)
            for name, value in metrics_of(event.record).items()
        ]
        self._log(metrics=metrics)

    def _finish(self, event: Event) -> None:
        from mlflow.entities import RunTag

        end = event.record
        assert isinstance(end, End)
        self._log_metrics([event])
        outcome = ": ".join(filter(None, (end.status, end.cause, end.message)))
        self._log(tags=[RunTag("outcome", outcome)])
        self._draw()
        client = self._tracker.client
        for path in (self.folder / name for name in ARTIFACTS):
            if path.is_dir():
                client.log_artifacts(self._run_id, str(path), artifact_path=path.name)
            elif path.exists():
                client.log_artifact(self._run_id, str(path))
        self._tracker.delete_twins(self._run_id, self._started().key)
        client.set_terminated(self._run_id, _STATUS.get(end.status, "FAILED"), end_time=event.time_ms)
        self._save(end_ms=event.time_ms)

    def _draw(self) -> None:
        try:
            pictures = run_figures(self.folder / EVENTS, self.folder / FIGURES)
            if self._alone and (self.folder / SPEC).exists():  # what is below another is on that one's page
                write_run_page(read_run(self.folder), pictures)
        except Exception as error:  # whatever a picture fails at, the run has ended and is to be closed
            _logger.warning("%s: no pictures: %s", self.folder, error)

    @property
    def _run_id(self) -> str:
        run_id = self._started().run_id
        assert run_id is not None
        return run_id

    def _started(self) -> Shipped:
        if self._shipped is None or self._shipped.run_id is None:
            raise LogError(f"event log {self._tail.path} does not begin with a start record: it is damaged or was cut")
        return self._shipped

    def _log(self, **entities: Any) -> None:
        # The client itself cuts this into calls of the size that a server takes, and waits for each.
        self._tracker.client.log_batch(self._run_id, **entities, synchronous=True)

    def _load(self) -> None:
        """Reads what has arrived, and begins again where the store does not have it.

        Raises:
            ValueError: `mlflow.json` is damaged, or its run was deleted in MLflow.
        """
        shipped = read_shipped(self.folder)
        if shipped is not None and not (self._verified and shipped == self._shipped):
            if not self._has_run(shipped):
                shipped = Shipped(store=self._tracker.display_uri, key=shipped.key)
            self._verified = True
        if shipped != self._shipped:
            self._tail.restart()
            self._shipped = shipped

    def _has_run(self, shipped: Shipped) -> bool:
        from mlflow.exceptions import MlflowException

        if shipped.store != self._tracker.display_uri or shipped.run_id is None:
            return False
        try:
            run = self._tracker.client.get_run(shipped.run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False
        if run.info.lifecycle_stage != "active":
            raise ValueError(
                f"run {shipped.run_id} was deleted in MLflow: restore it with `mlflow runs restore`, or delete "
                f"{self.folder / SHIPPED} to record it anew"
            )
        self._tracker.delete_twins(shipped.run_id, shipped.key)
        return True

    def _save(self, **changes: Any) -> None:
        assert self._shipped is not None
        changed = replace(self._shipped, **changes)
        if changed != self._shipped:
            self._write(changed)

    def _write(self, shipped: Shipped) -> None:
        write_value(self.folder / SHIPPED, shipped)
        self._shipped = shipped
