import itertools
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from tests.service.worker_factory import Begin, last_of, records, train
from triaccel_ray.control import epochs
from triaccel_ray.control.epochs import EpochProgress
from triaccel_ray.measure.energy import board_joules, energy_counter
from triaccel_ray.records.events import Epoch
from triaccel_ray.service.runs.record import JOULES, joules_after
from triaccel_ray.service.tracking.metrics import metrics_of

CPU = torch.device("cpu")
COUNTER = "nvmlDeviceGetTotalEnergyConsumption"


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's counter in place of the CPU's, which has none: 100 J more at each reading."""
    readings = itertools.count(5_000_000, 100_000)
    monkeypatch.setattr(pynvml, COUNTER, lambda handle: next(readings))
    monkeypatch.setattr(epochs, "energy_counter", lambda device: lambda: board_joules(None))


def test_millijoules_become_joules(nvml: None) -> None:
    assert [board_joules(None), board_joules(None)] == [5000.0, 5100.0]


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION])
def test_a_gpu_without_the_counter_has_no_energy(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(handle: Any) -> int:
        raise pynvml.NVMLError(code)

    monkeypatch.setattr(pynvml, COUNTER, refuse)
    assert math.isnan(board_joules(None))
    assert math.isnan(energy_counter(CPU)())


def test_an_epoch_that_goes_on_elsewhere_has_the_joules_of_both_parts(nvml: None) -> None:
    sampler: Any = SimpleNamespace(epoch=1, num_samples=8)
    first, second = EpochProgress(CPU), EpochProgress(CPU)
    first.start()
    state = first.state_dict()
    board_joules(None)  # consumed in between, by whatever ran then
    second.load_state_dict(state)
    second.start()
    assert second.finish(sampler).joules == state["epoch_joules"] + 100.0 == 200.0
    second.start()
    assert second.finish(sampler).joules == 100.0  # an epoch of its own


@pytest.mark.parametrize("method", ["amp", "triaccel"])
def test_a_resumed_run_counts_each_epoch_once(nvml: None, start: Begin, tmp_path: Path, method: str) -> None:
    first = start(method=method)
    first.advance()
    first.checkpoint()
    first.advance()  # lost
    first.close()
    train(start(method=method)).finish()
    logged = [each for each in records(tmp_path) if isinstance(each, Epoch)]
    assert [each.joules for each in logged] == [100.0, 200.0, 300.0]
    assert metrics_of(logged[1])["energy/joules"] == 200.0
    spec = first.spec
    assert joules_after(logged[1], 100.0, replace(spec, device="auto", trials_per_gpu=2)) is None  # both runs' energy
    assert joules_after(replace(logged[1], joules=None), 100.0, spec) is None  # begun without a counter
    assert last_of(tmp_path).results[JOULES] == 300.0


def test_without_a_counter_a_run_has_no_energy(start: Begin, tmp_path: Path) -> None:
    train(start(method="fp32")).finish()
    assert {each.joules for each in records(tmp_path) if isinstance(each, Epoch)} == {None}
    assert JOULES not in last_of(tmp_path).results


@pytest.mark.gpu
def test_a_busy_gpu_consumes_more_than_nothing() -> None:
    read, matrix = energy_counter(torch.device("cuda")), torch.ones(4096, 4096, device="cuda")
    before = read()
    for _ in range(200):
        matrix = (matrix @ matrix).clamp(0.0, 1.0)
    torch.cuda.synchronize()
    assert 1.0 < read() - before < 10_000.0
