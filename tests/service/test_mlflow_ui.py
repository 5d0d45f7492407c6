from __future__ import annotations

import pytest

from triaccel_ray.service.mlflow_ui import ALLOWED_HOSTS, ALLOWED_ORIGINS, exposure


def test_who_opens_the_ui_to_others_is_told_under_which_names_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ALLOWED_HOSTS, ALLOWED_ORIGINS):
        monkeypatch.delenv(name, raising=False)
    said = exposure("0.0.0.0", 5001)
    assert "everybody who reaches this machine can read and delete runs" in said
    assert "403" in said
    assert "MLFLOW_SERVER_ALLOWED_HOSTS=NAME:5001 MLFLOW_SERVER_CORS_ALLOWED_ORIGINS=http://NAME:5001" in said
    monkeypatch.setenv(ALLOWED_HOSTS, "box.example:5001")
    assert "403" in exposure("0.0.0.0", 5001)
    monkeypatch.setenv(ALLOWED_ORIGINS, "http://box.example:5001")
    assert "403" not in exposure("0.0.0.0", 5001)
