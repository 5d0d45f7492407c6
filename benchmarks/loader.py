"""An epoch of a host data set into a GPU that trains, the stream beside a plain DataLoader.

Run `python -m benchmarks.loader`. Both have the same worker processes, pinned memory and asynchronous copies, and
train the same small network at the same batch size; the ideal is the number of steps times a step on a batch that is
already there. Seconds an epoch, median of `--epochs` after one to warm up. Prints no times of a case in which the
stream's samples were not each seen exactly once, and exits with 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from triaccel_ray.data.sampler import Sampler
from triaccel_ray.data.sources import DatasetSource

DEVICE = torch.device("cuda")


class Images(Dataset[Any]):
    """Random images, mirrored half of the time and normalised on the CPU; the target is the index."""

    def __init__(self, num: int, size: int) -> None:
        self._num = num
        self._base = torch.randint(0, 256, (256, 3, size, size), dtype=torch.uint8)

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self._base[index % len(self._base)]
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image.float().div_(255).sub_(0.5), index


@dataclass(frozen=True)
class Case:
    """What is measured."""

    num_images: int
    size: int
    width: int
    """Channels of the network, by which a step takes longer."""
    batch_size: int
    num_workers: int
    num_epochs: int


class Training:
    """Three convolutions on their way down, in FP16."""

    def __init__(self, width: int) -> None:
        self.model = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, stride=2), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(width, 10),
        )  # fmt: skip
        self.model = self.model.to(memory_format=torch.channels_last).to(DEVICE)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, fused=True)
        self.seen = torch.zeros((), dtype=torch.float64, device=DEVICE)

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """Makes one step, which asks the host for nothing."""
        with torch.autocast("cuda", dtype=torch.float16):
            outputs = self.model(inputs.contiguous(memory_format=torch.channels_last))
            loss = nn.functional.cross_entropy(outputs, targets % 10)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seen += targets.double().square().sum()


def seconds(epoch: Callable[[], None], num_epochs: int) -> list[float]:
    """Returns the times of the epochs after the first."""
    times = []
    for _ in range(num_epochs + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        epoch()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times[1:]


def through_the_stream(case: Case, training: Training, dataset: Images) -> list[float]:
    """Returns seconds an epoch by this package's sampler and source."""
    source = DatasetSource(dataset, DEVICE, num_workers=case.num_workers)
    sampler = Sampler(source, seed=0, device=DEVICE)

    def epoch() -> None:
        present = sampler.epoch
        while sampler.epoch == present:
            training.step(*source.batch(sampler.take(case.batch_size), sampler.generator))

    times = seconds(epoch, case.num_epochs)
    source.close()
    return times


def through_a_loader(case: Case, training: Training, dataset: Images) -> list[float]:
    """Returns seconds an epoch as PyTorch's tutorials have it, at its best settings."""
    loader = DataLoader(
        dataset, case.batch_size, shuffle=True, num_workers=case.num_workers, pin_memory=True, persistent_workers=True
    )

    def epoch() -> None:
        for inputs, targets in loader:
            training.step(inputs.to(DEVICE, non_blocking=True), targets.to(DEVICE, non_blocking=True))

    return seconds(epoch, case.num_epochs)


def without_loading(case: Case, training: Training, dataset: Images) -> list[float]:
    """Returns seconds an epoch of the same steps on one batch that stays on the device."""
    inputs = torch.stack([dataset[i][0] for i in range(case.batch_size)]).to(DEVICE)
    targets = torch.arange(case.batch_size, device=DEVICE)

    def epoch() -> None:
        for _ in range(-(-case.num_images // case.batch_size)):
            training.step(inputs, targets)

    return seconds(epoch, case.num_epochs)


def measure(case: Case) -> bool:
    """Prints a case's figures, if the stream delivered every sample exactly once an epoch; returns whether it did."""
    dataset, rows = Images(case.num_images, case.size), []
    print(case)
    for name, run in (
        ("steps x step time", without_loading),
        ("stream", through_the_stream),
        ("DataLoader", through_a_loader),
    ):
        training = Training(case.width)
        times = run(case, training, dataset)
        rows.append(f"  {name:20} {statistics.median(times):7.3f} s ({min(times):.3f} to {max(times):.3f})")
        squares = sum(i * i for i in range(case.num_images)) * (case.num_epochs + 1)
        if run is through_the_stream and training.seen.item() != squares:
            print("WRONG: the stream did not deliver every sample exactly once")
            return False
    print(*rows, sep="\n")
    return True


def main() -> int:
    """Measures small and large images, with a light and a heavy step; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--images", type=int, nargs=2, default=(20_000, 5_000), help="of 32 and of 224 pixels")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU")
        return 1
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, n = {given.epochs}")
    small, large = given.images
    cases = [
        Case(small, 32, width, batch, given.workers, given.epochs) for width, batch in ((32, 96), (256, 96), (256, 512))
    ] + [Case(large, 224, width, 96, given.workers, given.epochs) for width in (16, 64)]
    right = [measure(case) for case in cases]
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
