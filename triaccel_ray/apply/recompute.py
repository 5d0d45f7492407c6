"""Activation checkpointing: regions of a model keep nothing but their inputs, and compute the rest again."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from triaccel_ray.apply.divide import Divided
from triaccel_ray.cuda.random_states import preserved_random_states, random_states, set_random_states
from triaccel_ray.model.pytree import map_tensors, tensors_in
from triaccel_ray.model.regions import Call, interposed
from triaccel_ray.records.plan import Fault, FaultKind

_Surroundings = Callable[[], contextlib.AbstractContextManager[None]]
_Scratch = tuple[nn.Module, dict[str, Tensor]]
"""A batch normalisation, and buffers that take in what its own must not take in twice."""


class Recomputation:
    """Has regions keep their inputs alone for the backward pass, where they are computed once more (Chen et al. 2016).

    A region is called as it is, compiled or not: only what its call saves is dropped, so that compiled code and its
    shapes stay the same. Gradients are those of the kept region, bit for bit: the second pass draws the same random
    numbers, computes under the same autocast, and leaves running statistics alone. A captured step cannot draw twice
    the same: before it is captured, regions that draw are kept. So are those that write into their inputs.
    """

    def __init__(self, regions: Mapping[str, nn.Module], divided: Divided | None = None) -> None:
        """Recomputes these regions; of a model with its norms fused, those into which its graph is `divided`."""
        self.divided = divided
        self.regions = {name: module for name, module in regions.items() if divided is None or name in divided.regions}
        """Name -> module, in module order."""
        self._scratch = {name: _scratch_of(module) for name, module in self.regions.items()}
        self._drawing: set[str] = set()
        self._overwriting: set[str] = set()

    def keep_drawing(self, step: int) -> tuple[Fault, ...]:
        """Keeps from now on what regions compute that have drawn random numbers on a GPU; returns that, once."""
        return self._keep(self._drawing, "captured steps (`capture`) cannot draw random numbers twice the same", step)

    def keep_overwriting(self, step: int) -> tuple[Fault, ...]:
        """Keeps from now on what regions compute that have written into their inputs; returns that, once."""
        return self._keep(self._overwriting, "what writes into its input cannot be computed again", step)

    def _keep(self, kept: Collection[str], why: str, step: int) -> tuple[Fault, ...]:
        found = [name for name in self.regions if name in kept]
        if not found:
            return ()
        self.regions = {name: module for name, module in self.regions.items() if name not in kept}
        text = f"{why}: activations of {', '.join(found)} are kept"
        return (Fault(kind=FaultKind.ACTIVATIONS_KEPT, step=step, phase="checkpoint", detail=text[:500]),)

    @contextlib.contextmanager
    def in_force(self, model: nn.Module, surroundings: _Surroundings) -> Iterator[None]:
        """Returns a context for one forward and backward pass of `model`, the user's or the divided one.

        The second computation runs in `surroundings`, and under the autocast of the first: backward passes may run in
        another thread.
        """
        called: Mapping[str, nn.Module] = self.regions
        with contextlib.ExitStack() as stack:
            if self.divided is not None:
                called = self.divided.regions if model is self.divided.module else called
                stack.enter_context(self.divided.keeping_inputs_of(self.regions))
            around = partial(self._checkpointed, surroundings)
            stack.enter_context(interposed({name: called[name] for name in self.regions}, around))
            yield

    def _checkpointed(
        self, surroundings: _Surroundings, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        on_gpu = torch.cuda.is_initialized()
        is_captured = on_gpu and torch.cuda.is_current_stream_capturing()
        before = random_states(cuda=on_gpu) if not is_captured else None
        frozen = map_tensors(lambda tensor: tensor, (args, kwargs))  # lists may have grown when it is called again
        inputs, times = tensors_in(frozen), itertools.count()
        versions = [tensor._version for tensor in inputs]

        def run(*tensors: Tensor) -> Any:
            if next(times) == 0:
                return call(*args, **kwargs)
            unpacked = iter(tensors)  # by autograd, which finds out whether somebody has written to them
            positional, named = map_tensors(lambda _: next(unpacked), frozen)
            return call(*positional, **named)

        @contextlib.contextmanager
        def again() -> Iterator[None]:
            with contextlib.ExitStack() as stack:
                stack.enter_context(surroundings())
                stack.enter_context(_statistics_kept(self._scratch[name]))
                if before is not None:
                    stack.enter_context(preserved_random_states(cuda=on_gpu))
                    set_random_states(before)
                yield

        outputs = checkpoint(
            run,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=False,  # captured steps cannot, and others do so above
            context_fn=lambda: (contextlib.nullcontext(), again()),
        )
        if before and before["cuda"] and not all(map(torch.equal, before["cuda"], torch.cuda.get_rng_state_all())):
            self._drawing.add(name)
        if [tensor._version for tensor in inputs] != versions:
            self._overwriting.add(name)  # the backward pass will fail
        return outputs


def _scratch_of(region: nn.Module) -> list[_Scratch]:
    """Returns each batch normalisation of the region with copies of its buffers, for captured steps to write to."""
    norms = [part for part in region.modules() if isinstance(part, nn.modules.batchnorm._NormBase)]
    return [(norm, {name: b.clone() for name, b in norm._buffers.items() if b is not None}) for norm in norms]


@contextlib.contextmanager
def _statistics_kept(scratch: Sequence[_Scratch]) -> Iterator[None]:
    """Lets norms in training mode write their running statistics elsewhere: their outputs do not depend on these."""
    own = [(norm, norm._buffers, written) for norm, written in scratch if norm.training]
    try:
        for norm, buffers, written in own:
            norm._buffers = {**buffers, **written}
        yield
    finally:
        for norm, buffers, _ in own:
            norm._buffers = buffers
