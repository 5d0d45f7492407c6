"""Gradients where statistics and optimizer read them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.build import collected


def test_a_sparse_gradient_is_read_as_a_dense_one() -> None:
    found = []
    for sparse in (False, True):
        model = nn.Linear(3, 5, bias=False)
        F.embedding(torch.tensor([1, 4, 1]), model.weight, sparse=sparse).sum().backward()
        assert model.weight.grad is not None
        assert model.weight.grad.is_sparse is sparse
        (gradient,) = collected(model).tensors
        assert gradient is not None
        found.append(gradient)
    assert torch.equal(*found)
