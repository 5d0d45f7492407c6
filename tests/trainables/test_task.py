import pytest

from triaccel_ray.trainables.digits import Digits
from triaccel_ray.trainables.task import Recipe


def test_norms_and_biases_have_no_decay_and_a_rate_of_their_own() -> None:
    model = Digits().model()
    optimizer = Digits().optimizer(model, Recipe(lr=0.2, weight_decay=1e-3, norm_bias_lr_factor=16.0))
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        expected = (0.2, 1e-3) if parameter.dim() >= 2 else (3.2, 0.0)
        assert (groups[id(parameter)]["lr"], groups[id(parameter)]["weight_decay"]) == expected, name


@pytest.mark.parametrize("factor", [0.0, -1.0, float("inf"), float("nan")])
def test_a_factor_that_no_rate_can_have_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match=r"norm_bias_lr_factor = .*: must lie in \(0, 1e6\]"):
        Recipe(norm_bias_lr_factor=factor)


def test_amp_is_fp16_or_bf16() -> None:
    with pytest.raises(ValueError, match="must be one of fp16, bf16"):
        Recipe(amp="fp32")  # type: ignore[arg-type]  # as a file may have it
