"""What is tried before the final runs, and what is chosen by it; the runs themselves are test_end_to_end's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.service.records import FINAL_SPEC, ended, named, run_of
from triaccel_ray.config import BatchConfig, ControlConfig
from triaccel_ray.records.plan import Precision
from triaccel_ray.service.compare.choosing import (
    WIDEST,
    best_sample,
    best_setting,
    fixed_trials,
    recipe_samples,
    sampled_settings,
    tuning_trials,
)
from triaccel_ray.service.compare.comparison import FixedSetting, RecipeSample
from triaccel_ray.service.compare.spec import ComparisonSpec
from triaccel_ray.service.runs.record import RunRecord
from triaccel_ray.trainables.task import Purpose

ALL = tuple(Precision)
SPEC = ComparisonSpec(base=FINAL_SPEC, methods=("fp32", "amp", "triaccel"), num_fixed=3, num_tuned=2)
BF16_64 = FixedSetting(precision=Precision.BF16, batch_size=64)
FP32_96 = FixedSetting(precision=Precision.FP32, batch_size=96)


def failed(name: str) -> RunRecord:
    return run_of(name, num_epochs=0, status="failed")


def test_fixed_settings_begin_with_the_tasks_own_and_do_not_repeat() -> None:
    settings = sampled_settings(FINAL_SPEC, ALL, 7)
    assert settings[0] == FixedSetting(precision=Precision.BF16, batch_size=96)
    assert len(set(settings)) == 7
    assert {setting.batch_size for setting in settings} <= {32, 64, 96, 128, 160}
    assert settings[:4] == sampled_settings(FINAL_SPEC, ALL, 4)
    assert len(sampled_settings(FINAL_SPEC, ALL, 100)) == 15  # as many as there are
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


def test_recipe_samples_surround_the_recipe_which_is_the_first() -> None:
    samples = recipe_samples(50, seed=0)
    assert samples[0] == RecipeSample()
    assert len(set(samples)) == 50
    factors = [factor for sample in samples for factor in (sample.lr, sample.weight_decay)]
    assert 1 / WIDEST <= min(factors) < 1 / 2 < 2 < max(factors) <= WIDEST
    assert samples[:3] == recipe_samples(3, seed=0)
    assert recipe_samples(3, seed=0) != recipe_samples(3, seed=1)
    assert recipe_samples(1, seed=0) == [RecipeSample()]
    doubled = RecipeSample(lr=2.0, weight_decay=3.0).onto(FINAL_SPEC).recipe
    assert (doubled.lr, doubled.weight_decay) == (2.0 * FINAL_SPEC.recipe.lr, 3.0 * FINAL_SPEC.recipe.weight_decay)


def test_every_method_is_tuned_by_the_same_samples_without_the_test_set() -> None:
    fixed, tuning = fixed_trials(SPEC, [BF16_64]), tuning_trials(SPEC, BF16_64)
    assert {(spec.purpose, spec.seed) for spec in (*fixed.values(), *tuning.values())} == {(Purpose.SEARCH, 0)}
    assert set(tuning) == {
        *("fp32-recipe", "fp32-recipe1", "amp-recipe", "amp-recipe1", "triaccel-recipe", "triaccel-recipe1"),
        *("fixed-bf16-64", "fixed-recipe1"),
    }
    recipes = [spec.recipe for name, spec in tuning.items() if name.endswith("-recipe1")]
    assert recipes == [recipes[0]] * 4
    assert recipes[0].lr != FINAL_SPEC.recipe.lr
    assert tuning["fixed-recipe1"].control.batch.start == 64
    assert tuning["triaccel-recipe"].recipe == FINAL_SPEC.recipe
    # What was tried once has the same name and spec again.
    assert fixed.keys() & tuning.keys() == {"amp-recipe", "fixed-bf16-64"}
    assert all(tuning[name] == spec for name, spec in fixed.items())


def test_the_best_setting_has_the_best_score_within_a_point_of_amp_or_is_the_nearest_to_it() -> None:
    fast_and_bad = FixedSetting(precision=Precision.FP16, batch_size=160)
    slow = ended(FP32_96.name, seconds=8.0)
    bad = ended(fast_and_bad.name, seconds=1.0, accuracy=88.9)
    good = ended(BF16_64.name, seconds=6.0, accuracy=89.1)
    settings = [FP32_96, BF16_64, fast_and_bad]
    assert best_setting(settings, named(ended("amp-recipe"), slow, good, bad)) == BF16_64
    poor = ended(BF16_64.name, seconds=6.0, accuracy=80.0)
    assert best_setting(settings, named(ended("amp-recipe"), failed(FP32_96.name), poor, bad)) == fast_and_bad
    with pytest.raises(ValueError, match="fixed settings = 'fixed-fp32-96': none could be trained to its end"):
        best_setting([FP32_96], named(ended("amp-recipe"), failed(FP32_96.name)))
    with pytest.raises(ValueError, match=r"trial = 'amp-recipe': failed .non_finite.: the fixed settings cannot"):
        best_setting([BF16_64], named(failed("amp-recipe"), good))


@pytest.mark.parametrize(
    ("recipe", "other", "trial"),
    [
        (ended("fp32-recipe", accuracy=90.0), ended("fp32-recipe1", accuracy=91.0), "fp32-recipe1"),
        (ended("fp32-recipe", accuracy=91.0), ended("fp32-recipe1", accuracy=90.0), "fp32-recipe"),
        (ended("fp32-recipe", loss=0.3), ended("fp32-recipe1", loss=0.2), "fp32-recipe1"),
        (ended("fp32-recipe"), ended("fp32-recipe1"), "fp32-recipe"),
        (failed("fp32-recipe"), ended("fp32-recipe1", accuracy=1.0), "fp32-recipe1"),
        (failed("fp32-recipe"), failed("fp32-recipe1"), ""),
    ],
)
def test_the_best_sample_is_the_most_accurate_of_those_that_ended(
    recipe: RunRecord, other: RunRecord, trial: str
) -> None:
    tuned = best_sample(SPEC, "fp32", None, named(recipe, other))
    assert tuned.trial == trial
    assert (tuned.sample == RecipeSample()) == (trial != "fp32-recipe1")
