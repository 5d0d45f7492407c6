"""What becomes of a loop whose curvature cannot be measured, or not any more."""

import copy
from dataclasses import replace
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn

from tests.build import BF16, QUIET, ConvNet, Limited, Wired, blobs, cross_entropy, images, loop_of, mlp, same, values
from triaccel_ray.config import CurvatureConfig, PrecisionConfig
from triaccel_ray.control import curvature as control_curvature
from triaccel_ray.control.curvature import ScheduledCurvature
from triaccel_ray.data.sources import TensorSource
from triaccel_ray.decide.curvature import DRY_RUN_S, measuring_share
from triaccel_ray.loop import ControlLoop
from triaccel_ray.measure import timing
from triaccel_ray.measure.curvature.meter import CurvatureMeter
from triaccel_ray.records.events import Tick
from triaccel_ray.records.plan import FaultKind


def test_the_dry_run_comes_before_layers_leave_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of weights in 16 bits would add to its peak."""
    seen = []
    monkeypatch.setattr(
        ScheduledCurvature, "start", lambda self: seen.append(set(self._training.precision.dtypes.values()))
    )
    precision = PrecisionConfig(enabled=False, initial=BF16, allow_slow_precisions=True)
    loop, _ = loop_of(mlp(), blobs(32), replace(QUIET, precision=precision))
    assert seen == [{torch.float32}]
    assert set(loop._training.precision.dtypes.values()) == {torch.bfloat16}


class Moody(Limited):
    """Fails when it is not training, as a measurement does it."""

    def __init__(self, error: Exception, *, is_broken: bool = True) -> None:
        super().__init__(1000)
        self.error, self.is_broken = error, is_broken

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training and self.is_broken:
            raise self.error
        return inputs


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room for curvature"), MemoryError()])
def test_a_measurement_that_does_not_fit_is_survived(error: Exception) -> None:
    loop, ticks = loop_of(nn.Sequential(mlp(), Moody(error)), blobs(240))
    loop.train_epoch()
    (fault,) = ticks[1].observation.faults
    assert (fault.kind, fault.phase, fault.step) == (FaultKind.OUT_OF_MEMORY, "curvature", 8)
    assert fault.micro_batch_size == 8
    assert fault.detail == (str(error) or "MemoryError")
    assert all(layer.eigenvalues is None for tick in ticks for layer in tick.observation.layers)
    assert ticks[-1].observation.loss < ticks[0].observation.loss


def curvature_faults(ticks: list[Tick]) -> list[tuple[FaultKind, int, str]]:
    faults = [fault for tick in ticks for fault in tick.observation.faults if fault.phase == "curvature"]
    return [(fault.kind, fault.step, fault.detail) for fault in faults]


def paired() -> nn.Module:
    """Takes samples and a table that all of them share."""
    return Wired(lambda self, inputs, table: self.body(inputs + table.mean(dim=0)), body=mlp())


class PairedSource(TensorSource):
    def batch(self, indices: Tensor, generator: torch.Generator | None) -> tuple[Any, Tensor]:
        inputs, targets = super().batch(indices, generator)
        return (inputs, torch.ones(7, 8)), targets

    def to(self, device: torch.device) -> Self:
        return self


class Brittle(TensorSource):
    """Cannot be read for a measurement of curvature, once it is broken."""

    is_broken = False

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> Any:
        if self.is_broken and generator is None:
            raise OSError("the disk is gone")
        return super().batch(indices, generator)


def long_sequences() -> tuple[Tensor, Tensor]:
    return torch.randn(64, 90, 8), torch.randint(4, (64, 90))


def sequence_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    ("model", "data", "method", "reason"),
    [
        (mlp, long_sequences(), "ggn", "ggn cannot be measured: outputs of 360 numbers per sample give"),
        (paired, PairedSource(*blobs(64)), "fisher", "fisher cannot be measured: inputs and targets have shapes [(2"),
        (mlp, blobs(1), "fisher", "fisher cannot be measured: number of samples = 1: fisher needs at least 2"),
        (
            lambda: nn.Sequential(mlp(), Moody(LookupError("eval mode is broken"))), blobs(64), "fisher",
            "fisher cannot be measured: eval mode is broken",
        ),
    ],
)  # fmt: skip
def test_curvature_that_cannot_be_measured_is_off_from_the_first_step_on(
    model: Any, data: Any, method: Any, reason: str
) -> None:
    config = replace(QUIET, curvature=CurvatureConfig(every_steps=2, method=method), every_steps=4)
    loss = sequence_loss if method == "ggn" else cross_entropy
    loop, ticks = loop_of(model(), data, config, loss=loss)
    for _ in range(2):
        loop.train_epoch()
    loop.tick()
    ((kind, step, detail),) = curvature_faults(ticks)
    assert (kind, step) == (FaultKind.CURVATURE_OFF, 0)
    assert detail.startswith(reason)
    assert all(layer.eigenvalues is None for tick in ticks for layer in tick.observation.layers)


class Clock:
    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time as the test says, of which measurements have a share, as on a GPU."""
    clock = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(control_curvature, "has_share", lambda *_: True)
    return clock


@pytest.mark.parametrize("works", [True, False])
def test_curvature_for_the_log_alone_is_tried_once_its_share_of_the_time_allows(
    works: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(mlp(), Moody(LookupError("eval mode is broken"), is_broken=not works))
    batch = replace(QUIET.batch, enabled=False)
    config = replace(QUIET, every_steps=4, curvature=CurvatureConfig(every_steps=4), batch=batch)
    with monkeypatch.context() as before:
        before.setattr(CurvatureMeter, "dry_run", lambda *_: pytest.fail("measures before the first step"))
        loop, ticks = loop_of(model, blobs(64), config)
    loop.train_epoch()
    assert [fault[:2] for fault in curvature_faults(ticks)] == [(FaultKind.CURVATURE_WAITS, 4)]
    clock.now += DRY_RUN_S / measuring_share(config)
    loop.train_epoch()
    loop.tick()
    measured = any(layer.eigenvalues for tick in ticks for layer in tick.observation.layers)
    assert (measured, bool(loop.curvature.off_because)) == (works, not works)
    assert len(curvature_faults(ticks)) == (1 if works else 2)


@pytest.mark.parametrize("alpha", [0.0, 0.1])
def test_measurements_that_are_used_have_the_whole_share_and_the_first_does_not_wait_for_the_dry_runs(
    alpha: float, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def taking(seconds: float, name: str) -> Any:
        call = getattr(CurvatureMeter, name)

        def timed(*args: Any, **options: Any) -> Any:
            clock.now += seconds
            done.append(name)
            return call(*args, **options)

        return timed

    for name, seconds in {"dry_run": 9.0, "measure": 1.0}.items():
        monkeypatch.setattr(CurvatureMeter, name, taking(seconds, name))
    config = replace(QUIET, every_steps=100, curvature=CurvatureConfig(every_steps=1, alpha=alpha), max_overhead=0.02)
    loop, _ = loop_of(mlp(), blobs(64), config)

    def after(seconds: float, *, waits: bool) -> list[int]:
        clock.now += seconds
        loop.state = replace(loop.state, batch=replace(loop.state.batch, waits_for_noise=waits))
        done.clear()
        loop.step()
        return [*done]

    if alpha:
        assert done == ["dry_run"]
        assert after(0.0, waits=False) == ["measure"]
        assert after(80.0, waits=False) == []
        assert after(20.0, waits=False) == ["measure"]
        return
    assert after(10.0, waits=False) == []  # a dry run of 2 s must be a two-hundredth of the time
    assert after(0.0, waits=True) == ["dry_run"]
    assert after(0.0, waits=True) == ["measure"]
    assert after(20.0, waits=True) == []  # a second of 1 s must be within a fiftieth of the time
    assert after(80.0, waits=True) == ["measure"]
    assert after(120.0, waits=False) == []
    assert after(400.0, waits=False) == ["measure"]


def test_a_measurement_that_would_take_too_long_is_planned_once_until_its_share_allows_it(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning takes of the share, too: repeated, it would use it up."""
    done: list[str] = []

    def prepare(*_: Any, **options: Any) -> float:
        clock.now += 1.0
        done.append("prepare")
        return 26.0

    def measure(*_: Any) -> None:
        done.append("measure")
        raise torch.OutOfMemoryError("no room for curvature")

    monkeypatch.setattr(CurvatureMeter, "prepare", prepare)
    monkeypatch.setattr(CurvatureMeter, "measure", measure)
    config = replace(QUIET, every_steps=100, curvature=CurvatureConfig(every_steps=1, alpha=0.1), max_overhead=0.02)
    loop, _ = loop_of(mlp(), blobs(64), config)
    loop.step()
    for _ in range(12):
        clock.now += 100.0
        loop.step()
    assert done == ["prepare"]
    clock.now += 1500.0
    loop.step()
    assert done == ["prepare", "prepare", "measure"]


@pytest.mark.gpu
def test_a_late_dry_run_leaves_captured_steps_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = []
    for assumed_s in (0.0, 1e9):
        monkeypatch.setattr(control_curvature, "DRY_RUN_S", assumed_s)
        torch.manual_seed(3)
        fixed = replace(QUIET.batch, enabled=False)  # an elastic one follows what other programs take of the GPU
        config = replace(QUIET, every_steps=4, curvature=CurvatureConfig(every_steps=8), batch=fixed)
        data = tuple(each.cuda() for each in images(240))
        loop, ticks = loop_of(ConvNet().cuda(), data, config)
        losses.append([loop.train_epoch().loss for _ in range(3)])
        assert loop._curvature._was_dry_run == (not assumed_s)
        assert {kind for kind, *_ in curvature_faults(ticks)} <= {FaultKind.CURVATURE_WAITS}
        assert loop._training.steps.num_captured
        loop.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


class Queue(nn.Module):
    """A network that keeps count of its samples, in training and in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("num_samples", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.num_samples += len(inputs)
        return self.linear(inputs)


class Centered(nn.Module):
    """A loss that subtracts the moving average of the outputs in training mode, and adds noise."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(4))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.training:
            self.center = 0.9 * self.center + 0.1 * outputs.detach().mean(0)
        return cross_entropy(outputs - self.center + 0.1 * torch.randn_like(outputs), targets)


@pytest.mark.parametrize("method", ["fisher", "ggn", "hessian"])
def test_measuring_changes_neither_buffers_nor_random_numbers_of_model_and_loss(method: Any) -> None:
    found = []
    for enabled in (False, True):
        torch.manual_seed(3)
        model, loss = Queue(), Centered()
        config = replace(QUIET, curvature=CurvatureConfig(enabled=enabled, every_steps=2, num_samples=8, method=method))
        torch.manual_seed(4)
        loop, _ = loop_of(model, blobs(24), config, loss=loss)
        value = loop.train_epoch().loss
        assert model.num_samples == 24
        found.append((value, values(model), loss.center))
        assert (loop.tick().decision.state.layers["linear"].eigenvalues is not None) == enabled
    assert same(found[0], found[1])


@pytest.mark.parametrize("breaks_when_resumed", [False, True])
def test_an_error_after_measurements_switches_curvature_off_for_good_and_is_told_of(breaks_when_resumed: bool) -> None:
    def moody(*, is_broken: bool) -> tuple[ControlLoop, list[Tick]]:
        return loop_of(nn.Sequential(mlp(), Moody(RuntimeError("not here"), is_broken=is_broken)), blobs(240))

    loop, ticks = moody(is_broken=False)
    for _ in range(9):
        loop.step()
    assert loop.state.layers["0.0"].eigenvalues is not None
    if not breaks_when_resumed:
        loop.model[1].is_broken = True
        loop.train_epoch()
        assert loop.state.layers["0.0"].eigenvalues is None
    state = copy.deepcopy(loop.state_dict())
    loop.close()
    resumed, later = moody(is_broken=breaks_when_resumed)
    resumed.load_state_dict(state)
    resumed.train_epoch()
    told, step = (later, 0) if breaks_when_resumed else (ticks, 16)
    assert curvature_faults(told) == [(FaultKind.CURVATURE_OFF, step, "fisher cannot be measured: not here")]
    assert resumed.state.layers["0.0"].eigenvalues is None
    assert all(layer.eigenvalues is None for tick in later for layer in tick.observation.layers)


def test_an_error_of_the_data_is_no_error_of_curvature() -> None:
    loop, ticks = loop_of(mlp(), Brittle(*blobs(64)), replace(QUIET, curvature=CurvatureConfig(every_steps=2)))
    loop.step()
    loop.sampler.source.is_broken = True
    with pytest.raises(OSError, match="the disk is gone"):
        loop.step()
    loop.close()
    assert curvature_faults(ticks) == []


def test_layers_that_fall_back_are_told_of_once_with_their_reason() -> None:
    weight = nn.Parameter(torch.eye(4))
    deciding = Wired(lambda self, x: -x if bool((x > 1e9).any()) else x @ self.weight, weight=weight)
    loop, ticks = loop_of(nn.Sequential(mlp(), deciding), blobs(240))
    loop.train_epoch()
    ((kind, step, detail),) = curvature_faults(ticks)
    assert (kind, step) == (FaultKind.CURVATURE_FALLBACK, 0)
    assert detail.startswith("layers 1: torch.func cannot run the model: ")
    assert "data-dependent" in detail
    assert any(layer.eigenvalues for tick in ticks for layer in tick.observation.layers)
