"""Ctrl-C, as a terminal sends it: to the process group of a search; SIGTERM, to the command alone or the group."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.service.mlflow_server import free_port, runs
from tests.service.own_task import MODULE
from tests.service.waiting import DEADLINE_S, answers, end, wait_until
from triaccel_ray.service.search.search import read_search
from triaccel_ray.service.storage.layout import EVENTS
from triaccel_ray.service.tracking.tracker import Tracker

SLOW = """
import time


class Slow(Blobs):
    # a second an epoch: nothing ends before it is interrupted
    def loss(self, outputs, targets, recipe):
        time.sleep(0.2)
        return super().loss(outputs, targets, recipe)
"""


class Terminal:
    """A command of 100 columns by 30 lines in a session of its own."""

    def __init__(self, folder: Path, *words: str) -> None:
        """Begins the command in `folder`, whose modules it finds."""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        command = [sys.executable, "-m", "triaccel_ray.service", *words]
        # A suite started by `nohup ... &` ignores both, its processes would too, and what is handled is reset for them.
        before = {each: signal.signal(each, signal.default_int_handler) for each in (signal.SIGINT, signal.SIGHUP)}
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.getcwd()])},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        for each, handler in before.items():
            signal.signal(each, handler)
        os.close(slave)
        self._written = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                self._written += os.read(self._master, 65536)
            except OSError:  # nobody has the other end open any more
                return

    @property
    def shown(self) -> str:
        """Everything that was ever on the screen, without colors."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._written.decode(errors="replace"))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        wait_until(lambda: condition() or self.process.poll() is not None, say=lambda: self.shown)
        assert self.process.poll() is None, self.shown

    def send(self, number: signal.Signals, *, to_group: bool = False) -> int:
        """Sends a signal, Ctrl-C to the group, waits for the end of every process, and returns the exit status."""
        processes = psutil.Process(self.process.pid).children(recursive=True)
        (os.killpg if to_group or number is signal.SIGINT else os.kill)(self.process.pid, number)
        status = self.process.wait(DEADLINE_S)
        _, alive = psutil.wait_procs(processes, timeout=DEADLINE_S)
        assert alive == []
        self._reader.join(DEADLINE_S)
        return status

    def close(self) -> None:
        """Ends whatever still runs in it."""
        end(self.process)
        os.close(self._master)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """Opens terminals, and closes them."""
    opened: list[Terminal] = []

    def start(folder: Path, *words: str) -> Terminal:
        opened.append(Terminal(folder, *words))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_ctrl_c_and_sigterm_end_everything_and_say_how_to_go_on(
    tmp_path: Path, terminal: Callable[..., Terminal]
) -> None:
    (tmp_path / "slow_task.py").write_text(MODULE + SLOW)
    where = ("--storage-path", str(tmp_path / "storage"))
    folder = tmp_path / "storage" / "hunt"
    tracker = Tracker(f"sqlite:///{tmp_path / 'storage' / 'mlflow.db'}", tmp_path / "storage" / "artifacts")

    def begun(pattern: str) -> bool:
        return any(b'"kind":"epoch"' in path.read_bytes() for path in folder.glob(f"{pattern}/{EVENTS}"))

    words = ("search", "slow_task:Slow", "--name", "hunt", "--trials", "3", "--epochs", "5", "--device", "cpu")
    first = terminal(tmp_path, *words, *where)
    first.wait_until(lambda: begun("baselines/*"))
    assert first.send(signal.SIGINT) == 130
    assert "baselines and probe" in first.shown
    way_on = shlex.join(["triaccel", "resume", "hunt", *where])
    assert way_on in first.shown.replace("\r\n", "\n")
    statuses = {run.name: run.status for run in runs(tracker, "triaccel-searches")}
    assert statuses["hunt"] == "KILLED"
    assert set(statuses.values()) <= {"KILLED", "FINISHED"}

    for to_group in (False, True):
        resumed = terminal(tmp_path, *shlex.split(way_on)[1:])
        resumed.wait_until(partial(lambda each: ": epoch" in each.shown.partition(": 3 trials")[2], resumed))
        assert resumed.send(signal.SIGTERM, to_group=to_group) == 130
        assert way_on in resumed.shown
        assert "The best trial" not in resumed.shown
    record = read_search(folder)
    assert {run.status for run in record.baselines.values()} == {"finished"}
    assert {run.status for run in record.trials} <= {"stopped", "finished"}
    recorded = {run.name: run.status for run in runs(tracker, "triaccel-searches")}
    assert recorded["hunt"] == "KILLED"
    assert {recorded[name] for name in ("fp32 of hunt", "amp of hunt", "probe")} == {"FINISHED"}
    assert set(recorded.values()) <= {"KILLED", "FINISHED"}
    assert set(recorded) == {"hunt", "fp32 of hunt", "amp of hunt", "probe", *(run.name for run in record.trials)}


@pytest.mark.parametrize("moment", ["loading", "starting Ray"])
def test_ctrl_c_before_anything_has_begun_is_one_line(
    tmp_path: Path, terminal: Callable[..., Terminal], moment: str
) -> None:
    early = terminal(tmp_path, "run", "digits", "--name", "early", "--storage-path", "kept")
    early.wait_until(lambda: moment in early.shown)
    assert early.send(signal.SIGINT) == 130
    said = " ".join(early.shown.replace("^C", "").split())
    assert re.search(r"stopped; nothing (had begun|was trained, and there is no early yet)$", said)
    assert "Traceback" not in early.shown
    assert not (tmp_path / "kept" / "early").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_the_end_of_the_ui_and_nothing_to_go_on_with(
    tmp_path: Path, terminal: Callable[..., Terminal], number: signal.Signals
) -> None:
    port = free_port()
    Tracker(f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path / "artifacts").prepare()
    ui = terminal(tmp_path, "ui", "--port", str(port), "--storage-path", str(tmp_path))
    ui.wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"))
    process = psutil.Process(ui.process.pid)
    connections = [each for part in process.children(recursive=True) for each in part.net_connections("inet")]
    assert {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
    assert ui.send(number) == 0
    assert "Ctrl-C ends it" in ui.shown
    assert "resume" not in ui.shown
