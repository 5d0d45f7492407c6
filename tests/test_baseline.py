import copy
import math
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from tests.build import BF16, CPU, FP32, ConvNet, cross_entropy, images, same, sgd, shift_and_noise, values
from triaccel_ray.baseline import Baseline, BaselineLoop
from triaccel_ray.cuda.out_of_memory import BudgetExceededError
from triaccel_ray.data.sampler import Sampler
from triaccel_ray.data.sources import TensorSource
from triaccel_ray.measure.memory import MIB
from triaccel_ray.records.plan import Precision


def baseline(model: nn.Module, method: Baseline, **options: Any) -> BaselineLoop:
    source = TensorSource(*images(45), augment=shift_and_noise)
    options = {"loss": cross_entropy, "optimizer": sgd(model), "data": source, **options}
    return BaselineLoop(model, method=method, batch_size=8, seed=3, **options)


def test_a_short_last_batch_has_parts_no_larger_than_the_others_and_no_more_than_needed() -> None:
    model, sizes = ConvNet(), list[int]()
    model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    baseline(model, "fp32", data=TensorSource(*images(11)), accumulate=4).train_epoch()
    assert sizes == [2, 2, 2, 2, 2, 1]


def test_gradients_of_parameters_that_are_not_trained_do_not_add_up() -> None:
    model = ConvNet()
    head = list(model.parameters())[-1]
    loop = baseline(model, "fp32", optimizer=torch.optim.SGD([head], lr=0.05), clip_norm=1.0)
    for _ in range(3):
        loop.step()
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("accumulate", "clip_norm"), [(1, None), (3, 0.2)])
def test_fp32_is_the_loop_that_a_user_would_write_bit_for_bit(accumulate: int, clip_norm: float | None) -> None:
    model, reference = ConvNet(), ConvNet()
    loop = baseline(model, "fp32", schedule=lambda epoch: 1.0 - epoch / 4, accumulate=accumulate, clip_norm=clip_norm)
    torch.manual_seed(0)
    stats = [loop.train_epoch() for _ in range(2)]

    torch.manual_seed(0)
    optimizer, source, losses = sgd(reference), TensorSource(*images(45), augment=shift_and_noise), []
    sampler = Sampler(source, seed=3, device=CPU)
    for _ in range(2 * 6):
        optimizer.param_groups[0]["lr"] = 0.05 * (1.0 - sampler.position / 4)
        indices = sampler.take(8)
        losses.append(0.0)
        num_parts = {(8, 3): 3, (5, 3): 2}.get((len(indices), accumulate), 1)
        for part in indices.tensor_split(num_parts):
            inputs, targets = source.batch(part, sampler.generator)
            loss = cross_entropy(reference(inputs), targets) * (len(part) / len(indices))
            loss.backward()
            losses[-1] += loss.item() * len(indices)
        if clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(reference.parameters(), clip_norm)
            assert norm > clip_norm
        optimizer.step()
        optimizer.zero_grad()
    assert same(values(model), values(reference))
    assert [each.loss for each in stats] == [sum(losses[:6]) / 45, sum(losses[6:]) / 45]
    assert [(each.epoch, each.num_steps, each.num_samples) for each in stats] == [(1, 6, 45), (2, 6, 45)]
    assert loop.num_steps == 12


def test_amp_at_its_best_is_compiled_bf16_in_channels_last_and_trains_as_plain_autocast_does() -> None:
    torch.manual_seed(0)
    pooled = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), *pooled)
    plain = copy.deepcopy(model)
    data = images(40)  # in whole batches: one compilation
    loop = baseline(model, "amp-best", data=data)
    assert set(loop.plan.precision.values()) == {BF16}
    assert isinstance(loop._model, torch._dynamo.OptimizedModule)
    assert model[2].weight.is_contiguous(memory_format=torch.channels_last)
    best, amp = loop.train_epoch(), baseline(plain, "amp", data=data).train_epoch()
    assert best.loss == pytest.approx(amp.loss, rel=0.01)
    assert loop.evaluate(data).loss == pytest.approx(baseline(plain, "amp").evaluate(data).loss, rel=0.02)


@pytest.mark.parametrize(("method", "dtype", "level"), [("fp32", torch.float32, FP32), ("amp", torch.bfloat16, BF16)])
def test_amp_on_a_cpu_computes_in_bf16(method: Baseline, dtype: torch.dtype, level: Precision) -> None:
    model, seen = ConvNet(), []
    loop = baseline(model, method)
    model.second.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs.dtype))
    loop.step()
    assert seen == [dtype]
    assert loop.plan.precision == dict.fromkeys(("first", "second", "head"), level)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert loop.num_skipped == 0
    loop.evaluate(images(8))
    assert seen[1] is torch.float32
    loop.close()


def test_it_stops_beyond_its_budget() -> None:
    held: list[Tensor] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        held.append(torch.ones(128 * MIB, dtype=torch.uint8))
        return cross_entropy(outputs, targets)

    loop = baseline(ConvNet(), "fp32", loss=loss, memory_budget=psutil.Process().memory_info().rss + 64 * MIB)
    with pytest.raises(BudgetExceededError, match="of a budget of"):
        loop.step()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # PyTorch's own first graph
@pytest.mark.gpu
def test_amp_at_its_best_trains_on_a_gpu_beside_evaluations_and_in_parts() -> None:
    torch.manual_seed(0)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4)
    model = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), *head).cuda()
    plain, data = copy.deepcopy(model), images(100)
    loop = baseline(model, "amp-best", data=data, accumulate=2)
    amp_loop = baseline(plain, "amp", data=data, accumulate=2)
    for _ in range(5):  # the last batch of an epoch is a short one
        assert loop.train_epoch().loss == pytest.approx(amp_loop.train_epoch().loss, rel=0.05)
        assert loop.evaluate(data).loss == pytest.approx(amp_loop.evaluate(data).loss, rel=0.1)
    assert set(loop.plan.precision.values()) == {BF16}


@pytest.mark.gpu
def test_a_step_that_the_scaler_skips_does_not_count_for_the_epochs_loss() -> None:
    factors, losses = iter([1.0, float("inf"), 1.0, 1.0, 1.0, 1.0]), []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        value = cross_entropy(outputs, targets) * next(factors)
        losses.append((value.item(), len(targets)))
        return value

    model = ConvNet().cuda()
    stats = BaselineLoop(model, sgd(model), loss, images(45), method="amp", batch_size=8).train_epoch()
    counted = [(value, num) for value, num in losses if math.isfinite(value)]
    assert len(counted) == 5
    assert stats.loss == pytest.approx(sum(value * num for value, num in counted) / sum(num for _, num in counted))


def test_without_a_scaler_a_loss_that_is_no_number_is_the_epochs() -> None:
    factors = iter([1.0, float("nan"), 1.0, 1.0, 1.0, 1.0])
    loop = baseline(ConvNet(), "amp", loss=lambda *given: cross_entropy(*given) * next(factors))
    assert math.isnan(loop.train_epoch().loss)


@pytest.mark.gpu
@pytest.mark.parametrize(("amp", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_amp_on_a_gpu_is_fp16_with_a_scaler_or_bf16_without(amp: Any, dtype: torch.dtype) -> None:
    model, seen = ConvNet().cuda(), []
    loop = BaselineLoop(model, sgd(model), cross_entropy, images(45), method="amp", amp=amp, batch_size=8)
    model.second.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs.dtype))
    for _ in range(6):
        loop.train_epoch()
    assert set(seen) == {dtype}
    assert bool(loop.state_dict()["scaler"]) == (amp == "fp16")
    assert loop.evaluate(images(40, seed=1)).metrics["accuracy"] >= 95.0
