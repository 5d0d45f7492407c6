"""fisher and ggn: each layer's Gram matrix of backpropagated columns, from chunks of samples.

A block (1/b) sum_r a_r a_r^T of m columns a_r with n elements has the non-zero eigenvalues of the m x m matrix
(1/b) <a_r, a_s>, and m is hundreds where n is millions (Dangel et al. 2022, "ViViT": there for a list of module types,
here for any module, by falling back on more general ways to the same matrix).
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
from triaccel_ray.measure.curvature.columns import alone, joined, model_columns, require_replaceable, sample_columns
from triaccel_ray.measure.curvature.factors import Shape, compute_dtype, factor_columns, factor_gram, factorize
from triaccel_ray.measure.curvature.objective import (
    FoldedNorms,
    Head,
    Method,
    Objective,
    fisher_head,
    ggn_head,
    pull_back,
    tensor_cores,
)
from triaccel_ray.measure.curvature.spectrum import CurvatureEstimate, gradient_noise, reduce_matrices
from triaccel_ray.model.layers import Layer

_TOGETHER = 512
"""Order up to which the matrices of all layers are reduced at once; larger ones one by one, for their memory."""


class GramMethod(Method):
    """Forward and backward passes of the chunks of samples, and the Gram matrices that they allow."""

    def __init__(self, layers: Sequence[Layer], method: Literal["fisher", "ggn"], top_k: int) -> None:
        self._layers, self._top_k = tuple(layers), top_k
        self._head: Head = fisher_head if method == "fisher" else ggn_head

    def measure(
        self, objective: Objective, generator: torch.Generator, num_iterations: int | None = None
    ) -> CurvatureEstimate:
        """Returns the reduced Gram matrices, by the structure that is known; where none is, finds out first how.

        Raises:
            StructureChangedError: the model takes another course than the known one.
            Exception: whatever a module raises that works with `torch.func` no longer.
        """
        if (structure := self.structure) is None:
            structure = self.structure = explore_structure(objective, self._layers, self._head)
            try:
                return self._measure(objective, structure)
            except StructureChangedError as error:
                reason = f"the course of the model depends on its samples: {error}"
            structure = self.structure = structure.by_samples(self._layers, reason, varies=True)
        return self._measure(objective, structure)

    def _measure(self, objective: Objective, structure: Structure) -> CurvatureEstimate:
        b, is_fisher = objective.num_samples, self._head is fisher_head
        num_columns = b * structure.num_columns
        total: Tensor | None = None
        found: dict[Layer, Tensor] = {}
        for layer, gram in layer_grams(objective, self._head, structure):
            found[layer] = gram if num_columns <= _TOGETHER else reduce_matrices([gram], b, self._top_k)
            if is_fisher:
                total = gram if total is None else total + gram.to(total)
        matrices = [found[layer] for layer in self._layers]
        by_samples = [layer.name for layer in structure.layers_by(Strategy.SAMPLES)]
        if by_samples and (structure.varies or structure.num_columns > 1):
            self.not_capturable_because = f"layers {', '.join(by_samples)} take one pass of the model per sample"
        else:
            self.not_capturable_because = ""
        return CurvatureEstimate(
            matrices=reduce_matrices(matrices, b, self._top_k)
            if num_columns <= _TOGETHER
            else torch.cat([matrix.to(matrices[0].device) for matrix in matrices]),
            counts=tuple(min(num_columns, layer.num_elements, self._top_k) for layer in self._layers),
            noise=None if total is None else gradient_noise(total),
            fallbacks=dict.fromkeys(by_samples, structure.slow_because),
        )


def explore_structure(objective: Objective, layers: Sequence[Layer], head: Head) -> Structure:
    """Returns the structure of the model's course, found with two samples and one, and strategies that work with two.

    Raises:
        ValueError: a part of the graph is hidden in a reentrant checkpoint.
    """
    two = replace(objective.part(slice(0, 2)), limits=replace(objective.limits, chunk_samples=None))
    watched = linear_maps(layers)
    with FoldedNorms():
        outputs, calls = record_calls(two.outputs, watched)
        single = record_calls(two.part(slice(0, 1)).outputs, watched)[1]
    root, cotangents = head(outputs, two)
    structure = find_structure(root, calls, single, layers, len(cotangents))
    by_model = structure.layers_by(Strategy.MODEL)
    edges = [call.edge for call in calls if call.edge is not None]
    tried = layers
    try:  # foreign code under a transformation that it need not support: it may raise whatever it likes
        if len(cotangents) > 1 and edges:
            pull_back(root, cotangents[:2], edges, step=2)
        del outputs, calls, single, edges, root, cotangents
        tried = by_model
        if by_model:
            require_replaceable(two.part(slice(0, 1)), head, by_model)
            model_columns(two, head, [(layer, slice(0, 1)) for layer in by_model])
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return structure.by_samples(tried, f"torch.func cannot run the model: {first_line(error)}")
    return structure


def layer_grams(objective: Objective, head: Head, structure: Structure) -> Iterator[tuple[Layer, Tensor]]:
    """Yields each layer's Gram matrix [b q, b q] of the columns that `head` defines, at least FP32.

    The index is i q + c for column c of sample i. In chunks, what a layer's matrix is made of is kept from every chunk:
    the factors of its columns or the columns themselves, whichever are fewer bytes. Where they exceed `kept_bytes`
    altogether, the passes are made again for the next layers, or for the next part of a layer's columns. So time grows
    with the bytes, not with pairs of chunks.

    Raises:
        StructureChangedError: the model did not take the course that is known.
    """
    b, q = objective.num_samples, structure.num_columns
    for layer in structure.layers_by(Strategy.NONE):
        yield layer, layer.weights[0].new_zeros(b * q, b * q, dtype=compute_dtype(layer))
    is_whole = len(objective.parts()) == 1
    grams: dict[Layer, Tensor] = {}
    for strategy in (Strategy.FACTORS, Strategy.MODEL, Strategy.SAMPLES):
        units = [
            unit
            for layer in structure.layers_by(strategy)
            for unit in _units(layer, objective, structure, is_whole=is_whole)
        ]
        left = Counter(unit.layer for unit in units)
        for group in _groups(units, objective.limits.kept_bytes):
            for layer, gram in _group_grams(objective, head, structure, strategy, group):
                grams[layer] = gram if layer not in grams else grams[layer] + gram
                left[layer] -= 1
                if not left[layer]:
                    yield layer, grams.pop(layer)


@dataclass(frozen=True, eq=False)
class _Unit:
    """Columns of one layer that are collected together."""

    layer: Layer
    elements: slice | None
    """Which of them: rows of a factored layer's weight in each of its groups, elements of any other; None: all, as
    factors."""
    num_bytes: int
    """What is kept of them."""


_Kept = Tensor | tuple[tuple[nn.Module, Tensor, Tensor], ...]
"""Of one chunk: columns [s q, elements], or what they are made of: for each call that was reached its module, input
[s, ...] and output gradient [s, q, ...]."""


def _groups(units: Sequence[_Unit], kept_bytes: int) -> Iterator[list[_Unit]]:
    """Yields what is collected in the same passes: no more than `kept_bytes` of all samples, or a single unit."""
    group: list[_Unit] = []
    for unit in units:
        if group and sum(each.num_bytes for each in group) + unit.num_bytes > kept_bytes:
            yield group
            group = []
        group.append(unit)
    if group:
        yield group


def _units(layer: Layer, objective: Objective, structure: Structure, *, is_whole: bool) -> Iterator[_Unit]:
    """Yields a layer's columns, in parts where they are many."""
    b, q, limit = objective.num_samples, structure.num_columns, objective.limits.kept_bytes
    columns, itemsize = b * q, compute_dtype(layer).itemsize
    num_slices, slice_bytes = layer.num_elements, columns * itemsize
    if structure.strategies[layer] is Strategy.FACTORS:
        calls = [structure.calls[index] for index in structure.own[layer]]
        inputs = 0 if is_whole else sum(math.prod(call.argument) for call in calls)  # which the graph holds then
        factor_bytes = itemsize * (b * inputs + columns * sum(math.prod(call.output) for call in calls))
        if is_whole or factor_bytes <= min(limit, slice_bytes * layer.num_elements):
            # One cotangent asks for no more than training does.
            yield _Unit(layer, None, 0 if is_whole and q == 1 else factor_bytes)
            return
        num_slices = Shape.of(layer, b, q).o
        slice_bytes *= layer.num_elements // num_slices
    step = max(1, limit // slice_bytes)
    for start in range(0, num_slices, step):
        stop = min(start + step, num_slices)
        yield _Unit(layer, slice(start, stop), (stop - start) * slice_bytes)


def _group_grams(
    objective: Objective, head: Head, structure: Structure, strategy: Strategy, group: Sequence[_Unit]
) -> Iterator[tuple[Layer, Tensor]]:
    """Yields the Gram matrix of each unit of a group, whose layers are measured by one strategy."""
    kept: list[list[_Kept]] = [[] for _ in group]
    wanted = [(unit.layer, unit.elements or slice(None)) for unit in group]
    for part in objective.parts():
        found: Sequence[_Kept]
        if strategy is Strategy.FACTORS:
            found = _collect(part, head, structure, group, is_chunk=part is not objective)
        elif strategy is Strategy.MODEL:
            found = model_columns(part, head, wanted)
        else:
            found = sample_columns(part, head, wanted)
        for of_unit, one in zip(kept, found, strict=True):
            of_unit.append(one)
        del found
    for unit in group:
        with _fast(objective):
            gram = _gram(unit.layer, kept.pop(0), objective, structure.num_columns)
        yield unit.layer, gram


def _collect(
    part: Objective, head: Head, structure: Structure, group: Sequence[_Unit], *, is_chunk: bool
) -> list[_Kept]:
    """Returns what is kept of each unit of factored layers, from one forward and one backward pass of a chunk."""
    s, q = part.num_samples, structure.num_columns
    with FoldedNorms():
        outputs, calls = record_calls(part.outputs, linear_maps(list(structure.strategies)))
    structure.require_same(calls, s)
    wanted = sorted({index for unit in group for index in structure.own[unit.layer]})
    edges = [edge for index in wanted if (edge := calls[index].edge) is not None]
    root, cotangents = head(outputs, part)
    largest = max(math.prod(calls[index].output) for index in wanted)
    fitting = part.limits.block_bytes // (largest * root.element_size())
    factors: dict[int, tuple[nn.Module, Tensor, Tensor]] = {}
    with _fast(part):
        stacks = pull_back(root, cotangents, edges, step=max(2, fitting))
        for index, stack in zip(wanted, stacks, strict=True):
            known, argument = structure.calls[index], calls[index].argument
            if stack is None:
                continue
            assert argument is not None
            assert known.argument_dim is not None
            assert known.output_dim is not None
            given = argument.detach().movedim(known.argument_dim, 0)
            factors[index] = known.module, alone(given) if is_chunk else given, stack.movedim(known.output_dim + 1, 0)
        found: list[_Kept] = []
        for unit in group:
            of_calls = tuple(factors[index] for index in structure.own[unit.layer] if index in factors)
            if unit.elements is None or not of_calls:
                found.append(of_calls)
                continue
            made = [factorize(module, x, dy, compute_dtype(unit.layer)) for module, x, dy in of_calls]
            found.append(factor_columns(made, slice(0, s), unit.elements, Shape.of(unit.layer, s, q)))
    return found


def _gram(layer: Layer, kept: list[_Kept], objective: Objective, q: int) -> Tensor:
    """Returns the Gram matrix [b q, b q] of what was kept of all chunks, in their order."""
    dtype, b = compute_dtype(layer), objective.num_samples
    chunks = [part for part in kept if isinstance(part, tuple)]
    if not chunks:
        columns = joined([part for part in kept if isinstance(part, Tensor)])
        kept.clear()
        return columns @ columns.T
    if not chunks[0]:
        return layer.weights[0].new_zeros(b * q, b * q, dtype=dtype)
    factors = []
    for call in zip(*chunks, strict=True):
        modules, inputs, gradients = zip(*call, strict=True)
        factors.append(factorize(modules[0], joined(inputs), joined(gradients), dtype))
    return factor_gram(factors, Shape.of(layer, b, q), objective.limits.block_bytes)


def _fast(objective: Objective) -> contextlib.AbstractContextManager[None]:
    return tensor_cores() if objective.allow_tf32 else contextlib.nullcontext()
