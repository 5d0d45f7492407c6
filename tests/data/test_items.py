"""Samples as users have them train from end to end: dicts with their labels inside, arrays, texts of any length."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, StackDataset

from tests.build import CURVATURE, QUIET, blobs, cross_entropy, loop_of, mlp, same, step_of, values
from triaccel_ray.baseline import BaselineLoop
from triaccel_ray.data.sources import DatasetSource

Result = namedtuple("Result", ["loss", "logits"])
QUIET_WITH_CURVATURE = replace(QUIET, curvature=replace(CURVATURE, enabled=True))


class Judging(nn.Module):
    """Computes its own loss where it is given labels, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, features: Tensor, labels: Tensor | None = None) -> Result:
        logits = self.net(features)
        return Result(None if labels is None else cross_entropy(logits, labels), logits)


def own_loss(outputs: Result, _: Any) -> Tensor:
    return outputs.loss


def dicts(num_samples: int) -> Dataset[Any]:
    features, labels = blobs(num_samples)
    return StackDataset(features=features, labels=labels)


def right(outputs: Result, batch: dict[str, Tensor]) -> Tensor:
    return outputs.logits.argmax(-1) == batch["labels"]


@pytest.mark.parametrize(
    "loss", [own_loss, lambda outputs, batch: cross_entropy(outputs.logits, batch["labels"])], ids=["own", "looked up"]
)
def test_dicts_train_a_model_that_computes_its_own_loss_and_one_that_does_not(loss: Any) -> None:
    model, twin = Judging(), mlp()
    loop, _ = loop_of(model, dicts(65), QUIET_WITH_CURVATURE, loss=loss)
    arrays, _ = loop_of(twin, tuple(map(np.asarray, blobs(65))), QUIET_WITH_CURVATURE)
    for _ in range(3):
        stats, expected = loop.train_epoch(), arrays.train_epoch()
        assert (stats.num_samples, stats.loss) == (65, expected.loss)
    assert same(values(model.net), values(twin))
    plainly = arrays.evaluate(blobs(40), {"right": lambda outputs, labels: outputs.argmax(-1) == labels})
    assert loop.evaluate(dicts(40), {"right": right}) == plainly
    loop.close()
    arrays.close()


def test_samples_are_counted_by_what_was_asked_for() -> None:
    """In parts of unequal size, with targets of no length: gradients and loss are those of the whole batch."""

    def loss(outputs: Tensor, targets: Any) -> Tensor:
        return outputs.square().mean()

    features, _ = blobs(7)
    nothing = DatasetSource(range(7), collate_fn=lambda items: (features[items], None))
    found = []
    for num_parts in (1, 3):
        model = mlp()
        step = step_of(model, nothing, loss=loss)
        step.set_num_micro_batches(num_parts)
        outcome = step.run(torch.arange(7), torch.ones(()), step=0)
        found.append([outcome.loss_sum / 7, *(p.grad for p in model.parameters())])
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(whole.double(), parts.double())


@pytest.mark.parametrize(
    ("method", "model", "loss", "data"),
    [
        ("fp32", Judging(), own_loss, dicts(65)),
        ("amp", Judging(), own_loss, dicts(65)),
        ("fp32", mlp(), cross_entropy, dict(enumerate(zip(*blobs(65), strict=True))).values()),  # of no known order
    ],
)
def test_a_baseline_counts_them_likewise(method: Any, model: nn.Module, loss: Any, data: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loop = BaselineLoop(model, optimizer, loss, data, method=method, batch_size=16)
    stats = [loop.train_epoch() for _ in range(3)]
    assert all(each.num_samples == 65 for each in stats)
    assert 0 < stats[-1].loss < stats[0].loss < 10
    loop.close()
