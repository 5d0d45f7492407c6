"""Has recomputations in a captured step draw the same random numbers as the calls that they repeat."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import NamedTuple

import torch


class _Draws(NamedTuple):
    """Random numbers of one call, in Philox offsets."""

    offset: int
    """From the start of the pass."""
    amount: int


class RepeatedDraws:
    """Gives each recomputed call of a captured step that draws random numbers a generator for its recomputation.

    A graph cannot set the GPU's generator back. So the recomputation uses a twin of it: same seed, and before each
    replay set to where the generator itself will be at that call. The distance from the start of the pass is known from
    the eager pass before. So all numbers are those of steps that recompute nothing. On a CPU nothing happens.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._drawn: dict[Hashable, list[_Draws]] = {}
        """Kind of pass -> what each recomputed call drew in the last eager one."""
        self._totals: dict[Hashable, int] = {}
        """Kind of pass -> what all of it drew."""
        self._twins: list[torch.Generator] = []
        self._kind: Hashable = None
        self._start = self._num_calls = 0

    @property
    def _own(self) -> torch.Generator | None:
        if self._device.type != "cuda":
            return None
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        own: torch.Generator = torch.cuda.default_generators[index]
        return own

    @contextlib.contextmanager
    def of_pass(self, kind: Hashable, *, is_captured: bool) -> Iterator[None]:
        """Returns a context for one pass; those of one kind make the same calls."""
        self._kind, self._num_calls = kind, 0
        if (own := self._own) is None or is_captured:
            yield
            return
        self._drawn[kind], self._start = [], own.get_offset()
        yield
        self._totals[kind] = own.get_offset() - self._start

    @contextlib.contextmanager
    def of_call(self) -> Iterator[None]:
        """Returns a context that notes what a recomputed call in an eager pass draws."""
        if (own := self._own) is None:
            yield
            return
        before = own.get_offset()
        yield
        self._drawn[self._kind].append(_Draws(before - self._start, own.get_offset() - before))

    def next_twin(self) -> torch.Generator | None:
        """Returns the generator for the recomputation of the next call in a captured pass; None if it draws nothing."""
        if self._kind not in self._drawn:
            raise RuntimeError("a step with recomputed regions is captured without an eager one before")
        twins, number = self._twins_of(self._kind), self._num_calls
        self._num_calls += 1
        return twins[number] if number < len(twins) else None

    @contextlib.contextmanager
    def drawing_from(self, twin: torch.Generator | None) -> Iterator[None]:
        """Returns a context in which the GPU's generator is in the state of `twin`, and advances it."""
        if twin is None or (own := self._own) is None:
            yield
            return
        state = own.graphsafe_get_state()
        own.graphsafe_set_state(twin)
        try:
            yield
        finally:
            own.graphsafe_set_state(state)

    def twins(self, kind: Hashable) -> list[torch.Generator]:
        """Returns the twins of a kind of pass, to register with its graph before the capture."""
        return [twin for twin in self._twins_of(kind) if twin is not None]

    @contextlib.contextmanager
    def of_replay(self, kind: Hashable) -> Iterator[list[bool]]:
        """Returns a context for one replay, and afterwards, as a list of one, whether it drew what the eager pass did.

        What draws something else, because its code asks whether it is captured, is recomputed with other numbers.
        """
        holds = [True]
        twins, own = self._twins_of(kind), self._own
        if own is None or not any(twins):
            yield holds
            return
        start, drawn = own.get_offset(), self._drawn[kind]
        for twin, draws in zip(twins, drawn, strict=True):
            if twin is not None:
                if twin.initial_seed() != own.initial_seed():
                    twin.manual_seed(own.initial_seed())
                twin.set_offset(start + draws.offset)
        yield holds
        ends = [
            twin is None or twin.get_offset() == start + sum(draws) for twin, draws in zip(twins, drawn, strict=True)
        ]
        holds[0] = all(ends) and own.get_offset() == start + self._totals[kind]

    def _twins_of(self, kind: Hashable) -> list[torch.Generator | None]:
        """Returns the twin of each recomputed call; None for calls that draw nothing."""
        drawn = self._drawn.get(kind, [])
        num_drawing = sum(draws.amount > 0 for draws in drawn)
        if (own := self._own) is not None:
            self._twins += [own.clone_state() for _ in range(num_drawing - len(self._twins))]
        twins = iter(self._twins)
        return [next(twins) if draws.amount else None for draws in drawn]
