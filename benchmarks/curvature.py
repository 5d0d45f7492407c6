"""Curvature of ResNet-18 (CIFAR stem), 21 layers: our methods and `torch.func`'s. `python -m benchmarks.curvature`.

The network first trains for some steps on random but learnable images, so that its spectra are not those of an
initialization.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks.timing import report
from triaccel_ray.config import CurvatureConfig, CurvatureMethod
from triaccel_ray.measure.curvature.meter import CurvatureMeter
from triaccel_ray.model.layers import Layer, find_layers
from triaccel_ray.trainables.models import resnet18

TOP_K = 5
NUM_SAMPLES = 32
NUM_CLASSES = 10


@dataclass(frozen=True)
class Case:
    """A network, and the samples to measure its curvature on."""

    model: nn.Module
    layers: Sequence[Layer]
    inputs: Tensor
    targets: Tensor


def learnable_images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns noise images with a faint pattern per class, so that learning takes some steps."""
    patterns = torch.randn(NUM_CLASSES, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(NUM_CLASSES, (count,), generator=generator)
    inputs = torch.randn(count, 3, 32, 32, generator=generator) + 0.1 * patterns[classes]
    # A third of the labels are random, which keeps the loss away from 0, where curvature would vanish.
    wrong = torch.randint(NUM_CLASSES, (count,), generator=generator)
    targets = torch.where(torch.rand(count, generator=generator) < 1 / 3, wrong, classes)
    return inputs.cuda(), targets.cuda()


def trained_case() -> Case:
    """Returns the model after 100 steps of SGD, with samples that it has not seen."""
    model = resnet18(NUM_CLASSES, "cifar").cuda().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    inputs, targets = learnable_images(12_800, seed=1)
    for batch, labels in zip(inputs.split(128), targets.split(128), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(batch), labels).backward()
        optimizer.step()
    return Case(model.eval(), find_layers(model), *learnable_images(NUM_SAMPLES, seed=2))


def vmap_fisher(case: Case) -> Tensor:
    """Returns the empirical Fisher's eigenvalues, with per-sample gradients as in the `torch.func` tutorials."""
    model = case.model
    names = {id(p): name for name, p in model.named_parameters()}
    weights = {names[id(layer.weights[0])]: layer.weights[0].detach() for layer in case.layers}

    def loss(parameters: dict[str, Tensor], sample: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (sample.unsqueeze(0),)), target.unsqueeze(0))

    gradients: dict[str, Tensor] = vmap(grad(loss), in_dims=(None, 0, 0))(weights, case.inputs, case.targets)
    rows = [gradient.flatten(1) for gradient in gradients.values()]
    spectra: Tensor = torch.linalg.eigvalsh(torch.stack([row @ row.T for row in rows]).double() / len(case.inputs))
    return spectra.flip(1)[:, :TOP_K]


def measurement(case: Case, method: CurvatureMethod, top_k: int) -> Callable[[], Tensor]:
    """Returns a warmed-up function that measures the eigenvalues, captured in a CUDA graph if possible."""
    config = CurvatureConfig(method=method, top_k=top_k)
    meter = CurvatureMeter(case.model, F.cross_entropy, case.layers, config, device=torch.device("cuda"))
    generator = torch.Generator(device="cuda").manual_seed(0)

    def measure() -> Tensor:
        return meter.measure(case.inputs, case.targets, generator).eigenvalues

    for _ in range(3):
        measure()
    if not meter.is_captured:
        print(f"{method}: not captured because {meter.not_captured_because}")
    return measure


def timed(name: str, measure: Callable[[], object], n: int) -> str:
    """Returns a line with the wall-clock times of `measure`, which must be warmed up."""
    times = []
    for _ in range(n):
        torch.cuda.synchronize()
        start = time.perf_counter()
        measure()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return f"{name:30s} {statistics.median(times):9.2f} ms ({min(times):.2f} to {max(times):.2f}, n {n})"


def main() -> int:
    """Prints the times of all methods; returns 1 if a test of them fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=20, help="timed measurements of each way; a tenth of slow ones")
    n = parser.parse_args().n

    def figures() -> Iterator[str]:
        case = trained_case()
        for method in ("fisher", "ggn"):
            yield timed(f"{method}, k={TOP_K}", measurement(case, method, TOP_K), n)
        for top_k in (1, TOP_K):
            yield timed(f"hessian, k={top_k}", measurement(case, "hessian", top_k), max(1, n // 10))
        vmap_fisher(case)  # to warm up
        yield timed("fisher, vmap(grad), eigvalsh", partial(vmap_fisher, case), max(1, n // 10))

    return report("tests/measure -m gpu", figures)


if __name__ == "__main__":
    sys.exit(main())
