"""How far the curvature methods agree, also with other libraries: `python -m benchmarks.curvature_agreement`.

A small convolutional network is trained on the handwritten digits of scikit-learn (on a CPU), or ResNet-18 (CIFAR stem)
on random but learnable images (`--resnet`, on a GPU). At several moments of training, the largest eigenvalue of each
layer:

- fisher and ggn against the Hessian on the same 32 samples, and against PyHessian and curvlinops where they are
  importable (they are no dependencies);
- how much log10 lambda_1 varies from one draw of samples to the next, and by how much its median differs from that of
  128 samples: for 32 samples, for 128, and for 32 smoothed over refreshes as the control loop does it (weights as they
  are, so without the lag that smoothing has while they change; from ten successive values of one average, whose
  correlation makes the deviation about a tenth too small);
- how far `CurvatureMeter`'s power iteration, which goes on from the vectors of the last refresh, is from converged.

Stops with 1, in place of the figures, when ggn and the Hessian of this piecewise-linear network, or one of ours and its
counterpart in a library, differ by more than 2% in any layer; layers whose eigenvalue is below a thousandth of the
largest one are left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from benchmarks.curvature import NUM_CLASSES, learnable_images
from triaccel_ray.config import CurvatureConfig, CurvatureMethod
from triaccel_ray.measure.curvature import CurvatureMeter, top_eigenvalues
from triaccel_ray.model.layers import Layer, find_layers
from triaccel_ray.trainables.models import resnet18

NUM_DRAWS = 10
NUM_ITERATIONS = 100
TOLERANCE = 0.02
FLOOR = 1e-3
"""Share of the largest layer's eigenvalue below which a layer is not judged: FP32 leaves too few digits."""


class DigitsNet(nn.Sequential):
    """Two convolutions and two linear layers for 8 x 8 images."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, NUM_CLASSES),
        )  # fmt: skip


class Study:
    """One network in training, and what is asked of it."""

    def __init__(self, model: nn.Module, samples: tuple[Tensor, Tensor], batch_size: int) -> None:
        self.model, self.batch_size = model, batch_size
        self.inputs, self.targets = samples
        self.layers: Sequence[Layer] = find_layers(model)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        self._generator = torch.Generator().manual_seed(0)

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """Returns samples drawn without replacement."""
        chosen = torch.randperm(len(self.inputs), generator=self._generator)[:count].to(self.inputs.device)
        return self.inputs[chosen], self.targets[chosen]

    def train(self, num_steps: int) -> None:
        """Makes steps of SGD."""
        self.model.train()
        for _ in range(num_steps):
            inputs, targets = self.draw(self.batch_size)
            self._optimizer.zero_grad()
            F.cross_entropy(self.model(inputs), targets).backward()
            self._optimizer.step()

    def largest(self, method: CurvatureMethod, samples: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the largest eigenvalue of each layer, FP64 on the CPU; `hessian` converged."""
        estimate = top_eigenvalues(
            self.model,
            F.cross_entropy,
            *samples,
            self.layers,
            method=method,
            top_k=1,
            num_iterations=NUM_ITERATIONS,
        )
        return estimate.eigenvalues[:, 0].double().cpu()


def compared(found: Tensor, reference: Tensor) -> str:
    """Returns correlation of the logarithms over layers, and the ratios' median and range."""
    ratio = found / reference
    logs = torch.stack([found.clamp(min=1e-30).log10(), reference.clamp(min=1e-30).log10()])
    correlation = float(torch.corrcoef(logs)[0, 1])
    return f"log correlation {correlation:6.3f}, ratio {ratio.median():.3f} ({ratio.min():.3f} - {ratio.max():.3f})"


def worst_difference(found: Tensor, reference: Tensor) -> float:
    """Returns the largest relative difference over layers that are not below FLOOR; NaN where a value is NaN."""
    judged = ~(reference < FLOOR * reference.max())
    return float((found / reference - 1.0).abs()[judged].max())


def agree(names: str, found: Tensor, reference: Tensor) -> bool:
    """Returns whether the values differ in no layer by more than TOLERANCE, and says so if they do."""
    difference = worst_difference(found, reference)
    if not difference <= TOLERANCE:
        print(f"WRONG: {names} differ by {difference:.1e} in a layer, where {TOLERANCE:.0e} is allowed")
        return False
    return True


def spread(study: Study, method: CurvatureMethod) -> str:
    """Returns for each way to measure log10 lambda_1 its standard deviation over draws and its bias, means of layers.

    The bias is the difference of the medians over draws to that of 128 samples.
    """

    def draws_of(count: int) -> Tensor:
        return torch.stack([study.largest(method, study.draw(count)) for _ in range(NUM_DRAWS)])

    weight, single = CurvatureConfig().smoothing, draws_of(32)
    smoothed, means = single[0], []
    for values in torch.cat([single[1:], draws_of(32)]):
        smoothed = weight * smoothed + (1.0 - weight) * values
        means.append(smoothed)
    # The first ones still hold much of the draw that the mean began with.
    found = {"32": single, f"32 smoothed by {weight}": torch.stack(means[-NUM_DRAWS:]), "128": draws_of(128)}
    logs = {name: rows.clamp(min=1e-30).log10() for name, rows in found.items()}
    truth = logs["128"].median(dim=0).values
    return ", ".join(
        f"{name}: {rows.std(dim=0).mean():.3f} (bias {(rows.median(dim=0).values - truth).mean():+.2f})"
        for name, rows in logs.items()
    )


def of_pyhessian(study: Study, samples: tuple[Tensor, Tensor]) -> Tensor:
    """Returns PyHessian's largest eigenvalue of each layer, everything else frozen in turn."""
    from pyhessian import hessian

    study.model.eval()
    values = []
    for weight in [layer.weights[0] for layer in study.layers]:
        for parameter in study.model.parameters():
            parameter.requires_grad_(parameter is weight)
            parameter.grad = None
        meter = hessian(study.model, nn.CrossEntropyLoss(), data=samples, cuda=samples[0].is_cuda)
        values.append(float(meter.eigenvalues(maxIter=NUM_ITERATIONS, tol=1e-5)[0][0]))
    for parameter in study.model.parameters():
        parameter.requires_grad_(True)
        parameter.grad = None
    return torch.tensor(values, dtype=torch.float64)


def of_curvlinops(study: Study, samples: tuple[Tensor, Tensor], operator: str) -> Tensor:
    """Returns the largest eigenvalue of curvlinops' operator on each layer, by power iteration."""
    import curvlinops

    study.model.eval()
    values = []
    for layer in study.layers:
        weight = layer.weights[0]
        parameters: object = [weight]
        names = [name for name, parameter in study.model.named_parameters() if parameter is weight]
        try:
            linear = getattr(curvlinops, operator)(study.model, nn.CrossEntropyLoss(), parameters, [samples])
        except (TypeError, ValueError, AttributeError):
            parameters = {names[0]: weight}
            linear = getattr(curvlinops, operator)(study.model, nn.CrossEntropyLoss(), parameters, [samples])
        vector = torch.randn(weight.numel(), generator=torch.Generator().manual_seed(0)).to(weight.device)
        value = 0.0
        for _ in range(NUM_ITERATIONS):
            vector = vector / vector.norm()
            image = (linear @ vector).detach()
            value, vector = float(vector @ image), image
        values.append(value)
    return torch.tensor(values, dtype=torch.float64)


def libraries(study: Study, samples: tuple[Tensor, Tensor]) -> bool:
    """Prints our methods beside other libraries' on the same samples, or that they are not there.

    Returns whether none of them is wrong.
    """
    peers: list[tuple[str, CurvatureMethod, Callable[[], Tensor]]] = [
        ("PyHessian", "hessian", lambda: of_pyhessian(study, samples)),
        ("curvlinops Hessian", "hessian", lambda: of_curvlinops(study, samples, "HessianLinearOperator")),
        ("curvlinops GGN", "ggn", lambda: of_curvlinops(study, samples, "GGNLinearOperator")),
        ("curvlinops EF", "fisher", lambda: of_curvlinops(study, samples, "EFLinearOperator")),
    ]
    for name, method, measure in peers:
        try:
            theirs = measure()
        except ImportError as error:
            print(f"  {name:20s} not compared: {error}")
            continue
        ours = study.largest(method, samples)
        if not agree(f"{method} and {name}", ours, theirs):
            return False
        print(f"  {method:8s} against {name:20s} {compared(ours, theirs)}")
    return True


def warm_starts(study: Study, num_refreshes: int, num_steps: int) -> str:
    """Returns how far the meter's power iteration is from converged, refresh by refresh, other samples each time."""
    device = study.inputs.device
    config = CurvatureConfig(method="hessian", top_k=1)
    meter = CurvatureMeter(study.model, F.cross_entropy, study.layers, config, device=device)
    generator = torch.Generator(device=device).manual_seed(0)
    errors = []
    for _ in range(num_refreshes):
        samples = study.draw(32)
        found = meter.measure(*samples, generator).eigenvalues[:, 0].double().cpu()
        exact = study.largest("ggn", samples)
        errors.append(float(((found - exact).abs() / exact).median()))
        study.train(num_steps)
    return ", ".join(f"{error:.1e}" for error in errors)


def main() -> int:
    """Prints the agreement at several moments of training; returns 1 where those that must agree do not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--resnet", action="store_true", help="ResNet-18 in place of the digits network")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    if options.resnet:
        model, samples, moments = resnet18(NUM_CLASSES, "cifar"), learnable_images(4096, device, seed=1), (0, 40, 160)
    else:
        digits = load_digits()
        images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16.0
        model, samples = DigitsNet(), (images.to(device), torch.from_numpy(digits.target).to(device))
        moments = (0, 28, 168)
    study = Study(model.to(device), samples, batch_size=64)
    print(f"{len(study.layers)} layers, {device}, PyTorch {torch.__version__}; n = {NUM_DRAWS} draws")
    before = 0
    for num_steps in moments:
        study.train(num_steps - before)
        before = num_steps
        batch = study.draw(32)
        hessian, ggn, fisher = (study.largest(method, batch) for method in ("hessian", "ggn", "fisher"))
        if not agree("ggn and hessian", ggn, hessian):
            return 1
        print(f"after {num_steps} steps: lambda_1 from {float(ggn.min()):.2g} to {float(ggn.max()):.2g}")
        print(f"  ggn      against hessian            {compared(ggn, hessian)}")
        print(f"  fisher   against hessian            {compared(fisher, hessian)}")
        print(f"  hessian  on 32 other samples        {compared(study.largest('ggn', study.draw(32)), hessian)}")
        print(f"  spread of log10 lambda_1, ggn:      {spread(study, 'ggn')}")
        print(f"  spread of log10 lambda_1, fisher:   {spread(study, 'fisher')}")
        print(f"  ggn and hessian differ by {worst_difference(ggn, hessian):.1e} at most in any layer")
        if not options.resnet and not libraries(study, batch):
            return 1
    print(f"meter's hessian, relative error at each refresh (20 iterations, then 5): {warm_starts(study, 6, 28)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
