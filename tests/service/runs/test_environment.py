"""What a run notes of where it trains."""

import subprocess
from pathlib import Path

import pytest
import torch

from tests.build import CPU
from triaccel_ray.service.runs.environment import COMMIT_VARIABLE, commit_of, environment, require_budget
from triaccel_ray.service.runs.spec import RunSpec


def test_hardware_versions_and_the_commit_of_the_working_directory_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert commit_of(tmp_path) == commit_of(tmp_path / "nowhere") == ""
    own = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("one")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run([*own, *words], cwd=tmp_path, check=True)
    commit = commit_of(tmp_path)
    assert len(commit) == 40
    (tmp_path / "file").write_text("two")
    assert commit_of(tmp_path) == f"{commit}-dirty"
    monkeypatch.setenv(COMMIT_VARIABLE, commit)
    found = environment(CPU)
    assert (found["commit"], found["device"]) == (commit, "cpu")
    assert torch.__version__.startswith(found["torch"])
    assert all(found[name] for name in ("hardware", "python", "host", "triton", "triaccel-ray"))
    monkeypatch.setenv(COMMIT_VARIABLE, "")
    assert "commit" not in environment(CPU)


def test_a_budget_that_cannot_be_enough_is_refused_before_ray_starts() -> None:
    for budget in (None, 2**33):
        require_budget(RunSpec(task="digits", memory_budget_bytes=budget, device="cpu"))
    with pytest.raises(ValueError, match="memory budget = 1 MiB: a process with PyTorch and Ray alone takes"):
        require_budget(RunSpec(task="digits", memory_budget_bytes=2**20, device="cpu"))
