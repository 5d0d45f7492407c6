"""hessian: the paper's power iteration on Hessian-vector products, all vectors of all layers at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from triaccel_ray.measure.curvature.calls import Structure, used_parameters
from triaccel_ray.measure.curvature.objective import FoldedNorms, Objective
from triaccel_ray.measure.curvature.spectrum import (
    SpectrumShape,
    orthonormalizing,
    pseudo_random,
    solver_dtype,
)
from triaccel_ray.model.layers import Layer

COLD_ITERATIONS = 20
WARM_ITERATIONS = 5
"""On ResNet-18 with other samples at each measurement, 5 iterations from the last vectors leave the same median error
(0.3%, that of TF32 convolutions) as 10 or 20; a layer whose two largest eigenvalues are close may be off by 10%."""
OVERSAMPLING = 2
"""Vectors beyond the k wanted: the k-th eigenvalue converges by the ratio to the (k + 3)-th, so that a pair of nearly
equal magnitude, +-lambda above all, does not keep it from converging."""
_BLOCK_ELEMENTS = 2**20
"""Of a vector that are in FP64 at once."""


class BlockPower:
    """Subspace iteration with the Hessian blocks of all layers.

        U <- orth(H U),   T = U^T H U        (Tri-Accel, section 3.2, for one vector: u <- H u / |H u|)

    H u is the gradient of g^T u with respect to the layer's weights, g the gradient of the mean loss. The eigenvalues
    of T are those of H of largest magnitude: found together, where deflation finds one after the other, hence in as
    many products per vector as the last one alone takes. U has k + OVERSAMPLING columns. Started from the vectors of
    the measurement before: weights and samples have changed, the steepest directions less so.

    In chunks of samples, every iteration makes their gradients anew, since the graph of all would be as large as ever.
    """

    fallbacks: Mapping[str, str] = MappingProxyType({})
    structure: Structure | None = None
    """It needs none."""
    not_capturable_because = ""

    def __init__(self, layers: Sequence[Layer], top_k: int) -> None:
        self._layers, self._top_k = tuple(layers), top_k
        self._counts = tuple(min(top_k + OVERSAMPLING, layer.num_elements) for layer in layers)
        self._parts: list[Objective] = []
        self._gradients: LossGradient | None = None
        self._matrices: Tensor | None = None
        self.vectors: list[Tensor] | None = None
        """For each layer its vectors [min(k + 2, n), n], in its weights' dtype; written in place from then on."""

    @property
    def shape(self) -> SpectrumShape:
        """Of the matrices T, FP64 [num_layers, k + 2, k + 2]."""
        wanted = tuple(min(self._top_k, count) for count in self._counts)
        return SpectrumShape(orders=self._counts, counts=wanted, top_k=self._top_k, is_semidefinite=False)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the products of all layers, which measuring in chunks adds up."""
        sizes = zip(self._layers, self._counts, strict=True)
        return sum(count * layer.num_elements * layer.weights[0].element_size() for layer, count in sizes)

    def begin(self, generator: torch.Generator) -> int:
        """Draws the vectors of the first measurement; returns how many times to `advance`."""
        if self.vectors is not None:
            return WARM_ITERATIONS
        layers = zip(self._layers, self._counts, strict=True)
        self.vectors = [start_vectors(layer, count, generator) for layer, count in layers]
        for vectors in self.vectors:
            _orthonormalize(vectors, vectors)
        return COLD_ITERATIONS

    def prepare(self, objective: Objective) -> None:
        """Makes the gradient of the mean loss, to be differentiated by `advance` until `finish`.

        A vector that has come to nothing, since its layer had no curvature or no finite gradient, starts anew.
        """
        assert self.vectors is not None
        self._parts = objective.parts()
        self._gradients = LossGradient(objective, self._layers) if len(self._parts) == 1 else None
        for vectors in self.vectors:
            is_sound = (torch.linalg.vector_norm(vectors, dim=1) - 1.0).abs() < 0.05  # False for NaN
            for block in vectors.split(_BLOCK_ELEMENTS, dim=1):
                anew = pseudo_random(*block.shape, like=block) * math.sqrt(3 / vectors.shape[1])  # of length 1, about
                block.copy_(torch.where(is_sound[:, None], block, anew))

    def advance(self) -> None:
        """Makes one iteration for every vector of every layer."""
        assert self.vectors is not None
        matrices = []
        for vectors, images in zip(self.vectors, self._images(self.vectors), strict=True):
            matrix = _products(vectors, images)
            padding = self._top_k + OVERSAMPLING - len(vectors)
            matrices.append(F.pad((matrix + matrix.T) / 2, (0, padding) * 2))
            _orthonormalize(images, vectors)
        self._matrices = torch.stack([matrix.to(matrices[0].device) for matrix in matrices])

    def abandon(self) -> None:
        """Lets go of the graph of the gradient, and of the activations that it holds."""
        self._gradients = self._matrices = None
        self._parts = []

    def finish(self) -> tuple[tuple[Tensor, ...], SpectrumShape]:
        """Returns T of the last iteration and its shape; lets go of everything else but the samples of chunks."""
        assert self._matrices is not None
        result, self._gradients, self._matrices = self._matrices, None, None
        return (result,), self.shape

    def _images(self, all_vectors: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yields H U for each layer, [k + 2, n]."""
        if self._gradients is not None:
            yield from map(self._gradients.products, self._layers, all_vectors)
            return
        sums = [torch.zeros_like(vectors) for vectors in all_vectors]
        num_samples = sum(part.num_samples for part in self._parts)
        for part in self._parts:
            gradients = LossGradient(part, self._layers)
            for layer, vectors, total in zip(self._layers, all_vectors, sums, strict=True):
                total.add_(gradients.products(layer, vectors), alpha=part.num_samples / num_samples)
            del gradients  # before the next chunk's graph is made
        yield from sums


class LossGradient:
    """The gradient of the mean loss with the graph that made it, to be differentiated once more."""

    def __init__(self, objective: Objective, layers: Sequence[Layer]) -> None:
        """Makes a forward and a backward pass.

        Raises:
            ValueError: a part of the graph is hidden in a reentrant checkpoint.
        """
        weights = [weight for layer in layers for weight in layer.weights if weight.requires_grad]
        # The fused attention kernels have no second derivative.
        with sdpa_kernel(SDPBackend.MATH), FoldedNorms():
            value = objective.value(objective.outputs())
            used_parameters(value, [])  # for its refusal of graphs that hide weights
            gradients: Sequence[Tensor | None] = [None] * len(weights)
            if value.requires_grad:
                gradients = torch.autograd.grad(value, weights, create_graph=True, allow_unused=True)
        self._of = dict(zip(weights, gradients, strict=True))

    def products(self, layer: Layer, vectors: Tensor) -> Tensor:
        """Returns H_l u for each of the vectors u [p, n]; zero in the places of weights that the loss is linear in."""
        return torch.stack([self._product(layer, vector) for vector in vectors])

    def _product(self, layer: Layer, u: Tensor) -> Tensor:
        parts = zip(layer.weights, torch.split(u, [weight.numel() for weight in layer.weights]), strict=True)
        curved = [(gradient, _laid_out(part, w)) for w, part in parts if (gradient := self._of.get(w)) is not None]
        curved = [(gradient, part) for gradient, part in curved if gradient.requires_grad]
        if not curved:
            return torch.zeros_like(u)
        roots, directions = zip(*curved, strict=True)
        images = torch.autograd.grad(roots, layer.weights, directions, retain_graph=True, allow_unused=True)
        flat = [torch.zeros_like(w) if image is None else image for w, image in zip(layer.weights, images, strict=True)]
        return torch.cat([part.flatten() for part in flat])


def _products(some: Tensor, others: Tensor) -> Tensor:
    """Returns some others^T [p, p] of vectors [p, n], added up in FP64 (FP32 on MPS), a block of them at a time.

    Their FP32 may be TF32 on a GPU; all of them in FP64 would be twice as large as they are.
    """
    dtype = solver_dtype(some)
    total = some.new_zeros(len(some), len(others), dtype=dtype)
    for one, other in zip(some.split(_BLOCK_ELEMENTS, dim=1), others.split(_BLOCK_ELEMENTS, dim=1), strict=True):
        total.addmm_(one.to(dtype), other.to(dtype).T)
    return total


def _orthonormalize(vectors: Tensor, out: Tensor) -> None:
    """Writes an orthonormal basis of `vectors` [p, n] into `out`, which may be the same."""
    combine = orthonormalizing(_products(vectors, vectors)).T
    for one, into in zip(vectors.split(_BLOCK_ELEMENTS, dim=1), out.split(_BLOCK_ELEMENTS, dim=1), strict=True):
        into.copy_(combine @ one.to(combine.dtype))


def _laid_out(flat: Tensor, weight: Tensor) -> Tensor:
    """Returns the vector in the weight's shape and memory format: a convolution meeting two formats converts one."""
    return torch.empty_like(weight, requires_grad=False).copy_(flat.view_as(weight))


def start_vectors(layer: Layer, count: int, generator: torch.Generator) -> Tensor:
    """Returns `count` normal vectors of n elements, drawn where the generator lives."""
    weight = layer.weights[0]
    drawn = torch.randn(count, layer.num_elements, generator=generator, device=generator.device, dtype=weight.dtype)
    return drawn.to(weight.device)
