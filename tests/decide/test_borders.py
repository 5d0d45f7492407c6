"""Which demotions pay for their borders: hand-worked cases, and what holds for all plans."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.decide.build import BF16, FP16, FP32
from tests.decide.layer_costs import DEAR, HALF, WORSE, cost_of, known_costs, milliseconds
from triaccel_ray.decide.borders import Grant, Prediction, Wish, grant, predict
from triaccel_ray.plan import Precision
from triaccel_ray.signals import LayerCost

LEVELS = {"h": FP16, "b": BF16, "f": FP32}
LETTERS = {level: letter for letter, level in LEVELS.items()}


def wishes_of(in_force: str, wanted: str, *costs: LayerCost | None, supported=tuple(Precision)) -> list[Wish]:
    """One letter a layer; the last cost is repeated."""
    costs = (*costs, *[costs[-1]] * len(in_force))
    return [
        Wish(name=str(index), in_force=LEVELS[old], wanted=LEVELS[new], cost=cost, supported=supported)
        for index, (old, new, cost) in enumerate(zip(in_force, wanted, costs, strict=False))
    ]


def letters(granted: Grant) -> str:
    return "".join(LETTERS[level] for level in granted.precision)


@pytest.mark.parametrize(
    ("in_force", "wanted", "costs", "expected", "why"),
    [
        ("fff", "fbf", [HALF], "fbf", "saves 0.5, two borders 0.4"),
        ("fff", "fbf", [DEAR], "fff", "saves 0.5, two borders 0.6"),
        ("fff", "ffb", [DEAR], "ffb", "the last layer has one border"),
        ("fff", "bff", [DEAR], "bff", "the first layer has one border, at its neighbour"),
        ("ffff", "fbbf", [DEAR], "fbbf", "two neighbours save 1.0 for the same two borders"),
        ("bfb", "bbb", [DEAR], "bbb", "takes two borders away"),
        ("bfb", "bbb", [DEAR, WORSE, DEAR], "bfb", "slower by 1.0, two borders give back 0.6"),
        ("fffff", "fbfbf", [DEAR], "fffff", "each alone has two borders"),
        ("fffff", "bbbbb", [DEAR], "bbbbb", "no border at all"),
        ("ffff", "bhbh", [HALF], "bhbh", "borders removed one after the other"),
        ("fff", "bbb", [DEAR, WORSE, DEAR], "bfb", "nothing as a whole, both ends 0.4"),
        ("fffffff", "fbbbbbf", [DEAR, DEAR, DEAR, WORSE, DEAR], "fbbbbbf", "the whole pays 0.4, so the whole goes"),
        ("ffffff", "fbbhhf", [cost_of(0.5, 0.5, 1.0, 0.6)], "fbbhhf", "each pair loses 0.2, both together gain 0.2"),
        ("fff", "fbf", [HALF, cost_of(0.5, 1.0, 1.0, 0.2), HALF], "fff", "nothing saved"),
        ("fff", "fff", [DEAR], "fff", "nothing wanted"),
        ("fff", "fbf", [None], "fbf", "nothing known, nothing refused"),
        ("fff", "fbf", [DEAR, None, DEAR], "fbf", "unknown itself"),
        (
            "fff",
            "fbf",
            [DEAR, LayerCost(name="", compute_ms={FP32: 1.0}, border_ms=9.0), DEAR],
            "fbf",
            "no BF16 figure",
        ),
    ],
)
def test_demotions_that_pay(in_force, wanted, costs, expected, why):
    granted = grant(wishes_of(in_force, wanted, *costs))
    assert letters(granted) == expected
    above = {str(index) for index, (now, end) in enumerate(zip(letters(granted), wanted, strict=True)) if now != end}
    assert set(granted.refused) == above


@pytest.mark.parametrize(
    ("in_force", "wanted", "costs", "expected"),
    [
        ("bbb", "fbf", [DEAR], "fff"),  # both neighbours promoted
        ("bbf", "fbf", [DEAR], "fff"),  # one of them now
        ("bbb", "fbf", [HALF], "fbf"),  # saves more than its borders
        ("bbbb", "fbbf", [DEAR], "fbbf"),  # two are no island
        ("bbb", "bbf", [DEAR], "bbf"),  # the end of the model is no neighbour
        ("hhb", "fhb", [cost_of(0.5, 0.6, 1.0, 0.3)], "fbb"),  # up to the lower neighbour takes one border away
        ("fbf", "fbf", [DEAR], "fbf"),  # an island, but nobody was promoted
        ("bbb", "fbf", [DEAR, None, DEAR], "fbf"),  # nothing is asked of a layer that is not known
        ("bbb", "fhf", [DEAR], "fff"),  # what wanted to go down goes up
        ("bbb", "fff", [WORSE], "fff"),
        ("bbb", "fff", [cost_of(0.1, 0.1, 9.0, 9.0)], "fff"),
        ("hbh", "bff", [cost_of(0.1, 0.1, 9.0, 9.0)], "bff"),
    ],
)
def test_promotions_are_made_and_islands_follow(in_force, wanted, costs, expected):
    assert letters(grant(wishes_of(in_force, wanted, *costs))) == expected


def test_an_island_goes_no_higher_than_it_can():
    wishes = wishes_of("hhb", "fhb", cost_of(0.5, 0.6, 1.0, 0.3), supported=(FP16, FP32))
    assert letters(grant(wishes)) == "fhb"


def test_what_is_refused_says_what_it_would_bring():
    granted = grant(wishes_of("ffff", "fbbf", cost_of(0.9, 0.9, 1.0, 0.25)))
    (first, second) = granted.refused.values()
    assert first is second
    assert (first.saving_ms, first.border_ms, first.num_layers) == (pytest.approx(0.2), 0.5, 2)
    assert not first.pays
    assert not Prediction(saving_ms=0.1 + 0.2, border_ms=0.3, num_layers=1).pays  # a rounding's worth


levels = st.sampled_from(Precision)
costs = st.none() | st.builds(cost_of, milliseconds, milliseconds, milliseconds, st.floats(0.0, 0.5))


@st.composite
def plans(draw: st.DrawFn, costs: st.SearchStrategy[LayerCost | None] = costs) -> list[Wish]:
    rows = draw(st.lists(st.tuples(levels, levels, costs), min_size=1, max_size=7))
    return [Wish(name=str(i), in_force=old, wanted=new, cost=cost) for i, (old, new, cost) in enumerate(rows)]


def step_ms(wishes: list[Wish], precision: tuple[Precision, ...]) -> float:
    """The whole step's time, counted afresh."""
    compute = sum(w.cost.compute_ms[level] for w, level in zip(wishes, precision, strict=True) if w.cost is not None)
    borders = zip(wishes[1:], precision[:-1], precision[1:], strict=True)
    return compute + sum(w.border_ms for w, before, level in borders if before is not level)


@given(plans())
def test_a_promotion_is_never_refused_and_nothing_falls_below_its_wish(wishes):
    for wish, level in zip(wishes, grant(wishes).precision, strict=True):
        assert level.rank >= wish.wanted.rank


@given(plans(known_costs))
def test_demotions_and_islands_never_make_a_step_longer(wishes):
    granted = grant(wishes)
    promoted = tuple(max(wish.in_force, wish.wanted, key=lambda level: level.rank) for wish in wishes)
    assert step_ms(wishes, granted.precision) <= step_ms(wishes, promoted) + 1e-9


@given(plans(known_costs))
def test_no_set_of_refused_demotions_would_pay(wishes):
    granted = grant(wishes)
    now = step_ms(wishes, granted.precision)
    choices = [
        {level, wish.wanted} if wish.wanted.rank < level.rank else {level}
        for wish, level in zip(wishes, granted.precision, strict=True)
    ]
    assert min(step_ms(wishes, precision) for precision in product(*choices)) >= now - 1e-8


@given(plans(known_costs))
def test_a_prediction_is_the_difference_of_two_steps(wishes):
    old, new = tuple(w.in_force for w in wishes), tuple(w.wanted for w in wishes)
    for first in range(len(wishes)):
        for last in range(first + 1, len(wishes) + 1):
            mixed = (*old[:first], *new[first:last], *old[last:])
            told = predict(wishes, old, first, new[first:last])
            expected = step_ms(wishes, old) - step_ms(wishes, mixed)
            assert told.saving_ms - told.border_ms == pytest.approx(expected, abs=1e-9)


@given(st.lists(known_costs, min_size=1, max_size=8))
def test_a_uniform_wish_is_granted_as_a_whole_when_its_sum_pays(costs):
    wishes = [Wish(name=str(i), in_force=BF16, wanted=FP16, cost=cost) for i, cost in enumerate(costs)]
    saving = sum(cost.compute_ms[BF16] - cost.compute_ms[FP16] for cost in costs)
    if saving > 1e-8:
        assert set(grant(wishes).precision) == {FP16}


@given(plans())
def test_constant_wishes_come_to_rest_at_once(wishes):
    first = grant(wishes)
    again = [
        Wish(name=wish.name, in_force=level, wanted=wish.wanted, cost=wish.cost)
        for wish, level in zip(wishes, first.precision, strict=True)
    ]
    assert grant(again) == first


@given(plans(st.none()))
def test_without_costs_every_wish_is_granted(wishes):
    assert grant(wishes) == Grant(precision=tuple(wish.wanted for wish in wishes))
