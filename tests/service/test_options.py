from __future__ import annotations

from pathlib import Path

import pytest

from triaccel_ray.service import cli
from triaccel_ray.service.options import storage_folder


@pytest.mark.parametrize(
    ("text", "folder"),
    [
        ("runs", "runs"),
        ("/shared/a b", "/shared/a b"),
        ("file:///shared/a%20b", "/shared/a b"),
        ("file://localhost/shared", "/shared"),
    ],
)
def test_results_go_to_a_folder_however_it_is_named(text: str, folder: str) -> None:
    assert storage_folder(text) == Path(folder)
    command = cli.parse(["run", "digits", "--storage-path", text])
    assert isinstance(command, cli.Run)
    assert command.where.storage_path == Path(folder)


@pytest.mark.parametrize("uri", ["s3://bucket/runs", "gs://bucket/runs", "file://nas/runs", "ftp://host/runs"])
def test_other_places_are_refused(uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=rf"storage path = '{uri}': must be a folder or file:///FOLDER; mount it"):
        storage_folder(uri)
    with pytest.raises(SystemExit) as ended:
        cli.parse(["run", "digits", "--storage-path", uri])
    assert ended.value.code == 2
    assert f"storage path = '{uri}'" in capsys.readouterr().err
