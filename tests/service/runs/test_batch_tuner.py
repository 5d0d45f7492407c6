"""Timing of batch sizes by a worker in this process: what is timed, in what plan, and what does not fit."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.service.own_task import CONTROL, RECIPE, own_spec
from tests.service.worker_factory import Begin, last_of, records
from triaccel_ray.config import ControlConfig, PrecisionConfig
from triaccel_ray.records.events import Throughput
from triaccel_ray.records.plan import FaultKind, Precision
from triaccel_ray.service.runs import batch_tuner
from triaccel_ray.service.runs.batch_tuner import BatchTuner, lr_at


def control(maximum: int = 64, lr_rule: str = "sqrt") -> ControlConfig:
    precision = PrecisionConfig(enabled=False, initial=Precision.FP32)  # some CPUs have no BF16, which is a fault
    return replace(CONTROL, batch=replace(CONTROL.batch, maximum=maximum, lr_rule=lr_rule), precision=precision)


@pytest.fixture(autouse=True)
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_tuner, "_MIN_TIMED_S", 0.0)


def finish(tuner: BatchTuner) -> dict[str, float]:
    while not tuner.finished:
        tuner.advance()
    return tuner.finish()


def throughputs(folder: Path) -> dict[int, Throughput]:
    return {each.batch_size: each for each in records(folder) if isinstance(each, Throughput)}


def test_each_size_is_timed_with_a_new_model_and_no_other_is_left(start: Begin, module: str, tmp_path: Path) -> None:
    results = finish(start("Counted", method="tune-batch", control=control()))
    timed = throughputs(tmp_path)
    at_once = sys.modules[module].AT_ONCE
    assert len(at_once) > len(timed)
    assert max(at_once) == 1
    assert list(timed)[:3] == [16, 32, 64]
    for each in timed.values():
        assert each.step_ms > 0
        assert each.peak_bytes > 2**20
        assert (each.num_micro_batches, each.storage, each.faults) == (1, {}, ())
    size = int(results["batch_size"])
    assert results["lr"] == RECIPE.lr * (size / 32) ** 0.5
    assert results["samples_per_second"] >= 0.97 * results["best_samples_per_second"]
    assert last_of(tmp_path).results == results


def test_a_size_that_passes_in_parts_says_so_and_one_that_does_not_fit_ends_the_ladder(
    start: Begin, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuner = start("InParts", method="tune-batch", control=control(maximum=128))
    for _ in range(3):
        tuner.advance()
    monkeypatch.setattr(sys.modules[module], "FITS", [0])
    tuner.advance()
    timed = throughputs(tmp_path)
    assert {size: each.num_micro_batches for size, each in timed.items() if size < 128} == {16: 1, 32: 1, 64: 2}
    assert timed[64].faults[0].kind is FaultKind.OUT_OF_MEMORY
    assert (timed[128].step_ms, timed[128].ms_per_sample) == (None, None)
    assert "no more samples fit" in timed[128].faults[-1].detail
    monkeypatch.setattr(sys.modules[module], "FITS", [32])
    assert finish(tuner)["batch_size"] <= 64


def test_it_fails_if_not_even_the_smallest_size_fits(start: Begin) -> None:
    tuner = start("TooLarge", method="tune-batch", control=control())
    with pytest.raises(torch.OutOfMemoryError, match="not even one sample fits"):
        tuner.advance()


def test_sizes_above_the_training_samples_are_left_out(start: Begin, tmp_path: Path) -> None:
    tuner = start(method="tune-batch", control=control(maximum=1024))
    assert records(tmp_path)[0].control.batch.maximum == 160
    finish(tuner)
    assert max(throughputs(tmp_path)) == 160


def test_a_size_without_a_whole_batch_in_an_epoch_is_refused(start: Begin) -> None:
    batch = replace(CONTROL.batch, start=159, minimum=159, maximum=159)
    tuner = start(method="tune-batch", control=replace(CONTROL, batch=batch))
    with pytest.raises(ValueError, match="batch size = 159: an epoch of 160 samples has no whole batch of this size"):
        tuner.advance()


def test_the_learning_rate_follows_the_rule_of_the_run() -> None:
    for rule, factor in (("none", 1.0), ("sqrt", 2.0), ("linear", 4.0), ("adascale", 1.0)):
        assert lr_at(own_spec("digits", control=control(lr_rule=rule)), 128) == pytest.approx(factor * RECIPE.lr)
