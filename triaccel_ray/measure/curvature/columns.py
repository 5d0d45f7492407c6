"""Backward passes that keep what arrives at the layers' outputs: all columns side by side where the model allows it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from triaccel_ray.measure.curvature.calls import Call
from triaccel_ray.out_of_memory import is_out_of_memory


@dataclass(eq=False)
class Backward:
    """The cotangents of one pass, and how they are pulled back."""

    root: Tensor
    """What is differentiated."""
    cotangents: Sequence[Tensor | None]
    """q of them; a single None says that the root is a scalar."""
    limit_bytes: int
    """Bytes that the columns of one activation may take while they pass."""
    is_batched: bool
    """Whether columns pass side by side; set to False when that has failed."""
    is_trial: bool
    """Whether to find that out: what fails raises, otherwise."""

    def pull_back(self, calls: Sequence[Call], *, retain_graph: bool) -> dict[Call, list[Tensor | None]]:
        """Returns the gradients with respect to each call's outputs under each cotangent, [b, q, ...]; None: has none.

        Samples do not see each other, so that the columns of one sample are those of a larger batch: side by side they
        fill a device that a batch of 32 leaves idle.
        """
        edges = [edge for call in calls for edge in call.edges if edge is not None]
        stacks: list[Tensor | None] = [None] * len(edges)
        if edges and len(self.cotangents) == 1:
            stacks = [None if g is None else g.unsqueeze(0) for g in self._one_by_one(edges, 0, retain_graph)]
        elif edges:
            stacks = self._stacked(edges, calls, retain_graph)
        remaining = iter(stacks)
        return {
            call: [
                _samples_first(next(remaining), dim) if edge is not None else None
                for edge, dim in zip(call.edges, call.output_dims, strict=True)
            ]
            for call in calls
        }

    def hand_over(self, calls: Sequence[Call], first: Collection[Call], take: Callable[[Call, Tensor], None]) -> None:
        """Pulls the one cotangent back once, and gives `take` the gradient [b, 1, ...] of each call as it arrives.

        So that one layer's gradient is held at a time, and what the forward pass kept goes as the pass comes by. A call
        that the root does not depend on is not heard of.

        Args:
            calls: with one output each.
            first: those of them behind which, seen from the root, there is no other: the pass ends there.
            take: called in the course of the backward pass, by the thread that runs it.
        """

        def arrived(call: Call, gradient: Tensor | None) -> None:
            stack = None if gradient is None else _samples_first(gradient.unsqueeze(0), call.output_dims[0])
            if stack is not None:
                take(call, stack)

        def hook(call: Call, index: int) -> Callable[[tuple[Tensor | None, ...]], None]:
            return lambda gradients: arrived(call, gradients[index])

        edges = [(call, edge) for call in calls for edge in call.edges if edge is not None]
        handles = [e.node.register_prehook(hook(call, e.output_nr)) for call, e in edges if call not in first]
        ends = [(call, edge) for call, edge in edges if call in first]
        try:
            gradients = torch.autograd.grad(
                self.root, [edge for _, edge in ends], self.cotangents[0], allow_unused=True
            )
        finally:
            for handle in handles:
                handle.remove()
        for (call, _), gradient in zip(ends, gradients, strict=True):
            arrived(call, gradient)

    def _stacked(self, edges: list[GradientEdge], calls: Sequence[Call], retain_graph: bool) -> list[Tensor | None]:
        q = len(self.cotangents)
        if self.is_batched:
            largest = max(math.prod(shape) for call in calls for shape in call.outputs if shape is not None)
            step = max(1, min(q, self.limit_bytes // (largest * self.root.element_size())))
            try:
                return self._side_by_side(edges, step, retain_graph or self.is_trial)
            except Exception as error:  # an operation may have no batching rule, and raise whatever it likes
                if is_out_of_memory(error):
                    raise
                if not self.is_trial:
                    raise
                self.is_batched = False
        stacks: list[Tensor | None] = [None] * len(edges)
        for c in range(q):
            _store(stacks, self._one_by_one(edges, c, retain_graph or c + 1 < q), slice(c, c + 1), q)
        return stacks

    def _one_by_one(self, edges: list[GradientEdge], c: int, retain_graph: bool) -> Sequence[Tensor | None]:
        cotangent = self.cotangents[c]
        return torch.autograd.grad(self.root, edges, cotangent, retain_graph=retain_graph, allow_unused=True)

    def _side_by_side(self, edges: list[GradientEdge], step: int, retain_graph: bool) -> list[Tensor | None]:
        q = len(self.cotangents)
        cotangents = torch.stack([c for c in self.cotangents if c is not None])
        stacks: list[Tensor | None] = [None] * len(edges)
        with warnings.catch_warnings():
            # What has no batching rule runs column by column, as it would otherwise.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            for start in range(0, q, step):
                some = slice(start, min(start + step, q))
                keep = retain_graph or some.stop < q
                arrived = torch.autograd.grad(
                    self.root, edges, cotangents[some], retain_graph=keep, allow_unused=True, is_grads_batched=True
                )
                if step == q:
                    return list(arrived)
                _store(stacks, arrived, some, q, is_stack=True)
        return stacks


def _store(
    stacks: list[Tensor | None], arrived: Sequence[Tensor | None], some: slice, q: int, *, is_stack: bool = False
) -> None:
    """Writes the gradients of columns `some` into stacks of q, made at the first column."""
    for e, gradient in enumerate(arrived):
        if gradient is None:
            continue
        shape = gradient.shape[1:] if is_stack else gradient.shape
        stack = gradient.new_empty(q, *shape) if some.start == 0 else stacks[e]
        assert stack is not None  # which edges are reached does not depend on the cotangent
        stack[some] = gradient
        stacks[e] = stack


def _samples_first(stack: Tensor | None, dim: int | None) -> Tensor | None:
    return None if stack is None or dim is None else stack.movedim(dim + 1, 0)
