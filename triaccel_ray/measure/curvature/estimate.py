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

    @classmethod
    def of(
        cls, results: tuple[Tensor, ...], shape: SpectrumShape, fallback_layers: tuple[str, ...]
    ) -> CurvatureEstimate:
        """Returns the estimate of a method's results: the matrices and, from fisher, the gradient's two moments."""
        matrices, *moments = results
        return cls(
            matrices=matrices,
            shape=shape,
            mean_square_norm=moments[0] if moments else None,
            trace_covariance=moments[1] if moments else None,
            fallback_layers=fallback_layers,
        )

    @property
    def eigenvalues(self) -> Tensor:
        """fp32 [num_layers, k] where the matrices are, descending; waits for the device.

        NaN in the places beyond what the samples or the layer's weights can fill (fisher: b, ggn: b C), and throughout
        the row of a layer whose gradients are not finite.
        """
        return largest_eigenvalues(self.matrices.cpu(), self.shape).float().to(self.matrices.device)
