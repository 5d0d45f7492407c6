"""What is tried before the final runs, and what is chosen by it; the runs themselves are test_end_to_end's."""

from dataclasses import replace

import pytest

from tests.decide.build import USUAL
from tests.service.records import FINAL_SPEC, ended, named, run_of
from triaccel_ray.config import BatchConfig, ControlConfig
from triaccel_ray.records.plan import Precision
from triaccel_ray.service.compare.comparison import FixedSetting
from triaccel_ray.service.compare.fixed_setting import best_setting, fixed_trials, sampled_settings
from triaccel_ray.service.runs.record import RunRecord
from triaccel_ray.trainables.task import Purpose

BF16_64 = FixedSetting(precision=Precision.BF16, batch_size=64)
FP32_96 = FixedSetting(precision=Precision.FP32, batch_size=96)


def failed(name: str) -> RunRecord:
    return run_of(name, num_epochs=0, status="failed")


def test_fixed_settings_begin_with_the_tasks_own_and_do_not_repeat() -> None:
    settings = sampled_settings(FINAL_SPEC, USUAL, 7)
    assert settings[0] == FixedSetting(precision=Precision.BF16, batch_size=96)
    assert len(set(settings)) == 7
    assert {setting.batch_size for setting in settings} <= {32, 64, 96, 128, 160}
    assert settings[:4] == sampled_settings(FINAL_SPEC, USUAL, 4)
    assert len(sampled_settings(FINAL_SPEC, USUAL, 100)) == 15  # as many as there are
    offered = (Precision.FP16, Precision.FP32)
    assert {setting.precision for setting in sampled_settings(FINAL_SPEC, offered, 100)} == {*offered}


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("sqrt", 0.5), ("linear", 0.25), ("adascale", 0.5)])
def test_a_fixed_setting_adapts_nothing_and_its_lr_follows_the_batch(rule: str, factor: float) -> None:
    batch = BatchConfig(start=128, minimum=32, maximum=128, lr_rule=rule)  # type: ignore[arg-type]  # one of them
    spec = replace(FINAL_SPEC, control=ControlConfig(batch=batch))
    fixed = FixedSetting(precision=Precision.FP32, batch_size=32).onto(spec)
    control = fixed.method_control
    assert (fixed.method, control.batch.start, control.precision.initial) == ("fixed", 32, Precision.FP32)
    assert not any(part.enabled for part in (control.precision, control.batch, control.curvature))
    assert fixed.recipe.lr == pytest.approx(factor * spec.recipe.lr)


def test_fixed_settings_are_tried_without_the_test_set_beside_amp() -> None:
    trials = fixed_trials(replace(FINAL_SPEC, gpus="2"), [BF16_64])
    assert {(spec.purpose, spec.seed) for spec in trials.values()} == {(Purpose.SEARCH, 0)}
    found = {name: (spec.method, spec.gpus) for name, spec in trials.items()}
    assert found == {"amp": ("amp", "1"), "fixed-bf16-64": ("fixed", "2")}


def test_the_best_setting_has_the_best_score_within_a_point_of_amp_or_is_the_nearest_to_it() -> None:
    fast_and_bad = FixedSetting(precision=Precision.FP16, batch_size=160)
    slow = ended(FP32_96.name, seconds=8.0)
    bad = ended(fast_and_bad.name, seconds=1.0, accuracy=88.9)
    good = ended(BF16_64.name, seconds=6.0, accuracy=89.1)
    settings = [FP32_96, BF16_64, fast_and_bad]
    assert best_setting(settings, named(ended("amp"), slow, good, bad)) == BF16_64
    poor = ended(BF16_64.name, seconds=6.0, accuracy=80.0)
    assert best_setting(settings, named(ended("amp"), failed(FP32_96.name), poor, bad)) == fast_and_bad
    with pytest.raises(ValueError, match="fixed settings = 'fixed-fp32-96': none could be trained to its end"):
        best_setting([FP32_96], named(ended("amp"), failed(FP32_96.name)))
    with pytest.raises(ValueError, match=r"trial = 'amp': failed .non_finite.: the fixed settings cannot"):
        best_setting([BF16_64], named(failed("amp"), good))
