import math
from typing import Any

import pytest
import torch

from tests.build import FP32
from tests.measure.build import PLAN, read, sensors_of
from triaccel_ray.measure.curvature.spectrum import CurvatureEstimate
from triaccel_ray.measure.sensors import copied_to_host
from triaccel_ray.records.plan import Fault, FaultKind, Precision
from triaccel_ray.records.signals import NoiseSignal

FAULT = Fault(kind=FaultKind.OUT_OF_MEMORY, step=3, phase="forward_backward", batch_size=8, micro_batch_size=4)
NAN = math.nan
ESTIMATE = CurvatureEstimate(
    matrices=torch.diag_embed(torch.tensor([[2.0, 3.0], [1.5, 0.5], [NAN, 1.0]], dtype=torch.float64)),
    counts=(2, 1, 2),
    noise=torch.tensor([-0.25, 7.0], dtype=torch.float64),
)
WITHOUT_NOISE = CurvatureEstimate(matrices=ESTIMATE.matrices, counts=ESTIMATE.counts)


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
    assert [layer.supported for layer in seen.layers] == [tuple(Precision), (FP32,), tuple(Precision)]
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
