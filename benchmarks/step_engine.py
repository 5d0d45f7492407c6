"""The engine's own steps for `benchmarks.training_step`: the full loop, and the captured step without any control."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.step_contenders import DEVICE, MEAN, STD, Job, Made, sgd
from triaccel_ray.apply.capture import StepCache
from triaccel_ray.apply.copies import ComputeCopies
from triaccel_ray.apply.fuse import Fusion, fuse
from triaccel_ray.apply.optimizer import LayerwiseOptimizer
from triaccel_ray.apply.precision import LayerPrecision
from triaccel_ray.apply.step import Step
from triaccel_ray.config import BatchConfig, ControlConfig, CurvatureConfig, ExecutionConfig, PrecisionConfig
from triaccel_ray.cuda.allocator import hold_less
from triaccel_ray.cuda.graphs import GraphPool
from triaccel_ray.data.sampler import Sampler
from triaccel_ray.loop import ControlLoop
from triaccel_ray.model.gradients import Gradients
from triaccel_ray.model.layers import find_layers
from triaccel_ray.records.events import EventLog
from triaccel_ray.records.plan import Precision
from triaccel_ray.trainables.images import ImageSource, Preparation


def _source(job: Job) -> ImageSource:

    return ImageSource(job.images, job.targets, Preparation(mean=MEAN, std=STD, augment=True))


def _config(name: str, job: Job) -> ControlConfig:

    # Thresholds that end with every layer in FP16, BF16 or FP32; `mixed` has deep layers in FP16 and the first in BF16.
    low, high, initial = {
        "loop-bf16": (0.0, 1e10, Precision.BF16),
        "loop-mixed": (3e-6, 1e10, Precision.BF16),
        "loop-fp32": (0.0, 1e-30, Precision.FP32),
    }.get(name, (1e9, 1e10, Precision.FP16))
    return ControlConfig(
        every_steps=50,
        precision=PrecisionConfig(tau_low=low, tau_high=high, initial=initial, dwell_ticks=0, patience_ticks=1),
        curvature=CurvatureConfig(every_steps=200, num_samples=32, top_k=5, alpha=0.001),
        batch=BatchConfig(start=job.batch_size, minimum=job.batch_size, maximum=job.batch_size, granularity=1),
        execution=ExecutionConfig(autotune=job.autotune, fuse=job.fuse, recompute=job.recompute),
    )


def full_loop(name: str, job: Job) -> Made:
    """Returns the full loop: statistics every step, a tick every 50, the five largest eigenvalues every 200."""
    hold_less(torch.device("cuda"))  # as the service's processes do
    log = EventLog(Path(tempfile.mkdtemp()) / "events.jsonl")
    config = _config(name, job)
    loop = ControlLoop(job.model, sgd(job.model), F.cross_entropy, _source(job), config=config, on_tick=log.append)

    def epoch() -> float:
        loop.train_epoch()
        return statistics.median(loop.train_epoch().seconds for _ in range(2))

    def peak_bytes() -> float:
        loop.memory.refresh_peaks()
        return loop.memory.peak_bytes

    return Made(step=loop.step, loss=_LastLoss(loop.epoch_loss), epoch=epoch, peak_bytes=peak_bytes)


def plain(job: Job) -> Made:
    """Returns the captured step that a user would write: fixed loss scale, no statistics, nothing decided."""
    model = job.model.train()
    layers, device = find_layers(model), DEVICE
    optimizer = LayerwiseOptimizer(sgd(model), layers)
    copies = ComputeCopies(layers, optimizer.parameters)
    modules = [module for layer in layers for module in layer.modules]
    fused = fuse(model, modules, recompute=job.recompute) if job.fuse else None
    fusion = fused if isinstance(fused, Fusion) else None
    precision = LayerPrecision(model, layers, copies=copies, norms=() if fusion is None else fusion.norms)
    precision.set({layer.name: Precision.FP16 for layer in layers})
    sampler = Sampler(_source(job), seed=0, device=device)

    def nothing() -> None:
        """Memory is neither checked nor given back."""

    step = Step(model, F.cross_entropy, sampler, precision, check_memory=nothing, release_memory=nothing, fusion=fusion)
    scale, finite = torch.tensor(1024.0, device=device), torch.zeros((), device=device)
    total = torch.zeros(2, dtype=torch.float64, device=device)

    class Update:
        is_capturable = True

        def run(self, loss_sum: Tensor, num_samples: int, gradients: Gradients) -> None:
            optimizer.update(gradients, divisor=scale, found_nonfinite=finite)
            total.add_(torch.stack([loss_sum, torch.full_like(loss_sum, num_samples)]))

    execution = _config("plain", job).execution
    cache = StepCache(step, Update(), lambda: Gradients(optimizer.watched), GraphPool(device), execution)
    made = {"steps": 0}
    scales: dict[str, float] = {}

    def run() -> None:
        precision.refresh_copies()
        optimizer.set_rates(1.0, scales, copies.in_force)
        cache.run(sampler.take(job.batch_size), scale, step=made["steps"])
        made["steps"] += 1

    return Made(step=run, loss=_LastLoss(total))


class _LastLoss:
    """The mean loss of the step just made, from sums over an epoch."""

    def __init__(self, sums: Tensor) -> None:
        """Takes sum over the samples and their number, fp64 [2]; asked after every step."""
        self._sums, self._last = sums, (0.0, 0.0)

    def __call__(self) -> float:
        loss_sum, number = self._sums.tolist()
        if number <= self._last[1]:  # a new epoch
            self._last = 0.0, 0.0
        loss = (loss_sum - self._last[0]) / (number - self._last[1])
        self._last = loss_sum, number
        return float(loss)
