from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.storage.machines import Machines


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    made = Machines(tmp_path, monkeypatch)
    made.store.mkdir()
    made.move_to("a")
    return made
