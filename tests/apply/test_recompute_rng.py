"""Random numbers of recomputed calls: what their generators are set to, on the CPU."""

from contextlib import suppress
from typing import Any

import pytest

from triaccel_ray.apply.recompute_rng import RecomputeRNG


class FakeGenerator:
    """Counts what is drawn, as the generator of a GPU does; its state may be another one's."""

    def __init__(self, seed: int = 7, offset: int = 0) -> None:
        self.state = {"seed": seed, "offset": offset}

    def draw(self, amount: int) -> tuple[int, int]:
        """The numbers are known by the seed and where they begin."""
        self.state["offset"] += amount
        return self.state["seed"], self.state["offset"] - amount

    def initial_seed(self) -> int:
        return self.state["seed"]

    def manual_seed(self, seed: int) -> None:
        self.state.update(seed=seed, offset=0)

    def get_offset(self) -> int:
        return self.state["offset"]

    def set_offset(self, offset: int) -> None:
        self.state["offset"] = offset

    def clone_state(self) -> "FakeGenerator":
        return FakeGenerator(**self.state)

    def graphsafe_get_state(self) -> "FakeGenerator":
        held = FakeGenerator()
        held.state = self.state
        return held

    def graphsafe_set_state(self, other: "FakeGenerator") -> None:
        self.state = other.state


AMOUNTS = (8, 0, 4)
"""What each of the recomputed calls draws."""


def recorded(generator: FakeGenerator) -> RecomputeRNG:
    """After an eager pass, and before it one that failed."""
    rng = RecomputeRNG(generator)  # type: ignore[arg-type]
    with suppress(ZeroDivisionError), rng.recording_pass("kind"), rng.recording_call():
        raise ZeroDivisionError
    with rng.recording_pass("kind"):
        generator.draw(16)  # outside of the regions
        for amount in AMOUNTS:
            with rng.recording_call():
                generator.draw(amount)
    return rng


class FakeGraph:
    """Draws what the eager pass did, and again in backward order; `early` ends each recomputation before its draws."""

    def __init__(self, rng: RecomputeRNG, generator: Any, *, extra: int = 0, early: bool = False) -> None:
        self.registered = rng.generators("kind")
        self.found: list[Any] = []
        self.again: list[Any] = []
        self._own, self._rng, self._extra, self._early = generator, rng, extra, early
        self._generators = [rng.next_generator() for _ in AMOUNTS]

    def replay(self) -> None:
        self._own.draw(16)
        self.found = [self._own.draw(amount) for amount in AMOUNTS]
        self.again = []
        for amount, generator in reversed(list(zip(AMOUNTS, self._generators, strict=True))):
            with self._rng.using(generator):
                self.again.insert(0, self._own.draw(0 if self._early else amount))
        self._own.draw(self._extra)


def test_recomputations_draw_what_the_calls_drew_at_every_replay() -> None:
    generator = FakeGenerator(offset=100)
    rng = recorded(generator)
    graph, seen = FakeGraph(rng, generator), set()
    assert len(graph.registered) == 2
    for seed in (7, 7, 11):  # the last as in a run that goes on from a checkpoint
        if generator.initial_seed() != seed:
            generator.manual_seed(seed)
        assert rng.replay(graph, "kind")
        assert (graph.found[0], graph.found[2]) == (graph.again[0], graph.again[2])
        seen.update(graph.found)
    assert len(seen) == 6
    assert rng.generators("kind") == graph.registered


@pytest.mark.parametrize(("options", "matches"), [({"extra": 4}, False), ({"early": True}, True)])
def test_a_replay_that_draws_something_else_is_noticed(options: Any, matches: bool) -> None:
    generator = FakeGenerator()
    rng = recorded(generator)
    assert rng.replay(FakeGraph(rng, generator, **options), "kind") == matches


def test_a_call_that_no_eager_pass_has_made_has_no_generator() -> None:
    rng = recorded(FakeGenerator())
    assert rng.generators("another kind") == []
    with pytest.raises(RuntimeError, match="no eager step has made before"):
        rng.next_generator()
