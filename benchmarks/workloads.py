"""Models that `any_model` trains, and their samples: noise with a weak signal, a tenth of the labels random."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triaccel_ray.trainables.models import efficientnet_b0, resnet18
from triaccel_ray.trainables.text import GPT

SIZES = {
    "convnext_tiny": 64, "vit_small": 64, "bert_base": 32, "gpt": 64, "resnet18": 96, "resnet18_512": 512,
    "efficientnet_b0": 96, "gpt_350m": 4, "gpt_350m_16": 16, "resnet152": 64, "gpt2": 16, "llama": 16,
    "gpt_2048": 8, "gpt_4096": 8,
}  # fmt: skip
"""Model -> batch size."""
TIMM_PREFIX = "timm:"
"""What the name of any other model of timm begins with."""
TIMM_BATCH_SIZE = 64
GPTS = {"gpt": (6, 384, 6, 256)} | dict.fromkeys(("gpt_350m", "gpt_350m_16"), (24, 1024, 16, 1024))
GPTS |= {"gpt_2048": (4, 2048, 16, 1024), "gpt_4096": (2, 4096, 32, 1024)}
"""Model -> blocks, width, heads, tokens."""
LANGUAGE_MODELS = {
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 50304}),
    "llama": ("LlamaForCausalLM", {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048,
                                   "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4}),
}  # fmt: skip
"""Model -> class and configuration of transformers; 256 tokens."""
NEEDS = {"convnext_tiny": "timm", "vit_small": "timm", "bert_base": "transformers", "resnet152": "torchvision"}
NEEDS |= dict.fromkeys(LANGUAGE_MODELS, "transformers")
WITH_TENSORS = [name for name in SIZES if NEEDS.get(name) != "transformers"]
"""Models whose inputs are one tensor; those of the others are a mapping."""
NUM_SAMPLES = {
    "convnext_tiny": 2048, "vit_small": 2048, "efficientnet_b0": 2016, "resnet18": 4128, "gpt_350m": 512,
    "gpt_350m_16": 512, "resnet152": 512, "gpt_2048": 512, "gpt_4096": 512,
}  # fmt: skip
"""Model -> number of samples, in whole batches; 4096 for other models."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its samples and its loss."""

    model: nn.Module
    inputs: Any
    """A tensor, or a mapping of tensors, on the device; samples along dimension 0."""
    targets: Tensor
    loss: Callable[[Any, Tensor], Tensor]
    batch_size: int
    is_image: bool = False


def installed(names: Sequence[str]) -> list[str]:
    """Returns the models whose packages are installed."""
    needed = {name: "timm" if name.startswith(TIMM_PREFIX) else NEEDS.get(name) for name in names}
    return [name for name, package in needed.items() if package is None or find_spec(package)]


def model_name(name: str) -> str:
    """Returns the name of a model if there is a workload for it."""
    if name not in SIZES and not name.startswith(TIMM_PREFIX):
        raise ArgumentTypeError(f"{name}: must be one of {', '.join(SIZES)}, or {TIMM_PREFIX}NAME")
    return name


def workload_of(name: str, seed: int = 0, num_samples: int = 0) -> Workload:
    """Returns the workload for a model of `SIZES` or timm, on the GPU, with at least so many samples."""
    torch.manual_seed(seed)
    num_samples = max(num_samples, NUM_SAMPLES.get(name, 4096))
    if name in GPTS:
        layers, width, heads, context = GPTS[name]
        inputs, following = text(num_samples, context, vocabulary=96)
        model = GPT(layers=layers, width=width, heads=heads, context=context).cuda()
        return Workload(model=model, inputs=inputs, targets=following, batch_size=SIZES[name],
                   loss=lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()))  # fmt: skip
    targets = torch.randint(0, 10, (num_samples,), device="cuda")
    labels = torch.where(torch.rand(num_samples, device="cuda") < 0.1, torch.randint_like(targets, 10), targets)
    if name == "bert_base":
        from transformers import BertConfig, BertForSequenceClassification

        ids = torch.randint(100, 30000, (num_samples, 128), device="cuda")
        ids[:, 1] = 10 + targets
        mask = torch.ones_like(ids)
        mask[::2, 96:] = 0
        model = BertForSequenceClassification(BertConfig(num_labels=10)).cuda()
        return Workload(model=model, inputs={"input_ids": ids, "attention_mask": mask}, targets=labels,
                   loss=lambda out, y: F.cross_entropy(out.logits, y), batch_size=SIZES[name])  # fmt: skip
    if name in LANGUAGE_MODELS:
        import transformers

        kind, options = LANGUAGE_MODELS[name]
        model_class = getattr(transformers, kind)
        inputs, following = text(num_samples, 256, vocabulary=30000)
        model = model_class(model_class.config_class(use_cache=False, **options)).cuda()
        return Workload(model=model, inputs={"input_ids": inputs}, targets=following, batch_size=SIZES[name],
                   loss=lambda out, y: F.cross_entropy(out.logits.flatten(0, 1), y.flatten()))  # fmt: skip
    size = 32 if name in ("resnet18", "resnet18_512") else 224
    images = torch.randn(num_samples, 3, size, size, device="cuda")
    images[:, 0] += (targets.float() / 5 - 1).view(-1, 1, 1)
    return Workload(model=classifier(name).cuda(), inputs=images, targets=labels, loss=F.cross_entropy,
               batch_size=SIZES.get(name, TIMM_BATCH_SIZE), is_image=True)  # fmt: skip


def text(num_samples: int, num_tokens: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Returns tokens on the GPU and those that follow; every second one is determined by the one before."""
    tokens = torch.randint(0, vocabulary, (num_samples, num_tokens + 1), device="cuda")
    tokens[:, 1::2] = (tokens[:, :-1:2] * 7 + 3) % vocabulary
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def classifier(name: str) -> nn.Module:
    """Returns an image classifier with 10 classes."""
    if name in ("convnext_tiny", "vit_small") or name.startswith(TIMM_PREFIX):
        import timm  # type: ignore[import-not-found]  # optional

        full_name = "vit_small_patch16_224" if name == "vit_small" else name.removeprefix(TIMM_PREFIX)
        model: nn.Module = timm.create_model(full_name, num_classes=10)
        return model
    if name == "resnet152":
        import torchvision

        network: nn.Module = torchvision.models.resnet152(num_classes=10)
        return network
    network = efficientnet_b0(10) if name == "efficientnet_b0" else resnet18(10, "cifar")
    return network.to(memory_format=torch.contiguous_format)  # as in a tutorial
