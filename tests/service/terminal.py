"""Commands typed as a user types them, in this process: what they leave, and what they say."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.service.mlflow_server import Recorded
from triaccel_ray.service.cli.main import main
from triaccel_ray.service.tracking.tracker import Tracker


@dataclass(frozen=True)
class Terminal:
    """Runs commands with one storage folder, its MLflow store, and one cluster."""

    storage: Path
    address: str

    @property
    def tracker(self) -> Tracker:
        return Tracker(f"sqlite:///{self.storage / 'mlflow.db'}", self.storage / "artifacts")

    def type(self, *words: str) -> int:
        """Carries out a command and returns its exit status."""
        return exit_status(*words, "--storage-path", str(self.storage), "--address", self.address)

    def artifacts(self, run: Recorded) -> set[str]:
        client = self.tracker.client
        found: Sequence[str] = [item.path for item in client.list_artifacts(run.id)]
        return {*found, *(item.path for item in client.list_artifacts(run.id, "figures"))}


def exit_status(*words: str) -> int:
    """Carries out a command and returns its exit status."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def typed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a command."""
    status, said = exit_status(*words), capsys.readouterr()
    assert "Traceback" not in said.err
    return status, said.out, said.err
