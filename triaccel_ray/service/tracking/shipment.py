"""Ships one run's event log to one MLflow run, and remembers in a file beside the log what has arrived."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from triaccel_ray.records.events import End, Event, Interruption, LogError, Start, parse_event, read_events
from triaccel_ray.service.report.run import view_run
from triaccel_ray.service.runs.record import read_run
from triaccel_ray.service.storage.layout import (
    BASELINES,
    COMPARISON,
    ERROR,
    EVENTS,
    FIGURES,
    FIXED_SETTING,
    REPORT,
    SHIPPED,
    SPEC,
    TUNED_THRESHOLDS,
    write_value,
)
from triaccel_ray.service.tracking.log_position import Position, TruncatedLogError, lines_after
from triaccel_ray.service.tracking.metrics import RESULT_PREFIX, metrics_of, params_of, step_of, tags_of
from triaccel_ray.service.tracking.shipment_state import ShipmentState, read_shipment_state
from triaccel_ray.service.tracking.tracker import Tracker

ARTIFACTS = (EVENTS, SPEC, TUNED_THRESHOLDS, COMPARISON, FIXED_SETTING, REPORT, ERROR, FIGURES)
"""Files and folders of a run that are uploaded as artifacts when it ends."""

LOCK_TIMEOUT_S = 10.0

_STATUS: Mapping[str, str] = {
    "finished": "FINISHED",
    "pruned": "FINISHED",  # it ended as its search intended; MLflow marks any other status with a red cross
    "stopped": "KILLED",
    "failed": "FAILED",
}

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ParentRun:
    """The MLflow run of a search or comparison, the parent of the runs below its folder."""

    tags: Mapping[str, str] = field(default_factory=dict)
    pruned: Callable[[], Container[str]] = tuple
    """Returns the names of the runs that the search has pruned."""
    closing_tags: Callable[[], Mapping[str, str]] = dict
    """Returns the tags that are known only at its end."""


class Shipment:
    """Ships one folder's event log to MLflow; every step is idempotent, for retries after a crash or an outage.

    A metric sent twice has the same name, step, time and value, and MLflow keeps it once. A run is looked up by its key
    before it is created, and duplicates are deleted. Tags, artifacts and the final status overwrite themselves.

    MLflow cannot delete single values. If a resumed run's log lacks records that were shipped before, the log goes to
    a new MLflow run of the same key and name. The old one is deleted.
    """

    def __init__(
        self, tracker: Tracker, folder: Path, root: Path, *, experiment: str, parent: ParentRun | None = None
    ) -> None:
        """Stores the arguments; `folder` must exist before anything is shipped.

        With a `parent`, `folder` is that of the parent itself, which is `root`, or of a run below it. MLflow shows the
        baselines of a search beside it, not as its children.
        """
        is_baseline = parent is not None and folder.parent == root / BASELINES and folder.name != "probe"
        self._is_parent = parent is not None and folder == root
        self._is_child = parent is not None and folder != root and not is_baseline
        self._parent = parent or ParentRun()
        self._name = f"{folder.name} of {root.name}" if is_baseline else folder.name
        self._tags = self._parent.tags if self._is_parent else {}
        if is_baseline:
            self._tags = {"kind": "baseline", "search": root.name}
        self._key = str(folder.relative_to(root.parent)).replace("'", "_")
        """Key by which the run is found again; its start time is appended."""
        self._tracker, self._experiment = tracker, experiment
        self.folder, self._path = folder, folder / EVENTS
        self._seen: tuple[int, int, int] | None = None
        """Inode, bytes and mtime (ns) of the log when it was last shipped to its end; None before."""
        self._nothing = ShipmentState(store=tracker.uri, key="", experiment=experiment)
        self._shipped = self._nothing
        """What has arrived, once loaded; its MLflow run exists in the store."""

    def open(self) -> str:
        """Returns the id of the MLflow run, created if needed even before the first event; for parent runs."""
        if self._shipped.run_id is not None:
            return self._shipped.run_id
        with self._lock():
            self._load()
            return self._open(parent_id=None, start_ms=time.time_ns() // 1_000_000)

    def ship(self, parent_id: str | None = None) -> int:
        """Ships the log's new events and returns their number; a new run of a trial becomes a child of `parent_id`.

        Raises:
            LogError: the log is damaged.
            Exception: any error of MLflow, its store or the network. No event is lost, but which ones have arrived is
                unknown: continue with a new `Shipment`, which verifies that the run exists.
        """
        seen = self._file_state()
        if seen is None or seen == self._seen:
            return 0
        with self._lock():
            self._load()
            try:
                num_events = self._ship_log(parent_id)
            except TruncatedLogError:
                self._restart_in_new_run()
                num_events = self._ship_log(parent_id)
        self._seen = seen
        return num_events

    def _file_state(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns

    def _lock(self) -> FileLock:
        """Returns the folder's lock: a driver presumed dead may still follow it beside the one that took over."""
        return FileLock(self.folder / f".{SHIPPED}.lock", timeout=LOCK_TIMEOUT_S)

    def _ship_log(self, parent_id: str | None) -> int:
        """Ships the log's new events and returns their number.

        Raises:
            TruncatedLogError: records that were shipped are no longer in the log.
        """
        num_events, end, position = 0, None, self._shipped.position
        for lines in lines_after(position, self._path):
            numbered = enumerate(lines, position.num_lines + 1)
            events = [parse_event(line, f"event log {self._path}, line {number}") for number, line in numbered]
            if isinstance(events[-1].record, End):
                end = events.pop()  # shipped last of all
            if events:
                self._ship_events(events, parent_id)
                position = position.after(lines[: len(events)])
                self._save(position=position)
            num_events += len(events)
        return num_events + self._ship_end(end)

    def _ship_events(self, events: Sequence[Event], parent_id: str | None) -> None:
        first = events[0]
        if isinstance(first.record, Start):
            # MLflow params cannot change: a parent run that starts again keeps its own.
            known = self._tracker.client.get_run(self._open(parent_id, first.time_ms)).data.params
            params = {name: value for name, value in params_of(first.record).items() if name not in known}
            self._log(params=params, tags=tags_of(first.record))
        for event in events:
            if isinstance(event.record, Interruption):
                resumed = ", ".join(map(str, self._resumed_from()))
                text = f"{event.record.cause}: {event.record.message}"
                self._log(tags={"interrupted": text, "resumed_from_step": resumed})
        self._log(metrics_of_events=events)

    def _resumed_from(self) -> Iterator[int]:
        """Yields the steps from which the run was resumed: that of the last tick or epoch before each interruption."""
        step = 0
        for event in read_events(self._path):
            if isinstance(event.record, Interruption):
                yield step
            elif not isinstance(event.record, Start | End):
                step = step_of(event.record)

    def _restart_in_new_run(self) -> None:
        """Records that the log now goes to a new MLflow run from its start; a parent run keeps its MLflow run."""
        run: dict[str, Any] = {} if self._is_parent else {"run_id": None, "replaces": self._shipped.run_id}
        self._save(position=Position(), end_ms=None, **run)

    def _ship_end(self, end: Event | None) -> int:
        """Ends the MLflow run if the log's end is a new one, or reopens it if the end is gone.

        Raises:
            TruncatedLogError: an end with results was shipped and is no longer in the log.
        """
        end_ms = None if end is None else end.time_ms
        shipped_ms = self._shipped.end_ms
        if end_ms == shipped_ms:
            return 0
        client = self._tracker.client
        if shipped_ms is not None and not self._is_parent:
            metrics = client.get_run(self._run_id).data.metrics
            if any(name.startswith(RESULT_PREFIX) for name in metrics):
                raise TruncatedLogError
        if end is not None:
            self._finish(end)
            return 1
        client.update_run(self._run_id, status="RUNNING")
        self._log(tags={"outcome": "running"})
        self._save(end_ms=None)
        return 0

    def _open(self, parent_id: str | None, start_ms: int) -> str:
        """Returns the run's id, creating it if needed; its key can be derived again if `mlflow.json` is lost."""
        shipped, name, tags = self._shipped, self._name, self._tags
        if shipped.run_id is not None:
            return shipped.run_id
        key = shipped.key or f"{self._key}@{start_ms}"
        self._save(key=key)
        if shipped.replaces is not None:  # first: the key must identify one run
            name, tags = self._tracker.retire(shipped.replaces, name, tags)
        parent_id = parent_id if self._is_child else None
        run_id = self._tracker.open_run(
            self._experiment, name, key=key, tags=tags, parent_id=parent_id, start_ms=start_ms
        )
        self._save(run_id=run_id)
        return run_id

    def _finish(self, event: Event) -> None:
        end, client, run_id = event.record, self._tracker.client, self._run_id
        assert isinstance(end, End)
        is_pruned = end.status == "stopped" and self.folder.name in self._parent.pruned()
        outcome = "pruned" if is_pruned else end.status
        tags = {"outcome": outcome, **(self._parent.closing_tags() if self._is_parent else {})}
        failure = ": ".join(filter(None, (end.cause, end.message)))
        if failure:
            tags["failure"] = failure
        self._log(tags=tags, metrics_of_events=[event])
        if not failure and "failure" in client.get_run(run_id).data.tags:  # left by an earlier end
            client.delete_tag(run_id, "failure")
        if not self._is_parent:  # whose command writes its page
            self._draw_figures()
        for path in (self.folder / name for name in ARTIFACTS):
            if path.is_dir():
                client.log_artifacts(run_id, str(path), artifact_path=path.name)
            elif path.exists():
                client.log_artifact(run_id, str(path))
        self._tracker.delete_twins(run_id, self._shipped.key)
        client.set_terminated(run_id, _STATUS.get(outcome, "FAILED"), end_time=event.time_ms)
        self._save(end_ms=event.time_ms)

    def _draw_figures(self) -> None:
        try:
            if (self.folder / SPEC).exists():
                view_run(read_run(self.folder))
        except Exception as error:  # a failed picture must not leave the run open
            _logger.warning("%s: no pictures: %s", self.folder, error)

    @property
    def _run_id(self) -> str:
        if self._shipped.run_id is None:
            raise LogError(f"event log {self._path} does not begin with a start record: it is damaged or was cut")
        return self._shipped.run_id

    def _log(
        self,
        *,
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
        metrics_of_events: Sequence[Event] = (),
    ) -> None:
        from mlflow.entities import Metric, Param, RunTag

        metrics = [
            Metric(name, value, event.time_ms, step_of(event.record))
            for event in metrics_of_events
            if not isinstance(event.record, Start | Interruption)
            for name, value in metrics_of(event.record).items()
        ]
        # The client splits this into calls of a size that servers accept, and waits for each.
        self._tracker.client.log_batch(
            self._run_id,
            metrics=metrics,
            params=[Param(name, value) for name, value in (params or {}).items()],
            tags=[RunTag(name, value) for name, value in (tags or {}).items()],
            synchronous=True,
        )

    def _load(self) -> None:
        """Reads what has been shipped, and starts over if the store does not have the run.

        Raises:
            ValueError: `mlflow.json` is damaged, or its run was deleted in MLflow.
        """
        shipped = read_shipment_state(self.folder) or self._nothing
        if shipped != self._shipped:
            # A SQLite file may have been moved together with the runs: the run's id decides, not the store's URI.
            has_run = self._has_run(shipped)
            shipped = replace(shipped, store=self._tracker.uri) if has_run else replace(self._nothing, key=shipped.key)
        self._shipped = shipped

    def _has_run(self, shipped: ShipmentState) -> bool:
        if shipped.run_id is None:
            return shipped.replaces is not None and shipped.store == self._tracker.uri
        run = self._tracker.find_run(shipped.run_id)
        if run is None:
            return False
        if run.info.lifecycle_stage != "active":
            raise ValueError(
                f"run {shipped.run_id} was deleted in MLflow: restore it with `mlflow runs restore`, or delete "
                f"{self.folder / SHIPPED} to record it anew"
            )
        self._tracker.delete_twins(shipped.run_id, shipped.key)
        return True

    def _save(self, **changes: Any) -> None:
        self._shipped = replace(self._shipped, **changes)
        write_value(self.folder / SHIPPED, self._shipped)
