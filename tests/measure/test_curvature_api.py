from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.measure import dense_curvature as dense
from tests.measure.curvature_models import (
    METHODS,
    NUM_CLASSES,
    NUM_SAMPLES,
    Bilinear,
    ConvNet,
    assert_spectrum,
    images,
    make,
    sequences,
    vectors,
)
from triaccel_ray.config import CurvatureConfig
from triaccel_ray.measure.curvature import CurvatureMeter, top_eigenvalues
from triaccel_ray.model.layers import find_layers


@pytest.fixture(autouse=True)
def _same_draws_everywhere() -> None:
    torch.manual_seed(0)


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "training": [module.training for module in model.modules()],
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()],
        "random": torch.get_rng_state(),
    }


def assert_untouched(model: nn.Module, before: dict[str, Any]) -> None:
    torch.testing.assert_close(snapshot(model), before, rtol=0.0, atol=0.0)


def half_trained(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A model in training mode with one part held in eval mode, and gradients on some parameters."""
    model, inputs, targets = make(name)
    model.train()
    next(iter(model.children())).eval()
    parameters = list(model.parameters())
    parameters[0].grad = torch.randn_like(parameters[0])
    return model, inputs, targets


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["convolutions", "attention", "recurrent", "positions"])
def test_the_model_is_left_as_it_was(name: str, method: Any) -> None:
    model, inputs, targets = half_trained(name)
    before = snapshot(model)
    top_eigenvalues(model, F.cross_entropy, inputs, targets, find_layers(model), method=method, top_k=2)
    assert_untouched(model, before)


@pytest.mark.parametrize("method", METHODS)
def test_the_model_is_left_as_it_was_when_the_loss_raises(method: Any) -> None:
    model, inputs, targets = half_trained("convolutions")
    before = snapshot(model)

    def broken(outputs: Tensor, targets: Tensor) -> Tensor:
        raise ArithmeticError("no loss today")

    with pytest.raises(ArithmeticError, match="no loss today"):
        top_eigenvalues(model, broken, inputs, targets, find_layers(model), method=method, top_k=2)
    assert_untouched(model, before)


class Greedy(Bilinear):
    """Runs out of memory from the nth forward pass on."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n, self.num_calls = n, 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls >= self.n:
            raise torch.OutOfMemoryError("out of memory")
        return super().forward(x)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("method", ["fisher", "ggn"])
def test_running_out_of_memory_is_told_and_leaves_the_model_as_it_was(method: Any, n: int) -> None:
    model = nn.Sequential(nn.Linear(5, 5), Greedy(n), nn.Linear(3, NUM_CLASSES)).train()
    inputs, targets = vectors(), torch.randint(NUM_CLASSES, (NUM_SAMPLES,))
    before = snapshot(model)
    with pytest.raises(torch.OutOfMemoryError):
        top_eigenvalues(model, F.cross_entropy, inputs, targets, find_layers(model), method=method, top_k=2)
    assert_untouched(model, before)


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_without_a_part_has_no_curvature(method: Any) -> None:
    body = ConvNet()
    model = nn.ModuleDict({"body": body, "spare": nn.Linear(2, 2), "idle": nn.Linear(5, 1)}).eval()
    # One layer is never called, the other's output comes to nothing.
    model.forward = lambda x: (body(x), model["idle"](x[:, 0, 0, :5]))[0]
    inputs, targets = images(), torch.randint(NUM_CLASSES, (NUM_SAMPLES,))
    layers = find_layers(model)
    found = top_eigenvalues(model, F.cross_entropy, inputs, targets, layers, method=method, top_k=5).eigenvalues
    assert [layer.name for layer in layers][-2:] == ["spare", "idle"]
    assert found[-2].tolist()[:4] == [0.0] * 4
    assert found[-2, 4].isnan()
    assert found[-1].tolist() == [0.0] * 5
    assert (found[:-2, 0] > 0).all()


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_that_ignores_the_model_has_no_curvature(method: Any) -> None:
    model, inputs, targets = make("convolutions")
    estimate = top_eigenvalues(
        model, lambda y, t: t.double().mean(), inputs, targets, find_layers(model), method=method, top_k=2
    )
    assert not estimate.eigenvalues.any()


@pytest.mark.parametrize("method", ["ggn", "hessian"])
def test_a_linear_loss_has_no_curvature(method: Any) -> None:
    model = nn.Linear(5, NUM_CLASSES)
    found = top_eigenvalues(
        model,
        lambda y, t: y.sum() / len(t),
        vectors(),
        torch.zeros(NUM_SAMPLES),
        find_layers(model),
        method=method,
        top_k=2,
    ).eigenvalues
    assert not found.any()


@pytest.mark.parametrize(("method", "num_candidates"), [("fisher", 6), ("ggn", 18), ("hessian", 20)])
def test_places_that_nothing_can_fill_are_nan(method: Any, num_candidates: int) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, NUM_CLASSES), nn.Linear(NUM_CLASSES, NUM_CLASSES))
    layers = find_layers(model)
    targets = torch.randint(NUM_CLASSES, (NUM_SAMPLES,))
    found = top_eigenvalues(model, F.cross_entropy, vectors(), targets, layers, method=method, top_k=25).eigenvalues
    assert found.isfinite().sum(dim=1).tolist() == [
        min(num_candidates, 20),
        min(num_candidates, 12),
        min(num_candidates, 9),
    ]
    assert found[0, :num_candidates].isfinite().all()


@pytest.mark.parametrize("method", METHODS)
def test_a_diverged_model_is_a_row_of_nan_and_no_error(method: Any) -> None:
    model, inputs, targets = make("convolutions")
    with torch.no_grad():
        model[8].weight[0, 0] = math.nan
    found = top_eigenvalues(model, F.cross_entropy, inputs, targets, find_layers(model), method=method, top_k=2)
    assert found.eigenvalues.isnan().all()


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, NUM_CLASSES), nn.Linear(5, NUM_CLASSES)

    def forward(self, left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
        return self.left(left) * self.right(right) * scale


@pytest.mark.parametrize("method", METHODS)
def test_inputs_go_in_by_position_or_by_name(method: Any) -> None:
    model = TwoInputs()
    layers = find_layers(model)
    left, right, targets = vectors(), vectors(), torch.randint(NUM_CLASSES, (NUM_SAMPLES,))
    found = [
        top_eigenvalues(model, F.cross_entropy, inputs, targets, layers, method=method, top_k=2).eigenvalues
        for inputs in ((left, right, 1.0), [left, right], {"right": right, "left": left, "scale": 1.0})
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_positions_are_measured_whole_when_the_model_takes_a_mapping() -> None:
    model, inputs, targets = make("positions")
    layers = find_layers(model)
    plain = top_eigenvalues(model, F.cross_entropy, inputs, targets, layers, method="fisher", top_k=2)
    named = top_eigenvalues(model, F.cross_entropy, {"tokens": inputs}, targets, layers, method="fisher", top_k=2)
    torch.testing.assert_close(named.eigenvalues, plain.eigenvalues)
    assert tuple(named.fallbacks) == ()


@pytest.mark.parametrize("method", METHODS)
def test_the_callers_modes_do_not_matter(method: Any) -> None:
    model, inputs, targets = make("convolutions", torch.float32)
    layers = find_layers(model)

    def measure() -> Tensor:
        return top_eigenvalues(model, F.cross_entropy, inputs, targets, layers, method=method, top_k=2).eigenvalues

    expected = measure()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(measure(), expected)
    with torch.no_grad():
        assert torch.equal(measure(), expected)
    with torch.inference_mode():
        assert torch.equal(measure(), expected)
    with torch._C._AutoDispatchBelowAutograd():  # as inside a custom operator
        assert torch.equal(measure(), expected)


class NamedOutput(OrderedDict[str, Any]):
    """Like the outputs of Hugging Face's models: a mapping whose items are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@dataclass
class Output:
    logits: Tensor
    note: str = "none"


CONTAINERS: dict[str, tuple[Any, Any]] = {
    "mapping": (lambda y: NamedOutput(logits=y, hidden=None), lambda out: out.logits),
    "dataclass": (lambda y: Output(y), lambda out: out.logits),
    "nested": (lambda y: {"heads": [y, None]}, lambda out: out["heads"][0]),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("name", ["smooth", "lent", "deciding"])
def test_outputs_may_come_in_any_container(name: str, container: str, method: Any) -> None:
    model, inputs, targets = make(name)
    layers = find_layers(model)
    plain = top_eigenvalues(model, F.cross_entropy, inputs, targets, layers, method=method, top_k=2)
    wrap, logits_of = CONTAINERS[container]
    model.register_forward_hook(lambda module, args, output: wrap(output))
    meter = CurvatureMeter(
        model,
        lambda out, targets: F.cross_entropy(logits_of(out), targets),
        layers,
        CurvatureConfig(method=method, top_k=2),
        device=torch.device("cpu"),
    )
    found = meter.measure(inputs, targets, torch.Generator().manual_seed(0))
    if method != "hessian":  # of which the meter does other iterations
        torch.testing.assert_close(found.eigenvalues, plain.eigenvalues)
    assert found.eigenvalues.isfinite().all()


def test_inputs_may_be_mappings_of_any_kind_and_dataclasses() -> None:
    model, inputs, targets = make("positions")
    layers = find_layers(model)
    plain = top_eigenvalues(model, F.cross_entropy, inputs, targets, layers, method="fisher", top_k=2)
    named = NamedOutput(tokens=inputs)
    found = top_eigenvalues(model, F.cross_entropy, named, targets, layers, method="fisher", top_k=2)
    torch.testing.assert_close(found.eigenvalues, plain.eigenvalues)
    forward = model.forward
    model.forward = lambda batch: forward(batch.logits)
    found = top_eigenvalues(model, F.cross_entropy, Output(inputs), targets, layers, method="fisher", top_k=2)
    torch.testing.assert_close(found.eigenvalues, plain.eigenvalues)


def test_ggn_measures_several_outputs_of_a_sample() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, NUM_CLASSES)).double()
    inputs, targets = sequences().double(), torch.randint(NUM_CLASSES, (NUM_SAMPLES, 3))

    def by_position(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    def of_flat(outputs: Tensor, targets: Tensor) -> Tensor:
        return by_position(outputs.view(-1, NUM_CLASSES), targets)

    layers = find_layers(model)
    found = top_eigenvalues(model, by_position, inputs, targets, layers, method="ggn", top_k=3).eigenvalues
    flat = nn.Sequential(model, nn.Flatten())
    for layer, row in zip(layers, found, strict=True):
        assert_spectrum(row, dense.largest(dense.ggn_block(flat, of_flat, inputs, targets, layer), 3))


def test_ggn_refuses_outputs_that_are_not_by_sample_or_too_many() -> None:
    inputs = sequences()

    def measure(shape: Any) -> None:
        model = nn.Linear(4, NUM_CLASSES)
        layers = find_layers(model)
        model.register_forward_hook(lambda module, args, output: shape(output))
        top_eigenvalues(model, lambda y, t: y.sum(), inputs, torch.zeros(6), layers, method="ggn", top_k=1)

    with pytest.raises(
        ValueError, match=r"outputs have shapes \[\(6, 3\)\]: ggn needs the 2 samples along dimension 0"
    ):
        measure(lambda y: y.flatten(0, 1))
    with pytest.raises(
        ValueError, match="outputs of 900 numbers per sample give ggn 5400 columns: must be at most 4096"
    ):
        measure(lambda y: y.view(-1, 9, 1).expand(-1, 9, 100))


def test_bad_options_are_refused() -> None:
    model = nn.Linear(5, NUM_CLASSES)
    layers, inputs, targets = find_layers(model), vectors(), torch.zeros(NUM_SAMPLES, dtype=torch.long)

    def measure(inputs: Any = inputs, targets: Any = targets, layers: Any = layers, **options: Any) -> None:
        options = {"method": "fisher", "top_k": 1, **options}
        top_eigenvalues(model, options.pop("loss", F.cross_entropy), inputs, targets, layers, **options)

    with pytest.raises(ValueError, match="curvature method = 'newton': must be one of"):
        measure(method="newton")
    with pytest.raises(ValueError, match="top_k = 0"):
        measure(top_k=0)
    with pytest.raises(ValueError, match=r"layers = \[\]: must name at least one"):
        measure(layers=[])
    with pytest.raises(ValueError, match="number of samples = 1: fisher needs at least 2"):
        measure(inputs[:1], targets[:1])
    with pytest.raises(ValueError, match=r"shapes \[\(6, 5\), \(4,\)\]: dimension 0"):
        measure(inputs, targets[:4])
    with pytest.raises(ValueError, match=r"shapes \[\(6, 5\), \(\), \(6,\)\]: dimension 0"):
        measure((inputs, torch.ones(())), targets)
    with pytest.raises(ValueError, match=r"loss returned shape \(2,\): must be the mean"):
        measure(loss=lambda y, t: F.cross_entropy(y, t, reduction="none"))
    with pytest.raises(ValueError, match="chunk_samples = 0: must be an integer >= 1"):
        measure(chunk_samples=0)
    with pytest.raises(ValueError, match="num_iterations = 0"):
        measure(num_iterations=0)


def test_hessian_takes_a_single_sample() -> None:
    model, inputs, targets = make("convolutions")
    found = top_eigenvalues(
        model, F.cross_entropy, inputs[:1], targets[:1], find_layers(model), method="hessian", top_k=1
    )
    assert found.eigenvalues.isfinite().all()


@pytest.mark.filterwarnings("ignore")  # the compiler's own, of PyTorch's functions that it looks into
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["convolutions", "foreign"])
def test_compiled_modules_are_measured_as_they_are_written(name: str, method: Any) -> None:
    model, inputs, targets = make(name)
    layers = find_layers(model)
    num_compiled = 0

    def backend(graph: Any, examples: Any) -> Any:
        nonlocal num_compiled
        num_compiled += 1
        return graph.forward

    def measure() -> Tensor:
        return top_eigenvalues(model, F.cross_entropy, inputs, targets, layers, method=method, top_k=2).eigenvalues

    expected = measure()
    for child in list(model.children())[:2]:
        child.compile(backend=backend)
    torch.testing.assert_close(measure(), expected)
    assert num_compiled == 0
    model(inputs)
    assert num_compiled > 0
    torch.testing.assert_close(measure(), expected)
