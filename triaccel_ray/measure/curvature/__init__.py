"""The largest eigenvalues of each layer's curvature: power iteration, Gauss-Newton or empirical Fisher."""

from triaccel_ray.measure.curvature.api import top_eigenvalues
from triaccel_ray.measure.curvature.estimate import CurvatureEstimate
from triaccel_ray.measure.curvature.hessian import PowerIteration
from triaccel_ray.measure.curvature.meter import CurvatureMeter
from triaccel_ray.measure.curvature.spectrum import SpectrumShape

__all__ = ["CurvatureEstimate", "CurvatureMeter", "PowerIteration", "SpectrumShape", "top_eigenvalues"]
