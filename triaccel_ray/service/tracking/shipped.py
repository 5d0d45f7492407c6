"""What of a run's event log has arrived in MLflow, as noted beside the log."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

from triaccel_ray.records.codec import decode
from triaccel_ray.records.events import LogError

SHIPPED = "mlflow.json"


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
    replaces: str | None = None
    """MLflow run of an earlier attempt, of which the log has lost records."""
    num_records: int = 0
    """The log's first records, as many as have arrived. An end does not count: a resumed run writes on in its place."""
    checksum: int = 0
    """CRC-32 of these records: other ones in their place are those of another attempt."""
    end_ms: int | None = None
    """Time of the end record shipped; None while the run goes on."""


def read_shipped(folder: Path) -> Shipped | None:
    """Returns what has arrived of the log in `folder`; None where nothing was ever sent.

    Fields of other versions are left out: what they counted is shipped again, which changes nothing.

    Raises:
        LogError: `mlflow.json` is damaged.
    """
    path = folder / SHIPPED
    if not path.exists():
        return None
    known = {each.name for each in fields(Shipped)}
    try:
        return decode(Shipped, {name: value for name, value in json.loads(path.read_text()).items() if name in known})
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise LogError(f"{path} cannot be read ({error}): delete it, the run is found by its tag") from error
