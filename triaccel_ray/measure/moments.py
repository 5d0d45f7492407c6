"""Rule 1: the variance of each layer's gradient, smoothed on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from triaccel_ray.kernels.grad_stats.api import GradStats
from triaccel_ray.model.gradients import Gradients
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
        """Watches the weights of `layers` for variance, and all `watched` parameters for non-finite gradients.

        `buckets` are the indices of those whose gradients arrive together; all in one by default.
        """
        layer_of = {id(weight): index for index, layer in enumerate(layers) for weight in layer.weights}
        self._beta, self._num_layers = beta, len(layers)
        self.last_norm = torch.full((), math.inf, dtype=torch.float64, device=watched[0].device)
        """The norm of the last step that had a finite one, where `remember_norm` is called; infinite before. fp64."""
        self.stats = GradStats(
            [p.numel() for p in watched],
            [layer_of.get(id(p), len(layers)) for p in watched],
            num_groups=len(layers) + 1,
            beta=beta,
            buckets=buckets,
            device=watched[0].device,
        )
        """By layer; what belongs to none is a group of its own, for the global norm."""

    def update(self, gradients: Gradients, loss_scale: Tensor) -> Tensor:
        """Takes in the gradients of one step and returns whether any is not finite: fp32 scalar, 0 or 1.

        Gradients carry the factor `loss_scale` (scalar tensor); their variance is divided by its square. A layer
        without a gradient, or with a non-finite one, keeps its average.
        """
        return self.stats.update(gradients.table, loss_scale)

    def read(self) -> Tensor:
        """Returns v_l with its bias towards the initial zero corrected, fp64 [num_layers]; NaN before any statistic."""
        average, count = self.stats.average[: self._num_layers], self.stats.count[: self._num_layers]
        return average / (1.0 - self._beta**count)

    def norm(self, loss_scale: Tensor) -> Tensor:
        """Returns the global L2 norm of the last update's gradients without the factor `loss_scale`, fp64 scalar.

        Not finite where a gradient was not.
        """
        stats = self.stats
        squares = stats.sum_squares_about_mean + stats.sum**2 / stats.num_elements.clamp(min=1)
        return squares.sum().sqrt() / loss_scale

    def remember_norm(self, loss_scale: Tensor) -> None:
        """Keeps the last update's `norm` for the next step, if it is finite."""
        norm = self.norm(loss_scale)
        self.last_norm.copy_(torch.where(norm.isfinite(), norm, self.last_norm))

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the averages and counts, and the norm that the next step may be clipped by."""
        kept = {"average": self.stats.average, "count": self.stats.count, "last_norm": self.last_norm}
        return {name: tensor.clone() for name, tensor in kept.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores what `state_dict` returned."""
        self.stats.average.copy_(state["average"])
        self.stats.count.copy_(state["count"])
        self.last_norm.copy_(state.get("last_norm", torch.tensor(math.inf)))  # older checkpoints have none
