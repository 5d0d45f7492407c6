"""Schedules curvature measurements during training, draws their samples, and handles their failures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase  # no public class covers batch and instance normalization

from triaccel_ray.config import ControlConfig
from triaccel_ray.control.training import Training
from triaccel_ray.cuda.out_of_memory import first_line, is_out_of_memory
from triaccel_ray.cuda.random_states import preserved_random_states
from triaccel_ray.decide.curvature import DRY_RUN_S, has_share, is_logged_only, measuring_share
from triaccel_ray.measure.curvature.meter import CurvatureMeter
from triaccel_ray.measure.sensors import Sensors
from triaccel_ray.measure.timing import TimeShare
from triaccel_ray.model.layers import restoring_buffers, trained_modules
from triaccel_ray.records.plan import Fault, FaultKind


class ScheduledCurvature:
    """Measures curvature between steps, on training samples without augmentation, for the next tick to read.

    Training does not depend on curvature: if it cannot be measured, training continues and a fault has the reason.
    """

    def __init__(self, training: Training, sensors: Sensors, config: ControlConfig, *, seed: int) -> None:
        """Measures nothing yet; `seed` determines the samples."""
        self._training, self._sensors, self._config = training, sensors, config
        self._sampler, self._device = training.sampler, training.device
        self.meter = CurvatureMeter(
            training.model,
            training.loss,
            training.layers,
            config.curvature,
            device=training.device,
            pool=training.pool,
            capture=training.steps.enabled,
        )
        self._generator = torch.Generator().manual_seed(seed)
        modules = trained_modules(training.model, training.loss).modules()
        # Norms write theirs in training mode alone, and networks have many.
        self._with_buffers = [each for each in modules if each._buffers and not isinstance(each, _NormBase)]
        self._reported: set[str] = set()
        is_shared = has_share(config, self._device.type)
        self._share = TimeShare(self._device, measuring_share(config) if is_shared else None)
        # A budget has room for the kernels that a dry run loads before the first step only.
        self._defers_dry_run = is_shared and is_logged_only(config) and not training.memory.has_budget
        self._was_dry_run = self._was_tried = False

    def is_due(self, step: int) -> bool:
        """Returns whether a measurement is due after this step."""
        return self._config.curvature.enabled and step % self._config.curvature.every_steps == 0

    def start(self) -> None:
        """Tries the measurement before the first step, or plans to do so later.

        On a GPU, the dry run of curvature that is only logged counts as overhead, so most short runs skip it.
        """
        if self._defers_dry_run:
            self._share.expect(DRY_RUN_S)
        elif self._config.curvature.enabled:
            self._dry_run(step=0, counts=False)

    def _dry_run(self, step: int, *, counts: bool) -> None:
        """Measures two samples, and switches curvature off if that fails; its time counts if `counts`."""
        self._was_dry_run = True
        self._training.memory.refresh_peaks()  # the dry run resets the allocator's peaks
        try:
            with self._share.timed(counts=counts), self._undisturbed():
                self.meter.dry_run(*self._samples_at(self._sampler.source.probe(2)))
        except Exception as error:
            if not is_out_of_memory(error):
                raise  # an error of the data set
        self._training.memory.trim()
        self._report(step)

    def measure(self, step: int, *, is_awaited: bool = False) -> None:
        """Measures the largest eigenvalues of every layer and the noise scale, or records why it does not.

        With `is_awaited`, the batch waits for the noise scale. Measurements may then take all of `max_overhead`. A dry
        run starts at once, because it shows what a measurement costs.
        """
        if self._share.share is not None:
            self._share.share = measuring_share(self._config, is_awaited=is_awaited)
        self._sensors.timer.interrupt()
        self._measure(step, is_awaited=is_awaited)
        self._training.steps.agree()  # a rank may have released its graphs to make room

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Returns a context to measure in, after which buffers and random states are those of before."""
        with self._training.suspended(), preserved_random_states(), contextlib.ExitStack() as stack:
            stack.callback(restoring_buffers(self._with_buffers))
            yield

    def _measure(self, step: int, *, is_awaited: bool) -> None:
        if not self._was_tried and (is_awaited or not is_logged_only(self._config)):
            self._share.expect(0.0)  # a dry run, which loads kernels, says nothing about a measurement
        cannot = bool(self.meter.off_because) or self._waits(step)
        if self._training.ranks.any(cannot):  # all measure at once, or each would wait for the others in turn
            return
        if self._training.pool.holds_graphs and self.meter.needs_room:
            self._training.pool.release()  # or the process would hold memory for a step and a measurement at once
        if not self._was_dry_run:
            self._dry_run(step, counts=not is_awaited)
            return
        self._was_tried = True
        indices = self._drawn()
        batch = None
        try:
            with self._undisturbed():
                with self._share.timed():
                    batch = self._samples_at(indices)
                    seconds = self.meter.prepare(*batch, budget_bytes=self._training.memory.bytes_of_step() or None)
                if seconds is not None:
                    self._share.expect(seconds)
                    if self._waits(step):
                        self._training.memory.trim()
                        self._report(step)
                        return
                with self._share.timed():
                    self._sensors.record_curvature(self.meter.measure(*batch, self._device_generator()))
        except Exception as error:
            if is_out_of_memory(error):
                kind, size, detail = FaultKind.OUT_OF_MEMORY, len(indices), first_line(error)
                fault = Fault(kind=kind, step=step, phase="curvature", micro_batch_size=size, detail=detail)
                self._sensors.record_faults([fault])
            elif batch is None:
                raise  # an error of the data set
            else:
                self.meter.switch_off(error)
                self._report(step)
        else:
            self._report(step)
            return
        # Outside the handler: the traceback no longer holds the attempt's tensors.
        del batch
        self._training.make_room()

    def _waits(self, step: int) -> bool:
        """Returns whether another measurement would exceed its share of the training time; records that once."""
        seconds = self._share.seconds_to_wait
        if seconds:
            text = f"measuring would exceed its share of the time for another {seconds:.3g} s"
            self._record(FaultKind.CURVATURE_WAITS, text, step, key=FaultKind.CURVATURE_WAITS)
        return seconds > 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that lets a resumed run measure the same."""
        return {"meter": self.meter.state_dict(), "samples": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned; a method that fails here stays off, and its fault is recorded again."""
        self.meter.load_state_dict(state["meter"])
        if self.meter.off_because and not state["meter"]["off_because"]:
            self._reported.clear()  # the state of the sensors has replaced the faults recorded so far
            self._report(step=0)
        self._generator.set_state(state["samples"])

    def _drawn(self) -> torch.Tensor:
        """Returns the indices of this rank's random samples; ranks share one draw, unless the data set is too small."""
        ranks, num_samples = self._training.ranks, self._config.curvature.num_samples
        drawn = self._sampler.source.probe(num_samples * ranks.world_size, self._generator)
        own = drawn[ranks.rank :: ranks.world_size]
        return own if len(drawn) >= 2 * ranks.world_size else drawn[:num_samples]

    def _samples_at(self, indices: torch.Tensor) -> tuple[Any, Any]:
        return self._sampler.source.batch(self._sampler.placed(indices), None)

    def _report(self, step: int) -> None:
        """Records that curvature is off, or slower than it could be, with the reason; each of these only once."""
        if self.meter.off_because:
            self._record(FaultKind.CURVATURE_OFF, self.meter.off_because, step)
            return
        if fallbacks := self.meter.fallbacks:  # all for one reason
            reason = next(iter(fallbacks.values()))
            self._record(FaultKind.CURVATURE_FALLBACK, f"layers {', '.join(fallbacks)}: {reason}", step)
        if self.meter.stays_eager:
            self._record(FaultKind.CAPTURE_FAILED, self.meter.not_captured_because, step)

    def _record(self, kind: FaultKind, detail: str, step: int, *, key: str = "") -> None:
        """Records a fault, unless one of the same `key`, by default its detail, has been recorded."""
        key = key or detail
        if key not in self._reported:
            self._reported.add(key)
            self._sensors.record_faults([Fault(kind=kind, step=step, phase="curvature", detail=detail)])

    def _device_generator(self) -> torch.Generator:
        """Returns a generator on the device, seeded from the saved one so that a resumed run draws the same."""
        seed = torch.randint(2**31, (), generator=self._generator).item()
        return torch.Generator(device=self._device).manual_seed(int(seed))
