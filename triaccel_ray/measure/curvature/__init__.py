"""The largest eigenvalues of each layer's curvature: power iteration, Gauss-Newton or empirical Fisher."""

from triaccel_ray.measure.curvature.api import CurvatureEstimate, top_eigenvalues
from triaccel_ray.measure.curvature.hessian import PowerIteration

__all__ = ["CurvatureEstimate", "PowerIteration", "top_eigenvalues"]
