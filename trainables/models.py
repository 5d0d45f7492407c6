"""The networks of the image tasks, as torchvision builds them, in channels_last memory.

torchvision is imported where it is used: it takes seconds, and tasks with their own network do not need it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

Stem = Literal["cifar", "imagenet"]


def resnet18(num_classes: int, stem: Stem) -> nn.Module:
    """Returns a newly initialized ResNet-18 (He et al. 2016).

    Stem `imagenet` is torchvision's own: a 7 x 7 convolution and a max-pool, stride 2 each. The last stage sees one
    pixel of a 32 x 32 image. This form matches the memory figures of Tri-Accel. Stem `cifar`, a 3 x 3 convolution with
    stride 1 and no pooling, takes 15 times the compute and reaches 94 to 96% on CIFAR-10.
    """
    from torchvision.models import resnet18 as build

    model: nn.Module = build(weights=None, num_classes=num_classes)
    if stem == "cifar":
        model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's own
        model.maxpool = nn.Identity()
    return model.to(memory_format=torch.channels_last)


def efficientnet_b0(num_classes: int) -> nn.Module:
    """Returns a newly initialized EfficientNet-B0 (Tan and Le 2019), made for inputs of 224 x 224."""
    from torchvision.models import efficientnet_b0 as build

    model: nn.Module = build(weights=None, num_classes=num_classes)
    return model.to(memory_format=torch.channels_last)
