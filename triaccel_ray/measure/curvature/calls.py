"""What a forward pass computed: calls, where samples lie in them, who used which weights; each layer's strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from triaccel_ray.model.layers import Layer
from triaccel_ray.model.pytree import tensors_in

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


@dataclass(eq=False)
class Call:
    """One call of a layer's module, seen between its own hooks: what `forward` received and what it returned."""

    module: nn.Module
    arguments: dict[int | str, Any]
    """Positional arguments by position, then the others by name."""
    outputs: tuple[torch.Size, ...]
    """The shapes of the tensors returned, in whatever containers."""
    edges: tuple[GradientEdge | None, ...]
    """Where the gradient with respect to each output arrives; None for what takes no gradient. An edge, unlike the
    tensor, still means the module's own output after the model has changed that in place (`nn.ReLU(inplace=True)`).
    The edge of a view is cut off by such a change: the walk below then finds the weight outside the call."""
    sources: tuple[Node, ...]
    """The graph's nodes that made the arguments."""
    understood: bool
    """False if the arguments nest, or it is unclear which part of them belongs to which sample: the
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
        call.understood &= same_course and one.understood
        call.output_dims = (None,) * len(call.outputs)
        if not call.understood:
            continue
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


def _call(module: nn.Module, arguments: dict[int | str, Any], output: Any) -> Call:
    outputs = tuple(tensors_in(output))
    return Call(
        module=module,
        arguments=arguments,
        outputs=tuple(value.shape for value in outputs),
        edges=tuple(get_gradient_edge(value) if value.requires_grad else None for value in outputs),
        sources=tuple(
            value.grad_fn for value in arguments.values() if isinstance(value, Tensor) and value.grad_fn is not None
        ),
        understood=all(isinstance(value, (Tensor, *_PLAIN)) for value in arguments.values()),
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


class Strategy(Enum):
    """How a layer's Gram matrix is computed, from the cheapest way to the one that is always right."""

    NONE = "zero: the layer has no part in what is differentiated"
    FACTORS = "from the inputs and output gradients of its calls: `nn.Linear`, `nn.Conv2d`, `nn.Embedding`"
    MODULE = "by running its modules again under `torch.func`, all samples side by side"
    MODEL = "by running the whole model so: weights used outside their modules, or on what all samples share"
    SAMPLES = "by one pass of the whole model per sample, where `torch.func` fails too"


class StructureChangedError(Exception):
    """The model did not run the same course as when its structure was found."""


@dataclass(frozen=True, eq=False)
class KnownCall:
    """One call of a module that every forward pass makes, whatever the number of samples."""

    module: nn.Module
    arguments: Mapping[int | str, tuple[int, ...]]
    """The shapes of the tensors among the arguments, without the dimension of the samples."""
    outputs: tuple[tuple[int, ...], ...]
    """Likewise; () for what takes no gradient."""
    argument_dims: Mapping[int | str, int]
    output_dims: tuple[int | None, ...]
    understood: bool

    @classmethod
    def of(cls, call: Call) -> KnownCall:
        """Returns what stays the same of a call whose samples have been located."""
        return cls(
            module=call.module,
            arguments={key: _without(shape, call.argument_dims.get(key)) for key, shape in call.shapes.items()},
            outputs=tuple(
                () if dim is None else _without(shape, dim)
                for shape, dim in zip(call.outputs, call.output_dims, strict=True)
            ),
            argument_dims=dict(call.argument_dims),
            output_dims=call.output_dims,
            understood=call.understood,
        )

    def place_samples(self, call: Call, num_samples: int) -> None:
        """Writes into `call` where its samples lie.

        Raises:
            StructureChangedError: this is another call, or one that some of the samples take no part in.
        """
        call.argument_dims.update(self.argument_dims)
        call.output_dims, call.understood = self.output_dims, self.understood
        if call.module is not self.module or (self.understood and not self._has_shapes(call, num_samples)):
            name = type(call.module).__name__
            raise StructureChangedError(f"{name} receives or returns other shapes for other samples, or is another")

    def _has_shapes(self, call: Call, num_samples: int) -> bool:
        if call.shapes.keys() != self.arguments.keys() or len(call.outputs) != len(self.outputs):
            return False
        found = [(call.shapes[key], self.argument_dims.get(key), known) for key, known in self.arguments.items()]
        outputs = zip(call.outputs, self.output_dims, self.outputs, strict=True)
        found += [(shape, dim, known) for shape, dim, known in outputs if dim is not None]
        return all(
            _without(shape, dim) == known and (dim is None or shape[dim] == num_samples) for shape, dim, known in found
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Structure:
    """The course of one forward pass, found once from few samples and valid while the model takes it."""

    calls: tuple[KnownCall, ...]
    """In the order in which they were made."""
    own: Mapping[Layer, tuple[int, ...]]
    """Which of the calls are a layer's own, for layers whose weights are used in these alone."""
    of_model: tuple[int, ...]
    """Which of the calls are the whole model's."""
    complete_in_model: frozenset[Layer]
    """The layers whose weights are used in the whole model's calls alone."""
    strategies: Mapping[Layer, Strategy]
    """How each layer is measured."""
    reasons: Mapping[Layer, str]
    """Why a layer is not measured from its own calls, where it is not."""
    num_columns: int
    """Columns per sample, q."""
    batched_columns: bool = True
    """Whether all cotangents pass backwards side by side: every operation of the model then has a batching rule, or
    is at least run one by one by the rule for those that have none."""

    @property
    def fallbacks(self) -> dict[str, str]:
        """Names of the layers that take one pass of the whole model per sample, and why."""
        slow = [layer for layer, strategy in self.strategies.items() if strategy is Strategy.SAMPLES]
        return {layer.name: self.reasons[layer] for layer in slow}

    def calls_of(self, layer: Layer) -> tuple[int, ...]:
        """Returns the calls whose output gradients the layer's strategy asks for."""
        strategy = self.strategies[layer]
        if strategy in (Strategy.FACTORS, Strategy.MODULE):
            return self.own[layer]
        return self.of_model if strategy is Strategy.MODEL else ()

    def place_samples(self, calls: Sequence[Call], num_samples: int) -> None:
        """Writes into `calls` what is known of them.

        Raises:
            StructureChangedError: these are other calls.
        """
        if len(calls) != len(self.calls):
            raise StructureChangedError(f"the model makes {len(calls)} calls where it made {len(self.calls)}")
        for call, known in zip(calls, self.calls, strict=True):
            known.place_samples(call, num_samples)

    def without(self, failed: Mapping[Layer, str]) -> Structure:
        """Returns the structure in which these layers are measured by the next strategy, for these reasons."""
        strategies = dict(self.strategies)
        for layer in failed:
            is_next = strategies[layer] is Strategy.MODULE and layer in self.complete_in_model
            strategies[layer] = Strategy.MODEL if is_next else Strategy.SAMPLES
        return replace(self, strategies=strategies, reasons={**self.reasons, **failed})

    def by_samples(self, reason: str) -> Structure:
        """Returns the structure that relies on nothing: every layer from one pass of the model per sample."""
        return replace(
            self,
            strategies=dict.fromkeys(self.strategies, Strategy.SAMPLES),
            reasons=dict.fromkeys(self.strategies, reason),
        )


def find_structure(
    root: Tensor, calls: Sequence[Call], layers: Sequence[Layer], model: nn.Module, num_columns: int
) -> Structure:
    """Returns the structure of the pass that made `calls`, each layer with the cheapest strategy that may work.

    Whether `MODULE` and `MODEL` work turns out when they are tried.

    Raises:
        ValueError: a part of the graph is hidden in a reentrant checkpoint.
    """
    owner = {module: layer for layer in layers for module in layer.modules}
    own_calls: dict[Layer, list[Call]] = {layer: [] for layer in layers}
    for call in calls:
        if call.module in owner:
            own_calls[owner[call.module]].append(call)
    uses = find_weight_uses(root, [call for of_layer in own_calls.values() for call in of_layer])
    whole = [call for call in calls if call.module is model and call.understood]
    in_model = find_weight_uses(root, whole)
    complete = frozenset(layer for layer in layers if whole and in_model.are_calls_complete(layer, whole))
    strategies: dict[Layer, Strategy] = {}
    reasons: dict[Layer, str] = {}
    for layer, mine in own_calls.items():
        strategies[layer] = Strategy.MODEL if layer in complete else Strategy.SAMPLES
        if not uses.is_used(layer):
            strategies[layer] = Strategy.NONE
        elif not all(call.understood for call in mine):
            reasons[layer] = "its inputs nest, or no one dimension of them or its outputs is the samples"
        elif not uses.are_calls_complete(layer, mine):
            reasons[layer] = "its weights are used outside its own calls"
        else:
            is_closed_form = all(is_factorizable(layer, call) for call in mine)
            strategies[layer] = Strategy.FACTORS if is_closed_form else Strategy.MODULE
    index_of = {call: index for index, call in enumerate(calls)}
    return Structure(
        calls=tuple(KnownCall.of(call) for call in calls),
        own={layer: tuple(index_of[call] for call in mine) for layer, mine in own_calls.items()},
        of_model=tuple(index_of[call] for call in whole),
        complete_in_model=complete,
        strategies=strategies,
        reasons=reasons,
        num_columns=num_columns,
    )


def is_factorizable(layer: Layer, call: Call) -> bool:
    """Whether the call is a linear map of its one argument, whose gradient `factors` knows in closed form.

    A `forward` put on the instance counts as a wrapper around the class's own (it casts, or moves to a device).
    """
    module, kind = call.module, type(call.module)
    if len(layer.weights) != 1 or getattr(module, "weight", None) is not layer.weights[0]:
        return False
    if list(call.arguments) != [0] or 0 not in call.argument_dims or len(call.edges) != 1:
        return False
    if isinstance(module, nn.Embedding):
        # max_norm changes the weight, scale_grad_by_freq weighs a row by how often the whole batch names it.
        return kind.forward is nn.Embedding.forward and module.max_norm is None and not module.scale_grad_by_freq
    if isinstance(module, nn.Conv2d):
        is_stock = kind.forward is nn.Conv2d.forward and type(module)._conv_forward is nn.Conv2d._conv_forward
        return is_stock and module.padding_mode == "zeros" and call.args[0].dim() == 4
    return kind.forward is nn.Linear.forward
