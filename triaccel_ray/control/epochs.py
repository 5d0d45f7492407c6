"""Base class of the training loops, with its learning rate schedules and epoch statistics."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from triaccel_ray.config import check_field, require
from triaccel_ray.cuda.random_states import random_states, set_random_states
from triaccel_ray.data.sampler import Sampler
from triaccel_ray.measure.energy import energy_counter
from triaccel_ray.measure.memory import MemoryMeter
from triaccel_ray.measure.timing import synchronize
from triaccel_ray.model.layers import Loss

Schedule = Callable[[float], float] | LRScheduler
"""Function of the epochs trained (fractional) that returns a factor on learning rates; or the optimizer's scheduler."""


class SampleSchedule:
    """Schedules learning rates by the number of samples seen, whatever the batch sizes.

    A scheduler is stepped as if all batches had `batch_size` samples: ceil(samples / batch_size) times per epoch, the
    length of a `DataLoader`.
    """

    def __init__(self, schedule: Schedule | None, optimizer: Optimizer, *, batch_size: int) -> None:
        """Starts from the scheduler's current state; without a schedule, learning rates stay as the optimizer has them.

        Raises:
            TypeError: `schedule` is neither a function nor a scheduler.
            ValueError: the scheduler belongs to another optimizer, or needs a metric.
        """
        if isinstance(schedule, ReduceLROnPlateau):
            raise ValueError(
                "schedule = ReduceLROnPlateau: must need no metric; leave it out, and call scheduler.step(stats.loss) "
                "after each train_epoch()"
            )
        self._scheduler = schedule if isinstance(schedule, LRScheduler) else None
        if self._scheduler is not None and self._scheduler.optimizer is not optimizer:
            raise ValueError(f"schedule = {type(schedule).__name__} of another optimizer: build it for the loop's own")
        if schedule is not None and self._scheduler is None and not callable(schedule):
            raise TypeError(
                f"schedule = {schedule!r:.80}: must be a function of the epochs trained, or a scheduler of "
                "torch.optim.lr_scheduler"
            )
        self._function = schedule if callable(schedule) else None
        self._batch_size, self._num_steps = batch_size, 0

    def require_enough_steps(self, num_samples: int, epochs: float | None) -> None:
        """Checks that a scheduler with an end, such as `OneCycleLR`, lasts as long as the run, if its length is known.

        Raises:
            ValueError: it does not.
        """
        if self._scheduler is None or epochs is None:
            return
        per_epoch = -(-num_samples // self._batch_size)
        needed = self._scheduler.last_epoch + int(per_epoch * epochs)
        rule = f"must be at least {needed}: {epochs:g} epochs of ceil({num_samples} samples / {self._batch_size}) steps"
        most = getattr(self._scheduler, "total_steps", needed)
        require(most >= needed, f"total_steps of {type(self._scheduler).__name__}", most, rule)

    def factor(self, epoch: float) -> float:
        """Returns the factor on the learning rates after `epoch` epochs (fractional); 1 with a scheduler.

        Raises:
            ValueError: the user's function did not return a finite number >= 0.
        """
        if self._function is None:
            return 1.0
        factor = self._function(epoch)
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # else it is refused below
            factor = float(factor)  # also of a tensor or array with one element
        check_field(f"schedule({epoch:.4g})", factor, float, "[0, inf)")
        return factor

    def advance(self, sampler: Sampler) -> None:
        """Steps the scheduler up to the samples taken so far; call it after the optimizer's step on the last of them.

        Raises:
            ValueError: the scheduler was built for fewer steps.
        """
        if self._scheduler is None:
            return
        due = sampler.num_batches(self._batch_size)
        while self._num_steps < due:
            try:
                self._step(self._scheduler)
            except ValueError as error:
                error.add_note(f"an epoch has ceil(number of samples / {self._batch_size}) steps of the schedule")
                raise
            self._num_steps += 1

    def _step(self, scheduler: LRScheduler) -> None:
        """Steps the scheduler without its warning that the optimizer has not stepped: kernels may do so unseen."""
        if self._num_steps > 0:  # catch_warnings makes Python forget which warnings it has shown
            scheduler.step()
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*`?lr_scheduler.step\\(\\)`?", category=UserWarning)
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of scheduler steps and the scheduler's state."""
        scheduler = None if self._scheduler is None else self._scheduler.state_dict()
        return {"num_steps": self._num_steps, "scheduler": scheduler}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state that `state_dict` returned.

        Raises:
            ValueError: one of the two runs has a scheduler, the other has none.
        """
        if (state["scheduler"] is None) != (self._scheduler is None):
            had = "none" if state["scheduler"] is None else "a scheduler"
            has = "none" if self._scheduler is None else "a scheduler"
            raise ValueError(f"schedule: the checkpoint's run has {had}, this one {has}: give the loop the same")
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        self._num_steps = state["num_steps"]


@dataclass(frozen=True, kw_only=True)
class EpochStats:
    """Statistics of one pass over the training samples."""

    epoch: int
    """Epochs done, from 1."""
    loss: float
    """Mean over the samples, each at the weights of its step."""
    num_steps: int
    num_samples: int
    seconds: float
    """Wall-clock time, with the device synchronized at both ends."""
    joules: float | None
    """Energy of the GPU in that time; None if it has no counter, and on a CPU."""


class EpochProgress:
    """Running statistics of the current epoch."""

    def __init__(self, device: torch.device, loss: Tensor | None = None) -> None:
        """Starts at zero; `loss` is the tensor that steps add to, created here if not given."""
        self.loss = torch.zeros(2, dtype=torch.float64, device=device) if loss is None else loss
        """fp64 [2] on the device: sum of the samples' losses, and the number of samples."""
        self.num_steps = 0
        self._device, self._read_joules = device, energy_counter(device)
        self._carried = 0.0, 0.0
        """Seconds and joules until the clock was last started."""
        self._started: tuple[float, float] | None = None
        """The clock and the energy counter when it was; None while it is stopped."""

    def start(self) -> None:
        """Synchronizes the device and starts the clock, unless it is running."""
        if self._started is None:
            self._started = self._now()

    def spent(self) -> tuple[float, float]:
        """Returns seconds and joules so far, including those before a checkpoint; waits for the device.

        Joules are NaN if they are not measured.
        """
        if self._started is None:
            return self._carried
        (seconds, joules), now, started = self._carried, self._now(), self._started
        return seconds + (now[0] - started[0]), joules + (now[1] - started[1])

    def begin(self) -> None:
        """Resets loss and number of steps for a new epoch; leaves the clock alone."""
        self.loss.zero_()
        self.num_steps = 0

    def finish(self, sampler: Sampler) -> EpochStats:
        """Stops the clock and returns the statistics; waits for the device. Loss is NaN if every step was skipped."""
        seconds, joules = self.spent()
        self._carried, self._started = (0.0, 0.0), None
        loss_sum, num_samples = self.loss.tolist()
        return EpochStats(
            epoch=sampler.epoch,
            loss=loss_sum / num_samples if num_samples else math.nan,
            num_steps=self.num_steps,
            num_samples=sampler.num_samples,
            seconds=seconds,
            joules=None if math.isnan(joules) else joules,
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns loss, seconds and joules so far; the loop saves `num_steps` with its own counters."""
        seconds, joules = self.spent()
        return {"epoch_loss": self.loss.clone(), "epoch_seconds": seconds, "epoch_joules": joules}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state that `state_dict` returned, with the clock stopped."""
        self.loss.copy_(state["epoch_loss"])
        self._carried, self._started = (state["epoch_seconds"], state["epoch_joules"]), None

    def _now(self) -> tuple[float, float]:
        synchronize(self._device)
        return time.perf_counter(), self._read_joules()


class LossBuffers:
    """The buffers of a loss that is a module, such as running statistics; its parameters are not trained."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the buffers by name; none of a loss that is a function."""
        return dict(self._loss.named_buffers()) if isinstance(self._loss, nn.Module) else {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores what `state_dict` returned."""
        for name, buffer in self.state_dict().items():
            buffer.copy_(state[name])


class EpochLoop(ABC):
    """Base class of loops that train a model step by step, one epoch at a time."""

    sampler: Sampler
    memory: MemoryMeter
    _epoch: EpochProgress

    @abstractmethod
    def step(self) -> None:
        """Performs one optimizer step."""

    @abstractmethod
    def close(self) -> None:
        """Restores the model's own forward functions; no steps follow."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _parts(self) -> dict[str, Any]:
        """Returns the components with a `state_dict` by their names in checkpoints, in the order of restoring."""

    def train_epoch(self) -> EpochStats:
        """Trains for the rest of the current epoch and returns the epoch's statistics."""
        epoch = self.sampler.epoch
        self._epoch.start()
        while self.sampler.epoch == epoch:
            self.step()
        return self._epoch.finish(self.sampler)

    @property
    def epoch_loss(self) -> Tensor:
        """Sum of the losses of the current epoch's samples so far, and their number: fp64 [2] that steps write to."""
        return self._epoch.loss

    def state_dict(self) -> dict[str, Any]:
        """Returns everything a resumed run needs to equal an uninterrupted one."""
        return {
            **{name: part.state_dict() for name, part in self._parts().items()},
            **self._epoch.state_dict(),
            "memory_peaks": [self.memory.peak_bytes, self.memory.allocated_peak_bytes],
            "random": random_states(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state that `state_dict` returned.

        Raises:
            ValueError, RuntimeError: the state belongs to another model or data set.
        """
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        self._epoch.load_state_dict(state)
        self.memory.raise_peaks(*state["memory_peaks"])
        if state["sampler"]["rank"] == self.sampler.rank:  # else all ranks would drop out the same units
            set_random_states(state["random"])
