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
def test_the_infeasible_is_below_the_feasible_and_ordered_by_what_it_lacks(
    objective: Objective, epoch: int, one: Figures, other: Figures
) -> None:
    low, high = sorted((one, other), key=lambda each: each.metric)
    lacks = [objective.shortfall(epoch, each.metric) for each in (low, high)]
    assert 0.0 <= lacks[1] <= lacks[0] <= 100.0
    assert objective.shortfall(epoch, 100.0) == 0.0
    for each, lack in zip((low, high), lacks, strict=True):
        value = objective.value(epoch, each)
        assert value == -lack if lack > 0.0 else value >= 0.0


@pytest.mark.parametrize("name", get_args(ObjectiveName))
def test_each_name_maximises_its_figure(name: str) -> None:
    value, better = {
        "score": (45.0, {"score": 46.0}),
        "metric": (90.0, {"metric": 91.0}),
        "accuracy": (90.0, {"metric": 91.0}),
        "time": (0.25, {"seconds": 3.0}),
        "memory": (2.0, {"peak_gb": 0.4}),
        "pareto": (45.0, {"score": 46.0}),
    }[name]
    for objective in (Objective(name=name), Objective(name=name, reference=(90.0,))):
        assert objective.value(1, figures()) == value
        assert objective.value(1, figures(**better)) > value


@pytest.mark.parametrize(
    ("epoch", "accuracy", "shortfall"),
    [(1, 50.0, 0.0), (2, 50.0, 18.5), (3, 78.5, 0.0), (3, 78.0, 0.5), (4, 78.0, 0.5)],
)
def test_the_baseline_less_the_margin_is_met_at_the_same_epoch(epoch: int, accuracy: float, shortfall: float) -> None:
    assert Objective(margin=1.5, reference=(50.0, 70.0, 80.0)).shortfall(epoch, accuracy) == shortfall
    assert Objective().shortfall(epoch, accuracy) == 0.0


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
