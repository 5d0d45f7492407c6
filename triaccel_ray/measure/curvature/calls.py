"""What each layer computed in a forward pass: its calls, where the samples lie in them, who else used its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from triaccel_ray.layers import Layer

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


@dataclass(eq=False)
class Call:
    """One call of a layer's module, seen between its own hooks: what `forward` received and what it returned."""

    module: nn.Module
    arguments: dict[int | str, Any]
    """Positional arguments by position, then the others by name."""
    outputs: tuple[Any, ...]
    """What was returned, shapes in place of tensors."""
    edges: tuple[GradientEdge | None, ...]
    """Where the gradient with respect to each output arrives; None for what takes no gradient. An edge, unlike the
    tensor, still means the module's own output after the model has changed that in place (`nn.ReLU(inplace=True)`).
    The edge of a view is cut off by such a change: the walk below then finds the weight outside the call."""
    sources: tuple[Node, ...]
    """The graph's nodes that made the arguments."""
    understood: bool
    """False if the arguments or the outputs nest, or it is unclear which part of them belongs to which sample: the
    call alone does not tell per-sample gradients."""
    argument_dims: dict[int | str, int] = field(default_factory=dict)
    """Which dimension of a tensor argument is the samples; without those that all samples share."""
    output_dims: tuple[int | None, ...] = ()
    """Which dimension of each output is the samples."""

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments."""
        return tuple(value for key, value in self.arguments.items() if isinstance(key, int))

    @property
    def shapes(self) -> dict[int | str, torch.Size]:
        """The shapes of the tensors among the arguments."""
        return {key: value.shape for key, value in self.arguments.items() if isinstance(value, Tensor)}


def record_calls(run: Callable[[], Any], modules: Sequence[nn.Module]) -> tuple[Any, list[Call]]:
    """Returns what `run` returns, and the calls that it made of `modules` with gradients on, in order.

    No hook of its own outlasts it, whether it returns or raises.
    """
    calls: list[Call] = []

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        arguments: dict[int | str, Any] = dict(enumerate(args))
        arguments.update(kwargs.items())
        calls.append(_call(module, arguments, output))

    # Prepended, so that it sees what `forward` itself returned, before any other hook changes it.
    handles = [m.register_forward_hook(hook, with_kwargs=True, prepend=True) for m in dict.fromkeys(modules)]
    try:
        return run(), calls
    finally:
        for handle in handles:
            handle.remove()


def locate_samples(calls: Sequence[Call], single: Sequence[Call], num_samples: int) -> None:
    """Writes into `calls`, made with `num_samples` samples, which dimensions they lie along, or that this is unclear.

    `single` holds the calls made with one sample: the dimension whose size went from `num_samples` to 1 is the
    samples', and a tensor of unchanged shape is shared by all samples. No rule that looks at one shape alone can tell
    a batch of 32 from a sequence of 32.
    """
    same_course = [call.module for call in calls] == [call.module for call in single]
    for call, one in zip(calls, single if same_course else calls, strict=True):
        call.understood &= same_course
        shapes, ones = call.shapes, one.shapes
        others = {key: value for key, value in call.arguments.items() if key not in shapes}
        other_ones = {key: value for key, value in one.arguments.items() if key not in ones}
        if shapes.keys() != ones.keys() or others != other_ones or len(call.outputs) != len(one.outputs):
            call.understood = False
            continue
        for key, shape in shapes.items():
            dim = _sample_dim(shape, ones[key], num_samples)
            if dim is not None:
                call.argument_dims[key] = dim
            call.understood &= dim is not None or shape == ones[key]
        call.output_dims = tuple(
            _sample_dim(many, few, num_samples) if edge is not None else None
            for many, few, edge in zip(call.outputs, one.outputs, call.edges, strict=True)
        )
        call.understood &= all((e is None) == (d is None) for e, d in zip(call.edges, call.output_dims, strict=True))


@dataclass(frozen=True, eq=False)
class WeightUses:
    """Where the graph of one forward pass uses which parameters."""

    inside: dict[Call, set[int]]
    """Call -> ids of the parameters between its arguments and its outputs."""
    outside: set[int]
    """Ids of the parameters used outside the recorded calls."""

    def is_used(self, layer: Layer) -> bool:
        """Whether any weight of the layer takes part at all."""
        everything = self.outside.union(*self.inside.values())
        return any(id(weight) in everything for weight in layer.weights)

    def are_calls_complete(self, layer: Layer, calls: Sequence[Call]) -> bool:
        """Whether `calls`, the layer's own, hold every use of its weights, and use no other module's parameters."""
        weights = {id(weight) for weight in layer.weights}
        elsewhere = self.outside.union(*(ids for call, ids in self.inside.items() if call not in calls))
        own = {call: {id(p) for p in call.module.parameters()} for call in calls}
        return not weights & elsewhere and all(self.inside[call] <= own[call] for call in calls)


def find_weight_uses(root: Tensor, calls: Sequence[Call]) -> WeightUses:
    """Walks the graph of `root` once and returns which parameters it uses, and inside which of `calls`.

    A walk starts at `root`, at every call's outputs and at every call's arguments, and ends where another starts.

    Raises:
        ValueError: a part of the graph is hidden in a reentrant checkpoint, whose weights would seem to have no part.
    """
    inside: dict[Call, set[int]] = {call: set() for call in calls}
    outside: set[int] = set()
    if root.grad_fn is None:
        return WeightUses(inside=inside, outside=outside)
    starts: dict[Node, Call | None] = {root.grad_fn: None}
    starts.update({node: None for call in calls for node in call.sources})
    starts.update({edge.node: call for call in calls for edge in call.edges if edge is not None})
    seen: set[tuple[Node, Call | None]] = set()
    stack = list(starts.items())
    while stack:
        node, owner = stack.pop()
        if (node, owner) in seen:
            continue
        seen.add((node, owner))
        if node.name() == "CheckpointFunctionBackward":
            raise ValueError("model calls torch.utils.checkpoint with use_reentrant = True: must be False")
        parameter = getattr(node, "variable", None)  # only the nodes of leaves have one
        if parameter is not None:
            (outside if owner is None else inside[owner]).add(id(parameter))
        stack.extend((child, owner) for child, _ in node.next_functions if child is not None and child not in starts)
    return WeightUses(inside=inside, outside=outside)


def find_first(calls: Sequence[Call]) -> frozenset[Call]:
    """Returns the calls that depend on no other of `calls`: where a backward pass through all of them ends."""
    starts = {edge.node: call for call in calls for edge in call.edges if edge is not None}
    return frozenset(call for call in calls if not _reaches(call, starts))


def _reaches(call: Call, starts: Mapping[Node, Call]) -> bool:
    stack = [edge.node for edge in call.edges if edge is not None]
    seen = set(stack)
    while stack:
        for child, _ in stack.pop().next_functions:
            if child is None or child in seen:
                continue
            if child in starts and starts[child] is not call:
                return True
            seen.add(child)
            stack.append(child)
    return False


def _call(module: nn.Module, arguments: dict[int | str, Any], output: Any) -> Call:
    outputs = tuple(output) if isinstance(output, tuple | list) else (output,)
    takes_gradient = [isinstance(value, Tensor) and value.requires_grad for value in outputs]
    return Call(
        module=module,
        arguments=arguments,
        outputs=tuple(value.shape if isinstance(value, Tensor) else None for value in outputs),
        edges=tuple(
            get_gradient_edge(value) if differentiable else None
            for value, differentiable in zip(outputs, takes_gradient, strict=True)
        ),
        sources=tuple(
            value.grad_fn for value in arguments.values() if isinstance(value, Tensor) and value.grad_fn is not None
        ),
        understood=all(isinstance(value, (Tensor, *_PLAIN)) for value in arguments.values())
        and all(isinstance(value, (Tensor, *_PLAIN)) for value in outputs),
    )


def _sample_dim(shape: torch.Size | None, single: torch.Size | None, num_samples: int) -> int | None:
    """Returns the one dimension that is `num_samples` in `shape` and 1 in `single`; None if there is no such one."""
    if shape is None or single is None or len(shape) != len(single):
        return None
    differing = [dim for dim, (many, one) in enumerate(zip(shape, single, strict=True)) if many != one]
    if len(differing) != 1 or shape[differing[0]] != num_samples or single[differing[0]] != 1:
        return None
    return differing[0]
