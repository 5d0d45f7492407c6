"""The one question asked of curvature, and its three answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from triaccel_ray.config import CurvatureMethod, require, require_number
from triaccel_ray.layers import Layer
from triaccel_ray.measure.curvature.fisher import fisher_grams, gradient_noise
from triaccel_ray.measure.curvature.ggn import ggn_grams
from triaccel_ray.measure.curvature.gram import block_eigenvalues
from triaccel_ray.measure.curvature.hessian import PowerIteration, hessian_eigenvalues
from triaccel_ray.measure.curvature.objective import Loss, Objective, measuring

_DEFAULT_POWER = PowerIteration()


@dataclass(frozen=True, kw_only=True)
class CurvatureEstimate:
    """One measurement, still on the device."""

    eigenvalues: Tensor
    """fp32 [num_layers, k], descending; NaN in the places beyond what the samples or the layer's weights can fill
    (fisher: b, ggn: b C), and throughout the row of a layer whose gradients are not finite."""
    mean_square_norm: Tensor | None = None
    """|E g|^2 over all layers' weights, a scalar (fisher only)."""
    trace_covariance: Tensor | None = None
    """tr Cov[g_i] over all layers' weights, a scalar (fisher only)."""
    fallback_layers: tuple[str, ...] = ()
    """Names of the layers for which fisher or ggn had to pass the samples through the whole model one by one."""


def top_eigenvalues(
    model: nn.Module,
    loss: Loss,
    inputs: Any,
    targets: Any,
    layers: Sequence[Layer],
    *,
    method: CurvatureMethod,
    top_k: int,
    generator: torch.Generator | None = None,
    power: PowerIteration = _DEFAULT_POWER,
) -> CurvatureEstimate:
    """Returns the largest eigenvalues of each layer's diagonal curvature block (Tri-Accel, section 3.2).

    - `hessian`: of the Hessian of the mean loss, largest in magnitude, by the paper's power iteration. Signed.
    - `ggn`: of the generalised Gauss-Newton block, all k at once, exact for this batch. In piecewise-linear networks
      the same as the Hessian's.
    - `fisher`: of the empirical Fisher block, from one backward pass; with the first two moments of the gradient.

    The model is measured in eval mode and full precision, and left as it was found: training flags, gradients,
    buffers and the global random state included, whether it succeeds or raises. Gradients are taken with
    `torch.autograd.grad`; hooks that others have put on parameter tensors may see them pass. fisher and ggn wait for
    the device inside the eigenvalue solver only.

    Args:
        model: called with `inputs`, by name or position if they are a mapping, tuple or list.
        loss: maps (outputs, targets) to the mean over samples, a scalar.
        inputs: the samples along dimension 0 of every tensor.
        targets: likewise.
        layers: whose blocks to measure.
        method: one of `fisher`, `ggn`, `hessian`.
        top_k: eigenvalues per layer, k >= 1.
        generator: draws the starting vectors of `hessian`; None draws from a fresh one with seed 0.
        power: iterations of `hessian`.

    Raises:
        ValueError: a bad option, no layer, fewer than 2 samples for fisher and ggn, a loss that is no scalar, outputs
            that are not [b, C] for ggn, or inputs and targets that disagree about the number of samples.
    """
    require(method in ("fisher", "ggn", "hessian"), "curvature method", method, "must be one of fisher, ggn, hessian")
    require_number("top_k", top_k, "must be >= 1", low=1)
    require(bool(layers), "layers", list(layers), "must name at least one layer; find_layers(model) returns all")
    objective = Objective(model=model, loss=loss, inputs=inputs, targets=targets)
    num_samples = objective.num_samples
    require(num_samples >= 2 or method == "hessian", "number of samples", num_samples, f"{method} needs at least 2")
    with measuring(model):
        if method == "hessian":
            generator = torch.Generator().manual_seed(0) if generator is None else generator
            return CurvatureEstimate(eigenvalues=hessian_eigenvalues(objective, layers, top_k, power, generator))
        grams = (fisher_grams if method == "fisher" else ggn_grams)(objective, layers)
        eigenvalues = block_eigenvalues(grams, layers, num_samples, top_k)
        mean_square_norm, trace_covariance = gradient_noise(grams) if method == "fisher" else (None, None)
    return CurvatureEstimate(
        eigenvalues=eigenvalues,
        mean_square_norm=mean_square_norm,
        trace_covariance=trace_covariance,
        fallback_layers=grams.fallback_layers,
    )
