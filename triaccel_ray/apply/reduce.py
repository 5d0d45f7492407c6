"""Sums gradients over ranks: during the backward pass of captured steps, after that of others.

Each rank weights its samples' losses by their share of the global batch, so the sum over ranks is the mean gradient.
As in `DistributedDataParallel` (Li et al. 2020), buckets are sent in one order on all ranks, each once its gradients
have arrived. What differs:

- The collectives are part of the captured graph.
- An eager pass may run out of memory on one rank. So its gradients are sent once all ranks have completed it, and have
  memory for the messages.
- Layers in 16 bits send gradients in 16 bits, also if autocast has cast them to FP32: communication slows down the
  kernels beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from triaccel_ray.apply.agreement import Agreement, NotCapturableError
from triaccel_ray.distributed.ranks import Ranks
from triaccel_ray.model.gradients import Gradients, buckets_by_arrival, gradient_of

BUCKET_ELEMENTS = 25 * 2**19
"""Elements of gradients that are sent together: 25 MiB in 16 bits, as in `DistributedDataParallel`."""
_MIN_BUCKETS = 4
"""Fewest parts in which a small model's gradients are sent: the last part leaves only after the backward pass."""
MAX_RANKS_IN_16_BITS = 8
"""Ranks up to which gradients are added in 16 bits, although each addition rounds.

Error of a sum of random numbers in BF16, simulated: 2 ranks 0.25 %, 8 0.4 %, 64 1.0 %, 512 2.7 %; rounded once 0.17 %.
"""
LARGE_BYTES = 2**20
"""Gradients that take at least so many bytes, in the dtype that they are sent in, are sent without a copy if they have
it. Smaller ones are copied into one tensor for each dtype."""
_ALIGNMENT_BYTES = 16
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_Copies = Mapping[int, Tensor]
"""Id of a parameter -> its copy (`Weights.companions`), which receives the gradient if it requires one."""
Dtypes = Callable[[], Sequence[torch.dtype | None]]
"""Returns the dtype that each parameter's layer computes in now; None for a parameter of no layer, or of several."""


class Reduction:
    """Sums one step's gradients over ranks, in buckets, and knows which parameters get any.

    A parameter has a gradient if it has one on any rank. A rank whose samples do not reach it, or that has none, adds
    zero. If dtypes differ, the sum has the one of most digits. Gradients of one pass are sent in their layer's dtype,
    sums over micro-batches and those of many ranks in FP32. After each eager pass, ranks exchange which gradients they
    have. A captured pass overlaps communication if an eager pass of the same precisions has shown what to expect.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], order: Sequence[nn.Parameter], peers: Agreement, dtypes: Dtypes
    ) -> None:
        """Groups `parameters` into buckets; `order` is that of the forward pass, as far as it is known."""
        self.parameters, self.peers, self._dtypes = tuple(parameters), peers, dtypes
        elements = min(BUCKET_ELEMENTS, sum(p.numel() for p in parameters) // _MIN_BUCKETS)
        self.buckets = buckets_by_arrival(parameters, order, elements=elements, in_first=BUCKET_ELEMENTS // 25)
        """Indices of `parameters` in the order in which they are sent. The first bucket is small, so that the first
        message leaves early (Li et al. 2020, section 3.2.3)."""
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

    def pack_all(self, tensors: list[Tensor | None], copies: _Copies) -> Callable[[], list[Tensor | None]]:
        """Returns a function that sends what has not been sent, and returns the sums over ranks by parameter.

        `tensors` are this rank's gradients, None for a parameter without one. A gradient that is sent in another dtype
        is dropped once it is packed, here and in `.grad`: memory may not hold both.

        Raises:
            NotCapturableError: on any rank, gradients have not arrived as expected in a pass that overlaps.
            torch.OutOfMemoryError, MemoryError: on all ranks, if one cannot allocate its messages.
        """
        current, self._pass = self._pass, None
        codes = [self.code_of(index, tensor) for index, tensor in enumerate(tensors)]
        if current is not None:  # what was sent may be dropped already
            codes = [sent or code for sent, code in zip(current.codes, codes, strict=True)]
        is_irregular = self._is_irregular or any(_in_two_places(p, copies.get(id(p))) for p in self.parameters)
        *agreed, irregular = self.peers.ranks.all_reduce_max([*codes, int(is_irregular)])
        if current is not None:
            if irregular or agreed != current.expected:
                self._expected.clear()
                raise NotCapturableError("gradients have arrived otherwise than in the step before, on some rank")
            return current.finish
        if self._key is not None and not irregular:
            self._expected[self._key] = agreed
        buckets = [[index for index in bucket if agreed[index]] for bucket in self.buckets]
        with self.peers.agreeing():
            packed = [self.pack(bucket, tensors, agreed, copies) for bucket in buckets]
        return lambda: self.sums(buckets, [each.start_sum(self.peers.ranks) for each in packed])

    def code_of(self, index: int, gradient: Tensor | None) -> int:
        """Returns the code of the dtype in which this parameter's gradient is to be sent; 0 for None."""
        if gradient is None:
            return 0
        sent, of_layer = gradient.dtype, None if self._key is None else self._key[0][index]
        if self.peers.ranks.world_size > MAX_RANKS_IN_16_BITS:
            sent = torch.promote_types(sent, torch.float32)
        elif of_layer is not None and of_layer.itemsize < sent.itemsize:
            sent = of_layer
        return 1 + _DTYPES.index(sent)

    def pack(
        self, bucket: Sequence[int], tensors: list[Tensor | None], codes: Sequence[int], copies: _Copies
    ) -> Packed:
        """Packs the gradients of these parameters, zeros for those that are None; clears their entries in `tensors`."""
        own, dtypes = [], [_DTYPES[codes[index] - 1] for index in bucket]
        for index, dtype in zip(bucket, dtypes, strict=True):
            tensor, parameter = tensors[index], self.parameters[index]
            own.append(torch.zeros_like(parameter, dtype=dtype, requires_grad=False) if tensor is None else tensor)
            tensors[index] = None
            for leaf in (parameter, copies.get(id(parameter))):
                if leaf is not None and leaf.grad is not None and leaf.grad.dtype is not dtype:
                    leaf.grad = None
        return pack(own, dtypes)

    def sums(self, buckets: Sequence[Sequence[int]], sent: Sequence[Callable[[], list[Tensor]]]) -> list[Tensor | None]:
        """Returns the sums by parameter, for which the current stream waits; None for parameters in no bucket."""
        found: list[Tensor | None] = [None] * len(self.parameters)
        for bucket, wait in zip(buckets, sent, strict=True):
            for index, total in zip(bucket, wait(), strict=True):
                found[index] = total
        return found


class _Pass:
    """One captured backward pass, during which buckets are sent."""

    def __init__(self, reduction: Reduction, expected: list[int], copies: _Copies) -> None:
        self._reduction, self.expected, self._copies = reduction, expected, copies
        self.codes = [0] * len(expected)
        """Code of each gradient that was there when its bucket was sent, else 0."""
        self._buckets = [[index for index in bucket if expected[index]] for bucket in reduction.buckets]
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
        return self._reduction.sums(self._buckets, self._sent)

    @torch.no_grad()
    def _send(self) -> None:
        """Sends the next bucket: the order is the same on all ranks, in whichever order gradients arrive."""
        bucket, parameters = self._buckets[len(self._sent)], self._reduction.parameters
        own: list[Tensor | None] = [None] * len(parameters)
        for index in bucket:
            own[index] = gradient_of(parameters[index], self._copies.get(id(parameters[index])), None)
            self.codes[index] = self._reduction.code_of(index, own[index])
        packed = self._reduction.pack(bucket, own, self.expected, self._copies)
        self._sent.append(packed.start_sum(self._reduction.peers.ranks))


class SharedGradients(Gradients):
    """The gradients of the global batch, after `send`: sums over ranks, in the dtypes of their layers."""

    def __init__(self, reduction: Reduction) -> None:
        super().__init__(reduction.parameters)
        self._reduction = reduction
        self._send: Callable[[], list[Tensor | None]] | None = None

    def begin(self, *, publishes: bool) -> None:
        """Drops the tensors of the previous step; `publishes` is False during CUDA graph capture."""
        super().begin(publishes=publishes)
        self._reduction.begin(is_capturing=not publishes)

    @torch.no_grad()
    def pack(self, copies: _Copies) -> None:
        """Packs this rank's gradients (see `Reduction.pack_all`)."""
        self._send = self._reduction.pack_all(self.tensors, copies)

    @torch.no_grad()
    def send(self) -> None:
        """Sums the gradients over ranks.

        Raises:
            LostRankError: another rank was lost.
        """
        assert self._send is not None
        self.tensors, self._send = self._send(), None
        self.table.point_to(self.tensors, upload=False)

    def drop(self) -> None:
        """Drops the tensors and the messages (see `Gradients.drop`)."""
        super().drop()
        self._send = None


class Packed(NamedTuple):
    """Messages, and the views of them that become the sums."""

    messages: list[Tensor]
    sums: list[Tensor]

    def start_sum(self, ranks: Ranks) -> Callable[[], list[Tensor]]:
        """Starts to sum over ranks; returns a function that has the current stream wait, and returns the sums."""
        wait = ranks.start_all_reduce(self.messages)

        def finish() -> list[Tensor]:
            wait()
            return self.sums

        return finish


def pack(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> Packed:
    """Packs dense tensors into messages of these dtypes.

    Large tensors are sent alone; those of the wanted dtype become their own sums. Small ones are copied into one
    message for each dtype, and their sums lie there. Ranks may hold other dtypes: what is sent depends on `dtypes`.
    """
    flat = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors]  # memory order: equal on all ranks
    sums, messages = list(tensors), []
    copied: dict[torch.dtype, list[int]] = {}
    for index, (each, dtype) in enumerate(zip(flat, dtypes, strict=True)):
        if each.numel() * dtype.itemsize >= LARGE_BYTES:
            sent = each.to(dtype)
            messages.append(sent)
            sums[index] = sent.as_strided(tensors[index].shape, tensors[index].stride())
        else:
            copied.setdefault(dtype, []).append(index)
    for dtype, indices in copied.items():
        sizes = [_padded(flat[index].numel(), dtype) for index in indices]
        message = flat[indices[0]].new_empty(sum(sizes), dtype=dtype)
        parts = [part[: flat[i].numel()] for part, i in zip(message.split(sizes), indices, strict=True)]
        torch._foreach_copy_(parts, [flat[index] for index in indices])
        messages.append(message)
        for index, part in zip(indices, parts, strict=True):
            sums[index] = part.as_strided(tensors[index].shape, tensors[index].stride())
    return Packed(messages, sums)


def _padded(num_elements: int, dtype: torch.dtype) -> int:
    """Returns the number of elements, rounded up to whole 16 bytes: kernels read so much at once."""
    unit = _ALIGNMENT_BYTES // dtype.itemsize
    return -(-num_elements // unit) * unit


def _in_two_places(parameter: Tensor, copy: Tensor | None) -> bool:
    """Returns whether a parameter and its copy both have a gradient: one might arrive after the other was sent."""
    return copy is not None and copy.grad is not None and parameter.grad is not None
