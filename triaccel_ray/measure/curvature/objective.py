"""The function whose curvature is measured, what of it is differentiated, and the state a model is in meanwhile."""

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

from triaccel_ray.config import CurvatureMethod, require
from triaccel_ray.measure.curvature.calls import Structure
from triaccel_ray.measure.curvature.factors import slices
from triaccel_ray.measure.curvature.spectrum import CurvatureEstimate, positive_roots
from triaccel_ray.model.layers import Loss, forward, is_depthwise, preserved_modes, uncompiled, without_cudnn
from triaccel_ray.model.pytree import map_tensors, tensors_in

Head = Callable[[Any, "Objective"], tuple[Tensor, Sequence[Tensor | None]]]
"""Maps the model's outputs to the tensor to differentiate and the q cotangents that make the columns: column (i, c) is
what sample i contributes to the gradient under cotangent c. A single cotangent None says that the tensor is scalar."""

MAX_COLUMNS = 4096
"""Columns b C up to which a Gram matrix is made: 64 MB a layer in FP32, and C backward passes."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much of a measurement exists at once; every choice gives the same results up to rounding."""

    chunk_samples: int | None = None
    """Samples that pass through the model at once; None: all."""
    kept_bytes: int = 512 * 2**20
    """Bytes of what is kept from one chunk of samples for the next ones; more takes further passes."""
    block_bytes: int = 128 * 2**20
    """Bytes that one block of per-sample gradients may take; larger ones are formed and used up in pieces."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Objective:
    """L(W) = (1/b) sum_i l_i(W): the mean loss of a model over b samples, as a function of its weights.

    The samples lie along dimension 0 of every tensor in `inputs` and `targets` and do not see each other.
    """

    model: nn.Module
    loss: Loss
    inputs: Any
    targets: Any
    planned_samples: int = 0
    """How many samples a measurement will have, where these are a part of them."""
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
        """Returns the objectives of the chunks, which are views."""
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
    """One way to measure curvature, and what it keeps between measurements."""

    vectors: list[Tensor] | None = None
    """From which the next measurement goes on."""
    structure: Structure | None = None
    """What was found out about the model; None where it shall be found anew."""
    kept_bytes: int | None = None
    """What measuring in chunks cannot do without."""
    not_capturable_because = ""
    """Why a graph of a measurement would not be worth its memory, or not be right for other samples."""

    @abstractmethod
    def measure(
        self, objective: Objective, generator: torch.Generator, num_iterations: int | None = None
    ) -> CurvatureEstimate:
        """Returns one measurement; the generator draws the first vectors. None: as many iterations as fit the method.

        Raises:
            StructureChangedError: the model takes another course than the known one.
            Exception: whatever the model or the loss raises.
        """

    @abstractmethod
    def num_passes(self, objective: Objective, num_iterations: int | None = None) -> int:
        """Returns how often the model passes, forwards and backwards, in such a measurement."""


def fisher_head(outputs: Any, objective: Objective) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Returns the sum of the samples' losses, each of which makes one column: its gradient g_i.

    The block is F_l = (1/b) sum_i g_i g_i^T, the uncentred second moment of the gradient: the true labels stand in
    for labels drawn from the model, so that F is the Fisher matrix, hence near the Hessian, only as far as the model
    fits (Martens 2020, section 11).
    """
    return objective.value(outputs) * objective.num_samples, [None]


def ggn_head(outputs: Any, objective: Objective) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Returns the outputs [b, C], and C cotangents [b, C] which make the columns J_i^T S_i e_c.

    The block is G_l = (1/b) sum_i J_i^T H_i J_i: J_i [C, n] the Jacobian of sample i's C outputs with respect to the
    layer's weights, H_i = S_i S_i^T [C, C] the Hessian of its loss with respect to its outputs (Martens 2020, section
    8), here exact, whatever the loss, with its negative part cut off. In a network of linear maps, ReLU, pooling and
    eval-mode normalisation the outputs are piecewise linear in one layer's weights: where H_i has no negative part,
    as with every convex loss, the layer's Hessian block *is* G_l. C counts all numbers that a sample puts out.

    Raises:
        ValueError: dimension 0 of an output is not the samples, or there would be more than `MAX_COLUMNS` columns.
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
    # Samples are independent, so that the sum over them gives each one's own row of second derivatives.
    rows = [
        torch.autograd.grad(column.sum(), at, retain_graph=True, allow_unused=True, materialize_grads=True)[0]
        for column in slope.unbind(dim=1)
    ]
    return torch.stack(rows, dim=1)


def pull_back(
    root: Tensor, cotangents: Sequence[Tensor | None], edges: Sequence[GradientEdge] | Sequence[Tensor], *, step: int
) -> list[Tensor | None]:
    """Returns the gradients of `root` at each edge under all q cotangents, [q, ...]; None: does not depend on it.

    Samples do not see each other, so that the columns of one sample are those of a larger batch: `step` of them side by
    side fill a device that a batch of 32 leaves idle. With a step of 1 no operation needs a batching rule.
    """
    if len(cotangents) == 1:
        only = torch.autograd.grad(root, edges, cotangents[0], allow_unused=True)
        return [None if gradient is None else gradient.unsqueeze(0) for gradient in only]
    stacked, q = torch.stack([c for c in cotangents if c is not None]), len(cotangents)
    stacks: list[Tensor | None] = [None] * len(edges)
    for some in slices(q, step):
        with warnings.catch_warnings():
            # What has no batching rule runs column by column, as it would otherwise.
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
def measuring(model: nn.Module, *, strict_fp32: bool = False) -> Iterator[None]:
    """Holds the model in the state it is measured in: eval mode, no autocast, gradients on; restored after.

    Backward passes run in the calling thread: one of PyTorch's own would have workspaces of its own (see `LentStream`).
    With `strict_fp32`, FP32 on a GPU is TF32 only where `tensor_cores` says so; without, where PyTorch's flags do.

    Two kinds of models are measured without cuDNN. Its recurrent kernels refuse a backward pass in eval mode, and any
    second one. Its depthwise convolutions take seconds to prepare. Compiled modules run as they are written: hooks and
    a second derivative need that.
    """
    device_types = {p.device.type for p in model.parameters()}
    modules = list(model.modules())
    contexts = [
        uncompiled(),
        # Whether or not inference mode is on: autograd may be excluded otherwise, too, inside a custom operator, say.
        torch.inference_mode(False),
        *(torch.autocast(device_type, enabled=False) for device_type in device_types),
        preserved_modes(model),
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
            module.training = False  # rather than through `eval()`, which some models override to act
        yield


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


class FoldedNorms(TorchFunctionMode):
    """Has `F.batch_norm` in evaluation mode computed as x scale + shift, one multiply-add.

    The same function up to rounding. Its gradient with respect to x needs the scale alone, where PyTorch's own keeps x:
    in a network of convolutions, norms and ReLU that halves what a backward pass has to keep. Its second derivative is
    nothing, where PyTorch's is written for training mode. Gradients with respect to the norm's own weight and bias,
    which belong to no layer, are not formed.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Returns what `func` does."""
        return (_batch_norm if func is F.batch_norm else func)(*args, **(kwargs or {}))


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
    if training or mean is None or var is None:
        return F.batch_norm(x, mean, var, weight, bias, training, momentum, eps)
    with torch.no_grad():
        scale = torch.rsqrt(var + eps) * (1.0 if weight is None else weight)
        shift = -mean * scale + (0.0 if bias is None else bias)
    shape = (1, -1, *(1,) * (x.dim() - 2))
    return torch.addcmul(shift.view(shape), x, scale.view(shape))
