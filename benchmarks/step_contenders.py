"""The ways of PyTorch to make a training step that `benchmarks.training_step` compares, and what they train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DEVICE = torch.device("cuda")
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, and how the engine of this package is set up for it."""

    model: nn.Module
    images: Tensor
    """uint8 [n, 3, h, w], on the device."""
    targets: Tensor
    batch_size: int
    autotune: bool = False
    fuse: bool = True
    recompute: bool = True


@dataclass(frozen=True, kw_only=True)
class Made:
    """A contender, ready to train."""

    step: Callable[[], None]
    loss: Callable[[], float]
    """Returns the last step's loss; waits for the device."""
    epoch: Callable[[], float] | None = None
    """Trains an epoch and returns its seconds."""
    peak_bytes: Callable[[], float] | None = None
    """The process's peak on the device, where the contender keeps count of it."""


def images_and_targets(num_images: int, size: int) -> tuple[Tensor, Tensor]:
    """Returns noise whose amount of red tells the class: learnable within a few dozen steps."""
    targets = torch.randint(0, 10, (num_images,), device=DEVICE)
    images = torch.randint(0, 128, (num_images, 3, size, size), dtype=torch.uint8, device=DEVICE)
    images[:, 0] += (targets * 12).to(torch.uint8).view(-1, 1, 1)
    return images, targets


def network(name: str) -> nn.Module:
    """Returns torchvision's EfficientNet-B0, or its ResNet-18 with the 3x3 stem for small images; 10 classes."""
    from torchvision.models import efficientnet_b0, resnet18

    model: nn.Module = efficientnet_b0(num_classes=10) if name == "efficientnet-b0" else resnet18(num_classes=10)
    if name == "resnet18":
        model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    return model.to(DEVICE)


def crop_flip_normalise(images: Tensor, offsets: Tensor, mirrored: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Returns the augmented batch [b, 3, h, w] in channels_last memory, as one writes it with PyTorch's operations."""
    batch, _, height, width = images.shape
    padded = F.pad(images, (4, 4, 4, 4))
    columns = torch.arange(width, device=images.device)
    columns = torch.where(mirrored == 1, columns.flip(0), columns) + offsets[0]
    rows = torch.arange(height, device=images.device) + offsets[1]
    samples = torch.arange(batch, device=images.device)
    cropped = padded[samples[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    return cropped.float() * scale + shift


def scale_and_shift() -> tuple[Tensor, Tensor]:
    """Returns what normalises raw images by multiplication and addition, [1, 3, 1, 1] each."""
    scale = torch.tensor([1 / (255 * std) for std in STD], device=DEVICE)
    shift = torch.tensor([-mean / std for mean, std in zip(MEAN, STD, strict=True)], device=DEVICE)
    return scale.view(1, 3, 1, 1), shift.view(1, 3, 1, 1)


def sgd(model: nn.Module, *, fused: bool | None = None) -> torch.optim.Optimizer:
    """Returns the optimizer of every contender."""
    return torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, weight_decay=5e-4, fused=fused)


@dataclass
class Batches:
    """Batches of an epoch after another in random order, and what each image is augmented by; all on the device."""

    images: Tensor
    targets: Tensor
    batch_size: int
    generator: torch.Generator = field(default_factory=lambda: torch.Generator(DEVICE).manual_seed(0))

    def __post_init__(self) -> None:
        self._order, self._cursor = torch.randperm(len(self.images), device=DEVICE), 0

    def indices(self) -> Tensor:
        """Returns the samples of the next batch, int64 [b]."""
        start = self._cursor
        if start + self.batch_size > len(self.images):
            start, self._order = 0, torch.randperm(len(self.images), device=DEVICE)
        self._cursor = start + self.batch_size
        return self._order[start : start + self.batch_size]

    def augmentation(self) -> tuple[Tensor, Tensor]:
        """Returns offsets of the crops, int64 [2, b, 1], and which are mirrored, int64 [b, 1]."""
        offsets = torch.randint(0, 9, (2, self.batch_size, 1), generator=self.generator, device=DEVICE)
        mirrored = torch.randint(0, 2, (self.batch_size, 1), generator=self.generator, device=DEVICE)
        return offsets, mirrored


def _dtype(name: str) -> torch.dtype:
    """Returns what the contender of that name computes in."""
    return {"bf16": torch.bfloat16, "fp32": torch.float32}.get(name.rpartition("-")[2], torch.float16)


def amp(name: str, job: Job) -> Made:
    """Returns autocast as tutorials write it, or compiled: PyTorch captures the passes, and launches the rest."""
    dtype = _dtype(name)
    is_tuned = not name.startswith("tutorial")
    model = job.model.train()
    optimizer = sgd(model, fused=is_tuned or None)
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=dtype is torch.float16)
    compute: Callable[[Tensor], Tensor] = model
    prepare = crop_flip_normalise
    if is_tuned:
        compute = torch.compile(model, mode="max-autotune" if name == "max-autotune" else "reduce-overhead")
        prepare = torch.compile(crop_flip_normalise)
    constants = scale_and_shift()
    batches = Batches(job.images, job.targets, job.batch_size)
    last = {"loss": torch.zeros(())}

    def step() -> None:
        indices = batches.indices()
        inputs = prepare(job.images[indices], *batches.augmentation(), *constants)
        inputs = inputs.contiguous(memory_format=torch.channels_last if is_tuned else torch.contiguous_format)
        with torch.autocast(DEVICE.type, dtype=dtype, enabled=dtype is not torch.float32):
            loss = F.cross_entropy(compute(inputs), job.targets[indices])
        last["loss"] = loss.detach()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return Made(step=step, loss=lambda: float(last["loss"]))


_EAGER_STEPS = 12
"""Before the capture: compilation, cuBLAS's workspaces, the optimizer's state."""


def graphed(name: str, job: Job) -> Made:
    """Returns a whole step as one CUDA graph: batch, augmentation, compiled passes, loss scaling and fused SGD.

    Loss scaling is for FP16 alone, by PyTorch's own GradScaler: with a fused optimizer it finds overflows, skips the
    update and adapts the scale on the device, so that all of it is captured. What is left for the host is to copy the
    indices of the next batch and to launch the graph.
    """
    model, images, targets = job.model.train(), job.images, job.targets
    optimizer = sgd(model, fused=True)
    dtype = _dtype(name)
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=dtype is torch.float16)
    batches = Batches(images, targets, job.batch_size)
    constants = scale_and_shift()
    # Modes that capture graphs of their own would do so within the capture.
    mode = "max-autotune-no-cudagraphs" if name.startswith("max-autotune") else "default"

    @torch.compile(mode=mode)
    def prepared(indices: Tensor, offsets: Tensor, mirrored: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        inputs = crop_flip_normalise(images[indices], offsets, mirrored, scale, shift)
        return inputs.contiguous(memory_format=torch.channels_last)

    @torch.compile(mode=mode)
    def mean_loss(inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs), labels)

    indices = torch.zeros(job.batch_size, dtype=torch.int64, device=DEVICE)

    def whole_step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        inputs = prepared(indices, *batches.augmentation(), *constants)
        # Autocast's cache of cast weights would outlive the capture.
        with torch.autocast(DEVICE.type, dtype=dtype, enabled=dtype is not torch.float32, cache_enabled=False):
            loss = mean_loss(inputs, targets[indices])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    made = {"steps": 0}
    last: dict[str, Tensor] = {}

    def step() -> None:
        indices.copy_(batches.indices())
        if made["steps"] < _EAGER_STEPS:
            # On the stream of the capture: gradients are accumulated on the stream where they first were.
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                last["loss"] = whole_step()
            torch.cuda.current_stream().wait_stream(stream)
        else:
            if made["steps"] == _EAGER_STEPS:
                graph.register_generator_state(batches.generator)
                with torch.cuda.graph(graph, stream=stream):
                    last["loss"] = whole_step()
            graph.replay()
        made["steps"] += 1

    return Made(step=step, loss=lambda: float(last["loss"]))
