"""The loss of many outputs, compiled together with their cast to FP32; on a CPU."""

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.apply.captured import faults_of, fixed, loop_of
from tests.build import FP32, blobs, mlp
from triaccel_ray.apply.compile import Compilation, loss_in_fp32


def gradient_and_saved(
    targets: torch.Tensor, compilation: Compilation | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Gradient of the mean loss of BF16 outputs, and the saved tensors of the outputs' size."""
    torch.manual_seed(0)
    outputs = torch.randn(*targets.shape, 50, dtype=torch.bfloat16, requires_grad=True)
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == outputs.numel():
            saved.append(tensor)
        return tensor

    def loss(out: Any, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out["logits"].flatten(0, 1), y.flatten())

    compute = loss_in_fp32 if compilation is None else compilation.loss
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        value = compute(loss, {"logits": outputs * 2}, targets)
    value.backward()
    assert value.dtype is torch.float32
    assert outputs.grad is not None
    return outputs.grad, saved


def test_a_compiled_loss_is_computed_in_fp32_and_stores_no_fp32_copy_of_the_outputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("triaccel_ray.apply.compile._MIN_OUTPUTS", 1000)
    compilation, counts = Compilation(nn.Linear(2, 2)), []
    for batch_size in (8, 12, 20):
        targets = torch.randint(0, 50, (batch_size, 16))
        expected, widened = gradient_and_saved(targets, None)
        found, saved = gradient_and_saved(targets, compilation)
        torch.testing.assert_close(found, expected, rtol=0.01, atol=1e-6)
        assert torch.float32 in {tensor.dtype for tensor in widened}
        assert {tensor.dtype for tensor in saved} == {torch.bfloat16}
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts[0] == counts[-1]  # of any batch size
    assert compilation.compiles_loss


def test_only_the_losses_of_one_loop_share_its_limit_of_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triaccel_ray.apply.compile._MIN_OUTPUTS", 1)
    monkeypatch.setattr("triaccel_ray.apply.compile._LOSS_RECOMPILE_LIMIT", 1)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    loops = [Compilation(nn.Linear(2, 2)) for _ in range(3)]

    def compute(compilation: Compilation, smoothing: float) -> torch.Tensor:
        outputs, targets = torch.randn(4, 3, requires_grad=True), torch.zeros(4, dtype=torch.long)
        with compilation.in_force():
            return compilation.loss(functools.partial(F.cross_entropy, label_smoothing=smoothing), outputs, targets)

    for index, compilation in enumerate(loops):
        compute(compilation, 0.1 * index)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="too many variants"):
        compute(loops[0], 0.9)


class Annealed(nn.Module):
    """A loss whose weight depends on the number of steps, which compiled code takes for a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.num_steps += 1
        return F.cross_entropy(outputs, targets) * min(1.0, self.num_steps / 1000)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PyTorch, while it compiles
@pytest.mark.parametrize(("of_each_step", "limit"), [(False, 16), (True, 3)])
def test_a_loss_that_cannot_be_compiled_runs_as_it_is_beside_a_compiled_model(
    of_each_step: bool, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend refuses it, or each step would need code of its own."""

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        if not of_each_step and any(node.target is F.cross_entropy for node in graph.graph.nodes):
            raise RuntimeError("no code today")
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr("triaccel_ray.apply.compile._MIN_OUTPUTS", 1)
    monkeypatch.setattr("triaccel_ray.apply.compile._LOSS_RECOMPILE_LIMIT", limit)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    ticks: list[Any] = []
    loss = Annealed() if of_each_step else F.cross_entropy
    loop = loop_of(mlp(), fixed(FP32, compile="on"), data=blobs(640), loss=loss, on_tick=ticks.append)
    assert loop.train_epoch().num_steps == 10
    (text,) = [fault.detail for fault in faults_of(ticks) if "failed" in fault.detail]
    assert text.startswith("torch.compile failed, the loss runs as it is: ")
    assert ("too many variants" if of_each_step else "no code today") in text
    compilation = loop._training.steps.step.compilation
    assert compilation is not None
    assert compilation._loss is None
    loop.close()
    torch._dynamo.reset()
