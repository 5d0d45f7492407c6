"""One measurement of curvature, on the device until someone reads it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from triaccel_ray.measure.curvature.spectrum import SpectrumShape, largest_eigenvalues


@dataclass(frozen=True, kw_only=True, eq=False)
class CurvatureEstimate:
    """One measurement, still on the device."""

    matrices: Tensor
    """fp64 [num_layers, p, p]: symmetric, with the largest eigenvalues of each layer's block among their own."""
    shape: SpectrumShape
    mean_square_norm: Tensor | None = None
    """|E g|^2 over all layers' weights, a scalar (fisher only)."""
    trace_covariance: Tensor | None = None
    """tr Cov[g_i] over all layers' weights, a scalar (fisher only)."""
    fallback_layers: tuple[str, ...] = ()
    """Names of the layers for which fisher or ggn had to pass the samples through the whole model one by one."""

    @property
    def eigenvalues(self) -> Tensor:
        """fp32 [num_layers, k] where the matrices are, descending; waits for the device.

        NaN in the places beyond what the samples or the layer's weights can fill (fisher: b, ggn: b C), and throughout
        the row of a layer whose gradients are not finite.
        """
        return largest_eigenvalues(self.matrices.cpu(), self.shape).float().to(self.matrices.device)
