"""A Ray cluster of the tests' own with its dashboard, as `ray start --head` makes one."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from ray.cluster_utils import Cluster

from tests.service.waiting import GRACE_S, answers, end, wait_until


@contextlib.contextmanager
def ray_head() -> Iterator[str]:
    """Yields the address of the Jobs API; every process of the cluster is gone afterwards, and no other."""
    # Ray's sockets lie below its folder, and their paths may be 107 characters long: tmp_path would be too long.
    with TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        port, dashboard, agent, client = free_ports(4)
        options = {"port": port, "dashboard-port": dashboard, "dashboard-agent-listen-port": agent}
        options |= {"ray-client-server-port": client, "temp-dir": folder, "num-cpus": 2, "num-gpus": 0}
        words = [f"--{name}={value}" for name, value in options.items()]
        log = Path(folder) / "head.log"
        with ray_node("--head", *words, env=_environment(), log=log) as head:
            url = f"http://127.0.0.1:{dashboard}"
            wait_until(lambda: _answers(head, url, log), say=log.read_text)
            wait_until(lambda: _listens(agent), say=log.read_text)  # to it the Jobs API hands what is submitted
            yield url


@contextlib.contextmanager
def machines(*, num_cpus: int = 1, num_gpus: int = 0, num_others: int = 0) -> Iterator[Cluster]:
    """Yields a cluster: a head, and others with a CPU each."""
    head = {"num_cpus": num_cpus, "num_gpus": num_gpus, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(num_others):
            made.add_node(num_cpus=1, num_gpus=0)
        yield made
    finally:
        made.shutdown()


@contextlib.contextmanager
def ray_node(
    *words: str, env: Mapping[str, str], log: Path, within: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """Yields a machine that has joined by `ray start` with these words; it leaves at the end, as after `ray stop`.

    `within` is a command that runs the one after it elsewhere, such as in a network of its own.
    """
    with log.open("w") as file:
        process = subprocess.Popen(
            [*within, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *words],
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until(lambda: _has_joined(process, log), say=log.read_text)
        yield process
    finally:
        end(process)


def _has_joined(node: subprocess.Popen[bytes], log: Path) -> bool:
    assert node.poll() is None, log.read_text()
    return "Ray runtime started" in log.read_text()


def _environment() -> dict[str, str]:
    """The package on the path of the jobs, and `python` this one, as on a cluster where both are installed."""
    python = Path(sys.executable).parent
    paths = {
        "PATH": os.pathsep.join([str(python), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return {**{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}, **paths}


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=GRACE_S).close()
    except OSError:
        return False
    return True


def _answers(head: subprocess.Popen[bytes], url: str, log: Path) -> bool:
    assert head.poll() is None, log.read_text()
    return answers(f"{url}/api/version")
