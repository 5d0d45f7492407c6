"""Times the steps of each batch size, to find the smallest one that is efficient (AccUDNN's hyperparameter tuner)."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from triaccel_ray.cuda.out_of_memory import first_line, is_out_of_memory
from triaccel_ray.decide.batch import batch_lr_scale, next_size_to_time
from triaccel_ray.decide.throughput import efficient_size
from triaccel_ray.loop import ControlLoop
from triaccel_ray.measure.score import BYTES_PER_GB
from triaccel_ray.measure.timing import synchronize
from triaccel_ray.records.events import End, Throughput, Tick
from triaccel_ray.records.plan import Fault, FaultKind
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.runs.worker import Worker
from triaccel_ray.trainables.task import Splits

_WARM_UP_STEPS = 6
"""Steps under a plan before it counts as settled: one or two run eagerly, the next is captured, the others replay."""
_MAX_INTERVALS = 12
"""Intervals of `_WARM_UP_STEPS` steps for one size, until its plan is kept and judged."""
_MIN_TIMED_STEPS, _MAX_STEPS, _MIN_TIMED_S = 10, 200, 0.5
"""A size makes `_MAX_STEPS` steps at most. It makes fewer if enough whole batches are timed in `_MIN_TIMED_S`."""
_NEVER = 10**9
"""Steps between ticks; this class calls `tick` itself."""


class BatchTuner(Worker):
    """Times one batch size after another, each with a new model under a fixed plan, in place of training epochs.

    It has no checkpoints: after an interruption, it begins again.
    """

    def __init__(self, spec: RunSpec, folder: Path, splits: Splits | None = None) -> None:
        """Prepares the timing; raises as `Worker`. Sizes above the number of training samples are left out."""
        super().__init__(spec, folder, splits)
        batch = self._control.batch
        maximum = max(min(spec.control.batch.maximum, len(self._splits.train)), batch.start)
        self._control = replace(self._control, batch=replace(batch, maximum=maximum))
        self._throughputs: dict[int, Throughput] = {}

    @property
    def finished(self) -> bool:
        """Whether the efficient batch size is found."""
        return self._next_size is None

    @property
    def _next_size(self) -> int | None:
        timed = {size: throughput.ms_per_sample for size, throughput in self._throughputs.items()}
        return next_size_to_time(self._control.batch, timed)

    def advance(self) -> None:
        """Times the next batch size and logs it; raises OutOfMemoryError if not even the smallest fits."""
        size = self._next_size
        assert size is not None  # not finished
        self._throughputs[size] = throughput = self._time(size)
        self.log.append(throughput)

    def checkpoint(self) -> None:
        """Does nothing: timing all sizes again takes less time than a checkpoint of each would be worth."""

    def finish(self) -> dict[str, float]:
        """Ends the log with the efficient batch size, its learning rate, speed and memory, and returns them."""
        timed = {size: ms for size, each in self._throughputs.items() if (ms := each.ms_per_sample) is not None}
        size = efficient_size(timed)
        results = {
            "batch_size": float(size),
            "lr": lr_at(self.spec, size),
            "samples_per_second": 1e3 / timed[size],
            "best_samples_per_second": 1e3 / min(timed.values()),
            "peak_gb": self._throughputs[size].peak_bytes / BYTES_PER_GB,
        }
        self.log.append(End(status="finished", results=results))
        return results

    def _on_tick(self, tick: Tick) -> None:
        """Does nothing: ticks only settle the plan of a size."""

    def _time(self, size: int) -> Throughput:
        """Returns the throughput at `size`; a size that does not fit has no time, unless it is the smallest."""
        self._drop_loop()
        batch = replace(self._control.batch, enabled=False, start=size, minimum=size, maximum=size)
        loop = self.loop = self._build_loop(replace(self._control, every_steps=_NEVER, batch=batch))
        assert isinstance(loop, ControlLoop)  # the method is no baseline
        try:
            faults = _settle(loop)
            over_budget = next((fault for fault in faults if fault.kind is FaultKind.BUDGET_EXCEEDED), None)
            if over_budget is not None:
                raise MemoryError(over_budget.detail)
            step_ms = _typical_step(loop)
        except Exception as error:
            if not is_out_of_memory(error) or not self._throughputs:
                raise
            detail = first_line(error)
            step_ms = None
            kind, phase = FaultKind.OUT_OF_MEMORY, "forward_backward"
            faults = (Fault(kind=kind, step=loop.num_steps, phase=phase, batch_size=size, detail=detail),)
        loop.memory.refresh_peaks()
        return Throughput(
            batch_size=size,
            step_ms=step_ms,
            peak_bytes=loop.memory.peak_bytes,
            num_micro_batches=loop.plan.num_micro_batches,
            storage=loop.plan.storage,
            faults=faults,
        )


def lr_at(spec: RunSpec, batch_size: int) -> float:
    """Returns the learning rate at `batch_size` by the configured rule; by AdaScale, that of the initial size."""
    return spec.recipe.lr * batch_lr_scale(spec.control.batch, batch_size, None)


def _settle(loop: ControlLoop) -> tuple[Fault, ...]:
    """Trains until a tick keeps the plan, and no change awaits judgment; returns the faults meanwhile."""
    faults: tuple[Fault, ...] = ()
    for _ in range(_MAX_INTERVALS):
        plan = loop.plan
        for _ in range(_WARM_UP_STEPS):
            loop.step()
        faults += loop.tick().observation.faults
        if loop.plan.steps_as(plan) and loop.state.throughput.change is None:
            break
    return faults


def _typical_step(loop: ControlLoop) -> float:
    """Returns the milliseconds of a step on a whole batch; raises ValueError if no batch of an epoch is whole."""
    loop.timer.restart()
    began = time.perf_counter()
    for _ in range(_MAX_STEPS // _MIN_TIMED_STEPS):
        for _ in range(_MIN_TIMED_STEPS):
            loop.step()
        synchronize(loop.device)  # else the host runs ahead, and its clock says little
        if loop.timer.num_timed >= _MIN_TIMED_STEPS and time.perf_counter() - began >= _MIN_TIMED_S:
            break
    step_ms = loop.timer.read()()
    if step_ms is None:
        raise ValueError(
            f"batch size = {loop.config.batch.start}: an epoch of {loop.sampler.num_samples} samples has no whole "
            "batch of this size; give a smaller --batch-max"
        )
    return step_ms
