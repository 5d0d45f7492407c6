"""One reading of everything the policy looks at: one copy from the device, one frozen value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from triaccel_ray.jsonable import decode, encode
from triaccel_ray.measure.curvature import CurvatureEstimate
from triaccel_ray.measure.memory import MemoryMeter
from triaccel_ray.measure.moments import GradientMoments
from triaccel_ray.plan import Fault, Plan, Precision
from triaccel_ray.signals import LayerSignal, NoiseSignal, Observation


class Sensors:
    """Collects device-side statistics between ticks and reads them at a tick."""

    def __init__(
        self,
        layers: Sequence[tuple[str, tuple[Precision, ...]]],
        moments: GradientMoments,
        memory: MemoryMeter,
        device: torch.device,
    ) -> None:
        """Takes the layers' names with what they support, and the instruments."""
        self._layers, self.moments, self.memory = layers, moments, memory
        self._losses = torch.zeros(2, dtype=torch.float64, device=device)
        self._curvature: CurvatureEstimate | None = None
        self._faults: list[Fault] = []

    def record_step(self, loss: Tensor, faults: Sequence[Fault]) -> None:
        """Takes in one step's loss (sum over its samples, and their number, fp64 [2]) and what it survived."""
        self._losses += loss
        self._faults.extend(faults)

    def record_faults(self, faults: Sequence[Fault]) -> None:
        """Takes in failures outside a step."""
        self._faults.extend(faults)

    def record_curvature(self, estimate: CurvatureEstimate) -> None:
        """Keeps a measurement, still on the device, for the next tick."""
        self._curvature = estimate

    def read(
        self, *, plan: Plan, step: int, tick: int, epoch: float, loss_scale: Tensor, num_skipped: Tensor
    ) -> Observation:
        """Returns what was seen since the last reading, and begins anew. One copy from the device."""
        packed = [self.moments.read(), self._losses, loss_scale.double().view(1), num_skipped.double().view(1)]
        if self._curvature is not None:
            packed.append(_pack_curvature(self._curvature))
        values: list[float] = torch.cat(packed).tolist()
        num_layers = len(self._layers)
        variances, rest = values[:num_layers], values[num_layers:]
        loss_sum, num_samples, scale, skipped = rest[:4]
        spectra, noise = _unpack_curvature(rest[4:], num_layers)
        observation = Observation(
            step=step,
            tick=tick,
            epoch=epoch,
            plan=plan,
            layers=tuple(
                LayerSignal(
                    name=name,
                    variance=None if math.isnan(variance) else variance,
                    eigenvalues=spectrum,
                    supported=supported,
                )
                for (name, supported), variance, spectrum in zip(self._layers, variances, spectra, strict=True)
            ),
            memory=self.memory.read(),
            loss=loss_sum / num_samples if num_samples else None,
            loss_scale=scale,
            num_skipped=int(skipped),
            noise=noise,
            faults=tuple(self._faults),
        )
        self._losses.zero_()
        self._curvature = None
        self._faults.clear()
        return observation

    def state_dict(self) -> dict[str, object]:
        """Returns what was collected since the last reading, curvature and faults as plain values."""
        curvature = None if self._curvature is None else _pack_curvature(self._curvature)
        return {
            "moments": self.moments.state_dict(),
            "losses": self._losses.clone(),
            "curvature": curvature,
            "faults": encode(tuple(self._faults)),
            "has_noise": self._curvature is not None and self._curvature.trace_covariance is not None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self.moments.load_state_dict(state["moments"])
        self._losses.copy_(state["losses"])
        self._faults = [decode(Fault, fault) for fault in state["faults"]]
        self._curvature = None
        if state["curvature"] is not None:
            values = state["curvature"].to(self._losses.device)
            self._curvature = CurvatureEstimate(
                eigenvalues=values[:-2].view(len(self._layers), -1),
                mean_square_norm=values[-2] if state["has_noise"] else None,
                trace_covariance=values[-1] if state["has_noise"] else None,
            )


def _pack_curvature(estimate: CurvatureEstimate) -> Tensor:
    """Returns eigenvalues and noise moments in one fp64 vector, NaN where there is no noise estimate."""
    missing = estimate.eigenvalues.new_full((), math.nan)
    moments = [
        missing if moment is None else moment for moment in (estimate.mean_square_norm, estimate.trace_covariance)
    ]
    return torch.cat([estimate.eigenvalues.double().flatten(), torch.stack(moments).double()])


def _unpack_curvature(
    values: list[float], num_layers: int
) -> tuple[list[tuple[float, ...] | None], NoiseSignal | None]:
    """Returns each layer's eigenvalues, without the padding, and the noise; None where nothing was measured."""
    if not values:
        return [None] * num_layers, None
    *eigenvalues, mean_square_norm, trace_covariance = values
    top_k = len(eigenvalues) // num_layers
    rows = [eigenvalues[i * top_k : (i + 1) * top_k] for i in range(num_layers)]
    spectra = [tuple(value for value in row if math.isfinite(value)) or None for row in rows]
    if not (math.isfinite(mean_square_norm) and math.isfinite(trace_covariance)):
        return spectra, None
    return spectra, NoiseSignal(mean_square_norm=mean_square_norm, trace_covariance=trace_covariance)
