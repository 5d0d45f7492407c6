"""The gradient variance of each layer, smoothed on the device: the input of the precision rule."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from triaccel_ray.kernels.grad_stats.api import GradStats
from triaccel_ray.model.layers import Layer


class GradientMoments:
    """Moving averages v_l(t) = beta v_l(t-1) + (1-beta) Var[g_l(t)], bias-corrected when read.

    Everything stays on the device; `read` returns a tensor for the tick's one copy to the host.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        watched: Sequence[nn.Parameter],
        *,
        beta: float,
        buckets: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Tracks the variance of the weights of `layers`, and non-finite gradients of all `watched` parameters.

        `buckets` groups the indices of parameters whose gradients arrive together; by default all are in one bucket.
        """
        layer_of = {id(weight): index for index, layer in enumerate(layers) for weight in layer.weights}
        self._beta, self._num_layers = beta, len(layers)
        self.last_norm = torch.full((), math.inf, dtype=torch.float64, device=watched[0].device)
        """fp64 scalar: the last finite gradient norm that `remember_norm` has kept; infinite before."""
        self.stats = GradStats(
            [p.numel() for p in watched],
            [layer_of.get(id(p), len(layers)) for p in watched],
            num_groups=len(layers) + 1,
            beta=beta,
            buckets=buckets,
            device=watched[0].device,
        )
        """One group per layer, and a last one for parameters of no layer, which the global norm includes. Steps update
        the averages here."""

    def read(self) -> Tensor:
        """Returns the bias-corrected averages v_l, fp64 [num_layers]; NaN before a layer's first finite gradient."""
        average, count = self.stats.average[: self._num_layers], self.stats.count[: self._num_layers]
        return average / (1.0 - self._beta**count)

    def norm(self, loss_scale: Tensor) -> Tensor:
        """Returns the global L2 norm of the last update's unscaled gradients, fp64 scalar.

        Not finite if a gradient was not.
        """
        stats = self.stats
        squares = stats.sum_squares_about_mean + stats.sum**2 / stats.num_elements.clamp(min=1)
        return squares.sum().sqrt() / loss_scale

    def remember_norm(self, loss_scale: Tensor) -> None:
        """Stores the last update's `norm` in `last_norm` for the next step, if it is finite."""
        norm = self.norm(loss_scale)
        self.last_norm.copy_(torch.where(norm.isfinite(), norm, self.last_norm))

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the averages and counts, and the norm by which the next step may be clipped."""
        kept = {"average": self.stats.average, "count": self.stats.count, "last_norm": self.last_norm}
        return {name: tensor.clone() for name, tensor in kept.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores what `state_dict` returned."""
        self.stats.average.copy_(state["average"])
        self.stats.count.copy_(state["count"])
        self.last_norm.copy_(state["last_norm"])
