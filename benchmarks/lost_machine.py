"""Seconds that a run on several GPUs loses with a rank and with a machine, and when a machine joins.

    python -m benchmarks.lost_machine --gpus 4 cifar10-resnet18 --data-dir FOLDER

`triaccel run` trains on a cluster of two machines, simulated on this one: one has all GPUs but one. Without a GPU, CPUs
take their place. A rank is killed, then the machine with one GPU; then another such machine joins. Prints what each
change has cost, from the run's log. Give the words of `triaccel run` last; the run must be long enough.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.processes import has_gpus, parser_of
from triaccel_ray.records.events import Epoch, Interruption, read_events
from triaccel_ray.service.storage.layout import EVENTS

MAX_SECONDS = 300
"""Longest time that a change may take."""


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Waits until the condition holds, as long as `process`, which may write to `log`, lives."""
    end = time.monotonic() + MAX_SECONDS
    while not condition():
        if time.monotonic() > end or process.poll() is not None:
            what = "has ended" if process.poll() is not None else f"did not go on within {MAX_SECONDS} s"
            said = log.read_text()[-2000:] if log.exists() else ""
            raise RuntimeError(f"{' '.join(map(str, process.args))}: {what}\n{said}")  # type: ignore[arg-type]
        time.sleep(0.2)


@contextlib.contextmanager
def machine(log: Path, num_devices: int, first: int, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Yields a machine of a cluster, which has so many of this one's devices; it is killed at the end."""
    env, options = dict(os.environ), [f"--num-cpus={num_devices}", "--num-gpus=0"]
    if torch.cuda.is_available():
        visible = env.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
        env["CUDA_VISIBLE_DEVICES"] = ",".join(visible[first : first + num_devices])
        options = [f"--num-gpus={num_devices}"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options, *words]
    with log.open("w") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_until(lambda: "Ray runtime started" in log.read_text(), process, log)
        yield process
    finally:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and all that it has started, unless it has ended."""
    if process.poll() is None:
        for each in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()


def kill_a_rank(of: subprocess.Popen[bytes]) -> None:
    """Kills a rank that trains on a machine."""
    for each in psutil.Process(of.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if each.cmdline()[:1] and each.cmdline()[0].startswith("ray::RayTrainWorker"):
                each.kill()
                return
    raise RuntimeError("no rank trains there")


def lose_and_gain(num_devices: int, words: list[str], folder: Path) -> None:
    """Trains on a cluster of two machines, and prints what each change has cost."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address, log = f"127.0.0.1:{port}", folder / "run" / EVENTS

    def records(kind: type) -> list[Any]:
        found = [event.record for event in read_events(log)] if log.exists() else []
        return [record for record in found if isinstance(record, kind)]

    def measure(what: str, change: Callable[[], object]) -> None:
        num_epochs, num_interruptions = len(records(Epoch)), len(records(Interruption))
        wait_until(lambda: len(records(Epoch)) >= num_epochs + 2, run, log)
        change()
        wait_until(lambda: len(records(Interruption)) > num_interruptions, run, log)
        last = records(Interruption)[-1]
        sizes = f"{last.world_size_before}, then {last.world_size} processes"
        print(f"{what}: {sizes}, {last.seconds_lost:.1f} s", flush=True)

    with contextlib.ExitStack() as machines:

        def join(name: str, count: int, first: int, *options: str) -> subprocess.Popen[bytes]:
            return machines.enter_context(machine(folder / f"{name}.log", count, first, *options))

        head = join("head", num_devices - 1, 0, "--head", f"--port={port}", f"--temp-dir={folder}/ray")
        alone = join("alone", 1, num_devices - 1, f"--address={address}")
        options = ["--gpus", f"2..{num_devices}", "--address", address, "--storage-path", str(folder), "--name", "run"]
        run = subprocess.Popen([sys.executable, "-m", "triaccel_ray.service", "run", *words, *options])
        machines.callback(kill, run)
        measure("a rank is killed", lambda: kill_a_rank(head))
        measure("a machine is killed", lambda: kill(alone))
        measure("a machine joins", lambda: join("joining", 1, num_devices - 1, f"--address={address}"))
        run.send_signal(signal.SIGINT)
        run.wait(MAX_SECONDS)


def main() -> int:
    """Prints a line for each change; fails if the run does not survive it."""
    parser = parser_of(__doc__)
    parser.add_argument("--gpus", type=int, default=4, help="of both machines, at least 3")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="TASK ...", help="the words of `triaccel run`")
    args = parser.parse_args()
    if args.gpus < 3:
        parser.error("--gpus: must be at least 3, so that two are left when a machine is lost")
    if torch.cuda.is_available() and not has_gpus(args.gpus):
        return 1
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as name:
        lose_and_gain(args.gpus, args.words or ["digits", "--epochs", "2000"], Path(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
