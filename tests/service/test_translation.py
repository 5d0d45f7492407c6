from __future__ import annotations

import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import tyro
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.search_spaces.samples import samples
from triaccel_ray.config import BatchConfig, ControlConfig, CurvatureConfig, ExecutionConfig, PrecisionConfig
from triaccel_ray.records.plan import Precision
from triaccel_ray.search_spaces.thresholds import calibration, thresholds
from triaccel_ray.service import cli
from triaccel_ray.service.comparisons.spec import ComparisonSpec
from triaccel_ray.service.options import Thresholds, Training
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.searches.spec import SearchSpec
from triaccel_ray.service.translation import (
    command_of,
    comparison_command_of,
    comparison_spec,
    search_command_of,
    search_spec,
    spec_from,
)
from triaccel_ray.trainables.digits import Digits
from triaccel_ray.trainables.task import Purpose


def rounded(control: ControlConfig) -> ControlConfig:
    """`control` with thresholds of four digits, as a command has them."""
    precision = {name: float(f"{getattr(control.precision, name):.4g}") for name in ("tau_low", "tau_high")}
    batch = {name: float(f"{getattr(control.batch, name):.4g}") for name in ("rho_low", "rho_high")}
    curvature = {name: float(f"{getattr(control.curvature, name):.4g}") for name in ("alpha", "tau_curv")}
    return replace(
        control,
        precision=replace(control.precision, **precision),
        batch=replace(control.batch, **batch),
        curvature=replace(control.curvature, **curvature),
    )


BASE = RunSpec(task="digits", recipe=Digits.recipe, control=rounded(Digits.control))


def typed(command: str) -> RunSpec:
    """The run that a pasted command describes."""
    words = shlex.split(command)
    assert words[0] == "triaccel"
    run: Any = tyro.cli(cli.Command, prog="triaccel", args=words[1:])
    assert isinstance(run, cli.Run)
    return spec_from(run.task, run.training, run.thresholds, method=run.method, seed=run.seed)


@settings(max_examples=15)
@given(sample=samples("thresholds"))
def test_a_pasted_command_has_the_same_thresholds(sample: dict[str, Any]) -> None:
    control = thresholds(sample, Digits.control, calibration({"conv1": [2e-9, 3e-7], "linear": [3e-7, 1e-4]}))
    again = typed(command_of(replace(BASE, control=control))).control
    for part, names in (("precision", ("tau_low", "tau_high")), ("batch", ("rho_low", "rho_high"))):
        values, expected = ([getattr(getattr(each, part), name) for name in names] for each in (again, control))
        assert values == pytest.approx(expected, rel=5e-4)
    assert replace(again, precision=control.precision, batch=control.batch, curvature=control.curvature) == control


def test_numbers_have_four_digits() -> None:
    control = replace(BASE.control, precision=PrecisionConfig(tau_low=1.23456789e-7, tau_high=0.000123456789))
    words = shlex.split(command_of(replace(BASE, control=control, memory_headroom_bytes=33_825_587)))
    given_ = {name: words[words.index(name) + 1] for name in ("--tau-low", "--tau-high", "--memory-headroom")}
    assert given_ == {"--tau-low": "1.235e-07", "--tau-high": "0.0001235", "--memory-headroom": "32.26MiB"}


def test_thresholds_that_differ_in_the_last_digits_stay_apart() -> None:
    control = replace(BASE.control, precision=PrecisionConfig(tau_low=1e-6, tau_high=1e-6 * (1 + 1e-6)))
    assert typed(command_of(replace(BASE, control=control))).control == control


def test_settings_beside_the_thresholds_are_kept_too() -> None:
    spec = replace(
        BASE,
        seed=3,
        recipe=replace(
            BASE.recipe,
            epochs=5,
            lr=0.03,
            weight_decay=1e-3,
            warmup_epochs=1.5,
            norm_bias_lr_factor=3.0,
            amp="bf16",
            label_smoothing=0.05,
        ),
        control=ControlConfig(
            every_steps=6,
            curvature=CurvatureConfig(every_steps=50, num_samples=16, tau_curv=math.inf, method="ggn"),
            batch=BatchConfig(start=64, minimum=32, maximum=512, lr_rule="sqrt", accumulate=4),
            clip_norm=0.5,
        ),
        memory_budget_bytes=3 * 2**29,
        data_dir="/data of mine",
        device="cpu",
    )
    assert typed(command_of(spec)) == spec


def test_another_method_and_its_precision_are_kept() -> None:
    precision = replace(BASE.control.precision, initial=Precision.FP32)
    spec = replace(BASE, method="fixed", control=replace(BASE.control, precision=precision))
    assert typed(command_of(spec)) == spec


@pytest.mark.parametrize("keep", [None, "last", "best"])
def test_weights_that_are_not_the_last_ones_are_asked_for_again(keep: Literal["last", "best"] | None) -> None:
    words = command_of(replace(BASE, keep=keep, register="mine"))
    again: Any = tyro.cli(cli.Command, prog="triaccel", args=shlex.split(words)[1:])
    assert (again.keep, again.register) == (keep or "last", None)  # who trains again need not want a second version


def test_a_bound_by_the_noise_scale_is_kept() -> None:
    spec = replace(BASE, control=replace(BASE.control, batch=replace(BASE.control.batch, bound_by_noise_scale=True)))
    assert "--noise-bound on" in command_of(spec)
    assert typed(command_of(spec)) == spec
    search: Any = tyro.cli(cli.Command, prog="triaccel", args=shlex.split(search_command_of(SearchSpec(base=spec)))[1:])
    assert replace(search_spec(search).base, control=rounded(search_spec(search).base.control)) == spec


@pytest.mark.parametrize("execution", [ExecutionConfig(data_on="host"), ExecutionConfig(fuse=False)])
@pytest.mark.parametrize("is_lean", [True, False])
def test_how_steps_are_run_is_kept(execution: ExecutionConfig, is_lean: bool) -> None:
    spec = replace(BASE, control=replace(BASE.control, execution=execution), lean_memory=is_lean)
    assert typed(command_of(spec)) == spec
    assert ("--data-on host" in command_of(spec)) == execution.fuse
    assert ("--lean-memory off" in command_of(spec)) == (not is_lean)


def test_a_bound_by_the_noise_scale_is_switched_both_ways() -> None:
    bound = Thresholds(noise_bound="on").onto(Digits.control)
    assert bound == replace(Digits.control, batch=replace(Digits.control.batch, bound_by_noise_scale=True))
    assert Thresholds().onto(bound) == bound
    assert Thresholds(noise_bound="off").onto(bound) == Digits.control


def test_a_tasks_own_bound_by_the_noise_scale_goes_with_the_method_that_measures_it() -> None:
    bound = Thresholds(noise_bound="on").onto(Digits.control)
    assert Thresholds(curvature="fisher").onto(bound).batch.bound_by_noise_scale
    for method in ("ggn", "hessian"):
        assert not Thresholds(curvature=method).onto(bound).batch.bound_by_noise_scale
        with pytest.raises(ValueError, match="need the per-sample gradients that curvature method 'fisher' measures"):
            Thresholds(curvature=method, noise_bound="on").onto(Digits.control)


def test_the_tasks_own_settings_are_not_repeated() -> None:
    words = shlex.split(command_of(BASE))
    assert words[:5] == ["triaccel", "run", "digits", "--epochs", "12"]
    assert not {"--lr", "--batch-size", "--noise-bound", "--seed", "--device", "--data-dir"} & set(words)


def test_a_task_that_cannot_be_imported_here_has_all_settings() -> None:
    words = shlex.split(command_of(replace(BASE, task="not_here.module:Mine")))
    assert words[2] == "not_here.module:Mine"
    assert {"--lr", "--batch-size", "--t-curv", "--noise-bound"} <= set(words)


@pytest.mark.parametrize("optional", [(), ("alpha", "tau_curv"), ("t_ctrl", "batch_steps")])
def test_a_search_can_be_asked_for_again(optional: tuple[str, ...]) -> None:
    own = Digits.control
    control = replace(own, every_steps=6, curvature=replace(own.curvature, alpha=0.5, every_steps=8))
    base = replace(BASE, recipe=replace(BASE.recipe, lr=0.03), control=control, seed=4, trials_per_gpu=2)
    base = replace(base, memory_headroom_bytes=1048 * 2**20)
    asked = SearchSpec(base=base, optional=optional, objective="time", margin=0.5, num_trials=7, seed=4)
    again: Any = tyro.cli(cli.Command, prog="triaccel", args=shlex.split(search_command_of(asked))[1:])
    assert isinstance(again, cli.Search)
    if "alpha" in optional:  # searched, so whatever stood there is not asked for
        base = replace(base, control=replace(control, curvature=replace(control.curvature, alpha=0.02)))
    if "t_ctrl" in optional:
        base = replace(base, control=replace(control, every_steps=own.every_steps))
    assert search_spec(again) == replace(asked, base=base)


def test_what_a_search_is_asked_for_by_default_is_not_repeated() -> None:
    words = shlex.split(search_command_of(SearchSpec(base=BASE)))
    assert not {"--space", "--objective", "--margin", "--trials-per-gpu", "--also"} & set(words)


def test_a_baseline_is_asked_for_without_thresholds() -> None:
    spec = replace(BASE, method="amp", control=replace(BASE.control, every_steps=7))
    assert not {"--tau-low", "--rho-high", "--t-ctrl", "--alpha"} & set(shlex.split(command_of(spec)))


def test_a_comparison_can_be_asked_for_again() -> None:
    control = replace(BASE.control, every_steps=6)
    base = replace(BASE, recipe=replace(BASE.recipe, lr=0.03), control=control, purpose=Purpose.FINAL, trials_per_gpu=2)
    precision = replace(control.precision, tau_low=1.011e-08, tau_high=0.1486)
    base = replace(base, control=replace(control, precision=precision), memory_budget_bytes=2**30)
    methods = ("amp", "triaccel")
    for asked in (
        ComparisonSpec(base=base, methods=methods, num_seeds=2, ablation=True, num_fixed=3, num_tuned=4),
        ComparisonSpec(base=replace(BASE, purpose=Purpose.FINAL), methods=methods),
    ):
        words = shlex.split(comparison_command_of(asked))
        again: Any = tyro.cli(cli.Command, prog="triaccel", args=words[1:])
        assert isinstance(again, cli.Compare)
        assert comparison_spec(again) == asked


def test_options_become_a_spec(tmp_path: Path) -> None:
    training = Training(epochs=2, lr=0.2, memory_headroom="64MiB", data_dir=tmp_path, device="cpu", batch_size=64)
    given_ = Thresholds(tau_low=1e-9, rho_high=0.8, rho_low=0.5, t_ctrl=9, lr_rule="linear")
    spec = spec_from("digits", training, given_, method="amp", seed=5, purpose=Purpose.FINAL)
    assert (spec.method, spec.seed, spec.purpose, spec.device) == ("amp", 5, Purpose.FINAL, "cpu")
    assert (spec.recipe.epochs, spec.recipe.lr, spec.recipe.momentum) == (2, 0.2, Digits.recipe.momentum)
    assert (spec.memory_budget_bytes, spec.memory_headroom_bytes) == (None, 64 * 2**20)
    assert spec.control.precision == replace(Digits.control.precision, tau_low=1e-9)
    assert (spec.control.batch.rho_low, spec.control.batch.rho_high, spec.control.every_steps) == (0.5, 0.8, 9)
    assert spec.data_dir == str(tmp_path)


@given(batch_size=st.integers(1, 2000))
def test_any_starting_batch_size_has_a_ladder(batch_size: int) -> None:
    batch = Thresholds().onto(Digits.control, batch_size=batch_size).batch
    assert 1 <= batch.minimum <= batch.start == batch_size <= batch.maximum
    assert (batch.start - batch.minimum) % batch.granularity == 0


@pytest.mark.parametrize(
    ("training", "given_", "message"),
    [
        (Training(batch_size=0), Thresholds(), "batch start = 0"),
        (Training(batch_size=-32), Thresholds(), "batch start = -32"),
        (Training(memory_budget="much"), Thresholds(), "amount of memory = 'much'"),
        (Training(memory_budget="1GiB", memory_headroom="1GiB"), Thresholds(), "give a budget or a headroom"),
        (Training(), Thresholds(tau_low=1.0), "tau_low, tau_high"),
        (Training(), Thresholds(step_up=5), "batch step_up = 5"),
    ],
)
def test_options_that_break_a_rule_are_refused(training: Training, given_: Thresholds, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec_from("digits", training, given_, method="triaccel", seed=0)
