"""Models, inputs and outputs as they come, and what can be measured of them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.build import Wired
from tests.measure.curvature_models import (
    METHODS,
    NUM_CLASSES,
    NUM_SAMPLES,
    Bilinear,
    ConvNet,
    assert_blocks,
    classes,
    directly,
    images,
    make,
    sequences,
    vectors,
)


def assert_fisher(
    model: nn.Module, inputs: Tensor, targets: Tensor, *, loss: Any = F.cross_entropy, fallback: tuple[str, ...] = ()
) -> None:
    estimate = directly(model, inputs, targets, top_k=3, loss=loss)
    assert_blocks(estimate, model, inputs, targets, "fisher", loss)
    assert tuple(estimate.fallbacks) == fallback


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_without_a_part_has_no_curvature(method: Any) -> None:
    body = ConvNet()
    model = nn.ModuleDict({"body": body, "spare": nn.Linear(2, 2), "idle": nn.Linear(5, 1)}).eval()
    # One layer is never called, the other's output comes to nothing.
    model.forward = lambda x: (body(x), model["idle"](x[:, 0, 0, :5]))[0]
    found = directly(model, images(), classes(), method, 5).eigenvalues
    assert found[-2].tolist()[:4] == [0.0] * 4
    assert found[-2, 4].isnan()
    assert found[-1].tolist() == [0.0] * 5
    assert (found[:-2, 0] > 0).all()


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_that_ignores_the_model_or_is_linear_has_no_curvature(method: Any) -> None:
    model, inputs, targets = make("convolutions")
    assert not directly(model, inputs, targets, method, loss=lambda y, t: t.double().mean()).eigenvalues.any()
    if method != "fisher":
        linear = directly(nn.Linear(5, NUM_CLASSES), vectors(), classes(), method, loss=lambda y, t: y.sum() / len(t))
        assert not linear.eigenvalues.any()


@pytest.mark.parametrize(("method", "num_candidates"), [("fisher", 6), ("ggn", 18), ("hessian", 20)])
def test_places_that_nothing_can_fill_are_nan(method: Any, num_candidates: int) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, NUM_CLASSES), nn.Linear(NUM_CLASSES, NUM_CLASSES))
    found = directly(model, vectors(), classes(), method, 25).eigenvalues
    assert found.isfinite().sum(dim=1).tolist() == [min(num_candidates, size) for size in (20, 12, 9)]
    assert found[0, :num_candidates].isfinite().all()


def _with_hooks(model: Any) -> None:
    for module in list(model.children())[:2]:
        module.register_forward_pre_hook(lambda module, args: (2 * args[0] + 1,))
        module.register_forward_hook(lambda module, args, output: 0.5 * output)


def _with_wrapped_forwards(model: Any) -> None:
    for module in model.children():
        module.forward = (lambda original: lambda *args: original(*args))(module.forward)


def _with_an_adapter(model: Any) -> None:
    first, adapter = model[0], nn.Linear(5, 5).double()
    model.add_module("adapter", nn.ModuleList([adapter]))
    first.forward = lambda x: F.linear(x, first.weight) + adapter.weight @ adapter.weight[0]
    model.forward = lambda x: model[2](model[1](model[0](x)))


def _with_a_named_argument(model: Any) -> None:
    model.forward = lambda x: model[2](input=model[1](model[0](input=x)))


def _with_containers(model: Any) -> None:
    forward = model[0].forward
    model[0].forward = lambda x: [forward(x)]
    model.forward = lambda x: model[2](model[1](model[0](x)[0]))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, _with_hooks) for name in ("convolutions", "foreign")),
        ("convolutions", _with_wrapped_forwards),
        *(("foreign", change) for change in (_with_an_adapter, _with_a_named_argument, _with_containers)),
    ],
)
def test_what_others_have_done_to_modules_is_respected(name: str, change: Callable[[nn.Module], None]) -> None:
    model, inputs, targets = make(name)
    change(model)
    assert_fisher(model, inputs, targets)


def test_a_penalty_on_weights_in_the_loss_is_part_of_each_samples_loss() -> None:
    model, inputs, targets = make("positions")

    def penalized(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) + model.position.weight.square().sum()

    assert_fisher(model, inputs, targets, loss=penalized, fallback=("position",))


def test_what_torch_func_cannot_replace_is_measured_sample_by_sample() -> None:
    weight = nn.Parameter(torch.randn(5, NUM_CLASSES))
    # Keeps a reference to its weight where nobody who wants to replace it would look.
    stubborn = Wired(lambda self, x: x @ self.references[0], weight=weight, references=(weight,))
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), stubborn).double()
    assert_fisher(model, vectors().double(), classes(), fallback=("2",))

    def at_the_end(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs[-1], targets)

    parts = {"first": nn.Linear(4, 5), "second": Bilinear()}  # a linear map and another
    time_first = Wired(lambda self, x: self.second(self.first(x)).transpose(0, 1), **parts).double()
    assert_fisher(time_first, sequences().double(), classes(), loss=at_the_end, fallback=("second",))


def checkpointed(*, use_reentrant: bool = False) -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x + self.head.bias.sum(), use_reentrant=use_reentrant))

    body = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 5))
    return Wired(forward, body=body, head=nn.Linear(5, NUM_CLASSES))


def checkpointed_attention() -> nn.Module:
    """Returns a model with attention, for which PyTorch has fused kernels without a second derivative."""

    def forward(self: Any, x: Tensor) -> Tensor:
        x = x[:, :4].reshape(-1, 2, 2).repeat(1, 1, 2)
        return self.head(checkpoint(partial(attend, self), x, use_reentrant=False).mean(1))

    def attend(self: Any, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.query(x), x, self.value(x))

    return Wired(forward, query=nn.Linear(4, 4), value=nn.Linear(4, 4), head=nn.Linear(4, NUM_CLASSES))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("build", [checkpointed, checkpointed_attention])
def test_a_checkpoint_changes_no_eigenvalue(build: Any, method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, targets = build().double(), vectors().double(), classes()
    found = directly(model, inputs, targets, method)
    monkeypatch.setitem(globals(), "checkpoint", lambda function, x, use_reentrant: function(x))
    assert torch.allclose(found.eigenvalues, directly(model, inputs, targets, method).eigenvalues, rtol=1e-6)
    assert not found.fallbacks


@pytest.mark.parametrize("method", METHODS)
def test_checkpoints_that_hide_the_graph_are_refused(method: Any) -> None:
    with pytest.raises(ValueError, match="use_reentrant = True: must be False"):
        directly(checkpointed(use_reentrant=True), vectors(), classes(), method)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Bilinear(), nn.Linear(5, NUM_CLASSES)

    def forward(self, left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
        return self.left(left) * self.right(right) * scale


@pytest.mark.parametrize("method", METHODS)
def test_inputs_go_in_by_position_or_by_name(method: Any) -> None:
    model, left, right, targets = TwoInputs(), vectors(), vectors(), classes()
    first, *others = (
        directly(model, inputs, targets, method).eigenvalues
        for inputs in ((left, right, 1.0), [left, right], {"right": right, "left": left, "scale": 1.0})
    )
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["lent", "deciding"])
def test_outputs_may_come_in_containers(name: str, method: Any) -> None:
    model, inputs, targets = make(name)
    plain = directly(model, inputs, targets, method)
    model.register_forward_hook(lambda module, args, output: {"heads": [output, None]})
    found = directly(model, inputs, targets, method, loss=lambda out, y: F.cross_entropy(out["heads"][0], y))
    torch.testing.assert_close(found.eigenvalues, plain.eigenvalues)


def test_ggn_measures_several_outputs_of_a_sample() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, NUM_CLASSES)).double()
    inputs, targets = sequences().double(), torch.randint(NUM_CLASSES, (NUM_SAMPLES, 3))

    def by_position(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.reshape(-1, NUM_CLASSES), targets.flatten())

    estimate = directly(model, inputs, targets, "ggn", 3, loss=by_position)
    assert_blocks(estimate, nn.Sequential(model, nn.Flatten()), inputs, targets, "ggn", by_position)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (lambda y: y.flatten(0, 1), r"outputs have shapes \[\(6, 3\)\]: ggn needs the 2 samples along dimension 0"),
        (lambda y: y.view(-1, 9, 1).expand(-1, 9, 100), "900 numbers per sample give ggn 5400 columns: must be at"),
    ],
)
def test_ggn_refuses_outputs_that_are_not_by_sample_or_too_many(shape: Any, message: str) -> None:
    model = nn.Linear(4, NUM_CLASSES)
    model.register_forward_hook(lambda module, args, output: shape(output))
    with pytest.raises(ValueError, match=message):
        directly(model, sequences(), torch.zeros(6), "ggn", loss=lambda y, t: y.sum())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": torch.ones(1, 5), "targets": torch.ones(1)}, "number of samples = 1: fisher needs at least 2"),
        ({"targets": torch.ones(4)}, r"shapes \[\(6, 5\), \(4,\)\]: dimension 0"),
        ({"inputs": (torch.ones(6, 5), torch.ones(()))}, r"shapes \[\(6, 5\), \(\), \(6,\)\]: dimension 0"),
        ({"loss": lambda y, t: F.cross_entropy(y, t, reduction="none")}, r"loss returned shape \(2,\): must be the"),
    ],
)
def test_bad_samples_and_losses_are_refused(options: dict[str, Any], message: str) -> None:
    samples = {"inputs": vectors(), "targets": classes()}
    with pytest.raises(ValueError, match=message):
        directly(nn.Linear(5, NUM_CLASSES), **{**samples, **options})
