"""What a run notes of where it trains."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from triaccel_ray.service.runs.environment import COMMIT_VARIABLE, commit_of, environment


def test_the_commit_of_the_working_directory_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert commit_of(tmp_path) == ""
    assert commit_of(tmp_path / "nowhere") == ""
    own = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        (tmp_path / "file").write_text("one")
        subprocess.run([*own, *words], cwd=tmp_path, check=True)
    commit = commit_of(tmp_path)
    assert len(commit) == 40
    (tmp_path / "file").write_text("two")
    assert commit_of(tmp_path) == f"{commit}-dirty"
    monkeypatch.setenv(COMMIT_VARIABLE, commit)
    assert environment(torch.device("cpu"))["commit"] == commit
    monkeypatch.setenv(COMMIT_VARIABLE, "")
    assert "commit" not in environment(torch.device("cpu"))
