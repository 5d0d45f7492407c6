"""Steps from inside the backward pass: the trajectory of steps after it, no gradient left, and what goes wrong."""

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.apply import test_split_weights
from tests.apply.test_split_weights import EVERY, FIXED, IN_BF16, OPTIMIZERS, network, run, step_by_kernels
from tests.build import FP16, LimitedGradients, RerunPool, Wired, blobs, cross_entropy, images, mlp, same, values
from triaccel_ray.apply.step_in_backward import buckets_of
from triaccel_ray.config import ControlConfig, LossScaleConfig
from triaccel_ray.loop import ControlLoop

IN_FP32 = replace(FIXED, step_in_backward=True)
IN_WORDS = replace(IN_BF16, step_in_backward=True)
EACH_KIND_OF_WEIGHTS = pytest.mark.parametrize("config", [IN_FP32, IN_WORDS], ids=["fp32", "split"])


pytestmark = pytest.mark.usefixtures("small_buckets")


def loop_of(model: nn.Module, config: ControlConfig, *others: Any, **named: Any) -> ControlLoop:
    loop = test_split_weights.loop_of(model, config, *others, **named)
    if not loop.optimizer._fused:
        step_by_kernels(loop.optimizer)
    return loop


def after(config: ControlConfig) -> ControlConfig:
    """The same with steps after the backward pass."""
    return replace(config, step_in_backward=False)


def test_buckets_follow_the_model_from_its_end_and_hold_each_parameter_once() -> None:
    model = mlp()  # 128 + 16, 256 + 16, 64 + 4 elements
    elsewhere = nn.Parameter(torch.zeros(3))
    watched = [*sorted(model.parameters(), key=lambda p: -p.dim()), elsewhere]  # weights first, as recipes have it
    names = {id(p): name for name, p in model.named_parameters()} | {id(elsewhere): "elsewhere"}
    found = [[names[id(watched[index])] for index in bucket] for bucket in buckets_of(model, watched)]
    assert found == [["4.bias", "4.weight"], ["2.bias", "2.weight"], ["0.bias", "0.weight"], ["elsewhere"]]


def assert_same_trajectory(
    make: Callable[[], nn.Module], config: ControlConfig, num_steps: int, *, data: Any = None, kind: str = "adamw"
) -> nn.Module:
    """Asserts that steps in and after the backward pass give the same model and statistics; returns the former's."""
    models, statistics = (make(), make()), []
    for model, each in zip(models, (config, after(config)), strict=True):
        loop = loop_of(model, replace(each, every_steps=100), kind, data)
        run(loop, num_steps)
        statistics.append(loop._training.moments.read())
        assert loop.num_skipped == 0
    assert same(values(models[0]), values(models[1]))
    torch.testing.assert_close(*statistics, rtol=1e-12, atol=0.0, equal_nan=True)
    return models[0]


def unused() -> nn.Module:
    """Leaves one layer out."""
    return Wired(lambda self, x: self.used(x), used=mlp(), unused=nn.Linear(8, 8))  # after a seed


def linears(*names: str, wiring: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return Wired(wiring, **{name: nn.Linear(8, 8) for name in names})


def tied() -> nn.Module:
    """Reads one weight three times, and frozen ones whose turn comes after their bucket has stepped."""

    def wiring(self: Any, inputs: Tensor) -> Tensor:
        hidden = self.tied(self.frozen(self.entry(inputs)).tanh())
        return self.head(F.linear(self.tied(hidden.tanh()), self.tied.weight.t()))

    model = linears("entry", "frozen", "tied", "head", wiring=wiring)
    model.frozen.requires_grad_(False)
    return model


def compiled() -> nn.Module:
    model = mlp()
    model[2].compile(backend="aot_eager")
    return model


@EVERY
@EACH_KIND_OF_WEIGHTS
@pytest.mark.parametrize(("make", "num_parts"), [(network, 1), (mlp, 4), (unused, 1), (tied, 1), (compiled, 1)])
def test_it_is_the_trajectory_of_steps_after_the_backward_pass(
    make: Any, num_parts: int, kind: str, config: ControlConfig
) -> None:
    batch = replace(config.batch, start=16, maximum=16, accumulate=num_parts) if num_parts > 1 else config.batch
    data = images(40) if make is network else blobs(64)
    model = assert_same_trajectory(make, replace(config, batch=batch), 6, data=data, kind=kind)
    assert all(p.grad is None for p in model.parameters())


@EACH_KIND_OF_WEIGHTS
def test_what_a_graph_captures_is_the_same_work(config: ControlConfig) -> None:
    parts = replace(config, batch=replace(config.batch, start=16, maximum=16, accumulate=2))
    for each in (config, parts):
        models = mlp(), mlp()
        for model, how in zip(models, (each, after(each)), strict=True):
            loop = loop_of(model, how, data=blobs(64))
            steps = loop._training.steps
            steps.enabled, steps._pool = True, RerunPool()  # a capture makes its step, too: of both loops alike
            run(loop, 2)
            assert steps.num_captured == 1
            steps.enabled = how is each  # a second replay of the other would add to gradients that a graph replaces
            run(loop, 2)
        assert same(values(models[0]), values(models[1]))


@EACH_KIND_OF_WEIGHTS
def test_gradients_never_exist_all_at_once(config: ControlConfig) -> None:
    model = mlp()
    alive: list[int] = []
    seen: list[weakref.ref[Tensor]] = []
    loop = loop_of(model, config, data=blobs(40))
    stepper = loop._training.steps.step.stepper
    take = stepper._take

    def watching(index: int, gradients: Any, steps: bool) -> None:
        seen.extend(weakref.ref(tensor) for tensor in gradients.tensors if tensor is not None)
        take(index, gradients, steps)
        alive.append(sum(ref() is not None for ref in seen))

    stepper._take = watching
    loop.step()
    gc.collect()
    assert alive == [2, 2, 2]  # those of its own bucket
    assert not any(ref() is not None for ref in seen)


def test_the_norm_of_the_step_before_clips_and_travels_with_a_checkpoint() -> None:
    config = replace(IN_FP32, clip_norm=0.05)
    model, twin, factor = mlp(), mlp(), torch.ones(())
    loop = loop_of(model, config, "momentum", blobs(40))
    plain = loop_of(
        twin, replace(config, clip_norm=None), "momentum", blobs(40), lambda *args: factor * cross_entropy(*args)
    )
    factor.fill_(0.0)  # no norm is known yet
    run(loop, 1)
    run(plain, 1)
    assert same(values(model), values(twin))
    norm = float(loop._training.moments.last_norm)
    assert norm > 0.05
    state = copy.deepcopy(loop.state_dict())
    factor.fill_(0.05 / norm)
    run(loop, 1)
    run(plain, 1)
    for name, value in values(model).items():
        torch.testing.assert_close(value, values(twin)[name], rtol=1e-5, atol=1e-6)
    resumed = loop_of(mlp(seed=5), config, "momentum", blobs(40))
    resumed.load_state_dict(state)
    run(resumed, 1)
    assert same(values(resumed.model), values(model))


@pytest.mark.gpu
@EVERY
@EACH_KIND_OF_WEIGHTS
@pytest.mark.parametrize("compiles", ["on", "off"])
@pytest.mark.parametrize("capture", [True, False])
def test_on_a_gpu_it_is_the_trajectory_of_steps_after_the_backward_pass(
    kind: str, config: ControlConfig, compiles: Any, capture: bool
) -> None:
    finals = []
    data = tuple(tensor.cuda() for tensor in blobs(640, features=64))
    for each in (config, after(config)):
        model = mlp(features=64).cuda()
        execution = replace(each.execution, capture=capture, compile=compiles)
        loop = loop_of(model, replace(each, execution=execution, clip_norm=None), kind, data)
        for _ in range(2):
            loop.train_epoch()
            loop.evaluate(data)  # joins split weights; the graphs hold, for addresses stay
        assert (loop._training.steps.num_captured > 0) == capture
        finals.append(values(model))
        loop.close()
    torch.testing.assert_close(finals[0], finals[1], rtol=1e-3, atol=1e-4)


class Poisoned(nn.Module):
    """Passes its input on, and the gradient times a factor on the device."""

    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.requires_grad:
            inputs.register_hook(lambda gradient: gradient * self.factor)
        return inputs


ON_A_GPU = [pytest.param("cuda", capture, 12, marks=pytest.mark.gpu) for capture in (True, False)]


@EACH_KIND_OF_WEIGHTS
@pytest.mark.parametrize(("device", "capture", "num_steps"), [("cpu", False, 1), *ON_A_GPU])
def test_a_nan_stops_its_bucket_and_all_after_it_and_the_step_counts_as_skipped(
    config: ControlConfig, device: str, capture: bool, num_steps: int
) -> None:
    execution = replace(config.execution, capture=capture, compile="off")
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), Poisoned(), nn.ReLU(), nn.Linear(16, 4))
    data = tuple(tensor.to(device) for tensor in blobs(64))
    loop = loop_of(model.to(device), replace(config, every_steps=100, execution=execution), data=data)
    run(loop, num_steps)
    before, loss = values(model), loop.epoch_loss.clone()
    state = {name: loop.optimizer.optimizer.state[p]["step"].clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        model.get_buffer("3.factor").fill_(float("nan"))
    loop.step()
    now = values(model)
    # The gradient passes from the last layer to the first: 5 has stepped before the NaN appeared.
    changed = {name for name in now if name != "3.factor" and not torch.equal(now[name], before[name])}
    assert changed == {"5.weight", "5.bias"}
    step_of = {name: loop.optimizer.optimizer.state[p]["step"] for name, p in model.named_parameters()}
    assert {name for name, step in step_of.items() if step != state[name]} == {"5.weight", "5.bias"}
    assert loop.num_skipped == 1
    assert torch.equal(loop.epoch_loss, loss)
    with torch.no_grad():
        model.get_buffer("3.factor").fill_(1.0)
    loop.step()  # nothing of it is left
    after_it = values(model)
    assert all(not torch.equal(after_it[name], now[name]) for name in now)
    assert loop.num_skipped == 1
    assert (loop._training.steps.num_captured > 0) == capture


def test_an_overflow_halves_the_loss_scale_and_a_later_step_is_made() -> None:
    scale = LossScaleConfig(initial=2.0**24)
    config = replace(IN_WORDS, precision=replace(IN_BF16.precision, initial=FP16), loss_scale=scale, every_steps=100)
    model = network()
    loop, before = loop_of(model, config), values(model)
    run(loop, 20)
    assert 0 < loop.num_skipped < 20
    assert float(loop.loss_scale.factor(True)) == 2.0 ** (24 - loop.num_skipped)
    assert not torch.equal(values(model)["head.weight"], before["head.weight"])


@pytest.mark.parametrize("front", [False, True])
def test_a_batch_that_does_not_fit_is_tried_again_and_no_bucket_steps_twice(front: bool) -> None:
    limited = LimitedGradients(6)
    model = nn.Sequential(nn.Linear(8, 8), limited, mlp()) if front else nn.Sequential(mlp(), limited)
    loop = loop_of(model, replace(IN_FP32, every_steps=100), data=blobs(64))
    loop.step()
    assert loop._training.steps.step.num_micro_batches == 2
    assert all(float(state["step"]) == 1.0 for state in loop.optimizer.optimizer.state.values())


def test_a_gradient_that_arrives_in_pieces_is_refused_with_the_way_out() -> None:
    def model(*, use_reentrant: bool) -> nn.Module:
        """Passes twice through one layer, each time checkpointed in a backward pass of its own."""

        def wiring(self: Any, inputs: Tensor) -> Tensor:
            hidden = self.entry(inputs)
            for _ in range(2):
                hidden = checkpoint(self.shared, hidden, use_reentrant=use_reentrant)
            return self.head(hidden)

        return linears("entry", "shared", "head", wiring=wiring)

    with pytest.raises(RuntimeError, match=r"arrives in several pieces.*use_reentrant=False, or give step_in_backward"):
        loop_of(model(use_reentrant=True), IN_FP32, data=blobs(40)).step()
    assert_same_trajectory(lambda: model(use_reentrant=False), IN_FP32, 3, data=blobs(40))


def test_a_backward_pass_of_the_users_own_is_left_alone_and_close_ends_it() -> None:
    model = mlp()
    loop = loop_of(model, IN_FP32, data=blobs(40))
    loop.step()
    inputs, targets = blobs(8)
    before = values(model)
    cross_entropy(model(inputs), targets).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert same(values(model), before)
    loop.close()
    assert not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in model.parameters())


def test_an_optimizer_that_the_kernels_can_step_no_longer_is_refused() -> None:
    loop = loop_of(mlp(), IN_FP32, data=blobs(40))
    loop.step()
    loop.optimizer.optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(ValueError, match="the optimizer has step hooks: undo that, or give step_in_backward=False"):
        loop.step()


def detached(read: Callable[[Tensor], Tensor] = Tensor.detach) -> nn.Module:
    """Reads a trained weight a second time, as a constant whose gradient is needed after the weight's step."""

    def wiring(self: Any, inputs: Tensor) -> Tensor:
        hidden = F.linear(self.entry(inputs), read(self.trained.weight))
        return self.head(self.trained(hidden.tanh()))

    return linears("entry", "trained", "head", wiring=wiring)


@EACH_KIND_OF_WEIGHTS
def test_a_weight_that_is_read_after_its_step_is_refused_with_the_way_out(config: ControlConfig) -> None:
    message = r"\[8, 8\]\] is at version .* read `.detach\(\).clone\(\)`, or give step_in_backward=False"
    with pytest.raises(RuntimeError, match=message) as raised:
        loop_of(detached(), config, data=blobs(40)).step()
    assert "Hint" not in str(raised.value)
    assert_same_trajectory(lambda: detached(lambda weight: weight.detach().clone()), config, 3, data=blobs(40))


def test_a_weight_that_the_optimizer_does_not_update_may_be_read_at_any_time() -> None:
    models = detached(), detached()
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
