"""Baselines for the control loop: FP32, and automatic mixed precision (AMP) as in PyTorch's tutorial or at its best."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import nn

from triaccel_ray.apply.evaluate import Evaluation, Metrics, evaluate
from triaccel_ray.apply.precision import DTYPES
from triaccel_ray.control.epochs import EpochLoop, EpochProgress, LossBuffers, SampleSchedule, Schedule
from triaccel_ray.data.sampler import Sampler
from triaccel_ray.data.sources import as_source
from triaccel_ray.distributed.ranks import Ranks
from triaccel_ray.measure.memory import memory_meter
from triaccel_ray.model.layers import Loss, find_layers, forward, to_channels_last
from triaccel_ray.records.plan import AmpPrecision, Plan, Precision

Baseline = Literal["fp32", "amp", "amp-best"]


class BaselineLoop(EpochLoop):
    """Trains a model at a fixed batch size, in FP32 or under `torch.autocast`, without adaptation.

    AMP on a GPU is FP16 with `torch.amp.GradScaler`, as in the tutorial, or with `amp="bf16"` BF16 without one. On a
    CPU it is BF16. `amp-best` is AMP as an expert writes it: BF16 where the GPU has it, the model compiled, its weights
    converted to channels_last.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        data: Any,
        *,
        method: Baseline,
        batch_size: int,
        amp: AmpPrecision = "fp16",
        schedule: Schedule | None = None,
        accumulate: int = 1,
        clip_norm: float | None = None,
        memory_budget: int | None = None,
        memory_headroom: int | None = None,
        seed: int = 0,
    ) -> None:
        """Takes the arguments of `ControlLoop`, with the method and batch size instead of thresholds.

        `amp` is AMP's precision on a GPU, and `accumulate` the number of micro-batches per batch. Gradients whose
        global norm exceeds `clip_norm` are scaled down to it.

        Raises:
            ValueError: the model has no layer, there are several ranks, or the budget leaves no memory for a batch.
        """
        if not Ranks.of_default_group().is_alone:
            raise ValueError("the process group has several ranks: a baseline trains in one process; use ControlLoop")
        layers = find_layers(model)
        self.device = next(model.parameters()).device
        self.model, self.optimizer, self._loss = model, optimizer, loss
        self._schedule = SampleSchedule(schedule, optimizer, batch_size=batch_size)
        self._sets_rates = callable(schedule)
        self._base_lrs = [group["lr"] for group in optimizer.param_groups]
        self.memory = memory_meter(self.device, memory_budget, memory_headroom)
        try:
            self.sampler = Sampler(as_source(data).to(self.device), seed=seed, device=self.device)
        except BaseException:
            self.memory.close()
            raise
        self.memory.require_room()
        on_gpu, is_best = self.device.type == "cuda", method == "amp-best"
        on_bf16 = torch.cuda.is_bf16_supported(including_emulation=False) if on_gpu and is_best else amp == "bf16"
        low = Precision.BF16 if on_bf16 or not on_gpu else Precision.FP16
        self._level = Precision.FP32 if method == "fp32" else low
        self._model: Any = model
        if is_best:
            to_channels_last(model)
            self._model = torch.compile(model, mode="reduce-overhead" if on_gpu else None)
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=self._level is Precision.FP16)
        self._clip_norm = clip_norm
        precision = {layer.name: self._level for layer in layers}
        self.plan = Plan(batch_size=batch_size, num_micro_batches=accumulate, precision=precision)
        """The plan, which never changes; for reports."""
        self._epoch = EpochProgress(self.device)
        self.num_steps = 0
        """Optimizer steps done."""

    @property
    def num_skipped(self) -> int | None:
        """Number of steps skipped for an overflow: None with a gradient scaler, which does not report it; else 0."""
        return None if self._scaler.is_enabled() else 0

    def step(self) -> None:
        """Performs one optimizer step, as the tutorial does."""
        epoch = self.sampler.position
        if self.sampler.at_epoch_start:
            self._epoch.begin()
        if self._sets_rates:
            for group, base in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
                group["lr"] = base * self._schedule.factor(epoch)
        self.model.train()
        indices = self.sampler.take(self.plan.batch_size)
        self._prepare_gradients()
        losses = []
        for part in indices.tensor_split(math.ceil(len(indices) / self.plan.micro_batch_size)):
            inputs, targets = self.sampler.source.batch(part, self.sampler.generator)
            is_low = self._level is not Precision.FP32
            with torch.autocast(self.device.type, dtype=DTYPES[self._level] if is_low else None, enabled=is_low):
                loss = self._loss(forward(self._model, inputs), targets)
            if len(part) < len(indices):
                loss = loss * (len(part) / len(indices))
            self.memory.check()
            self._scaler.scale(loss).backward()
            losses.append(loss.detach().double())
        if self._clip_norm is not None:
            self._scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)  # untrained parameters' gradients, too, which would add up in the norm
        self._schedule.advance(self.sampler)
        self.num_steps += 1
        self._epoch.num_steps += 1
        mean = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        added = torch.stack([mean, torch.ones_like(mean)]) * len(indices)
        if self._scaler.is_enabled():  # it skips steps whose loss is not finite, which must not spoil the epoch's mean
            added = torch.where(mean.isfinite(), added, 0.0)
        self._epoch.loss += added

    def _prepare_gradients(self) -> None:
        """Allocates gradients for micro-batches to add to: CUDA graphs would reuse the memory of their own."""
        if self._model is self.model or self.plan.num_micro_batches == 1 or self.device.type != "cuda":
            return
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    def evaluate(self, data: Any, metrics: Metrics | None = None, *, is_last: bool = False) -> Evaluation:
        """Returns mean loss and metrics on `data`, computed in FP32 and eval mode, each sample drawn once.

        Uses the training batch size, so that evaluation never takes more memory than training. `is_last` has no effect.
        """
        return evaluate(
            self.model,
            self._loss,
            data,
            metrics,
            device=self.device,
            batch_size=self.plan.batch_size,
            step=self.num_steps,
            release_memory=self.memory.release,
        )

    def close(self) -> None:
        """Stops prefetching, and ends the cap on memory. The model keeps the memory format that `amp-best` gives it."""
        self.sampler.close()
        self.memory.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns everything a resumed run needs to equal an uninterrupted one."""
        return {**super().state_dict(), "counters": [self.num_steps, self._epoch.num_steps]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state that `state_dict` returned."""
        super().load_state_dict(state)
        self.num_steps, self._epoch.num_steps = state["counters"]

    def _parts(self) -> dict[str, Any]:
        return {
            "sampler": self.sampler,
            "model": self.model,
            "loss": LossBuffers(self._loss),
            "optimizer": self.optimizer,
            "scaler": self._scaler,
            "schedule": self._schedule,
        }
