"""Random numbers of recomputed regions in captured steps."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import NamedTuple

import torch

from triaccel_ray.cuda.graphs import Graph


class _Call(NamedTuple):
    """What one call drew, in Philox offsets."""

    offset: int
    """From the start of the pass."""
    amount: int


class _Pass(NamedTuple):
    calls: tuple[_Call, ...]
    """Recomputed calls, in order."""
    amount: int
    """What all of the pass drew."""


class RecomputeRNG:
    """Gives recomputed calls in captured steps the random numbers of their first execution.

    A CUDA graph cannot set the GPU's generator back. So the recomputation of each call that draws uses a generator of
    its own, with the same seed. Before a replay, that one is set to the offset at which the call will start. Offsets
    are recorded in the eager pass. So all numbers are those of steps that recompute nothing. Each of these generators
    takes two short kernels before a replay. Nothing happens on a CPU.
    """

    def __init__(self, generator: torch.Generator | None) -> None:
        """Takes the GPU's default generator, None on a CPU."""
        self._generator = generator
        self._passes: dict[Hashable, _Pass] = {}
        self._own: list[torch.Generator] = []
        """Generators of recomputations, which passes of all kinds share."""
        self._calls: list[_Call] = []
        self._waiting: Iterator[torch.Generator | None] = iter(())
        self._start = 0

    @contextlib.contextmanager
    def recording_pass(self, kind: Hashable) -> Iterator[None]:
        """Returns a context for an eager pass; passes of one kind make the same calls."""
        if self._generator is None:
            yield
            return
        self._calls, self._start = [], self._generator.get_offset()
        yield
        self._passes[kind] = _Pass(tuple(self._calls), self._generator.get_offset() - self._start)

    @contextlib.contextmanager
    def recording_call(self) -> Iterator[None]:
        """Returns a context for the first execution of a recomputed call in an eager pass."""
        if self._generator is None:
            yield
            return
        before = self._generator.get_offset()
        yield
        self._calls.append(_Call(before - self._start, self._generator.get_offset() - before))

    def generators(self, kind: Hashable) -> list[torch.Generator]:
        """Returns the generators to register with a graph, and prepares for the capture of a pass of this kind."""
        each = self._of_calls(kind)
        self._waiting = iter(each)
        return [generator for generator in each if generator is not None]

    def next_generator(self) -> torch.Generator | None:
        """Returns the generator for the recomputation of the next call while captured; None if it draws nothing.

        Raises:
            RuntimeError: the eager pass made fewer calls.
        """
        try:
            return next(self._waiting)
        except StopIteration:
            raise RuntimeError("a captured step recomputes a call that no eager step has made before") from None

    @contextlib.contextmanager
    def using(self, generator: torch.Generator | None) -> Iterator[None]:
        """Returns a context in which the GPU draws from `generator`, if given."""
        if generator is None or self._generator is None:
            yield
            return
        state = self._generator.graphsafe_get_state()
        self._generator.graphsafe_set_state(generator)
        try:
            yield
        finally:
            self._generator.graphsafe_set_state(state)

    def replay(self, graph: Graph, kind: Hashable) -> bool:
        """Replays a graph; returns whether it drew as many random numbers as the eager pass. If not, some differed.

        Code may draw more while it is captured. A recomputation may end early, before the last of its call's draws.
        """
        if self._generator is None:
            graph.replay()
            return True
        (calls, amount), generators = self._passes[kind], self._of_calls(kind)
        start, seed = self._generator.get_offset(), self._generator.initial_seed()
        drawing = [(call, each) for call, each in zip(calls, generators, strict=True) if each is not None]
        for call, generator in drawing:
            if generator.initial_seed() != seed:
                generator.manual_seed(seed)
            generator.set_offset(start + call.offset)
        graph.replay()
        is_within = all(generator.get_offset() <= start + sum(call) for call, generator in drawing)
        return is_within and self._generator.get_offset() == start + amount

    def _of_calls(self, kind: Hashable) -> list[torch.Generator | None]:
        """Returns the generator of each recomputed call's recomputation; None for calls that draw nothing."""
        calls = self._passes[kind].calls if kind in self._passes else ()
        if self._generator is not None:
            num_drawing = sum(call.amount > 0 for call in calls)
            self._own += [self._generator.clone_state() for _ in range(num_drawing - len(self._own))]
        own = iter(self._own)
        return [next(own) if call.amount else None for call in calls]
