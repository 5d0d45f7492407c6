"""The definition of an experiment: model, loss, data and recipe. The service does everything else.

PyTorch is imported where it is used: a command checks its options by `Recipe` before this slow import.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from triaccel_ray.config import ControlConfig, check_fields, knob, require
from triaccel_ray.model.metrics import ACCURACY, Metric
from triaccel_ray.records.goal import LOSS, Goal
from triaccel_ray.records.plan import AmpPrecision

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from triaccel_ray.data.sources import DataSource


class Purpose(StrEnum):
    """The purpose of a run, which decides what data it gets."""

    SEARCH = "search"
    """Train on the training split, evaluate on the validation split; test samples are not available."""
    FINAL = "final"
    """Train on training and validation samples together, evaluate once, at the end, on the test set."""


@dataclass(frozen=True, kw_only=True)
class Splits:
    """The samples that a run trains on and, disjoint from these, those that it is evaluated on.

    Each is a `DataSource`, or data that `as_source` converts to one: a pair of tensors, or a map-style data set.
    """

    train: DataSource
    held_out: DataSource

    def __post_init__(self) -> None:
        from triaccel_ray.data.sources import as_source

        for name in ("train", "held_out"):
            object.__setattr__(self, name, as_source(getattr(self, name)))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a task is trained: warm-up, then cosine decay to zero, SGD with momentum (Tri-Accel, section 4.3)."""

    epochs: int = knob(30, "[1, 1000000]")
    """Passes over the training samples."""
    lr: float = knob(0.1, "(0, 1e6]")
    """Peak learning rate, at the control loop's starting batch size."""
    warmup_epochs: float = knob(5.0, "[0, 1e6]")
    """Epochs of linear warm-up; at most half of `epochs` is used."""
    momentum: float = knob(0.9, "[0, 1)")
    """Momentum of SGD."""
    nesterov: bool = False
    """Whether to use Nesterov momentum."""
    weight_decay: float = knob(5e-4, "[0, 1e6]")
    """L2 penalty on weights of two or more dimensions; norms and biases have none."""
    norm_bias_lr_factor: float = knob(1.0, "(0, 1e6]")
    """Factor on the lr of biases and of norms' weights: more than 1 trains faster in few epochs. (Page 2018 and Jordan
    2024 raise the rate of norms' biases alone.)"""
    label_smoothing: float = knob(0.0, "[0, 1)")
    """Probability mass spread evenly over the classes."""
    amp: AmpPrecision = "fp16"
    """Precision of method `amp` on a GPU: FP16 with a gradient scaler, or BF16 for models that overflow in FP16."""

    def __post_init__(self) -> None:
        check_fields(self)
        require(not (self.nesterov and self.momentum == 0), "nesterov", self.nesterov, "needs momentum > 0")

    def lr_factor(self, epoch: float) -> float:
        """Returns the factor in (0, 1] on `lr` after `epoch` passes over the data, fractional.

        In epochs rather than steps, so that a changing batch size does not move the schedule.
        """
        warmup = min(self.warmup_epochs, self.epochs / 2)
        if epoch < warmup:
            return max(epoch / warmup, 0.01)
        progress = min((epoch - warmup) / (self.epochs - warmup), 1.0)
        return max(0.5 * (1.0 + math.cos(math.pi * progress)), 1e-4)


WITHIN_BUDGET: Mapping[str, Any] = {"weights": "auto", "step_in_backward": "auto", "shard_optimizer": "auto"}
"""Settings of the bundled tasks for GPUs: a memory budget also decides how weights and optimizer state are stored."""


class Task(ABC):
    """An experiment. Subclass it, and `triaccel run package.module:MyTask` trains it.

    A subclass defines `model` and `data`. It may override `recipe`, `control`, `metrics` and `objective`.
    """

    recipe: ClassVar[Recipe] = Recipe()
    """Defaults that the command line can override."""
    control: ClassVar[ControlConfig] = ControlConfig()
    """Default thresholds and intervals."""
    metrics: ClassVar[Mapping[str, Metric]] = {"accuracy": ACCURACY}
    """Name -> metric of the held-out samples, besides the loss; all of them are recorded."""
    objective: ClassVar[str] = "accuracy"
    """The metric that runs are compared by, or `loss`."""
    unread: ClassVar[Collection[str]] = ()
    """Options that the task ignores, such as `data_dir` or `momentum`; values other than its own are refused."""

    def __init__(self, data_dir: Path | None = None) -> None:
        """Stores the folder of data files; reads nothing yet."""
        self.data_dir = data_dir

    @property
    def goal(self) -> Goal:
        """The objective, and whether it is maximized or minimized."""
        if self.objective == LOSS:
            return Goal(name=LOSS, maximize=False, unit="")
        return self.metrics[self.objective].goal(self.objective)

    @abstractmethod
    def model(self) -> nn.Module:
        """Returns a newly initialized model on the CPU; draws from torch's global generator alone."""

    @abstractmethod
    def data(self, purpose: Purpose) -> Splits:
        """Returns the samples for `purpose`; for SEARCH no part of the result may hold test samples.

        The trials of a search share the tensors of a `TensorSource`, so nothing may write to them. Sources of other
        kinds are built by each trial.

        Raises:
            FileNotFoundError: data files are missing; the message names them, and where to get them.
        """

    def loss(self, outputs: Any, targets: Tensor, recipe: Recipe) -> Tensor:
        """Returns the mean loss over the batch, a scalar; cross-entropy unless overridden."""
        import torch
        from torch.nn import functional as F

        from triaccel_ray.model.dry_run import described

        if not isinstance(outputs, torch.Tensor):
            raise TypeError(
                f"outputs {described(outputs)}: cross-entropy needs a tensor of scores; have the model return that "
                "alone, or define loss(outputs, targets, recipe) in the task"
            )
        return F.cross_entropy(outputs.float(), targets, label_smoothing=recipe.label_smoothing)

    def optimizer(self, model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
        """Returns SGD with momentum; only weights of two or more dimensions have weight decay."""
        import torch

        return torch.optim.SGD(
            parameter_groups(model, recipe),
            lr=recipe.lr,
            momentum=recipe.momentum,
            nesterov=recipe.nesterov,
            fused=True,  # skips steps with overflow on the device
        )


@dataclass(frozen=True, kw_only=True)
class SizeByDevice:
    """A class attribute that is one number where PyTorch sees a GPU, another elsewhere; a subclass may set an int."""

    gpu: int
    cpu: int

    def __get__(self, instance: Task | None, owner: type[Task]) -> int:
        import torch

        return self.gpu if torch.cuda.is_available() else self.cpu


def parameter_groups(model: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """Returns parameter groups: weights of two or more dimensions, with weight decay; the others, with their own lr."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    weights = [p for p in parameters if p.dim() >= 2]
    others = [p for p in parameters if p.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": weights, "weight_decay": recipe.weight_decay},
        {"params": others, "weight_decay": 0.0, "lr": recipe.lr * recipe.norm_bias_lr_factor},
    ]
    return [group for group in groups if group["params"]]
