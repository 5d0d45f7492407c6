import pytest
import torch

from tests.build import CPU, same
from triaccel_ray.apply.loss_scale import MAXIMUM, LossScale
from triaccel_ray.config import LossScaleConfig
from triaccel_ray.kernels.step_end.reference import move_scale

FINE, OVERFLOW = torch.tensor(False), torch.tensor(True)


def scale_of(initial: float = 8.0, growth_interval: int = 3) -> LossScale:
    return LossScale(LossScaleConfig(initial=initial, growth_interval=growth_interval), CPU)


def scales(scale: LossScale, outcomes: str) -> list[float]:
    """The scale after each step; x is an overflow."""
    seen = []
    for outcome in outcomes:
        move_scale(scale.state, OVERFLOW if outcome == "x" else FINE)
        seen.append(scale.factor(True).item())
    return seen


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ("......", [8, 8, 16, 16, 16, 32]),
        ("..x...", [8, 8, 4, 4, 4, 8]),
        ("...x..", [8, 8, 16, 8, 8, 8]),
        ("xx...x", [4, 2, 2, 2, 4, 2]),
    ],
)
def test_the_scale_doubles_after_finite_steps_and_halves_at_an_overflow(outcomes: str, expected: list[float]) -> None:
    scale = scale_of()
    assert scales(scale, outcomes) == expected
    assert scale.num_skipped.item() == outcomes.count("x")


def test_the_scale_stays_between_one_and_its_maximum() -> None:
    assert scales(scale_of(2.0), "xxx") == [1, 1, 1]
    assert scales(scale_of(MAXIMUM, growth_interval=1), "..") == [MAXIMUM, MAXIMUM]


def test_without_fp16_the_factor_is_one() -> None:
    assert scale_of().factor(False).item() == 1.0
    assert scale_of().factor(True).dtype is torch.float32


def test_a_restored_scale_goes_on_alike() -> None:
    scale, restored = scale_of(), scale_of(2.0)
    scales(scale, "x..")
    state = scale.state_dict()
    restored.load_state_dict(state)
    assert scales(restored, ".x..") == scales(scale, ".x..")
    assert same(restored.state_dict(), scale.state_dict())
    assert not same(state, scale.state_dict())
