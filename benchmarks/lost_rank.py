"""Seconds from the loss of a rank to the next step, and where they go.

    python -m benchmarks.lost_rank --runs 5

Two processes train a small model on this machine's CPUs through Ray Train, as `triaccel run --gpus 2` does on GPUs. One
of them is killed again and again, as often as a run survives. Parts:
    noticed     until Ray Train has ended the group and started the new rank 0
    started     its imports, and the process group
    restored    data, model and checkpoint
    first step  until the second batch is drawn

    python -m benchmarks.lost_rank --machines 4 --run cifar10-resnet18 --data-dir FOLDER

A cluster of two machines, simulated on this one, trains a task on 4 GPUs (on CPUs, if there is no GPU); one machine has
three of them. A rank is killed, then the machine with one GPU; then another machine joins. It prints the seconds that
each change has cost, from the run's log. What follows `--run` are the words of `triaccel run`.

Fails if a run does not survive.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import ray
import torch
from torch import Tensor, nn

from benchmarks.processes import parser_of
from triaccel_ray.data.sources import TensorSource
from triaccel_ray.records.events import Epoch, Interruption, read_events
from triaccel_ray.service.cluster.cluster import cluster
from triaccel_ray.service.failures import MAX_LOSSES
from triaccel_ray.service.runs.runs import run_all
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.storage.layout import EVENTS
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.trainables.task import Purpose, Recipe, Splits, Task

PARTS = ("noticed", "started", "restored", "first step")
LAST_BATCH = 12
"""Number of batches that a process draws before it is killed."""
MOST_SECONDS = 300
"""Longest time that a change may take."""


def stamp(folder: Path, event: str) -> None:
    """Notes the time of an event in a rank of a group."""
    if "RANK" in os.environ:
        with (folder / f"rank {os.environ['RANK']} of {os.getpid()}").open("a") as file:
            file.write(f"{time.time()} {event}\n")


class Stamping(TensorSource):
    """Notes when batches are drawn; in rank 1, the last of them kills the process."""

    folder: Path
    num_batches = 0

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Returns the samples."""
        if generator is not None:
            self.num_batches += 1
            stamp(self.folder, "batch")
            num_dead = len(list(self.folder.glob("death*")))
            if os.environ.get("RANK") == "1" and self.num_batches == LAST_BATCH and num_dead < MAX_LOSSES:
                (self.folder / f"death {num_dead}").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
        return super().batch(indices, generator)

    def to(self, device: torch.device) -> TensorSource:
        """Returns itself: a copy on the device would not note anything."""
        return self


class Timed(Task):
    """A small model on noise."""

    name = "timed"
    recipe = Recipe(epochs=40, lr=0.01)

    def model(self) -> nn.Module:
        """Returns a network of two layers."""
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))

    def data(self, purpose: Purpose) -> Splits:
        """Returns 320 samples, which note their use."""
        assert self.data_dir is not None
        stamp(self.data_dir, f"data {psutil.Process().create_time()}")
        noise, labels = torch.randn(320, 32), torch.randint(10, (320,))
        train = Stamping(noise, labels)
        train.folder = self.data_dir
        return Splits(train=train, held_out=TensorSource(noise, labels))


def parts_of_losses(folder: Path) -> list[list[float]]:
    """Returns seconds for each of PARTS, of every loss in a run."""
    deaths = sorted(float(path.read_text()) for path in folder.glob("death*"))
    groups = sorted([line.split() for line in path.read_text().splitlines()] for path in folder.glob("rank 0*"))
    found = []
    for died, lines in zip(deaths, groups[1:], strict=True):
        (data, _, created), (first, _), (second, _), *_ = lines
        times = [died, *map(float, (created, data, first, second))]
        found.append([after - before for before, after in pairwise(times)])
    return found


def wait_until(condition: Callable[[], bool], run: subprocess.Popen[bytes] | None = None) -> None:
    """Waits until the condition holds, at most 5 minutes, and no longer than `run` lives."""
    end = time.monotonic() + MOST_SECONDS
    while not condition():
        if time.monotonic() > end or (run is not None and run.poll() is not None):
            raise RuntimeError(f"the run has ended, or did not go on within {MOST_SECONDS} s")
        time.sleep(0.2)


@contextlib.contextmanager
def machine(log: Path, num_devices: int, first: int, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Yields a machine of a cluster, which has so many of this one's devices; it is killed at the end."""
    env, options = dict(os.environ), [f"--num-cpus={num_devices}", "--num-gpus=0"]
    if torch.cuda.is_available():
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(first, first + num_devices)))
        options = [f"--num-gpus={num_devices}"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options, *words]
    with log.open("w") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_until(lambda: "Ray runtime started" in log.read_text(), process)
        yield process
    finally:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and all that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        own = psutil.Process(process.pid)
        for each in [own, *own.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


def kill_a_rank() -> None:
    """Kills a process of the only group on this machine."""
    for each in psutil.process_iter(["cmdline"]):
        if each.info["cmdline"] and each.info["cmdline"][0].startswith("ray::RayTrainWorker"):
            each.kill()
            return
    raise RuntimeError("no group trains here")


def lose_and_gain(num_devices: int, words: list[str], folder: Path) -> None:
    """Trains on a cluster of two machines that loses a rank, then a machine, and prints what each change has cost."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    log = folder / "run" / EVENTS

    def count(kind: type) -> int:
        return sum(isinstance(event.record, kind) for event in read_events(log)) if log.exists() else 0

    with contextlib.ExitStack() as machines:
        port = address.rpartition(":")[2]
        head = ("--head", f"--port={port}", f"--temp-dir={folder}/ray", "--include-dashboard=false")
        machines.enter_context(machine(folder / "head.log", num_devices - 1, 0, *head))
        join = f"--address={address}"
        lone = machines.enter_context(machine(folder / "lone.log", 1, num_devices - 1, join))
        options = ["--gpus", f"2..{num_devices}", "--address", address, "--storage-path", str(folder), "--name", "run"]
        run = subprocess.Popen([sys.executable, "-m", "triaccel_ray.service", "run", *words, *options])
        machines.callback(kill, run)
        changes: dict[str, Callable[[], object]] = {
            "a rank is killed": kill_a_rank,
            "a machine is killed": lambda: kill(lone),
            "a machine joins": lambda: machines.enter_context(
                machine(folder / "joining.log", 1, num_devices - 1, join)
            ),
        }
        for index, (what, change) in enumerate(changes.items()):
            before = count(Epoch)
            wait_until(lambda before=before: count(Epoch) >= before + 2, run)  # type: ignore[misc]
            change()
            wait_until(lambda index=index: count(Interruption) > index, run)  # type: ignore[misc]
            last = [event.record for event in read_events(log) if isinstance(event.record, Interruption)][-1]
            print(
                f"{what}: {last.world_size_before}, then {last.world_size} processes, {last.seconds_lost:.1f} s",
                flush=True,
            )
        run.send_signal(signal.SIGINT)
        run.wait(MOST_SECONDS)


def main() -> int:
    """Prints a line for each run, and the medians; returns 1 if a run did not survive."""
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--machines", type=int, metavar="GPUS", help="GPUs of two machines")
    parser.add_argument("--run", nargs=argparse.REMAINDER, default=["digits"], metavar="WORD")
    args = parser.parse_args()
    if args.machines:
        with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as name:
            lose_and_gain(args.machines, args.run, Path(name))
        return 0
    losses: list[list[float]] = []
    with cluster(None, num_cpus=3):
        for _ in range(args.runs):
            with tempfile.TemporaryDirectory() as name:
                spec = RunSpec(
                    task="benchmarks.lost_rank:Timed", data_dir=name, device="cpu", gpus="2", recipe=Timed.recipe
                )
                errors = run_all({"run": spec}, StoragePath(name), num_gpus=0)
                if errors:
                    print(errors)
                    return 1
                found = parts_of_losses(Path(name))
            print(", ".join(f"{sum(each):.1f}" for each in found), "s", flush=True)
            losses += found
    print(f"{len(losses)} losses on {os.cpu_count()} CPUs, PyTorch {torch.__version__}, Ray {ray.__version__}")
    columns = [[sum(loss) for loss in losses], *map(list, zip(*losses, strict=True))]
    for part, each in zip(("in all", *PARTS), columns, strict=True):
        print(f"{part:10} median {statistics.median(each):5.1f} s, {min(each):.1f} to {max(each):.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
