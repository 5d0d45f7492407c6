"""Reads everything that the rules depend on: one copy from the device, one frozen `Observation`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from triaccel_ray.measure.curvature.spectrum import CurvatureEstimate, largest_eigenvalues
from triaccel_ray.measure.memory import MemoryMeter
from triaccel_ray.measure.moments import GradientMoments
from triaccel_ray.measure.profile import ProfileMeter
from triaccel_ray.measure.timing import StepTimer
from triaccel_ray.records.codec import decode, encode
from triaccel_ray.records.plan import Applied, Fault, Plan, Precision
from triaccel_ray.records.signals import LayerSignal, NoiseSignal, Observation


def copied_to_host(values: Tensor) -> Callable[[], Tensor]:
    """Starts a copy of `values` to the host; returns a function that waits for it. Meanwhile more work can launch."""
    if values.device.type == "cpu":
        return lambda: values
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(values.device))  # not necessarily the current device

    def wait() -> Tensor:
        copied.synchronize()
        return copy

    return wait


class Sensors:
    """Collects device-side statistics between ticks and reads them at a tick."""

    def __init__(
        self,
        layers: Sequence[tuple[str, tuple[Precision, ...]]],
        moments: GradientMoments,
        memory: MemoryMeter,
        timer: StepTimer,
        losses: Tensor,
        profile: ProfileMeter | None = None,
    ) -> None:
        """Takes the layers' names with the precisions that each supports, and the instruments.

        Every step adds to `losses` (fp64 [2]: sum over the samples, number of samples); `read` resets it. Without
        `profile`, the model's regions have no costs.
        """
        self._layers, self.moments, self.memory, self.timer = layers, moments, memory, timer
        self.losses, self._profile = losses, profile
        self._curvature: CurvatureEstimate | None = None
        self._faults: list[Fault] = []

    def record_faults(self, faults: Sequence[Fault]) -> None:
        """Adds faults to the next reading."""
        self._faults.extend(faults)

    def take_faults(self) -> tuple[Fault, ...]:
        """Returns the faults since the last reading, and removes them from the next one."""
        faults = tuple(self._faults)
        self._faults.clear()
        return faults

    def begin_interval(self, before: Plan, applied: Applied) -> None:
        """Starts to measure under a plan that has just replaced `before`."""
        if not applied.plan.steps_as(before):
            self.timer.restart()
        if applied.plan.needs_less_than(before):
            # Else the allocator's pool would look as full as before, and the batch would shrink at every tick.
            self.memory.begin_window()
        self.timer.interrupt()
        self.record_faults(applied.faults)

    def record_curvature(self, estimate: CurvatureEstimate) -> None:
        """Keeps a measurement, still on the device, for the next tick."""
        self._curvature = estimate

    def read(self, plan: Plan, loss_scale: Tensor, *, step: int, tick: int, epoch: float) -> Callable[[], Observation]:
        """Returns a function that waits for the device and gives the observation since the last reading.

        Makes one copy from the device. `loss_scale`, fp64 [3]: the scale, all steps skipped, steps skipped in a row.
        """
        packed = [self.moments.read(), self.losses, loss_scale]
        counts: tuple[int, ...] = ()
        if self._curvature is not None:
            packed.append(_packed(self._curvature))
            counts = self._curvature.counts
        step_ms = self.timer.read()
        known = Observation(
            step=step,
            tick=tick,
            epoch=epoch,
            plan=plan,
            layers=(),
            memory=self.memory.read(),
            profile=None if self._profile is None else self._profile.read(plan.batch_size),
            faults=self.take_faults(),
        )
        values = copied_to_host(torch.cat(packed))
        self.losses.zero_()
        self._curvature = None

        def observation() -> Observation:
            arrived = values()  # so the steps timed by `step_ms` have ended
            return self._completed(replace(known, step_ms=step_ms()), arrived, counts)

        return observation

    def _completed(self, known: Observation, values: Tensor, counts: Sequence[int]) -> Observation:
        """Returns `known` with the device's values: variances, losses, loss scale and, with `counts`, spectra."""
        num_layers = len(self._layers)
        variances, figures, curvature = values.split([num_layers, 5, len(values) - num_layers - 5])
        loss_sum, num_samples, scale, skipped, in_row = figures.tolist()
        spectra: list[tuple[float, ...]] = [()] * num_layers
        noise = None
        if counts:
            # On the host: about a millisecond for 21 matrices of order 32.
            rows = largest_eigenvalues(_square(curvature[:-2], num_layers), counts).tolist()
            spectra = [tuple(filter(math.isfinite, row)) for row in rows]
            if curvature[-2:].isfinite().all():
                mean_square_norm, trace_covariance = curvature[-2:].tolist()
                noise = NoiseSignal(mean_square_norm=mean_square_norm, trace_covariance=trace_covariance)
        layers = tuple(
            LayerSignal(
                name=name,
                variance=None if math.isnan(variance) else variance,
                eigenvalues=spectrum or None,
                supported=supported,
            )
            for (name, supported), variance, spectrum in zip(self._layers, variances.tolist(), spectra, strict=True)
        )
        return replace(
            known,
            layers=layers,
            loss=loss_sum / num_samples if num_samples else None,
            loss_scale=scale,
            num_skipped=int(skipped),
            num_skipped_in_row=int(in_row),
            noise=noise,
        )

    def state_dict(self) -> dict[str, object]:
        """Returns the statistics since the last reading, with curvature and faults as plain values."""
        return {
            "moments": self.moments.state_dict(),
            "losses": self.losses.clone(),
            "curvature": None if self._curvature is None else _packed(self._curvature),
            "curvature_shape": None if self._curvature is None else {"counts": list(self._curvature.counts)},
            "faults": encode(tuple(self._faults)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self.moments.load_state_dict(state["moments"])
        self.losses.copy_(state["losses"])
        self._faults = [decode(Fault, fault) for fault in state["faults"]]
        self._curvature = None
        if state["curvature"] is not None:
            values = state["curvature"].to(self.losses.device)
            matrices, counts = _square(values[:-2], len(self._layers)), tuple(state["curvature_shape"]["counts"])
            self._curvature = CurvatureEstimate(matrices=matrices, counts=counts, noise=values[-2:])


def _packed(estimate: CurvatureEstimate) -> Tensor:
    """Returns matrices and noise as one fp64 vector; NaN stands for a missing noise estimate."""
    matrices, noise = estimate.matrices, estimate.noise
    return torch.cat([matrices.flatten(), matrices.new_full((2,), math.nan) if noise is None else noise])


def _square(values: Tensor, num_layers: int) -> Tensor:
    order = math.isqrt(values.numel() // num_layers)
    return values.view(num_layers, order, order)
