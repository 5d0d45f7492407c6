"""The function whose curvature is measured, and the state a model is in while it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from triaccel_ray.config import CurvatureMethod, require
from triaccel_ray.layers import Loss, forward
from triaccel_ray.structure import map_tensors, tensors_in


@dataclass(frozen=True, kw_only=True, eq=False)
class Objective:
    """L(W) = (1/b) sum_i l_i(W): the mean loss of a model over b samples, as a function of its weights.

    The samples lie along dimension 0 of every tensor in `inputs` and `targets` and do not see each other.
    """

    model: nn.Module
    loss: Loss
    inputs: Any
    targets: Any
    chunk_bytes: int = 128 * 2**20
    """Bytes that one block of per-sample gradients may take; larger ones are formed and used up in pieces."""

    allow_tf32: bool = False
    """Whether everything after the forward pass may use `tensor_cores`."""

    @property
    def num_samples(self) -> int:
        """The number of samples, b.

        Raises:
            ValueError: a tensor has no dimension 0, or the tensors disagree about its size.
        """
        shapes = [tuple(t.shape) for t in (*tensors_in(self.inputs), *tensors_in(self.targets))]
        sizes = {shape[0] if shape else 0 for shape in shapes}
        if len(sizes) != 1 or 0 in sizes:
            raise ValueError(
                f"inputs and targets have shapes {shapes}: dimension 0 of every tensor must be the samples, and as "
                "many everywhere; keep what all samples share in a buffer of the model"
            )
        return sizes.pop()

    def require_samples(self, method: CurvatureMethod) -> None:
        """Raises ValueError for fewer samples than `method` needs, or tensors that disagree about their number."""
        found = self.num_samples
        require(found >= 2 or method == "hessian", "number of samples", found, f"{method} needs at least 2")

    def sample(self, index: int) -> Objective:
        """Returns the objective of one sample alone: l_i."""

        def one(tensor: Tensor) -> Tensor:
            return tensor[index : index + 1]

        return replace(self, inputs=map_tensors(one, self.inputs), targets=map_tensors(one, self.targets))

    def outputs(self) -> Any:
        """Returns the model's outputs for all samples."""
        return forward(self.model, self.inputs)

    def value(self, outputs: Any) -> Tensor:
        """Returns the mean loss of `outputs`, a scalar.

        Raises:
            ValueError: `loss` returned something else.
        """
        value = self.loss(outputs, self.targets)
        if value.dim() != 0:
            raise ValueError(f"loss returned shape {tuple(value.shape)}: must be the mean over samples, a scalar")
        return value


@contextlib.contextmanager
def measuring(model: nn.Module, *, strict_fp32: bool = False) -> Iterator[None]:
    """Holds the model in the state it is measured in: eval mode, no autocast, gradients on; restored after.

    Backward passes run in the calling thread: one of PyTorch's own would have workspaces of its own (see `LentStream`).
    With `strict_fp32`, FP32 on a GPU is TF32 only where `tensor_cores` says so; without, where PyTorch's flags do.

    The flag `training` is written module by module rather than through `eval()`, which some models override to act.
    cuDNN's recurrent kernels refuse a backward pass in eval mode, and any second one, so that they are off while a
    recurrent model is measured.
    """
    was_training = [(module, module.training) for module in model.modules()]
    device_types = {p.device.type for p in model.parameters()}
    is_recurrent = any(isinstance(module, nn.RNNBase) for module, _ in was_training)
    with contextlib.ExitStack() as stack:
        # Whether or not inference mode is on: autograd may be excluded otherwise, too, inside a custom operator, say.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # which the line above has switched on
        stack.enter_context(torch.enable_grad())
        for device_type in device_types:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        if is_recurrent:
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        if strict_fp32 and "cuda" in device_types:
            stack.enter_context(_fp32_as("ieee"))
        try:
            for module, _ in was_training:
                module.training = False
            yield
        finally:
            for module, flag in was_training:
                module.training = flag


def tensor_cores() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which FP32 products and convolutions on a GPU round their inputs to TF32, 11 bits.

    For what comes after the forward pass, where sums of thousands of products average the rounding out: all of the
    five largest eigenvalues of 21 layers (ResNet-18, trained for 100 steps) stay within 1.5e-3 of FP64's, the largest
    within 6e-4. In the forward pass the same rounding decides which ReLUs are on, and moves some by 1 to 3%.
    """
    return _fp32_as("tf32")


@contextlib.contextmanager
def _fp32_as(precision: str) -> Iterator[None]:
    """Sets how FP32 products and convolutions are computed on a GPU; PyTorch's legacy flags cannot be read inside."""
    products: Any = torch.backends.cuda.matmul
    convolutions: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]  # made when torch is imported
    before = products.fp32_precision, convolutions.fp32_precision
    try:
        products.fp32_precision = convolutions.fp32_precision = precision
        yield
    finally:
        products.fp32_precision, convolutions.fp32_precision = before
