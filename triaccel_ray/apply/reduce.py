"""Sums gradients over ranks: during the backward pass of captured steps, after that of others.

Each rank weights its samples' losses by their share of the global batch, so the sum over ranks is the mean gradient.
As in `DistributedDataParallel` (Li et al. 2020), buckets are sent in one order on all ranks, each once its gradients
have arrived. Three things differ. The collectives are part of the captured graph. An eager pass may run out of memory
on one rank, so its gradients are sent once all ranks have completed it. And a layer in 16 bits sends 16 bits, also if
autocast has cast its gradients to FP32: communication slows down the kernels beside it.
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

BUCKET_ELEMENTS = 25 * 2**19
"""Gradients that are sent together: 25 MiB in 16 bits, as in `DistributedDataParallel`."""
LARGE_BYTES = 8 * 2**20
"""Gradients of at least this size, sent in the dtype that they have, are summed where they are. Others are copied into
one message."""
_ALIGNMENT_BYTES = 16
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_Copies = Mapping[int, Tensor]
"""Id of a parameter -> the tensor beside it, which has the gradient if it requires one (`Weights.in_force`)."""
Dtypes = Callable[[], Sequence[torch.dtype | None]]
"""Returns the dtype that each parameter's layer computes in now; None for a parameter of no layer, or of several."""


class Reduction:
    """Sums one step's gradients over ranks, in buckets, and knows which parameters get any.

    A parameter has a gradient if it has one on any rank. A rank whose samples do not reach it, or that has none, adds
    zero. If dtypes differ, the sum has the one of most digits. Gradients of one pass are sent in their layer's dtype;
    sums over micro-batches, which have more digits, in FP32. After each eager pass, ranks exchange which gradients they
    have. A captured pass overlaps communication if an eager pass of the same precisions has shown what to expect.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], order: Sequence[nn.Parameter], ranks: Ranks, dtypes: Dtypes
    ) -> None:
        """Groups `parameters` into buckets; `order` is that of the forward pass, as far as it is known."""
        self.parameters, self._ranks, self._dtypes = tuple(parameters), ranks, dtypes
        self._buckets = _buckets_of(self.parameters, order)
        self._expected: dict[Any, list[int]] = {}
        """Dtypes of the layers and of the tensors beside the parameters -> code of the dtype sent, 0 for none."""
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
        beside = tuple(None if (copy := copies.get(id(p))) is None else copy.dtype for p in self.parameters)
        self._key = tuple(self._dtypes()), beside
        expected = self._expected.get(self._key) if self._is_capturing else None
        if expected is not None:
            self._pass = _Pass(self, expected, copies)
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
        current, self._pass = self._pass, None
        codes = self.codes_of(tensors)
        if current is not None:  # what was sent may be dropped already
            codes = [sent or code for sent, code in zip(current.codes, codes, strict=True)]
        is_irregular = self._is_irregular or any(_in_two_places(p, copies.get(id(p))) for p in self.parameters)
        *agreed, irregular = self._ranks.maximum([*codes, int(is_irregular)])
        if current is not None:
            if irregular or agreed != current.expected:
                self._expected.clear()
                raise NotCapturableError("gradients have arrived otherwise than in the step before, on some rank")
            return current.finish()
        if self._key is not None and not irregular:
            self._expected[self._key] = agreed
        found: list[Tensor | None] = [None] * len(tensors)
        indices = [index for index, code in enumerate(agreed) if code]
        for index, total in zip(indices, self.start_sum(indices, tensors, agreed)(), strict=True):
            found[index] = total
        return found

    def codes_of(self, tensors: Sequence[Tensor | None]) -> list[int]:
        """Returns the code of the dtype in which each gradient, by parameter, is to be sent; 0 for None."""
        layer_dtypes = [None] * len(tensors) if self._key is None else self._key[0]
        return [
            0 if tensor is None else 1 + _DTYPES.index(_dtype_of(tensor, layer_dtype))
            for tensor, layer_dtype in zip(tensors, layer_dtypes, strict=True)
        ]

    def start_sum(
        self, indices: Sequence[int], tensors: Sequence[Tensor | None], codes: Sequence[int]
    ) -> Callable[[], list[Tensor]]:
        """Starts to sum the gradients of these parameters, as `start_sum`; zeros stand for those that are None."""
        own, dtypes = [], []
        for index in indices:
            tensor, dtype = tensors[index], _DTYPES[codes[index] - 1]
            zeros = partial(torch.zeros_like, self.parameters[index], dtype=dtype, requires_grad=False)
            own.append(zeros() if tensor is None else tensor)
            dtypes.append(dtype)
        return start_sum(own, dtypes, self._ranks)


class _Pass:
    """One captured backward pass, during which buckets are sent."""

    def __init__(self, reduction: Reduction, expected: list[int], copies: _Copies) -> None:
        self._reduction, self.expected, self._copies = reduction, expected, copies
        self.codes = [0] * len(expected)
        """Code of each gradient that was there when its bucket was sent, else 0."""
        self._buckets = [[index for index in bucket if expected[index]] for bucket in reduction._buckets]
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
        found: list[Tensor | None] = [None] * len(self.expected)
        for bucket, sums in zip(self._buckets, self._sent, strict=True):
            for index, total in zip(bucket, sums(), strict=True):
                found[index] = total
        return found

    @torch.no_grad()
    def _send(self) -> None:
        """Sends the next bucket: the order is the same on all ranks, in whichever order gradients arrive."""
        indices, parameters = self._buckets[len(self._sent)], self._reduction.parameters
        own: list[Tensor | None] = [None] * len(parameters)
        for index in indices:
            own[index] = gradient_of(parameters[index], self._copies.get(id(parameters[index])), None)
        for index, code in enumerate(self._reduction.codes_of(own)):
            self.codes[index] = self.codes[index] or code
        self._sent.append(self._reduction.start_sum(indices, own, self.expected))
        for index in indices:
            gradient = parameters[index].grad
            if gradient is not None and gradient.dtype is not _DTYPES[self.expected[index] - 1]:
                parameters[index].grad = None  # the message has its digits, the pass may use its memory


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


def start_sum(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype], ranks: Ranks) -> Callable[[], list[Tensor]]:
    """Starts to sum dense tensors over ranks; returns a function that has the current stream wait, and the sums.

    Large tensors of the wanted dtype become their own sums. Others are copied into one message for each dtype, and
    their sums lie there.
    """
    flat = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors]  # memory order: equal on all ranks
    sums, messages = list(tensors), []
    copied: dict[torch.dtype, list[int]] = {}
    for index, (each, dtype) in enumerate(zip(flat, dtypes, strict=True)):
        if each.dtype is dtype and each.nbytes >= LARGE_BYTES:
            messages.append(each)
        else:
            copied.setdefault(dtype, []).append(index)
    for dtype, indices in copied.items():
        sizes = [_padded(flat[index].numel(), dtype) for index in indices]
        message = flat[indices[0]].new_zeros(sum(sizes), dtype=dtype)
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


def _padded(number: int, dtype: torch.dtype) -> int:
    """Returns the number of elements, rounded up to whole 16 bytes: kernels read so much at once."""
    unit = _ALIGNMENT_BYTES // dtype.itemsize
    return -(-number // unit) * unit


def _dtype_of(gradient: Tensor, layer_dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype in which a gradient is sent: that of its layer, if this has fewer digits."""
    is_shorter = layer_dtype is not None and layer_dtype.itemsize < gradient.dtype.itemsize
    return layer_dtype if layer_dtype is not None and is_shorter else gradient.dtype


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
            limit = BUCKET_ELEMENTS if found else BUCKET_ELEMENTS // 25
            size = 0
            found.append([])
        found[-1].append(index)
        size += parameters[index].numel()
    return found
