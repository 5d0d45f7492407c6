"""Captured steps against eager ones, on a real GPU."""

import gc
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.apply.captured import adamw, distance, fault_messages, faults_of, fixed, images, loop_of, network, sgd
from tests.build import Wired, run
from tests.decide.build import USUAL
from triaccel_ray.config import CurvatureConfig
from triaccel_ray.model.pytree import map_tensors
from triaccel_ray.records.plan import FaultKind, Precision
from triaccel_ray.trainables.bert import Bert

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("level", USUAL)
def test_captured_steps_equal_eager_ones(level: Precision, make: Any) -> None:
    models = network(), network()
    loops = [loop_of(m, fixed(level, capture=c), make) for m, c in zip(models, (True, False), strict=True)]
    for loop in loops:
        loop.train_epoch()
    assert [fault for fault in loops[0].sensors._faults if fault.kind is not FaultKind.COMPILED] == []
    assert loops[0]._training.steps.num_captured == 1
    assert loops[1]._training.steps.num_captured == 0
    # Both do the same arithmetic, but atomics in cuDNN's weight gradients may add in another order, and each of the ten
    # steps may then round anew: FP32 layers multiply in TF32, whose unit round-off is FP16's.
    unit_roundoff = {Precision.FP32: 2**-11, Precision.FP16: 2**-11, Precision.BF16: 2**-8}[level]
    assert distance(*models) < 10 * unit_roundoff
    assert float(loops[0].epoch_loss[0]) == pytest.approx(float(loops[1].epoch_loss[0]), rel=1e-2)


class Contiguous(nn.Module):
    """Takes activations out of channels_last memory."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.contiguous()


@pytest.mark.parametrize("contiguous", [False, True])
def test_a_model_is_laid_out_in_channels_last_memory_and_norms_that_meet_another_are_told_of_once(
    contiguous: bool,
) -> None:
    ticks: list[Any] = []
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), Contiguous() if contiguous else nn.Identity(), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    ).cuda()  # fmt: skip
    loop = loop_of(model, fixed(Precision.FP16, compile="auto"), on_tick=ticks.append)
    for _ in range(2):
        loop.train_epoch()
    faults = faults_of(ticks)
    found = [(fault.kind, fault.phase, fault.step) for fault in faults if "channels_last" in fault.detail]
    assert found == [(FaultKind.FUSION_REFUSED, "fuse", 0)] * contiguous
    notes = [fault.detail for fault in faults if fault.kind is FaultKind.COMPILED]
    assert notes == ["the model is not compiled: fused batch norms (1) are faster"]
    assert len(faults) == len(found) + 1
    assert loop._training.steps.num_captured == 1


def test_a_changed_learning_rate_changes_the_replayed_step() -> None:
    model = network()
    rate = [1.0]
    loop = loop_of(model, fixed(Precision.FP16, capture=True), schedule=lambda epoch: rate[0])
    run(loop, 3)
    assert loop._training.steps.num_captured == 1
    rate[0] = 0.0
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    loop.step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    rate[0] = 1.0
    loop.optimizer.optimizer.param_groups[0]["lr"] = 0.5
    loop.step()
    moved = [float((p.detach() - before[name]).norm()) for name, p in model.named_parameters()]
    assert min(moved) > 0.0
    assert loop._training.steps.num_captured == 1


def test_the_loss_scale_moves_and_an_overflow_skips_a_replayed_step() -> None:
    model = network()
    loop = loop_of(model, fixed(Precision.FP16, capture=True))
    run(loop, 3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    loop.loss_scale.state.scale.fill_(2.0**24 * 2**24)  # no gradient survives this in FP16
    loop.step()
    assert loop.num_skipped == 1
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert float(loop.loss_scale.state.scale) <= 2.0**24


def test_dropout_draws_anew_at_every_replay() -> None:
    class Recorder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(64, 64))

        def forward(self, inputs: Tensor) -> Tensor:
            self.last[: len(inputs)].copy_(inputs.detach())
            return inputs

    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 64), nn.Dropout(0.5), Recorder(), nn.Linear(64, 10)).cuda()
    data = images(64, size=4)
    loop = loop_of(model, fixed(Precision.FP32, capture=True), data=data, schedule=lambda epoch: 1e-9)
    seen = []
    for _ in range(4):
        loop.step()
        seen.append(model[3].last == 0)
    assert loop._training.steps.num_captured == 1
    assert not torch.equal(seen[2], seen[3])


class Waiting(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * (1.0 if float(inputs.detach().mean()) > -1e9 else 2.0)


def test_a_model_that_waits_for_the_device_runs_eagerly_and_says_so() -> None:
    ticks: list[Any] = []
    loop = loop_of(nn.Sequential(network(), Waiting()), fixed(Precision.FP16, capture=True), on_tick=ticks.append)
    loop.train_epoch()
    assert loop._training.steps.num_captured == 0
    (fault,) = [fault for fault in faults_of(ticks) if fault.kind is FaultKind.CAPTURE_FAILED]
    assert "waits for the device" in fault.detail


class Uncapturable(nn.Module):
    """Does what a capture refuses, but no operation of PyTorch's waits for the device."""

    def forward(self, inputs: Tensor) -> Tensor:
        torch.cuda.synchronize()
        return inputs


def test_a_broken_capture_costs_neither_memory_nor_random_numbers_and_training_goes_on() -> None:
    held, ticks = torch.cuda.memory_reserved(), list[Any]()
    model = nn.Sequential(network(dropout=0.5), Uncapturable())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = fixed(Precision.FP16, capture=True, batch=512)
        loop = loop_of(model, config, data=images(1024, size=64), on_tick=ticks.append)
        assert [loop.train_epoch().num_samples for _ in range(3)] == [1024] * 3
    assert not loop._training.steps.enabled
    faults = faults_of(ticks)
    assert FaultKind.CAPTURE_FAILED in [fault.kind for fault in faults]
    assert torch.rand(8, device="cuda").unique().numel() == 8
    assert torch.rand(8, device="cuda", generator=loop.sampler.generator).unique().numel() == 8
    loop.close()
    del loop, model
    gc.collect()
    torch.cuda.empty_cache()
    # PyTorch keeps a workspace of 32 MiB for each thread and stream that has multiplied matrices.
    assert torch.cuda.memory_reserved() <= held + 160 * 2**20
    after = loop_of(network(dropout=0.5), fixed(Precision.FP16, capture=True))
    after.train_epoch()
    assert after._training.steps.num_captured == 1


def test_a_resumed_run_equals_an_uninterrupted_one() -> None:
    config = replace(fixed(Precision.BF16, capture=True), curvature=CurvatureConfig(every_steps=4, num_samples=16))
    whole = loop_of(network(dropout=0.2), config)
    run(whole, 7)
    state = map_tensors(torch.clone, whole.state_dict())
    run(whole, 8)
    resumed = loop_of(network(dropout=0.2), config)
    resumed.load_state_dict(state)
    run(resumed, 8)
    assert distance(whole.model, resumed.model) < 1e-3


def test_host_data_is_copied_into_the_captured_step() -> None:
    inputs, targets = images(640)
    items = [(inputs[i].cpu(), int(targets[i])) for i in range(640)]
    models = network(), network()
    first = loop_of(models[0], fixed(Precision.FP32, capture=True), data=items)
    second = loop_of(models[1], fixed(Precision.FP32, capture=False), data=(inputs, targets))
    for loop in (first, second):
        loop.train_epoch()
    assert first._training.steps.num_captured == 1
    assert distance(*models) < 1e-3


def test_graphs_and_eager_steps_do_not_hold_memory_at_once() -> None:
    """The peak of a captured run stays near the eager one's."""
    peaks = []
    for capture in (False, True):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        loop = loop_of(network(), fixed(Precision.FP16, capture=capture, batch=512), data=images(1500, size=64))
        for _ in range(2):
            loop.train_epoch()
        peaks.append(torch.cuda.max_memory_reserved() - before)
        loop.close()
        del loop
    assert peaks[1] <= 1.15 * peaks[0]


def test_run_after_run_in_one_process_leaves_no_more_memory_behind() -> None:
    """Libraries keep workspaces for each stream that was ever computed on: all runs use the same one."""
    left = []
    for _ in range(3):
        loop = loop_of(network(), fixed(Precision.FP16, capture=True))
        loop.train_epoch()
        loop.evaluate(images(64))
        loop.close()
        del loop
        gc.collect()
        torch.cuda.empty_cache()
        left.append(torch.cuda.memory_reserved())
    assert left[1] == left[2]


def test_a_hook_registered_after_capture_fires_and_no_graph_reads_the_copy_that_went() -> None:
    models = network(), network()
    seen: list[torch.dtype] = []
    for model, capture in zip(models, (True, False), strict=True):
        loop = loop_of(model, fixed(Precision.FP16, capture=capture))
        run(loop, 3)
        assert loop._training.steps.num_captured == int(capture)
        weight = model[9].weight
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.dtype))
        loop.step()
        assert seen[-1] is torch.float32
        copies = loop._training.precision.weights
        assert copies is not None
        assert id(weight) not in copies.companions
        held = [torch.full((10, 64), torch.nan, dtype=torch.half, device="cuda") for _ in range(4096)]  # where it was
        run(loop, 4)
        assert loop._training.steps.num_captured == int(capture)
        assert all(p.isfinite().all() for p in model.parameters())
        del held
    assert distance(*models) < 10 * 2**-11


class Logits(nn.Module):
    """A small decoder of transformers, which looks at its positions to see whether it needs a mask: the host waits."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM  # the other tests do without

        super().__init__()
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2}
        self.decoder = LlamaForCausalLM(LlamaConfig(vocab_size=96, use_cache=False, **sizes))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(tokens).logits


@pytest.mark.parametrize(
    ("name", "activations"), [("BertLayer", "keep"), ("LlamaDecoderLayer", "keep"), ("LlamaDecoderLayer", "recompute")]
)
def test_models_of_transformers_are_captured_with_their_blocks(name: str, activations: str) -> None:
    torch.manual_seed(0)
    model = Bert(layers=4, width=64, heads=2, context=16) if name == "BertLayer" else Logits()
    tokens, ticks = torch.randint(0, 96, (640, 16)).cuda(), list[Any]()
    config = fixed(Precision.BF16, compile="auto", activations=activations)
    model = nn.Sequential(model.cuda(), Wired(lambda self, x: x.mean(1)))
    loop = loop_of(model, config, data=(tokens, tokens[:, 0] % 7), on_tick=ticks.append)
    for _ in range(2):
        loop.train_epoch()
    assert loop._training.steps.num_captured == 1
    messages = [each for each in fault_messages(ticks) if "compiled" in each or "capture" in each]
    assert messages == [f"compiled: 4 x {name} compiled: its blocks repeat"]
    loop.close()
