"""fisher and ggn as measurements that are made again and again: what was found of the model's structure is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from triaccel_ray.layers import Layer
from triaccel_ray.measure.curvature.fisher import fisher_grams, gradient_noise
from triaccel_ray.measure.curvature.ggn import ggn_grams
from triaccel_ray.measure.curvature.gram import Grams
from triaccel_ray.measure.curvature.objective import Objective
from triaccel_ray.measure.curvature.spectrum import SpectrumShape, reduce_matrices
from triaccel_ray.measure.curvature.ways import Structure


class GramMethod:
    """One forward and one backward pass, and the Gram matrices that they allow."""

    def __init__(self, layers: Sequence[Layer], method: Literal["fisher", "ggn"], top_k: int) -> None:
        self._layers, self._method, self._top_k = tuple(layers), method, top_k
        self._results: tuple[Tensor, ...] = ()
        self._shape: SpectrumShape | None = None
        self.structure: Structure | None = None
        """What was found at the first pass; None before it."""

    @property
    def fallback_layers(self) -> tuple[str, ...]:
        """Names of the layers that take one pass of the whole model per sample."""
        return () if self.structure is None else self.structure.fallback_layers

    def begin(self, generator: torch.Generator) -> int:
        """Returns how many iterations follow: none."""
        return 0

    def prepare(self, objective: Objective) -> None:
        """Measures everything.

        Raises:
            StructureChangedError: the model takes another course than at the first pass.
            Exception: whatever a module raises that works with `torch.func` no longer.
        """
        grams = self._grams(objective)
        self.structure = grams.structure
        num_samples, num_columns = objective.num_samples, len(grams.matrices[0])
        reduced = reduce_matrices(grams.matrices, num_samples, self._top_k)
        self._results = (reduced, *(gradient_noise(grams) if self._method == "fisher" else ()))
        self._shape = SpectrumShape(
            orders=(reduced.shape[1],) * len(self._layers),
            counts=tuple(min(num_columns, layer.num_elements, self._top_k) for layer in self._layers),
            top_k=self._top_k,
        )

    def advance(self) -> None:
        """Does nothing: there is no iteration."""

    def abandon(self) -> None:
        """Lets go of results that nobody will ask for."""
        self._results = ()

    def finish(self) -> tuple[tuple[Tensor, ...], SpectrumShape]:
        """Returns the reduced matrices and, for fisher, the two moments of the gradient; lets go of everything."""
        assert self._shape is not None
        results, self._results = self._results, ()
        return results, self._shape

    def _grams(self, objective: Objective) -> Grams:
        grams_of = fisher_grams if self._method == "fisher" else ggn_grams
        return grams_of(objective, self._layers, self.structure)
