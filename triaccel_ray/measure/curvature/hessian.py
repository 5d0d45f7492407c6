"""The paper's own way: power iteration on Hessian-vector products."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from triaccel_ray.config import require_number
from triaccel_ray.layers import Layer
from triaccel_ray.measure.curvature.calls import find_weight_uses
from triaccel_ray.measure.curvature.objective import Objective
from triaccel_ray.measure.curvature.second_order import Wanted, twice_differentiable


@dataclass(frozen=True, eq=False)
class Slopes:
    """The gradient of the mean loss, differentiable."""

    of: Mapping[nn.Parameter, Tensor | None]
    """With respect to each weight; None where the weight has no part."""
    wanted: Wanted
    """To say before differentiating with respect to which weights."""


@dataclass(frozen=True, kw_only=True)
class PowerIteration:
    """How long to iterate."""

    num_iterations: int = 20
    """Hessian-vector products per eigenvalue, at most; >= 1."""
    tolerance: float | None = None
    """Relative change of the eigenvalue below which to stop, > 0. Each iteration then waits for the device; None
    always makes `num_iterations`."""

    def __post_init__(self) -> None:
        require_number("num_iterations", self.num_iterations, "must be >= 1", low=1)
        if self.tolerance is not None:
            require_number("tolerance", self.tolerance, "must be > 0 or None", low=math.nextafter(0.0, 1.0))


def hessian_eigenvalues(
    objective: Objective, layers: Sequence[Layer], top_k: int, power: PowerIteration, generator: torch.Generator
) -> Tensor:
    """Returns each layer's top_k eigenvalues of largest magnitude, in descending order: [num_layers, top_k].

        u <- H_l u / |H_l u|,   lambda = u^T H_l u / u^T u        (Tri-Accel, section 3.2)

    H_l u is the gradient of g_l^T u with respect to the layer's weights, g_l the gradient of the mean loss. For k > 1
    the vectors found are projected out of every product. The paper starts anywhere; here from a normal vector drawn
    from `generator`. An eigenvalue is approached from below in magnitude, by a factor |lambda_2 / lambda_1|^2 an
    iteration, so that close ones come out too small or as a mixture. NaN stands in the places beyond the number of
    weights.
    """
    slopes = slope_graph(objective, layers)
    rows = []
    for layer in layers:
        starts = start_vectors(layer, top_k, generator)
        found = power_iteration(block_product(layer, slopes), starts, power)
        rows.append(F.pad(found.sort(descending=True).values, (0, top_k - len(starts)), value=math.nan))
    return torch.stack([row.to(rows[0]) for row in rows])


def slope_graph(objective: Objective, layers: Sequence[Layer]) -> Slopes:
    """Returns the gradient of the mean loss with the graph that made it, to be differentiated once more.

    Raises:
        ValueError: a part of the graph is hidden in a reentrant checkpoint.
    """
    weights = [weight for layer in layers for weight in layer.weights if weight.requires_grad]
    # The fused attention kernels have no second derivative.
    wanted = Wanted()
    with sdpa_kernel(SDPBackend.MATH), twice_differentiable(objective.model, wanted):
        value = objective.value(objective.outputs())
        find_weight_uses(value, [])  # for its refusal of graphs that hide weights
        slopes: Sequence[Tensor | None] = [None] * len(weights)
        if value.requires_grad:
            slopes = torch.autograd.grad(value, weights, create_graph=True, allow_unused=True)
    return Slopes(of=dict(zip(weights, slopes, strict=True)), wanted=wanted)


def power_iteration(product: Callable[[Tensor], Tensor], starts: Tensor, power: PowerIteration) -> Tensor:
    """Returns the eigenvalues of largest magnitude of a symmetric map, one for each of the starting vectors [k, n]."""
    vectors = starts.new_empty(0, starts.shape[1])
    eigenvalues = []
    for start in starts:
        u = _normalized(_project_out(start, vectors))
        eigenvalue = u.new_zeros(())
        for _ in range(power.num_iterations):
            image = _project_out(product(u), vectors)
            before, eigenvalue = eigenvalue, u @ image
            u = _normalized(image)
            if power.tolerance is not None and bool((eigenvalue - before).abs() <= power.tolerance * eigenvalue.abs()):
                break
        eigenvalues.append(eigenvalue)
        vectors = torch.cat([vectors, u.unsqueeze(0)])
    return torch.stack(eigenvalues)


def block_product(layer: Layer, slopes: Slopes) -> Callable[[Tensor], Tensor]:
    """Returns u -> H_l u on flat vectors [n]; zero in the places of weights that the loss is at most linear in."""
    sizes = [weight.numel() for weight in layer.weights]

    def product(u: Tensor) -> Tensor:
        parts = zip(layer.weights, torch.split(u, sizes), strict=True)
        curved = [(slope, _laid_out(part, w)) for w, part in parts if (slope := slopes.of.get(w)) is not None]
        curved = [(slope, part) for slope, part in curved if slope.requires_grad]
        if not curved:
            return torch.zeros_like(u)
        roots, directions = zip(*curved, strict=True)
        with slopes.wanted.only(layer.weights):
            images = torch.autograd.grad(roots, layer.weights, directions, retain_graph=True, allow_unused=True)
        flat = [torch.zeros_like(w) if image is None else image for w, image in zip(layer.weights, images, strict=True)]
        return torch.cat([part.flatten() for part in flat])

    return product


def _laid_out(flat: Tensor, weight: Tensor) -> Tensor:
    """Returns the vector in the weight's shape and memory format: a convolution meeting two formats converts one."""
    return torch.empty_like(weight, requires_grad=False).copy_(flat.view_as(weight))


def start_vectors(layer: Layer, top_k: int, generator: torch.Generator) -> Tensor:
    """Returns min(top_k, n) normal vectors of n elements, drawn where the generator lives."""
    weight, count = layer.weights[0], min(top_k, layer.num_elements)
    drawn = torch.randn(count, layer.num_elements, generator=generator, device=generator.device, dtype=weight.dtype)
    return drawn.to(weight.device)


def _project_out(vector: Tensor, vectors: Tensor) -> Tensor:
    return vector - vectors.T @ (vectors @ vector)


def _normalized(vector: Tensor) -> Tensor:
    """Returns the vector at length 1; the zero vector, the image of a flat direction, stays."""
    length: Tensor = torch.linalg.vector_norm(vector)
    return vector / length.clamp(min=torch.finfo(vector.dtype).tiny)
