"""How much of a run's event log has arrived in MLflow, in a file beside the log."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path

from triaccel_ray.records.codec import decode
from triaccel_ray.records.events import LogError
from triaccel_ray.service.storage.layout import SHIPPED
from triaccel_ray.service.tracking.log_position import Position


@dataclass(frozen=True, kw_only=True)
class ShipmentState:
    """How much of one folder's log has arrived in MLflow: the content of its `mlflow.json`."""

    store: str
    """URI of the store; another store gets the log from the beginning."""
    key: str
    """Value of the tag by which the MLflow run is found; saved before the run is created."""
    experiment: str
    """The MLflow experiment of the run."""
    run_id: str | None = None
    """None until MLflow has assigned it."""
    replaces: str | None = None
    """MLflow run of an earlier attempt, some of whose records are no longer in the log."""
    position: Position = field(default_factory=Position)
    """How far the log's records have arrived. An end does not count: a resumed run overwrites it."""
    end_ms: int | None = None
    """Time of the end record shipped; None while the run continues."""


def read_shipment_state(folder: Path) -> ShipmentState | None:
    """Returns how much of the log in `folder` has arrived; None if nothing was ever sent.

    Fields of other versions are ignored: records that they counted are shipped again, which changes nothing.

    Raises:
        LogError: `mlflow.json` is damaged.
    """
    path = folder / SHIPPED
    if not path.exists():
        return None
    known = {each.name for each in fields(ShipmentState)}
    try:
        return decode(
            ShipmentState, {name: value for name, value in json.loads(path.read_text()).items() if name in known}
        )
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise LogError(f"{path} cannot be read ({error}): delete it, the run is found by its tag") from error
