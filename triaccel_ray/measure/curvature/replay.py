"""A whole measurement as CUDA graphs: a replay costs the host a few calls, whatever the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from triaccel_ray.graphs import capturing, sync_debug_mode
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

    def __init__(self, method: Method, objective: Objective, num_iterations: int, pool: Any) -> None:
        """Captures; everything it needs must have run before, so that nothing is initialised inside.

        Args:
            method: after a pass over the same shapes.
            objective: its inputs and targets are overwritten by every replay.
            num_iterations: of the pass before; 0: the method has none.
            pool: `torch.cuda.graph_pool_handle()` of the memory to use, which other graphs may share.

        Raises:
            RuntimeError: an operation cannot be captured.
        """
        self._tensors = [*tensors_in(objective.inputs), *tensors_in(objective.targets)]
        self._once = _capture(lambda: method.prepare(objective), pool)
        self._again = _capture(method.advance, pool) if num_iterations else None
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


def no_waiting() -> AbstractContextManager[None]:
    """Returns a context in which PyTorch raises RuntimeError where the host would wait for the device.

    A capture broken off by such a wait leaves the default generator unusable; so this is found out before.
    """
    return sync_debug_mode("error")


def _capture(work: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    current = torch.cuda.current_stream()
    with capturing(graph, pool, None if current == torch.cuda.default_stream() else current):
        work()
    return graph
