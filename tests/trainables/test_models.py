import pytest
import torch
from torch import nn

from triaccel_ray.model.layers import find_layers
from triaccel_ray.trainables.registry import load_task

PARAMETERS = {
    "digits": 19_258,
    "cifar10-resnet18": 11_173_962,
    "cifar10-resnet18-long": 11_173_962,
    "cifar100-resnet18": 11_220_132,
    "cifar10-resnet18-imagenet-stem": 11_181_642,
    "cifar100-resnet18-imagenet-stem": 11_227_812,
    "cifar10-efficientnet-b0": 4_020_358,
    "cifar100-efficientnet-b0": 4_135_648,
}


@pytest.mark.parametrize("name", list(PARAMETERS))
def test_every_bundled_model_has_its_classes_and_parameters(name: str) -> None:
    task = load_task(name, None)
    model = task.model().eval()
    size = {"digits": (1, 8, 8)}.get(name, (3, 224, 224) if "efficientnet" in name else (3, 32, 32))
    with torch.no_grad():
        outputs = model(torch.zeros(2, *size))
    assert outputs.shape == (2, 100 if "cifar100" in name else 10)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    assert find_layers(model)


@pytest.mark.parametrize("name", ["digits", "cifar10-resnet18", "cifar10-efficientnet-b0"])
def test_weights_are_drawn_from_the_global_generator_and_those_of_images_lie_in_channels_last(name: str) -> None:
    torch.manual_seed(1)
    first = load_task(name, None).model()
    torch.manual_seed(1)
    second = load_task(name, None).model()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    filters = [p for p in first.parameters() if p.dim() == 4]
    assert name == "digits" or all(p.is_contiguous(memory_format=torch.channels_last) for p in filters)


@pytest.mark.parametrize(("name", "edge"), [("cifar10-resnet18", 32), ("cifar10-resnet18-imagenet-stem", 8)])
def test_the_cifar_stem_keeps_the_resolution_and_torchvisions_own_does_not(name: str, edge: int) -> None:
    model = load_task(name, None).model()
    stem = nn.Sequential(model.get_submodule("conv1"), model.get_submodule("maxpool"))
    assert stem(torch.zeros(1, 3, 32, 32)).shape[-1] == edge
