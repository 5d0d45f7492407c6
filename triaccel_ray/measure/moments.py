"""Rule 1: the variance of each layer's gradient, smoothed on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from triaccel_ray.layers import Layer


class GradientMoments:
    """Moving averages v_l(t) = beta v_l(t-1) + (1-beta) Var[g_l(t)], bias-corrected when read.

    Everything stays on the device; `read` returns a tensor for the tick's one copy to the host.
    """

    def __init__(self, layers: Sequence[Layer], parameters: Sequence[nn.Parameter], *, beta: float) -> None:
        """Watches the weights of `layers` for variance, and all `parameters` for non-finite gradients."""
        device = layers[0].weights[0].device
        self._layers, self._parameters, self._beta = layers, parameters, beta
        self._average = torch.zeros(len(layers), dtype=torch.float64, device=device)
        self._count = torch.zeros(len(layers), dtype=torch.float64, device=device)

    @torch.no_grad()
    def update(self, loss_scale: Tensor) -> Tensor:
        """Takes in the gradients of one step and returns whether any is not finite: fp32 scalar, 0 or 1.

        Gradients carry the factor `loss_scale` (scalar tensor); their variance is divided by its square. A layer
        without a gradient, or with a non-finite one, keeps its average.
        """
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if not gradients:
            return torch.zeros((), device=self._average.device)
        largest = torch.stack([norm.float() for norm in torch._foreach_norm(gradients, float("inf"))])
        found = 1.0 - torch.isfinite(largest).all().float()
        variance = torch.stack([layer_variance(layer) for layer in self._layers]) / loss_scale.double().square()
        usable = torch.isfinite(variance)
        smoothed = self._beta * self._average + (1.0 - self._beta) * variance
        self._average.copy_(torch.where(usable, smoothed, self._average))
        self._count.add_(usable)
        return found

    def read(self) -> Tensor:
        """Returns v_l with its bias towards the initial zero corrected, fp64 [num_layers]; NaN before any statistic."""
        return self._average / (1.0 - self._beta**self._count)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the averages and counts."""
        return {"average": self._average.clone(), "count": self._count.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores what `state_dict` returned."""
        self._average.copy_(state["average"])
        self._count.copy_(state["count"])


def layer_variance(layer: Layer) -> Tensor:
    """Returns the population variance over all elements of the layer's weight gradients, fp64 scalar.

    Several weights are combined by their means and squared deviations (Chan et al. 1979), which loses no digits
    where the sum of squares would. NaN when the layer has no gradient.
    """
    gradients = [weight.grad for weight in layer.weights if weight.grad is not None]
    if not gradients:
        return torch.full((), float("nan"), dtype=torch.float64, device=layer.weights[0].device)
    moments = [torch.var_mean(gradient.float(), correction=0) for gradient in gradients]
    if len(moments) == 1:
        return moments[0][0].double()
    sizes = torch.tensor([g.numel() for g in gradients], dtype=torch.float64).to(gradients[0].device, non_blocking=True)
    variances = torch.stack([variance.double() for variance, _ in moments])
    means = torch.stack([mean.double() for _, mean in moments])
    shares = sizes / sizes.sum()
    return (shares * (variances + (means - (shares * means).sum()).square())).sum()
