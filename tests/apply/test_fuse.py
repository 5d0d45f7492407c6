import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.apply.captured import fault_messages, fixed, images, loop_of
from tests.apply.fusible import Block, fused, step
from tests.build import BF16, FP16, FP32, controlled, same, values
from triaccel_ray.apply.fuse import Fusion
from triaccel_ray.apply.fused_norm import RecomputedInput, format_refusal
from triaccel_ray.control.weight_form import compiles
from triaccel_ray.kernels.batch_norm_act import RunningStatistics
from triaccel_ray.model.regions import unfused_because
from triaccel_ray.trainables.models import efficientnet_b0, resnet18


def _kinds(fusion: Fusion) -> list[tuple[str, bool, bool]]:
    """Activation, whether there is a sum, and whether the output is forked, of each norm."""
    return [(norm._activation, norm._combine is not None, norm.forked) for norm in fusion.norms]


def _assert_same(model: nn.Module, x: Tensor) -> Fusion:
    """Asserts that the fused module's step is the model's, bit for bit where the original modules are called."""
    twin = copy.deepcopy(model)
    fusion = fused(model)
    for _ in range(2):
        assert same(step(fusion.module, model, x), step(twin, twin, x))
    assert {id(p) for p in fusion.module.parameters()} <= {id(p) for p in model.parameters()}
    assert {id(b) for b in fusion.module.buffers()} <= {id(b) for b in model.buffers()}
    return fusion


IMAGES = torch.randn(3, 4, 6, 6, generator=torch.Generator().manual_seed(0))


def with_layers(number: int) -> nn.Module:
    """One convolution with a batch norm, then linear layers: so many layers in all."""
    linear = [each for _ in range(number - 2) for each in (nn.Linear(8, 8), nn.ReLU())]
    stem = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*stem, *linear, nn.Linear(8, 10))


@pytest.mark.parametrize("compile_", ["auto", "off"])
@pytest.mark.parametrize(
    ("model", "number"),
    [(resnet18(10, "cifar"), 20), (efficientnet_b0(10), 49), (with_layers(3), 1), (with_layers(4), 0)],
    ids=["ResNet", "EfficientNet", "a third", "fewer"],
)
def test_batch_norms_of_fewer_than_every_third_layer_are_not_fused_unless_compile_is_off(
    model: nn.Module, number: int, compile_: str
) -> None:
    config, data = fixed(FP32, compile=compile_), (torch.randn(64, 3, 32, 32), torch.zeros(64).long())
    with loop_of(model, config, data=data) as loop:
        before = len(loop._training.faults)
        fusion = loop._training._fuse()
        notes = [fault.detail for fault in loop._training.faults[before:]]
    is_compiled = not number and compile_ == "auto"
    for is_fused in (not unfused_because(model), fusion is not None):  # as predicted, and as it is
        assert compiles(config.execution, torch.device("cuda"), is_fused=is_fused) == is_compiled
    if is_compiled:
        assert fusion is None
        assert notes == ["1 BatchNorm2d for 4 layers are not fused: the model is faster compiled"]
    else:
        assert len(fusion.norms) == (number or 1)
        assert notes == [f"the model is not compiled: fused batch norms ({number}) are faster"] * (compile_ == "auto")


@pytest.mark.parametrize("part", ["frozen", "compiled"])
def test_frozen_layers_count_and_what_a_user_has_compiled_in_part_is_fused(part: str) -> None:
    model = with_layers(4)
    if part == "frozen":
        model[5].requires_grad_(False)
    else:
        model[-1].compile(backend="eager")
    with loop_of(model, fixed(FP32, compile="auto"), data=(torch.randn(64, 3, 8, 8), torch.zeros(64).long())) as loop:
        assert (loop._training._fuse() is None) == (part == "frozen")


@pytest.mark.gpu
def test_a_model_with_few_batch_norms_is_compiled_and_captured() -> None:
    ticks: list[Any] = []
    loop = loop_of(with_layers(4).cuda(), fixed(BF16, compile="auto"), data=images(640), on_tick=ticks.append)
    losses = [loop.train_epoch().loss for _ in range(3)]
    assert losses[2] < losses[0]
    assert [each for each in fault_messages(ticks) if "compiled" in each] == [
        "compiled: 1 BatchNorm2d for 4 layers are not fused: the model is faster compiled",
        "compiled: Sequential compiled as a whole: it does not consist of equal blocks",
    ]
    assert loop._training.steps.num_captured == 1
    loop.close()


def test_resnet_is_fused_whole_and_its_forks_too() -> None:
    model = resnet18(10, "cifar")
    fusion = _assert_same(model, torch.randn(2, 3, 16, 16))
    kinds = _kinds(fusion)
    assert len(kinds) == 20
    assert kinds.count(("relu", True, True)) == 7  # the last block's output goes one way only
    assert kinds[-1] == ("relu", True, False)
    assert kinds[0] == ("relu", False, True)  # through the identity that stands for max-pooling
    assert [kind for kind in kinds if kind[0] == "none"] == [("none", False, False)] * 3  # beside a downsampling norm
    assert fusion.norms[0].following == (model.layer1[0].conv1,)
    assert fusion.norms[-1].following == (model.fc,)
    assert fusion.norms[4].following == (model.layer2[0].conv1, model.layer2[0].downsample[0])
    assert not any(norm.has_other_readers for norm in fusion.norms)


def _writes_into_the_residual(block: Block, x: Tensor) -> Tensor:
    residual = block.other(x)
    early = residual
    residual += block.norm(block.conv(x))
    return early * residual


def _writes_between(block: Block, x: Tensor) -> Tensor:
    hidden = block.norm(block.conv(x))
    residual = block.other(x)
    residual.mul_(2)
    return torch.relu(hidden + residual)


def _in_place_augmented(block: Block, x: Tensor) -> Tensor:
    y = block.norm(block.conv(x))
    alias = y
    y += x
    return block.other(alias)


def _calls_the_norm_twice(block: Block, x: Tensor) -> Tensor:
    first = block.norm(block.conv(x))
    return torch.relu(first + block.norm(block.other(x)))


FUSIBLE: dict[str, tuple[Callable[[Block, Tensor], Any], list[tuple[str, bool, bool]]]] = {
    "function": (lambda b, x: F.relu(b.norm(b.conv(x))), [("relu", False, False)]),
    "in place": (lambda b, x: F.relu(b.norm(b.conv(x)), inplace=True), [("relu", False, False)]),
    "method": (lambda b, x: b.norm(b.conv(x)).relu_(), [("relu", False, False)]),
    "silu": (lambda b, x: F.silu(b.norm(b.conv(x))), [("silu", False, False)]),
    "sum": (lambda b, x: torch.relu(x + b.norm(b.conv(x))), [("relu", True, False)]),
    "sum by name": (lambda b, x: torch.relu(torch.add(b.norm(b.conv(x)), x)), [("relu", True, False)]),
    "sum into the norm": (lambda b, x: torch.relu(operator.iadd(b.norm(b.conv(x)), x)), [("relu", True, False)]),
    "silu of a sum": (lambda b, x: F.silu(x + b.norm(b.conv(x))), [("none", True, False)]),
    "sum of another size": (lambda b, x: b.norm(b.conv(x)) + x.mean((2, 3), keepdim=True), [("none", True, False)]),
    "scaled sum": (lambda b, x: torch.add(b.norm(b.conv(x)), x, alpha=2), [("none", False, False)]),
    "constant": (lambda b, x: b.norm(b.conv(x)) + 1, [("none", False, False)]),
    "two readers": (lambda b, x: (lambda y: torch.relu(y) * y)(b.norm(b.conv(x))), [("none", False, False)]),
    "twice itself": (lambda b, x: (lambda y: y + y)(b.norm(b.conv(x))), [("none", False, False)]),
    "other function": (lambda b, x: torch.tanh(b.norm(b.conv(x))), [("none", False, False)]),
    "output": (lambda b, x: (b.norm(b.conv(x)), x), [("none", False, False)]),
    "written into the residual": (_writes_into_the_residual, [("none", False, False)]),
    "residual written in between": (_writes_between, [("none", False, False)]),
    "written in place": (_in_place_augmented, [("none", False, False)]),
    "norm used twice": (_calls_the_norm_twice, [("none", False, False), ("relu", True, False)]),
}


@pytest.mark.parametrize("name", FUSIBLE)
def test_chains_in_all_spellings(name: str) -> None:
    rest, kinds = FUSIBLE[name]
    assert _kinds(_assert_same(Block(rest), IMAGES)) == kinds


def test_norms_without_parameters_averages_or_momentum_compute_as_before() -> None:
    norms = [{"affine": False}, {"track_running_stats": False}, {"momentum": None}]
    for options in norms:
        _assert_same(Block(norm=nn.BatchNorm2d(4, **options)), IMAGES)  # type: ignore[arg-type]
    frozen = Block()
    frozen.norm.eval()
    before = values(frozen.norm)
    _assert_same(frozen, IMAGES)
    assert same(values(frozen.norm), before)


def test_layers_keep_their_replaced_forward_functions() -> None:
    model = resnet18(10, "cifar")
    precision = controlled(model, BF16, FP16)
    fusion = fused(model)
    seen: list[torch.dtype] = []
    model.layer3[0].conv1.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with precision.in_force():
        assert fusion.module(torch.randn(2, 3, 8, 8)).dtype is torch.float16
    assert seen == [torch.float16]
    assert fusion.holds()


def test_hooks_on_parts_are_kept_and_those_on_opened_modules_are_noticed() -> None:
    model = nn.Sequential(Block(), Block(), Block())
    calls: list[nn.Module] = []
    model[0].register_forward_hook(lambda module, args, output: calls.append(module))
    model[1].norm.register_forward_hook(lambda module, args, output: calls.append(module))
    fusion = fused(model)
    fusion.module(IMAGES)
    assert calls == [model[0], model[1].norm]
    assert [norm.norm for norm in fusion.norms] == [model[2].norm]
    model[2].norm.register_forward_hook(lambda module, args, output: calls.append(module))
    fusion.module(IMAGES)
    assert calls[-1] is model[2].norm
    assert fusion.holds()
    model[1].register_forward_hook(lambda module, args, output: None)
    assert not fusion.holds()


def test_a_change_of_mode_is_noticed_where_it_matters() -> None:
    model = Block(lambda b, x: F.dropout(torch.relu(b.norm(b.conv(x))), 0.5, b.training))
    fusion = _assert_same(model, IMAGES)
    model.norm.eval()
    assert fusion.holds()
    model.eval()
    assert not fusion.holds()
    again = fused(model)  # of a model in evaluation mode: as in training mode, and the model stays as it was
    assert not model.training
    assert not again.holds()
    model.train()
    assert again.holds()


@pytest.mark.parametrize(
    ("name", "num_norms"), [("efficientnet_b0", 49), ("mobilenet_v3_small", 34), ("densenet121", 121)]
)
def test_other_networks_are_fused_whole(name: str, num_norms: int) -> None:
    models = pytest.importorskip("torchvision.models")
    fusion = _assert_same(getattr(models, name)(weights=None, num_classes=4), torch.randn(2, 3, 32, 32))
    assert len(fusion.norms) == num_norms


@pytest.mark.parametrize(("recompute", "expected"), [(True, 8), (False, 0)])
def test_convolutions_inside_the_blocks_do_not_keep_what_they_alone_read(recompute: bool, expected: int) -> None:
    model = resnet18(10, "cifar")
    before = {name: module.__dict__.keys() for name, module in model.named_modules()}
    fusion = fused(model, recompute=recompute)
    assert sum(isinstance(module, RecomputedInput) for module in fusion.module.modules()) == expected
    assert {name: module.__dict__.keys() for name, module in model.named_modules()} == before


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0"])
def test_on_a_gpu_the_kernels_step_is_the_models(name: str) -> None:
    torch.manual_seed(0)
    model = (resnet18(10, "cifar") if name == "resnet18" else efficientnet_b0(10)).cuda()
    for module in model.modules():
        if type(module).__name__ in ("StochasticDepth", "Dropout"):
            module.eval()
    twin = copy.deepcopy(model)
    fusion = fused(model)
    x = torch.randn(16, 3, 64, 64, device="cuda").to(memory_format=torch.channels_last)
    actual, expected = step(fusion.module, model, x), step(twin, twin, x)
    double = copy.deepcopy(twin).double()
    double.load_state_dict({name: v.double() if v.is_floating_point() else v for name, v in values(twin).items()})
    exact = step(double, double, x.double())

    def distance(first: list[Tensor], second: list[Tensor]) -> float:
        flat = [torch.cat([t.double().flatten() for t in tensors]) for tensors in (first, second)]
        return float((flat[0] - flat[1]).norm() / flat[1].norm())

    assert distance([actual["outputs"]], [exact["outputs"]]) < 3 * distance([expected["outputs"]], [exact["outputs"]])
    assert distance(actual["gradients"], exact["gradients"]) < 3 * distance(expected["gradients"], exact["gradients"])
    for key, value in expected["buffers"].items():
        torch.testing.assert_close(actual["buffers"][key], value, rtol=1e-3, atol=1e-4)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _step(layer: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    """Returns a convolution's output on a fused norm's, and where that was."""
    from triaccel_ray.kernels.batch_norm_act.launch import Call, launch

    running = RunningStatistics(mean=torch.zeros(8, device=DEVICE), var=torch.ones(8, device=DEVICE))
    call = Call(running=running, eps=1e-5, activation="relu", output_dtype=torch.float32)
    y = launch(call, x, torch.ones(8, device=DEVICE), torch.zeros(8, device=DEVICE), None)
    return layer(y), y.data_ptr()


def test_a_recomputed_input_is_not_kept_and_gives_the_same_gradients() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(8, 4, 3, padding=1).to(DEVICE, memory_format=torch.channels_last)
    data = torch.randn(4, 8, 6, 6, device=DEVICE).to(memory_format=torch.channels_last)
    gradients = []
    for layer in (conv, RecomputedInput(conv)):
        x = data.clone().requires_grad_()
        out, address = _step(layer, x)
        other = torch.empty_like(data)  # takes the place of what was freed, if it was
        kept = out.grad_fn._saved_input  # type: ignore[union-attr]
        assert (kept.data_ptr() == address) == (layer is conv)
        del other, kept
        gradients.append(torch.autograd.grad(out.square().sum(), [x, conv.weight]))
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("fits", [True, False])
def test_another_memory_format_is_refused_with_the_way_out(fits: bool) -> None:
    x = torch.zeros(2, 3, 4, 5)
    laid_out = x.to(memory_format=torch.channels_last)
    assert format_refusal(laid_out, None) == format_refusal(laid_out, laid_out) == ""
    assert format_refusal(x[:, :1].contiguous(), None) == ""  # the same in both formats
    refusal = format_refusal(laid_out, x) if fits else format_refusal(x, laid_out)
    assert "shape (2, 3, 4, 5) have strides (60, 20, 5, 1)" in refusal
    assert "keep activations in that memory format" in refusal
