import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from tests.build import CPU, Wired, blobs, cross_entropy, mlp
from triaccel_ray.apply.loss_scale import LossScale
from triaccel_ray.apply.optimizer import LayerwiseOptimizer
from triaccel_ray.apply.precision import LayerPrecision
from triaccel_ray.apply.weights import ComputeCopies
from triaccel_ray.config import LossScaleConfig
from triaccel_ray.control.update import TrainingUpdate
from triaccel_ray.measure.moments import GradientMoments
from triaccel_ray.model.gradients import Gradients
from triaccel_ray.model.layers import find_layers
from triaccel_ray.records.plan import Precision

DTYPES = {"0": torch.float16, "2": torch.bfloat16, "4": torch.float32}
LEVELS = {"0": Precision.FP16, "2": Precision.BF16, "4": Precision.FP32}


def copies_of(model: nn.Module) -> ComputeCopies:
    copies = ComputeCopies(find_layers(model), list(model.parameters()))
    copies.set({layer.name: DTYPES.get(layer.name, torch.float16) for layer in find_layers(model)})
    return copies


def copy_of(copies: ComputeCopies, weight: nn.Parameter) -> torch.Tensor:
    """The weight's copy, which has its values and its memory layout."""
    copy = copies.companions[id(weight)]
    assert torch.equal(copy, weight.half())
    assert copy.stride() == weight.stride()
    return copy


def test_a_low_layer_has_copies_that_follow_what_others_write() -> None:
    model, conv = mlp(), nn.Sequential(nn.Conv2d(3, 4, 3))
    copies, of_conv = copies_of(model), copies_of(conv)
    expected = {id(p): DTYPES[name] for name in ("0", "2") for p in model.get_submodule(name).parameters()}
    assert {key: copy.dtype for key, copy in copies.companions.items()} == expected
    weight = model[0].weight
    copy_of(copies, weight)
    with torch.no_grad():
        weight.add_(1.0)
    copies.refresh()
    copy_of(copies, weight)
    weight.data = weight.data + 1.0  # another tensor in its place
    copies.refresh()
    copy_of(copies, weight)
    conv.to(memory_format=torch.channels_last)
    of_conv.refresh()
    copy_of(of_conv, conv[0].weight)


def test_a_copy_outlives_a_change_of_plan_until_it_is_dropped() -> None:
    model = mlp()
    copies = copies_of(model)
    first = copy_of(copies, model[0].weight)
    copies.set({**DTYPES, "0": torch.bfloat16})
    with torch.no_grad():
        model[0].weight.add_(1.0)
    copies.set(DTYPES)
    assert copy_of(copies, model[0].weight) is first  # captured graphs hold its address
    copies.set({**DTYPES, "0": torch.bfloat16})
    copies.drop_unused()
    copies.set(DTYPES)
    assert copy_of(copies, model[0].weight) is not first


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_parameter_with_hooks_keeps_them_and_copies_that_are_let_go_are_another_generation(hook: str) -> None:
    model, seen = mlp(), []
    copies = copies_of(model)
    precision = LayerPrecision(model, find_layers(model), weights=copies)
    precision.set(LEVELS)
    copies.refresh()
    assert copies.generation == 0  # all that was made is still there
    getattr(model[0].weight, hook)(lambda tensor: seen.append(tensor.dtype))
    copies.refresh()
    assert copies.generation == 1
    assert id(model[0].weight) not in copies.companions
    assert id(model[2].weight) in copies.companions
    inputs, targets = blobs(16)
    cross_entropy(model(inputs).float(), targets).backward()
    assert seen == [torch.float32]
    model[2].weight.data = model[2].weight.data.T.contiguous().T
    copies.refresh()
    assert copies.generation > 1


def reader() -> nn.Module:
    """A model that reads its first layer's weight itself, too."""
    return Wired(lambda self, x: self.body(x).float() + (x @ self.body[0].weight.T).sum(), body=mlp())


def test_gradients_arrive_at_the_copies_and_equal_those_through_a_cast() -> None:
    cast, copied, inputs = reader(), reader(), blobs(16)[0]
    levels = {f"body.{name}": level for name, level in LEVELS.items()}
    LayerPrecision(cast, find_layers(cast)).set(levels)
    cast(inputs).square().mean().backward()
    copies = ComputeCopies(find_layers(copied), copied.parameters())
    LayerPrecision(copied, find_layers(copied), weights=copies).set(levels)
    copied(inputs).square().mean().backward()
    found = Gradients(list(copied.parameters()))
    found.collect(copies.companions, {})
    dtypes = [gradient.dtype for gradient in found.tensors if gradient is not None]
    assert dtypes[1:] == [torch.float16] + [torch.bfloat16] * 2 + [torch.float32] * 2
    for gradient, parameter in zip(found.tensors, cast.parameters(), strict=True):
        torch.testing.assert_close(gradient.float(), parameter.grad, rtol=1e-6, atol=0.0)


class Normalized(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.div_(self.weight.norm())  # of a copy it would never reach the weight
        return super().forward(inputs)


def test_modules_with_a_forward_function_of_their_own_have_no_copies() -> None:
    # A table of rows: sums of many gradients in 16 bits would lose digits.
    table = Wired(lambda self, ids: self.rows[ids], rows=nn.Parameter(torch.randn(5, 3)))
    model = nn.Sequential(table, Normalized(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[3].forward = lambda inputs: inputs + model[3].weight[0]
    assert set(copies_of(model).companions) == {id(parameter) for parameter in model[2].parameters()}
    model = nn.Sequential(pytest.importorskip("transformers.pytorch_utils").Conv1D(3, 3))
    assert set(copies_of(model).companions) == {id(parameter) for parameter in model.parameters()}


def test_what_stands_in_a_parameters_place_is_computed_with() -> None:
    model, inputs = mlp(), blobs(16)[0]
    precision = LayerPrecision(model, find_layers(model), weights=copies_of(model))
    precision.set(LEVELS)
    zeros = {name: torch.zeros_like(parameter, requires_grad=True) for name, parameter in model.named_parameters()}
    outputs = torch.func.functional_call(model, zeros, inputs)
    outputs.sum().backward()
    assert not outputs.any()
    assert all(given.grad is not None for given in zeros.values())
    prune.l1_unstructured(model[0], "weight", amount=0.5)  # replaces the parameter
    model[2].weight = nn.Parameter(torch.zeros_like(model[2].weight))
    assert torch.equal(model[:3](inputs).float(), model[2].bias.bfloat16().float().expand(16, -1))
    prune.remove(model[0], "weight")
    model(inputs)


def test_what_is_shared_looked_up_or_not_updated_has_no_copy() -> None:
    model = mlp()
    model[2].bias = model[0].bias
    copies = ComputeCopies(find_layers(model), [model[0].weight, model[2].weight, model[0].bias])
    copies.set(dict.fromkeys(DTYPES, torch.float16))
    assert copies.companions.keys() == {id(model[0].weight), id(model[2].weight)}
    tied = nn.ModuleDict({"words": nn.Embedding(5, 3), "body": nn.Linear(3, 3), "head": nn.Linear(3, 5, bias=False)})
    tied["head"].weight = tied["words"].weight
    assert set(copies_of(tied).companions) == {id(parameter) for parameter in tied["body"].parameters()}


def test_gradients_of_many_parts_are_added_in_fp32() -> None:
    model = mlp()
    copies = copies_of(model)
    copies.set(dict.fromkeys(DTYPES, torch.bfloat16))
    copy = copies.companions[id(model[0].weight)]
    for _ in range(300):
        copy.grad = torch.ones_like(copy)
        copies.gather_gradient(model[0].weight)
    # In BF16 the sum would stop at 256, where 1 is less than half of what two neighboring numbers are apart.
    assert copy.grad is None
    assert torch.equal(model[0].weight.grad, torch.full_like(model[0].weight, 300.0))


def test_an_optimizer_that_says_nothing_of_its_writing_reaches_the_copies() -> None:
    model = mlp()
    layers = find_layers(model)
    optimizer = LayerwiseOptimizer(torch.optim.AdamW(model.parameters(), amsgrad=True, fused=True), layers)
    copies = copies_of(model)
    precision = LayerPrecision(model, layers, weights=copies)
    precision.set(LEVELS)
    moments = GradientMoments(layers, optimizer.watched, beta=0.9)
    losses = torch.zeros(1, 2, dtype=torch.float64)
    update = TrainingUpdate(precision, moments, optimizer, LossScale(LossScaleConfig(initial=1.0), CPU), losses)
    gradients = Gradients(optimizer.watched)
    for seed in range(3):
        inputs, targets = blobs(16, seed=seed)
        copies.zero_grad()
        model.zero_grad()
        cross_entropy(model(inputs).float(), targets).backward()
        gradients.collect(copies.companions, {})
        gradients.publish()
        before = model[0].weight.detach().clone()
        update.run(torch.tensor(1.0, dtype=torch.float64), 16, gradients)
        assert not torch.equal(before, model[0].weight)
        for name in ("0", "2"):
            weight = model.get_submodule(name).weight
            assert torch.equal(copies.companions[id(weight)], weight.to(DTYPES[name]))
