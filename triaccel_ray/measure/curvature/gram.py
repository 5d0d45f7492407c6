"""Each layer's Gram matrix of backpropagated columns.

A block (1/b) sum_r a_r a_r^T of m columns a_r with n elements has the non-zero eigenvalues of the m x m matrix
(1/b) <a_r, a_s>, and m is hundreds where n is millions (Dangel et al. 2022, "ViViT": there for a list of module types,
here for any module, by falling back on ever more general ways to the same matrix).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from triaccel_ray.layers import Layer
from triaccel_ray.measure.curvature.calls import Call, locate_samples, record_calls
from triaccel_ray.measure.curvature.columns import Backward
from triaccel_ray.measure.curvature.factors import Shape, factor_gram, factorize
from triaccel_ray.measure.curvature.folding import FoldedNorms
from triaccel_ray.measure.curvature.objective import Objective, tensor_cores
from triaccel_ray.measure.curvature.persample import Cotangents, Head, compute_dtype, module_gram, sample_grams
from triaccel_ray.measure.curvature.ways import Structure, Way, find_structure, next_way
from triaccel_ray.out_of_memory import is_out_of_memory


@dataclass(frozen=True, kw_only=True, eq=False)
class Grams:
    """The Gram matrices of all layers."""

    matrices: list[Tensor]
    """For each layer [b q, b q], at least FP32: the inner products of its columns; column c of sample i is i q + c."""
    structure: Structure
    """How they were had; makes the next ones of the same shapes cheaper."""


def layer_grams(objective: Objective, layers: Sequence[Layer], head: Head, known: Structure | None = None) -> Grams:
    """Returns each layer's Gram matrix of the columns that `head` defines.

    One forward pass of all samples and one backward pass, which keeps the gradients with respect to the layers'
    outputs alone, and where it can, those of one layer at a time. From these in the first of the `Way`s that is open.
    Without `known`, one more
    forward pass of a single sample shows where the samples lie in each layer's inputs and outputs, and ways that fail
    give place to the next; with it, what fails raises.

    Raises:
        StructureChangedError: the model did not take the course that is known.
    """
    watched = [objective.model, *(module for layer in layers for module in layer.modules)]
    with FoldedNorms():
        outputs, calls = record_calls(objective.outputs, watched)
    if known is None:
        single = record_calls(objective.sample(0).outputs, watched)[1]
        locate_samples(calls, single, objective.num_samples)
        del single
    else:
        known.place_samples(calls)
    root, cotangents = head(outputs, objective)
    del outputs
    structure = known or find_structure(root, calls, layers, objective.model)
    backward = Backward(
        root=root,
        cotangents=cotangents,
        limit_bytes=objective.chunk_bytes,
        is_batched=structure.batched_columns,
        is_trial=known is None,
    )
    shape, chunk_bytes = (objective.num_samples, len(cotangents)), objective.chunk_bytes
    passes = _Passes(structure, backward, shape, chunk_bytes)
    with tensor_cores() if objective.allow_tf32 else contextlib.nullcontext():
        passes.of_layers(calls)
    left = [layer for layer in layers if passes.ways[layer] is Way.SAMPLES]
    if left:
        passes.grams.update(zip(left, sample_grams(objective, left, head, shape), strict=True))
    found = known or replace(structure, ways=passes.ways, batched_columns=backward.is_batched)
    return Grams(matrices=[passes.grams[layer] for layer in layers], structure=found)


class _Passes:
    """The passes of one measurement, and what they have given so far."""

    def __init__(self, structure: Structure, backward: Backward, shape: tuple[int, int], chunk_bytes: int) -> None:
        """Begins with nothing; `shape` is (b, q)."""
        self.structure, self.backward, self.shape, self.chunk_bytes = structure, backward, shape, chunk_bytes
        self.grams: dict[Layer, Tensor] = {}
        self.ways: dict[Layer, Way] = dict(structure.ways)
        """How each layer is measured; ways that failed are replaced."""

    def of_layers(self, calls: list[Call]) -> None:
        """Adds the matrices of all layers but those to be had sample by sample; empties `calls`."""
        self.grams.update({layer: self._zeros(layer) for layer, way in self.ways.items() if way is Way.NONE})
        whole = self._whole(calls)
        told = [layer for layer, way in self.ways.items() if way in (Way.FACTORS, Way.MODULE)]
        own = {layer: [calls[index] for index in self.structure.own[layer]] for layer in told}
        if not whole and self._can_hand_over(own):
            first = frozenset(calls[index] for index in self.structure.first)
            calls.clear()
            self._by_turns(own, first)
            return
        calls.clear()  # each layer's calls, and what they hold, go with its turn
        groups = list(_groups(own, self.shape[1], 4 * self.chunk_bytes))
        for index, group in enumerate(groups):
            wanted = [call for layer in group for call in own[layer]]
            arrived = self.backward.pull_back(wanted, retain_graph=index + 1 < len(groups))
            del wanted
            for layer in group:
                tensors = {call: arrived.pop(call) for call in own.pop(layer)}
                if self.ways[layer] is Way.FACTORS:
                    self.grams[layer] = self._factored(layer, tensors)
                else:
                    self._by_module(layer, tensors)
        for layer in [layer for layer, way in self.ways.items() if way is Way.MODEL]:
            self._by_module(layer, whole)

    def _can_hand_over(self, own: Mapping[Layer, Sequence[Call]]) -> bool:
        """Returns whether every layer's matrix can be made as soon as its gradients arrive.

        The first measurement of a model is no such case: a layer may turn out to need the whole model's gradients.
        """
        return (
            not self.backward.is_trial
            and len(self.backward.cotangents) == 1
            and all(way in (Way.NONE, Way.FACTORS) for way in self.ways.values())
            and all(len(call.edges) == 1 for calls in own.values() for call in calls)
        )

    def _by_turns(self, own: dict[Layer, list[Call]], first: Collection[Call]) -> None:
        """Adds the matrices of factored layers in the order in which gradients arrive; empties `own`."""
        layer_of = {call: layer for layer, calls in own.items() for call in calls}
        arrived: dict[Layer, dict[Call, list[Tensor | None]]] = {layer: {} for layer in own}

        def take(call: Call, gradient: Tensor) -> None:
            layer = layer_of[call]
            arrived[layer][call] = [gradient]
            if len(arrived[layer]) == len(own[layer]):
                finish(layer)

        def finish(layer: Layer) -> None:
            self.grams[layer] = self._factored(layer, arrived.pop(layer))
            for call in own.pop(layer):
                call.arguments.clear()

        self.backward.hand_over(list(layer_of), first, take)
        for layer in list(own):  # with calls that the loss does not depend on
            finish(layer)

    def _whole(self, calls: Sequence[Call]) -> Cotangents:
        """Returns what arrives at the whole model's outputs, if a layer needs it or may come to need it."""
        asks = (Way.MODEL, Way.MODULE) if self.backward.is_trial else (Way.MODEL,)
        if not self.structure.of_model or not any(way in asks for way in self.ways.values()):
            return {}
        return self.backward.pull_back([calls[index] for index in self.structure.of_model], retain_graph=True)

    def _by_module(self, layer: Layer, tensors: Cotangents) -> None:
        """Differentiates the modules of these calls under `torch.func`; in a trial, notes the next way if that fails.

        Raises:
            Exception: whatever a foreign module raises, if this is no trial.
        """
        reached = {call: gradients for call, gradients in tensors.items() if any(g is not None for g in gradients)}
        try:
            self.grams[layer] = (
                module_gram(layer, reached, self.shape, self.chunk_bytes, check=self.backward.is_trial)
                if reached
                else self._zeros(layer)
            )
        except Exception as error:  # foreign code under a transformation that it need not support
            if is_out_of_memory(error):
                raise
            if not self.backward.is_trial:
                raise
            self.ways[layer] = next_way(self.ways[layer], layer, self.structure.complete_in_model)

    def _factored(self, layer: Layer, tensors: Cotangents) -> Tensor:
        factors = [
            factorize(call, gradient, compute_dtype(layer))
            for call, gradients in tensors.items()
            for gradient in gradients
            if gradient is not None
        ]
        if not factors:
            return self._zeros(layer)
        weight, (b, q) = layer.weights[0], self.shape
        groups = getattr(layer.modules[0], "groups", 1)
        sizes = Shape(b=b, q=q, g=groups, o=weight.shape[0] // groups, k=weight.numel() // weight.shape[0])
        return factor_gram(factors, sizes, self.chunk_bytes)

    def _zeros(self, layer: Layer) -> Tensor:
        size = self.shape[0] * self.shape[1]
        return layer.weights[0].new_zeros(size, size, dtype=compute_dtype(layer))


def _groups(own: Mapping[Layer, Sequence[Call]], q: int, limit_bytes: int) -> Iterator[list[Layer]]:
    """Returns the layers in groups whose output gradients fit `limit_bytes`; in one group if there is one cotangent.

    Each group takes its own backward passes: for many cotangents time is exchanged for memory, while a single one
    asks for no more than training does.
    """
    group: list[Layer] = []
    held_bytes = 0
    for layer, calls in own.items():
        elements = sum(math.prod(shape) for call in calls for shape in call.outputs if shape is not None)
        needed_bytes = q * elements * layer.weights[0].element_size()
        if group and q > 1 and held_bytes + needed_bytes > limit_bytes:
            yield group
            group, held_bytes = [], 0
        group.append(layer)
        held_bytes += needed_bytes
    if group:
        yield group
