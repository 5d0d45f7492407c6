"""Machines that know of each other by a store alone: a folder behind a file:// URI, and a cache folder for each."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from triaccel_ray.service.storage import training_folder
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.service.storage.training_folder import TrainingFolder


@dataclass(frozen=True)
class Machines:
    """Machines that know of each other by the store alone."""

    root: Path
    monkeypatch: pytest.MonkeyPatch

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def kept(self) -> Path:
        return self.store / "run"

    @property
    def place(self) -> StoragePath:
        return StoragePath(self.store.as_uri(), "run")

    def move_to(self, name: str) -> TrainingFolder:
        """Makes this process one of the machine `name`; returns the run's training folder there."""
        self.monkeypatch.setenv("XDG_CACHE_HOME", str(self.root / name))
        return TrainingFolder(self.place)

    def give_up_after(self, seconds: float) -> None:
        """Sets how long the store may be unreachable."""
        self.monkeypatch.setattr(training_folder, "PATIENCE_S", seconds)

    @contextmanager
    def unreachable(self) -> Iterator[None]:
        self.store.rename(self.root / "out-of-reach")
        self.give_up_after(0.3)
        yield
        self.give_up_after(60.0)
        (self.root / "out-of-reach").rename(self.store)


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def held(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file() and path.name[0] != "."}


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    made = Machines(tmp_path, monkeypatch)
    made.store.mkdir()
    made.move_to("a")
    return made
