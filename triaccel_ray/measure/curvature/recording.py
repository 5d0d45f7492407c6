"""A whole measurement as CUDA graphs: a replay costs the host a few calls, whatever the model."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from triaccel_ray.graphs import GraphPool
from triaccel_ray.measure.curvature.objective import Objective
from triaccel_ray.measure.curvature.spectrum import SpectrumShape
from triaccel_ray.structure import tensors_in


class Method(Protocol):
    """One way to measure: `prepare` once, `advance` as often as `begin` says, `finish`."""

    @property
    def fallback_layers(self) -> tuple[str, ...]:
        """Names of the layers that take one pass of the whole model per sample."""

    def begin(self, generator: torch.Generator) -> int:
        """Makes what has to exist before anything is measured; returns the number of iterations."""

    def prepare(self, objective: Objective) -> None:
        """Does what is done once per measurement."""

    def advance(self) -> None:
        """Makes one iteration."""

    def finish(self) -> tuple[tuple[Tensor, ...], SpectrumShape]:
        """Returns the results and lets go of everything else."""

    def abandon(self) -> None:
        """Lets go of everything that an attempt which failed has left."""


class Recording:
    """A method captured with static inputs; reads the model's weights where they are, so that it sees them change."""

    def __init__(self, method: Method, objective: Objective, num_iterations: int, pool: GraphPool) -> None:
        """Captures; everything it needs must have run before, so that nothing is initialised inside.

        Args:
            method: after a pass over the same shapes.
            objective: its inputs and targets are overwritten by every replay.
            num_iterations: of the pass before; 0: the method has none.
            pool: of the memory to use, which other graphs may share.

        Raises:
            Exception: see `GraphPool.capture`; `method` has then to be abandoned.
        """
        self._tensors = [*tensors_in(objective.inputs), *tensors_in(objective.targets)]
        self._once = pool.capture(lambda: method.prepare(objective))
        self._again = pool.capture(method.advance) if num_iterations else None
        self._results, self.shape = method.finish()

    def replay(self, inputs: Any, targets: Any, num_iterations: int) -> tuple[Tensor, ...]:
        """Returns the results for other samples, in memory of their own: the graphs' may be shared."""
        for static, given in zip(self._tensors, [*tensors_in(inputs), *tensors_in(targets)], strict=True):
            static.copy_(given, non_blocking=True)
        self._once.replay()
        if self._again is not None:
            for _ in range(num_iterations):
                self._again.replay()
        return tuple(result.clone() for result in self._results)
