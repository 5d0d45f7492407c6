"""The loss whose curvature is measured, how it is differentiated, and the state of the model meanwhile."""

from __future__ import annotations

import contextlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from triaccel_ray.config import CurvatureMethod, require
from triaccel_ray.measure.budget import Limits
from triaccel_ray.measure.curvature.calls import Structure
from triaccel_ray.measure.curvature.factors import slices
from triaccel_ray.measure.curvature.spectrum import CurvatureEstimate, positive_roots
from triaccel_ray.model.layers import (
    Loss,
    forward,
    is_depthwise,
    preserved_modes,
    trained_modules,
    uncompiled,
    without_cudnn,
)
from triaccel_ray.model.pytree import map_tensors, tensors_in

Head = Callable[[Any, "Objective"], tuple[Tensor, Sequence[Tensor | None]]]
"""Maps the model's outputs to the tensor to differentiate and its q cotangents. Column (i, c) is the contribution of
sample i to the gradient under cotangent c. A single cotangent None means that the tensor is a scalar."""

MAX_COLUMNS = 4096
"""Most columns b C of a Gram matrix, which then takes 64 MB a layer in FP32, and C backward passes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Objective:
    """L(W) = (1/b) sum_i l_i(W): the mean loss of a model over b samples, as a function of its weights.

    The samples lie along dimension 0 of every tensor in `inputs` and `targets`, and are independent of each other.
    """

    model: nn.Module
    loss: Loss
    inputs: Any
    targets: Any
    planned_samples: int = 0
    """Number of samples of the whole measurement, if these may be a part of them."""
    limits: Limits = field(default_factory=Limits)
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

    def part(self, samples: slice) -> Objective:
        """Returns the objective of some of the samples: the mean of their l_i."""
        inputs, targets = map_tensors(lambda tensor: tensor[samples], (self.inputs, self.targets))
        planned = max(self.planned_samples, self.num_samples)
        return replace(self, inputs=inputs, targets=targets, planned_samples=planned)

    def parts(self) -> list[Objective]:
        """Returns one objective per chunk; its tensors are views."""
        b, size = self.num_samples, self.limits.chunk_samples
        if size is None or size >= b:
            return [self]
        return [self.part(some) for some in slices(b, size)]

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


class Method(ABC):
    """A way to measure curvature, with the state that it keeps between measurements."""

    vectors: list[Tensor] | None = None
    """Starting vectors of the next measurement; None if there are none."""
    structure: Structure | None = None
    """Known structure of the model's forward pass; None if the model has yet to be explored."""
    kept_bytes: int | None = None
    """Bytes that measuring in chunks has to keep; None if the method adapts to `Limits.kept_bytes`."""
    not_capturable_because = ""
    """Why a captured graph would take too much memory, or be wrong for other samples; empty if it would not."""

    @abstractmethod
    def measure(
        self, objective: Objective, generator: torch.Generator, num_iterations: int | None = None
    ) -> CurvatureEstimate:
        """Returns one measurement; `generator` draws the first vectors. `num_iterations` None: the method's default.

        Raises:
            StructureChangedError: the forward pass differs from the known structure.
            Exception: any error of the model or the loss.
        """

    @abstractmethod
    def num_passes(self, objective: Objective, num_iterations: int | None = None) -> int:
        """Returns the number of forward and backward passes of the model in such a measurement."""


def fisher_head(outputs: Any, objective: Objective) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Returns the sum of the samples' losses, each of which makes one column: its gradient g_i.

    The block is F_l = (1/b) sum_i g_i g_i^T, the uncentered second moment of the gradient. It uses the true labels in
    place of labels drawn from the model. So F is the Fisher matrix, and near the Hessian, only as far as the model
    fits (Martens 2020, section 11).
    """
    return objective.value(outputs) * objective.num_samples, [None]


def ggn_head(outputs: Any, objective: Objective) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Returns the outputs [b, C], and C cotangents [b, C] which make the columns J_i^T S_i e_c.

    The block is G_l = (1/b) sum_i J_i^T H_i J_i (Martens 2020, section 8). J_i [C, n] is the Jacobian of sample i's C
    outputs, counting all elements, with respect to the layer's weights. H_i = S_i S_i^T [C, C] is the Hessian of its
    loss with respect to its outputs. It is exact for any loss, with its negative part cut off. In a network of linear
    maps, ReLU, pooling and eval-mode normalization, outputs are piecewise linear in one layer's weights. If H_i has no
    negative part, as with every convex loss, the layer's Hessian block then *is* G_l.

    Raises:
        ValueError: dimension 0 of an output is not the batch dimension, or columns would exceed `MAX_COLUMNS`.
    """
    b = objective.num_samples
    parts = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad] or tensors_in(outputs)
    if not parts or any(part.dim() < 1 or len(part) != b for part in parts):
        found = [tuple(part.shape) for part in parts]
        raise ValueError(
            f"outputs have shapes {found}: ggn needs the {b} samples along dimension 0 of each; use method fisher"
        )
    sizes = [part[0].numel() for part in parts]
    num_columns = sum(sizes) * max(b, objective.planned_samples)
    if num_columns > MAX_COLUMNS:
        raise ValueError(
            f"outputs of {sum(sizes)} numbers per sample give ggn {num_columns} columns: must be at most "
            f"{MAX_COLUMNS}; measure fewer samples, or use method fisher"
        )

    def value(flat: Tensor) -> Tensor:
        """Returns the mean loss of outputs [b, C]."""
        pieces = iter([piece.view(part.shape) for piece, part in zip(flat.split(sizes, dim=1), parts, strict=True)])
        chosen = {id(part) for part in parts}
        return objective.value(map_tensors(lambda each: next(pieces) if id(each) in chosen else each, outputs))

    root = torch.cat([part.reshape(b, -1) for part in parts], dim=1)
    roots = positive_roots(output_hessians(value, root)).to(root.dtype)
    return root, list(roots.unbind(dim=2))


def output_hessians(mean_loss: Callable[[Tensor], Tensor], outputs: Tensor) -> Tensor:
    """Returns H_i, the Hessian of each sample's loss with respect to its outputs [b, C]: [b, C, C]."""
    at = outputs.detach().requires_grad_()
    value = mean_loss(at) * len(at)
    slope = None
    if value.requires_grad:
        (slope,) = torch.autograd.grad(value, at, create_graph=True, allow_unused=True)
    if slope is None or not slope.requires_grad:
        return at.new_zeros(*at.shape, at.shape[1])
    # Samples are independent, so the gradient of the sum over them holds each one's own row of second derivatives.
    rows = [
        torch.autograd.grad(column.sum(), at, retain_graph=True, allow_unused=True, materialize_grads=True)[0]
        for column in slope.unbind(dim=1)
    ]
    return torch.stack(rows, dim=1)


def pull_back(
    root: Tensor, cotangents: Sequence[Tensor | None], edges: Sequence[GradientEdge] | Sequence[Tensor], *, step: int
) -> list[Tensor | None]:
    """Returns the gradients of `root` at each edge for all q cotangents, [q, ...]; None if it does not depend on it.

    `step` cotangents are backpropagated at once. Samples are independent, so this acts like a larger batch and fills a
    device that a batch of 32 leaves idle. With a step of 1 no operation needs a batching rule.
    """
    if len(cotangents) == 1:
        only = torch.autograd.grad(root, edges, cotangents[0], allow_unused=True)
        return [None if gradient is None else gradient.unsqueeze(0) for gradient in only]
    stacked, q = torch.stack([c for c in cotangents if c is not None]), len(cotangents)
    stacks: list[Tensor | None] = [None] * len(edges)
    for some in slices(q, step):
        with warnings.catch_warnings():
            # Operations without a batching rule run column by column, as they would with a step of 1.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            options: Any = {"retain_graph": some.stop < q, "allow_unused": True, "is_grads_batched": step > 1}
            arrived = torch.autograd.grad(root, edges, stacked[some] if step > 1 else stacked[some.start], **options)
        if step >= q:
            return list(arrived)
        for e, gradient in enumerate(arrived):
            if gradient is not None:
                if (stack := stacks[e]) is None:
                    stack = stacks[e] = gradient.new_empty(q, *(gradient.shape[1:] if step > 1 else gradient.shape))
                stack[some] = gradient
    return stacks


@contextlib.contextmanager
def measuring(model: nn.Module, loss: Loss, *, strict_fp32: bool = False) -> Iterator[None]:
    """Holds model and loss in eval mode, without autocast and with gradients enabled; restores their modes afterwards.

    Backward passes run in the calling thread: PyTorch's own threads need workspaces of their own (see `PooledStream`).
    With `strict_fp32`, FP32 on a GPU is TF32 only inside `tensor_cores`; without it, PyTorch's flags decide.

    Two kinds of models are measured without cuDNN. Its recurrent kernels refuse a backward pass in eval mode, and any
    second one. Its depthwise convolutions take seconds to prepare. Compiled modules run uncompiled, which hooks and
    second derivatives need.
    """
    device_types = {p.device.type for p in model.parameters()}
    modules = list(trained_modules(model, loss).modules())
    contexts = [
        uncompiled(),
        # Entered even if inference mode is off: autograd may be disabled otherwise, as inside a custom operator.
        torch.inference_mode(False),
        *(torch.autocast(device_type, enabled=False) for device_type in device_types),
        preserved_modes(trained_modules(model, loss)),
    ]
    if any(isinstance(module, nn.RNNBase) or is_depthwise(module) for module in modules):
        contexts.append(without_cudnn())
    if strict_fp32 and "cuda" in device_types:
        contexts.append(_fp32_as("ieee"))
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # which `inference_mode` has switched on
        stack.enter_context(torch.enable_grad())
        for module in modules:
            module.training = False  # not by `eval()`, which some models override with side effects
        yield


def tensor_cores() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which FP32 products and convolutions on a GPU round their inputs to TF32, 11 bits.

    Meant for work after the forward pass, where sums of thousands of products average the rounding out. The five
    largest eigenvalues of 21 layers (ResNet-18, trained for 100 steps) stay within 1.5e-3 of FP64's, the largest
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


class FoldedNorms(TorchFunctionMode):
    """Computes `F.batch_norm` in eval mode as x * scale + shift, one multiply-add; equal up to rounding.

    The gradient with respect to x needs only the scale, while PyTorch's keeps x. In a network of convolutions, norms
    and ReLU that halves the memory kept for the backward pass. The second derivative is zero, while PyTorch's is
    written for training mode. Gradients of the norm's own weight and bias, which belong to no layer, are not formed.

    Not inside `torch.utils.checkpoint`, whose second forward pass runs in the backward pass, where no such mode is on.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Returns the result of `func`, with `F.batch_norm` replaced."""
        return (_batch_norm if func is F.batch_norm else func)(*args, **(kwargs or {}))


def _is_checkpointed() -> bool:
    """Returns whether this runs inside `torch.utils.checkpoint` with `use_reentrant=False`."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # a checkpoint has no public sign
    return hooks is not None and hooks[0].__module__ == checkpoint.__module__


def _batch_norm(
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training or mean is None or var is None or _is_checkpointed():
        return F.batch_norm(x, mean, var, weight, bias, training, momentum, eps)
    with torch.no_grad():
        scale = torch.rsqrt(var + eps) * (1.0 if weight is None else weight)
        shift = -mean * scale + (0.0 if bias is None else bias)
    shape = (1, -1, *(1,) * (x.dim() - 2))
    return torch.addcmul(shift.view(shape), x, scale.view(shape))
