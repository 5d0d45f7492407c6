"""What a stranger's files, a user's names and a machine's secrets must not lead to."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from io import StringIO
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest

from tests.service.browser import Tags
from tests.service.build import SimulatedRun
from tests.service.mlflow_server import Server
from tests.service.records import RUN_SPEC
from tests.service.search_folder import simulated_search
from tests.service.terminal import typed
from tests.service.test_jobs import SECRETS
from triaccel_ray.service.cli.options import Locations, command_for
from triaccel_ray.service.commands.next_steps import command_to_resume
from triaccel_ray.service.console import SafeConsole
from triaccel_ray.service.credentials import display_address
from triaccel_ray.service.storage.layout import REPORT, SEARCH, SPEC, write_value
from triaccel_ray.service.storage.storage_path import StoragePath


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """A storage folder with one run, and a run outside it."""
    for folder in (tmp_path / "storage" / "run1", tmp_path / "outside"):
        write_value(SimulatedRun(folder).complete(epochs=1) / SPEC, RUN_SPEC)
    return tmp_path / "storage"


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command says that ends as bad input."""
    status, _, said = typed(capsys, *words)
    assert status == 2
    return " ".join(said.split())


NAMES = {
    "up twice": "run1/../../outside",
    "null": "run1\0",
    "null in a path": "run1/\0",
    "fraction slash": "..\u2044outside",
    "full-width dots": "\uff0e\uff0e",
    "backslash": "..\\outside",
    "long path": "a/" * 5000,
    "newline": "run1\n",
    "empty": "",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_names_stay_in_the_storage_folder(storage: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    before = set(storage.parent.rglob("*"))
    where = ["--storage-path", str(storage)]
    for words in (["report", *where, "--", name], ["run", *where, "digits", f"--name={name}"]):
        assert "name" in refused(capsys, *words)
    assert set(storage.parent.rglob("*")) == before


def test_looking_at_a_folder_runs_no_code_that_it_names(
    storage: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(storage)
    (storage / "trap.py").write_text("import pathlib; pathlib.Path('sprung').touch()\n")
    simulated_search(storage / "received", 1, num_epochs=1, task="trap:Mine")
    status, said, _ = typed(capsys, "report", "received", "--storage-path", str(storage))
    assert (status, "triaccel run --from" in said) == (0, True)
    assert not (storage / "sprung").exists()


def test_a_command_to_paste_holds_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "x' & touch sprung # ; $(touch sprung) `touch sprung`"
    subprocess.run(["sh", "-c", command_for("run --from", folder).replace("triaccel", "true", 1)], check=True)
    assert not (tmp_path / "sprung").exists()


def test_what_a_folder_says_is_text_on_the_page_and_in_the_terminal(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "<img src=x onerror=alert(1)>'\"[/red][link=x]\x1b]0;owned\x07\x1b[2J:bomb:"
    folder = simulated_search(storage / "received", 1, num_epochs=1, task=evil)
    moved = folder.rename(storage / "<b>[bold]")
    status, said, _ = typed(capsys, "report", str(moved), "--storage-path", str(storage))
    assert status == 0
    assert "\x1b" not in said
    assert "\x07" not in said
    assert "<img src=x onerror=alert(1)>'\"[/red][link=x]\ufffd]0;owned" in said
    assert "<b>[bold]: " in said
    tags = Tags((moved / REPORT).read_text())
    assert {attributes["src"][:22] for tag, attributes in tags.tags if tag == "img" and attributes["src"]} == {
        "data:image/png;base64,"
    }
    assert not any("onerror" in attributes for _, attributes in tags.tags)
    assert tags.count("b") == 0


@pytest.mark.parametrize(
    "words",
    [
        "search digits --addres=URI",
        "run URI",
        "run digits --name URI",
        "search digits --address me:s3cr3t@127.0.0.1:1",
        "search digits --tracking-uri URI",
        "jobs --address URI",
        "submit -- run digits URI",
    ],
)
@pytest.mark.parametrize("uri", ["https://me:a/s3cr3t@127.0.0.1:1", "ray://s3cr3t@h:1"])
def test_no_password_of_the_command_line_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, uri: str
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refused(capsys, *(word.replace("URI", uri) for word in words.split()))
    assert "s3cr3t" not in said
    assert "***@" in said


def test_no_password_of_an_address_stands_in_what_is_to_be_typed(tmp_path: Path) -> None:
    for address in ("http://me:s3cr3t@host:8265", "me:s3cr3t@host:6379"):
        words = command_to_resume(StoragePath(str(tmp_path), "hunt"), Locations(address=address))
        assert "s3cr3t" not in words
        assert display_address(address) in words
    assert display_address("host:6379") == "host:6379"


def test_colors_of_a_log_stay() -> None:
    written = StringIO()
    SafeConsole(file=written).print("\x1b[31mred\x1b[0m \x1b[2J\x9b2J")
    assert written.getvalue() == "\x1b[31mred\x1b[0m \ufffd[2J\ufffd2J\n"


@pytest.mark.parametrize("name", ["events.jsonl", SPEC, SEARCH])
def test_nesting_without_end_is_damage(storage: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (storage / "run1" / name).write_text("[" * 100_000 + "\n")
    said = refused(capsys, "report", "run1", "--storage-path", str(storage))
    assert name in said


def _listening(pid: int) -> set[str]:
    found: set[str] = set()
    with contextlib.suppress(psutil.Error):  # ended between two looks
        own = psutil.Process(pid)
        for process in (own, *own.children(recursive=True)):
            connections = process.net_connections("inet")
            found |= {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
    return found


def test_a_run_keeps_secrets_and_listens_on_this_machine_alone(starting_server: Server) -> None:
    """Everything that the run writes lies in two folders: the server's, and one for storage, Ray and messages."""
    starting_server.wait()
    addresses: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="tr-", dir="/tmp", ignore_cleanup_errors=True) as short:
        place = Path(short)
        (place / "ray").mkdir()
        words = ["run", "digits", "--epochs", "1", "--device", "cpu", "--storage-path", str(place / "storage")]
        user = {"MLFLOW_TRACKING_USERNAME": "somebody", "RAY_TMPDIR": str(place / "ray"), "RAY_AUTH_MODE": "token"}
        with (place / "said.txt").open("wb") as said:
            run = subprocess.Popen(
                [sys.executable, "-m", "triaccel_ray.service", *words, "--tracking-uri", starting_server.uri],
                env={**os.environ, **SECRETS, **user},
                stdout=said,
                stderr=said,
            )
            while run.poll() is None:
                addresses |= _listening(run.pid)
                time.sleep(0.2)
        text = (place / "said.txt").read_text()
        assert run.returncode == 0, text
        assert all(ip_address(address.removeprefix("::ffff:")).is_loopback for address in addresses)
        assert addresses

        files = [path for top in (place, starting_server.folder) for path in top.rglob("*") if path.is_file()]
        assert {"server.db", "events.jsonl", "mlflow.json", REPORT, "said.txt"} <= {path.name for path in files}
        assert any(path.name.startswith("gcs_server") for path in files)
        for secret in SECRETS.values():
            assert [str(path) for path in files if secret.encode() in path.read_bytes()] == []
