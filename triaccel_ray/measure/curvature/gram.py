"""fisher and ggn: each layer's Gram matrix of backpropagated columns, from chunks of samples.

A block (1/b) sum_r a_r a_r^T of m columns a_r with n elements has the non-zero eigenvalues of the m x m matrix
(1/b) <a_r, a_s>, and m is hundreds where n is millions (Dangel et al. 2022, "ViViT": there for a list of module types,
here for any module, by falling back on ever more general ways to the same matrix).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from triaccel_ray.cuda.out_of_memory import first_line, is_out_of_memory
from triaccel_ray.measure.curvature.calls import (
    Call,
    Strategy,
    Structure,
    StructureChangedError,
    find_structure,
    locate_samples,
    record_calls,
)
from triaccel_ray.measure.curvature.factors import (
    Shape,
    compute_dtype,
    factor_columns,
    factor_gram,
    factorize,
    module_columns,
    require_replaceable,
    sample_columns,
)
from triaccel_ray.measure.curvature.objective import (
    FoldedNorms,
    Head,
    Objective,
    fisher_head,
    ggn_head,
    pull_back,
    tensor_cores,
)
from triaccel_ray.measure.curvature.spectrum import SpectrumShape, gradient_noise, reduce_matrices
from triaccel_ray.model.layers import Layer

_TOGETHER = 512
"""Order up to which the matrices of all layers are reduced at once; larger ones one by one, for their memory."""


class GramMethod:
    """Forward and backward passes of the chunks of samples, and the Gram matrices that they allow."""

    vectors: list[Tensor] | None = None
    """It goes on from none."""
    kept_bytes: int | None = None
    """Whatever the limits say."""

    def __init__(self, layers: Sequence[Layer], method: Literal["fisher", "ggn"], top_k: int) -> None:
        self._layers, self._top_k = tuple(layers), top_k
        self._head: Head = fisher_head if method == "fisher" else ggn_head
        self._results: tuple[Tensor, ...] = ()
        self._shape: SpectrumShape | None = None
        self.structure: Structure | None = None
        """What `prepare_anew` found; None before it."""

    @property
    def fallbacks(self) -> Mapping[str, str]:
        """Names of the layers that take one pass of the whole model per sample, and why."""
        return {} if self.structure is None else self.structure.fallbacks

    def begin(self, generator: torch.Generator) -> int:
        """Returns how many iterations follow: none."""
        return 0

    def prepare_anew(self, objective: Objective) -> None:
        """Finds out how each layer can be measured, and measures."""
        self.structure = explore_structure(objective, self._layers, self._head)
        try:
            self.prepare(objective)
        except StructureChangedError as error:
            reason = f"the course of the model depends on its samples: {error}"
        else:
            return
        self.structure = self.structure.by_samples(reason)
        self.prepare(objective)

    def prepare(self, objective: Objective) -> None:
        """Measures everything by the structure that is known.

        Raises:
            StructureChangedError: the model takes another course.
            Exception: whatever a module raises that works with `torch.func` no longer.
        """
        assert self.structure is not None
        b, is_fisher = objective.num_samples, self._head is fisher_head
        num_columns = b * self.structure.num_columns
        total: Tensor | None = None
        found: dict[Layer, Tensor] = {}
        for layer, gram in layer_grams(objective, self._layers, self._head, self.structure):
            found[layer] = gram if num_columns <= _TOGETHER else reduce_matrices([gram], b, self._top_k)
            if is_fisher:
                total = gram if total is None else total + gram.to(total)
        if num_columns <= _TOGETHER:
            matrices = reduce_matrices([found[layer] for layer in self._layers], b, self._top_k)
        else:
            matrices = torch.cat([found[layer].to(found[self._layers[0]].device) for layer in self._layers])
        self._results = (matrices, *(() if total is None else gradient_noise(total)))
        self._shape = SpectrumShape(
            orders=(matrices.shape[1],) * len(self._layers),
            counts=tuple(min(num_columns, layer.num_elements, self._top_k) for layer in self._layers),
            top_k=self._top_k,
        )

    def advance(self) -> None:
        """Does nothing: there is no iteration."""

    def abandon(self) -> None:
        """Drops results that are not needed."""
        self._results = ()

    def finish(self) -> tuple[tuple[Tensor, ...], SpectrumShape]:
        """Returns the reduced matrices and, for fisher, the two moments of the gradient; lets go of everything."""
        assert self._shape is not None
        results, self._results = self._results, ()
        return results, self._shape


class _UnsupportedError(Exception):
    """Strategies that turned out not to work: of some layers, or all columns side by side."""

    def __init__(self, layers: Mapping[Layer, str], *, columns: bool = False) -> None:
        super().__init__()
        self.layers, self.columns = dict(layers), columns


def explore_structure(objective: Objective, layers: Sequence[Layer], head: Head) -> Structure:
    """Returns the structure of the model's course, found with two samples and one, and strategies that work with two.

    Raises:
        ValueError: a part of the graph is hidden in a reentrant checkpoint.
    """
    two = replace(objective.part(slice(0, 2)), limits=replace(objective.limits, chunk_samples=None))
    watched = _watched(objective.model, layers)
    with FoldedNorms():
        outputs, calls = record_calls(two.outputs, watched)
        single = record_calls(two.part(slice(0, 1)).outputs, watched)[1]
    locate_samples(calls, single, 2)
    root, cotangents = head(outputs, two)
    structure = find_structure(root, calls, layers, objective.model, len(cotangents))
    del outputs, calls, single, root, cotangents
    while True:
        try:
            for _ in layer_grams(two, layers, head, structure, is_trial=True):
                pass
        except _UnsupportedError as failed:
            structure = structure.without(failed.layers)
            structure = replace(structure, batched_columns=structure.batched_columns and not failed.columns)
        else:
            return structure


def layer_grams(
    objective: Objective, layers: Sequence[Layer], head: Head, structure: Structure, *, is_trial: bool = False
) -> Iterator[tuple[Layer, Tensor]]:
    """Yields each layer's Gram matrix [b q, b q] of the columns that `head` defines, at least FP32.

    The index is i q + c for column c of sample i. All samples at once take one forward and one backward pass. In
    chunks, what a layer's matrix is made of is kept from every chunk: the factors of its columns or the columns
    themselves, whichever are fewer bytes. Where they exceed `kept_bytes` altogether, the passes are made again for the
    next layers, or for the next part of a layer's columns. So time grows with the bytes, not with pairs of chunks.

    Raises:
        StructureChangedError: the model did not take the course that is known.
    """
    b, q = objective.num_samples, structure.num_columns
    parts = objective.parts()
    grams: dict[Layer, Tensor] = {}
    groups = list(_groups(objective, structure, is_whole=len(parts) == 1))
    left = [unit.layer for group in groups for unit in group]
    for layer in layers:
        if structure.strategies[layer] is Strategy.NONE:
            yield layer, layer.weights[0].new_zeros(b * q, b * q, dtype=compute_dtype(layer))
    one: _Pass | None = None
    for index, group in enumerate(groups):
        kept: list[list[_Kept]] = [[] for _ in group]
        for part in parts:
            again = len(parts) == 1 and index + 1 < len(groups)
            one = one or _Pass(part, head, structure, group if len(parts) > 1 else None, is_trial=is_trial)
            for of_unit, found in zip(kept, one.collect(group, retain_graph=again), strict=True):
                of_unit.append(found)
            one = one if again else None  # before the next pass begins
        for unit in group:
            with _fast(objective):
                gram = _gram(unit.layer, kept.pop(0), b, q, objective.limits.block_bytes)
            grams[unit.layer] = gram if unit.layer not in grams else grams[unit.layer] + gram
            left.remove(unit.layer)
            if unit.layer not in left:
                yield unit.layer, grams.pop(unit.layer)


@dataclass(frozen=True, eq=False)
class _Unit:
    """Columns of one layer that are collected together."""

    layer: Layer
    elements: slice | None = None
    """Which of them: rows of a factored layer's weight in each of its groups, elements of any other; None: all, as
    factors."""


_Kept = Tensor | tuple[tuple[nn.Module, Tensor, Tensor], ...]
"""Of one chunk: columns [s q, elements], or what they are made of: for each call that was reached its module, input
[s, ...] and output gradient [s, q, ...]."""


def _groups(objective: Objective, structure: Structure, *, is_whole: bool) -> Iterator[list[_Unit]]:
    """Yields what is collected in the same passes: no more than `kept_bytes` of all samples, or a single unit."""
    group: list[_Unit] = []
    held_bytes = 0
    for layer in structure.strategies:
        for unit, num_bytes in _units(layer, objective, structure, is_whole=is_whole):
            if group and held_bytes + num_bytes > objective.limits.kept_bytes:
                yield group
                group, held_bytes = [], 0
            group.append(unit)
            held_bytes += num_bytes
    if group:
        yield group


def _units(layer: Layer, objective: Objective, structure: Structure, *, is_whole: bool) -> Iterator[tuple[_Unit, int]]:
    """Yields a layer's units with the bytes that are kept of them."""
    strategy = structure.strategies[layer]
    if strategy is Strategy.NONE:
        return
    b, q, limit = objective.num_samples, structure.num_columns, objective.limits.kept_bytes
    columns, itemsize = b * q, compute_dtype(layer).itemsize
    num_slices, slice_bytes = layer.num_elements, columns * itemsize
    if strategy is Strategy.FACTORS:
        calls = [structure.calls[index] for index in structure.own[layer]]
        inputs = 0 if is_whole else sum(math.prod(call.arguments[0]) for call in calls)  # which the graph holds then
        outputs = sum(math.prod(call.outputs[0]) for call in calls)
        factor_bytes = itemsize * (b * inputs + columns * outputs)
        if is_whole or factor_bytes <= min(limit, slice_bytes * layer.num_elements):
            # One cotangent asks for no more than training does.
            yield _Unit(layer), 0 if is_whole and q == 1 else factor_bytes
            return
        num_slices = _shape(layer, b, q).o
        slice_bytes *= layer.num_elements // num_slices
    step = max(1, limit // slice_bytes)
    for start in range(0, num_slices, step):
        stop = min(start + step, num_slices)
        yield _Unit(layer, slice(start, stop)), (stop - start) * slice_bytes


class _Pass:
    """One forward pass of some samples, and what backward passes collect of it."""

    def __init__(
        self, objective: Objective, head: Head, structure: Structure, group: Sequence[_Unit] | None, *, is_trial: bool
    ) -> None:
        """Runs the model; keeps the calls that `group` asks for, all calls when None."""
        self._objective, self._head, self._structure, self._is_trial = objective, head, structure, is_trial
        self._is_chunk = group is not None
        wanted = structure.strategies if group is None else {unit.layer for unit in group}
        needed = {index for layer in wanted for index in structure.calls_of(layer)}
        self._calls: dict[int, Call] = {}
        if not needed:
            return
        with FoldedNorms():
            outputs, calls = record_calls(objective.outputs, _watched(objective.model, structure.strategies))
        structure.place_samples(calls, objective.num_samples)
        self._calls = {index: call for index, call in enumerate(calls) if index in needed}
        self._root, self._cotangents = head(outputs, objective)

    def collect(self, group: Sequence[_Unit], *, retain_graph: bool) -> list[_Kept]:
        """Returns what is kept of each unit; without `retain_graph` for the last time.

        Raises:
            Exception: whatever a foreign module raises; in a trial, a `_UnsupportedError` that says what does not work.
        """
        calls = {index: self._calls[index] for unit in group for index in self._structure.calls_of(unit.layer)}
        arrived: dict[int, list[Tensor | None]] = {}
        failed: dict[Layer, str] = {}
        found: dict[_Unit, _Kept] = {}
        with _fast(self._objective):
            if calls:
                arrived = self._pull_back(calls, retain_graph=retain_graph)
            for unit in group:
                try:
                    if self._structure.strategies[unit.layer] is not Strategy.SAMPLES:
                        found[unit] = self._kept(unit, arrived)
                except Exception as error:  # foreign code under a transformation that it need not support
                    if is_out_of_memory(error) or not self._is_trial:
                        raise
                    failed[unit.layer] = f"torch.func cannot run its module or the model: {first_line(error)}"
        if failed:
            raise _UnsupportedError(failed)
        left = list(dict.fromkeys(unit.layer for unit in group if unit not in found))
        columns = dict(zip(left, self._by_samples(left), strict=True)) if left else {}
        return [found[unit] if unit in found else columns[unit.layer][:, unit.elements] for unit in group]

    def _kept(self, unit: _Unit, arrived: Mapping[int, list[Tensor | None]]) -> _Kept:
        layer, limits = unit.layer, self._objective.limits
        s, q = self._objective.num_samples, self._structure.num_columns
        gradients = {index: arrived[index] for index in self._structure.calls_of(layer)}
        if self._structure.strategies[layer] is Strategy.FACTORS:
            calls = tuple(
                (self._calls[index].module, self._input(index), gradient)
                for index, (gradient,) in gradients.items()
                if gradient is not None
            )
            if unit.elements is None or not calls:
                return calls
            factors = [factorize(module, x, dy, compute_dtype(layer)) for module, x, dy in calls]
            return factor_columns(factors, slice(0, s), unit.elements, _shape(layer, s, q))
        reached = {
            self._calls[index]: tensors for index, tensors in gradients.items() if any(t is not None for t in tensors)
        }
        if not reached:
            return ()
        if self._is_trial:
            for call in reached:
                require_replaceable(layer, call)
        return module_columns(layer, reached, s, unit.elements, limits.block_bytes)

    def _input(self, index: int) -> Tensor:
        """Returns what the call received, samples first; alone, where it is kept beyond this pass."""
        call = self._calls[index]
        given: Tensor = call.args[0].detach().movedim(call.argument_dims[0], 0)
        is_part_of_more = self._is_chunk and given.untyped_storage().nbytes() > given.nbytes
        return given.clone() if is_part_of_more else given

    def _by_samples(self, layers: Sequence[Layer]) -> Iterator[Tensor]:
        """Returns the columns [s q, n] of layers from one pass of the whole model per sample: always right."""
        samples = range(self._objective.num_samples)
        rows = [sample_columns(self._objective.part(slice(i, i + 1)), layers, self._head) for i in samples]
        return (torch.cat(of_layer) for of_layer in zip(*rows, strict=True))

    def _pull_back(self, calls: Mapping[int, Call], *, retain_graph: bool) -> dict[int, list[Tensor | None]]:
        """Returns the gradients with respect to each call's outputs, [s, q, ...]; None: it has none."""
        edges = [edge for call in calls.values() for edge in call.edges if edge is not None]
        largest = max(math.prod(shape) for call in calls.values() for shape in call.outputs)
        fitting = self._objective.limits.block_bytes // (largest * self._root.element_size())
        step = max(2, fitting) if self._structure.batched_columns else 1
        try:
            stacks = pull_back(self._root, self._cotangents, edges, step=step, retain_graph=retain_graph)
        except Exception as error:  # an operation may have no batching rule, and raise whatever it likes
            if is_out_of_memory(error) or not (self._is_trial and step > 1 and len(self._cotangents) > 1):
                raise
            raise _UnsupportedError({}, columns=True) from error
        remaining = iter(stacks)
        return {
            index: [
                _samples_first(next(remaining), dim) if edge is not None else None
                for edge, dim in zip(call.edges, call.output_dims, strict=True)
            ]
            for index, call in calls.items()
        }


def _gram(layer: Layer, kept: list[_Kept], b: int, q: int, block_bytes: int) -> Tensor:
    """Returns the Gram matrix [b q, b q] of what was kept of all chunks, in their order."""
    dtype = compute_dtype(layer)
    chunks = [part for part in kept if isinstance(part, tuple)]
    if not chunks:
        columns = torch.cat([part for part in kept if isinstance(part, Tensor)])
        kept.clear()
        return columns @ columns.T
    if not chunks[0]:
        return layer.weights[0].new_zeros(b * q, b * q, dtype=dtype)
    factors = []
    for call in zip(*chunks, strict=True):
        modules, inputs, gradients = zip(*call, strict=True)
        factors.append(factorize(modules[0], _joined(inputs), _joined(gradients), dtype))
    return factor_gram(factors, _shape(layer, b, q), block_bytes)


def _joined(chunks: Sequence[Tensor]) -> Tensor:
    return chunks[0] if len(chunks) == 1 else torch.cat(list(chunks))


def _samples_first(stack: Tensor | None, dim: int | None) -> Tensor | None:
    return None if stack is None or dim is None else stack.movedim(dim + 1, 0)


def _shape(layer: Layer, b: int, q: int) -> Shape:
    """Returns the sizes of a factored layer's columns."""
    weight, groups = layer.weights[0], getattr(layer.modules[0], "groups", 1)
    return Shape(b=b, q=q, g=groups, o=weight.shape[0] // groups, k=weight.numel() // weight.shape[0])


def _watched(model: nn.Module, layers: Iterable[Layer]) -> list[nn.Module]:
    return [model, *(module for layer in layers for module in layer.modules)]


def _fast(objective: Objective) -> contextlib.AbstractContextManager[None]:
    return tensor_cores() if objective.allow_tf32 else contextlib.nullcontext()
