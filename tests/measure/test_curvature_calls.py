from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.measure import dense_curvature as dense
from tests.measure.curvature_models import (
    METHODS,
    NUM_CLASSES,
    NUM_SAMPLES,
    assert_spectrum,
    make,
    vectors,
)
from triaccel_ray.measure.curvature import top_eigenvalues
from triaccel_ray.model.layers import find_layers


@pytest.fixture(autouse=True)
def _same_draws_everywhere() -> None:
    torch.manual_seed(0)


def assert_fisher(model: nn.Module, inputs: Tensor, targets: Tensor, fallback: tuple[str, ...] = ()) -> None:
    layers = find_layers(model)
    estimate = top_eigenvalues(model, F.cross_entropy, inputs, targets, layers, method="fisher", top_k=3)
    for layer, found in zip(layers, estimate.eigenvalues, strict=True):
        assert_spectrum(found, dense.largest(dense.fisher_block(model, F.cross_entropy, inputs, targets, layer), 3))
    assert tuple(estimate.fallbacks) == fallback


@pytest.mark.parametrize("name", ["convolutions", "attention", "tied_tokens"])
def test_fisher_looks_at_two_samples_and_one_then_runs_the_model_once(name: str) -> None:
    model, inputs, targets = make(name)
    batch_sizes = []
    model.register_forward_hook(lambda module, args, output: batch_sizes.append(len(args[0])))
    top_eigenvalues(model, F.cross_entropy, inputs, targets, find_layers(model), method="fisher", top_k=1)
    assert batch_sizes == [2, 1, 2, NUM_SAMPLES]


@pytest.mark.parametrize("name", ["convolutions", "foreign"])
def test_hooks_of_others_are_respected(name: str) -> None:
    model, inputs, targets = make(name)
    for module in list(model.children())[:2]:
        module.register_forward_pre_hook(lambda module, args: (2 * args[0] + 1,))
        module.register_forward_hook(lambda module, args, output: 0.5 * output)
    assert_fisher(model, inputs, targets)


def test_a_forward_wrapped_on_the_instance_is_respected() -> None:
    model, inputs, targets = make("convolutions")
    for module in model.children():
        module.forward = (lambda original: lambda *args: original(*args))(module.forward)
    assert_fisher(model, inputs, targets)


def test_an_adapter_around_a_linear_layer_is_seen_through() -> None:
    model, inputs, targets = make("foreign")
    first, adapter = model[0], nn.Linear(5, 5).double()
    model.add_module("adapter", nn.ModuleList([adapter]))
    first.forward = lambda x: F.linear(x, first.weight) + adapter.weight @ adapter.weight[0]
    model.forward = lambda x: model[2](model[1](model[0](x)))
    assert_fisher(model, inputs, targets)


def test_a_penalty_on_weights_in_the_loss_is_part_of_each_samples_loss() -> None:
    model, inputs, targets = make("positions")

    def penalised(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) + model.position.weight.square().sum()

    layers = find_layers(model)
    found = top_eigenvalues(model, penalised, inputs, targets, layers, method="fisher", top_k=3).eigenvalues
    for layer, row in zip(layers, found, strict=True):
        assert_spectrum(row, dense.largest(dense.fisher_block(model, penalised, inputs, targets, layer), 3))


class Stubborn(nn.Module):
    """Keeps a reference to its weight where nobody who wants to replace it would look."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, NUM_CLASSES))
        self.references = (self.weight,)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.references[0]


def test_a_weight_that_cannot_be_replaced_is_measured_sample_by_sample() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), Stubborn()).double()
    targets = torch.randint(NUM_CLASSES, (NUM_SAMPLES,))
    assert_fisher(model, vectors().double(), targets, fallback=("2",))


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
        self.head = nn.Linear(5, NUM_CLASSES)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x + self.head.bias.sum(), use_reentrant=self.use_reentrant))


def test_checkpointed_layers_are_measured() -> None:
    targets = torch.randint(NUM_CLASSES, (NUM_SAMPLES,))
    assert_fisher(Checkpointed(use_reentrant=False).double(), vectors().double(), targets)


@pytest.mark.parametrize("method", METHODS)
def test_checkpoints_that_hide_the_graph_are_refused(method: Any) -> None:
    model, targets = Checkpointed(use_reentrant=True), torch.randint(NUM_CLASSES, (NUM_SAMPLES,))
    with pytest.raises(ValueError, match="use_reentrant = True: must be False"):
        top_eigenvalues(model, F.cross_entropy, vectors(), targets, find_layers(model), method=method, top_k=1)


@pytest.mark.parametrize("groups", [1, 2])
def test_the_order_of_channels_in_memory_does_not_matter(groups: int) -> None:
    model = nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1, stride=(2, 1), groups=groups), nn.Tanh(),
        nn.Conv2d(8, 6, (2, 3), dilation=(1, 2), groups=groups), nn.Flatten(), nn.LazyLinear(NUM_CLASSES),
    )  # fmt: skip
    inputs, targets = torch.randn(NUM_SAMPLES, 8, 7, 9), torch.randint(NUM_CLASSES, (NUM_SAMPLES,))
    model(inputs)
    found = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        model.to(memory_format=memory_format)
        for method in ("fisher", "ggn"):
            estimate = top_eigenvalues(
                model,
                F.cross_entropy,
                inputs.contiguous(memory_format=memory_format),
                targets,
                find_layers(model),
                method=method,
                top_k=3,
            )
            assert tuple(estimate.fallbacks) == ()
            found.append(estimate.eigenvalues)
    torch.testing.assert_close(found[:2], found[2:])
    double, layers = model.double(), find_layers(model)
    expected = dense.largest(dense.fisher_block(double, F.cross_entropy, inputs.double(), targets, layers[0]), 3)
    torch.testing.assert_close(found[2][0].double(), expected, rtol=1e-4, atol=1e-7)
