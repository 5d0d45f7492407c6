from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.service.records import run_of
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.runs.objective import Figures, Objective, ObjectiveName

PERCENT = st.floats(0.0, 100.0)
FIGURES = st.builds(
    Figures, metric=PERCENT, seconds=st.floats(1e-4, 1e6), peak_gb=st.floats(1e-3, 1e3), score=st.floats(0.0, 1e6)
)
OBJECTIVE = st.builds(
    Objective,
    name=st.sampled_from(get_args(ObjectiveName)),
    margin=st.floats(0.0, 100.0),
    reference=st.lists(PERCENT, max_size=5).map(tuple),
)
EPOCH = st.integers(1, 9)


def figures(**changes: float) -> Figures:
    return Figures(**{"metric": 90.0, "seconds": 4.0, "peak_gb": 0.5, "score": 45.0, **changes})


@pytest.mark.parametrize(
    ("accuracy", "margin", "hopeless"), [(88.0, 1.0, False), (87.9, 1.0, True), (86.0, 2.0, False), (85.9, 2.0, True)]
)
def test_an_accuracy_is_hopeless_beyond_a_second_margin(accuracy: float, margin: float, hopeless: bool) -> None:
    objective = Objective(margin=margin, reference=(90.0,))
    assert objective.is_hopeless(1, figures(metric=accuracy)) is hopeless
    assert not replace(objective, name="pareto").is_hopeless(1, figures(metric=accuracy))


def test_the_condition_is_the_amp_baselines_accuracy_after_each_epoch() -> None:
    epochs = run_of("amp", num_epochs=2).epochs
    objective = Objective.against(epochs, Goal(), name="time", margin=2.0)
    assert objective == Objective(
        name="time", margin=2.0, reference=tuple(epoch.held_out(Goal()) or math.nan for epoch in epochs)
    )
    unjudged = [epochs[0], replace(epochs[1], held_out_metrics={})]
    with pytest.raises(ValueError, match="epoch of the AMP baseline = 2: was not judged on validation samples"):
        Objective.against(unjudged, Goal())


@given(objective=OBJECTIVE, epoch=EPOCH, one=FIGURES, other=FIGURES)
def test_the_infeasible_is_always_below_the_feasible(
    objective: Objective, epoch: int, one: Figures, other: Figures
) -> None:
    lacks = [objective.shortfall(epoch, each.metric) > 0.0 for each in (one, other)]
    if lacks == [True, False]:
        assert objective.value(epoch, one) < 0.0 <= objective.value(epoch, other)


@given(objective=OBJECTIVE, epoch=EPOCH, one=FIGURES, accuracy=PERCENT)
def test_the_infeasible_are_ordered_by_what_they_lack(
    objective: Objective, epoch: int, one: Figures, accuracy: float
) -> None:
    low, high = sorted((one.metric, accuracy))
    shortfall = objective.shortfall(epoch, high)
    if shortfall > 0.0:
        values = [objective.value(epoch, figures(metric=each)) for each in (low, high)]
        assert values[0] <= values[1] == -shortfall


@given(objective=OBJECTIVE, epoch=EPOCH, accuracy=PERCENT)
def test_the_shortfall_is_a_number_of_percentage_points(objective: Objective, epoch: int, accuracy: float) -> None:
    assert 0.0 <= objective.shortfall(epoch, accuracy) <= 100.0
    assert objective.shortfall(epoch, 100.0) == 0.0


@pytest.mark.parametrize(
    ("name", "value"), [("score", 45.0), ("accuracy", 90.0), ("time", 0.25), ("memory", 2.0), ("pareto", 45.0)]
)
def test_each_name_maximises_its_figure(name: str, value: float) -> None:
    assert Objective(name=name).value(1, figures()) == value


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("score", {"score": 46.0}),
        ("accuracy", {"metric": 91.0}),
        ("metric", {"metric": 91.0}),
        ("time", {"seconds": 3.0}),
        ("memory", {"peak_gb": 0.4}),
    ],
)
def test_what_is_better_has_a_higher_value(name: str, better: dict[str, float]) -> None:
    objective = Objective(name=name, reference=(90.0,))
    assert objective.value(1, figures(**better)) > objective.value(1, figures())


def test_every_objective_has_been_looked_at() -> None:
    assert set(get_args(ObjectiveName)) == {"score", "metric", "accuracy", "time", "memory", "pareto"}


def test_the_margin_itself_is_still_feasible() -> None:
    objective = Objective(margin=1.5, reference=(80.0,))
    assert objective.shortfall(1, 78.5) == 0.0
    assert objective.shortfall(1, 78.0) == 0.5
    assert objective.value(1, figures(metric=78.0)) == -0.5


@pytest.mark.parametrize(("epoch", "shortfall"), [(1, 0.0), (2, 19.0), (3, 29.0), (4, 29.0)])
def test_the_baseline_is_met_at_the_same_epoch(epoch: int, shortfall: float) -> None:
    assert Objective(reference=(50.0, 70.0, 80.0)).shortfall(epoch, 50.0) == shortfall


def test_without_a_baseline_everything_is_feasible() -> None:
    assert Objective().value(1, figures(metric=0.1, score=0.05)) == 0.05


LITTLE = Goal(name="bits_per_byte", maximize=False, unit="")


@given(margin=st.floats(0.0, 100.0), amp=st.floats(0.01, 1e3), one=st.floats(0.01, 1e3), other=st.floats(0.01, 1e3))
def test_less_of_what_is_minimised_has_a_higher_value(margin: float, amp: float, one: float, other: float) -> None:
    objective = Objective(name="metric", margin=margin, reference=(amp,), goal=LITTLE)
    low, high = sorted((one, other))
    values = [objective.value(1, figures(metric=each)) for each in (low, high)]
    assert values[0] >= values[1]
    assert objective.shortfall(1, amp) == 0.0
    assert objective.shortfall(1, objective.limit) == pytest.approx(0.0, abs=1e-6)


def test_a_point_is_a_percent_of_what_amp_has_where_the_metric_is_none() -> None:
    objective = Objective(margin=2.0, reference=(3.0, 2.0), goal=LITTLE)
    assert objective.shortfall(2, 2.04) == pytest.approx(0.0, abs=1e-9)
    assert objective.shortfall(2, 2.1) == pytest.approx(3.0)
    assert (objective.limit, objective.limit_text) == (pytest.approx(2.04), "at most 2.04 bits per byte")
    assert objective.margin_text == "2 percent"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"name": "accuracy", "goal": LITTLE},
            "objective = 'accuracy': the task is judged by bits per byte; write metric",
        ),
        ({"name": "speed"}, "name = 'speed': must be one of score, metric, accuracy, time, memory, pareto"),
        ({"margin": -0.1}, r"margin = -0.1: must lie in \[0, 100\]"),
        ({"margin": 100.1}, r"margin = 100.1: must lie in \[0, 100\]"),
        ({"margin": math.nan}, r"margin = nan: must lie in \[0, 100\]"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(**settings)
