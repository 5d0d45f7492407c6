import dataclasses
import functools
import hashlib
import http.server
import io
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from triaccel_ray.trainables.cifar_download import default_data_dir, find_or_download
from triaccel_ray.trainables.cifar_files import HOMEPAGE, CifarSet, cifar_set

CIFAR10, CIFAR100 = cifar_set(10), cifar_set(100)
NOBODY = "http://127.0.0.1:9/archive.tar.gz"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class names it so
        pass


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (tmp_path / "data").mkdir()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """Yields a folder and the address under which a server on this machine gives out what lies in it."""
    folder = tmp_path / "served"
    folder.mkdir()
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def _archive(path: Path, names: list[str]) -> str:
    """Writes an archive with small files of these names; returns its checksum."""
    with tarfile.open(path, "w:gz") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = len(name)
            tar.addfile(member, io.BytesIO(name.encode()))
    return hashlib.md5(path.read_bytes()).hexdigest()


def _served_set(served: tuple[Path, str], names: list[str], md5: str | None = None) -> CifarSet:
    folder, address = served
    found = _archive(folder / "archive.tar.gz", names)
    return dataclasses.replace(CIFAR10, url=f"{address}/archive.tar.gz", url_md5=md5 or found)


def _official_names() -> list[str]:
    layout = CIFAR10.python
    return [f"{layout.folder}/{name}" for name in ("batches.meta", *layout.train, layout.test)]


def test_an_empty_folder_is_filled_by_download_and_nothing_lands_outside(
    tmp_path: Path, served: tuple[Path, str]
) -> None:
    cifar = _served_set(served, [*_official_names(), "../escaped", str(tmp_path / "escaped-too")])
    data_dir = tmp_path / "data"
    found = find_or_download(cifar, data_dir, with_test=True)
    assert found.path == data_dir / "cifar-10-batches-py"
    assert {path.name for path in found.path.iterdir()} == {*found.needed(with_test=True)}
    assert (found.path / "test_batch").read_text() == "cifar-10-batches-py/test_batch"
    assert {path.name for path in tmp_path.iterdir()} == {"data", "served"}
    assert [path for path in data_dir.iterdir() if path != found.path and path.is_dir()] == []


def test_the_default_is_a_cache_that_is_filled_once(
    tmp_path: Path, served: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cifar = _served_set(served, _official_names())
    first = find_or_download(cifar, None, with_test=False)
    assert first.path.parent == default_data_dir() == tmp_path / "cache" / "triaccel" / "data"
    assert find_or_download(dataclasses.replace(cifar, url=NOBODY), None, with_test=True).path == first.path
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")  # relative, hence ignored
    assert default_data_dir() == Path.home() / ".cache" / "triaccel" / "data"


def test_processes_that_start_together_download_once(tmp_path: Path, served: tuple[Path, str]) -> None:
    cifar = _served_set(served, _official_names())
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(find_or_download(cifar, tmp_path / "data", with_test=True)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found.path for found in results] == [tmp_path / "data" / "cifar-10-batches-py"] * 4


def test_a_failed_download_names_every_file_the_source_and_the_option_and_can_be_tried_again(
    tmp_path: Path, served: tuple[Path, str]
) -> None:
    data_dir, archive = tmp_path / "data", served[0] / "archive.tar.gz"
    for cifar in (CIFAR10, CIFAR100):
        with pytest.raises(FileNotFoundError) as error:
            find_or_download(dataclasses.replace(cifar, url=NOBODY), data_dir, with_test=True)
        for layout in (cifar.python, cifar.binary):
            names = ", ".join((*layout.train, layout.test))
            assert f"{data_dir / layout.folder}: {names} (none found)" in str(error.value)
        assert all(
            part in str(error.value) for part in (cifar.title, NOBODY, "Connection refused", HOMEPAGE, "--data-dir")
        )
    cifar = _served_set(served, _official_names())
    archive.rename(served[0] / "moved")
    with pytest.raises(FileNotFoundError, match="HTTPError: HTTP Error 404"):
        find_or_download(cifar, data_dir, with_test=False)
    (served[0] / "moved").rename(archive)
    assert find_or_download(cifar, data_dir, with_test=False).missing(with_test=True) == ()


@pytest.mark.parametrize(
    ("names", "md5", "message"),
    [
        (_official_names(), "0" * 32, f"has the md5 checksum .*: must have {'0' * 32}"),
        (["other/data_batch_1"], None, "does not hold all of them"),
    ],
)
def test_another_archive_is_refused(
    names: list[str], md5: str | None, message: str, tmp_path: Path, served: tuple[Path, str]
) -> None:
    with pytest.raises(FileNotFoundError, match=message):
        find_or_download(_served_set(served, names, md5), tmp_path / "data", with_test=False)
    assert not list(tmp_path.glob("data/*/data_batch_1"))


def test_nothing_is_downloaded_beside_a_users_files_nor_where_there_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent is not an existing folder(.|\n)*data_batch_1.bin"):
        find_or_download(CIFAR10, tmp_path / "absent", with_test=False)
    (tmp_path / "data" / "data_batch_1.bin").touch()
    with pytest.raises(FileNotFoundError, match="is not empty, so nothing was downloaded") as error:
        find_or_download(CIFAR10, tmp_path / "data", with_test=False)
    assert "(not found: data_batch_2.bin, data_batch_3.bin, data_batch_4.bin, data_batch_5.bin)" in str(error.value)
    assert [path.name for path in tmp_path.rglob("*")] == ["data", "data_batch_1.bin"]
