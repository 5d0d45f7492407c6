"""Weights as two words under the loop: what computes, what is stepped, and who gets to see FP32."""

import copy
import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.build import BF16, FP16, FP32, QUIET, ConvNet, Wired, blobs, cross_entropy, images, mlp, same, values
from triaccel_ray.apply.fused_optimizer import FusedOptimizer
from triaccel_ray.apply.optimizer import LayerwiseOptimizer
from triaccel_ray.config import ControlConfig, PrecisionConfig
from triaccel_ray.kernels.split_words import split
from triaccel_ray.loop import ControlLoop
from triaccel_ray.records.plan import FaultKind, Precision

OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
}
EVERY = pytest.mark.parametrize("kind", OPTIMIZERS)
FIXED = replace(QUIET, revert_slowdowns=False, batch=replace(QUIET.batch, enabled=False))
IN_BF16 = replace(
    FIXED, weights="split", precision=PrecisionConfig(enabled=False, initial=BF16, allow_slow_precisions=True)
)


def loop_of(
    model: nn.Module, config: ControlConfig = IN_BF16, kind: str = "adamw", data: Any = None, loss: Any = cross_entropy
) -> ControlLoop:
    return ControlLoop(model, OPTIMIZERS[kind](model.parameters()), loss, data or images(40), config=config)


def step_by_kernels(optimizer: LayerwiseOptimizer) -> None:
    """Has the optimizer step by the kernels' reference, as it does by the kernels on a GPU."""
    optimizer._fused = [FusedOptimizer(optimizer.optimizer, optimizer.watched, optimizer._layer_of)]


def network(**options: Any) -> ConvNet:
    model = ConvNet(**options)
    model.first.bias = None  # before a norm it has no gradient but rounding, of which Adam makes whole steps
    return model


def run(loop: ControlLoop, num_steps: int) -> None:
    torch.manual_seed(0)
    for _ in range(num_steps):
        loop.step()


def weights_of(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() >= 2]


@EVERY
def test_it_trains_bit_for_bit_as_fp32_weights_do_and_layers_in_bf16_hold_two_bytes_that_compute(kind: str) -> None:
    model, twin = network(), network()
    loop, plain = loop_of(model, kind=kind), loop_of(twin, replace(IN_BF16, weights="fp32"), kind)
    step_by_kernels(plain.optimizer)
    run(loop, 12)
    run(plain, 12)
    assert {p.dtype for p in weights_of(model)} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters() if p.dim() < 2} == {torch.float32}
    assert {p.grad.dtype for p in weights_of(model) if p.grad is not None} == {torch.bfloat16}
    assert {t.dtype for state in loop.optimizer.optimizer.state.values() for t in state.values()} == {torch.float32}
    assert same(values(model), values(twin))
    assert loop.evaluate(images(40)).loss == plain.evaluate(images(40)).loss


def test_everybody_else_sees_fp32_and_every_bit_of_it() -> None:
    model = network()
    loop = loop_of(model)
    run(loop, 3)
    seen = values(model)
    assert all(value.dtype is torch.float32 for value in seen.values() if value.is_floating_point())
    assert same(seen, {name: value.clone() for name, value in loop.state_dict()["model"].items()})
    assert torch.equal(model.second.state_dict()["weight"], seen["second.weight"])
    assert torch.equal(split(seen["second.weight"])[0], model.second.weight)
    with loop.suspended():
        assert torch.equal(model.second.weight, seen["second.weight"])
    assert same(values(model), seen)
    fresh = network(seed=1)
    fresh.load_state_dict(model.state_dict())
    loop.step()
    assert model.second.weight.dtype is torch.bfloat16
    assert not same(values(model), seen)  # what was returned is no view of what trains on
    assert same(values(fresh), seen)
    optimizer = loop.optimizer.optimizer
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(copy.deepcopy(before))  # by hand
    loop.optimizer.set_rates(1.0, {}, {})
    assert same(optimizer.state_dict()["state"], before["state"])
    after = values(model)
    loop.close()
    assert all(torch.equal(parameter, after[name]) for name, parameter in model.named_parameters())
    assert not model.second._state_dict_hooks


def test_a_layer_that_leaves_bf16_is_joined_exactly_and_split_again_when_it_returns() -> None:
    model = mlp()
    loop = loop_of(model, data=blobs(40))

    def put(*levels: Precision) -> None:
        loop._actuators.apply(replace(loop.plan, precision=dict(zip("024", levels, strict=True))), step=0)

    loop.step()
    before = values(model)
    addresses = [p.data_ptr() for p in weights_of(model)]
    put(FP32, FP16, BF16)
    assert [p.dtype for p in weights_of(model)] == [torch.float32, torch.float32, torch.bfloat16]
    assert same(values(model), before)
    put(BF16, BF16, BF16)
    weights = loop._training.precision.weights
    weights.refresh()
    held = weights.companions
    weights.refresh()
    assert weights.companions is held  # the same object while it holds
    assert [p.dtype for p in weights_of(model)] == [torch.bfloat16] * 3
    assert same(values(model), before)
    assert [p.data_ptr() for p in weights_of(model)] == addresses  # captured graphs read there


def test_what_is_written_into_a_split_weight_is_taken_as_it_is() -> None:
    model = mlp()
    loop = loop_of(model, data=blobs(40))
    loop.step()
    with torch.no_grad():
        model[0].weight.zero_()
        model[2].weight.clamp_(-0.125, 0.125)
    assert (model.state_dict()["0.weight"] == 0.0).all()
    assert model.state_dict()["2.weight"].abs().max() == 0.125
    model[4].weight.data = torch.full_like(model[4].weight, 0.3, dtype=torch.float32)
    loop._training.precision.weights.refresh()
    assert torch.equal(model.state_dict()["4.weight"], torch.full((4, 16), 0.3))
    assert model[4].weight.dtype is torch.bfloat16
    loop.step()
    assert all(bool(value.isfinite().all()) for value in values(model).values())


def test_code_that_needs_fp32_weights_is_told_the_way_out() -> None:
    def model(*, casts: bool) -> nn.Module:
        """Computes with a weight of its layer without autocast, in FP32."""

        def outside_autocast(self: Any, inputs: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return self.entry(inputs).float() @ (self.head.weight.float() if casts else self.head.weight).t()

        return Wired(outside_autocast, entry=nn.Linear(8, 8), head=nn.Linear(8, 4))

    with pytest.raises(RuntimeError, match="dtype") as raised:
        loop_of(model(casts=False), data=blobs(40)).step()
    assert str(raised.value).endswith("give weights='fp32' to code that reads them)")
    loop_of(model(casts=True), data=blobs(40)).step()
    loop_of(model(casts=False), replace(IN_BF16, weights="fp32"), data=blobs(40)).step()


def test_gradients_of_parts_add_up_in_fp32() -> None:
    parts = replace(IN_BF16, batch=replace(IN_BF16.batch, start=16, maximum=16, accumulate=4))
    loops = [loop_of(mlp(), replace(parts, weights=weights), data=blobs(64)) for weights in ("split", "fp32")]
    for each in loops:
        each._training.precision.weights.refresh()
        each._training.steps.step.run(torch.arange(16), torch.ones(()), step=0)
    sums = loops[0]._training.precision.weights.sums
    for mine, theirs in zip(weights_of(loops[0].model), weights_of(loops[1].model), strict=True):
        assert mine.grad is None
        # Parts differ where a word at equal distance rounds otherwise; sums in BF16 would be 2^-9 off.
        torch.testing.assert_close(sums[id(mine)], theirs.grad, rtol=1e-5, atol=1e-7)


def test_weights_are_joined_for_good_when_the_optimizer_steps_by_itself() -> None:
    model, twin = mlp(), mlp()
    loop, undisturbed = loop_of(model, data=blobs(40)), loop_of(twin, data=blobs(40))
    run(loop, 2)
    loop.optimizer.optimizer.register_step_post_hook(lambda *_: None)
    loop.step()
    run(undisturbed, 3)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    faults = loop.sensors.take_faults()
    assert [f.detail for f in faults if f.kind is FaultKind.CAPTURE_FAILED] == ["the optimizer has step hooks"]
    for name, value in values(model).items():
        torch.testing.assert_close(value, values(twin)[name], rtol=2e-2, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("lean", "usual", "bytes_less"),
    [
        # Without split weights there are copies in BF16 beside FP32: 2 bytes. Gradients are BF16 either way.
        (IN_BF16, replace(IN_BF16, weights="fp32"), 1.8),
        # BF16 gradients, less those of the buckets under way.
        (replace(IN_BF16, step_in_backward=True), IN_BF16, 1.4),
    ],
    ids=["split", "in backward"],
)
def test_on_a_gpu_a_lean_step_needs_so_many_bytes_a_weight_less(lean: Any, usual: Any, bytes_less: float) -> None:
    peaks = []
    for config in (lean, lean, usual):  # the first one's also holds cuBLAS's workspace
        gc.collect()  # a loop that has ended is a circle
        before = torch.cuda.memory_allocated()
        model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(16))).cuda()
        execution = replace(config.execution, capture=False, compile="off")
        data = torch.randn(64, 2048).cuda(), torch.randint(0, 4, (64,)).cuda()
        loop = loop_of(model, replace(config, execution=execution), "adamw", data)
        loop.step()  # splits
        torch.cuda.reset_peak_memory_stats()
        loop.step()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        loop.close()
        del loop, model
    assert peaks[2] - peaks[1] > bytes_less * 16 * 2048**2
