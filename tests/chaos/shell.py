"""Commands that are typed, each in a process of its own, and what is killed of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.service.waiting import COMMAND_S, DEADLINE_S, end, wait_until


@dataclass(frozen=True)
class Shell:
    """A folder with a task module, and the commands that were typed there. Its trials wait while there is `hold`."""

    folder: Path
    commands: list[subprocess.Popen[str]] = field(default_factory=list)

    def type(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        """Begins a command."""
        own = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        paths = os.pathsep.join([str(self.folder), os.getcwd()])
        command = subprocess.Popen(
            [sys.executable, "-m", "triaccel_ray.service", *words],
            cwd=self.folder,
            env={**own, "PYTHONPATH": paths, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.commands.append(command)
        return command

    def release(self) -> None:
        (self.folder / "hold").unlink(missing_ok=True)

    def clear(self) -> None:
        """Ends what a test has left: trials that wait, and commands with all their processes."""
        self.release()
        for command in self.commands:
            end(command)
            assert command.stdout is not None
            command.stdout.close()


def still_runs(command: subprocess.Popen[str], until: Callable[[], object]) -> None:
    """Returns once `until()` holds, while the command goes on."""
    wait_until(lambda: until() or command.poll() is not None)
    assert command.poll() is None, command.communicate(timeout=DEADLINE_S)[0]


def done(command: subprocess.Popen[str], *, status: int = 0) -> str:
    """Returns what a command has said, once it has ended with `status`."""
    said, _ = command.communicate(timeout=COMMAND_S)
    assert command.returncode == status, said
    return said


def kill(*pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def fill(folder: Path) -> Path:
    """Leaves no room on the disk of `folder`; returns the file to be deleted again."""
    path = folder / "filler"
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    return path
