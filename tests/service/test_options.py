import contextlib
from pathlib import Path

import pytest
from pyarrow import fs

from triaccel_ray.service.cli.parsing import parse
from triaccel_ray.service.storage.storage_path import SCHEMES, StoragePath


def stored_at(text: str) -> StoragePath:
    return parse(["run", "digits", "--storage-path", text]).where.storage_path


@pytest.mark.parametrize(
    ("text", "folder"), [("runs", "runs"), ("/shared/a b", "/shared/a b"), ("~/x", Path.home() / "x")]
)
def test_results_go_to_a_folder(text: str, folder: str | Path) -> None:
    place = stored_at(text)
    assert (place.uri, place.folder) == (None, Path(folder).absolute())
    run = place / "search" / "trials"
    assert run.folder == place.folder / "search" / "trials"
    assert (run.parent, run.base_name, str(run)) == (place / "search", "trials", str(run.folder))


def test_results_go_to_a_store_by_way_of_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    uri = "s3://bucket/runs?region=eu-west-1"
    place = stored_at(uri) / "search"
    assert (place.uri, str(place)) == (uri, "s3://bucket/runs/search")
    assert place.folder.is_relative_to(tmp_path / "triaccel-ray")
    assert place.folder.parent.name.startswith("s3-bucket-runs-")
    assert place.folder != (stored_at("s3://bucket/runs") / "search").folder  # another region's bucket
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert place.folder.is_relative_to(Path.home() / ".cache" / "triaccel-ray")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_stores_are_those_that_pyarrow_knows(scheme: str) -> None:
    assert stored_at(f"{scheme}://bucket/runs").uri is not None
    places = {"file": "/runs", "abfs": "c@a.dfs.core.windows.net/runs", "abfss": "c@a.dfs.core.windows.net/runs"}
    with contextlib.suppress(OSError):  # HDFS needs Java
        fs.FileSystem.from_uri(f"{scheme}://{places.get(scheme, 'bucket/runs')}")


def test_a_name_before_an_at_sign_is_no_secret() -> None:
    for name in ("gs://anonymous@bucket/x", "hdfs://me@host:9000/x", "abfs://c@a.dfs.core.windows.net/x"):
        assert stored_at(name).uri == name
