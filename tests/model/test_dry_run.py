"""What two samples tell before training, and that they leave no trace."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.build import CPU, ConvNet, Limited, blobs, cross_entropy, images, mlp, same, values
from triaccel_ray.cuda.random_states import random_states
from triaccel_ray.data.sources import TensorSource, as_source
from triaccel_ray.loop import ControlLoop
from triaccel_ray.model.dry_run import (
    MAX_FRAMES,
    UserCodeError,
    _loss_of,
    attributing_errors,
    forbidding_exit,
    require_working,
)


class Silent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> None:
        self.linear(inputs)


def sparse_classes(highest: int) -> tuple[Tensor, Tensor]:
    """Samples of classes 0 to 3, with one of another class among them."""
    inputs, targets = blobs(64)
    targets[40] = highest
    return inputs, targets


BAD: tuple[tuple[str, dict[str, Any], type[Exception], tuple[str, ...]], ...] = (
    ("no module", {"model": "resnet18"}, TypeError, ("model = 'resnet18': must be a torch.nn.Module",)),
    ("all frozen", {"model": mlp().requires_grad_(False)}, ValueError, ("has no trainable weight", "requires_grad")),
    ("lazy", {"model": nn.Sequential(nn.LazyLinear(4))}, ValueError, ("0.weight has no shape yet", "one batch")),
    ("half precision", {"model": mlp().half()}, ValueError, ("is torch.float16: must be torch.float32",)),
    ("no outputs", {"model": Silent()}, TypeError, ("Silent returned None", "must return the outputs")),
    (
        "other inputs",
        {"data": (torch.randn(64, 9), torch.zeros(64, dtype=torch.int64))},
        UserCodeError,
        ("model Sequential raised RuntimeError: ", "mat1 and mat2", "inputs float32 (2, 9)"),
    ),
    (
        "vector loss",
        {"loss": lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, reduction="none")},
        ValueError,
        ("the loss returned float32 (2,)", "must be a scalar", ".mean()"),
    ),
    (
        "float loss",
        {"loss": lambda outputs, targets: cross_entropy(outputs, targets).item()},
        TypeError,
        ("the loss returned a float", "without .item()"),
    ),
    (
        "detached loss",
        {"loss": lambda outputs, targets: cross_entropy(outputs.detach(), targets)},
        ValueError,
        ("without a gradient", "without detach()"),
    ),
    (
        "class too large",
        {"data": sparse_classes(12)},
        UserCodeError,
        ("the loss raised IndexError: Target 12 is out of bounds", "outputs float32 (2, 4), targets int64 (2,)"),
    ),
    ("one argument", {"loss": lambda outputs: outputs}, UserCodeError, ("the loss raised TypeError: ", "takes 1")),
    ("no data", {"data": None}, TypeError, ("NoneType cannot be indexed",)),
    (
        "arrays",
        {"data": (np.zeros((4, 8)), np.zeros(4))},
        UserCodeError,
        (
            "mat1 and mat2 must have the same dtype",
            "inputs float64 (2, 8)",
            'use .float(), of an array .astype("float32")',
        ),
    ),
    (
        "lists",
        {"data": ([[1.0] * 8] * 4, torch.zeros(4))},
        TypeError,
        ("inputs are a list", "torch.as_tensor(inputs)"),
    ),
    ("a single number", {"data": (torch.ones(4, 8), torch.tensor(3))}, ValueError, ("targets are a single number",)),
    ("budget as text", {"memory_budget": "2GiB"}, TypeError, ("memory_budget = '2GiB': ", "bytes, such as 2 * 2**30")),
    ("no headroom", {"memory_headroom": False}, TypeError, ("memory_headroom = False: must be an integer number",)),
    (
        "control as a dict",
        {"config": {"every_steps": 4}},
        TypeError,
        ("config = {'every_steps': 4}", "ControlConfig(**"),
    ),
)


@pytest.mark.parametrize(("arguments", "kind", "needles"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_what_cannot_be_trained_is_refused_at_construction(
    arguments: dict[str, Any], kind: type[Exception], needles: tuple[str, ...]
) -> None:
    given = {"model": mlp(), "data": blobs(64), "loss": cross_entropy, **arguments}
    model = given.pop("model")
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    optimizer = torch.optim.SGD(parameters or [torch.zeros(1)], lr=0.1)
    with pytest.raises(kind) as refused:
        ControlLoop(model, optimizer, **given)
    for needle in needles:
        assert needle in str(refused.value)


def test_an_optimizer_is_no_class() -> None:
    with pytest.raises(TypeError, match=r"optimizer = <class .*SGD.*: must be a torch.optim.Optimizer"):
        ControlLoop(mlp(), torch.optim.SGD, cross_entropy, blobs(64))  # type: ignore[arg-type]


def test_two_samples_leave_no_trace() -> None:
    class Counting(nn.Dropout):
        def forward(self, inputs: Tensor) -> Tensor:
            self.calls = self.calls + 1  # another tensor
            return super().forward(inputs)

    model = nn.Sequential(ConvNet(), Counting(0.5))
    model[1].register_buffer("calls", torch.zeros(()))
    model.eval()
    model[1].train()
    before, drawn = values(model), random_states()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets) * (1 + random.random() + np.random.rand())

    require_working(model, loss, TensorSource(*images(64)), lambda outputs, targets: len(targets))
    assert same(values(model), before)
    assert same(random_states(), drawn)
    assert (model.training, model[0].training, model[1].training) == (False, False, True)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_lack_of_memory_is_left_to_training() -> None:
    require_working(nn.Sequential(mlp(), Limited(1)), cross_entropy, as_source(blobs(64)))


def test_cudnn_prepares_nothing_for_two_samples() -> None:
    enabled: list[bool] = []

    class Noting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            enabled.append(torch.backends.cudnn.enabled)
            return super().forward(x)

    require_working(Noting(8, 4), cross_entropy, as_source(blobs(64)))
    assert enabled == [False]
    assert torch.backends.cudnn.enabled


def deep(number: int) -> None:
    if number == 0:
        raise KeyError("too deep")
    deep(number - 1)


def test_of_a_traceback_the_users_last_lines_are_shown() -> None:
    with pytest.raises(UserCodeError) as told, attributing_errors("the loss", lambda: " (outputs none)"):
        deep(8)
    first, heading, *lines = str(told.value).splitlines()
    assert first == "the loss raised KeyError: 'too deep' (outputs none)"
    assert heading == "in your code:"
    assert len(lines) == 2 * MAX_FRAMES <= 6
    assert lines[-1] == '    raise KeyError("too deep")'
    assert all(line.endswith("in deep") for line in lines[::2])


@pytest.mark.parametrize("error", [FileNotFoundError("data files are missing"), MemoryError(), KeyboardInterrupt()])
def test_what_says_enough_stays_as_it_is(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, attributing_errors("data()"):
        raise error
    assert raised.value is error
    with pytest.raises(ValueError, match="0 samples") as raised, attributing_errors("data()"):
        TensorSource(torch.zeros(0, 8), torch.zeros(0))
    assert type(raised.value) is ValueError  # of this product's own


def test_an_exit_is_the_users_mistake_and_not_the_loss_of_a_process() -> None:
    with pytest.raises(UserCodeError, match=r"called sys.exit\(3\)(?s:.*)raise SystemExit\(3\)"), forbidding_exit():
        raise SystemExit(3)
    with pytest.raises(UserCodeError, match="model\\(\\) raised SystemExit"), attributing_errors("model()"):
        raise SystemExit("no GPU")
    # Ray ends a process in this way, and must go on to.
    rays: dict[str, Any] = {"__name__": "ray._private.worker"}
    exec("def stop():\n    raise SystemExit(1)", rays)
    for guard in (forbidding_exit(), attributing_errors("data()")):
        with pytest.raises(SystemExit), guard:
            rays["stop"]()


def test_samples_of_the_smallest_and_the_largest_class_are_tried() -> None:
    seen: list[list[int]] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(targets.tolist())
        return cross_entropy(outputs, targets)

    require_working(mlp().to(CPU), loss, as_source(blobs(64)))
    assert seen == [[0, 3]]


class OnGpu(Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]  # a property of tensors


@pytest.mark.parametrize("error", [ValueError, TypeError, AssertionError, RuntimeError, IndexError])
def test_a_loss_that_fails_on_cpu_copies_alone_is_judged_on_the_gpu(error: type[Exception]) -> None:
    calls: list[Tensor] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        calls.append(targets)
        if len(calls) == 1:
            raise error("on the CPU")
        return outputs.sum()

    outputs, targets = torch.ones(2), torch.arange(2).as_subclass(OnGpu)
    if error is IndexError:  # a class out of range
        with pytest.raises(UserCodeError, match="the loss raised IndexError"):
            _loss_of(loss, outputs, targets)
    else:
        assert _loss_of(loss, outputs, targets) == 2
        assert calls[1] is targets
