"""What a forward pass computed: calls of linear maps, where samples lie in them, who used which weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from triaccel_ray.model.layers import Layer
from triaccel_ray.model.pytree import tensors_in


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a linear map, seen between its own hooks: what `forward` received and what it returned."""

    module: nn.Module
    argument: Tensor | None
    """None where it received anything else than one positional tensor."""
    output: torch.Size
    """Its shape."""
    edge: GradientEdge | None
    """Where the gradient with respect to the output arrives. An edge, unlike the tensor, still means the module's own
    output after the model has changed that in place (`nn.ReLU(inplace=True)`)."""
    sources: tuple[Node, ...]
    """The graph's nodes that made the arguments."""

    @property
    def shape(self) -> torch.Size:
        """The argument's shape."""
        return torch.Size() if self.argument is None else self.argument.shape


def record_calls(run: Callable[[], Any], modules: Sequence[nn.Module]) -> tuple[Any, list[Call]]:
    """Returns what `run` returns, and the calls that it made of `modules` with gradients on, in order.

    No hook of its own outlasts it, whether it returns or raises.
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

    Inside is what lies between a call's arguments and its output.

    Raises:
        ValueError: a part of the graph is hidden in a reentrant checkpoint, whose weights would seem to have no part.
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
    """How a layer's Gram matrix is computed, from the cheapest way to the one that is always right."""

    NONE = "zero: the layer has no part in what is differentiated"
    FACTORS = "from the inputs and output gradients of its calls: `nn.Linear`, `nn.Conv2d`, `nn.Embedding`"
    MODEL = "by running the whole model again under `torch.func`, all samples side by side"
    SAMPLES = "by one pass of the whole model per sample, where `torch.func` fails"


class StructureChangedError(Exception):
    """The model did not run the same course as when its structure was found."""


@dataclass(frozen=True, eq=False)
class KnownCall:
    """One call of a linear map that every forward pass makes, whatever the number of samples."""

    module: nn.Module
    argument: tuple[int, ...]
    """Its shape without the dimension of the samples; likewise of the output."""
    output: tuple[int, ...]
    argument_dim: int | None
    """Which dimension is the samples; None where that is unclear, or it is shared by all samples."""
    output_dim: int | None

    @classmethod
    def of(cls, call: Call, single: Call, num_samples: int) -> KnownCall:
        """Returns what stays the same of a call made with `num_samples` samples, and with a single one.

        The dimension whose size went from `num_samples` to 1 is the samples'. No rule that looks at one shape alone
        can tell a batch of 32 from a sequence of 32.
        """
        argument_dim = output_dim = None
        if call.edge is not None:
            argument_dim = _sample_dim(call.shape, single.shape, num_samples)
            output_dim = _sample_dim(call.output, single.output, num_samples)
        shapes = _without(call.shape, argument_dim), _without(call.output, output_dim)
        return cls(call.module, *shapes, argument_dim, output_dim)

    @property
    def is_factorizable(self) -> bool:
        """Whether its argument and output gradient tell each sample's part of the weight's gradient."""
        is_image = not isinstance(self.module, nn.Conv2d) or len(self.argument) == 3
        return self.argument_dim is not None and self.output_dim is not None and is_image

    def is_same(self, call: Call, num_samples: int) -> bool:
        """Whether `call` is this one, made with `num_samples` samples, all of which take part in it."""
        if call.module is not self.module or self.argument_dim is None or self.output_dim is None:
            return call.module is self.module
        sizes = (call.shape, self.argument_dim, self.argument), (call.output, self.output_dim, self.output)
        return call.edge is not None and all(
            len(shape) > dim and shape[dim] == num_samples and _without(shape, dim) == rest
            for shape, dim, rest in sizes
        )


def _sample_dim(shape: torch.Size, single: torch.Size, num_samples: int) -> int | None:
    """Returns the one dimension that is `num_samples` in `shape` and 1 in `single`; None if there is no such one."""
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
    """The course of one forward pass, found once from few samples and valid while the model takes it."""

    calls: tuple[KnownCall, ...]
    """Of all linear maps, in the order in which they were made."""
    own: Mapping[Layer, tuple[int, ...]]
    """Which of the calls are a layer's own."""
    strategies: Mapping[Layer, Strategy]
    num_columns: int
    """Columns per sample, q."""
    slow_because: str = ""
    """Why layers are measured by samples."""
    varies: bool = False
    """Whether the course depends on the samples, so that a replay of it would be that of others."""
    batched_columns: bool = True
    """Whether all cotangents pass backwards side by side: every operation of the model then has a batching rule, or
    is at least run one by one by the rule for those that have none."""

    def layers_by(self, strategy: Strategy) -> list[Layer]:
        """Returns the layers that are measured so, in the model's order."""
        return [layer for layer, own in self.strategies.items() if own is strategy]

    def require_same(self, calls: Sequence[Call], num_samples: int) -> None:
        """Returns if `calls`, made with `num_samples` samples, are those that are known.

        Raises:
            StructureChangedError: these are other calls, or some of the samples take no part in one.
        """
        if len(calls) != len(self.calls):
            raise StructureChangedError(f"the model makes {len(calls)} calls where it made {len(self.calls)}")
        for call, known in zip(calls, self.calls, strict=True):
            if not known.is_same(call, num_samples):
                name = type(call.module).__name__
                raise StructureChangedError(f"{name} receives or returns other shapes for other samples, or is another")

    def by_samples(self, layers: Sequence[Layer], reason: str, *, varies: bool = False) -> Structure:
        """Returns the structure in which these layers take one pass of the model per sample, for this reason."""
        strategies = {**self.strategies, **dict.fromkeys(layers, Strategy.SAMPLES)}
        return replace(self, strategies=strategies, slow_because=reason, varies=varies)


def find_structure(
    root: Tensor, calls: Sequence[Call], single: Sequence[Call], layers: Sequence[Layer], num_columns: int
) -> Structure:
    """Returns the structure of the pass that made `calls` with two samples and `single` with one.

    Each layer has the cheapest strategy that may work; whether `MODEL` does turns out when it is tried.

    Raises:
        ValueError: a part of the graph is hidden in a reentrant checkpoint.
    """
    same_course = [call.module for call in calls] == [call.module for call in single]
    pairs = zip(calls, single if same_course else calls, strict=True)  # beside itself a call has no samples to find
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

    A `forward` put on the instance counts as a wrapper around the class's own (it casts, or moves to a device).
    """
    linear = [layer for layer in layers if all(_is_linear_map(layer, module) for module in layer.modules)]
    return [module for layer in linear for module in layer.modules]


def _is_linear_map(layer: Layer, module: nn.Module) -> bool:
    kind = type(module)
    if len(layer.weights) != 1 or getattr(module, "weight", None) is not layer.weights[0]:
        return False
    if isinstance(module, nn.Embedding):
        # max_norm changes the weight, scale_grad_by_freq weighs a row by how often the whole batch names it.
        return kind.forward is nn.Embedding.forward and module.max_norm is None and not module.scale_grad_by_freq
    if isinstance(module, nn.Conv2d):
        is_stock = kind.forward is nn.Conv2d.forward and type(module)._conv_forward is nn.Conv2d._conv_forward
        return is_stock and module.padding_mode == "zeros"
    return kind.forward is nn.Linear.forward or (is_transposed(module) and len(layer.modules) == 1)


def is_transposed(module: nn.Module) -> bool:
    """Whether it is the linear layer of Hugging Face's GPT-2, whose weight is [inputs, outputs]."""
    kind = type(module)
    return (kind.__module__, kind.__qualname__) == ("transformers.pytorch_utils", "Conv1D")
