"""Sums gradients over ranks: during the backward pass of captured steps, after that of others.

Each rank weights its samples' losses by their share of the global batch, so the sum over ranks is the mean gradient.
As in `DistributedDataParallel` (Li et al. 2020), buckets are sent in one order on all ranks, each once its gradients
have arrived. Two things differ. The collectives are part of the captured graph. And an eager pass may run out of memory
on one rank, so its gradients are sent once all ranks have completed it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from triaccel_ray.apply.agreement import NotCapturableError
from triaccel_ray.distributed.ranks import Ranks
from triaccel_ray.model.gradients import Gradients, gradient_of

BUCKET_BYTES = 25 * 2**20
"""Bytes of FP32 gradients that are sent together, as in `DistributedDataParallel`."""
LARGE_BYTES = 8 * 2**20
"""Gradients of at least this size are summed where they are; smaller ones are copied into one message."""
_ALIGNMENT_BYTES = 16
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_Copies = Mapping[int, Tensor]
"""Id of a parameter -> the tensor beside it, which has the gradient if it requires one (`Weights.in_force`)."""


class Reduction:
    """Sums one step's gradients over ranks, in buckets, and knows which parameters get any.

    A parameter has a gradient if it has one on any rank. A rank whose samples do not reach it, or that has none, adds
    zero. If dtypes differ, the sum has the one of most digits. After each eager pass, ranks exchange which gradients
    they have. A captured pass overlaps communication if an eager pass of the same precisions has shown what to expect.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], order: Sequence[nn.Parameter], ranks: Ranks) -> None:
        """Groups `parameters` into buckets; `order` is that of the forward pass, as far as it is known."""
        self.parameters, self._ranks = tuple(parameters), ranks
        self._buckets = _buckets_of(self.parameters, order)
        self._expected: dict[Any, list[int]] = {}
        """Dtypes of the tensors beside the parameters -> code of each gradient's dtype, 0 for none."""
        self._key: Any = None
        self._pass: _Pass | None = None
        self._is_capturing = self._is_irregular = False

    def begin(self, *, is_capturing: bool) -> None:
        """Starts a step."""
        self._is_capturing, self._key, self._pass, self._is_irregular = is_capturing, None, None, False

    @contextlib.contextmanager
    def taking(self, copies: _Copies, *, is_whole: bool) -> Iterator[None]:
        """Returns a context for a backward pass; `is_whole` says that each rank makes this one and no other.

        The hooks on parameters and their copies exist only inside, because others take hooks for the user's. A gradient
        that arrives in several pieces, as from a reentrant checkpoint, rules out overlapping.
        """
        self._key = None
        if not is_whole:
            yield
            return
        self._key = tuple(None if (copy := copies.get(id(p))) is None else copy.dtype for p in self.parameters)
        expected = self._expected.get(self._key) if self._is_capturing else None
        if expected is not None:
            self._pass = _Pass(self.parameters, self._buckets, expected, copies, self._ranks)
        hooks: list[Any] = []
        arrived: set[int] = set()

        def arrive(index: int, leaf: Tensor) -> None:
            self._is_irregular |= index in arrived
            arrived.add(index)
            if self._pass is not None:
                self._pass.arrive(index)

        for index, parameter in enumerate(self.parameters):
            copy = copies.get(id(parameter))
            leaf = parameter if copy is None or not copy.requires_grad else copy
            if leaf.requires_grad:
                hooks.append(leaf.register_post_accumulate_grad_hook(partial(arrive, index)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def finish(self, tensors: Sequence[Tensor | None], copies: _Copies) -> list[Tensor | None]:
        """Returns the sums over ranks; `tensors` are this rank's gradients, None for a parameter without one.

        Raises:
            NotCapturableError: on any rank, gradients have not arrived as expected in a pass that overlaps.
        """
        codes = [0 if tensor is None else 1 + _DTYPES.index(tensor.dtype) for tensor in tensors]
        is_irregular = self._is_irregular or any(_in_two_places(p, copies.get(id(p))) for p in self.parameters)
        current, self._pass = self._pass, None
        *agreed, irregular = self._ranks.maximum([*codes, int(is_irregular)])
        if current is not None:
            if irregular or agreed != current.expected:
                self._expected.clear()
                raise NotCapturableError("gradients have arrived otherwise than in the step before, on some rank")
            return current.finish()
        if self._key is not None and not irregular:
            self._expected[self._key] = agreed
        indices = [index for index, code in enumerate(agreed) if code]
        own = [_with_dtype(self.parameters[index], tensors[index], agreed[index]) for index in indices]
        found: list[Tensor | None] = [None] * len(tensors)
        for index, total in zip(indices, start_sum(own, self._ranks)(), strict=True):
            found[index] = total
        return found


class _Pass:
    """One backward pass, during which buckets are sent."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        buckets: Sequence[Sequence[int]],
        expected: list[int],
        copies: _Copies,
        ranks: Ranks,
    ) -> None:
        self._parameters, self.expected, self._copies, self._ranks = parameters, expected, copies, ranks
        self._buckets = [[index for index in bucket if expected[index]] for bucket in buckets]
        self._missing = [set(bucket) for bucket in self._buckets]
        self._bucket_of = {index: place for place, bucket in enumerate(self._buckets) for index in bucket}
        self._sent: list[Callable[[], list[Tensor]]] = []

    def arrive(self, index: int) -> None:
        """Marks a gradient as complete, and sends buckets that are."""
        if index in self._bucket_of:
            self._missing[self._bucket_of[index]].discard(index)
        while len(self._sent) < len(self._buckets) and not self._missing[len(self._sent)]:
            self._send()

    def finish(self) -> list[Tensor | None]:
        """Sends the buckets that are not complete, with zeros for what is missing; returns the sums."""
        while len(self._sent) < len(self._buckets):
            self._send()
        found: list[Tensor | None] = [None] * len(self._parameters)
        for bucket, sums in zip(self._buckets, self._sent, strict=True):
            for index, total in zip(bucket, sums(), strict=True):
                found[index] = total
        return found

    @torch.no_grad()
    def _send(self) -> None:
        """Sends the next bucket: the order is the same on all ranks, in whichever order gradients arrive."""
        own = []
        for index in self._buckets[len(self._sent)]:
            parameter = self._parameters[index]
            gradient = gradient_of(parameter, self._copies.get(id(parameter)), None)
            own.append(_with_dtype(parameter, gradient, self.expected[index]))
        self._sent.append(start_sum(own, self._ranks))


class SharedGradients(Gradients):
    """The gradients of the global batch: `collect` sums those of all ranks."""

    def __init__(self, reduction: Reduction) -> None:
        super().__init__(reduction.parameters)
        self._reduction = reduction

    def begin(self, *, publishes: bool) -> None:
        """Drops the tensors of the previous step; `publishes` is False during CUDA graph capture."""
        super().begin(publishes=publishes)
        self._reduction.begin(is_capturing=not publishes)

    @torch.no_grad()
    def collect(self, copies: _Copies, sums: Mapping[int, Tensor] | None = None) -> None:
        """Takes this rank's gradients and sums them over ranks, in the dtype that they have."""
        super().collect(copies, sums or {})
        self.tensors = self._reduction.finish(self.tensors, copies)
        self.table.point_to(self.tensors, upload=False)


def start_sum(tensors: Sequence[Tensor], ranks: Ranks) -> Callable[[], list[Tensor]]:
    """Starts to sum dense tensors over ranks; returns a function that has the current stream wait, and the sums.

    Large tensors become their own sums. Small ones of a dtype are copied into one message, and their sums lie there.
    """
    flat = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors]  # memory order: equal on all ranks
    small: dict[torch.dtype, list[int]] = {}
    for index, each in enumerate(flat):
        if each.nbytes < LARGE_BYTES:
            small.setdefault(each.dtype, []).append(index)
    messages = [each for each in flat if each.nbytes >= LARGE_BYTES]
    sums = list(tensors)
    for indices in small.values():
        sizes = [_padded(flat[index]) for index in indices]
        message = flat[indices[0]].new_zeros(sum(sizes))
        parts = [part[: flat[i].numel()] for part, i in zip(message.split(sizes), indices, strict=True)]
        torch._foreach_copy_(parts, [flat[index] for index in indices])
        messages.append(message)
        for index, part in zip(indices, parts, strict=True):
            sums[index] = part.as_strided(tensors[index].shape, tensors[index].stride())
    wait = ranks.start_sum(messages)

    def finish() -> list[Tensor]:
        wait()
        return sums

    return finish


def _padded(tensor: Tensor) -> int:
    """Returns the number of elements, rounded up to whole 16 bytes: kernels read so much at once."""
    unit = _ALIGNMENT_BYTES // tensor.element_size()
    return -(-tensor.numel() // unit) * unit


def _with_dtype(parameter: Tensor, gradient: Tensor | None, code: int) -> Tensor:
    dtype = _DTYPES[code - 1]
    if gradient is None:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return gradient if gradient.dtype is dtype else gradient.to(dtype)


def _in_two_places(parameter: Tensor, copy: Tensor | None) -> bool:
    """Returns whether a parameter and its copy both have a gradient: one might arrive after the other was sent."""
    return copy is not None and copy.grad is not None and parameter.grad is not None


def _buckets_of(parameters: Sequence[nn.Parameter], order: Sequence[nn.Parameter]) -> list[list[int]]:
    """Returns indices of `parameters` in buckets, in the order in which gradients arrive: those used last come first.

    The first bucket is small, so that the first message leaves early (Li et al. 2020, section 3.2.3).
    """
    place_of = {p: place for place, p in enumerate(order)}
    found: list[list[int]] = []
    size, limit = 0, 0
    for index in sorted(range(len(parameters)), key=lambda index: -place_of.get(parameters[index], -1)):
        if not found or size >= limit:
            limit = BUCKET_BYTES if found else BUCKET_BYTES // 25
            size = 0
            found.append([])
        found[-1].append(index)
        size += 4 * parameters[index].numel()
    return found
