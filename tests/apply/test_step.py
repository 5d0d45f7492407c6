from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.build import (
    FP16,
    ONE,
    ConvNet,
    CountingSource,
    Limited,
    LimitedGradients,
    blobs,
    gradients,
    images,
    mlp,
    nothing,
    same,
    shift_and_noise,
    step_of,
    values,
)
from triaccel_ray.cuda.out_of_memory import BudgetExceededError
from triaccel_ray.data.sources import TensorSource
from triaccel_ray.records.plan import FaultKind

ALL = torch.arange(16)


def limited(where: str, limit: int, model: nn.Module) -> tuple[nn.Module, Any]:
    """The model with room for `limit` samples, and the memory check to go with it."""
    if where == "budget":
        in_flight = Limited(10**9)

        def check() -> None:
            if in_flight.sizes[-1] > limit:
                raise BudgetExceededError("the process holds 9 MiB of a budget of 8 MiB")

        return nn.Sequential(model, in_flight), check
    return nn.Sequential(model, Limited(limit) if where == "forward" else LimitedGradients(limit)), nothing


WHERE = pytest.mark.parametrize("where", ["forward", "backward", "budget"])


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("is_map", [False, True])
def test_batch_normalization_never_gets_a_single_sample_unless_its_statistics_are_frozen(
    is_map: bool, least: int
) -> None:
    inputs, targets = blobs(16)
    norm = nn.Sequential(nn.Unflatten(1, (8, 1, 1)), nn.BatchNorm2d(8), nn.Flatten()) if is_map else nn.BatchNorm1d(8)
    model = nn.Sequential(nn.Linear(inputs.shape[1], 8), norm.train(least == 2), Limited(0), nn.Linear(8, 4))
    step = step_of(model, (inputs, targets))
    with pytest.raises(torch.OutOfMemoryError):
        step.run(ALL, ONE, step=0)
    assert model[2].sizes[-1] == least
    model[2].limit = 16
    for parts, num_samples, sizes in [(16, 16, {1: [1] * 16, 2: [2] * 8}), (7, 10, {1: [2] * 3 + [1] * 4, 2: [2] * 5})]:
        model[2].sizes.clear()
        step.set_num_micro_batches(parts)
        step.run(ALL[:num_samples], ONE, step=1)
        assert model[2].sizes == sizes[least]


@WHERE
@pytest.mark.parametrize(("limit", "parts"), [(16, 1), (15, 2), (5, 4), (1, 16)])
def test_a_batch_that_does_not_fit_is_computed_in_parts(where: str, limit: int, parts: int) -> None:
    clean = step_of(nn.Sequential(ConvNet().eval(), nn.Identity()), images(16))
    expected = clean.run(ALL, ONE, step=0)
    model, check = limited(where, limit, ConvNet().eval())
    source = CountingSource(*images(16))
    step = step_of(model, source, check=check)
    outcome = step.run(ALL, ONE, step=7)

    # The gradient of 16 samples is a sum of 16 terms: its rounding grows with their number at most.
    eps = torch.finfo(torch.float32).eps
    for name, gradient in gradients(clean.model).items():
        largest = float(gradient.abs().max())
        torch.testing.assert_close(gradients(model)[name], gradient, rtol=0.0, atol=32 * eps * max(largest, 1.0))
    torch.testing.assert_close(outcome.loss_sum, expected.loss_sum)
    assert torch.equal(torch.cat(source.drawn[-parts:]), ALL)
    assert step.num_micro_batches == parts
    if parts == 1:
        assert outcome.faults == ()
    else:
        (fault,) = outcome.faults
        assert (fault.kind, fault.step, fault.phase) == (FaultKind.OUT_OF_MEMORY, 7, "forward_backward")
        assert (fault.batch_size, fault.micro_batch_size) == (16, 16 // parts)
        assert fault.detail


@WHERE
def test_a_retried_batch_leaves_the_same_state_as_a_clean_pass_in_parts(where: str) -> None:
    source = TensorSource(*images(16), augment=shift_and_noise)
    broken, check = limited(where, 4, ConvNet())
    whole = nn.Sequential(ConvNet(), nn.Identity())
    for model in (broken, whole):
        model.train()
        model[0].dropout.p = 0.0
    retried, clean = step_of(broken, source, check=check), step_of(whole, source)
    clean.set_num_micro_batches(4)
    assert retried.run(ALL, ONE, step=0).faults
    assert not clean.run(ALL, ONE, step=0).faults
    assert same(values(broken), values(whole))  # running statistics and their counter among them
    assert same(gradients(broken), gradients(whole))
    assert torch.equal(retried.sampler.generator.get_state(), clean.sampler.generator.get_state())


def test_parts_stay_until_they_are_set_and_a_short_batch_passes_in_no_more_than_it_fills() -> None:
    model, _ = limited("forward", 4, mlp())
    step = step_of(model, blobs(16))
    step.run(ALL, ONE, step=0)
    assert step.run(ALL, ONE, step=1).faults == ()
    assert model[1].sizes == [16, 8, 4, 4, 4, 4, 4, 4, 4, 4]
    for parts, num_samples, sizes in [
        ((2, 1), 16, [8, 4, 4, 4, 4]),
        ((4, 4), 16, [4, 4, 4, 4]),
        ((4, 4), 5, [3, 2]),
        ((4, 4), 1, [1]),
        ((7, 1), 10, [2, 2, 2, 1, 1, 1, 1]),
    ]:
        step.set_num_micro_batches(*parts)
        model[1].sizes.clear()
        assert bool(step.run(ALL[:num_samples], ONE, step=4).faults) == (8 in sizes)
        assert model[1].sizes == sizes
    step.set_num_micro_batches(4, 4)
    model[1].limit = 3
    (fault,) = step.run(ALL[:4], ONE, step=5).faults  # whole batches keep their parts
    assert (fault.batch_size, fault.micro_batch_size) == (4, 1)
    assert (step.num_micro_batches, step.min_micro_batch_size) == (4, 1)


@WHERE
def test_a_single_sample_that_does_not_fit_ends_the_run_where_the_device_refuses_it(where: str) -> None:
    model, check = limited(where, 0, mlp())
    step = step_of(model, blobs(16), check=check)
    if where != "budget":
        with pytest.raises((torch.OutOfMemoryError, MemoryError)):
            step.run(ALL, ONE, step=0)
        return
    outcome = step.run(ALL, ONE, step=0)
    (fault,) = outcome.faults
    assert (fault.kind, fault.phase) == (FaultKind.BUDGET_EXCEEDED, "forward_backward")
    assert "of a budget of" in fault.detail
    assert step.num_micro_batches == 1
    assert step.run(ALL, ONE, step=1).faults == ()  # once an interval
    step.set_num_micro_batches(1)
    step._memory = replace(step._memory, is_exceeded_at_rest=lambda: True)
    model[1].sizes.clear()
    assert step.run(ALL, ONE, step=2).faults != ()
    assert model[1].sizes == [16, 16]  # waived at once: no smaller batch would help


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), ValueError("wrong")])
def test_other_errors_propagate_at_once(error: BaseException) -> None:
    calls: list[Tensor] = []

    def broken(outputs: Tensor, targets: Tensor) -> Tensor:
        calls.append(outputs)
        raise error

    with pytest.raises(type(error)):
        step_of(mlp(), blobs(16), loss=broken).run(ALL, ONE, step=0)
    assert len(calls) == 1


def test_outputs_reach_the_loss_in_fp32_and_outside_of_autocast() -> None:
    class Named(nn.Linear):
        def forward(self, inputs: Tensor) -> Any:
            return {"logits": super().forward(inputs), "name": "x"}

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        assert (outputs["logits"].dtype, outputs["name"]) == (torch.float32, "x")
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
        return outputs["logits"].square().mean()

    model = nn.Sequential(Named(8, 4))
    step = step_of(model, blobs(16), loss=loss)
    step.precision.set({"0": FP16})
    with torch.autocast("cpu", dtype=torch.bfloat16):  # the user's own
        step.run(ALL, ONE, step=0)
    assert gradients(model)["0.weight"].dtype is torch.float32
