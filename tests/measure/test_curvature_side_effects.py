"""A measurement changes nothing of the model and its caller, and nothing of the caller changes it."""

import contextlib
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.measure.curvature_models import METHODS, directly, make, meter_of
from triaccel_ray.measure.curvature.objective import measuring
from triaccel_ray.model.layers import find_layers


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "training": [module.training for module in model.modules()],
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()],
        "random": torch.get_rng_state(),
    }


@pytest.mark.parametrize("fails_at", [None, 1, 3])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["convolutions", "recurrent", "foreign"])
def test_the_model_is_left_as_it_was_also_by_an_error(name: str, method: Any, fails_at: int | None) -> None:
    model, inputs, targets = make(name)
    model.train()
    next(iter(model.children())).eval()
    next(model.parameters()).grad = torch.randn_like(next(model.parameters()))
    before, num_passes = snapshot(model), 0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal num_passes
        num_passes += 1
        if num_passes == fails_at:
            raise torch.OutOfMemoryError("no room")
        return F.cross_entropy(outputs, targets)

    with contextlib.suppress(torch.OutOfMemoryError):
        directly(model, inputs, targets, method, loss=loss)
        assert num_passes < (fails_at or math.inf)  # an error is told
    torch.testing.assert_close(snapshot(model), before, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("method", METHODS)
def test_the_callers_modes_do_not_matter(method: Any) -> None:
    model, inputs, targets = make("convolutions", torch.float32)
    expected = directly(model, inputs, targets, method).eigenvalues
    for mode in (
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.no_grad(),
        torch.inference_mode(),
        torch._C._AutoDispatchBelowAutograd(),  # as inside a custom operator
    ):
        with mode:
            assert torch.equal(directly(model, inputs, targets, method).eigenvalues, expected)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("inference", [True, False])
def test_backward_passes_run_in_the_calling_thread_while_it_measures(enabled: bool, inference: bool) -> None:
    with torch.autograd.set_multithreading_enabled(enabled):
        with torch.inference_mode(inference), measuring(nn.Linear(2, 2), nn.functional.cross_entropy):
            assert not torch._C._is_multithreading_enabled()
        assert torch._C._is_multithreading_enabled() == enabled


@pytest.mark.filterwarnings("ignore")  # the compiler's own, of PyTorch's functions that it looks into
@pytest.mark.parametrize("method", METHODS)
def test_compiled_modules_are_measured_as_they_are_written(method: Any) -> None:
    model, inputs, targets = make("foreign")
    num_compiled = 0

    def backend(graph: Any, examples: Any) -> Any:
        nonlocal num_compiled
        num_compiled += 1
        return graph.forward

    expected = directly(model, inputs, targets, method).eigenvalues
    for child in list(model.children())[:2]:
        child.compile(backend=backend)
    torch.testing.assert_close(directly(model, inputs, targets, method).eigenvalues, expected)
    assert num_compiled == 0
    model(inputs)
    assert num_compiled > 0
    torch.testing.assert_close(directly(model, inputs, targets, method).eigenvalues, expected)


@pytest.mark.parametrize("method", METHODS)
def test_one_of_a_layers_weights_may_be_frozen_later(method: Any) -> None:
    model, inputs, targets = make("recurrent")
    meter = meter_of(model, method)
    layer = next(layer for layer in find_layers(model) if len(layer.weights) > 1)
    layer.weights[0].requires_grad_(False)
    meter.dry_run(inputs, targets)
    assert not meter.off_because
