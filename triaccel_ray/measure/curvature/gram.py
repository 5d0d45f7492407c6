"""The methods fisher and ggn: each layer's Gram matrix of backpropagated columns, from chunks of samples.

A block (1/b) sum_r a_r a_r^T of m columns a_r with n elements has the non-zero eigenvalues of the m x m matrix
(1/b) <a_r, a_s>. Here m is in the hundreds and n in the millions (Dangel et al. 2022, "ViViT"). ViViT supports a list
of module types; this code supports any module, with slower and more general ways to the same matrix as fallbacks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from triaccel_ray.cuda.out_of_memory import first_line, is_out_of_memory
from triaccel_ray.measure.curvature.calls import (
    Strategy,
    Structure,
    StructureChangedError,
    find_structure,
    linear_maps,
    record_calls,
)
from triaccel_ray.measure.curvature.columns import (
    Part,
    alone,
    factored_columns,
    fast,
    joined,
    layer_factors,
    model_columns,
    require_replaceable,
    sample_columns,
)
from triaccel_ray.measure.curvature.factors import Shape, compute_dtype, factor_gram, factorize, slices
from triaccel_ray.measure.curvature.objective import (
    FoldedNorms,
    Head,
    Method,
    Objective,
    fisher_head,
    ggn_head,
    pull_back,
)
from triaccel_ray.measure.curvature.spectrum import CurvatureEstimate, gradient_noise, reduce_matrices
from triaccel_ray.model.layers import Layer

_MAX_BATCHED_ORDER = 512
"""Largest order at which the matrices of all layers are reduced at once; larger ones go one by one to save memory."""


class GramMethod(Method):
    """Measures fisher or ggn curvature by Gram matrices, passing the samples in chunks."""

    def __init__(self, layers: Sequence[Layer], method: Literal["fisher", "ggn"], top_k: int) -> None:
        self._layers, self._top_k = tuple(layers), top_k
        self._head: Head = fisher_head if method == "fisher" else ggn_head

    def measure(
        self, objective: Objective, generator: torch.Generator, num_iterations: int | None = None
    ) -> CurvatureEstimate:
        """Returns the reduced Gram matrices; explores the model first if its structure is unknown.

        Raises:
            StructureChangedError: the forward pass differs from the known structure.
            Exception: any error of a module that no longer works with `torch.func`.
        """
        if (structure := self.structure) is None:
            structure = self.structure = explore_structure(objective, self._layers, self._head)
            try:
                return self._measure(objective, structure)
            except StructureChangedError as error:
                reason = f"the calls that the model makes depend on its samples: {error}"
            structure = self.structure = structure.by_samples(self._layers, reason, varies=True)
        return self._measure(objective, structure)

    def num_passes(self, objective: Objective, num_iterations: int | None = None) -> int:
        """Returns the number of passes of the model in a measurement with the known structure."""
        assert self.structure is not None
        return len(list(_passes(objective, self.structure))) * len(objective.parts())

    def _measure(self, objective: Objective, structure: Structure) -> CurvatureEstimate:
        b, is_fisher = objective.num_samples, self._head is fisher_head
        num_columns = b * structure.num_columns
        total: Tensor | None = None
        found: dict[Layer, Tensor] = {}
        for layer, gram in layer_grams(objective, self._head, structure):
            found[layer] = gram if num_columns <= _MAX_BATCHED_ORDER else reduce_matrices([gram], b, self._top_k)
            if is_fisher:
                total = gram if total is None else total + gram.to(total)
        grams = [found[layer] for layer in self._layers]
        if num_columns <= _MAX_BATCHED_ORDER:
            matrices = reduce_matrices(grams, b, self._top_k)
        else:
            matrices = torch.cat([gram.to(grams[0].device) for gram in grams])
        by_samples = [layer.name for layer in structure.layers_by(Strategy.SAMPLES)]
        self.not_capturable_because = ""
        if by_samples and (structure.varies or structure.num_columns > 1):
            self.not_capturable_because = f"layers {', '.join(by_samples)} take one pass of the model per sample"
        return CurvatureEstimate(
            matrices=matrices,
            counts=tuple(min(num_columns, layer.num_elements, self._top_k) for layer in self._layers),
            noise=None if total is None else gradient_noise(total),
            fallbacks=dict.fromkeys(by_samples, structure.slow_because),
        )


def explore_structure(objective: Objective, layers: Sequence[Layer], head: Head) -> Structure:
    """Returns the structure of the forward pass, from runs of two samples and of one.

    Raises:
        ValueError: the model uses reentrant checkpointing, which hides a part of the graph.
    """
    two = replace(objective.part(slice(0, 2)), limits=replace(objective.limits, chunk_samples=None))
    one, watched = two.part(slice(0, 1)), linear_maps(layers)
    with FoldedNorms():
        single = [call.without_graph() for call in record_calls(one.outputs, watched)[1]]
        outputs, calls = record_calls(two.outputs, watched)
    root, cotangents = head(outputs, two)
    structure = find_structure(root, calls, single, layers, len(cotangents))
    by_model = structure.layers_by(Strategy.MODEL)
    edges = [call.edge for call in calls if call.edge is not None]
    if len(cotangents) > 1 and edges:
        try:
            pull_back(root, cotangents[:2], edges, step=2)
        except Exception as error:  # an operation without a batching rule may raise anything
            if is_out_of_memory(error):
                raise
            structure = replace(structure, batched_columns=False)
    del outputs, calls, edges, root, cotangents
    if not by_model:
        return structure
    try:
        require_replaceable(one, head, by_model)
        model_columns(one, head, [(layer, slice(0, 1)) for layer in by_model], batched=structure.batched_columns)
    except Exception as error:  # code that does not support `torch.func` may raise anything
        if is_out_of_memory(error):
            raise
        return structure.by_samples(by_model, f"torch.func cannot run the model: {first_line(error)}")
    return structure


def layer_grams(objective: Objective, head: Head, structure: Structure) -> Iterator[tuple[Layer, Tensor]]:
    """Yields each layer's Gram matrix [b q, b q] of the columns that `head` defines, at least FP32.

    The index is i q + c for column c of sample i. If samples pass in chunks, each chunk's factors or columns of a layer
    are kept, whichever take fewer bytes. If all of them exceed `kept_bytes`, the passes are repeated for the next
    layers, or for the next part of a layer's columns. So time grows with the bytes, not with pairs of chunks.

    Raises:
        StructureChangedError: the forward pass differs from the known structure.
    """
    b, q = objective.num_samples, structure.num_columns
    for layer in structure.layers_by(Strategy.NONE):
        yield layer, layer.weights[0].new_zeros(b * q, b * q, dtype=compute_dtype(layer))
    columns_by: dict[Strategy, ColumnsOf] = {
        Strategy.FACTORS: partial(factored_columns, structure=structure),
        Strategy.MODEL: partial(model_columns, batched=structure.batched_columns),
        Strategy.SAMPLES: sample_columns,
    }
    sums: dict[Layer, Tensor] = {}
    for each in _passes(objective, structure):
        if each.as_factors:
            yield from _grams_of_factors(objective, head, structure, [unit.layer for unit in each.units])
        else:
            yield from _grams_of_columns(objective, head, columns_by[each.strategy], each.units, sums)


ColumnsOf = Callable[[Objective, Head, Sequence[Part]], list[Tensor]]


@dataclass(frozen=True, eq=False)
class _Unit:
    """Columns of one layer that are collected together."""

    layer: Layer
    elements: slice
    """Slice of them: rows of the weight in each group for a factored layer, elements of the weights for any other."""
    num_bytes: int
    """Bytes kept of them."""
    is_last: bool = True
    """Whether they are the layer's last."""

    @property
    def part(self) -> Part:
        """The layer and the slice."""
        return self.layer, self.elements


@dataclass(frozen=True, eq=False)
class _Pass:
    """One pass over all chunks, and the units that it collects."""

    strategy: Strategy
    units: list[_Unit]
    as_factors: bool = False
    """Whether it collects the factors of whole layers in place of columns."""


def _passes(objective: Objective, structure: Structure) -> Iterator[_Pass]:
    """Yields the passes over the chunks: each keeps at most `kept_bytes` of all samples, or a single unit."""
    factored, kept_bytes = list(_factored_units(objective, structure)), objective.limits.kept_bytes
    for group in _groups(factored, kept_bytes):
        yield _Pass(Strategy.FACTORS, group, as_factors=True)
    done = {unit.layer for unit in factored}
    for strategy in (Strategy.FACTORS, Strategy.MODEL, Strategy.SAMPLES):
        layers = [layer for layer in structure.layers_by(strategy) if layer not in done]
        units = [unit for layer in layers for unit in _units(layer, objective, structure)]
        for group in _groups(units, kept_bytes):
            yield _Pass(strategy, group)


def _groups(units: Sequence[_Unit], kept_bytes: int) -> Iterator[list[_Unit]]:
    group: list[_Unit] = []
    for unit in units:
        if group and sum(each.num_bytes for each in group) + unit.num_bytes > kept_bytes:
            yield group
            group = []
        group.append(unit)
    if group:
        yield group


def _units(layer: Layer, objective: Objective, structure: Structure) -> Iterator[_Unit]:
    """Yields a layer's columns, split into parts that fit `kept_bytes`."""
    b, q = objective.num_samples, structure.num_columns
    is_factored = structure.strategies[layer] is Strategy.FACTORS
    num_slices = Shape.of(layer, b, q).o if is_factored else layer.num_elements
    slice_bytes = b * q * compute_dtype(layer).itemsize * layer.num_elements // num_slices
    for some in slices(num_slices, objective.limits.kept_bytes // slice_bytes):
        yield _Unit(layer, some, (some.stop - some.start) * slice_bytes, is_last=some.stop == num_slices)


def _factored_units(objective: Objective, structure: Structure) -> Iterator[_Unit]:
    """Yields the layers that keep factors, not columns: in chunks, only if factors are smaller and fit `kept_bytes`."""
    b, q, is_whole = objective.num_samples, structure.num_columns, len(objective.parts()) == 1
    for layer in structure.layers_by(Strategy.FACTORS):
        calls, itemsize = [structure.calls[index] for index in structure.own[layer]], compute_dtype(layer).itemsize
        inputs = 0 if is_whole else sum(math.prod(call.argument) for call in calls)  # a single chunk's graph has them
        num_bytes = itemsize * b * (inputs + q * sum(math.prod(call.output) for call in calls))
        if is_whole or num_bytes <= min(objective.limits.kept_bytes, itemsize * b * q * layer.num_elements):
            # A single cotangent takes no more memory than training does.
            yield _Unit(layer, slice(None), 0 if is_whole and q == 1 else num_bytes)


def _grams_of_columns(
    objective: Objective, head: Head, columns_of: ColumnsOf, units: Sequence[_Unit], sums: dict[Layer, Tensor]
) -> Iterator[tuple[Layer, Tensor]]:
    """Yields the Gram matrices that these units complete; `sums` holds those of layers with units still to come."""
    kept: list[list[Tensor]] = [[] for _ in units]
    for part in objective.parts():
        for of_unit, columns in zip(kept, columns_of(part, head, [unit.part for unit in units]), strict=True):
            of_unit.append(columns)
    for unit in units:
        columns = joined(kept.pop(0))
        with fast(objective):
            gram = columns @ columns.T
        sums[unit.layer] = sums[unit.layer] + gram if unit.layer in sums else gram
        if unit.is_last:
            yield unit.layer, sums.pop(unit.layer)


def _grams_of_factors(
    objective: Objective, head: Head, structure: Structure, layers: Sequence[Layer]
) -> Iterator[tuple[Layer, Tensor]]:
    """Yields the Gram matrices of whole layers from the factors of all samples, collected chunk by chunk."""
    b, q, parts = objective.num_samples, structure.num_columns, objective.parts()
    kept: dict[Layer, list[list[tuple[nn.Module, Tensor, Tensor]]]] = {layer: [] for layer in layers}
    for part in parts:
        found = layer_factors(part, head, structure, layers)
        for layer in layers:
            calls = found.pop(layer)
            kept[layer].append([(m, alone(x), dy) for m, x, dy in calls] if len(parts) > 1 else calls)
            del calls
    for layer in layers:
        chunks, dtype = kept.pop(layer), compute_dtype(layer)
        if not chunks[0]:
            yield layer, layer.weights[0].new_zeros(b * q, b * q, dtype=dtype)
            continue
        with fast(objective):
            factors = [
                factorize(modules[0], joined(inputs), joined(gradients), dtype)
                for modules, inputs, gradients in (zip(*call, strict=True) for call in zip(*chunks, strict=True))
            ]
            del chunks
            gram = factor_gram(factors, Shape.of(layer, b, q), objective.limits.block_bytes)
            del factors
        yield layer, gram
