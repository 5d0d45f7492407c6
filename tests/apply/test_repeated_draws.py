"""Random numbers of recomputed calls: what twins of a generator are set to, on the CPU."""

from typing import Any

import pytest
import torch

from triaccel_ray.apply.repeated_draws import RepeatedDraws


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


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> FakeGenerator:
    generator = FakeGenerator(offset=100)
    monkeypatch.setattr(torch.cuda, "default_generators", [generator])
    return generator


AMOUNTS = (8, 0, 4)
"""What each of the recomputed calls draws."""


def eager(draws: RepeatedDraws, own: Any) -> None:
    with draws.of_pass("kind", is_captured=False):
        own.draw(16)  # outside of the regions
        for amount in AMOUNTS:
            with draws.of_call():
                own.draw(amount)


def replay(draws: RepeatedDraws, own: Any, extra: int = 0) -> tuple[list[Any], list[Any], bool]:
    """What the calls draw, what their recomputations draw in the order of the calls, and whether the twins hold."""
    again: list[Any] = []
    with draws.of_replay("kind") as holds, draws.of_pass("kind", is_captured=True):
        own.draw(16)
        found = [(own.draw(amount), draws.next_twin()) for amount in AMOUNTS]
        for amount, (_, twin) in reversed(list(zip(AMOUNTS, found, strict=True))):
            with draws.drawing_from(twin):
                again.insert(0, own.draw(amount))
        own.draw(extra)
    drawing = [index for index, amount in enumerate(AMOUNTS) if amount]
    return [found[index][0] for index in drawing], [again[index] for index in drawing], holds[0]


def test_recomputations_draw_what_the_calls_drew_at_every_replay(own: FakeGenerator) -> None:
    draws = RepeatedDraws(torch.device("cuda", 0))
    eager(draws, own)
    assert len(draws.twins("kind")) == 2
    assert draws.twins("kind") == draws.twins("kind")
    seen = []
    for _ in range(3):
        found, again, holds = replay(draws, own)
        assert (found, holds) == (again, True)
        seen += found
    own.manual_seed(11)  # a run that goes on from a checkpoint
    found, again, holds = replay(draws, own)
    assert (found, holds) == (again, True)
    assert len({*seen, *found}) == 8


def test_a_replay_that_draws_something_else_is_noticed(own: FakeGenerator) -> None:
    draws = RepeatedDraws(torch.device("cuda", 0))
    eager(draws, own)
    assert not replay(draws, own, extra=4)[2]
    assert replay(draws, own)[2]


def test_without_an_eager_pass_of_the_kind_there_is_nothing_to_draw_from(own: FakeGenerator) -> None:
    draws = RepeatedDraws(torch.device("cuda", 0))
    with draws.of_pass("kind", is_captured=True), pytest.raises(RuntimeError, match="without an eager one before"):
        draws.next_twin()
