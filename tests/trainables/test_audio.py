"""A sound learned by a network of sines: its data, its model, and which layers need FP32."""

import math
from dataclasses import replace

import pytest
import torch

from triaccel_ray import BatchConfig, ControlLoop, CurvatureConfig, PrecisionConfig
from triaccel_ray.data.sources import TensorSource
from triaccel_ray.decide import throughput
from triaccel_ray.records.plan import Precision
from triaccel_ray.trainables.audio import SIGNAL_TO_NOISE, AudioSiren, melody, siren
from triaccel_ray.trainables.task import Purpose

EPOCHS = 60
FIRST, LATER, LAST = "0.linear", ("1.linear", "2.linear"), "3"


class Small(AudioSiren):
    layers, width, seconds, rate = 3, 64, 1, 16_000


def train(precision: PrecisionConfig, *, revert_slowdowns: bool = True) -> tuple[float, dict[str, Precision]]:
    """Trains a small network; returns the signal-to-noise ratio of the validation samples, and the final precisions."""
    task = Small()
    data, recipe = task.data(Purpose.SEARCH), replace(task.recipe, epochs=EPOCHS, lr=3e-4)
    batch = BatchConfig(enabled=False, start=512, minimum=512, maximum=512)
    control = replace(
        task.control, precision=precision, batch=batch, curvature=CurvatureConfig(enabled=False), every_steps=5,
        revert_slowdowns=revert_slowdowns,
    )  # fmt: skip
    torch.manual_seed(0)
    model = task.model()
    loop = ControlLoop(
        model, task.optimizer(model, recipe), lambda outputs, targets: task.loss(outputs, targets, recipe), data.train,
        config=control, schedule=recipe.lr_factor, epochs=EPOCHS,
    )  # fmt: skip
    for _ in range(EPOCHS):
        loop.train_epoch()
    value = loop.evaluate(data.held_out, metrics=task.metrics).metrics["snr_db"]
    loop.close()
    return value, dict(loop.plan.precision)


MIXED = dict.fromkeys(LATER, Precision.BF16) | {FIRST: Precision.FP32, LAST: Precision.BF16}


def test_bf16_alone_does_not_learn_the_sound_and_fp32_does() -> None:
    assert train(PrecisionConfig(enabled=False))[0] < 1.0
    assert train(PrecisionConfig(enabled=False, initial=Precision.FP32))[0] > 20.0


@pytest.mark.parametrize(
    ("config", "is_checked"),
    [(PrecisionConfig(), True), (AudioSiren.control.precision, False), (AudioSiren.control.precision, True)],
    ids=["check of the new model", "variance", "both"],
)
def test_the_loop_finds_the_one_layer_that_needs_fp32(
    config: PrecisionConfig, is_checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throughput, "_TOLERANCE", math.inf)  # a busy machine must not undo what is tested
    value, precisions = train(config, revert_slowdowns=is_checked)
    assert value > 20.0
    assert precisions == MIXED


def test_splits_are_disjoint_complete_and_the_same_for_every_seed() -> None:
    search, final = Small().data(Purpose.SEARCH), Small().data(Purpose.FINAL)
    torch.manual_seed(2)
    again = Small().data(Purpose.SEARCH)
    sources = (search.train, search.held_out, final.held_out, final.train, again.train)
    inputs = [source.inputs for source in sources if isinstance(source, TensorSource)]
    trained, validation, test, trained_at_last, trained_again = inputs
    assert torch.equal(trained, trained_again)
    times = torch.cat((trained, validation, test)).flatten()
    assert len(times) == len(times.unique()) == 16_000
    assert torch.equal(trained_at_last, torch.cat((trained, validation)))
    assert trained.untyped_storage().nbytes() == 4 * len(trained)  # no sample of the others behind it


def test_the_sound_has_unit_power_and_no_overtone_above_half_of_the_rate() -> None:
    sound = melody(16_000, 16_000)
    assert sound.square().mean().item() == pytest.approx(1.0)
    spectrum = torch.fft.rfft(sound).abs().square()  # bins of 1 Hz
    assert spectrum[4000:].sum() < 1e-3 * spectrum.sum()


def test_decibels_are_those_of_the_error_against_unit_power() -> None:
    outputs, targets = torch.tensor([[0.1], [0.3]]), torch.zeros(2, 1)
    values = SIGNAL_TO_NOISE.values(outputs, targets)
    assert isinstance(values, torch.Tensor)
    mean = values.mean().item()
    assert SIGNAL_TO_NOISE.of_mean(mean) == pytest.approx(-10 * math.log10(0.05))
    assert SIGNAL_TO_NOISE.of_mean(0.0) == 120.0


def test_outputs_of_each_layer_are_distributed_alike() -> None:
    torch.manual_seed(0)
    x = torch.rand(4096, 1) * 2 - 1
    for layer in siren(layers=5, width=256)[:-1]:
        x = layer(x)
        assert x.std().item() == pytest.approx(math.sqrt(0.5), abs=0.05)
