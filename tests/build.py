"""Small models and samples that the engine's tests train, and sources that watch or refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from triaccel_ray.apply.capture import StepCache
from triaccel_ray.apply.precision import LayerPrecision
from triaccel_ray.apply.step import Step
from triaccel_ray.config import BatchConfig, ControlConfig, CurvatureConfig, ExecutionConfig, PrecisionConfig
from triaccel_ray.cuda.graphs import Graph, GraphPool
from triaccel_ray.cuda.out_of_memory import MemoryBudget
from triaccel_ray.data.sampler import Sampler
from triaccel_ray.data.sources import TensorSource, as_source
from triaccel_ray.loop import ControlLoop
from triaccel_ray.model.gradients import Gradients
from triaccel_ray.model.layers import find_layers
from triaccel_ray.records.events import EventLog, Tick
from triaccel_ray.records.plan import Precision

FP8, FP16, BF16, FP32 = Precision
CPU = torch.device("cpu")
ONE = torch.ones(())


def blobs(num_samples: int, *, features: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Samples around four well separated centers, which do not depend on the seed."""
    centers = 4.0 * torch.eye(4, features)
    generator = torch.Generator().manual_seed(seed)
    targets = torch.arange(num_samples) % 4
    return centers[targets] + 0.5 * torch.randn(num_samples, features, generator=generator), targets


def mlp(*, seed: int = 0, features: int = 8) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(features, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


class ConvNet(nn.Module):
    """Convolutions, batch normalization, a residual connection, dropout: what depends on state and chance."""

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(4 * 16, 4)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(images)))
        hidden = hidden + torch.relu(self.second(hidden))
        return self.head(self.dropout(hidden.flatten(1)))


def images(num_samples: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """4 x 4 images of four classes, [n, 1, 4, 4]."""
    inputs, targets = blobs(num_samples, features=16, seed=seed)
    return inputs.view(-1, 1, 4, 4), targets


def shift_and_noise(inputs: Tensor, generator: torch.Generator) -> Tensor:
    """An augmentation that draws from the generator."""
    noise = torch.randn(inputs.shape, generator=generator)
    return inputs.roll(int(torch.randint(2, (), generator=generator)), dims=-1) + 0.1 * noise


class Wired(nn.Module):
    """Modules, parameters and other parts, and a function `wiring(self, *inputs)` that passes inputs through them."""

    def __init__(self, wiring: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.wiring = wiring

    def forward(self, *inputs: Any) -> Any:
        return self.wiring(self, *inputs)


class Forces(nn.Module):
    """An energy and its gradient by the inputs, [n, 1] and [n, 8], in eval mode as well."""

    def __init__(self, *, detached_in_eval: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.energy = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.detached_in_eval = detached_in_eval

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        positions = positions.detach().requires_grad_()
        energy = self.energy(positions)
        if self.detached_in_eval and not self.training:
            energy = energy.detach()
        return energy, torch.autograd.grad(energy.sum(), positions, create_graph=True)[0]


def energy_and_forces(outputs: tuple[Tensor, Tensor], energies: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs[0], energies) + outputs[1].pow(2).mean()


class Limited(nn.Module):
    """Passes its input on, and has memory for `limit` samples at once."""

    def __init__(self, limit: int, *, message: str = "no room for more samples") -> None:
        super().__init__()
        self.limit, self.message = limit, message
        self.sizes: list[int] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.sizes.append(len(inputs))
        if len(inputs) > self.limit:
            raise torch.OutOfMemoryError(self.message)
        return inputs


class LimitedGradients(nn.Module):
    """Passes its input on, and has memory for the gradients of `limit` samples at once."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = inputs.clone()
        if outputs.requires_grad:
            outputs.register_hook(self._check)
        return outputs

    def _check(self, gradient: Tensor) -> None:
        if len(gradient) > self.limit:
            raise torch.OutOfMemoryError("no room for these gradients")


class Starved(torch.optim.SGD):
    """Finds no memory at one of its steps: before it writes anything, or after the first parameter."""

    def __init__(self, params: Any, *, fails_at: int = 1, writes_first: bool = False) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.num_calls, self.fails_at, self.writes_first = 0, fails_at, writes_first

    def step(self, closure: Any = None) -> Any:
        self.num_calls += 1
        if self.num_calls == self.fails_at:
            if self.writes_first:
                with torch.no_grad():
                    self.param_groups[0]["params"][0].add_(1.0)
            raise torch.OutOfMemoryError("no room for the step")
        return super().step(closure)


class CountingSource(TensorSource):
    """Remembers the indices of every batch that was drawn."""

    def __init__(self, inputs: Tensor, targets: Tensor, **options: Any) -> None:
        super().__init__(inputs, targets, **options)
        self.drawn: list[Tensor] = []

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        self.drawn.append(indices)
        return super().batch(indices, generator)

    def to(self, device: torch.device) -> CountingSource:
        return self


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets)


def nothing() -> None:
    """A memory check that finds nothing to complain of."""


def step_of(model: nn.Module, data: Any, *, loss: Any = cross_entropy, check: Any = nothing) -> Step:
    sampler = Sampler(as_source(data), seed=0, device=CPU)
    precision = LayerPrecision(model, find_layers(model))
    return Step(model, loss, sampler, precision, MemoryBudget(check=check, release=nothing))


class NoUpdate:
    """Follows the gradients with nothing, and counts the steps."""

    is_capturable = True

    def __init__(self) -> None:
        self.num_steps = 0

    def run(self, loss_sum: Tensor, num_samples: int, gradients: Gradients) -> None:
        self.num_steps += 1


class Rerun:
    """Stands for a captured graph: a replay runs the work again."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


class RerunPool(GraphPool):
    """Has work run where a GPU would capture it; raises the `errors` first, one a capture, None for none."""

    def __init__(self, *errors: Exception | None) -> None:
        super().__init__(CPU)
        self.errors = list(errors)
        self.num_tried = 0

    @property
    def can_capture(self) -> bool:
        return True

    def _record(self, work: Callable[[], None], generators: Sequence[torch.Generator]) -> Graph:
        self.num_tried += 1
        error = self.errors.pop(0) if self.errors else None
        work()
        if error is not None:
            raise error
        return Rerun(work)


def cache_of(step: Step, update: Any = None, pool: GraphPool | None = None) -> StepCache:
    watched = list(step.model.parameters())
    return StepCache(step, update or NoUpdate(), lambda: Gradients(watched), pool or GraphPool(CPU), ExecutionConfig())


def controlled(model: nn.Module, *levels: Precision) -> LayerPrecision:
    """The model's layers at these precisions, in their order, the last repeated."""
    layers = find_layers(model)
    precision = LayerPrecision(model, layers)
    wanted = [*levels, *[levels[-1]] * len(layers)]
    precision.set({layer.name: level for layer, level in zip(layers, wanted, strict=False)})
    return precision


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def collected(model: nn.Module) -> Gradients:
    """The gradients that the model's parameters hold, where statistics read them."""
    found = Gradients(list(model.parameters()))
    found.collect({}, {})
    found.publish()
    return found


def values(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the weights and buffers."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(first: Any, second: Any) -> bool:
    """Whether two nested states are equal bit for bit."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def plain(tree: Any) -> Any:
    """The tree with lists in place of tensors and tuples; a named tuple becomes its type's name and fields."""
    if isinstance(tree, Tensor):
        return tree.tolist()
    if hasattr(tree, "_asdict"):
        return type(tree).__name__, plain(tree._asdict())
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    return [plain(value) for value in tree] if isinstance(tree, list | tuple) else tree


def run(loop: Any, num_steps: int) -> None:
    for _ in range(num_steps):
        loop.step()


PRECISION = PrecisionConfig(tau_low=6e-4, tau_high=2.5e-3, dwell_ticks=0, patience_ticks=1, allow_slow_precisions=True)
CURVATURE = CurvatureConfig(every_steps=8, num_samples=8, tau_curv=0.45, alpha=0.1)
BATCH = BatchConfig(
    start=8, minimum=4, maximum=16, granularity=4, step_up=4, step_down=4, dwell_ticks=0, oom_cooldown_ticks=3,
    rho_low=0.95, rho_high=1.0, lr_rule="sqrt",
)  # fmt: skip
CONFIG = ControlConfig(every_steps=4, precision=PRECISION, curvature=CURVATURE, batch=BATCH)
QUIET = replace(
    CONFIG, precision=PrecisionConfig(enabled=False, initial=FP32), curvature=CurvatureConfig(enabled=False)
)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loop_of(
    model: nn.Module, data: Any, config: ControlConfig = CONFIG, *, log: EventLog | None = None, **options: Any
) -> tuple[ControlLoop, list[Tick]]:
    """A loop, and the ticks that it will have made, which go into `log` too."""
    ticks: list[Tick] = []

    def keep(tick: Tick) -> None:
        ticks.append(tick)
        if log is not None:
            log.append(tick)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    options = {"loss": cross_entropy, "on_tick": keep, **options}
    return ControlLoop(model, optimizer, data=data, config=config, **options), ticks
