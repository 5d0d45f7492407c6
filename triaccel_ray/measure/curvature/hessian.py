"""The method hessian: the paper's power iteration on Hessian-vector products, for all vectors of all layers at once."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from triaccel_ray.measure.curvature.calls import used_parameters
from triaccel_ray.measure.curvature.objective import FoldedNorms, Method, Objective
from triaccel_ray.measure.curvature.spectrum import CurvatureEstimate, orthonormalizing, pseudo_random
from triaccel_ray.model.layers import Layer

COLD_ITERATIONS = 20
WARM_ITERATIONS = 5
"""On ResNet-18 with new samples at each measurement, 5 iterations from the last vectors leave the same median error as
10 or 20. It is 0.3%, that of TF32 convolutions. A layer whose two largest eigenvalues are close may be off by 10%."""
OVERSAMPLING = 2
"""Vectors beyond the k wanted. The k-th eigenvalue converges by its ratio to the (k + 3)-th. So a pair of nearly equal
magnitude, such as +-lambda, does not stall it."""
_BLOCK_ELEMENTS = 2**20
"""Elements of a vector converted to FP64 at once."""


class BlockPower(Method):
    """Subspace iteration with the Hessian blocks of all layers.

        U <- orth(H U),   T = U^T H U        (Tri-Accel, section 3.2, for one vector: u <- H u / |H u|)

    H u is the gradient of g^T u with respect to the layer's weights, g the gradient of the mean loss. The eigenvalues
    of T are those of H of largest magnitude. All are found together, in as many products per vector as the last one
    alone takes; deflation would find one after the other. U has k + OVERSAMPLING columns. It starts from the vectors of
    the last measurement: weights and samples have changed since, the steepest directions less so.

    With chunks of samples, every iteration recomputes their gradients: keeping the graphs of all would save no memory.
    """

    def __init__(self, layers: Sequence[Layer], top_k: int) -> None:
        self._layers, self._top_k = tuple(layers), top_k
        self._sizes = tuple(min(top_k + OVERSAMPLING, layer.num_elements) for layer in layers)
        sizes = zip(self._layers, self._sizes, strict=True)
        self.kept_bytes = sum(size * layer.num_elements * layer.weights[0].element_size() for layer, size in sizes)
        self.vectors = None
        """For each layer its vectors [min(k + 2, n), n], in its weights' dtype; updated in place once they exist."""

    def measure(
        self, objective: Objective, generator: torch.Generator, num_iterations: int | None = None
    ) -> CurvatureEstimate:
        """Returns T of the last iteration: the 20th from random vectors, or the 5th from those of the last measurement.

        A vector that is zero or not finite, because its layer had no curvature or no finite gradient, is replaced.
        """
        num_iterations = num_iterations or self._planned_iterations
        if self.vectors is None:
            self.vectors = self._drawn(generator)
        for vectors in self.vectors:
            is_sound = (torch.linalg.vector_norm(vectors, dim=1) - 1.0).abs() < 0.05  # False for NaN
            for block in vectors.split(_BLOCK_ELEMENTS, dim=1):
                anew = pseudo_random(*block.shape, like=block) * math.sqrt(3 / vectors.shape[1])  # of length 1, about
                block.copy_(torch.where(is_sound[:, None], block, anew))
        parts = objective.parts()
        gradient = LossGradient(objective, self._layers) if len(parts) == 1 else None
        for _ in range(num_iterations):
            matrices = []
            images = self._images(parts) if gradient is None else map(gradient.products, self._layers, self.vectors)
            for vectors, image in zip(self.vectors, images, strict=True):
                matrix = _products(vectors, image)
                padding = self._top_k + OVERSAMPLING - len(vectors)
                matrices.append(F.pad((matrix + matrix.T) / 2, (0, padding) * 2))
                _orthonormalize(image, vectors)
        return CurvatureEstimate(
            matrices=torch.stack([matrix.to(matrices[0].device) for matrix in matrices]),
            counts=tuple(min(self._top_k, size) for size in self._sizes),
        )

    def num_passes(self, objective: Objective, num_iterations: int | None = None) -> int:
        """Returns the number of passes: one per chunk and iteration."""
        return (num_iterations or self._planned_iterations) * len(objective.parts())

    @property
    def _planned_iterations(self) -> int:
        return COLD_ITERATIONS if self.vectors is None else WARM_ITERATIONS

    def _drawn(self, generator: torch.Generator) -> list[Tensor]:
        """Returns random orthonormal vectors for each layer, drawn on the generator's device."""
        drawn = []
        for layer, size in zip(self._layers, self._sizes, strict=True):
            like = layer.weights[0]
            shape = size, layer.num_elements
            vectors = torch.randn(shape, generator=generator, device=generator.device, dtype=like.dtype).to(like.device)
            _orthonormalize(vectors, vectors)
            drawn.append(vectors)
        return drawn

    def _images(self, parts: Sequence[Objective]) -> Sequence[Tensor]:
        """Returns H U for each layer, [k + 2, n], added up over chunks of samples."""
        assert self.vectors is not None
        sums = [torch.zeros_like(vectors) for vectors in self.vectors]
        num_samples = sum(part.num_samples for part in parts)
        for part in parts:
            gradient = LossGradient(part, self._layers)
            for layer, vectors, total in zip(self._layers, self.vectors, sums, strict=True):
                total.add_(gradient.products(layer, vectors), alpha=part.num_samples / num_samples)
            del gradient  # before the next chunk's graph is made
        return sums


class LossGradient:
    """The gradient of the mean loss with its autograd graph, for Hessian-vector products."""

    def __init__(self, objective: Objective, layers: Sequence[Layer]) -> None:
        """Runs a forward and a backward pass.

        Raises:
            ValueError: the model uses reentrant checkpointing, which hides a part of the graph.
        """
        weights = [weight for layer in layers for weight in layer.weights if weight.requires_grad]
        with _attention(), FoldedNorms():
            value = objective.value(objective.outputs())
            used_parameters(value, [])  # raises for graphs that hide weights
            gradients: Sequence[Tensor | None] = [None] * len(weights)
            if value.requires_grad:
                gradients = torch.autograd.grad(value, weights, create_graph=True, allow_unused=True)
        self._of = dict(zip(weights, gradients, strict=True))

    def products(self, layer: Layer, vectors: Tensor) -> Tensor:
        """Returns H_l u for each of the vectors u [p, n]; zero for weights in which the loss is linear."""
        return torch.stack([self._product(layer, vector) for vector in vectors])

    def _product(self, layer: Layer, u: Tensor) -> Tensor:
        parts = zip(layer.weights, torch.split(u, [weight.numel() for weight in layer.weights]), strict=True)
        # In the weight's memory format: with two formats a convolution would convert one.
        laid_out = [(w, torch.empty_like(w, requires_grad=False).copy_(part.view_as(w))) for w, part in parts]
        curved = [(gradient, part) for w, part in laid_out if (gradient := self._of.get(w)) is not None]
        curved = [(gradient, part) for gradient, part in curved if gradient.requires_grad]
        if not curved:
            return torch.zeros_like(u)
        roots, directions = zip(*curved, strict=True)
        trained = [weight for weight in layer.weights if weight.requires_grad]
        with _attention():
            found = torch.autograd.grad(roots, trained, directions, retain_graph=True, allow_unused=True)
        images = dict(zip(trained, found, strict=True))
        flat = [torch.zeros_like(w) if (image := images.get(w)) is None else image for w in layer.weights]
        return torch.cat([part.flatten() for part in flat])


def _attention() -> contextlib.AbstractContextManager[None]:
    """Attention without fused kernels, which have no second derivative; a checkpoint runs it again at each product."""
    return sdpa_kernel(SDPBackend.MATH)


def _products(some: Tensor, others: Tensor) -> Tensor:
    """Returns some @ others^T [p, p] of vectors [p, n], accumulated in FP64, `_BLOCK_ELEMENTS` of each at a time.

    FP32 products may be TF32 on a GPU, and an FP64 copy of whole vectors would be twice as large as they are.
    """
    total = some.new_zeros(len(some), len(others), dtype=torch.float64)
    for one, other in zip(some.split(_BLOCK_ELEMENTS, dim=1), others.split(_BLOCK_ELEMENTS, dim=1), strict=True):
        total.addmm_(one.double(), other.double().T)
    return total


def _orthonormalize(vectors: Tensor, out: Tensor) -> None:
    """Writes an orthonormal basis of `vectors` [p, n] into `out`, which may be the same."""
    combine = orthonormalizing(_products(vectors, vectors)).T
    for one, into in zip(vectors.split(_BLOCK_ELEMENTS, dim=1), out.split(_BLOCK_ELEMENTS, dim=1), strict=True):
        into.copy_(combine @ one.to(combine.dtype))
