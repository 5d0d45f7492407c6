"""Judging a model on held-out samples, in parts when they do not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from triaccel_ray.dry_run import described, num_correct
from triaccel_ray.layers import Loss, forward
from triaccel_ray.out_of_memory import first_line, is_out_of_memory
from triaccel_ray.plan import Fault
from triaccel_ray.sources import DataSource, as_source

Metric = Callable[[Any, Tensor], Tensor | float]
"""Maps outputs and targets to the number of correct samples: a scalar tensor, which waits for nothing, or a number."""


def judged_at_once(batch_size: int, *, on_gpu: bool, beside_graphs: bool) -> int:
    """Returns how many samples to judge at once, where batches of `batch_size` are trained.

    On a CPU as many. On a GPU fewer, for judging there is eager, in FP32, and of several views of each sample: an
    eighth in place of captured graphs, once they are gone, takes no more memory than they did (a quarter up to 0.05 GB
    more: ResNet-18, batches of 96 and 224). Beside graphs, which keep theirs, a quarter takes 0.07 GB more than they
    do; less at once would take longer, and there it is done after every epoch.
    """
    parts = (4 if beside_graphs else 8) if on_gpu else 1
    return max(batch_size // parts, 1)


def count_top1(outputs: Any, targets: Tensor) -> Tensor:
    """Returns how many samples have their largest output at the target's index.

    Raises:
        TypeError: the targets are no classes, one for each sample.
    """
    if not isinstance(outputs, Tensor) or targets.is_floating_point() or targets.shape != outputs.shape[:-1]:
        raise TypeError(
            f"outputs {described(outputs)}, targets {described(targets)}: accuracy and score count the samples whose "
            "largest output is at the target's class. Without classes, define num_correct(outputs, targets) in the "
            "task, or give evaluate() a metric: how many samples are right, such as those within a tolerance"
        )
    correct: Tensor = (outputs.argmax(dim=-1) == targets).sum()
    return correct


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A model's quality on held-out samples."""

    accuracy: float
    """Percent correct, by the mean output over the views of each sample."""
    loss: float
    """Mean over the samples, of the same outputs."""
    num_samples: int
    one_view_accuracy: float | None = None
    """Percent correct by each sample's first view, the sample as it is; None where it has no other."""
    faults: tuple[Fault, ...] = ()


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loss: Loss,
    data: Any,
    metric: Metric,
    *,
    device: torch.device,
    batch_size: int,
    step: int,
    release_memory: Callable[[], None],
) -> Evaluation:
    """Returns accuracy and loss over all samples of `data`, each drawn once, in eval mode and FP32.

    On an out-of-memory error the samples that failed are tried again in batches half as large.

    Raises:
        torch.OutOfMemoryError, MemoryError: not even a single sample fits.
        ValueError: `metric` counts more samples right than there are.
    """
    training = {module: module.training for module in model.modules()}
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    has_views = False
    faults: list[Fault] = []
    cursor = 0
    source = as_source(data).to(device)
    source.announce(torch.arange(len(source)), seed=0, follows=False)
    try:
        while cursor < len(source):
            at = device if source.is_resident else torch.device("cpu")
            indices = torch.arange(cursor, min(cursor + batch_size, len(source)), device=at)
            try:
                judged, several = _judge(model, loss, source, metric, indices)
                has_views |= several
                totals += judged
                cursor += len(indices)
                continue
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or len(indices) == 1:
                    raise
                detail = first_line(error)
            batch_size = max(len(indices) // 2, 1)
            release_memory()
            faults.append(Fault.out_of_memory(detail, step=step, phase="evaluation", micro_batch_size=batch_size))
    finally:
        for module, mode in training.items():
            module.training = mode
        if source is not data:
            source.close()  # ends the processes that have read ahead
    num_right, loss_sum, num_right_at_first = totals.tolist()
    if not 0 <= num_right <= len(source):
        raise ValueError(
            f"num_correct = {num_right:g} of {len(source)} samples: must count samples, each once; of several values a "
            "sample, such as tokens, count the sample right by a rule of yours, or return their mean times its samples"
        )
    return Evaluation(
        accuracy=100.0 * num_right / len(source),
        loss=loss_sum / len(source),
        num_samples=len(source),
        one_view_accuracy=100.0 * num_right_at_first / len(source) if has_views else None,
        faults=tuple(faults),
    )


def _judge(model: nn.Module, loss: Loss, source: DataSource, metric: Metric, indices: Tensor) -> tuple[Tensor, bool]:
    """Returns number of correct samples, sum of losses, number correct by the first view, fp64 [3]; and if it had more.

    All of them or, on an error, none.
    """
    inputs, targets = source.batch(indices, None)
    views = source.views(inputs)
    if not isinstance(views, tuple | list) or not views:
        found = type(views).__name__
        raise TypeError(f"{type(source).__name__}.views returned a {found}: must be a tuple or list, not empty")
    first, *others = (forward(model, view) for view in views)
    outputs = _mean([first, *others], len(indices), source) if others else first
    loss_sum = loss(outputs, targets).double() * len(indices)
    correct = num_correct(metric, outputs, targets)
    correct_at_first = num_correct(metric, first, targets) if others else correct
    return torch.stack([correct, loss_sum, correct_at_first]), bool(others)


def _mean(outputs: list[Any], num_samples: int, source: DataSource) -> Tensor:
    """Returns the mean over the views of outputs [num_samples, ...]."""
    shapes = {tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__ for each in outputs}
    if len(shapes) > 1 or not isinstance(outputs[0], Tensor) or outputs[0].shape[:1] != (num_samples,):
        raise TypeError(
            f"outputs for the views of {type(source).__name__} are {', '.join(map(str, shapes))}: must be tensors of "
            f"one shape, with a row for each of {num_samples} samples"
        )
    return torch.stack(outputs).mean(0)
