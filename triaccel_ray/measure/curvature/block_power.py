"""Power iteration on several vectors of all layers at once, which go on from one measurement to the next."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from triaccel_ray.layers import Layer
from triaccel_ray.measure.curvature.hessian import Slopes, block_product, slope_graph, start_vectors
from triaccel_ray.measure.curvature.objective import Objective
from triaccel_ray.measure.curvature.spectrum import SpectrumShape, orthonormal, pseudo_random

COLD_ITERATIONS = 20
WARM_ITERATIONS = 5
"""On ResNet-18 with other samples at each measurement, 5 iterations from the last vectors leave the same median error
(0.3%, that of TF32 convolutions) as 10 or 20; a layer whose two largest eigenvalues are close may be off by 10%."""


class BlockPower:
    """Subspace iteration with the Hessian blocks of all layers.

        U <- orth(H U),   T = U^T H U

    The eigenvalues of T [k, k] are those of H of largest magnitude: found together, where deflation finds one after
    the other, hence in as many products per vector as the last one alone takes. For k = 1 it is the paper's power
    iteration. Started from the vectors of the measurement before: weights and samples have changed, the steepest
    directions less so.
    """

    fallback_layers: tuple[str, ...] = ()

    def __init__(self, layers: Sequence[Layer], top_k: int) -> None:
        self._layers, self._top_k = tuple(layers), top_k
        self._slopes: Slopes | None = None
        self._matrices: Tensor | None = None
        self.vectors: list[Tensor] | None = None
        """For each layer its vectors [min(k, n), n], in its weights' dtype; written in place from then on."""

    def begin(self, generator: torch.Generator) -> int:
        """Draws the vectors of the first measurement; returns how many times to `advance`."""
        if self.vectors is not None:
            return WARM_ITERATIONS
        self.vectors = [start_vectors(layer, self._top_k, generator) for layer in self._layers]
        for vectors in self.vectors:
            vectors.copy_(orthonormal(vectors.double().T.unsqueeze(0))[0].T)
        return COLD_ITERATIONS

    def prepare(self, objective: Objective) -> None:
        """Makes the gradient of the mean loss, to be differentiated by `advance` until `finish`.

        A vector that has come to nothing, since its layer had no curvature or no finite gradient, starts anew.
        """
        assert self.vectors is not None
        self._slopes = slope_graph(objective, self._layers)
        for vectors in self.vectors:
            is_sound = (vectors.double().square().sum(dim=1) - 1.0).abs() < 0.1  # False for NaN
            anew = F.normalize(pseudo_random(*vectors.shape, like=vectors), dim=1)
            vectors.copy_(torch.where(is_sound[:, None], vectors, anew))

    def advance(self) -> None:
        """Makes one iteration for every vector of every layer."""
        assert self._slopes is not None
        assert self.vectors is not None
        matrices = []
        for layer, vectors in zip(self._layers, self.vectors, strict=True):
            product = block_product(layer, self._slopes)
            # FP64 for the few operations between products: their FP32 may be less on a GPU, and k columns cost nothing.
            images = torch.stack([product(vector) for vector in vectors]).double()
            matrix = vectors.double() @ images.T
            matrices.append(F.pad((matrix + matrix.T) / 2, (0, self._top_k - len(vectors)) * 2))
            vectors.copy_(orthonormal(images.T.unsqueeze(0))[0].T)
        self._matrices = torch.stack([matrix.to(matrices[0].device) for matrix in matrices])

    def abandon(self) -> None:
        """Lets go of the graph of the gradient, and of the activations that it holds."""
        self._slopes = self._matrices = None

    def finish(self) -> tuple[tuple[Tensor, ...], SpectrumShape]:
        """Returns T of the last iteration, FP64 [num_layers, k, k], and its shape; lets go of everything else."""
        assert self._matrices is not None
        result, self._slopes, self._matrices = self._matrices, None, None
        counts = tuple(min(self._top_k, layer.num_elements) for layer in self._layers)
        shape = SpectrumShape(orders=counts, counts=counts, top_k=self._top_k, is_semidefinite=False)
        return (result,), shape
