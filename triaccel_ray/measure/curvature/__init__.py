"""The largest eigenvalues of each layer's curvature: power iteration, Gauss-Newton or empirical Fisher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from triaccel_ray.config import CurvatureMethod, check_field, require
from triaccel_ray.measure.curvature.meter import CurvatureMeter, method_of
from triaccel_ray.measure.curvature.objective import Limits, Objective, measuring
from triaccel_ray.measure.curvature.spectrum import CurvatureEstimate, SpectrumShape
from triaccel_ray.model.layers import Layer, Loss

__all__ = ["CurvatureEstimate", "CurvatureMeter", "SpectrumShape", "top_eigenvalues"]


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
    num_iterations: int | None = None,
    chunk_samples: int | None = None,
) -> CurvatureEstimate:
    """Returns the largest eigenvalues of each layer's diagonal curvature block (Tri-Accel, section 3.2).

    - `hessian`: of the Hessian of the mean loss, largest in magnitude, by the paper's power iteration on
      several vectors at once (`BlockPower`). Signed.
    - `ggn`: of the generalised Gauss-Newton block, all k at once, exact for this batch. In piecewise-linear networks
      the same as the Hessian's.
    - `fisher`: of the empirical Fisher block, from one backward pass; with the first two moments of the gradient.

    The model is measured in eval mode without autocast (fisher and ggn: without TF32 too; `hessian` as PyTorch's flags
    have it, by default with TF32 convolutions on a GPU), and left as it was found: training flags, gradients,
    buffers and the global random state included, whether it succeeds or raises. Gradients are taken with
    `torch.autograd.grad`; hooks that others have put on parameter tensors may see them pass. No method waits for the
    device. For repeated measurements see `CurvatureMeter`.

    Args:
        model: called with `inputs`, by name or position if they are a mapping, tuple or list.
        loss: maps (outputs, targets) to the mean over samples, a scalar.
        inputs: the samples along dimension 0 of every tensor.
        targets: likewise.
        layers: whose blocks to measure.
        method: one of `fisher`, `ggn`, `hessian`.
        top_k: eigenvalues per layer, k >= 1.
        generator: draws the starting vectors of `hessian`; None draws from a fresh one with seed 0.
        num_iterations: Hessian-vector products per vector of `hessian`, >= 1; None: 20.
        chunk_samples: samples that pass through the model at once, >= 1: fewer take less memory and more time for the
            same results up to rounding; None: all.

    Raises:
        ValueError: a bad option, no layer, fewer than 2 samples for fisher and ggn, a loss that is no scalar, outputs
            that ggn refuses (`ggn_head`), or inputs and targets that disagree about the number of samples.
    """
    require(method in ("fisher", "ggn", "hessian"), "curvature method", method, "must be one of fisher, ggn, hessian")
    for name, value in (("top_k", top_k), ("chunk_samples", chunk_samples), ("num_iterations", num_iterations)):
        check_field(name, 1 if value is None else value, int, "[1, inf)")
    require(bool(layers), "layers", list(layers), "must name at least one layer; find_layers(model) returns all")
    objective = Objective(
        model=model, loss=loss, inputs=inputs, targets=targets, limits=Limits(chunk_samples=chunk_samples)
    )
    objective.require_samples(method)
    measured = method_of(layers, method, top_k)
    with measuring(model, strict_fp32=method != "hessian"):
        planned = measured.begin(torch.Generator().manual_seed(0) if generator is None else generator)
        measured.prepare_anew(objective)
        for _ in range(planned if num_iterations is None else num_iterations):
            measured.advance()
        results, shape = measured.finish()
    return CurvatureEstimate.of(results, shape, measured.fallbacks)
