"""Builds the model, optimizer and training loop of a run from its spec."""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from triaccel_ray.apply.evaluate import measured
from triaccel_ray.apply.precision import precisions_without_benefit
from triaccel_ray.baseline import Baseline, BaselineLoop
from triaccel_ray.config import ControlConfig, require
from triaccel_ray.cuda.stream_pool import PooledStream
from triaccel_ray.data.sources import DataSource, delivered
from triaccel_ray.loop import ControlLoop
from triaccel_ray.model.dry_run import attributing_errors, described, forbidding_exit, require_working
from triaccel_ray.model.layers import Loss, find_layers, forward, require_trainable
from triaccel_ray.records.events import Tick
from triaccel_ray.records.plan import Precision
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.trainables.task import Purpose, Splits, Task


def build_loop(
    spec: RunSpec,
    task: Task,
    splits: Splits,
    control: ControlConfig,
    budget_bytes: int | None,
    on_tick: Callable[[Tick], None],
) -> ControlLoop | BaselineLoop:
    """Returns the loop that trains `task` as `spec` and `control` say; the run's seed initializes its model.

    Two loops of one spec are equal, whatever random numbers were drawn before. All methods refuse the same tasks. Two
    training samples are tried first, and two validation samples if the run has any. Test samples are read only at
    the end of a run.

    Raises:
        UserCodeError: the task's own code raised.
        TypeError, ValueError: something that it returned cannot be trained; the message says why.
    """
    device, num_samples = spec.torch_device, len(splits.train)
    is_on_gpu = device.type == "cuda"
    rule = f"must be at most the number of training samples, {num_samples}; give --batch-size {num_samples} or less"
    require(control.batch.start <= num_samples, "batch size", control.batch.start, rule)
    if not is_on_gpu:
        _warm_up_cpu(spec, control, task, delivered(splits.train, device, control.execution.data_on))
    seed_everything(spec.seed)
    model = _new_model(task, device)
    layers = find_layers(model)
    with attributing_errors(f"{type(task).__name__}.optimizer()"):
        optimizer = task.optimizer(model, spec.recipe)
    require_trainable(model, optimizer, layers)
    loss = partial(task.loss, recipe=spec.recipe)
    train = delivered(splits.train, device, control.execution.data_on)
    uses_pooled_stream = is_on_gpu and not spec.is_baseline
    with PooledStream(device).current() if uses_pooled_stream else contextlib.nullcontext():
        require_working(model, loss, train, partial(measured, task.metrics))
        if spec.validates:
            require_working(model, loss, splits.held_out, partial(measured, task.metrics))
        if is_on_gpu:
            _warm_up_gpu(model, loss, train, device)
    if is_on_gpu:
        torch.cuda.empty_cache()  # else long-lived tensors of the loop would fragment the cached blocks
    seed_everything(spec.seed)
    return _new_loop(spec, control, model, optimizer, loss, train, budget_bytes=budget_bytes, on_tick=on_tick)


def _new_loop(
    spec: RunSpec,
    control: ControlConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    samples: DataSource,
    *,
    budget_bytes: int | None = None,
    on_tick: Callable[[Tick], None] | None = None,
) -> ControlLoop | BaselineLoop:
    """Returns the loop of the run's method."""
    if not spec.is_baseline:
        return ControlLoop(
            model,
            optimizer,
            loss,
            samples,
            config=control,
            schedule=spec.recipe.lr_factor,
            memory_budget=budget_bytes,
            memory_headroom=spec.memory_headroom_bytes,
            epochs=spec.recipe.epochs,
            seed=spec.seed,
            on_tick=on_tick,
        )
    return BaselineLoop(
        model,
        optimizer,
        loss,
        samples,
        method=cast(Baseline, spec.method),
        batch_size=control.batch.start,
        amp=spec.recipe.amp,
        schedule=spec.recipe.lr_factor,
        accumulate=control.batch.accumulate,
        clip_norm=control.clip_norm,
        memory_budget=budget_bytes,
        memory_headroom=spec.memory_headroom_bytes,
        seed=spec.seed,
    )


def fitted_control(spec: RunSpec, num_samples: int) -> ControlConfig:
    """Returns the run's control configuration, fitted to a short run or a small data set.

    Intervals shrink so that a run at the starting batch size has at least twenty ticks and five curvature measurements,
    or one each step. The largest batch size leaves an epoch at least four steps, unless the starting size is larger.
    """
    control = spec.method_control
    max_batch_size = min(control.batch.maximum, max(num_samples // 4, control.batch.start))
    num_steps = spec.recipe.epochs * math.ceil(num_samples / control.batch.start)
    return replace(
        control,
        batch=replace(control.batch, maximum=max_batch_size),
        every_steps=min(control.every_steps, max(num_steps // 20, 1)),
        curvature=replace(control.curvature, every_steps=min(control.curvature.every_steps, max(num_steps // 5, 1))),
    )


def samples_of(spec: RunSpec, task: Task, splits: Splits | None) -> tuple[Splits, DataSource]:
    """Returns the run's samples, and those that judge it at its end: of a final run the test set.

    Held-out samples are moved once, not at every evaluation. `splits` are those for the run's purpose, if loaded.
    A final run with a target reads the task's samples for both purposes; the test set still judges it once.
    """

    def moved(source: DataSource) -> DataSource:
        return delivered(source, spec.torch_device, spec.method_control.execution.data_on)

    splits = splits_of(task, spec.purpose) if splits is None else splits
    at_end = moved(splits.held_out)
    if spec.purpose is Purpose.SEARCH or not spec.validates:
        return replace(splits, held_out=at_end), at_end
    splits = splits_of(task, Purpose.SEARCH)
    return replace(splits, held_out=moved(splits.held_out)), at_end


def splits_of(task: Task, purpose: Purpose) -> Splits:
    """Returns the task's samples.

    Raises:
        UserCodeError: `data` raised an error other than FileNotFoundError.
        TypeError: `data` did not return `Splits`.
    """
    what = f"{type(task).__name__}.data()"
    with attributing_errors(what):
        splits = task.data(purpose)
    if not isinstance(splits, Splits):
        raise TypeError(f"{what} returned {described(splits)}: must return Splits(train=..., held_out=...)")
    return splits


def _new_model(task: Task, device: torch.device) -> nn.Module:
    what = f"{type(task).__name__}.model()"
    with attributing_errors(what):
        model = task.model()
    if not isinstance(model, nn.Module):
        raise TypeError(f"{what} returned {described(model)}: must return a torch.nn.Module")
    with attributing_errors(f"{what}.to({str(device)!r})"):
        return model.to(device)


def seed_everything(seed: int) -> None:
    """Seeds the generators of Python, NumPy and PyTorch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class _FirstSamples(DataSource):
    """The first samples of a source, without augmentation."""

    def __init__(self, source: DataSource, num_samples: int) -> None:
        self._source, self._num_samples = source, min(num_samples, len(source))

    def __len__(self) -> int:
        return self._num_samples

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> tuple[Any, Tensor]:
        return self._source.batch(indices, None)

    def to(self, device: torch.device) -> DataSource:
        return self


def _warm_up_cpu(spec: RunSpec, control: ControlConfig, task: Task, train: DataSource) -> None:
    """Warms up a CPU process: trains and evaluates a throwaway model for two steps in each precision, with curvature.

    The resident set grows by tens of MiB when code of the libraries is first used. Before the run's first batch this
    counts as idle memory, afterwards as memory of the batches. Without the warm-up, a run's decisions would depend on
    what its process has done before.
    """
    precision = control.precision
    batch_size = control.batch.start if spec.is_baseline else control.batch.minimum
    levels = [precision.initial]
    if precision.enabled:
        slow = precisions_without_benefit("cpu", is_compiled=control.execution.compile == "on")
        left_out = set() if precision.allow_slow_precisions else {*slow, Precision.FP8}  # FP8 is slow on every CPU
        left_out |= set() if precision.fp8 else {Precision.FP8}
        levels = [level for level in Precision if level not in left_out]
    source = _FirstSamples(train, 2 * batch_size)
    unlimited = replace(spec, memory_headroom_bytes=None)
    # An error here will occur in the run, too, which then has a log to record it.
    with contextlib.suppress(Exception), forbidding_exit():
        for level in levels:
            two_steps = replace(
                control,
                every_steps=1,
                precision=replace(precision, enabled=False, initial=level, initial_layers={}),
                curvature=replace(control.curvature, every_steps=2),
                batch=replace(control.batch, enabled=False, start=batch_size),
            )
            model = task.model()
            optimizer = task.optimizer(model, spec.recipe)
            loop = _new_loop(unlimited, two_steps, model, optimizer, partial(task.loss, recipe=spec.recipe), source)
            loop.step()
            loop.step()
            loop.evaluate(source, task.metrics, is_last=True)
            loop.close()
            memory = loop.memory
            del loop, model, optimizer
            memory.release()  # never two models at once


def _warm_up_gpu(model: nn.Module, loss: Loss, train: DataSource, device: torch.device) -> None:
    """Triggers lazy initialization on a GPU by passing two samples through a copy of the model.

    Libraries, handles and workspaces take hundreds of MiB at the first operation, which would otherwise count as memory
    of the first batch. Workspaces belong to the current stream and the computing thread. They are allocated first, so
    that memory that stays does not lie behind memory that is freed.
    """
    square = torch.ones(2, 2, device=device, requires_grad=True)
    (square @ square).sum().backward()
    duplicate = copy.deepcopy(model).eval()
    inputs, targets = train.batch(torch.arange(min(2, len(train))), None)
    loss(forward(duplicate, inputs), targets).backward()
