"""Structure of a forward pass: calls of linear maps, their batch dimensions, and the weights that each uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from triaccel_ray.model.layers import Layer, is_transposed
from triaccel_ray.model.pytree import tensors_in


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a linear map: what its own `forward` received and returned, before hooks change the output."""

    module: nn.Module
    argument: Tensor | None
    """The only argument; None unless `forward` received exactly one positional tensor."""
    output: torch.Size
    """Shape of the output; empty if it is not a tensor."""
    edge: GradientEdge | None
    """Gradient edge of the output; None if it requires no gradient. Unlike the tensor, the edge still refers to the
    module's own output after the model has changed that in place (`nn.ReLU(inplace=True)`)."""
    sources: tuple[Node, ...]
    """Autograd nodes that produced the arguments."""

    @property
    def shape(self) -> torch.Size:
        """The argument's shape."""
        return torch.Size() if self.argument is None else self.argument.shape

    def without_graph(self) -> Call:
        """Returns the call with the argument's shape alone, so that its graph can be freed."""
        argument = None if self.argument is None else torch.empty_like(self.argument, device="meta")
        return replace(self, argument=argument, edge=None, sources=())


def record_calls(run: Callable[[], Any], modules: Sequence[nn.Module]) -> tuple[Any, list[Call]]:
    """Returns the result of `run`, and the calls of `modules` that it made with gradients enabled, in order.

    Its hooks are removed afterwards, also after an error.
    """
    calls: list[Call] = []

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        is_single = len(args) == 1 and isinstance(args[0], Tensor) and not kwargs
        is_tensor = isinstance(output, Tensor)
        calls.append(
            Call(
                module=module,
                argument=args[0] if is_single else None,
                output=output.shape if is_tensor else torch.Size(),
                edge=get_gradient_edge(output) if is_tensor and output.requires_grad else None,
                sources=tuple(t.grad_fn for t in tensors_in((args, kwargs)) if t.grad_fn is not None),
            )
        )

    # Prepended, so that it sees what `forward` itself returned, before any other hook changes it.
    handles = [m.register_forward_hook(hook, with_kwargs=True, prepend=True) for m in dict.fromkeys(modules)]
    try:
        return run(), calls
    finally:
        for handle in handles:
            handle.remove()


def used_parameters(root: Tensor, calls: Sequence[Call]) -> tuple[dict[Call, set[int]], set[int]]:
    """Returns the ids of the parameters that the graph of `root` uses inside each of `calls`, and outside all of them.

    Inside a call are the autograd nodes between its arguments and its output.

    Raises:
        ValueError: the model uses reentrant checkpointing, which hides a part of the graph and the weights in it.
    """
    inside: dict[Call, set[int]] = {call: set() for call in calls}
    outside: set[int] = set()
    if root.grad_fn is None:
        return inside, outside
    starts: dict[Node, Call | None] = {root.grad_fn: None}
    starts.update({node: None for call in calls for node in call.sources})
    starts.update({call.edge.node: call for call in calls if call.edge is not None})
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
    return inside, outside


class Strategy(Enum):
    """How a layer's Gram matrix is computed, from the cheapest way to the one that works for any model."""

    NONE = "zero: the layer has no part in what is differentiated"
    FACTORS = "from the inputs and output gradients of its calls: `nn.Linear`, `nn.Conv2d`, `nn.Embedding`"
    MODEL = "by running the whole model again under `torch.func`, all samples side by side"
    SAMPLES = "by one pass of the whole model per sample, where `torch.func` fails"


class StructureChangedError(Exception):
    """A forward pass made other calls than the known structure."""


@dataclass(frozen=True, eq=False)
class KnownCall:
    """One call of a linear map that every forward pass makes, whatever the number of samples."""

    module: nn.Module
    argument: tuple[int, ...]
    """Shape of the argument without the batch dimension; likewise of the output."""
    output: tuple[int, ...]
    argument_dim: int | None
    """Batch dimension of the argument; None if that is unclear, or if all samples share the argument."""
    output_dim: int | None

    @classmethod
    def of(cls, call: Call, single: Call, num_samples: int) -> KnownCall:
        """Returns the part of a call that holds for any batch size, given it for `num_samples` samples and for one.

        The batch dimension is the one whose size went from `num_samples` to 1. One shape alone cannot tell a batch of
        32 from a sequence of 32.
        """
        argument_dim = output_dim = None
        if call.edge is not None:
            argument_dim = _sample_dim(call.shape, single.shape, num_samples)
            output_dim = _sample_dim(call.output, single.output, num_samples)
        shapes = _without(call.shape, argument_dim), _without(call.output, output_dim)
        return cls(call.module, *shapes, argument_dim, output_dim)

    @property
    def is_factorizable(self) -> bool:
        """Whether its argument and output gradient determine each sample's gradient of the weight."""
        is_image = not isinstance(self.module, nn.Conv2d) or len(self.argument) == 3
        return self.argument_dim is not None and self.output_dim is not None and is_image

    def is_same(self, call: Call, num_samples: int) -> bool:
        """Whether `call` is this call, made with all of `num_samples` samples."""
        if call.module is not self.module or self.argument_dim is None or self.output_dim is None:
            return call.module is self.module
        sizes = (call.shape, self.argument_dim, self.argument), (call.output, self.output_dim, self.output)
        return call.edge is not None and all(
            len(shape) > dim and shape[dim] == num_samples and _without(shape, dim) == rest
            for shape, dim, rest in sizes
        )


def _sample_dim(shape: torch.Size, single: torch.Size, num_samples: int) -> int | None:
    """Returns the only differing dimension, if it is `num_samples` in `shape` and 1 in `single`; else None."""
    if len(shape) != len(single):
        return None
    differing = [dim for dim, (many, one) in enumerate(zip(shape, single, strict=True)) if many != one]
    if len(differing) != 1 or shape[differing[0]] != num_samples or single[differing[0]] != 1:
        return None
    return differing[0]


def _without(shape: torch.Size, dim: int | None) -> tuple[int, ...]:
    return tuple(size for index, size in enumerate(shape) if index != dim)


@dataclass(frozen=True, kw_only=True, eq=False)
class Structure:
    """Structure of a forward pass, found once from few samples and valid while the model makes the same calls."""

    calls: tuple[KnownCall, ...]
    """Calls of all linear maps, in the order in which they were made."""
    own: Mapping[Layer, tuple[int, ...]]
    """Layer -> indices in `calls` of its own calls."""
    strategies: Mapping[Layer, Strategy]
    num_columns: int
    """Columns per sample, q."""
    slow_because: str = ""
    """Why layers use `Strategy.SAMPLES`; empty if none does."""
    varies: bool = False
    """Whether the calls depend on the samples, so that a captured graph would be wrong for other samples."""
    batched_columns: bool = True
    """Whether cotangents can be backpropagated in a batch. If so, every operation of the model has a batching rule, or
    works with the fallback that runs it one by one."""

    def layers_by(self, strategy: Strategy) -> list[Layer]:
        """Returns the layers with this strategy, in the model's order."""
        return [layer for layer, own in self.strategies.items() if own is strategy]

    def require_same(self, calls: Sequence[Call], num_samples: int) -> None:
        """Checks that `calls`, made with `num_samples` samples, match the known calls.

        Raises:
            StructureChangedError: they differ, or a call does not receive all samples.
        """
        if len(calls) != len(self.calls):
            raise StructureChangedError(f"the model makes {len(calls)} calls where it made {len(self.calls)}")
        for call, known in zip(calls, self.calls, strict=True):
            if not known.is_same(call, num_samples):
                name = type(call.module).__name__
                raise StructureChangedError(f"{name} receives or returns other shapes for other samples, or is another")

    def by_samples(self, layers: Sequence[Layer], reason: str, *, varies: bool = False) -> Structure:
        """Returns a structure in which these layers take one pass of the model per sample, for this reason."""
        strategies = {**self.strategies, **dict.fromkeys(layers, Strategy.SAMPLES)}
        return replace(self, strategies=strategies, slow_because=reason, varies=varies)


def find_structure(
    root: Tensor, calls: Sequence[Call], single: Sequence[Call], layers: Sequence[Layer], num_columns: int
) -> Structure:
    """Returns the structure of the forward pass that made `calls` with two samples, and `single`'s shapes with one.

    Each layer gets the cheapest strategy that may work. The caller has to try whether `MODEL` does.

    Raises:
        ValueError: the model uses reentrant checkpointing, which hides a part of the graph.
    """
    same_course = [call.module for call in calls] == [call.module for call in single]
    pairs = zip(calls, single if same_course else calls, strict=True)  # paired with itself: no batch dimension
    known = tuple(KnownCall.of(call, one, 2) for call, one in pairs)
    own = {layer: tuple(i for i, call in enumerate(calls) if call.module in layer.modules) for layer in layers}
    inside, outside = used_parameters(root, calls)
    strategies: dict[Layer, Strategy] = {}
    for layer, mine in own.items():
        weights = {id(weight) for weight in layer.weights}
        elsewhere = outside.union(*(ids for call, ids in inside.items() if call.module not in layer.modules))
        foreign = [inside[calls[i]] - {id(p) for p in calls[i].module.parameters()} for i in mine]
        strategies[layer] = Strategy.MODEL
        if not weights & outside.union(*inside.values()):
            strategies[layer] = Strategy.NONE
        elif mine and not weights & elsewhere and not any(foreign) and all(known[i].is_factorizable for i in mine):
            strategies[layer] = Strategy.FACTORS
    return Structure(calls=known, own=own, strategies=strategies, num_columns=num_columns)


def linear_maps(layers: Sequence[Layer]) -> list[nn.Module]:
    """Returns the modules of layers that are linear maps of one argument, whose gradient has a closed form.

    A `forward` set on the instance is assumed to wrap the class's own, to cast or to move tensors to a device.
    """
    linear = [layer for layer in layers if all(_is_linear_map(layer, module) for module in layer.modules)]
    return [module for layer in linear for module in layer.modules]


def _is_linear_map(layer: Layer, module: nn.Module) -> bool:
    kind = type(module)
    if len(layer.weights) != 1 or getattr(module, "weight", None) is not layer.weights[0]:
        return False
    if isinstance(module, nn.Embedding):
        # max_norm changes the weight; scale_grad_by_freq scales a row's gradient by 1 / its count in the whole batch.
        return kind.forward is nn.Embedding.forward and module.max_norm is None and not module.scale_grad_by_freq
    if isinstance(module, nn.Conv2d):
        is_stock = kind.forward is nn.Conv2d.forward and type(module)._conv_forward is nn.Conv2d._conv_forward
        return is_stock and module.padding_mode == "zeros"
    return kind.forward is nn.Linear.forward or (is_transposed(module) and len(layer.modules) == 1)
