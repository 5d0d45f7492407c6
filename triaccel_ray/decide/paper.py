"""The paper's rules to the letter."""

from __future__ import annotations

from dataclasses import replace

from triaccel_ray.config import ControlConfig, CurvatureMethod
from triaccel_ray.records.plan import Precision

ALPHA = 0.02
"""Strength of the lr scaling if the configuration has it off: the paper has rule 4, and gives no value."""


def paper_rules(config: ControlConfig) -> ControlConfig:
    """Returns `config` with the rules as printed (Tri-Accel, section 3), without what this project adds to them.

    There is no smoothing over measurements, no dwell time, and nothing is undone. Every precision may be used, memory
    counts from zero, and learning rates follow curvature, not the batch size. Thresholds, intervals and sizes stay as
    they are: the paper gives few. `alpha` does, too, except that 0 becomes `ALPHA`. What a run needs to survive is
    kept: FP16's loss scale, its bar after overflows, retries when memory runs out, and no growth at a tick that raises
    a precision. How weights are stored is no rule, and stays, too.

    Eigenvalues are those of the generalized Gauss-Newton block, unless the configuration asks for `hessian`. In
    networks of linear maps and ReLU, such as ResNets, it is the Hessian block. The paper's power iteration on the
    Hessian took 338 s for its first measurement (ResNet-18, 21 layers, 32 samples, H100); `ggn` takes 25 ms.
    """
    method: CurvatureMethod = "hessian" if config.curvature.method == "hessian" else "ggn"
    return replace(
        config,
        revert_slowdowns=False,
        precision=replace(
            config.precision,
            dwell_ticks=0,
            patience_ticks=1,
            allow_slow_precisions=True,
            fp8=False,
            initial=_without_fp8(config.precision.initial),
            initial_layers={name: _without_fp8(level) for name, level in config.precision.initial_layers.items()},
        ),
        curvature=replace(config.curvature, method=method, smoothing=0.0, alpha=config.curvature.alpha or ALPHA),
        batch=replace(
            config.batch,
            dwell_ticks=0,
            oom_cooldown_ticks=1,
            lr_rule="none",
            bound_by_noise_scale=False,
            counts_idle_memory=True,
        ),
    )


def _without_fp8(level: Precision) -> Precision:
    """Returns FP16 for FP8, which the paper does not have."""
    return Precision.FP16 if level is Precision.FP8 else level
