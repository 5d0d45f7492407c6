from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from tests.build import CPU, blobs, cross_entropy, mlp, nothing
from triaccel_ray.apply.evaluate import Evaluation, evaluate, measured
from triaccel_ray.model.dry_run import UserCodeError
from triaccel_ray.model.metrics import ACCURACY, BITS_PER_BYTE, PERPLEXITY, as_metrics, token_loss, top1
from triaccel_ray.records.goal import Goal

VOCABULARY = 7


class Tokens(nn.Module):
    """Logits [b, T, 7] of tokens [b, T], in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, VOCABULARY, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.embedding(tokens)
        return logits


def text(count: int, length: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    tokens = torch.randint(0, VOCABULARY, (count, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:].clone()


def token_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def judged(model: nn.Module, data: Any, metrics: Any = None, *, batch_size: int = 4, loss: Any = None) -> Evaluation:
    loss = loss or (token_cross_entropy if isinstance(model, Tokens) else cross_entropy)
    return evaluate(model, loss, data, metrics, device=CPU, batch_size=batch_size, step=0, release_memory=nothing)


@pytest.mark.parametrize(
    ("model", "data", "loss"),
    [
        (Tokens(), text(10), token_cross_entropy),  # with top-1 summed over tokens it was above 100 %
        (nn.Linear(8, 3), (torch.randn(10, 8), torch.rand(10, 3)), F.mse_loss),
    ],
    ids=["tokens", "soft labels"],
)
def test_other_models_are_judged_by_their_loss_alone(model: nn.Module, data: Any, loss: Any) -> None:
    result = judged(model, data, loss=loss)
    assert (result.metrics, result.one_view) == ({}, {})
    assert result.loss == pytest.approx(loss(model(data[0]), data[1]).item(), rel=1e-5)


@given(count=st.integers(1, 12), batch_size=st.integers(1, 13), ignored=st.floats(0.0, 0.9))
def test_the_figures_of_tokens_are_those_of_their_mean_loss(count: int, batch_size: int, ignored: float) -> None:
    torch.manual_seed(count)
    model, (inputs, targets) = Tokens(), text(count)
    targets[torch.rand(targets.shape) < ignored] = -100
    targets[0, 0] = 1
    nats = token_cross_entropy(model(inputs), targets).item()
    share = (model(inputs).argmax(-1) == targets).double().mean().item()
    metrics = {"perplexity": PERPLEXITY, "bits_per_byte": BITS_PER_BYTE, "top1": top1, "none": lambda *_: (0.0, 0.0)}
    found = judged(model, (inputs, targets), metrics, batch_size=batch_size, loss=lambda outputs, _: outputs.mean())
    expected = {"perplexity": math.exp(nats), "bits_per_byte": nats / math.log(2), "top1": share, "none": math.nan}
    assert found.metrics == pytest.approx(expected, rel=1e-5, nan_ok=True)


@given(batch_size=st.integers(1, 31))
def test_values_a_sample_and_weighted_means_come_to_the_same_at_any_batch_size(batch_size: int) -> None:
    model, data = mlp(), blobs(30)

    def mean(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return outputs.abs().mean() * len(targets), len(targets)

    metrics = {"rows": lambda outputs, targets: outputs.abs(), "mean": mean, "top1": top1, "accuracy": ACCURACY}
    result = judged(model, data, metrics, batch_size=batch_size)
    outputs = model(data[0])
    assert list(result.metrics) == list(metrics)
    assert judged(model, data).metrics == {"accuracy": result.metrics["accuracy"]}  # without being asked
    assert result.metrics["rows"] == pytest.approx(outputs.abs().mean().item(), rel=1e-5)
    assert result.metrics["mean"] == pytest.approx(result.metrics["rows"], rel=1e-5)
    assert result.metrics["accuracy"] == 100.0 * result.metrics["top1"]


def test_ignored_targets_count_neither_as_right_nor_as_wrong() -> None:
    model, (inputs, targets) = Tokens(), text(6)
    right = model(inputs).argmax(-1)
    for share in (0.0, 0.5, 0.9):
        labels = torch.where(torch.rand(targets.shape, generator=torch.Generator().manual_seed(0)) < share, -100, right)
        found = judged(model, (inputs, labels), {"accuracy": ACCURACY}, loss=lambda outputs, _: outputs.mean())
        assert found.metrics == {"accuracy": 100.0}


@pytest.mark.parametrize(
    ("outputs", "targets"),
    [
        (torch.zeros(4, 1), torch.zeros(4, 1)),
        (torch.zeros(4, 3), torch.zeros(5, dtype=torch.int64)),
        (torch.zeros(4), torch.tensor(1)),
        ((torch.zeros(4, 3),), torch.zeros(4, dtype=torch.int64)),
    ],
)
@pytest.mark.parametrize("metric", [top1, token_loss])
def test_what_has_no_classes_is_refused_with_the_shapes(metric: Any, outputs: Any, targets: Tensor) -> None:
    with pytest.raises(TypeError, match=r"outputs .*\(4.*, targets .* \(.*must be scores \[..., C\]"):
        metric(outputs, targets)


@pytest.mark.parametrize("found", [None, torch.tensor(3.0), torch.zeros(3), (1.0,), (torch.zeros(()), "2")])
def test_what_is_neither_a_value_a_sample_nor_a_weighted_sum_is_refused(found: Any) -> None:
    metrics = as_metrics({"own": lambda outputs, targets: found})
    message = r"metrics\['own'\] returned .*outputs float32 \(2, 4\), .*a row for each of 2 samples, or \(sum, weight\)"
    with pytest.raises(TypeError, match=message):
        measured(metrics, torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize(
    ("metrics", "kind", "message"),
    [
        ([top1], TypeError, "metrics are a list: must map names"),
        ({"top1": 1.0}, TypeError, "metrics['top1'] is a float: must be a Metric, or a function"),
        ({"loss": top1}, ValueError, "name of a metric = 'loss': must be an identifier, and none of"),
        ({"top 1": top1}, ValueError, "name of a metric = 'top 1': must be an identifier"),
        ({"own": lambda outputs: outputs}, UserCodeError, "metrics['own'] raised TypeError: "),
        ({"own": lambda outputs, targets: outputs["logits"]}, UserCodeError, "metrics['own'] raised IndexError"),
    ],
)
def test_what_maps_no_names_to_metrics_is_refused(metrics: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        judged(mlp(), blobs(8), metrics)


@pytest.mark.parametrize(("nats", "perplexity"), [(0.0, 1.0), (1.0, math.e), (1e4, math.inf), (math.nan, math.nan)])
def test_a_perplexity_may_be_infinite(nats: float, perplexity: float) -> None:
    assert PERPLEXITY.of_mean(nats) == pytest.approx(perplexity, nan_ok=True)


@pytest.mark.parametrize(
    ("goal", "heading", "axis", "text"),
    [
        (Goal(), "accuracy %", "accuracy, percent", "91.23 %"),
        (BITS_PER_BYTE.goal("bits_per_byte"), "bits per byte", "bits per byte, less is better", "91.23 bits per byte"),
    ],
)
def test_a_goal_is_called_what_it_is(goal: Goal, heading: str, axis: str, text: str) -> None:
    assert (goal.heading, goal.axis, goal.text(91.234)) == (heading, axis, text)
