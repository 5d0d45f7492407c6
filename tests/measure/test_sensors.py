import math
from typing import Any

import pytest
import torch

from tests.build import FP32, collected, mlp
from tests.decide.build import USUAL
from triaccel_ray.measure.curvature.spectrum import CurvatureEstimate
from triaccel_ray.measure.memory import ResidentMemory
from triaccel_ray.measure.moments import GradientMoments
from triaccel_ray.measure.sensors import Sensors, copied_to_host
from triaccel_ray.measure.timing import StepTimer
from triaccel_ray.model.layers import find_layers
from triaccel_ray.records.plan import Fault, FaultKind, Plan, Precision
from triaccel_ray.records.signals import NoiseSignal, Observation

PLAN = Plan(batch_size=8, precision={"0": FP32, "2": FP32, "4": FP32})
FAULT = Fault(kind=FaultKind.OUT_OF_MEMORY, step=3, phase="forward_backward", batch_size=8, micro_batch_size=4)
NAN = math.nan
ESTIMATE = CurvatureEstimate(
    matrices=torch.diag_embed(torch.tensor([[2.0, 3.0], [1.5, 0.5], [NAN, 1.0]], dtype=torch.float64)),
    counts=(2, 1, 2),
    noise=torch.tensor([-0.25, 7.0], dtype=torch.float64),
)
WITHOUT_NOISE = CurvatureEstimate(matrices=ESTIMATE.matrices, counts=ESTIMATE.counts)


def sensors_of() -> Sensors:
    """Sensors of a small network that has taken a step."""
    model = mlp()
    layers = find_layers(model)
    named: list[tuple[str, tuple[Precision, ...]]] = [(layer.name, USUAL) for layer in layers]
    named[1] = ("2", (FP32,))
    moments = GradientMoments(layers, list(model.parameters()), beta=0.5)
    sensors = Sensors(
        named, moments, ResidentMemory(None), StepTimer(torch.device("cpu")), torch.zeros(2, dtype=torch.float64)
    )
    model[0].weight.grad = torch.arange(model[0].weight.numel()).view_as(model[0].weight).float()
    moments.stats.update(collected(model).table, torch.tensor(2.0))
    return sensors


def read(sensors: Sensors, tick: int = 4) -> Observation:
    scale = torch.tensor([1024.0, 3.0, 2.0], dtype=torch.float64)  # the scale, steps skipped, of these in a row
    return sensors.read(PLAN, scale, step=100, tick=tick, epoch=1.5)()


def test_a_reading_holds_what_was_seen() -> None:
    sensors = sensors_of()
    sensors.losses += torch.tensor([6.0, 2])
    sensors.record_faults([FAULT])
    sensors.losses += torch.tensor([2.0, 6])
    sensors.record_faults([FAULT])
    seen = read(sensors)
    assert (seen.step, seen.tick, seen.epoch, seen.plan) == (100, 4, 1.5, PLAN)
    assert (seen.loss, seen.loss_scale, seen.num_skipped) == (1.0, 1024.0, 3)
    assert seen.faults == (FAULT, FAULT)
    assert [layer.name for layer in seen.layers] == ["0", "2", "4"]
    assert [layer.supported for layer in seen.layers] == [USUAL, (FP32,), USUAL]
    assert [layer.variance for layer in seen.layers[1:]] == [None, None]
    assert seen.layers[0].variance == pytest.approx((128**2 - 1) / 12 / 4, rel=1e-6)
    assert [layer.eigenvalues for layer in seen.layers] == [None] * 3
    assert seen.noise is None
    assert seen.memory.used_bytes > 0


@pytest.mark.parametrize("is_restored", [False, True])
@pytest.mark.parametrize(
    ("estimate", "noise"),
    [(ESTIMATE, NoiseSignal(mean_square_norm=-0.25, trace_covariance=7.0)), (WITHOUT_NOISE, None), (None, None)],
)
def test_a_reading_has_curvature_without_its_padding_once(
    estimate: CurvatureEstimate | None, noise: NoiseSignal | None, is_restored: bool
) -> None:
    sensors = sensors_of()
    sensors.losses += torch.tensor([6.0, 2])
    sensors.record_faults([FAULT])
    if estimate is not None:
        sensors.record_curvature(estimate)
    if is_restored:
        state: dict[str, Any] = sensors.state_dict()
        sensors = sensors_of()
        sensors.record_curvature(ESTIMATE)
        sensors.record_faults([FAULT, FAULT])
        sensors.load_state_dict(state)
    first, second = read(sensors), read(sensors, tick=5)
    spectra = [(3.0, 2.0), (1.5,), None] if estimate else [None] * 3
    assert [layer.eigenvalues for layer in first.layers] == spectra
    assert (first.loss, first.faults, first.noise) == (3.0, (FAULT,), noise)
    assert (second.tick, second.loss, second.faults, second.noise) == (5, None, (), None)
    assert [layer.eigenvalues for layer in second.layers] == [None] * 3
    assert second.layers[0].variance == first.layers[0].variance


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_reading_waits_for_the_device_it_comes_from() -> None:
    other = torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0
    values = torch.zeros(3, dtype=torch.float64, device=other)
    with torch.cuda.device(other):
        torch.cuda._sleep(200_000_000)  # a tenth of a second or so
        values.fill_(7.0)
    assert copied_to_host(values)().tolist() == [7.0] * 3
