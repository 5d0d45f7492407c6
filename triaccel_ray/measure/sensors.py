"""One reading of everything the policy looks at: one copy from the device, one frozen value."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from triaccel_ray.measure.curvature.spectrum import CurvatureEstimate, SpectrumShape, largest_eigenvalues
from triaccel_ray.measure.memory import MemoryMeter
from triaccel_ray.measure.moments import GradientMoments
from triaccel_ray.measure.timing import StepTimer
from triaccel_ray.records.codec import decode, encode
from triaccel_ray.records.plan import Applied, Fault, Plan, Precision
from triaccel_ray.records.signals import LayerSignal, NoiseSignal, Observation


class Reading:
    """What was seen up to a step, on its way from the device: the host may launch more work before it looks."""

    def __init__(self, values: Tensor, complete: Callable[[Tensor], Observation]) -> None:
        """Starts the copy of `values` (fp64 vector) to the host; `complete` makes the observation of them."""
        self._complete = complete
        self._copied: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(values.device))  # which need not be the current device
        else:
            self._values = values

    def observation(self) -> Observation:
        """Returns what was seen; waits for the device to have come that far."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._complete(self._values)


class Sensors:
    """Collects device-side statistics between ticks and reads them at a tick."""

    def __init__(
        self,
        layers: Sequence[tuple[str, tuple[Precision, ...]]],
        moments: GradientMoments,
        memory: MemoryMeter,
        timer: StepTimer,
        losses: Tensor,
    ) -> None:
        """Takes the layers' names with what they support, and the instruments.

        `losses` (fp64 [2]: sum over the samples, and their number) is added to by every step, and reset here.
        """
        self._layers, self.moments, self.memory, self.timer = layers, moments, memory, timer
        self.losses = losses
        self._curvature: CurvatureEstimate | None = None
        self._faults: list[Fault] = []

    def record_faults(self, faults: Sequence[Fault]) -> None:
        """Takes in what was survived."""
        self._faults.extend(faults)

    def take_faults(self) -> tuple[Fault, ...]:
        """Returns what was survived since the last reading, and forgets it: the next reading will not have it."""
        faults = tuple(self._faults)
        self._faults.clear()
        return faults

    def begin_interval(self, before: Plan, applied: Applied) -> None:
        """Begins to measure under a plan that has just been applied in place of `before`."""
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

    def read(self, plan: Plan, loss_scale: Tensor, *, step: int, tick: int, epoch: float) -> Reading:
        """Begins to read what was seen since the last reading, and begins anew. One copy from the device.

        `loss_scale` is the scale, the steps skipped so far, and those of them since the last one made: fp64 [3].
        """
        packed = [self.moments.read(), self.losses, loss_scale]
        if self._curvature is not None:
            packed.append(_pack_curvature(self._curvature))
        shape = None if self._curvature is None else self._curvature.shape
        known = Observation(
            step=step,
            tick=tick,
            epoch=epoch,
            plan=plan,
            layers=(),
            memory=self.memory.read(),
            faults=self.take_faults(),
        )
        step_ms = self.timer.read()
        reading = Reading(
            torch.cat(packed), lambda values: self._completed(replace(known, step_ms=step_ms()), values, shape)
        )
        self.losses.zero_()
        self._curvature = None
        return reading

    def _completed(self, known: Observation, values: Tensor, shape: SpectrumShape | None) -> Observation:
        """Returns `known` with what came from the device: variances, losses, loss scale and, with `shape`, spectra."""
        num_layers = len(self._layers)
        variances: list[float] = values[:num_layers].tolist()
        loss_sum, num_samples, scale, skipped, in_row = values[num_layers : num_layers + 5].tolist()
        spectra: list[tuple[float, ...] | None] = [None] * num_layers
        noise = None
        if shape is not None:
            spectra, noise = _unpack_curvature(values[num_layers + 5 :], shape)
        layers = tuple(
            LayerSignal(
                name=name,
                variance=None if math.isnan(variance) else variance,
                eigenvalues=spectrum,
                supported=supported,
            )
            for (name, supported), variance, spectrum in zip(self._layers, variances, spectra, strict=True)
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
        """Returns what was collected since the last reading, curvature and faults as plain values."""
        estimate = self._curvature
        return {
            "moments": self.moments.state_dict(),
            "losses": self.losses.clone(),
            "curvature": None if estimate is None else _pack_curvature(estimate),
            "curvature_shape": None if estimate is None else asdict(estimate.shape),
            "has_noise": estimate is not None and estimate.trace_covariance is not None,
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
            matrices = _square(values[:-2], len(self._layers))
            self._curvature = CurvatureEstimate(
                matrices=matrices,
                shape=SpectrumShape(**state["curvature_shape"]),
                mean_square_norm=values[-2] if state["has_noise"] else None,
                trace_covariance=values[-1] if state["has_noise"] else None,
            )


def _pack_curvature(estimate: CurvatureEstimate) -> Tensor:
    """Returns matrices and noise moments in one fp64 vector, NaN where there is no noise estimate."""
    missing = estimate.matrices.new_full((), math.nan)
    moments = [
        missing if moment is None else moment for moment in (estimate.mean_square_norm, estimate.trace_covariance)
    ]
    return torch.cat([estimate.matrices.double().flatten(), torch.stack(moments).double()])


def _unpack_curvature(
    values: Tensor, shape: SpectrumShape
) -> tuple[list[tuple[float, ...] | None], NoiseSignal | None]:
    """Returns each layer's eigenvalues, without the padding, and the noise; None where nothing was measured.

    The last step to the eigenvalues is made here, on the host: about a millisecond for 21 matrices of order 32.
    """
    mean_square_norm, trace_covariance = values[-2:].tolist()
    rows = largest_eigenvalues(_square(values[:-2], len(shape.counts)), shape).tolist()
    spectra = [tuple(value for value in row if math.isfinite(value)) or None for row in rows]
    if not (math.isfinite(mean_square_norm) and math.isfinite(trace_covariance)):
        return spectra, None
    return spectra, NoiseSignal(mean_square_norm=mean_square_norm, trace_covariance=trace_covariance)


def _square(values: Tensor, num_layers: int) -> Tensor:
    order = math.isqrt(values.numel() // num_layers)
    return values.view(num_layers, order, order)
