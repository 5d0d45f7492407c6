"""The methods of measuring curvature as one, and a measurement by any of them captured as CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from triaccel_ray.config import CurvatureMethod
from triaccel_ray.cuda.graphs import GraphPool
from triaccel_ray.measure.curvature.gram import GramMethod
from triaccel_ray.measure.curvature.hessian import BlockPower
from triaccel_ray.measure.curvature.objective import Objective
from triaccel_ray.model.layers import Layer
from triaccel_ray.model.pytree import tensors_in

Method = GramMethod | BlockPower
"""One way to measure: `begin`, `prepare`, `advance` as often as `begin` says, `finish`."""


def method_of(layers: Sequence[Layer], name: CurvatureMethod, top_k: int) -> Method:
    """Returns the method of this name, before its first measurement."""
    return BlockPower(layers, top_k) if name == "hessian" else GramMethod(layers, name, top_k)


class Recording:
    """A method captured with static inputs; reads the model's weights where they are, so that it sees them change."""

    def __init__(self, method: Method, objective: Objective, num_iterations: int, pool: GraphPool) -> None:
        """Captures, after a pass of `method` over the same shapes; every replay overwrites the objective's tensors.

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
