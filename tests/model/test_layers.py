import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.build import Wired, collected
from triaccel_ray.model.layers import find_layers, forward, require_trainable, to_channels_last


def names(model: nn.Module) -> list[str]:
    return [layer.name for layer in find_layers(model)]


def test_layers_are_the_owners_of_matrices_in_module_order() -> None:
    model = nn.Sequential(
        nn.Embedding(5, 4), nn.LayerNorm(4), nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)), nn.Linear(4, 2)
    )
    _, conv, linear = layers = find_layers(model)
    assert [(layer.name, layer.num_elements) for layer in layers] == [("0", 20), ("2.0", 16), ("3", 8)]
    assert conv.weights == (model[2][0].weight,)
    assert linear.modules == (model[3],)
    assert not linear.fixed_precision
    tied = nn.ModuleDict({"embed": nn.Embedding(5, 3), "norm": nn.LayerNorm(3), "out": nn.Linear(3, 5, bias=False)})
    tied["out"].weight = tied["embed"].weight
    frozen = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    assert names(nn.Linear(2, 2)) == ["model"]
    assert names(frozen) == ["1"]
    assert names(Wired(len, token=nn.Parameter(torch.zeros(1, 4)), project=nn.Linear(4, 4))) == ["project"]
    assert names(nn.Sequential(nn.Conv2d(1, 2, 1), nn.LayerNorm([2, 4, 4]))) == ["0"]
    (normed,) = find_layers(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)))
    assert (normed.name, type(normed.modules[0]).__name__, normed.num_elements) == ("model", "ParametrizedLinear", 8)
    (layer,) = find_layers(tied)
    assert (layer.name, layer.modules, layer.num_elements) == ("embed", (tied["embed"], tied["out"]), 15)
    attention, _ = find_layers(nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 1)))
    assert (attention.name, attention.num_elements) == ("0", 3 * 16 + 16)


class Difference(nn.Module):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return left - right


@pytest.mark.parametrize("inputs", [{"right": 1.0, "left": 3.0}, (3.0, 1.0), [3.0, 1.0]])
def test_inputs_go_in_by_name_or_position_or_as_they_are(inputs: object) -> None:
    assert forward(Difference(), inputs) == 2.0
    assert torch.equal(forward(nn.Identity(), torch.ones(2)), torch.ones(2))


@pytest.mark.parametrize("channels", [1, 3])
def test_convolutions_are_laid_out_in_channels_last_with_their_values(channels: int) -> None:
    model = nn.Sequential(nn.Conv2d(channels, 8, 3), nn.Flatten(), nn.Linear(8, 2))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    parameters = list(model.parameters())
    to_channels_last(model)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert model[0](torch.randn(2, channels, 5, 5)).is_contiguous(memory_format=torch.channels_last)
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))  # an optimizer knows them
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_an_attribute_called_sparse_is_refused_only_beside_weights() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sparse, self.product = True, nn.Linear(2, 2)

    model = Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    require_trainable(model, optimizer, find_layers(model))
    model.product.sparse = True
    with pytest.raises(ValueError, match=r"Linear 'product' has sparse = True: must be False"):
        require_trainable(model, optimizer, find_layers(model))


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
