"""Reads and repairs MLflow's SQLite file without importing MLflow."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

SQLITE = "sqlite:///"


def holds_run(uri: str, run_id: str) -> bool:
    """Returns whether the SQLite store at `uri` has the run; creates nothing."""
    path = sqlite_path(uri)
    if path is None or not path.is_file():
        return False
    try:
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
            found = connection.execute("SELECT 1 FROM runs WHERE run_uuid = ?", (run_id,)).fetchone()
    except sqlite3.Error:  # not a database of MLflow
        return False
    return found is not None


def sqlite_path(uri: str) -> Path | None:
    """Returns the absolute path of a SQLite URI's file, else None."""
    name = uri.removeprefix(SQLITE)
    if not uri.startswith(SQLITE) or name in ("", ":memory:"):
        return None
    return Path(name).absolute()


def relocate_artifacts(path: Path, artifact_root: Path) -> None:
    """Updates the locations of artifacts that were moved or copied together with the SQLite file at `path`.

    MLflow stores absolute locations, which its client cannot change. So this edits its tables `experiments`, `runs`
    and `model_versions`.
    """
    here = artifact_root.as_uri()
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        rows = connection.execute("SELECT experiment_id, artifact_location FROM experiments").fetchall()
        for experiment_id, location in rows:
            old = Path(url2pathname(urlsplit(location or "").path))
            if location == here or old.name != artifact_root.name:
                continue
            run_ids = connection.execute("SELECT run_uuid FROM runs WHERE experiment_id = ?", (experiment_id,))
            ids = [str(run_id) for (run_id,) in run_ids]
            if old.exists() and not any((artifact_root / run_id).is_dir() for run_id in ids):
                continue  # belongs to another storage folder that shares this file
            update = "UPDATE experiments SET artifact_location = ? WHERE experiment_id = ?"
            connection.execute(update, (here, experiment_id))
            moved = [(f"{here}/{run_id}/artifacts", run_id) for run_id in ids]
            connection.executemany("UPDATE runs SET artifact_uri = ? WHERE run_uuid = ?", moved)
            for column in ("source", "storage_location"):
                update = f"UPDATE model_versions SET {column} = replace({column}, ?, ?) WHERE run_id = ?"
                connection.executemany(update, [(location, here, run_id) for run_id in ids])
