"""Curvature of ResNet-18 (CIFAR stem), 21 layers, each method and the usual ways: `python -m benchmarks.curvature`.

The network is trained for some steps on random but learnable images first, so that its spectra are not those of an
initialisation. Every spectrum of ours is compared with FP64 per-sample gradients and LAPACK; the command exits with 1
when one of the five largest eigenvalues of a layer is off by more than its tolerance, a wider one for `hessian`, whose
power iteration stops before it has converged. A CPU gets a small network.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from triaccel_ray.config import CurvatureConfig, CurvatureMethod
from triaccel_ray.measure.curvature.meter import CurvatureMeter
from triaccel_ray.measure.curvature.spectrum import CurvatureEstimate
from triaccel_ray.model.layers import Layer, find_layers
from triaccel_ray.trainables.models import resnet18

TOP_K = 5
NUM_SAMPLES = 32
NUM_CLASSES = 10
TOLERANCES = (5e-3, 1e-2)
"""Relative errors of the largest eigenvalue, and of any of the five that is at least 1e-3 of the largest; smaller ones
count as if they were."""
POWER_TOLERANCES = (0.1, 0.25)
"""The same for power iteration, which stops after 20 Hessian-vector products and approaches from below: 0.026 and 0.014
were seen on the small network."""


@dataclass(frozen=True)
class Case:
    """A network with samples to measure it on."""

    model: nn.Module
    layers: Sequence[Layer]
    inputs: Tensor
    targets: Tensor

    @property
    def device(self) -> torch.device:
        """Where everything is."""
        return self.inputs.device


@dataclass(frozen=True)
class Row:
    """One way to measure, timed."""

    name: str
    wall_ms: Sequence[float]
    """From the call until the device has finished."""
    host_ms: float
    """From the call until it returns."""
    device_ms: float
    """Between events before and after, on the device."""
    extra_bytes: int
    """Device memory beyond what the process held before: at the peak, or kept by graphs."""
    errors: tuple[float, float] | None
    """Largest relative error over layers of the largest eigenvalue, and of any; None where nothing is known."""

    def __str__(self) -> str:
        low, high = min(self.wall_ms), max(self.wall_ms)
        error = "" if self.errors is None else "  errors {:.1e}, {:.1e}".format(*self.errors)
        wall = f"{statistics.median(self.wall_ms):9.2f} ms ({low:.2f} - {high:.2f}, n {len(self.wall_ms)})"
        extra = f"extra {self.extra_bytes / 2**20:6.0f} MiB"
        return f"{self.name:44s} {wall:40s} host {self.host_ms:8.2f}  device {self.device_ms:8.2f}  {extra}{error}"


class SmallNet(nn.Sequential):
    """A few layers, for CPUs."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(4),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, NUM_CLASSES),
        )  # fmt: skip


def learnable_images(count: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Returns noise with a faint pattern of its class in it: something to learn, and not all at once."""
    patterns = torch.randn(NUM_CLASSES, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(NUM_CLASSES, (count,), generator=generator)
    inputs = torch.randn(count, 3, 32, 32, generator=generator) + 0.1 * patterns[classes]
    # A third of the labels is wrong: the loss then stays away from 0, where curvature would vanish.
    wrong = torch.randint(NUM_CLASSES, (count,), generator=generator)
    targets = torch.where(torch.rand(count, generator=generator) < 1 / 3, wrong, classes)
    return inputs.to(device), targets.to(device)


def trained_case(model: nn.Module, device: torch.device, num_steps: int, num_samples: int = NUM_SAMPLES) -> Case:
    """Returns the model after some steps of SGD, and other samples."""
    model = model.to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    inputs, targets = learnable_images(128 * num_steps, device, seed=1)
    for batch, labels in zip(inputs.split(128), targets.split(128), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(batch), labels).backward()
        optimizer.step()
    return Case(model, find_layers(model), *learnable_images(num_samples, device, seed=2))


def reference_spectra(case: Case, method: CurvatureMethod) -> Tensor:
    """Returns the five largest eigenvalues of each layer from explicit FP64 columns, one sample at a time."""
    model, weights = case.model.double().eval(), [layer.weights[0] for layer in case.layers]
    rows: list[list[Tensor]] = [[] for _ in weights]
    for sample, target in zip(case.inputs.double().split(1), case.targets.split(1), strict=True):
        outputs = model(sample)
        if method == "fisher":
            columns = [F.cross_entropy(outputs, target)]
        else:
            p = outputs.detach().softmax(dim=1)[0]
            root = torch.diag(p.sqrt()) - torch.outer(p, p.sqrt())  # its square is diag(p) - p p^T
            columns = list((outputs @ root)[0])
        for column in columns:
            gradients = torch.autograd.grad(column, weights, retain_graph=True)
            for row, gradient in zip(rows, gradients, strict=True):
                row.append(gradient.flatten())
    spectra = []
    for row in rows:
        matrix = torch.stack(row)
        row.clear()
        spectra.append(torch.linalg.eigvalsh((matrix @ matrix.T).cpu() / len(case.inputs)).flip(0)[:TOP_K])
    case.model.float().train()
    return torch.stack(spectra)


def relative_errors(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Returns the largest error of the first and of any eigenvalue, relative to it or to 1e-3 of the first."""
    floor = 1e-3 * expected[:, :1]
    errors = (found.detach().double().cpu() - expected).abs() / torch.maximum(expected, floor)
    return float(errors[:, 0].max()), float(errors.max())


def vmap_fisher(case: Case) -> Tensor:
    """Returns the empirical Fisher's eigenvalues the way `torch.func` tutorials compute per-sample gradients."""
    model = case.model.eval()
    names = {id(p): name for name, p in model.named_parameters()}
    weights = {names[id(layer.weights[0])]: layer.weights[0].detach() for layer in case.layers}

    def loss(parameters: dict[str, Tensor], sample: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (sample.unsqueeze(0),)), target.unsqueeze(0))

    gradients: dict[str, Tensor] = vmap(grad(loss), in_dims=(None, 0, 0))(weights, case.inputs, case.targets)
    rows = [gradient.flatten(1) for gradient in gradients.values()]
    spectra: Tensor = torch.linalg.eigvalsh(torch.stack([row @ row.T for row in rows]).double() / len(case.inputs))
    return spectra.flip(1)[:, :TOP_K]


def timed(
    name: str, measure: Callable[[], object], device: torch.device, n: int, errors: tuple[float, float] | None
) -> Row:
    """Returns the times of `measure`, which has run before."""
    is_cuda = device.type == "cuda"
    wall, host, on_device = [], [], []
    extra = 0
    for _ in range(n):
        if is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
        start = time.perf_counter()
        measure()
        host.append(1e3 * (time.perf_counter() - start))
        if is_cuda:
            last.record()
            torch.cuda.synchronize()
            on_device.append(first.elapsed_time(last))
            extra = max(extra, torch.cuda.max_memory_allocated() - before)
        wall.append(1e3 * (time.perf_counter() - start))
    device_ms = statistics.median(on_device) if on_device else statistics.median(wall)
    return Row(name, wall, statistics.median(host), device_ms, extra, errors)


def vmap_row(case: Case, reference: Tensor, n: int) -> Row:
    """Returns the times of `vmap_fisher`."""
    error = relative_errors(vmap_fisher(case), reference)
    return timed("fisher, vmap(grad), eigvalsh", lambda: vmap_fisher(case), case.device, n, error)


def meter_row(case: Case, method: CurvatureMethod, top_k: int, reference: Tensor | None, n: int) -> Row:
    """Returns the times of a meter's later measurements; their memory is what its graphs keep."""
    if case.device.type == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
    config = CurvatureConfig(method=method, top_k=top_k)
    meter = CurvatureMeter(case.model, F.cross_entropy, case.layers, config, device=case.device)
    generator = torch.Generator(device=case.device).manual_seed(0)

    def measure() -> CurvatureEstimate:
        return meter.measure(case.inputs, case.targets, generator)

    for _ in range(3):
        estimate = measure()
    kept = 0
    if case.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        kept = torch.cuda.memory_reserved() - before
    how = "captured" if meter.is_captured else "eager"
    if case.device.type == "cuda" and not meter.is_captured:
        print(f"{method}: not captured because {meter.not_captured_because}")
    error = None if reference is None else relative_errors(estimate.eigenvalues, reference[:, :top_k])
    row = timed(f"{method}, k={top_k}, CurvatureMeter ({how})", measure, case.device, n, error)
    return Row(row.name, row.wall_ms, row.host_ms, row.device_ms, max(kept, row.extra_bytes), error)


def is_right(row: Row) -> bool:
    """Returns whether the row's errors are within its method's tolerances; NaN never is."""
    allowed = POWER_TOLERANCES if row.name.startswith("hessian") else TOLERANCES
    return row.errors is None or all(error <= most for error, most in zip(row.errors, allowed, strict=True))


def main() -> int:
    """Prints one line per way to measure; returns 1 if one of them is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=20, help="timed measurements of each way")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    case = trained_case(SmallNet() if device.type == "cpu" else resnet18(NUM_CLASSES, "cifar"), device, num_steps=100)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}, PyTorch {torch.__version__}; {len(case.layers)} layers, {NUM_SAMPLES} samples, top {TOP_K}")
    fisher, ggn = reference_spectra(case, "fisher"), reference_spectra(case, "ggn")
    print(f"largest eigenvalue by layer: {ggn[:, 0].min():.2g} to {ggn[:, 0].max():.2g} (ggn)")
    slow = max(1, options.n // 10)
    rows = [
        vmap_row(case, fisher, slow),
        meter_row(case, "fisher", TOP_K, fisher, options.n),
        meter_row(case, "ggn", TOP_K, ggn, options.n),
        meter_row(case, "hessian", 1, ggn, slow),
        meter_row(case, "hessian", TOP_K, ggn, slow),
    ]
    wrong = [row for row in rows[1:] if not is_right(row)]  # the first row is not ours
    if wrong:
        print(*(f"WRONG: {row.name}: errors {row.errors}" for row in wrong), sep="\n")
        return 1
    print(*rows, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
