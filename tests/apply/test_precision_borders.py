"""What lies between layers of different precision."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.build import BF16, FP16, FP32, ConvNet, controlled, gradients, images, mlp
from triaccel_ray.plan import Precision

PAIRS = pytest.mark.parametrize(
    ("left", "right"), [(FP16, BF16), (BF16, FP16), (FP16, FP32), (FP32, BF16), (BF16, BF16), (FP32, FP32)]
)
VECTORS = torch.linspace(-1, 1, 24)


@PAIRS
def test_a_residual_connection_joins_two_precisions(left: Precision, right: Precision) -> None:
    model = ConvNet()
    precision = controlled(model, left, right, left)
    with precision.in_force():
        outputs = model(images(4)[0])
    F.cross_entropy(outputs.float(), torch.arange(4)).backward()
    assert len(gradients(model)) == len(list(model.parameters()))


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda q, k: torch.softmax(q @ k.transpose(1, 2), dim=-1) @ k,
    "attention": lambda q, k: F.scaled_dot_product_attention(q, k, q),
    "einsum": lambda q, k: torch.einsum("bid,bjd->bij", q, k),
    "linear": lambda q, k: F.linear(q, k[0]),
    "add": lambda q, k: q + k,
    "where": lambda q, k: torch.where(q > 0, q, k),
    "cat": lambda q, k: torch.cat([q, k], dim=1),
    "cat by name": lambda q, k: torch.cat(tensors=(q, k)),
    "cat with fp32": lambda q, k: torch.cat([torch.zeros(2, 1, 4), q, k], dim=1),
    "stack": lambda q, k: torch.stack([q, k]),
    "tensordot": lambda q, k: torch.tensordot(q, k, dims=([2], [2])),
    "lerp": lambda q, k: torch.lerp(q, k, 0.5),
}


@PAIRS
@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_between_layers_take_two_precisions(function: str, left: Precision, right: Precision) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"q": nn.Linear(4, 4), "k": nn.Linear(4, 4)})
    tokens = VECTORS.view(2, 3, 4)
    expected = FUNCTIONS[function](model["q"](tokens), model["k"](tokens)).detach()
    precision = controlled(model, left, right)
    with precision.in_force():
        outputs = FUNCTIONS[function](model["q"](tokens), model["k"](tokens))
    # Four roundings to BF16's eight bits, of terms no larger than one.
    torch.testing.assert_close(outputs.float(), expected, rtol=2.0**-6, atol=2.0**-6)
    outputs.float().square().sum().backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


def test_the_wider_of_two_precisions_is_not_rounded_by_concatenation() -> None:
    model = nn.ModuleDict({"q": nn.Linear(4, 4), "k": nn.Linear(4, 4)})
    precision = controlled(model, BF16, FP32)
    with precision.in_force():
        q, k = model["q"](VECTORS.view(6, 4)), model["k"](VECTORS.view(6, 4))
        assert torch.equal(torch.cat([q, k]), torch.cat([q.float(), k]))


def test_what_lies_between_layers_follows_the_most_common_low_precision() -> None:
    model, low = mlp(), []
    for levels in ([FP16, FP16, BF16], [BF16, FP16, FP32], [FP32, FP32, FP16], [FP32]):
        precision = controlled(model, *levels)
        with precision.in_force():
            low.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        precision.remove()
    assert low == [torch.float16, torch.bfloat16, torch.float16, torch.float32]
