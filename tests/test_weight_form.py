"""Loops whose settings leave the form of the weights open: what they choose, and that they train as if told so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.apply.test_split_weights import EVERY, IN_BF16, OPTIMIZERS, run
from tests.build import Wired, blobs, cross_entropy, mlp, same, values
from tests.data.test_iterable import Telling
from triaccel_ray.apply.fused_optimizer import state_bytes
from triaccel_ray.config import ControlConfig, PrecisionConfig
from triaccel_ray.decide import replay
from triaccel_ray.loop import ControlLoop
from triaccel_ray.records.checkpoint import load_checkpoint, save_checkpoint
from triaccel_ray.records.events import Tick
from triaccel_ray.records.plan import Precision, ReasonCode, WeightForm
from triaccel_ray.records.signals import ParameterSignal

pytestmark = pytest.mark.usefixtures("small_buckets")

LARGE = replace(IN_BF16.batch, start=10**6, maximum=10**6)
"""A first batch that is predicted to take 400 MB, and passes as the 40 samples that there are."""
OPEN = replace(IN_BF16, weights="auto", step_in_backward="auto", batch=LARGE, every_steps=2)
TIGHT, ROOMY = 200 * 2**20, 8 * 2**30
"""Headrooms that suffice for the 40 samples; the first is predicted not to."""


def deep(*, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    inner = [part for _ in range(6) for part in (nn.Linear(16, 16), nn.ReLU())]
    return nn.Sequential(nn.Linear(8, 16), *inner, nn.Linear(16, 4))


def loop_of(
    model: nn.Module, config: Any = OPEN, kind: Any = "adamw", headroom: Any = TIGHT, data: Any = None, **options: Any
) -> ControlLoop:
    """A loop; `kind` names its optimizer, or makes one."""
    optimizer = OPTIMIZERS.get(kind, kind)(model.parameters())
    data = blobs(40) if data is None else data
    return ControlLoop(model, optimizer, cross_entropy, data, config=config, memory_headroom=headroom, **options)


def form_of(loop: ControlLoop) -> WeightForm:
    """The form that the loop's steps really have."""
    is_split = loop._training._split_weights is not None
    return WeightForm(is_split=is_split, steps_in_backward=loop._training._stepper is not None)


def texts_of(tick: Tick) -> list[str]:
    return [reason.text for reason in tick.decision.reasons if reason.code is ReasonCode.WEIGHT_FORM]


@EVERY
@pytest.mark.parametrize(
    ("changes", "headroom", "given"),
    [
        ({}, TIGHT, {"weights": "split", "step_in_backward": True}),
        ({"clip_norm": 0.5}, TIGHT, {"weights": "split", "step_in_backward": False}),
        ({"weights": "fp32"}, TIGHT, {"step_in_backward": True}),
        ({"step_in_backward": False}, TIGHT, {"weights": "split"}),
        ({}, ROOMY, {"weights": "fp32", "step_in_backward": False}),
        ({}, None, {"weights": "fp32", "step_in_backward": False}),
    ],
)
def test_it_trains_bit_for_bit_as_with_the_settings_that_it_chooses(
    changes: Any, headroom: int | None, given: Any, kind: str
) -> None:
    ticks: list[Tick] = []
    model, twin = deep(), deep()
    config = replace(OPEN, **changes)
    loop = loop_of(model, config, kind, headroom, on_tick=ticks.append)
    explicit = loop_of(twin, replace(config, **given), kind, headroom)
    assert form_of(loop) == form_of(explicit)
    run(loop, 6)
    run(explicit, 6)
    assert same(values(model), values(twin))
    assert same(loop.optimizer.state_dict(), explicit.optimizer.state_dict())
    loop.close()
    assert ticks[0].decision.state.form == (None if headroom is None else form_of(explicit))
    num_open = [config.weights, config.step_in_backward].count("auto")
    assert len(texts_of(ticks[0])) == (0 if headroom is None else num_open)
    assert not any(texts_of(tick) for tick in ticks[1:])
    log = [(tick.observation, tick.decision) for tick in ticks]
    assert replay(config, log).decisions == tuple(tick.decision for tick in ticks)


def test_a_resumed_run_has_the_same_form_and_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, first, second = deep(), deep(), deep(seed=1)
    ticks: list[Tick] = []
    uninterrupted = loop_of(whole)
    run(uninterrupted, 8)
    loop = loop_of(first)
    run(loop, 4)
    save_checkpoint(tmp_path / "checkpoint.pt", loop.state_dict())
    resumed = loop_of(second, on_tick=ticks.append)
    resumed.load_state_dict(load_checkpoint(tmp_path / "checkpoint.pt"))
    assert form_of(resumed) == form_of(loop) == WeightForm(is_split=True, steps_in_backward=True)
    for _ in range(4):
        resumed.step()
    assert same(values(second), values(whole))
    assert ticks
    assert not any(map(texts_of, ticks))  # said by the first run


def test_a_run_that_resumes_with_more_memory_goes_on_in_the_plain_form_and_says_so(tmp_path: Path) -> None:
    model, ticks = deep(), []
    loop = loop_of(deep())
    run(loop, 4)
    save_checkpoint(tmp_path / "checkpoint.pt", loop.state_dict())
    before = values(loop.model)
    resumed = loop_of(model, headroom=ROOMY, on_tick=ticks.append)
    resumed.load_state_dict(load_checkpoint(tmp_path / "checkpoint.pt"))
    assert same(values(model), before)
    run(resumed, 2)
    resumed.close()
    assert [text.partition(":")[0] for text in texts_of(ticks[0])] == [
        "weights stay FP32",
        "parameters are updated after the backward pass",
    ]


def hooked() -> nn.Module:
    model = deep()
    model[0].weight.register_hook(lambda gradient: 2 * gradient)
    return model


def unwatchable() -> nn.Module:
    """A model whose forward pass cannot be watched: functorch refuses hooks on saved tensors."""
    return Wired(lambda self, x: self.inner(torch.func.grad(lambda x: (x**2).sum())(x)), inner=mlp())


@pytest.mark.parametrize(
    ("make", "kind", "reason"),
    [
        (deep, lambda p: torch.optim.RMSprop(p, lr=1e-3), "no kernel steps RMSprop"),
        (deep, lambda p: torch.optim.AdamW(p, lr=1e-3), "the optimizer is neither fused nor capturable"),
        (hooked, "adamw", "hooks act on gradients"),
        (unwatchable, "adamw", "two samples cannot be passed to measure what they save: "),
    ],
)
def test_what_allows_no_other_keeps_the_plain_form(make: Any, kind: Any, reason: str) -> None:
    ticks: list[Tick] = []
    loop = loop_of(make(), kind=kind, on_tick=ticks.append)
    run(loop, 2)
    loop.close()
    assert form_of(loop) == WeightForm()
    of_weights, of_steps = texts_of(ticks[0])
    assert of_weights.startswith(f"weights stay FP32: {reason}")
    assert of_steps.startswith(f"parameters are updated after the backward pass: {reason}")


def test_an_error_of_the_users_code_is_raised_as_without_auto() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        raise KeyError("no such class")

    messages = []
    for config in (OPEN, IN_BF16):
        model = mlp()
        with pytest.raises(ValueError, match="the loss raised KeyError") as error:
            ControlLoop(model, OPTIMIZERS["adamw"](model.parameters()), loss, blobs(40), config=config)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


class Stream(Telling):
    """Remembers where it has been."""

    def __init__(self) -> None:
        super().__init__(40)
        self.read: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            self.read.append(self.at)
            yield sample


def test_measuring_reads_no_sample_of_a_stream_twice() -> None:
    streams = Stream(), Stream()
    for stream, config in zip(streams, (OPEN, IN_BF16), strict=True):
        loop = loop_of(mlp(), config, data=stream)
        loop.train_epoch()
    assert streams[0].read == streams[1].read


def test_the_signal_has_the_bytes_of_model_state_samples_and_saved_tensors() -> None:
    model = mlp()  # 128 + 16, 256 + 16, 64 + 4 elements
    loop = loop_of(model, replace(OPEN, batch=replace(LARGE, start=64)))
    assert loop._training.parameters == ParameterSignal(
        num_elements=484,
        num_in_bf16=448,
        bucket_elements=272,
        model_bytes=4 * 484,
        state_bytes=8 * 484,
        shared_state_bytes=8 * 484,
        saved_bytes=64 * (4 * (8 + 16 + 16) + 4 * 4 + 8) + 32 * 4,  # inputs, activations, log-softmax, targets, weight
        data_bytes=40 * (4 * 8 + 8),
        headroom_bytes=TIGHT,
    )


@pytest.mark.parametrize("in_8_bits", [False, True])
@EVERY
def test_the_bytes_of_the_state_are_those_allocated(kind: str, in_8_bits: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))  # 4096 elements in codes
    optimizer = OPTIMIZERS[kind](model.parameters())
    config = replace(IN_BF16, optimizer_state="8bit" if in_8_bits else "fp32")
    data = torch.randn(8, 64), torch.arange(8) % 4
    ControlLoop(model, optimizer, cross_entropy, data, config=config)
    state = [tensor for each in optimizer.state.values() for tensor in each.values() if tensor.dim()]
    assert state_bytes(optimizer, in_8_bits=in_8_bits) == sum(tensor.nbytes for tensor in state)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    assert state_bytes(plain, in_8_bits=in_8_bits) == 0


@pytest.mark.parametrize(
    ("precision", "may_use_fp16"),
    [
        (PrecisionConfig(allow_slow_precisions=True), True),
        (PrecisionConfig(allow_slow_precisions=True, tau_low=0.0), False),
        (PrecisionConfig(allow_slow_precisions=True, enabled=False), False),
        (PrecisionConfig(allow_slow_precisions=True, enabled=False, initial=Precision.FP16), True),
    ],
)
def test_whether_layers_may_compute_in_fp16(precision: PrecisionConfig, may_use_fp16: bool) -> None:
    loop = loop_of(deep(), replace(OPEN, precision=precision))
    assert loop._training.parameters.may_use_fp16 is may_use_fp16


@pytest.mark.parametrize(
    ("config", "headroom"),
    [(replace(OPEN, weights="split", step_in_backward=False, shard_optimizer=False), TIGHT), (OPEN, None)],
    ids=["without auto", "without a budget"],
)
def test_nothing_is_measured_if_nothing_is_to_be_chosen(config: ControlConfig, headroom: int | None) -> None:
    ticks: list[Tick] = []
    loop = loop_of(deep(), config, headroom=headroom, on_tick=ticks.append)
    run(loop, 2)
    assert loop._training.parameters is None
    assert ticks[0].observation.parameters is ticks[0].decision.state.form is None
