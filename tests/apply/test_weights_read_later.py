"""Step in backward where weights are read or written beside their layers: an error, never a wrong gradient."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.apply.test_split_weights import OPTIMIZERS, run
from tests.apply.test_step_in_backward import (
    EACH_KIND_OF_WEIGHTS,
    IN_FP32,
    IN_WORDS,
    after,
    assert_same_trajectory,
    loop_of,
)
from tests.build import blobs, cross_entropy, mlp, values
from triaccel_ray.config import ControlConfig
from triaccel_ray.loop import ControlLoop

pytestmark = pytest.mark.usefixtures("small_buckets")


class Detached(nn.Module):
    """Reads a trained weight a second time, as a constant whose gradient is needed after the weight's step."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.entry, self.trained, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.read = read

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = F.linear(self.entry(inputs), self.read(self.trained.weight))
        outputs: Tensor = self.head(self.trained(hidden.tanh()))
        return outputs


@EACH_KIND_OF_WEIGHTS
def test_a_weight_that_is_read_after_its_step_is_refused_with_the_way_out(config: ControlConfig) -> None:
    message = r"\[8, 8\]\] is at version .* read `.detach\(\).clone\(\)`, or give step_in_backward=False"
    with pytest.raises(RuntimeError, match=message) as raised:
        loop_of(Detached(Tensor.detach), config, data=blobs(40)).step()
    assert "Hint" not in str(raised.value)
    assert_same_trajectory(lambda: Detached(lambda weight: weight.detach().clone()), config, 3, data=blobs(40))


def test_a_weight_that_the_optimizer_does_not_update_may_be_read_at_any_time() -> None:
    models = Detached(Tensor.detach), Detached(Tensor.detach)
    for model, config in zip(models, (IN_FP32, after(IN_FP32)), strict=True):
        optimizer = OPTIMIZERS["momentum"]([*model.entry.parameters(), *model.head.parameters()])
        run(ControlLoop(model, optimizer, cross_entropy, blobs(40), config=config), 3)
    torch.testing.assert_close(values(models[0]), values(models[1]))


def test_an_error_of_the_models_own_is_passed_on_as_it_is() -> None:
    class Overwriting(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            outputs = super().forward(inputs).exp()
            outputs.detach().zero_()
            return outputs

    with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
        loop_of(Overwriting(8, 4), IN_FP32, data=blobs(40)).step()
    assert "step_in_backward" not in str(raised.value)


def test_a_write_between_steps_is_still_told_from_a_step() -> None:
    model = mlp()
    loop = loop_of(model, IN_WORDS, data=blobs(40))
    run(loop, 2)
    before = values(model)["2.weight"]
    with torch.no_grad():
        model[2].weight.mul_(2.0)
    assert not torch.equal(before, before.bfloat16().float())  # the low words were in use
    assert torch.equal(values(model)["2.weight"], 2.0 * before.bfloat16().float())
