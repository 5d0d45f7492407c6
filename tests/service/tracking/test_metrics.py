from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.service.build import CONTROL, RESNET, SimulatedRun
from tests.service.records import RUN_SPEC
from triaccel_ray.records.events import End, Epoch, Start, Tick, read_events
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.tracking.metrics import legal_name, metrics_of, params_of, step_of, tags_of


@pytest.fixture
def records(tmp_path: Path) -> list[Start | Tick | Epoch | End]:
    run = SimulatedRun(tmp_path, names=RESNET)
    run.complete(epochs=2)
    return [event.record for event in read_events(run.path)]


def test_a_tick_says_what_was_measured_and_what_is_in_force(records: list[Start | Tick | Epoch | End]) -> None:
    tick = [record for record in records if isinstance(record, Tick)][-1]
    values = metrics_of(tick)
    memory, plan = tick.observation.memory, tick.applied.plan
    assert values["train/loss"] == tick.observation.loss
    assert values["control/batch_size"] == plan.batch_size
    assert values["control/micro_batches"] == plan.num_micro_batches
    assert values["memory/used_gb"] == memory.used_bytes / 1e9
    assert values["memory/window_peak_gb"] == memory.window_peak_bytes / 1e9
    assert values["memory/allocated_peak_gb"] == memory.allocated_peak_bytes / 1e9
    assert values["memory/share"] == memory.share
    assert values["layers/fp16"] + values["layers/bf16"] + values["layers/fp32"] == len(RESNET)
    assert values["layers/fp32"] == sum(level.value == "fp32" for level in plan.precision.values())
    eigenvalues = [layer.eigenvalues[0] for layer in tick.decision.state.layers.values() if layer.eigenvalues]
    assert values["curvature/largest_eigenvalue"] == max(eigenvalues)
    assert values["lr/scale_min"] == min(plan.lr_scale.values())
    assert values["lr/scale_mean"] == pytest.approx(sum(plan.lr_scale.values()) / len(RESNET))
    assert step_of(tick) == tick.observation.step


def test_what_was_not_measured_has_no_metric(records: list[Start | Tick | Epoch | End]) -> None:
    first = next(record for record in records if isinstance(record, Tick))
    assert "curvature/largest_eigenvalue" not in metrics_of(first)
    assert not any(value is None for value in metrics_of(first).values())


def test_an_epoch_lies_at_its_optimizer_step(records: list[Start | Tick | Epoch | End]) -> None:
    epoch = [record for record in records if isinstance(record, Epoch)][-1]
    values = metrics_of(epoch)
    assert step_of(epoch) == epoch.step == 400
    assert (values["epoch"], values["val/accuracy"]) == (2.0, epoch.held_out(Goal()))
    assert (values["seconds_per_epoch"], values["memory/peak_gb"]) == (epoch.seconds, epoch.peak_bytes / 1e9)


def test_a_run_has_fewer_than_sixty_metrics_with_names_that_mlflow_takes(
    records: list[Start | Tick | Epoch | End],
) -> None:
    names = {name for record in records if not isinstance(record, Start) for name in metrics_of(record)}
    assert {"final/accuracy", "final/score"} <= names
    assert 25 <= len(names) < 60
    assert all(legal_name(name) == name for name in names)


def test_params_are_the_control_loop_with_dots_and_the_parameters(records: list[Start | Tick | Epoch | End]) -> None:
    assert isinstance(records[0], Start)
    params = params_of(records[0])
    assert params["precision.tau_low"] == str(CONTROL.precision.tau_low)
    assert params["every_steps"] == "50"
    assert params["batch.rho_high"] == "0.85"
    assert (params["recipe.lr"], params["budget"]) == ("0.1", "None")
    assert tags_of(records[0]) == {"task": "cifar10-resnet18", "method": "triaccel", "seed": "0"}


def test_params_of_a_run_are_those_that_act() -> None:
    recipe = {"recipe.lr": 0.1, "recipe.amp": "fp16"}

    def params(method: str) -> dict[str, str]:
        spec = replace(RUN_SPEC, method=method, control=CONTROL)
        info = {"task": "digits", "method": method, "seed": "1"}
        return params_of(Start(control=spec.method_control, info=info, parameters=recipe))

    named = {"task": "digits", "seed": "1", "batch.start": "96", "recipe.lr": "0.1"}
    assert params("fp32") == {**named, "method": "fp32"}
    assert params("amp") == {**named, "method": "amp", "recipe.amp": "fp16"}
    alone = params("dynamic-precision")
    assert {"precision.tau_low", "precision.initial", "batch.start", "every_steps"} <= set(alone)
    assert not {"batch.rho_low", "curvature.alpha", "recipe.amp"} & set(alone)
    assert {"curvature.alpha", "batch.rho_low", "precision.tau_low"} <= set(params("triaccel"))


def test_what_stands_for_many_runs_has_no_settings_of_one() -> None:
    info = {"task": "digits", "kind": "search", "objective": "score", "margin": "1", "host": "here"}
    params = params_of(Start(control=CONTROL, info=info, parameters={"trials": 8}))
    assert params == {"task": "digits", "kind": "search", "objective": "score", "margin": "1", "trials": "8"}


def test_names_lose_the_characters_that_mlflow_refuses() -> None:
    values = metrics_of(End(status="finished", results={"top#1 [%]": 1.0, "loss": math.nan}))
    assert set(values) == {"final/top_1 ___", "final/loss"}
    assert tags_of(Start(control=CONTROL, info={"a#b": "c"})) == {"a_b": "c"}
