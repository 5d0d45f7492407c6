from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.build import (
    CPU,
    ConvNet,
    CountingSource,
    Forces,
    Limited,
    blobs,
    cross_entropy,
    energy_and_forces,
    images,
    mlp,
    nothing,
    same,
    values,
)  # fmt: skip
from triaccel_ray.apply.evaluate import Evaluation, evaluate, evaluation_batch_size
from triaccel_ray.data.sources import DataSource
from triaccel_ray.records.plan import FaultKind


def evaluated(
    model: nn.Module, source: DataSource, batch_size: int, loss: Any = cross_entropy, metrics: Any = None, **how: Any
) -> Evaluation:
    how |= {"device": CPU, "batch_size": batch_size, "step": 5, "release_memory": nothing}
    return evaluate(model, loss, source, metrics, **how)


@pytest.mark.parametrize("batch_size", [7, 100])
def test_the_figures_do_not_depend_on_the_batch_size(batch_size: int) -> None:
    model, source = mlp(), CountingSource(*blobs(30))
    outputs = model(source.inputs)
    result = evaluated(model, source, batch_size)
    assert torch.equal(torch.cat(source.drawn), torch.arange(30))
    assert result.metrics["accuracy"] == pytest.approx(100 * (outputs.argmax(1) == source.targets).sum().item() / 30)
    assert result.loss == pytest.approx(cross_entropy(outputs, source.targets).item(), rel=1e-5)
    assert (result.num_samples, result.faults, result.one_view) == (30, (), {})


@pytest.mark.parametrize(
    ("batch_size", "on_gpu", "beside_graphs", "at_once"),
    [(96, False, True, 96), (96, True, True, 24), (224, True, False, 28), (4, True, False, 1), (1, False, False, 1)],
)
def test_a_gpu_judges_parts_of_a_batch(batch_size: int, on_gpu: bool, beside_graphs: bool, at_once: int) -> None:
    assert evaluation_batch_size(batch_size, on_gpu=on_gpu, beside_graphs=beside_graphs) == at_once


@pytest.mark.parametrize(
    ("step_bytes", "data_bytes", "largest", "sizes"),
    [
        (1000, 0, 20, [4, 20, 6]),
        (1000, 0, 16, [4, 16, 10]),
        (500, 0, 20, [4, 8, 8, 8, 2]),
        (1000, 250, 20, [4, 8, 8, 8, 2]),
        (100, 0, 20, [4] * 7 + [2]),
        (1000, 700, 20, [4] * 7 + [2]),
        (0, 0, 0, [4] * 7 + [2]),
    ],
)
def test_on_a_gpu_the_first_batch_tells_how_many_samples_fit(
    step_bytes: int, data_bytes: int, largest: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = iter([data_bytes, 100])
    monkeypatch.setattr("triaccel_ray.apply.evaluate.peak_of_tensors", lambda device: nullcontext([next(peaks)]))
    inner, source = mlp(), CountingSource(*blobs(30))
    model = nn.Sequential(inner, Limited(30))
    result = evaluated(model, source, 4, largest=largest, step_bytes=step_bytes)
    assert model[1].sizes == sizes
    assert result.metrics == evaluated(inner, source, 30).metrics


class Mirrored(CountingSource):
    """Shows every sample as it is and the other way round."""

    def views(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, inputs.flip(1)


def test_outputs_for_several_views_of_a_sample_are_averaged() -> None:
    inputs, linear = blobs(30)[0], nn.Linear(8, 4)
    one, other = linear(inputs), linear(inputs.flip(1))
    model, source = nn.Sequential(linear, Limited(15)), Mirrored(inputs, one.argmax(1))
    right = [(outputs.argmax(1) == source.targets).double().mean().item() * 100 for outputs in (one, one + other)]
    result = evaluated(model, source, 30)
    assert right[0] != right[1]
    assert [result.one_view["accuracy"], result.metrics["accuracy"]] == pytest.approx(right)
    assert result.loss == pytest.approx(cross_entropy((one + other) / 2, source.targets).item(), rel=1e-5)
    assert result.num_samples == 30


@pytest.mark.parametrize(
    ("views", "message"),
    [
        (lambda inputs: inputs, "Shown.views returned a Tensor: must be a tuple or list"),
        (lambda inputs: (), "Shown.views returned a tuple: must be a tuple or list, not empty"),
        (lambda inputs: (inputs, inputs[:1]), r"views of Shown are .*\(1, 4\).*: must be tensors of one shape"),
        (lambda inputs: (inputs[:1], inputs[:1]), "a row for each of 30 samples"),
    ],
)
def test_views_that_do_not_show_every_sample_are_refused(views: Any, message: str) -> None:
    class Shown(CountingSource):
        def views(self, inputs: Tensor) -> Any:
            return views(inputs)

    with pytest.raises(TypeError, match=message):
        evaluated(mlp(), Shown(*blobs(30)), 30)


def test_samples_that_do_not_fit_are_tried_again_in_smaller_batches() -> None:
    inner, source = mlp(), CountingSource(*blobs(30))
    limit, failed, passed = 8, [30, 15], [7, 7, 7, 7, 2]
    expected = evaluated(inner, source, 30)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if len(targets) > limit:  # nothing of that batch may have been counted
            raise MemoryError
        return cross_entropy(outputs, targets)

    assert evaluated(inner, source, 30, loss).metrics == expected.metrics
    model = nn.Sequential(inner, Limited(limit))
    result = evaluated(model, source, 30)
    assert model[1].sizes == failed + passed
    assert (result.metrics, result.num_samples) == (expected.metrics, 30)
    assert result.loss == pytest.approx(expected.loss, rel=1e-5)
    assert [fault.micro_batch_size for fault in result.faults] == [*failed[1:], passed[0]]
    where = {(fault.kind, fault.step, fault.phase) for fault in result.faults}
    assert where == {(FaultKind.OUT_OF_MEMORY, 5, "evaluation")}


class Tracking(nn.Module):
    """A loss that counts the batches it was trained with, or could be."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_batches", torch.zeros(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.num_batches += self.training or torch.is_grad_enabled() or outputs.requires_grad
        return cross_entropy(outputs, targets)


def test_model_and_loss_are_in_eval_mode_without_a_graph_and_left_as_they_were() -> None:
    model, loss, source = ConvNet(), Tracking(), CountingSource(*images(12))
    model.train()
    model.norm.eval()
    before, modes = values(model), [module.training for module in model.modules()]
    first, second = evaluated(model, source, 5, loss), evaluated(model, source, 5, loss)
    assert first == second  # dropout would differ
    assert [module.training for module in model.modules()] == modes
    assert same(values(model), before)
    assert all(p.grad is None for p in model.parameters())
    assert (loss.num_batches, loss.training) == (0, True)


@pytest.mark.parametrize("batch_size", [30, 7])
def test_a_model_that_computes_gradients_is_judged_with_them(batch_size: int) -> None:
    inputs, targets = torch.randn(30, 8), torch.randn(30, 1)
    model = Forces()
    expected = energy_and_forces(model(inputs), targets).item()
    seen: list[bool] = []

    def force(outputs: Any, targets: Tensor) -> Tensor:
        seen.extend(each.requires_grad for each in outputs)
        return outputs[1].norm(dim=1)

    source = CountingSource(inputs, targets)
    result = evaluated(model, source, batch_size, energy_and_forces, {"force": force})
    assert result.loss == pytest.approx(expected, rel=1e-5)
    assert result.metrics["force"] == pytest.approx(model(inputs)[1].norm(dim=1).mean().item())
    assert (result.num_samples, result.faults) == (30, ())
    assert len(source.drawn) == -(-30 // batch_size) + 1  # only the first batch is passed twice
    assert not any(seen)
    assert all(p.grad is None for p in model.parameters())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("model", "error"),
    [
        (nn.Sequential(mlp(), Limited(0)), torch.OutOfMemoryError),
        (nn.Linear(9, 4), RuntimeError),
        (Forces(detached_in_eval=True), RuntimeError),
    ],
)
def test_what_cannot_be_judged_raises_and_leaves_the_modes(model: nn.Module, error: type[Exception]) -> None:
    model.train()
    with pytest.raises(error):
        evaluated(model, CountingSource(*blobs(8)), 4)
    assert all(module.training for module in model.modules())
