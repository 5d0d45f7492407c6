"""Evaluates a model on held-out samples, in smaller batches if they do not fit in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from triaccel_ray.apply.agreement import Agreement
from triaccel_ray.cuda.allocator import peak_of_tensors
from triaccel_ray.cuda.out_of_memory import first_line, is_out_of_memory
from triaccel_ray.data.sources import DataSource, IterableSource, as_source
from triaccel_ray.distributed.ranks import Ranks
from triaccel_ray.model.dry_run import attributing_errors, described, described_pair, needs_gradients
from triaccel_ray.model.layers import Loss, forward, preserved_modes, trained_modules
from triaccel_ray.model.metrics import ACCURACY, Metric, Values, as_metrics, is_classification
from triaccel_ray.model.pytree import map_tensors, tensors_in
from triaccel_ray.records.plan import Fault, FaultKind

Metrics: TypeAlias = "Mapping[str, Metric | Values]"
"""Name -> metric, or function(outputs, targets) whose mean over the samples is the metric."""


_SHARE_OF_STEP = 0.5
"""Share of a training step's memory that evaluation may take: the estimate knows one batch size, cuDNN's workspaces
grow in jumps."""


def evaluation_batch_size(batch_size: int, *, on_gpu: bool, beside_graphs: bool) -> int:
    """Returns the initial batch size for evaluation, given that of training.

    On a CPU both are equal. On a GPU evaluation takes less: it is eager, in FP32, and of several views of each sample.
    After captured graphs are released, an eighth takes no more memory than they did (ResNet-18, batches of 96 and 224).
    Beside graphs, a quarter takes 0.07 GB more than they do; smaller batches would take longer after every epoch.
    """
    if not on_gpu:
        return batch_size
    return max(batch_size // (4 if beside_graphs else 8), 1)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A model's quality on held-out samples."""

    loss: float
    """Mean over the samples, computed from the mean output over each sample's views."""
    metrics: Mapping[str, float]
    """Name -> metric of the same outputs; NaN if the total weight is zero."""
    num_samples: int
    one_view: Mapping[str, float] = field(default_factory=dict)
    """The metrics of each sample's first view, the sample as it is; empty if it has no other views."""
    faults: tuple[Fault, ...] = ()


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loss: Loss,
    data: Any,
    metrics: Metrics | None = None,
    *,
    device: torch.device,
    batch_size: int,
    step: int,
    release_memory: Callable[[], None],
    ranks: Ranks | None = None,
    largest: int = 0,
    step_bytes: int = 0,
) -> Evaluation:
    """Returns loss and metrics over all samples of `data`, each drawn once, in eval mode (a loss module too) and FP32.

    Without `metrics`, a classifier (outputs [b, C], integer targets [b]) is judged by its accuracy, any other model by
    its loss alone. The host waits for the device once, at the end. In small batches a GPU waits for Python, so batches
    after the first have up to `largest` samples there. They are expected to take half of `step_bytes` at most, samples
    moved to the device included.

    After an out-of-memory error, the samples that failed are retried in batches half as large. Gradients are disabled.
    If model or loss calls `torch.autograd.grad` and fails, they are enabled from that batch on. Metrics get detached
    outputs.

    Each of several `ranks` evaluates a share of the samples, and all return the same. Of a stream, each evaluates all
    samples, and all return rank 0's result.

    Raises:
        torch.OutOfMemoryError, MemoryError: not even a single sample fits.
        TypeError: a metric does not fit outputs and targets, or returned a value that is not allowed.
        UserCodeError: a metric raised.
    """
    evaluator = _Evaluator(model, loss, None if metrics is None else as_metrics(metrics))
    totals = torch.zeros(1, dtype=torch.float64, device=device)
    faults: list[Fault] = []
    cursor = 0
    ranks = ranks or Ranks()

    def peak() -> AbstractContextManager[list[int]]:
        return peak_of_tensors(device) if largest > batch_size else nullcontext([0])

    modules = trained_modules(model, loss)
    with Agreement(ranks).agreeing(), preserved_modes(modules):
        for module in modules:
            module.eval()
        with peak() as data_peak:
            source = as_source(data).to(device)
        is_shared = not ranks.is_alone and not isinstance(source, IterableSource)
        first, every = (ranks.rank, ranks.world_size) if is_shared else (0, 1)
        if is_shared:
            ranks.require_same_settings({"number of samples to evaluate": len(source)})
        if not isinstance(source, IterableSource):
            source.announce(torch.arange(len(source))[first::every], seed=0, follows=False)
        try:
            while size := -(-source.reach(first + cursor * every, batch_size * every) // every):
                at = device if source.is_resident else torch.device("cpu")
                start = first + cursor * every
                try:
                    with peak() as batch_peak:
                        indices = torch.arange(start, start + size * every, every, device=at)
                        totals = totals + evaluator(source, indices)
                    cursor += size
                    if batch_peak[0]:
                        fitting = int((_SHARE_OF_STEP * step_bytes - data_peak[0]) / batch_peak[0]) * size
                        batch_size, largest = max(min(fitting, largest), batch_size), 0
                    continue
                except (RuntimeError, MemoryError) as error:
                    if not evaluator.has_gradients and needs_gradients(error):
                        evaluator.has_gradients = True
                        continue
                    if not is_out_of_memory(error) or size == 1:
                        raise
                    detail = first_line(error)
                batch_size = size // 2
                release_memory()
                kind, phase = FaultKind.OUT_OF_MEMORY, "evaluation"
                faults.append(Fault(kind=kind, step=step, phase=phase, micro_batch_size=batch_size, detail=detail))
        finally:
            if source is not data:
                source.close()  # ends the processes that have read ahead
    loss_sum, *sums = totals.tolist()
    if not ranks.is_alone:
        loss_sum, sums, cursor = evaluator.shared([loss_sum, *sums], cursor, ranks, is_shared=is_shared)
    middle = len(sums) // 2
    found = evaluator.figures(sums[:middle])
    one_view = evaluator.figures(sums[middle:]) if evaluator.has_views else {}
    return Evaluation(
        loss=loss_sum / cursor, metrics=found, num_samples=cursor, one_view=one_view, faults=tuple(faults)
    )


class _Evaluator:
    """Computes sums of loss and metrics over batches."""

    def __init__(self, model: nn.Module, loss: Loss, metrics: dict[str, Metric] | None) -> None:
        self._model, self._loss, self._metrics = model, loss, metrics
        self.has_views = self.has_gradients = False

    def __call__(self, source: DataSource, indices: Tensor) -> Tensor:
        """Returns the loss sum, sum and weight of each of K metrics, and these of the first view: fp64 [1 + 4K].

        An error leaves no sample counted.
        """
        inputs, targets = source.batch(indices, None)
        views = source.views(inputs)
        if not isinstance(views, tuple | list) or not views:
            found = type(views).__name__
            raise TypeError(f"{type(source).__name__}.views returned a {found}: must be a tuple or list, not empty")
        with torch.set_grad_enabled(self.has_gradients):
            first, *others = (forward(self._model, view) for view in views)
            outputs = _mean_of_views([first, *others], len(indices), source) if others else first
            loss_sum = self._loss(outputs, targets).detach().double() * len(indices)
        if self.has_gradients:
            first, outputs = map_tensors(Tensor.detach, [first, outputs])
        if self._metrics is None:
            self._metrics = {"accuracy": ACCURACY} if is_classification(outputs, targets) else {}
        counted = measured(self._metrics, outputs, targets)
        at_first = measured(self._metrics, first, targets) if others else counted
        self.has_views |= bool(others)
        return torch.cat([loss_sum.reshape(1), counted, at_first])

    def shared(
        self, sums: list[float], num_samples: int, ranks: Ranks, *, is_shared: bool
    ) -> tuple[float, list[float], int]:
        """Returns loss sum, other sums and number of samples of all ranks, or those of rank 0 if each has them all."""
        names = None if self._metrics is None else list(self._metrics)
        found = [each for each in ranks.all_gather_object([sums, num_samples, self.has_views, names]) if each[1]]
        if not is_shared:
            found = found[:1]
        self.has_views = any(each[2] for each in found)
        if self._metrics is None:  # this rank has had no sample to tell the default by
            self._metrics = {"accuracy": ACCURACY} if found[0][3] else {}
        loss_sum, *others = map(math.fsum, zip(*(each[0] for each in found), strict=True))
        return loss_sum, others, sum(each[1] for each in found)

    def figures(self, sums: list[float]) -> dict[str, float]:
        """Returns the metrics; `sums` holds the sum and the weight of each in turn."""
        found = {}
        for (name, metric), total, weight in zip((self._metrics or {}).items(), sums[::2], sums[1::2], strict=True):
            with attributing_errors(f"of_mean of metrics[{name!r}]"):
                found[name] = float(metric.of_mean(total / weight if weight else math.nan))
        return found


def measured(metrics: Mapping[str, Metric], outputs: Any, targets: Any) -> Tensor:
    """Returns sum and weight of each of K metrics, fp64 [2K] on the targets' device.

    Raises:
        UserCodeError: a metric raised.
        TypeError: a metric does not fit outputs and targets, or returned a value that is not allowed.
    """
    sample = tensors_in([targets, outputs])[0]
    parts = [_sum_and_weight(name, metric, outputs, targets, len(sample)) for name, metric in metrics.items()]
    found = [_scalar(each, sample.device) for pair in parts for each in pair]
    return torch.stack(found) if found else torch.zeros(0, dtype=torch.float64, device=sample.device)


def _sum_and_weight(name: str, metric: Metric, outputs: Any, targets: Any, num_samples: int) -> tuple[Any, Any]:
    with attributing_errors(f"metrics[{name!r}]", lambda: described_pair(outputs, targets)):
        found = metric.values(outputs, targets)
    if isinstance(found, Tensor) and found.shape[:1] == (num_samples,):
        return found.sum(dtype=torch.float64), found.numel()
    if isinstance(found, tuple) and len(found) == 2 and all(map(_is_number, found)):
        return found
    raise TypeError(
        f"metrics[{name!r}] returned {described(found)}{described_pair(outputs, targets)}: must be a tensor with a "
        f"row for each of {num_samples} samples, or (sum, weight), two scalars; of a mean m over n samples return "
        "(m * n, n)"
    )


def _is_number(value: Any) -> bool:
    return value.dim() == 0 if isinstance(value, Tensor) else isinstance(value, int | float)


def _scalar(value: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(device, torch.float64)
    return torch.full((), float(value), dtype=torch.float64, device=device)  # `as_tensor` would wait for the device


def _mean_of_views(outputs: list[Any], num_samples: int, source: DataSource) -> Tensor:
    """Returns the mean of the outputs of all views, [num_samples, ...]."""
    shapes = {tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__ for each in outputs}
    if len(shapes) > 1 or not isinstance(outputs[0], Tensor) or outputs[0].shape[:1] != (num_samples,):
        raise TypeError(
            f"outputs for the views of {type(source).__name__} are {', '.join(map(str, shapes))}: must be tensors of "
            f"one shape, with a row for each of {num_samples} samples"
        )
    return torch.stack(outputs).mean(0)
