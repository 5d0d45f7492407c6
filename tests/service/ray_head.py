"""A Ray cluster of the tests' own with its dashboard, as `ray start --head` makes one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

START_TIMEOUT_S = 40.0
STOP_TIMEOUT_S = 10.0


@contextlib.contextmanager
def ray_head() -> Iterator[str]:
    """Yields the address of the Jobs API; every process of the cluster is gone afterwards, and no other."""
    # Ray's sockets lie below its folder, and their paths may be 107 characters long: tmp_path would be too long.
    with TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        port, dashboard, agent, client = _free_ports(4)
        options = {"port": port, "dashboard-port": dashboard, "dashboard-agent-listen-port": agent}
        options |= {"ray-client-server-port": client, "temp-dir": folder, "num-cpus": 2, "num-gpus": 0}
        words = [f"--{name}={value}" for name, value in options.items()]
        log = Path(folder) / "head.log"
        with log.open("w") as file:
            head = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *words],
                env=_environment(),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            url = f"http://127.0.0.1:{dashboard}"
            _wait(head, url, log)
            yield url
        finally:
            end(head)


def _environment() -> dict[str, str]:
    """The package on the path of the jobs, and `python` this one, as on a cluster where both are installed."""
    python = Path(sys.executable).parent
    paths = {
        "PATH": os.pathsep.join([str(python), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return {**{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}, **paths}


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _wait(head: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and head.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/api/version", timeout=2).close()
            return
        except urllib.error.HTTPError as error:  # a token is needed, and the server is there
            error.close()
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"no Jobs API at {url}:\n{log.read_text()}")


def end(head: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        processes = psutil.Process(head.pid).children(recursive=True)
        head.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(STOP_TIMEOUT_S)
        _, alive = psutil.wait_procs(processes, timeout=STOP_TIMEOUT_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    head.kill()
    head.wait()
