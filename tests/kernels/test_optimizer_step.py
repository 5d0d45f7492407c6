import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.host_sync import no_host_sync
from tests.kernels.build import DEVICE, both, interpreted
from triaccel_ray.kernels.multi_tensor import TensorTable
from triaccel_ray.kernels.optimizer_step.api import AdamWStep, SgdStep

pytestmark = interpreted
each_optimizer = pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
EPS = torch.finfo(torch.float32).eps

SHAPES = [(1,), (7,), (16, 3, 3, 3), (127,), (2048,), (2049,), (71, 73)]
GRADIENT_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float32, torch.float16, torch.bfloat16] * 2
COPY_DTYPES = [torch.float16, None, torch.bfloat16, torch.float32, torch.bfloat16, torch.float16, torch.bfloat16]
SGD: list[dict[str, Any]] = [
    {"lr": 0.1 * (1 + i), "weight_decay": 0.05 * (i % 3), "momentum": momentum, "nesterov": nesterov}
    for i, (momentum, nesterov) in enumerate([(0.9, True), (0.0, False), (0.9, False), (0.5, True)] * 2)
][: len(SHAPES)]
ADAMW: list[dict[str, Any]] = [
    {"lr": 0.01 * (1 + i), "weight_decay": 0.1 * (i % 3), "betas": betas, "eps": eps}
    for i, (betas, eps) in enumerate([((0.9, 0.999), 1e-8), ((0.0, 0.99), 1e-3), ((0.95, 0.5), 1e-6)] * 3)
][: len(SHAPES)]
DECOUPLED = [i % 2 == 0 for i in range(len(SHAPES))]


class Model:
    """Tensors of every shape and layout, their state, and the step under test."""

    def __init__(self, optimizer: str, *, kernel: bool = True, aligned: bool = True) -> None:
        self.optimizer, self.sizes = optimizer, [math.prod(shape) for shape in SHAPES]
        generator = torch.Generator().manual_seed(0)
        self.parameters = [self._place(torch.randn(shape, generator=generator), aligned) for shape in SHAPES]
        self.first, self.second = ([self._place(torch.zeros(shape), aligned) for shape in SHAPES] for _ in range(2))
        self.steps = [torch.zeros((), device=DEVICE) for _ in SHAPES]
        self.copies = [
            None if dtype is None else torch.full_like(p, math.nan, dtype=dtype)
            for p, dtype in zip(self.parameters, COPY_DTYPES, strict=True)
        ]
        names = ("parameters", "gradients", "first", "second", "steps", "copies")
        self.table = {name: TensorTable(len(SHAPES), DEVICE) for name in names}
        self.kernel = (SgdStep if optimizer == "sgd" else AdamWStep)(self.sizes, DEVICE, kernel=kernel)
        self.lr_factor, self.loss_scale = torch.ones(2, device=DEVICE).unbind()
        self.found = torch.zeros((), device=DEVICE)
        self.set_hyperparameters()

    @staticmethod
    def _place(tensor: Tensor, aligned: bool) -> Tensor:
        """Returns the tensor on the device, 4-dimensional ones channels_last, perhaps beginning at an odd address."""
        tensor = tensor.to(DEVICE)
        if tensor.dim() == 4:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        if aligned:
            return tensor
        whole = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=DEVICE)[1:]
        return whole.as_strided(tensor.shape, tensor.stride()).copy_(tensor)

    def set_hyperparameters(self, times: float = 1.0) -> None:
        if self.optimizer == "sgd":
            names = ("lr", "weight_decay", "momentum", "nesterov")
            values: dict[str, Any] = {name: [row[name] for row in SGD] for name in names}
        else:
            values = {name: [row[name] for row in ADAMW] for name in ("lr", "weight_decay", "eps")}
            values |= {f"beta{i + 1}": [row["betas"][i] for row in ADAMW] for i in (0, 1)} | {"decoupled": DECOUPLED}
        self.kernel.set(**values | {"lr": [times * lr for lr in values["lr"]]})

    def name(self, gradients: Sequence[Tensor | None]) -> None:
        without = [row["momentum"] == 0.0 for row in SGD]
        momenta = [None if no and self.optimizer == "sgd" else m for no, m in zip(without, self.first, strict=True)]
        named = (self.parameters, gradients, momenta, self.second, self.steps, self.copies)
        for table, tensors in zip(self.table.values(), named, strict=True):
            table.point_to(tensors)

    def launch(self) -> None:
        by = {"lr_factor": self.lr_factor, "loss_scale": self.loss_scale, "found_nonfinite": self.found}
        names = ["first"] if self.optimizer == "sgd" else ["first", "second", "steps"]
        states = [self.table[name] for name in names]
        self.kernel.step(self.table["parameters"], self.table["gradients"], states, self.table["copies"], **by)

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        self.name(gradients)
        self.launch()

    def state(self) -> list[Tensor]:
        copies = [copy for copy in self.copies if copy is not None]
        return [t.clone() for t in (*self.parameters, *self.first, *self.second, *self.steps, *copies)]


def draw(model: Model, seed: int, *, loss_scale: float = 1.0) -> list[Tensor | None]:
    """Returns gradients times the loss scale, in all precisions, as PyTorch lays them out: like the parameters."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.empty_like(p, dtype=dtype).copy_(loss_scale * torch.randn(p.shape, generator=generator))
        for p, dtype in zip(model.parameters, GRADIENT_DTYPES, strict=False)
    ]


class Peer:
    """PyTorch's own optimizer over the same parameters in another precision, a group for each."""

    def __init__(self, model: Model, dtype: torch.dtype) -> None:
        self.parameters = [p.to("cpu", dtype, copy=True).requires_grad_() for p in model.parameters]
        self.optimizers = [
            torch.optim.SGD([p], **SGD[i]) if model.optimizer == "sgd"
            else torch.optim.AdamW([p], **ADAMW[i]) if DECOUPLED[i] else torch.optim.Adam([p], **ADAMW[i])
            for i, p in enumerate(self.parameters)
        ]  # fmt: skip

    def step(self, gradients: Sequence[Tensor | None], *, loss_scale: float, lr_factor: float) -> None:
        for p, gradient, optimizer in zip(self.parameters, gradients, self.optimizers, strict=True):
            p.grad = None if gradient is None else gradient.to("cpu", p.dtype) / loss_scale
            lr = optimizer.param_groups[0]["lr"]
            optimizer.param_groups[0]["lr"] = lr * lr_factor
            optimizer.step()
            optimizer.param_groups[0]["lr"] = lr


def assert_as_exact(model: Model, exact: Peer, same_precision: Peer) -> None:
    """Asserts an error against fp64 within a few roundings more than PyTorch's own fp32 step makes."""
    for ours, theirs, truth in zip(model.parameters, same_precision.parameters, exact.parameters, strict=True):
        budget = 2.0 * (theirs.double() - truth).abs().max() + 8.0 * EPS * truth.abs().max()
        error = (ours.double().cpu() - truth).abs().max()
        assert error <= budget, f"{tuple(ours.shape)}: {error:.2e} beyond {budget:.2e}"


def assert_copies(model: Model) -> None:
    for parameter, copy in zip(model.parameters, model.copies, strict=True):
        if copy is not None:
            # Triton's interpreter truncates to bfloat16 instead of rounding.
            ulp = 2.0**-7 if copy.dtype is torch.bfloat16 and DEVICE.type == "cpu" else 0.0
            torch.testing.assert_close(copy.float(), parameter.to(copy.dtype).float(), rtol=ulp, atol=0.0)


@both
@each_optimizer
@pytest.mark.parametrize("aligned", [True, False])
def test_steps_agree_with_pytorch(optimizer: str, kernel: bool, aligned: bool) -> None:
    loss_scale = 1000.0
    model = Model(optimizer, kernel=kernel, aligned=aligned)
    assert aligned or all(p.data_ptr() % 16 for p in model.parameters)
    exact, same_precision = Peer(model, torch.float64), Peer(model, torch.float32)
    model.loss_scale.fill_(loss_scale)
    for step in range(4):
        gradients = draw(model, step, loss_scale=loss_scale)
        if step == 2:
            gradients[0] = gradients[5] = None
        lr_factor = 1.0 / (1 + step)
        model.lr_factor.fill_(lr_factor)
        model.step(gradients)
        for peer in (exact, same_precision):
            peer.step(gradients, loss_scale=loss_scale, lr_factor=lr_factor)
        assert_as_exact(model, exact, same_precision)
        if step < 2:
            assert_copies(model)
    if optimizer == "adamw":
        assert [step.item() for step in model.steps] == [3, 4, 4, 4, 4, 3, 4]


@both
@each_optimizer
def test_a_skipped_step_writes_nothing(optimizer: str, kernel: bool) -> None:
    model = Model(optimizer, kernel=kernel)
    model.step(draw(model, 0))
    before, gradients = model.state(), draw(model, 1)
    gradients[2][0, 1, 2, 2] = math.nan  # type: ignore[index]
    model.found.fill_(1.0)
    model.step(gradients)
    assert all(map(torch.equal, before, model.state()))
    model.found.zero_()
    model.step(draw(model, 1))
    assert not any(map(torch.equal, before, model.parameters))


@both
@each_optimizer
def test_empty_tables_and_tensors_change_nothing(optimizer: str, kernel: bool) -> None:
    model = Model(optimizer, kernel=kernel)
    before = model.state()
    model.launch()
    model.step([None] * len(SHAPES))
    assert all(torch.equal(old, new) for old, new in zip(before[:-6], model.state()[:-6], strict=True))
    assert all(copy.isnan().all() for copy in model.copies if copy is not None)
    model.kernel = type(model.kernel)([0] * len(SHAPES), DEVICE, kernel=kernel)
    model.launch()  # CUDA refuses a grid without programs


@each_optimizer
def test_what_the_kernel_could_not_read_is_refused(optimizer: str) -> None:
    model = Model(optimizer)
    for wrong in (torch.float16, torch.bfloat16):  # which needs its low words
        model.table["parameters"].point_to([p.to(wrong) for p in model.parameters])
        with pytest.raises(ValueError, match=f"parameters or optimizer state are {wrong}: must be torch.float32"):
            model.launch()
    model.table["gradients"] = TensorTable(3, DEVICE)
    with pytest.raises(ValueError, match="a table of 3 tensors: must be of 7"):
        model.launch()


class TestOnAGpu:
    pytestmark = pytest.mark.gpu

    @each_optimizer
    def test_a_captured_step_reads_tables_hyperparameters_and_scalars_anew(self, optimizer: str) -> None:
        captured, eager = Model(optimizer), Model(optimizer)
        captured.launch()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured.launch()
        for step in range(4):
            gradients = draw(eager, step, loss_scale=2.0**step)
            if step == 1:
                gradients[4] = None
                gradients = [None if g is None else g.float() for g in gradients]
            with no_host_sync():
                for model in (captured, eager):
                    model.set_hyperparameters(times=1.0 + step)
                    model.lr_factor.fill_(1.0 / (1 + step))
                    model.loss_scale.fill_(2.0**step)
                    model.found.fill_(float(step == 2))
                    model.name(gradients)
                graph.replay()
                eager.launch()
            for ours, theirs in zip(captured.state(), eager.state(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.0, equal_nan=True)

    @each_optimizer
    def test_more_elements_than_32_bits_count(self, optimizer: str) -> None:
        size = 2**31 + 4099
        parameter, first = torch.ones(size, device=DEVICE), torch.zeros(size, device=DEVICE)
        second = torch.zeros(size, device=DEVICE) if optimizer == "adamw" else None
        gradient = torch.zeros(size, dtype=torch.float16, device=DEVICE)
        copy = torch.full((size,), math.nan, dtype=torch.float16, device=DEVICE)
        gradient[-4100:] = 2.0
        tables = []
        for tensor in (parameter, gradient, first, copy, second, torch.zeros((), device=DEVICE)):
            tables.append(TensorTable(1, DEVICE))
            tables[-1].point_to([tensor])
        one, zero = torch.ones((), device=DEVICE), torch.zeros((), device=DEVICE)
        by = {"lr_factor": one, "loss_scale": one, "found_nonfinite": zero}
        if optimizer == "sgd":
            sgd = SgdStep([size], DEVICE)
            sgd.set(lr=[0.125], weight_decay=[0.0], momentum=[0.5], nesterov=[False])
            sgd.step(tables[0], tables[1], [tables[2]], tables[3], **by)
            expected = 0.75
        else:
            adam = AdamWStep([size], DEVICE)
            adam.set(lr=[0.125], weight_decay=[0.0], beta1=[0.5], beta2=[0.5], eps=[0.0], decoupled=[True])
            # 0 / 0 where there is no gradient: eps 0 tells what was reached.
            adam.step(tables[0], tables[1], [tables[2], tables[4], tables[5]], tables[3], **by)
            expected = 0.875
        torch.testing.assert_close(parameter[-4100:], torch.full((4100,), expected, device=DEVICE))
        assert torch.equal(copy[-4100:], parameter[-4100:].half())
        rest = copy[:-4100]
        assert (rest == 1.0).all() if optimizer == "sgd" else rest.isnan().all()
