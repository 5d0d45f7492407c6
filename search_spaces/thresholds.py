"""Search spaces of the control loop's thresholds, which Ray Tune samples, and the thresholds that a sample stands for.

A sample holds one threshold of each pair and the other's distance from it. So every sample satisfies
tau_low < tau_high and rho_low < rho_high.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np
from ray import tune

from triaccel_ray.config import ControlConfig
from triaccel_ray.decide.precision import precision_for_variance

_RHO: Mapping[str, Any] = {"rho_high": tune.uniform(0.3, 0.98), "rho_ratio": tune.uniform(0.2, 0.95)}

SPACES: Mapping[str, Mapping[str, Any]] = {
    "thresholds": {"tau_low_quantile": tune.uniform(0.0, 1.0), "tau_high_share": tune.uniform(0.0, 1.0), **_RHO},
    "thresholds-absolute": {
        "log10_tau_low": tune.uniform(-10.0, -3.0),
        "log10_tau_ratio": tune.uniform(0.1, 5.0),
        **_RHO,
    },
}
"""Name on the command line -> dimensions that are always searched; rho_low = rho_high x ratio in both.

`thresholds`: tau_low is the quantile q of the variances that a probe measured, tau_high that at q + share x (1 - q);
see `Calibration.quantile`. `thresholds-absolute`: tau_high = tau_low x 10^ratio.
"""

OPTIONAL: Mapping[str, Any] = {
    "alpha": tune.loguniform(1e-3, 1.0),
    "tau_curv": tune.loguniform(1e-1, 1e3),
    "t_ctrl": tune.choice([0.5, 1.0, 2.0, 4.0]),
    "batch_steps": tune.choice(["1:1", "1:2", "2:2", "2:4", "4:4"]),
}
"""Dimensions searched on request. `t_ctrl` multiplies the task's interval; `batch_steps` is up:down in rungs."""

ANCHOR: Mapping[str, Any] = {
    "log10_tau_low": -10.0,
    "log10_tau_ratio": 5.0,
    "tau_low_quantile": 0.0,
    "tau_high_share": 1.0,
    "rho_high": 0.9,
    "rho_ratio": 0.7,
    "alpha": 1e-3,
    "tau_curv": 1e3,
    "t_ctrl": 1.0,
    "batch_steps": "1:2",
}
"""The first configuration tried. Calibrated, it keeps every layer in BF16: what the plain setting gives. Where
that is 0 or infinite, the nearest value of the space stands for it."""

MARGIN_DECADES = 2.0
"""Decades by which the calibrated range exceeds the measured variances: they keep falling after the probe, and a
precision can also be left unused."""

MARGIN_SHARE = 0.125
"""Share of the quantiles, at either end, beyond the measured variances. One precision for all layers is the fastest on
many devices, and a search of a dozen configurations has to try it."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Gradient variances that a short probe measured; calibrated thresholds are quantiles of them."""

    variances: tuple[float, ...]
    """v_l(t) of all layers and ticks of the probe, ascending, positive."""
    layers: Mapping[str, float] = field(default_factory=dict)
    """Layer name -> median of its variances."""

    def quantile(self, q: float) -> float:
        """Returns the variance at quantile q in [0, 1], interpolated on a logarithmic scale.

        The measured variances lie between the quantiles `MARGIN_SHARE` and 1 - `MARGIN_SHARE`. Below that range, the
        result is below every layer's variances; beyond it, above all of them.

        Raises:
            ValueError: q is outside [0, 1].
        """
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"q = {q}: must lie in [0, 1]")
        decades = np.log10(self.variances if len(self.variances) > 1 else 2 * self.variances)
        quantiles = [0.0, *np.linspace(MARGIN_SHARE, 1.0 - MARGIN_SHARE, len(decades)), 1.0]
        extended = [decades[0] - MARGIN_DECADES, *decades, decades[-1] + MARGIN_DECADES]
        return float(10.0 ** np.interp(q, quantiles, extended))


def calibration(variances: Mapping[str, Sequence[float]]) -> Calibration:
    """Returns the calibration from the variances that a probe recorded, by layer.

    Raises:
        ValueError: none of them is positive and finite.
    """
    usable_by_layer = {name: [v for v in values if v > 0 and math.isfinite(v)] for name, values in variances.items()}
    usable = sorted(v for values in usable_by_layer.values() for v in values)
    if not usable:
        raise ValueError(
            f"variances = {sum(map(len, variances.values()))} values, none positive: the probe was shorter than one "
            "control interval, or its gradients vanish; use the space thresholds-absolute"
        )
    medians = {name: median(values) for name, values in usable_by_layer.items() if values}
    return Calibration(variances=tuple(usable), layers=medians)


def search_space(name: str, optional: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the dimensions, for Ray Tune, of the space `name` in `SPACES` and of the requested ones in `OPTIONAL`."""
    return {**SPACES[name], **{dimension: OPTIONAL[dimension] for dimension in optional}}


def thresholds(
    sample: Mapping[str, Any], control: ControlConfig, calibrated_on: Calibration | None = None
) -> ControlConfig:
    """Returns `control` with the thresholds of `sample`; settings that the sample does not hold are unchanged.

    Raises:
        ValueError: a sample of quantiles comes without a calibration.
    """
    precision, batch = control.precision, control.batch
    if "log10_tau_low" in sample:
        tau_low = 10.0 ** sample["log10_tau_low"]
        precision = replace(precision, tau_low=tau_low, tau_high=tau_low * 10.0 ** sample["log10_tau_ratio"])
    if "tau_low_quantile" in sample:
        if calibrated_on is None:
            raise ValueError("calibration = None: a sample of quantiles has no meaning without the probe's variances")
        q = sample["tau_low_quantile"]
        tau_low = calibrated_on.quantile(q)
        tau_high = calibrated_on.quantile(min(q + sample["tau_high_share"] * (1.0 - q), 1.0))
        # Equal quantiles (a share of 0, or repeated variances) must still give two thresholds.
        precision = replace(precision, tau_low=tau_low, tau_high=max(tau_high, tau_low * (1.0 + 1e-6)))
        # Else the first epochs would be judged in a precision that layers leave later, except for FP8.
        initial = {name: precision_for_variance(precision, v, ()) for name, v in calibrated_on.layers.items()}
        precision = replace(precision, initial_layers=initial)
    if "rho_high" in sample:
        batch = replace(batch, rho_low=sample["rho_high"] * sample["rho_ratio"], rho_high=sample["rho_high"])
    if "batch_steps" in sample:
        up, down = (int(part) * batch.granularity for part in sample["batch_steps"].split(":"))
        batch = replace(batch, step_up=up, step_down=down)
    curvature = replace(control.curvature, **{name: sample[name] for name in ("alpha", "tau_curv") if name in sample})
    every_steps = max(1, round(control.every_steps * sample.get("t_ctrl", 1.0)))
    return replace(control, precision=precision, batch=batch, curvature=curvature, every_steps=every_steps)
