import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.service.mlflow_server import free_port
from triaccel_ray.service.cli.options import Locations
from triaccel_ray.service.commands import doctor
from triaccel_ray.service.commands.doctor import Finding, examine
from triaccel_ray.service.storage.storage_path import StoragePath


@pytest.fixture
def findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Finding]:
    """What is found where neither the tracking server nor the cluster is there, and one check breaks."""

    def broken() -> Finding:
        raise RuntimeError("out of order")

    monkeypatch.setattr(doctor, "_gpu", broken)
    port = free_port()
    where = Locations(
        storage_path=StoragePath(str(tmp_path)), tracking_uri=f"http://127.0.0.1:{port}", address=f"127.0.0.1:{port}"
    )
    return {subject: (verdict, text) for subject, verdict, text in examine(where)}


def test_every_check_goes_by_its_name(findings: dict[str, Finding]) -> None:
    problems = {
        "ray starts": "address = ",
        "mlflow store": "tracking uri =",
        "gpu": "RuntimeError: out of order",
    }
    for subject, text in problems.items():
        assert findings[subject][0] == "problem"
        assert findings[subject][1].startswith(text)
    names = {"python", *doctor.PACKAGES, "nvml", "disk"}
    assert set(findings) == names | set(problems)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """A process of its own, in a home of its own: Ray reads its settings once."""
    home, work = tmp_path / "home", tmp_path / "work"
    for folder in (home, work):
        folder.mkdir()
    kept = {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}
    words = [sys.executable, "-m", "triaccel_ray.service", "doctor", "--storage-path", "new/storage"]
    with TemporaryDirectory(prefix="t") as temporary:  # Ray's sockets need a short path
        environment = {**kept, "HOME": str(home), "RAY_TMPDIR": temporary, "PYTHONPATH": os.getcwd()}
        done = subprocess.run(words, cwd=work, env=environment, capture_output=True, text=True, timeout=300)
        assert not list(Path(temporary).iterdir())
    for subject in ("ray starts", "mlflow store"):
        assert re.search(rf"^ok +{subject}", done.stdout, flags=re.MULTILINE), done.stdout + done.stderr
    assert not list(work.iterdir())
    assert not (home / ".ray").exists()
