"""Optimizer steps of ResNet-18 (CIFAR stem) against PyTorch's fused ones: `python -m benchmarks.optimizer_step`.

Times are per step, from replays of a CUDA graph that goes round several sets of tensors, together far larger than the
L2 cache. Exits with 1 when a result is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.grad_stats import foreach_norms
from benchmarks.timing import describe_machine, floor_us, time_calls
from triaccel_ray.kernels.eight_bits import BLOCK, BLOCK_BYTES, num_bytes
from triaccel_ray.kernels.grad_stats.api import GradStats
from triaccel_ray.kernels.multi_tensor import TensorTable
from triaccel_ray.kernels.optimizer_step.api import AdamWStep, SgdStep
from triaccel_ray.kernels.split_words import join, split
from triaccel_ray.trainables.models import resnet18

DEVICE = torch.device("cuda")
NUM_SETS = 4
LR, WEIGHT_DECAY, MOMENTUM, BETAS, EPS = 1e-3, 5e-4, 0.9, (0.9, 0.999), 1e-8


def table_of(tensors: Sequence[Tensor | None]) -> TensorTable:
    """Returns a table that names the tensors."""
    table = TensorTable(len(tensors), DEVICE)
    table.point_to(tensors)
    return table


class TensorSet:
    """One model's parameters, gradients, state and copies; with "copies" in int16, parameters in two words."""

    def __init__(self, gradient_dtype: torch.dtype, copy_dtype: torch.dtype | None, *, in_codes: bool = False) -> None:
        self.parameters = [p.detach() for p in resnet18(10, "cifar").to(DEVICE).parameters()]
        self.gradients = [torch.randn_like(p).to(gradient_dtype) for p in self.parameters]
        self.fp32_gradients = [torch.empty_like(p) for p in self.parameters]
        self.first, self.second = ([torch.zeros_like(p) for p in self.parameters] for _ in range(2))
        self.in_codes = in_codes
        for index, p in enumerate(self.parameters):
            if in_codes and p.dim() > 1:
                self.first[index], self.second[index] = (
                    torch.zeros(num_bytes(p.numel()), dtype=torch.uint8, device=DEVICE) for _ in range(2)
                )
        self.steps = [torch.zeros((), device=DEVICE) for _ in self.parameters]
        # Biases and normalisation parameters stay fp32: no copy.
        self.copies = [
            None
            if copy_dtype is None or p.dim() == 1
            else torch.full_like(p, 7, dtype=copy_dtype)  # which a step overwrites
            for p in self.parameters
        ]
        for index, low in enumerate(self.copies):
            if low is not None and copy_dtype is torch.int16:
                self.parameters[index], words = split(self.parameters[index])
                low.copy_(words)
        names = ("parameters", "gradients", "first", "second", "steps", "copies")
        self.table = {name: table_of(getattr(self, name)) for name in names}

    def num_bytes(self, passes_over_state: int) -> float:
        """Returns the fewest bytes of a step: parameters and state read and written, gradients read, copies written."""
        bytes_of_state = BLOCK_BYTES / BLOCK if self.in_codes else 4
        fp32 = (2 * 4 + passes_over_state * bytes_of_state) * sum(p.numel() for p in self.parameters)
        copies = [copy for copy in self.copies if copy is not None and copy.dtype is not torch.int16]
        return fp32 + sum(t.numel() * t.itemsize for t in (*self.gradients, *copies))

    def numbers(self) -> list[Tensor]:
        """Returns the parameters in fp32."""
        pairs = zip(self.parameters, self.copies, strict=True)
        return [p if low is None or low.dtype is not torch.int16 else join(p, low) for p, low in pairs]


class Ours:
    """The kernels' step over one set."""

    def __init__(self, name: str, tensors: TensorSet) -> None:
        n, sizes = len(tensors.parameters), [p.numel() for p in tensors.parameters]
        self.tensors = tensors
        self.by = {
            "lr_factor": torch.ones((), device=DEVICE),
            "loss_scale": torch.ones((), device=DEVICE),
            "found_nonfinite": torch.zeros((), device=DEVICE),
        }
        both = {"lr": [LR] * n, "weight_decay": [WEIGHT_DECAY] * n}
        self.kernel: SgdStep | AdamWStep
        if name == "SGD":
            self.kernel, states = SgdStep(sizes, DEVICE), ["first"]
            self.kernel.set(**both, momentum=[MOMENTUM] * n, nesterov=[True] * n)
        else:
            self.kernel, states = AdamWStep(sizes, DEVICE), ["first", "second", "steps"]
            betas = {"beta1": [BETAS[0]] * n, "beta2": [BETAS[1]] * n}
            self.kernel.set(**both, **betas, eps=[EPS] * n, decoupled=[True] * n)
        self.states = [tensors.table[state] for state in states]
        layers = [index for index, p in enumerate(tensors.parameters) if p.dim() > 1]
        groups = [layers.index(index) if index in layers else None for index in range(n)]
        self.stats = GradStats(sizes, groups, num_groups=len(layers), beta=0.9, device=DEVICE)

    def step(self) -> None:
        """One step."""
        table = self.tensors.table
        self.kernel.step(table["parameters"], table["gradients"], self.states, table["copies"], **self.by)

    def step_with_statistics(self) -> None:
        """Statistics, then the step that they may skip."""
        self.by["found_nonfinite"] = self.stats.update(self.tensors.table["gradients"], self.by["loss_scale"])
        self.step()


class Peer:
    """PyTorch's fused step over one set, with the casts that it needs where precisions differ."""

    def __init__(self, name: str, tensors: TensorSet) -> None:
        self.tensors = tensors
        parameters = [torch.nn.Parameter(p) for p in tensors.parameters]
        self.optimizer: torch.optim.Optimizer
        if name == "SGD":
            self.optimizer = torch.optim.SGD(
                parameters, lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, nesterov=True, fused=True
            )
        else:
            self.optimizer = torch.optim.AdamW(
                parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True, capturable=True
            )
        for p, first, second, step in zip(parameters, tensors.first, tensors.second, tensors.steps, strict=True):
            self.optimizer.state[p] = (
                {"momentum_buffer": first} if name == "SGD" else {"step": step, "exp_avg": first, "exp_avg_sq": second}
            )
        self.is_fp32 = tensors.gradients[0].dtype is torch.float32
        for p, own, cast in zip(parameters, tensors.gradients, tensors.fp32_gradients, strict=True):
            p.grad = own if self.is_fp32 else cast
        pairs = [(c, p.detach()) for c, p in zip(tensors.copies, parameters, strict=True) if c is not None]
        self.copies, self.copied = [c for c, _ in pairs], [p for _, p in pairs]

    def step(self) -> None:
        """One step."""
        if not self.is_fp32:
            torch._foreach_copy_(self.tensors.fp32_gradients, self.tensors.gradients)
        self.optimizer.step()
        if self.copies:
            torch._foreach_copy_(self.copies, self.copied)

    def step_with_statistics(self) -> None:
        """Norms, which are less than the statistics, then the step."""
        foreach_norms(self.tensors.gradients, [])
        self.step()


def is_right(name: str, gradient_dtype: torch.dtype, copy_dtype: torch.dtype | None, in_codes: bool) -> bool:
    """Returns whether three of our steps are as near to fp64 as PyTorch's, and copies are what they should be.

    State in codes is rounded: there a tenth of the way that the steps have gone is allowed, as the norms of both.
    """
    torch.manual_seed(0)
    ours = TensorSet(gradient_dtype, copy_dtype, in_codes=in_codes)
    torch.manual_seed(0)
    theirs = TensorSet(gradient_dtype, _peers(copy_dtype))
    truth = [torch.nn.Parameter(p.double()) for p in ours.numbers()]
    exact: torch.optim.Optimizer = (
        torch.optim.SGD(truth, lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, nesterov=True)
        if name == "SGD"
        else torch.optim.AdamW(truth, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    )
    begun = [p.detach().clone() for p in truth]
    step, peer = Ours(name, ours), Peer(name, theirs)
    for p, gradient in zip(truth, ours.gradients, strict=True):
        p.grad = gradient.double()
    for _ in range(3):
        step.step()
        peer.step()
        exact.step()
    right = True
    for mine, yours, p, start in zip(ours.numbers(), theirs.parameters, truth, begun, strict=True):
        budget = 2.0 * (yours - p).abs().max() + 4.0 * torch.finfo(torch.float32).eps * p.abs().max()
        is_near = (mine - p).norm() <= 0.1 * (p - start).norm() if in_codes else (mine - p).abs().max() <= budget
        right &= bool(is_near)
    for copy, mine in zip(ours.copies, ours.parameters, strict=True):
        right &= copy is None or copy.dtype is torch.int16 or torch.equal(copy, mine.to(copy.dtype))
    return right


def _peers(copy_dtype: torch.dtype | None) -> torch.dtype | None:
    """Returns the copies that PyTorch's step writes; beside FP32 parameters in place of words, those in BF16."""
    return torch.bfloat16 if copy_dtype is torch.int16 else copy_dtype


def compare(name: str, gradient_dtype: torch.dtype, copy_dtype: torch.dtype | None, in_codes: bool) -> None:
    """Prints the times of one case, alone and with the statistics."""
    sets = [TensorSet(gradient_dtype, copy_dtype, in_codes=in_codes) for _ in range(NUM_SETS)]
    floor = floor_us(sets[0].num_bytes(2 if name == "SGD" else 4))
    read_again = floor_us(sum(g.numel() * g.itemsize for g in sets[0].gradients))
    others = (
        sets
        if copy_dtype is _peers(copy_dtype) and not in_codes
        else [TensorSet(gradient_dtype, _peers(copy_dtype)) for _ in range(NUM_SETS)]
    )
    ours, peers = [Ours(name, each) for each in sets], [Peer(name, each) for each in others]
    calls: dict[str, tuple[list[Callable[[], object]], float]] = {
        "kernels": ([each.step for each in ours], floor),
        "torch fused": ([each.step for each in peers], floor),
        "kernels, with statistics": ([each.step_with_statistics for each in ours], floor + read_again),
        "torch fused, with _foreach_norm": ([each.step_with_statistics for each in peers], floor + read_again),
    }
    case = f"{name}, {gradient_dtype} gradients, {copy_dtype} copies{', state in 8 bits' * in_codes}".replace(
        "torch.", ""
    )
    print(case)
    for label, (each_set, least) in calls.items():
        print(time_calls(f"  {label}", each_set, least), flush=True)


def main() -> int:
    """Prints the figures; returns 1 when a result is wrong."""
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU")
        return 1
    print(describe_machine())
    for name in ("SGD", "AdamW"):
        for case in (
            (torch.float32, None, False),
            (torch.float32, torch.float16, False),
            (torch.float16, torch.float16, False),
            (torch.bfloat16, torch.int16, False),
            (torch.bfloat16, torch.int16, True),
        ):
            if not is_right(name, *case):
                print(f"WRONG: {name} with {case[0]} gradients does not agree with PyTorch's")
                return 1
            compare(name, *case)
    return 0


if __name__ == "__main__":
    sys.exit(main())
