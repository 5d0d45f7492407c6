"""What two samples tell before training, and that they leave no trace."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.optimization import Adafactor

from tests.build import (
    ConvNet,
    Forces,
    Limited,
    blobs,
    cross_entropy,
    energy_and_forces,
    images,
    mlp,
    same,
    values,
)
from triaccel_ray.config import ControlConfig, PrecisionConfig
from triaccel_ray.cuda.random_states import random_states
from triaccel_ray.data.sources import TensorSource, as_source
from triaccel_ray.loop import ControlLoop
from triaccel_ray.measure.memory import MIB
from triaccel_ray.model.dry_run import (
    MAX_FRAMES,
    UserCodeError,
    _loss_of,
    attributing_errors,
    forbidding_exit,
    require_working,
)
from triaccel_ray.model.layers import find_layers, require_trainable
from triaccel_ray.records.plan import Precision


class Silent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> None:
        self.linear(inputs)


def with_class(number: int) -> tuple[Tensor, Tensor]:
    """Samples of classes 0 to 3, with one of another class among them."""
    inputs, targets = blobs(64)
    targets[40] = number
    return inputs, targets


class DistributedDataParallel(nn.Sequential):
    """Has the name of PyTorch's class, which is what is looked at: nothing is spread here."""


class Twice(torch.optim.SGD):
    """Evaluates a batch again in its step, as sharpness-aware minimization does."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        closure()
        return super().step(closure)


class Scored(torch.optim.SGD):
    def step(self, closure: Any = None, *, score: float) -> Any:  # type: ignore[override]
        return super().step(closure)


ARRAYS, LISTS = (np.zeros((4, 8)), np.zeros(4)), ([[1.0] * 8] * 4, torch.zeros(4))
OTHER = (torch.randn(64, 9), torch.zeros(64, dtype=torch.int64))
NOBODY = ControlConfig(precision=PrecisionConfig(initial_layers={"nobody": Precision.BF16}))
SPARSE = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4))
COMPLEX = nn.ParameterList([torch.ones(2, 2, dtype=torch.complex64)])
MODEL = mlp()
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no module": ({"model": "resnet18"}, TypeError, "model = 'resnet18': must be a torch.nn.Module"),
    "all frozen": ({"model": mlp().requires_grad_(False)}, ValueError, "has no trainable weight.*requires_grad"),
    "no matrix": ({"model": nn.BatchNorm1d(4)}, ValueError, "has no trainable weight of two or more dimensions"),
    "lazy": ({"model": nn.Sequential(nn.LazyLinear(4))}, ValueError, "0.weight has no shape yet.*one batch"),
    "half": ({"model": mlp().half()}, ValueError, "0.weight is torch.float16: must be torch.float32.*model.float"),
    "complex": ({"model": COMPLEX}, ValueError, "parameter 0 is torch.complex64: .*store pairs, .*view_as_complex"),
    "sparse": ({"model": SPARSE}, ValueError, "has sparse = True: must be"),
    "wrapped": ({"model": DistributedDataParallel(nn.Linear(2, 2))}, ValueError, "give it the plain module inside"),
    "no outputs": ({"model": Silent()}, TypeError, "Silent returned None.*must return the outputs"),
    "an optimizer's class": ({"optimizer": torch.optim.SGD}, TypeError, "optimizer = <class .*: must be a torch.opt"),
    "another's optimizer": ({"optimizer": torch.optim.SGD(mlp().parameters())}, ValueError, "updates no layer of this"),
    "the loss's parameters": (
        {"model": MODEL, "optimizer": torch.optim.SGD([*MODEL.parameters(), nn.Parameter(torch.ones(1))], lr=0.1)},
        ValueError, "updates 1 parameters that are not the model's: make what owns them, such as the loss, a part",
    ),
    "a closure": ({"optimizer": torch.optim.LBFGS(mlp().parameters())}, ValueError, "LBFGS needs a closure"),
    "another's closure": (
        {"optimizer": Twice(mlp().parameters(), lr=0.1)},
        ValueError, "Twice needs a closure, which evaluates a batch more than once: use another one",
    ),
    "an argument": ({"optimizer": Scored(mlp().parameters())}, ValueError, "Scored needs a score in each step: use an"),
    "no rate": (
        {"optimizer": torch.optim.Optimizer(mlp().parameters(), {"step_size": 0.1})},
        ValueError, "Optimizer has no lr in parameter group 0: must have a number or a tensor, .*; give it lr=",
    ),
    "a relative rate": (
        {"optimizer": Adafactor([*mlp().parameters()])},
        ValueError, "Adafactor has lr = None in parameter group 0: must",
    ),
    "other inputs": ({"data": OTHER}, UserCodeError, r"Sequential raised RuntimeError.*mat1 .*inputs float32 \(2, 9\)"),
    "vector loss": (
        {"loss": lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, reduction="none")},
        ValueError, r"the loss returned float32 \(2,\).*must be a scalar.*.mean\(\)",
    ),
    "float loss": (
        {"loss": lambda outputs, targets: cross_entropy(outputs, targets).item()},
        TypeError, r"the loss returned a float.*without .item\(\)",
    ),
    "detached loss": (
        {"loss": lambda outputs, targets: cross_entropy(outputs.detach(), targets)},
        ValueError, r"without a gradient.*without detach\(\)",
    ),
    "class too large": (
        {"data": with_class(12)},
        UserCodeError, r"IndexError: Target 12 is out of.*outputs float32 \(2, 4\), targets int64 \(2,\)",
    ),
    "class too small": ({"data": with_class(-1)}, UserCodeError, "IndexError: Target -1 is out of"),
    "one argument": ({"loss": lambda outputs: outputs}, UserCodeError, "the loss raised TypeError: .*takes 1"),
    "no data": ({"data": None}, TypeError, "NoneType cannot be indexed"),
    "arrays": (
        {"data": ARRAYS},
        UserCodeError, r"must have the same dtype.*inputs float64 \(2, 8\).*use .float\(\), of an array .astype",
    ),
    "lists": ({"data": LISTS}, TypeError, r"inputs are a list.*torch.as_tensor\(inputs\)"),
    "a number": ({"data": (torch.ones(4, 8), torch.tensor(3))}, ValueError, "targets are a single number"),
    "no room": (
        {"memory_budget": MIB},
        ValueError, r"the process already holds \d+ MiB on this machine .* give a larger budget",
    ),
    "text": ({"memory_budget": "2GiB"}, TypeError, r"memory_budget = '2GiB': .*bytes, such as 2 \* 2\*\*30"),
    "no headroom": ({"memory_headroom": False}, TypeError, "memory_headroom = False: must be an integer number"),
    "a dict": ({"config": {"every_steps": 4}}, TypeError, r"config = {'every_steps': 4}.*ControlConfig\(\*\*"),
    "no such layer": ({"config": NOBODY}, ValueError, "initial_layers = 'nobody': the model has no such layer"),
    **{
        f"{epochs!r} epochs": ({"epochs": epochs}, ValueError, "epochs = .*: must")
        for epochs in (0, -1.0, float("nan"), float("inf"), "3", True)
    },
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_trained_is_refused_at_construction_and_left_alone(case: str) -> None:
    arguments, kind, message = BAD[case]
    given = {"model": mlp(), "data": blobs(64), "loss": cross_entropy, **arguments}
    modules = list(given["model"].modules()) if isinstance(given["model"], nn.Module) else []
    parameters = [parameter for module in modules for parameter in module.parameters(recurse=False)]
    optimizer = given.pop("optimizer", None) or torch.optim.SGD(parameters or [torch.zeros(1)], lr=0.1)
    with pytest.raises(kind, match=f"(?s){message}"):
        ControlLoop(optimizer=optimizer, **given)
    assert all("forward" not in module.__dict__ for module in modules)


@pytest.mark.parametrize("lr", [0.1, np.float32(0.1), torch.tensor(0.1)])
def test_a_step_may_take_a_closure_and_a_rate_may_be_a_tensor(lr: Any) -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps `step`
    require_trainable(model, optimizer, find_layers(model))


def test_a_model_that_computes_gradients_is_tried_in_eval_mode_too() -> None:
    judged: list[bool] = []

    def judge(outputs: Any, targets: Tensor) -> None:
        judged.extend([torch.is_grad_enabled(), *(each.requires_grad for each in outputs)])

    source = as_source((torch.randn(64, 8), torch.randn(64, 1)))
    require_working(Forces(), energy_and_forces, source, judge)
    assert judged == [False] * 3
    with pytest.raises(UserCodeError, match=r"in eval mode, raised RuntimeError: element 0 .* does not require grad"):
        require_working(Forces(detached_in_eval=True), energy_and_forces, source, judge)


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


def margins(outputs: Tensor, targets: Tensor) -> Tensor:
    """A contrastive loss: of one sample alone it is 0."""
    return torch.nn.functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


@pytest.mark.parametrize(
    ("loss", "is_sum"),
    [
        (nn.CrossEntropyLoss(reduction="sum"), True),
        (lambda outputs, targets: cross_entropy(outputs, targets) * len(targets) / 64, True),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]), label_smoothing=0.1), False),
        (lambda outputs, targets: cross_entropy(outputs, targets) + outputs.square().mean(), False),
        (margins, False),
        (lambda outputs, targets: (outputs[:, 0] * (targets > 0)).sum() / (targets > 0).sum().clamp(min=1), False),
    ],
)
def test_a_loss_that_grows_with_the_batch_is_refused(loss: Any, is_sum: bool) -> None:
    source = as_source(blobs(16))
    if not is_sum:
        require_working(mlp(), loss, source)
        return
    with pytest.raises(ValueError, match=r"the loss of two samples is [\d.]+, the sum of both: must be the mean"):
        require_working(mlp(), loss, source)


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
