"""What does not change between measurements of one model: where samples lie, and how each layer is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from triaccel_ray.layers import Layer
from triaccel_ray.measure.curvature.calls import Call, find_first, find_weight_uses
from triaccel_ray.measure.curvature.factors import is_factorizable


class Way(Enum):
    """How a layer's Gram matrix is had, from the cheapest way to the one that is always right."""

    NONE = "zero: the layer has no part in what is differentiated"
    FACTORS = "from the inputs and output gradients of its calls: `nn.Linear`, `nn.Conv2d`, `nn.Embedding`"
    MODULE = "by running its modules again under `torch.func`, all samples side by side"
    MODEL = "by running the whole model so: weights used outside their modules, or on what all samples share"
    SAMPLES = "by one pass of the whole model per sample, where `torch.func` fails too"


class StructureChangedError(Exception):
    """The model did not run the same course as when its structure was found."""


@dataclass(frozen=True, eq=False)
class CallShape:
    """One call of a module: what it received and returned, and where the samples lie in it."""

    module: nn.Module
    arguments: Mapping[int | str, Any]
    """The shapes of the tensors among the arguments."""
    outputs: tuple[torch.Size | None, ...]
    argument_dims: Mapping[int | str, int]
    output_dims: tuple[int | None, ...]
    understood: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Structure:
    """The course of one forward pass, found once and valid while shapes stay the same."""

    calls: tuple[CallShape, ...]
    """In the order in which they were made."""
    own: Mapping[Layer, tuple[int, ...]]
    """Which of the calls are a layer's own, for the layers whose own calls tell everything."""
    of_model: tuple[int, ...]
    """Which of the calls are the whole model's."""
    complete_in_model: frozenset[Layer]
    """The layers for which differentiating the whole model's calls tells everything."""
    ways: Mapping[Layer, Way]
    """How each layer is measured."""
    first: frozenset[int]
    """Which of the layers' own calls depend on no other of them."""
    batched_columns: bool = True
    """Whether all cotangents pass backwards side by side: every operation of the model then has a batching rule, or
    is at least run one by one by the rule for those that have none."""

    @property
    def fallback_layers(self) -> tuple[str, ...]:
        """Names of the layers that take one pass of the whole model per sample."""
        return tuple(layer.name for layer, way in self.ways.items() if way is Way.SAMPLES)

    def place_samples(self, calls: Sequence[Call]) -> None:
        """Writes into `calls` what is known of them.

        Raises:
            StructureChangedError: these are other calls.
        """
        if len(calls) != len(self.calls):
            raise StructureChangedError
        for call, known in zip(calls, self.calls, strict=True):
            if (call.module, call.shapes, call.outputs) != (known.module, known.arguments, known.outputs):
                raise StructureChangedError
            call.argument_dims.update(known.argument_dims)
            call.output_dims = known.output_dims
            call.understood = known.understood


def find_structure(root: Tensor, calls: Sequence[Call], layers: Sequence[Layer], model: nn.Module) -> Structure:
    """Returns the structure of the pass that made `calls`, each layer with the cheapest way that may be open to it.

    Whether `MODULE` and `MODEL` are open turns out when they are tried.

    Raises:
        ValueError: a part of the graph is hidden in a reentrant checkpoint.
    """
    owner = {module: layer for layer in layers for module in layer.modules}
    indices: dict[Layer, list[int]] = {layer: [] for layer in layers}
    for index, call in enumerate(calls):
        if call.module in owner:
            indices[owner[call.module]].append(index)
    uses = find_weight_uses(root, [calls[index] for of_layer in indices.values() for index in of_layer])
    used = [layer for layer in layers if uses.is_used(layer)]
    own = {
        layer: tuple(indices[layer])
        for layer in used
        if all(calls[index].understood for index in indices[layer])
        and uses.are_calls_complete(layer, [calls[index] for index in indices[layer]])
    }
    factored = {layer for layer in own if all(is_factorizable(layer, calls[index]) for index in own[layer])}
    in_own = {calls[index]: index for of_layer in own.values() for index in of_layer}
    of_model = tuple(index for index, call in enumerate(calls) if call.module is model and call.understood)
    complete: frozenset[Layer] = frozenset()
    if of_model and len(factored) < len(used):
        whole = [calls[index] for index in of_model]
        in_model = find_weight_uses(root, whole)
        complete = frozenset(layer for layer in used if in_model.are_calls_complete(layer, whole))
    ways = {
        layer: Way.NONE
        if layer not in used
        else Way.FACTORS
        if layer in factored
        else Way.MODULE
        if layer in own
        else next_way(Way.MODULE, layer, complete)
        for layer in layers
    }
    return Structure(
        calls=tuple(_call_shape(call) for call in calls),
        own=own,
        of_model=of_model,
        complete_in_model=complete,
        ways=ways,
        first=frozenset(in_own[call] for call in find_first(list(in_own))),
    )


def next_way(way: Way, layer: Layer, complete_in_model: frozenset[Layer]) -> Way:
    """Returns what to try after `way` has failed."""
    return Way.MODEL if way is Way.MODULE and layer in complete_in_model else Way.SAMPLES


def _call_shape(call: Call) -> CallShape:
    return CallShape(
        module=call.module,
        arguments=call.shapes,
        outputs=call.outputs,
        argument_dims=dict(call.argument_dims),
        output_dims=call.output_dims,
        understood=call.understood,
    )
