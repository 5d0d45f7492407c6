"""The empirical Fisher: one column per sample, its own loss's gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from triaccel_ray.layers import Layer
from triaccel_ray.measure.curvature.gram import Grams, layer_grams
from triaccel_ray.measure.curvature.objective import Objective
from triaccel_ray.measure.curvature.ways import Structure


def fisher_grams(objective: Objective, layers: Sequence[Layer], known: Structure | None = None) -> Grams:
    """Returns each layer's matrix K_ij = <g_i, g_j> [b, b], g_i the gradient of sample i's own loss.

    The block is F_l = (1/b) sum_i g_i g_i^T, the uncentred second moment of the gradient: the true labels stand in
    for labels drawn from the model, so that F is the Fisher matrix, hence near the Hessian, only as far as the model
    fits (Martens 2020, section 11). One backward pass.
    """
    return layer_grams(objective, layers, _head, known)


def gradient_noise(grams: Grams) -> tuple[Tensor, Tensor]:
    """Returns unbiased |E g|^2 and tr Cov[g_i] of the per-sample gradient over all layers, scalars.

        |E g|^2    = sum_{i != j} S_ij / (b (b - 1))
        tr Cov[g]  = (tr S - sum_ij S_ij / b) / (b - 1)

    with S the sum of the layers' Gram matrices (McCandlish et al. 2018, appendix A, from two batch sizes; here from
    all pairs of samples). Unbiased, so where noise drowns the gradient the first can come out below 0: the average
    over measurements needs that, and whoever divides by it has to cut it off.
    """
    total = torch.stack([matrix.to(grams.matrices[0]) for matrix in grams.matrices]).sum(dim=0)
    b = len(total)
    trace = total.diagonal().sum()
    # Not sum - trace: where the noise is large, that is a small difference of large numbers.
    across = (total - torch.diag(total.diagonal())).sum()
    mean_square_norm = across / (b * (b - 1))
    trace_covariance = (trace - (trace + across) / b) / (b - 1)
    return mean_square_norm, trace_covariance


def _head(outputs: Any, objective: Objective) -> tuple[Tensor, Sequence[Tensor | None]]:
    return objective.value(outputs) * objective.num_samples, [None]
