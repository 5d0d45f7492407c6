"""Waiting for what happens elsewhere, in a thread, a process or a server, and ending what does not come to an end."""

import contextlib
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil

DEADLINE_S = 250.0
"""Of every wait, for what takes ten seconds at most on an idle machine."""
COMMAND_S = 600.0
"""Of a whole command, for what takes half a minute on an idle machine."""
HELD_S = 2 * DEADLINE_S
"""Of a trial that waits until its test lets it go on: the test waits for something else meanwhile."""
GRACE_S = 10.0
"""For a process that was asked to end, before it is killed."""


def wait_until(
    condition: Callable[[], object], *, say: Callable[[], object] = lambda: "", timeout_s: float = DEADLINE_S
) -> None:
    """Returns once the condition holds; fails with what `say` returns where it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, say()
        time.sleep(0.05)


def recorded_here() -> bytes:
    """Returns the event log that this process has open; empty before a run begins, while its model is tried."""
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            path = Path(os.readlink(link))
            if path.name == "events.jsonl":
                return path.read_bytes()
    return b""


def processes(name: str) -> list[int]:
    """Ray's processes of this name, orphans too; other workers of pytest-xdist have their own."""
    own, found = os.environ.get("PYTEST_XDIST_WORKER"), []
    for each in psutil.process_iter(["cmdline"]):
        if each.info["cmdline"] and each.info["cmdline"][0].startswith(f"ray::{name}"):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended, or is another user's
                if each.environ().get("PYTEST_XDIST_WORKER") == own:
                    found.append(each.pid)
    return found


def answers(url: str) -> bool:
    """Whether a server answers there; one that refuses does."""
    try:
        urllib.request.urlopen(url, timeout=GRACE_S).close()
    except urllib.error.HTTPError as error:
        error.close()
    except OSError:
        return False
    return True


def end(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """Ends a process and all below it, by their ids; does nothing where it has ended."""
    if process.poll() is not None:
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        processes = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        _, alive = psutil.wait_procs(processes, timeout=GRACE_S)
        for each in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.kill()
    process.wait()
