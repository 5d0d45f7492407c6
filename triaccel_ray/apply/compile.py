"""Compiles a model with `torch.compile`, as a whole or its repeated blocks once, and a loss of many outputs."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from triaccel_ray.cuda.out_of_memory import is_out_of_memory
from triaccel_ray.model.layers import Loss
from triaccel_ray.model.pytree import cast_floating, tensors_in
from triaccel_ray.records.plan import Fault, FaultKind

_RECOMPILE_LIMIT = 256
"""Variants of all blocks, for precisions of their layers and for shapes, before PyTorch stops compiling them."""
_MANY_OUTPUTS = 2**24
"""Floating-point numbers in a model's outputs from which on the loss is compiled: each FP32 copy takes 64 MiB."""


class Compilation:
    """Compiles a model's training passes with Inductor; evaluation and curvature run it uncompiled.

    With `blocks`, each block and each norm and embedding outside them is compiled by `torch.nn.Module.compile`: equal
    blocks share their code, and a new batch size needs no recompilation. If the blocks `are_equal`, all dimensions are
    dynamic, and they share code for any length of text. If not, only the batch dimension is, and only if
    `batch_varies`: with dynamic maps, tracing a Swin-T took PyTorch over 200 s in place of 50, and a PVT failed.
    Without blocks, the model is compiled as a whole, with a dynamic batch dimension if `batch_varies`. Code is
    generated at the first step, and cached on disk by Inductor. With `spares_memory`, it times kernels without clearing
    the L2 cache, which would take a buffer of its size.

    A loss of many outputs, such as a language model's, is compiled together with their casts to FP32, so that no FP32
    copy of them is stored.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module] = (),
        *,
        are_equal: bool = True,
        batch_varies: bool = True,
        spares_memory: bool = False,
    ) -> None:
        if torch.cuda.is_available():
            share_kernel_cache()
        self.model, self._batch_varies, self._spares_memory = model, batch_varies, spares_memory
        self.blocks = tuple(blocks)
        """The blocks compiled one by one; empty if the model is compiled as a whole."""
        self._whole: Any = None if blocks else torch.compile(model)
        self._compiled = [*self.blocks, *_norms_and_embeddings_outside(model, self.blocks)] if self.blocks else []
        self._are_equal = are_equal
        for module in self._compiled:
            if are_equal:
                module.compile(dynamic=True)
            else:
                # Private: a hook, the public way to see a module's inputs, would be compiled, too.
                module._compiled_call_impl = partial(self._with_dynamic_batch, torch.compile(module._call_impl))
        self._loss: Any = torch.compile(loss_in_fp32)
        self._loss_failure = ""

    def __str__(self) -> str:
        if self.blocks:
            return f"{len(self.blocks)} x {type(self.blocks[0]).__name__} compiled"
        return f"{type(self.model).__name__} compiled as a whole"

    def compile_whole(self) -> None:
        """Compiles the model as a whole from now on."""
        self.remove()
        self._whole = torch.compile(self.model)

    def forward_of(self, inputs: Any) -> nn.Module:
        """Returns the module to call with these inputs in place of the model."""
        if self._whole is None:
            return self.model
        self._mark_batch(inputs)
        module: nn.Module = self._whole
        return module

    def loss(self, loss: Loss, outputs: Any, targets: Any) -> Tensor:
        """Returns `loss_in_fp32`; runs it uncompiled if there are few outputs, or if compiling it fails."""
        numbers = sum(tensor.numel() for tensor in tensors_in(outputs) if tensor.is_floating_point())
        if numbers < _MANY_OUTPUTS or self._loss is None:
            return loss_in_fp32(loss, outputs, targets)
        self._mark_batch([outputs, targets])
        try:
            compiled: Tensor = self._loss(loss, outputs, targets)
            return compiled
        except Exception as error:
            if not is_compile_error(error) or is_out_of_memory(error):
                raise
            self._loss, self._loss_failure = None, first_paragraph(error)
        return loss_in_fp32(loss, outputs, targets)

    def take_faults(self, step: int) -> tuple[Fault, ...]:
        """Returns a fault, once, if the loss cannot be compiled."""
        reason, self._loss_failure = self._loss_failure, ""
        text = f"torch.compile failed, the loss runs as it is: {reason}"
        return (Fault(kind=FaultKind.COMPILED, step=step, phase="compile", detail=text),) if reason else ()

    def _with_dynamic_batch(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._mark_batch([args, kwargs])
        return call(*args, **kwargs)

    def _mark_batch(self, value: Any) -> None:
        if self._batch_varies:
            for tensor in tensors_in(value):
                if tensor.dim() and len(tensor) > 1:
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Returns a context for training passes, in which one block may be compiled in many variants.

        A checkpoint in the model's own code is compiled, too: what `showing` does within one need not be done again.
        """
        patched = torch._dynamo.config.patch(
            recompile_limit=_RECOMPILE_LIMIT,
            skip_fwd_side_effects_in_bwd_under_checkpoint=True,
            # Else the maps of one block, which another's differ from, would become dynamic.
            automatic_dynamic_shapes=self._are_equal or not self.blocks,
        )
        with patched, _timing_without_l2_flush() if self._spares_memory else contextlib.nullcontext():
            yield

    def remove(self) -> None:
        """Undoes the compilation: the model runs uncompiled from now on."""
        for module in self._compiled:
            module._compiled_call_impl = None  # PyTorch has no inverse of `Module.compile`
        self.blocks, self._compiled, self._whole = (), [], None


def loss_in_fp32(loss: Loss, outputs: Any, targets: Any) -> Tensor:
    """Returns the loss of outputs in any precision, computed in FP32."""
    return loss(cast_floating(outputs, torch.float32), targets)


@contextlib.contextmanager
def _timing_without_l2_flush() -> Iterator[None]:
    """Has Inductor time variants of kernels without clearing the L2 cache, which takes a buffer of that cache's size.

    That is 60 MiB on an H200, for which a cold start in a small budget would fail. The variants chosen are cached on
    disk, for runs without a budget, too.
    """
    from torch._inductor.runtime.benchmarking import benchmarker

    size = "L2_cache_size"  # private, a cached property: its value is in the instance's dictionary
    values = vars(benchmarker)
    before = {size: values[size]} if size in values else {}
    values[size] = 4  # bytes: one number
    try:
        yield
    finally:
        values.pop(size, None)
        values.update(before)


def share_kernel_cache() -> None:
    """Has Triton cache the kernels of Inductor and of this project in one folder, in this process and its children.

    Inductor sets another folder when it compiles its first kernel, but not when it loads one from its own cache. So the
    next process would not find this project's kernels that were compiled after that, and compile them again.
    """
    import triton

    os.environ.setdefault("TRITON_CACHE_DIR", triton.knobs.cache.dir)


def _norms_and_embeddings_outside(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns the norms and embeddings outside the blocks; their eager backward passes are slow."""
    inside = {part for block in blocks for part in block.modules()}
    found = []
    for module in model.modules():
        is_lookup = isinstance(module, nn.Embedding) and module.max_norm is None and not module.sparse
        if module not in inside and (is_lookup or isinstance(module, nn.LayerNorm | nn.RMSNorm)):
            found.append(module)
    return found


def is_compile_error(error: BaseException) -> bool:
    """Returns whether `torch.compile` raised the error, and not the model."""
    return "torch._dynamo" in sys.modules and isinstance(error, torch._dynamo.exc.TorchDynamoException)


def first_paragraph(error: BaseException) -> str:
    """Returns the error's message on one line, without the advice that PyTorch appends."""
    return " ".join(str(error).partition("\n\n")[0].split())[:300]


def is_compiled(model: nn.Module) -> bool:
    """Returns whether `torch.compile` has been applied to the model or a part of it."""
    return any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in model.modules())
