"""Compiles a model, or its blocks one by one, and the loss of many outputs, with `torch.compile`."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from triaccel_ray.model.layers import Loss
from triaccel_ray.model.pytree import cast_floating, numbers_in, tensors_in

_RECOMPILE_LIMIT = 128
"""Variants of compiled code, for precisions and sizes in one storage, after which compiling counts as failed.

PyTorch counts those of all blocks together, in all loops of a process. Each selective storage in use adds as many.
"""
_LOSS_RECOMPILE_LIMIT = 16
"""The same for losses: Python state of theirs, such as a count of steps, may ask for a variant at each step."""
_TOO_MANY_VARIANTS = (
    "too many variants of one code: does Python state change at each step, or have many loops run here?"
)
_MIN_OUTPUTS = 2**24
"""Number of floating-point outputs from which the loss is compiled; an FP32 copy of them takes 64 MiB."""


class _VaryingSizes:
    """Has `torch.compile` make dynamic only the sizes of tensors that vary between calls of one callable."""

    def __init__(self, *, batch_varies: bool = False) -> None:
        """With `batch_varies`, the batch dimension, 0, is dynamic from the first call on."""
        self._first: dict[tuple[int, int], torch.Size] = {}
        self._numbers: list[int | float] | None = None
        self._varying: defaultdict[tuple[int, int], set[int]] = defaultdict(lambda: {0} if batch_varies else set())

    def match_first(self, value: Any) -> bool:
        """Returns whether `value` has the first call's numbers, and its tensors the sizes; the first call sets them."""
        numbers = numbers_in(value)
        if self._numbers is None:
            self._numbers = numbers
        if numbers != self._numbers:
            return False
        seen = enumerate(tensors_in(value))
        return all(self._first.setdefault((i, tensor.dim()), tensor.shape) == tensor.shape for i, tensor in seen)

    def mark(self, value: Any) -> None:
        """Marks the dimensions of the tensors in `value` that have differed from the first call's."""
        for index, tensor in enumerate(tensors_in(value)):
            key = index, tensor.dim()
            first, varying = self._first.setdefault(key, tensor.shape), self._varying[key]
            varying |= {dim for dim, size in enumerate(tensor.shape) if size != first[dim]}
            for dim in varying:
                if dim < tensor.dim() and tensor.shape[dim] > 1:
                    torch._dynamo.maybe_mark_dynamic(tensor, dim)


class _Variants:
    """A model or a block's call, compiled for the static sizes of its first call, and a second time for others.

    With one callable for both, PyTorch would use the variant compiled last for the first sizes, too.
    """

    def __init__(self, call: Any, sizes: _VaryingSizes, *, any_size: bool = False, kept_share: float = 1.0) -> None:
        """Compiles nothing yet; with `any_size`, once for all sizes. `sizes` are those of all variants of this call.

        The code keeps `kept_share` of what it saves beyond its inputs for the backward pass.
        """
        selective: dict[str, Any] = {} if kept_share == 1.0 else {"backend": _selective_backend(kept_share)}
        self._any = torch.compile(call, dynamic=True, **selective) if any_size else None
        self._static = torch.compile(call, dynamic=False, **selective)
        self._varying = torch.compile(call, **selective)
        self._sizes = sizes

    def fitting(self, arguments: Any) -> Any:
        """Returns the variant to call with these arguments."""
        if self._any is not None:
            return self._any
        if self._sizes.match_first(arguments):
            return self._static
        self._sizes.mark(arguments)
        return self._varying


@functools.cache
def _selective_backend(kept_share: float) -> Callable[..., Any]:
    """Returns Inductor with settings for selective recomputation, which are private: a test notices if they change.

    Results of operations that advance a random state are saved: repeated, they would draw other numbers. So are those
    of operations that are not PyTorch's own, such as FlashAttention's, which may draw numbers unseen. Inductor's random
    operations are repeated from saved seeds. The backend is cached, because PyTorch compiles again for another one.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass

    def may_draw(operation: Any) -> bool:
        is_own = getattr(operation, "namespace", "aten") in ("aten", "prims")
        return not is_own or torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ())

    class SaveRandom(CustomGraphPass):
        """Runs the user's passes first."""

        def __init__(self, before: Any) -> None:
            self._before = before if isinstance(before, list | tuple) else [before] if before is not None else []

        def __call__(self, graph: torch.fx.Graph) -> None:
            for each in self._before:
                each(graph)
            for node in graph.nodes:
                if may_draw(node.target):
                    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE

        def uuid(self) -> Any:  # part of the keys of Inductor's caches; None: not cached
            own = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self._before]
            return None if None in own else ("triaccel_ray.SaveRandom.2", *own)

    def compile_selectively(graph: Any, inputs: Any) -> Any:
        inductor: Any = torch._dynamo.lookup_backend("inductor")
        save_random = SaveRandom(torch._inductor.config.joint_custom_post_pass)
        with (
            torch._functorch.config.patch(activation_memory_budget=kept_share),
            torch._inductor.config.patch(joint_custom_post_pass=save_random),
        ):
            return inductor(graph, inputs)

    return compile_selectively


class Compilation:
    """Compiles a model's training passes with Inductor; evaluation and curvature run it uncompiled.

    * **Equal blocks** share one code. If the batch may change, all sizes are dynamic: a new batch size or length needs
      no recompilation.
    * **Equal blocks of a fixed batch, and unequal ones,** are compiled for the sizes of their first call. Other sizes,
      such as those of a short last batch, get a second, slower variant. Only sizes that vary are dynamic in it: with
      all dynamic, PyTorch traces a Swin four times as long, and cannot compile a PVT. In PyTorch 2.11, Inductor's
      choice of tiles does not apply to dynamic sizes, with which an MLP-Mixer, which transposes, is slower.
    * **Without blocks**, the model is compiled as a whole, likewise for its first sizes, and for others.
    * **The loss** of many outputs, such as a language model's, is compiled together with their casts to FP32, so that
      no FP32 copy of them is stored.

    With blocks, norms and embeddings outside them are compiled, too. Code is generated at the first step, and cached on
    disk by Inductor.
    """

    _shares_in_process: ClassVar[set[float]] = {1.0}

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module] = (),
        *,
        are_equal: bool = True,
        any_size: bool = True,
        spares_memory: bool = False,
    ) -> None:
        """Compiles the model's `blocks`, which `are_equal` or not, or the whole model if there are none.

        With `any_size`, equal blocks get code with dynamic sizes only. With `spares_memory`, Inductor times kernels
        without clearing the L2 cache, which would take a buffer of its size.
        """
        if torch.cuda.is_available():
            share_kernel_cache()
        self.model, self._spares_memory = model, spares_memory
        self.blocks = tuple(blocks)
        """The blocks compiled one by one; empty if the model is compiled as a whole."""
        self._whole = None if blocks else _Variants(model, _VaryingSizes())
        self._is_in_force = False
        self._kept_shares: Mapping[nn.Module, float] = {}
        self._compiled = [*self.blocks, *_norms_and_embeddings_outside(model, self.blocks)] if self.blocks else []
        self._are_equal, self._any_size = are_equal, are_equal and any_size
        for module in self._compiled:
            # The attribute is private. A forward pre-hook, which is public, would be compiled, too.
            module._compiled_call_impl = self._compiled_call(module)
        self._loss_sizes = _VaryingSizes(batch_varies=True)
        # PyTorch counts variants by code object: with one of its own, losses of other loops do not count.
        own = FunctionType(loss_in_fp32.__code__.replace(), loss_in_fp32.__globals__)
        self._loss: Any = torch.compile(own)
        self.compiles_loss = False
        """Whether this pass has reached the compiled loss, whose compilation may then be what failed."""

    def __str__(self) -> str:
        if self.blocks:
            return f"{len(self.blocks)} x {type(self.blocks[0]).__name__} compiled"
        return f"{type(self.model).__name__} compiled as a whole"

    def compile_whole(self) -> None:
        """Compiles the model as a whole from now on."""
        self.remove()
        self._whole = _Variants(self.model, _VaryingSizes())

    def forward_of(self, inputs: Any) -> nn.Module:
        """Returns the module to call with these inputs in place of the model, in a new pass."""
        self.compiles_loss = False
        if self._whole is None:
            return self.model
        module: nn.Module = self._whole.fitting(inputs)
        return module

    def loss(self, loss: Loss, outputs: Any, targets: Any) -> Tensor:
        """Returns the loss, computed in FP32; by compiled code if there are many outputs."""
        num_outputs = sum(tensor.numel() for tensor in tensors_in(outputs) if tensor.is_floating_point())
        if num_outputs < _MIN_OUTPUTS or self._loss is None:
            return loss_in_fp32(loss, outputs, targets)
        self.compiles_loss = True
        self._loss_sizes.mark([outputs, targets])
        with torch._dynamo.config.patch(recompile_limit=_LOSS_RECOMPILE_LIMIT):
            compiled: Tensor = self._loss(loss, outputs, targets)
        return compiled

    def stop_compiling_loss(self) -> None:
        """Has the loss run uncompiled from now on."""
        self._loss, self.compiles_loss = None, False

    def _compiled_call(self, module: nn.Module) -> Callable[..., Any]:
        """Returns a block's call that runs compiled code in training passes."""
        call: Any = module._call_impl
        by_share: dict[float, _Variants] = {}
        sizes = _VaryingSizes()

        def compiled(*args: Any, **kwargs: Any) -> Any:
            if not self._is_in_force:  # an evaluation's sizes are not those of training
                return call(*args, **kwargs)
            share = self._kept_shares.get(module, 1.0)
            if share not in by_share:
                by_share[share] = _Variants(call, sizes, any_size=self._any_size, kept_share=share)
            return by_share[share].fitting([args, kwargs])(*args, **kwargs)

        return compiled

    @contextlib.contextmanager
    def in_force(self, kept_shares: Mapping[nn.Module, float] | None = None) -> Iterator[None]:
        """Returns a context for training passes, in which one block may be compiled in many variants.

        `kept_shares` maps a block to the share (0 to 1) that its code keeps of the tensors saved beyond its inputs.
        Blocks not named keep all.
        Past the limit, an error is raised: PyTorch would run the model uncompiled without a word. A checkpoint in the
        model's own code is compiled, too: what `showing` does within one need not be done again.
        """
        before = self._is_in_force, self._kept_shares
        self._is_in_force, self._kept_shares = True, kept_shares or {}
        self._shares_in_process.update(self._kept_shares.values())
        limit = _RECOMPILE_LIMIT * len(self._shares_in_process)
        patched = torch._dynamo.config.patch(
            recompile_limit=limit,
            accumulated_recompile_limit=2 * limit,
            fail_on_recompile_limit_hit=True,
            skip_fwd_side_effects_in_bwd_under_checkpoint=True,
            # Blocks share one code object: a size that differs between unequal ones would become dynamic.
            automatic_dynamic_shapes=self._are_equal or not self.blocks,
        )
        with patched, _timing_without_l2_flush() if self._spares_memory else contextlib.nullcontext():
            try:
                yield
            except torch._dynamo.exc.FailOnRecompileLimitHit as error:  # no TorchDynamoException, and no reason in it
                raise torch._dynamo.exc.TorchDynamoException(_TOO_MANY_VARIANTS) from error
            finally:
                self._is_in_force, self._kept_shares = before

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
