"""Activation checkpointing: a region stores only its inputs, and is recomputed in the backward pass."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from triaccel_ray.apply.recompute_rng import RecomputeRNG
from triaccel_ray.cuda.out_of_memory import first_line, is_out_of_memory
from triaccel_ray.cuda.random_states import preserved_random_states, random_states, set_random_states
from triaccel_ray.model.pytree import map_tensors, tensors_in
from triaccel_ray.model.regions import Call

Surroundings = Callable[[], contextlib.AbstractContextManager[None]]
_Scratch = tuple[nn.Module, dict[str, Tensor]]
"""A batch normalization, and scratch buffers for running statistics, which must not be updated twice."""


class Recomputation:
    """Recomputes regions and segments of a model by name; knows which one was recomputed when an error is raised."""

    def __init__(self, rng: RecomputeRNG) -> None:
        """Draws random numbers from `rng`."""
        self.rng = rng
        self.last = ""
        """Name of the region last recomputed in this pass, the first of a segment; empty before."""
        self._regions: dict[tuple[str, ...], RecomputedRegion] = {}

    @property
    def overwriting(self) -> list[tuple[str, ...]]:
        """The names of each region or segment that writes into its inputs, so that the backward pass fails."""
        return [names for names, region in self._regions.items() if region.overwrites]

    def run(
        self,
        regions: Mapping[str, nn.Module],
        surroundings: Surroundings,
        call: Call,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Returns what `call` does for a region, or a segment of several; repeats it in the backward pass.

        Raises:
            CheckpointError: as `RecomputedRegion.run` does, or, in the backward pass, repeating the call failed.
        """
        names = tuple(regions)
        if names not in self._regions:
            self._regions[names] = RecomputedRegion(list(regions.values()), self.rng)
        self.last = names[0]  # if it raises

        @contextlib.contextmanager
        def again() -> Iterator[None]:
            self.last = names[0]
            try:
                with surroundings():
                    yield
            # Not any `Exception`: PyTorch ends a recomputation early by one of its own.
            except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                if is_out_of_memory(error):
                    raise
                raise CheckpointError(f"recomputing {names[0]} failed: {first_line(error)}") from error

        outputs = self._regions[names].run(call, again, *args, **kwargs)
        self.last = ""
        return outputs


class RecomputedRegion:
    """Calls a region, or a segment of several, so that only its inputs are stored (Chen et al. 2016).

    The region is called unchanged, compiled or not. Only the tensors that its call saves are dropped, so compiled code
    and its shapes stay the same. Gradients are bitwise those without checkpointing: the recomputation draws the same
    random numbers, uses the same autocast, and leaves running statistics alone. A region that changes other buffers, as
    spectral normalization does, cannot be recomputed.
    """

    def __init__(self, regions: Sequence[nn.Module], rng: RecomputeRNG) -> None:
        """Takes the modules of the region, or of the segment's regions."""
        self._regions, self._rng = nn.ModuleList(regions), rng
        self._scratch: list[_Scratch] | None = None  # taken at the first call, an eager one, once memory is there
        self.overwrites = False
        """Whether a call wrote into its inputs, so that the backward pass fails."""

    def run(self, call: Call, surroundings: Surroundings, /, *args: Any, **kwargs: Any) -> Any:
        """Returns what `call` does; the backward pass repeats it inside `surroundings` and the autocast of now.

        Raises:
            CheckpointError: the region changes buffers that are no running statistics.
        """
        scratch = self._scratch = _scratch_of(self._regions) if self._scratch is None else self._scratch
        on_gpu = torch.cuda.is_initialized()
        is_captured = on_gpu and torch.cuda.is_current_stream_capturing()
        before = None if is_captured else random_states(cuda=on_gpu)
        generator = self._rng.next_generator() if is_captured else None
        frozen = map_tensors(lambda tensor: tensor, (args, kwargs))  # lists may have grown by the time it is recomputed
        inputs = tensors_in(frozen)
        versions = [tensor._version for tensor in inputs]
        buffers = _versions(self._regions)
        num_calls = itertools.count()

        def run(*tensors: Tensor) -> Any:
            if next(num_calls) == 0:
                return call(*args, **kwargs)
            unpacked = iter(tensors)  # by autograd, which detects in-place writes to them
            positional, named = map_tensors(lambda _: next(unpacked), frozen)
            with recomputing():
                return call(*positional, **named)

        @contextlib.contextmanager
        def recomputing() -> Iterator[None]:
            with contextlib.ExitStack() as stack:
                stack.enter_context(surroundings())
                stack.enter_context(_statistics_kept(scratch))
                if before is not None:
                    stack.enter_context(preserved_random_states(cuda=on_gpu))
                    set_random_states(before)
                stack.enter_context(self._rng.using(generator))
                yield

        with contextlib.nullcontext() if is_captured else self._rng.recording_call():
            outputs = checkpoint(
                run,
                *inputs,
                use_reentrant=False,
                preserve_rng_state=False,  # `recomputing` does so
            )
        if not is_captured and _versions(self._regions) != buffers:
            raise CheckpointError("a region changes its buffers")
        if [tensor._version for tensor in inputs] != versions:
            self.overwrites = True
        return outputs


def _versions(region: nn.Module) -> list[tuple[int, int]]:
    """Returns what changes when a buffer of the region does, except for running statistics."""
    others = (part for part in region.modules() if not isinstance(part, nn.modules.batchnorm._NormBase))
    return [(id(buffer), buffer._version) for part in others for buffer in part._buffers.values() if buffer is not None]


def _scratch_of(region: nn.Module) -> list[_Scratch]:
    """Returns each batch normalization of the region with copies of its buffers, for the recomputation to write to."""
    norms = [part for part in region.modules() if isinstance(part, nn.modules.batchnorm._NormBase)]
    return [(norm, {name: b.clone() for name, b in norm._buffers.items() if b is not None}) for norm in norms]


@contextlib.contextmanager
def _statistics_kept(scratch: Sequence[_Scratch]) -> Iterator[None]:
    """Redirects running statistics of norms in training mode to scratch buffers: outputs do not depend on them."""
    own = [(norm, norm._buffers, written) for norm, written in scratch if norm.training]
    try:
        for norm, buffers, written in own:
            norm._buffers = {**buffers, **written}
        yield
    finally:
        for norm, buffers, _ in own:
            norm._buffers = buffers
