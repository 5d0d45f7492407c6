import math
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.service.records import run_of
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.runs.objective import Objective, ObjectiveName, Performance, grace_epochs

PERCENT = st.floats(0.0, 100.0)
FIGURES = st.builds(
    Performance, metric=PERCENT, seconds=st.floats(1e-4, 1e6), peak_gb=st.floats(1e-3, 1e3), score=st.floats(0.0, 1e6)
)
OBJECTIVE = st.builds(
    Objective,
    name=st.sampled_from(get_args(ObjectiveName)),
    margin=st.floats(0.0, 100.0),
    reference=st.lists(PERCENT, max_size=5).map(tuple),
)
LITTLE = Goal(name="bits_per_byte", maximize=False, unit="")


def performance(**changes: float) -> Performance:
    return Performance(**{"metric": 90.0, "seconds": 4.0, "peak_gb": 0.5, "score": 45.0, **changes})


@pytest.mark.parametrize(("num_epochs", "grace"), [(1, 1), (2, 2), (5, 2), (20, 10)])
def test_no_trial_is_stopped_before_half_of_its_epochs(num_epochs: int, grace: int) -> None:
    assert grace_epochs(num_epochs) == grace


def test_an_accuracy_is_hopeless_beyond_a_second_margin() -> None:
    for margin, enough, hopeless in ((1.0, 88.0, 87.9), (2.0, 86.0, 85.9)):
        objective = Objective(margin=margin, reference=(90.0,))
        assert not objective.is_hopeless(1, performance(metric=enough))
        assert objective.is_hopeless(1, performance(metric=hopeless))
        assert not replace(objective, name="pareto").is_hopeless(1, performance(metric=hopeless))


def test_the_condition_is_the_amp_baselines_accuracy_after_each_epoch() -> None:
    epochs = run_of("amp", accuracy=90.0, num_epochs=2).epochs
    objective = Objective.against(epochs, Goal(), name="time", margin=2.0)
    assert objective == Objective(name="time", margin=2.0, reference=(90.0, 90.0))


@given(objective=OBJECTIVE, epoch=st.integers(1, 9), one=FIGURES, other=FIGURES)
def test_the_infeasible_is_below_the_feasible_and_ordered_by_what_it_lacks(
    objective: Objective, epoch: int, one: Performance, other: Performance
) -> None:
    low, high = sorted((one, other), key=lambda each: each.metric)
    lacks = [objective.shortfall(epoch, each.metric) for each in (low, high)]
    assert 0.0 <= lacks[1] <= lacks[0] <= 100.0
    assert objective.shortfall(epoch, 100.0) == 0.0
    for each, lack in zip((low, high), lacks, strict=True):
        value = objective.value(epoch, each)
        assert value == -lack if lack > 0.0 else value >= 0.0


@pytest.mark.parametrize(
    ("name", "value", "better"),
    [
        ("score", 45.0, {"score": 46.0}),
        ("metric", 90.0, {"metric": 91.0}),
        ("time", 0.25, {"seconds": 3.0}),
        ("memory", 2.0, {"peak_gb": 0.4}),
        ("pareto", 45.0, {"score": 46.0}),
    ],
)
def test_each_name_maximises_its_figure(name: Any, value: float, better: dict[str, float]) -> None:
    for objective in (Objective(name=name), Objective(name=name, reference=(90.0,))):
        assert objective.value(1, performance()) == value
        assert objective.value(1, performance(**better)) > value


def test_the_baseline_less_the_margin_is_met_at_the_same_epoch() -> None:
    shortfall = Objective(margin=1.5, reference=(50.0, 70.0, 80.0)).shortfall
    expected = {(1, 50.0): 0.0, (2, 50.0): 18.5, (3, 78.5): 0.0, (3, 78.0): 0.5, (4, 78.0): 0.5}
    assert {given: shortfall(*given) for given in expected} == expected


def test_of_what_is_minimised_a_point_is_a_percent_of_what_amp_has() -> None:
    objective = Objective(name="metric", margin=2.0, reference=(3.0, 2.0), goal=LITTLE)
    assert objective.shortfall(2, 2.04) == pytest.approx(0.0, abs=1e-9)
    assert objective.shortfall(2, 2.1) == pytest.approx(3.0)
    assert objective.value(2, performance(metric=1.9)) > objective.value(2, performance(metric=2.0))
    assert (objective.limit, objective.limit_text) == (pytest.approx(2.04), "at most 2.04 bits per byte")
    assert objective.margin_text == "2 percent"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "speed"}, "name = 'speed': must be one of score, metric, time, memory, pareto"),
        ({"margin": math.nan}, r"margin = nan: must lie in \[0, 100\]"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(**settings)
