"""Seconds from the loss of a rank to the next step, and where they go.

    python -m benchmarks.lost_rank --runs 5

Two processes train a small model on this machine's CPUs through Ray Train, as `triaccel run --gpus 2` does on GPUs. One
of them is killed again and again, as often as a run survives. Parts:
    noticed     until Ray Train has ended the group and started the new rank 0
    started     its imports, and the process group
    restored    data, model and checkpoint
    first step  until the second batch is drawn

Fails if a run does not survive.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import psutil
import ray
import torch
from torch import Tensor, nn

from benchmarks.processes import parser_of
from triaccel_ray.data.sources import TensorSource
from triaccel_ray.service.cluster.cluster import cluster
from triaccel_ray.service.failures import MAX_LOSSES
from triaccel_ray.service.runs.launch import run_all
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.trainables.task import Purpose, Recipe, Splits, Task

PARTS = ("noticed", "started", "restored", "first step")
LAST_BATCH = 12
"""Number of batches that a process draws before it is killed."""


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


def main() -> int:
    """Prints a line for each run, and the medians; returns 1 if a run did not survive."""
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
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
