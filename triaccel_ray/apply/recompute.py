"""Activation checkpointing: regions of a model store only their inputs, and are recomputed in the backward pass."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.split_module import split_module
from torch.utils.checkpoint import CheckpointError, checkpoint

from triaccel_ray.apply.fused_norm import FusedNorm, RecomputedInput
from triaccel_ray.apply.trace import called
from triaccel_ray.cuda.random_states import preserved_random_states, random_states, set_random_states
from triaccel_ray.model.pytree import map_tensors, tensors_in
from triaccel_ray.model.regions import Call, wrapped_calls
from triaccel_ray.records.plan import Fault, FaultKind

_Surroundings = Callable[[], contextlib.AbstractContextManager[None]]
_Scratch = tuple[nn.Module, dict[str, Tensor]]
"""A batch normalization, and scratch buffers for running statistics, which must not be updated twice."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Divided:
    """The fused graph with its regions split off as submodules; computes the same."""

    module: fx.GraphModule
    regions: Mapping[str, nn.Module]
    """Name -> the submodule of `module` that computes the region; regions missing from the graph are left out."""
    spared: Mapping[RecomputedInput, frozenset[str]]
    """Layer that recomputes its input -> the regions of the layer and of the calls that give its inputs."""

    @contextlib.contextmanager
    def keeping_inputs_of(self, recomputed: Collection[str]) -> Iterator[None]:
        """Returns a context in which layers that touch the regions in `recomputed` save their inputs as usual.

        Saved tensors of a checkpoint can be unpacked only once, so a norm and the layer after it cannot both do so.
        """
        keeping = [layer for layer, touched in self.spared.items() if touched & set(recomputed)]
        try:
            for layer in keeping:
                layer.keeps_input = True
            yield
        finally:
            for layer in keeping:
                layer.keeps_input = False


class Recomputation:
    """Applies activation checkpointing to regions of a model: only their inputs are stored (Chen et al. 2016).

    A region is called unchanged, compiled or not. Only the tensors that its call saves are dropped, so compiled code
    and its shapes stay the same. Gradients are bitwise those without checkpointing: the recomputation draws the same
    random numbers, uses the same autocast, and leaves running statistics alone. A CUDA graph cannot draw the same
    random numbers twice, so regions that draw are not checkpointed when steps are captured. Regions that write into
    their inputs, or compute something else when called again, are exempted once that is found.
    """

    def __init__(self, regions: Mapping[str, nn.Module], divided: Divided | None = None) -> None:
        """Checkpoints `regions`; for a model with fused norms, only those that its graph is `divided` into."""
        self.divided = divided
        self.regions = {name: module for name, module in regions.items() if divided is None or name in divided.regions}
        """Name -> module of each checkpointed region, in module order."""
        self._scratch = {name: _scratch_of(module) for name, module in self.regions.items()}
        self._drawing: set[str] = set()
        self._overwriting: set[str] = set()
        self._last_recomputed = ""
        """Name of the region last recomputed in this pass; empty before the first."""

    def exclude_random(self, step: int) -> tuple[Fault, ...]:
        """Stops checkpointing regions that drew random numbers on a GPU; returns a fault naming them, if any."""
        return self._skip(self._drawing, "captured steps (`capture`) cannot draw random numbers twice the same", step)

    def exclude_failed(self, error: BaseException, step: int) -> tuple[Fault, ...]:
        """Stops checkpointing regions that cannot be recomputed, if `error` stems from them; returns a fault, if so."""
        if isinstance(error, CheckpointError):
            if self._last_recomputed not in self.regions:  # raised by a checkpoint in the user's code
                return ()
            kind = type(self.regions[self._last_recomputed])
            differing = [name for name, region in self.regions.items() if type(region) is kind]
            return self._skip(differing, "what changes state of its own, a cache say, cannot be computed again", step)
        return self._skip(self._overwriting, "what writes into its input cannot be computed again", step)

    def _skip(self, names: Collection[str], why: str, step: int) -> tuple[Fault, ...]:
        skipped = [name for name in self.regions if name in names]
        if not skipped:
            return ()
        self.regions = {name: module for name, module in self.regions.items() if name not in names}
        text = f"{why}: activations of {', '.join(skipped)} are kept"
        return (Fault(kind=FaultKind.ACTIVATIONS_KEPT, step=step, phase="checkpoint", detail=text[:500]),)

    @contextlib.contextmanager
    def in_force(self, model: nn.Module, surroundings: _Surroundings) -> Iterator[None]:
        """Returns a context for one forward and backward pass of `model`, the user's or the divided one.

        The recomputation runs inside `surroundings` and under the autocast of the forward pass, because the backward
        pass may run in another thread.
        """
        self._last_recomputed = ""
        regions: Mapping[str, nn.Module] = self.regions
        with contextlib.ExitStack() as stack:
            if self.divided is not None:
                if model is self.divided.module:
                    regions = {name: self.divided.regions[name] for name in self.regions}
                stack.enter_context(self.divided.keeping_inputs_of(self.regions))
            stack.enter_context(wrapped_calls(regions, partial(self._checkpointed, surroundings)))
            yield

    def _checkpointed(self, surroundings: _Surroundings, name: str, call: Call, /, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        on_gpu = torch.cuda.is_initialized()
        is_captured = on_gpu and torch.cuda.is_current_stream_capturing()
        before = None if is_captured else random_states(cuda=on_gpu)
        frozen = map_tensors(lambda tensor: tensor, (args, kwargs))  # lists may have grown by the time it is recomputed
        inputs = tensors_in(frozen)
        versions = [tensor._version for tensor in inputs]
        num_calls = itertools.count()

        def run(*tensors: Tensor) -> Any:
            if next(num_calls) == 0:
                return call(*args, **kwargs)
            self._last_recomputed = name
            unpacked = iter(tensors)  # by autograd, which detects in-place writes to them
            positional, named = map_tensors(lambda _: next(unpacked), frozen)
            return call(*positional, **named)

        @contextlib.contextmanager
        def recomputing() -> Iterator[None]:
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
            preserve_rng_state=False,  # captured steps cannot, others do so above
            context_fn=lambda: (contextlib.nullcontext(), recomputing()),
        )
        if before and before["cuda"] and not all(map(torch.equal, before["cuda"], torch.cuda.get_rng_state_all())):
            self._drawing.add(name)
        if [tensor._version for tensor in inputs] != versions:
            self._overwriting.add(name)  # the backward pass will fail
        return outputs


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


def divide(model: nn.Module, fused: fx.GraphModule, names: Collection[str]) -> Divided:
    """Returns `fused`, the fused graph of `model`, with the regions called `names` split off as submodules.

    A region spans the graph from its first module to the next module outside it. Spans are contiguous, so the result
    is the same wherever they begin. Regions that the graph calls in several spans are left out.
    """
    nodes, regions = list(fused.graph.nodes), _regions_of_nodes(model, fused, names)
    num_spans = Counter(name for name, _ in itertools.groupby(regions))
    span_of: dict[fx.Node, int] = {}
    span_names: list[str] = []
    for node, region in zip(nodes, regions, strict=True):
        name = region if num_spans[region] == 1 else ""
        if not span_names or name != span_names[-1]:
            span_names.append(name)
        span_of[node] = len(span_names) - 1
    divided = split_module(fused, fused, span_of.__getitem__, keep_original_order=True)
    spared: dict[RecomputedInput, frozenset[str]] = {}
    for node in nodes:
        layer = called(fused, node)
        if isinstance(layer, RecomputedInput):
            spared[layer] = frozenset(span_names[span_of[each]] for each in (node, *node.all_input_nodes))
    submodules = {name: divided.get_submodule(f"submod_{span}") for span, name in enumerate(span_names) if name}
    return Divided(module=divided, regions=submodules, spared=spared)


def _regions_of_nodes(model: nn.Module, fused: fx.GraphModule, names: Collection[str]) -> list[str]:
    """Returns the name of the region that each node belongs to, empty outside all regions."""
    name_of = {id(module): name for name, module in model.named_modules()}
    found, current = [], ""
    for node in fused.graph.nodes:
        own = called(fused, node)
        if isinstance(own, FusedNorm):
            own = own.norm
        elif isinstance(own, RecomputedInput):
            own = own.layer
        path = name_of.get(id(own))
        if path is not None:  # else a module made by fusing: it belongs to the current region
            current = next((name for name in names if path == name or path.startswith(f"{name}.")), "")
        found.append("" if node.op in ("placeholder", "output") else current)
    return found
