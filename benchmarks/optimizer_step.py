"""Optimizer steps of ResNet-18 (CIFAR stem) against PyTorch's fused ones: `python -m benchmarks.optimizer_step`.

Replays rotate among several sets of tensors, together far larger than the L2 cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.grad_stats import foreach_norms, layers_and_statistics
from benchmarks.timing import floor_us, report, time_calls
from triaccel_ray.kernels.eight_bits import BLOCK, BLOCK_BYTES, num_bytes
from triaccel_ray.kernels.multi_tensor import TensorTable
from triaccel_ray.kernels.optimizer_step.api import AdamWStep, SgdStep
from triaccel_ray.kernels.split_words import split
from triaccel_ray.trainables.models import resnet18

DEVICE = torch.device("cuda")
NUM_SETS = 4
LR, WEIGHT_DECAY, MOMENTUM, BETAS, EPS = 1e-3, 5e-4, 0.9, (0.9, 0.999), 1e-8


class Case(NamedTuple):
    """An optimizer and its storage formats."""

    optimizer: str
    gradients: torch.dtype
    copies: torch.dtype | None
    """Dtype of the weights' copies. int16: weights are split, and the low words take the place of copies."""
    in_codes: bool = False
    """Whether the optimizer state of weights is kept in 8 bits."""

    @property
    def of_peer(self) -> Case:
        """The case for PyTorch: FP32 parameters and state, with BF16 copies in place of split weights."""
        return self._replace(copies=torch.bfloat16 if self.copies is torch.int16 else self.copies, in_codes=False)


KEPT = (
    (torch.float32, None, False),
    (torch.float32, torch.float16, False),
    (torch.float16, torch.float16, False),
    (torch.bfloat16, torch.int16, False),
    (torch.bfloat16, torch.int16, True),
)
CASES = [Case(optimizer, *kept) for optimizer in ("SGD", "AdamW") for kept in KEPT]


class TensorSet:
    """One model's parameters, gradients, state and copies."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.parameters = [p.detach() for p in resnet18(10, "cifar").to(DEVICE).parameters()]
        self.gradients = [torch.randn_like(p).to(case.gradients) for p in self.parameters]
        self.first, self.second = ([self._zeros(p) for p in self.parameters] for _ in range(2))
        self.steps = [torch.zeros((), device=DEVICE) for _ in self.parameters]
        # Biases and normalization parameters stay fp32, without copies. A step overwrites the initial 7 of copies.
        self.copies = [
            None if case.copies is None or p.dim() == 1 else torch.full_like(p, 7, dtype=case.copies)
            for p in self.parameters
        ]
        if case.copies is torch.int16:
            words = [None if copy is None else split(p) for p, copy in zip(self.parameters, self.copies, strict=True)]
            self.parameters = [pair[0] if pair else p for p, pair in zip(self.parameters, words, strict=True)]
            self.copies = [pair[1] if pair else None for pair in words]

    def _zeros(self, parameter: Tensor) -> Tensor:
        if self.case.in_codes and parameter.dim() > 1:
            return torch.zeros(num_bytes(parameter.numel()), dtype=torch.uint8, device=DEVICE)
        return torch.zeros_like(parameter)

    def num_bytes(self) -> float:
        """Returns the bytes a step must move: parameters and state read and written, gradients read, copies written."""
        passes, state_bytes = 2 if self.case.optimizer == "SGD" else 4, BLOCK_BYTES / BLOCK if self.case.in_codes else 4
        kept = (2 * 4 + passes * state_bytes) * sum(p.numel() for p in self.parameters)
        copies = [copy for copy in self.copies if copy is not None and copy.dtype is not torch.int16]
        return kept + sum(t.nbytes for t in (*self.gradients, *copies))


class Ours:
    """The kernels' step over one set of tensors."""

    def __init__(self, tensors: TensorSet) -> None:
        n, sizes = len(tensors.parameters), [p.numel() for p in tensors.parameters]
        one, zero = torch.ones((), device=DEVICE), torch.zeros((), device=DEVICE)
        self.by = {"lr_factor": one, "loss_scale": one, "found_nonfinite": zero}
        both = {"lr": [LR] * n, "weight_decay": [WEIGHT_DECAY] * n}
        self.kernel: SgdStep | AdamWStep
        if tensors.case.optimizer == "SGD":
            self.kernel, states = SgdStep(sizes, DEVICE), [tensors.first]
            self.kernel.set(**both, momentum=[MOMENTUM] * n, nesterov=[True] * n)
        else:
            self.kernel, states = AdamWStep(sizes, DEVICE), [tensors.first, tensors.second, tensors.steps]
            betas = {"beta1": [BETAS[0]] * n, "beta2": [BETAS[1]] * n}
            self.kernel.set(**both, **betas, eps=[EPS] * n, decoupled=[True] * n)
        self.parameters, self.gradients = _table_of(tensors.parameters), _table_of(tensors.gradients)
        self.copies, self.states = _table_of(tensors.copies), [_table_of(state) for state in states]
        _, self.stats = layers_and_statistics(tensors.parameters, beta=0.9)

    def step(self) -> None:
        """Makes one step."""
        self.kernel.step(self.parameters, self.gradients, self.states, self.copies, **self.by)

    def step_with_statistics(self) -> None:
        """Computes the gradient statistics, then makes the step unless they found a non-finite gradient."""
        self.by["found_nonfinite"] = self.stats.update(self.gradients, self.by["loss_scale"])
        self.step()


def _table_of(tensors: Sequence[Tensor | None]) -> TensorTable:
    table = TensorTable(len(tensors), DEVICE)
    table.point_to(tensors)
    return table


class Peer:
    """PyTorch's fused step over one set of tensors, with the casts that it needs if dtypes differ."""

    def __init__(self, tensors: TensorSet) -> None:
        parameters = [torch.nn.Parameter(p) for p in tensors.parameters]
        is_sgd = tensors.case.optimizer == "SGD"
        options: dict[str, Any] = {"lr": LR, "weight_decay": WEIGHT_DECAY, "fused": True}
        if is_sgd:
            self.optimizer: Any = torch.optim.SGD(parameters, momentum=MOMENTUM, nesterov=True, **options)
        else:
            self.optimizer = torch.optim.AdamW(parameters, betas=BETAS, eps=EPS, capturable=True, **options)
        for p, first, second, step in zip(parameters, tensors.first, tensors.second, tensors.steps, strict=True):
            adamw = {"step": step, "exp_avg": first, "exp_avg_sq": second}
            self.optimizer.state[p] = {"momentum_buffer": first} if is_sgd else adamw
        self.gradients, self.casts = tensors.gradients, tensors.gradients
        if tensors.case.gradients is not torch.float32:
            self.casts = [torch.empty_like(p) for p in tensors.parameters]
        for p, gradient in zip(parameters, self.casts, strict=True):
            p.grad = gradient
        pairs = [(c, p.detach()) for c, p in zip(tensors.copies, parameters, strict=True) if c is not None]
        self.copies, self.copied = [c for c, _ in pairs], [p for _, p in pairs]

    def step(self) -> None:
        """Makes one step."""
        if self.casts is not self.gradients:
            torch._foreach_copy_(self.casts, self.gradients)
        self.optimizer.step()
        if self.copies:
            torch._foreach_copy_(self.copies, self.copied)

    def step_with_statistics(self) -> None:
        """Computes norms, which is less work than the statistics, then makes the step."""
        foreach_norms(self.gradients)
        self.step()


def figures() -> Iterator[object]:
    """Yields the times of each case, with and without statistics."""
    for case in CASES:
        sets = [TensorSet(case) for _ in range(NUM_SETS)]
        others = sets if case.of_peer == case else [TensorSet(case.of_peer) for _ in range(NUM_SETS)]
        ours, peers = [Ours(each) for each in sets], [Peer(each) for each in others]
        floor, read_again = floor_us(sets[0].num_bytes()), floor_us(sum(g.nbytes for g in sets[0].gradients))
        calls: dict[str, tuple[list[Callable[[], object]], float]] = {
            "kernels": ([each.step for each in ours], floor),
            "torch fused": ([each.step for each in peers], floor),
            "kernels, with statistics": ([each.step_with_statistics for each in ours], floor + read_again),
            "torch fused, with _foreach_norm": ([each.step_with_statistics for each in peers], floor + read_again),
        }
        yield case
        for label, (each_set, bound) in calls.items():
            yield time_calls(f"  {label}", each_set, bound)


if __name__ == "__main__":
    sys.exit(report("tests/kernels/test_optimizer_step.py", figures))
