"""What changes after steps have been captured: weights, hooks, the optimizer, what else is captured. On a real GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.apply.captured import distance, fixed, loop_of, network
from triaccel_ray.config import CurvatureConfig
from triaccel_ray.records.plan import FaultKind, Precision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def test_weights_loaded_from_elsewhere_reach_the_next_step() -> None:
    model, other = network(), network()
    loops = [loop_of(m, fixed(Precision.FP16, capture=True), schedule=lambda e: 1e-9) for m in (model, other)]
    for _ in range(3):
        loops[0].step()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    for _ in range(3):
        loops[1].step()
    model.load_state_dict(other.state_dict())
    loops[0].step()
    copies = loops[0]._training.precision.weights
    assert copies is not None
    for p in model.parameters():
        if id(p) in copies.in_force:
            assert torch.equal(copies.in_force[id(p)], p.half())


def test_a_hook_registered_after_capture_fires_and_no_graph_reads_the_copy_that_went() -> None:
    models = network(), network()
    seen: list[torch.dtype] = []
    for model, capture in zip(models, (True, False), strict=True):
        loop = loop_of(model, fixed(Precision.FP16, capture=capture))
        for _ in range(3):
            loop.step()
        assert loop._training.steps.num_captured == int(capture)
        weight = model[9].weight
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.dtype))
        loop.step()
        assert seen[-1] is torch.float32
        copies = loop._training.precision.weights
        assert copies is not None
        assert id(weight) not in copies.in_force
        held = [torch.full((10, 64), torch.nan, dtype=torch.half, device="cuda") for _ in range(4096)]  # where it was
        for _ in range(4):
            loop.step()
        assert loop._training.steps.num_captured == int(capture)
        assert all(p.isfinite().all() for p in model.parameters())
        del held
    assert distance(*models) < 10 * 2**-11


def test_an_optimizer_that_is_hooked_or_changed_after_capture_steps_by_itself() -> None:
    models = network(), network()
    for model, capture in zip(models, (True, False), strict=True):
        ticks: list[Any] = []
        fired: list[int] = []
        loop = loop_of(model, fixed(Precision.FP16, capture=capture), on_tick=ticks.append)
        for _ in range(3):
            loop.step()
        optimizer = loop.optimizer.optimizer
        optimizer.register_step_post_hook(lambda *_, fired=fired: fired.append(1))
        optimizer.param_groups[0]["dampening"] = 0.5
        for _ in range(4):
            loop.step()
        assert len(fired) == 4
        assert not loop.optimizer.is_capturable
        assert loop._training.steps.num_captured == int(capture)
        loop.train_epoch()
        faults = [fault for tick in ticks for fault in tick.observation.faults]
        assert [(fault.kind, fault.phase, fault.step) for fault in faults] == [
            (FaultKind.CAPTURE_FAILED, "optimizer", 3)
        ]
    assert distance(*models) < 10 * 2**-11


def test_an_eager_step_has_the_memory_of_the_curvatures_graph_too() -> None:
    config = replace(
        fixed(Precision.FP16, capture=True), every_steps=1000, curvature=CurvatureConfig(every_steps=2, num_samples=16)
    )
    loop = loop_of(network(), config)
    for _ in range(6):
        loop.step()
    assert loop.curvature.is_captured, loop.curvature.not_captured_because
    loop._training.precision.set({"0": Precision.BF16})
    loop.step()  # the first of a kind
    assert not loop.curvature.is_captured
    assert not loop._training.pool.holds_graphs
    for _ in range(3):
        loop.step()
    assert loop.curvature.is_captured, loop.curvature.not_captured_because
