import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from triaccel_ray.baseline import Baseline
from triaccel_ray.config import BatchConfig, ControlConfig, CurvatureConfig, ExecutionConfig, PrecisionConfig
from triaccel_ray.records.plan import Precision
from triaccel_ray.service.runs.spec import BASELINES, METHODS, RunSpec, run_spec
from triaccel_ray.trainables.digits import Digits
from triaccel_ray.trainables.task import Purpose

CONTROL = ControlConfig(
    every_steps=7,
    precision=PrecisionConfig(tau_low=1e-8, tau_high=1e-4),
    curvature=CurvatureConfig(every_steps=30, alpha=0.1, tau_curv=25.0),
    batch=BatchConfig(start=64, minimum=32, maximum=256, lr_rule="adascale", bound_by_noise_scale=True),
)


PARTS = {
    "fp32": (Precision.FP32, False, False),
    "amp": (Precision.BF16, False, False),
    "amp-best": (Precision.BF16, False, False),
    "engine-fp32": (Precision.FP32, False, False),
    "engine-amp": (Precision.BF16, False, False),
    "fixed": (Precision.BF16, False, False),
    "tune-batch": (Precision.BF16, False, False),
    "probe": (Precision.BF16, True, False),
    "dynamic-batch": (Precision.FP32, False, True),
    "dynamic-precision": (None, False, False),
    "dynamic-both": (None, False, True),
    "triaccel": (None, True, True),
    "paper": (None, True, True),
}
"""Method -> the precision of every layer, None where it adapts; whether curvature is measured, and the batch adapts."""


def test_the_baselines_are_those_of_the_engine() -> None:
    assert get_args(Baseline) == BASELINES


@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_its_parts_alone(method: str) -> None:
    precision, curvature, batch = PARTS[method]
    control = RunSpec(task="digits", method=method, control=CONTROL).method_control
    assert control.precision.enabled == (precision is None)
    assert control.precision.initial is (precision or CONTROL.precision.initial)
    assert control.curvature.enabled == curvature
    assert control.batch.enabled == batch
    if method == "triaccel":
        assert control is CONTROL
    elif method != "paper":  # nothing needs the per-sample gradients of the curvature
        assert not control.batch.bound_by_noise_scale
        assert control.batch.lr_rule == ("sqrt" if batch else "none")
    other = replace(
        CONTROL,
        precision=replace(CONTROL.precision, initial=Precision.FP16),
        batch=replace(CONTROL.batch, lr_rule="linear"),
        execution=ExecutionConfig(data_on="host", autotune=True),
    )
    control = RunSpec(task="digits", method=method, control=other).method_control
    assert control.batch.lr_rule == ("linear" if batch and method != "paper" else "none")
    assert control.precision.initial is (Precision.FP32 if precision is Precision.FP32 else Precision.FP16)
    # baselines hold what any other program would
    assert control.execution.data_on == ("device" if method in BASELINES else "host")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": 2**31}, "seed = 2147483648: must"),
        ({"gpus": "2..", "device": "cpu"}, "gpus = '2..': must be a number of at least 1, such as 4, or a range"),
        ({"gpus": "1..4", "method": "tune-batch"}, "gpus = '1..4': method tune-batch trains in one process"),
        ({"device": "tpu"}, "device = 'tpu': must be one of auto, cpu, cuda"),
        ({"memory_budget_bytes": 0}, "memory_budget_bytes (memory_budget) = 0: must"),
        ({"keep": "best", "purpose": Purpose.FINAL}, "keep = 'best': a final run has no validation samples to choose"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        RunSpec(task="digits", **settings)


def test_gpus_are_a_count_or_a_range() -> None:
    for gpus, expected in {"1": (1, 1), "4": (4, 4), "2..8": (2, 8), "1..2": (1, 2)}.items():
        spec = RunSpec(task="digits", gpus=gpus)
        assert (spec.gpu_range, spec.is_distributed) == (expected, gpus != "1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_where_there_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="device = 'cuda': no CUDA device is visible"):
        _ = RunSpec(task="digits", device="cuda").torch_device


def test_recipe_and_thresholds_come_from_the_task() -> None:
    spec = run_spec("digits", Path("data"))
    assert (spec.recipe, spec.control, spec.data_dir) == (Digits.recipe, Digits.control, "data")
