import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.service.build import CONTROL, RESNET, SimulatedRun
from tests.service.records import RUN_SPEC
from triaccel_ray.records.events import End, Epoch, Start, Tick, read_events
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.tracking.metrics import legal_name, metrics_of, params_of, step_of, tags_of


def test_records_have_metrics_at_their_optimizer_step(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, names=RESNET)
    run.complete(epochs=2)
    start, *records = [event.record for event in read_events(run.path)]
    ticks = [record for record in records if isinstance(record, Tick)]
    tick, values = ticks[-1], metrics_of(ticks[-1])
    memory, plan = tick.observation.memory, tick.applied.plan
    assert step_of(tick) == tick.observation.step
    eigenvalues = [layer.eigenvalues[0] for layer in tick.decision.state.layers.values() if layer.eigenvalues]
    expected = {
        "train/loss": tick.observation.loss,
        "memory/used_gb": memory.used_bytes / 1e9,
        "layers/fp32": sum(level.value == "fp32" for level in plan.precision.values()),
        "curvature/largest_eigenvalue": max(eigenvalues),
        "lr/scale_min": min(plan.lr_scale.values()),
        "lr/scale_mean": pytest.approx(sum(plan.lr_scale.values()) / len(RESNET)),
    }
    assert {name: values[name] for name in expected} == expected
    assert values["layers/fp16"] + values["layers/bf16"] + values["layers/fp32"] == len(RESNET)
    assert "curvature/largest_eigenvalue" not in metrics_of(ticks[0])  # not measured yet

    epoch = next(record for record in reversed(records) if isinstance(record, Epoch))
    values = metrics_of(epoch)
    assert step_of(epoch) == epoch.step == 400
    assert (values["epoch"], values["val/accuracy"]) == (2.0, epoch.held_out(Goal()))
    assert (values["seconds_per_epoch"], values["memory/peak_gb"]) == (epoch.seconds, epoch.peak_bytes / 1e9)

    names = {name for record in records for name in metrics_of(record)}  # type: ignore[arg-type]  # none is a Start
    assert {"final/accuracy", "final/score"} <= names
    assert 25 <= len(names) < 60
    assert all(legal_name(name) == name for name in names)
    assert tags_of(start) == {"task": "cifar10-resnet18", "method": "triaccel", "seed": "0"}


def test_params_of_a_run_are_those_that_act() -> None:
    recipe = {"recipe.lr": 0.1, "recipe.amp": "fp16", "budget": None}

    def params(method: str) -> dict[str, str]:
        spec = replace(RUN_SPEC, method=method, control=CONTROL)
        info = {"task": "digits", "method": method, "seed": "1", "host": "here"}
        return params_of(Start(control=spec.method_control, info=info, parameters=recipe))

    named = {"task": "digits", "seed": "1", "batch.start": "96", "recipe.lr": "0.1", "budget": "None"}
    assert params("fp32") == {**named, "method": "fp32"}
    assert params("amp") == {**named, "method": "amp", "recipe.amp": "fp16"}
    alone = params("dynamic-precision")
    assert {"precision.tau_low", "precision.initial", "batch.start", "every_steps"} <= set(alone)
    assert not {"batch.rho_low", "curvature.alpha", "recipe.amp"} & set(alone)
    whole = params("triaccel")
    expected = {"precision.tau_low": str(CONTROL.precision.tau_low), "every_steps": "50", "batch.rho_high": "0.85"}
    assert {**whole, **expected} == whole
    assert "curvature.alpha" in whole
    # What stands for many runs has no settings of one.
    search = {"task": "digits", "kind": "search", "objective": "score", "margin": "1"}
    parent = Start(control=CONTROL, info={**search, "host": "here"}, parameters={"trials": 8})
    assert params_of(parent) == {**search, "trials": "8"}


def test_names_lose_the_characters_that_mlflow_refuses() -> None:
    values = metrics_of(End(status="finished", results={"top#1 [%]": 1.0, "loss": math.nan}))
    assert set(values) == {"final/top_1 ___", "final/loss"}
    assert tags_of(Start(control=CONTROL, info={"a#b": "c"})) == {"a_b": "c"}
