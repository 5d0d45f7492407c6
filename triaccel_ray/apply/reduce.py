"""Sums gradients over ranks, and lets all ranks fail, retry or fall back in the same step.

Each rank weights its samples' losses by their share of the global batch, so the sum over ranks is the mean gradient.
Gradients are reduced after the backward pass, inside the captured graph. `DistributedDataParallel` (Li et al. 2020)
overlaps both, from hooks on parameters; here hooks would also end the low-precision copies of weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from triaccel_ray.apply.compile import is_compile_error
from triaccel_ray.cuda.out_of_memory import BudgetExceededError, first_line, is_out_of_memory
from triaccel_ray.distributed.ranks import Ranks
from triaccel_ray.model.gradients import Gradients

BUCKET_BYTES = 25 * 2**20
"""Bytes of small gradients that are joined to one message, as in `DistributedDataParallel`."""
LARGE_BYTES = 8 * 2**20
"""Gradients of at least this size are reduced where they are, without a copy; smaller messages waste bandwidth."""
_ALIGNMENT_BYTES = 16
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class PeerError(RuntimeError):
    """Another rank has raised an error that ends the run, or the attempt at a capture, on all ranks."""


class PeerOutOfMemoryError(torch.OutOfMemoryError):
    """Another rank ran out of memory in this step: all ranks retreat together."""


class PeerCompileError(RuntimeError):
    """`torch.compile` failed on another rank: no rank compiles from now on."""


class NotCapturableError(RuntimeError):
    """A step cannot run as a captured graph on this rank or another: no rank captures from now on."""


def _any_error(error: BaseException) -> bool:
    return True


_KINDS: tuple[tuple[Callable[[BaseException], bool], type[Exception]], ...] = (
    (lambda error: isinstance(error, BudgetExceededError), BudgetExceededError),
    (is_out_of_memory, PeerOutOfMemoryError),
    (is_compile_error, PeerCompileError),
    (lambda error: isinstance(error, NotCapturableError), NotCapturableError),
    (_any_error, PeerError),
)
"""Kinds of errors, the mildest first: how to tell, and what ranks without an error of this kind raise instead."""


class Agreement:
    """Makes an error of one rank an error of the same kind on every rank, at the same place.

    Costs two messages between hosts at each place, and nothing if this process is alone. The worst error wins, so that
    all ranks take the same way out. A rank that is lost, or raises elsewhere, ends the others' next message.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = ranks or Ranks()

    @contextlib.contextmanager
    def agreeing(self, *, when: bool = True) -> Iterator[None]:
        """Returns a context that raises on all ranks if its block raises on any; of no effect without `when`."""
        if self.ranks.is_alone or not when:
            yield
            return
        try:
            yield
        except Exception as error:
            agreed = error if getattr(error, "is_agreed", False) else self._agreed(error)
            if agreed is error or agreed is None:
                raise
            raise agreed from None
        if (agreed := self._agreed(None)) is not None:
            raise agreed

    def _agreed(self, error: Exception | None) -> Exception | None:
        """Returns the error of the worst kind over ranks, this rank's own if it is of this kind."""
        own = 0 if error is None else 1 + next(i for i, (fits, _) in enumerate(_KINDS) if fits(error))
        (worst,) = self.ranks.maximum([own])
        if not worst:
            return None
        told = self.ranks.gather([own, "" if error is None else f"{type(error).__name__}: {first_line(error)}"])
        if error is None or own < worst:
            rank, text = next((rank, text) for rank, (kind, text) in enumerate(told) if kind == worst)
            error = _KINDS[worst - 1][1](f"rank {rank} raised {text}"[:500])
        error.is_agreed = True  # type: ignore[attr-defined]  # contexts around this one pass it on unsaid
        return error


class SharedGradients(Gradients):
    """The gradients of the global batch: `collect` sums those of all ranks."""

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: Ranks) -> None:
        super().__init__(parameters)
        self._ranks = ranks

    @torch.no_grad()
    def collect(self, copies: Mapping[int, Tensor], sums: Mapping[int, Tensor] | None = None) -> None:
        """Takes this rank's gradients and sums them over ranks, in the dtype that they have.

        A parameter has a gradient if it has one on any rank: a rank without samples, or whose samples do not reach the
        parameter, adds zero. If dtypes differ, the one of most digits is the sum's.
        """
        super().collect(copies, sums or {})
        own = [0 if tensor is None else 1 + _DTYPES.index(tensor.dtype) for tensor in self.tensors]
        codes = self._ranks.maximum(own)
        self.tensors = [
            None if not code else _with_dtype(parameter, tensor, _DTYPES[code - 1])
            for parameter, tensor, code in zip(self.parameters, self.tensors, codes, strict=True)
        ]
        self.table.point_to(self.tensors, upload=False)
        sum_over_ranks([tensor for tensor in self.tensors if tensor is not None], self._ranks)


def _with_dtype(parameter: Tensor, gradient: Tensor | None, dtype: torch.dtype) -> Tensor:
    if gradient is None:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return gradient if gradient.dtype is dtype else gradient.to(dtype)


def sum_over_ranks(tensors: Sequence[Tensor], ranks: Ranks) -> None:
    """Replaces dense tensors by their sums over ranks: small ones joined in buckets, large ones where they are."""
    flat = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors]  # memory order: equal on all ranks
    large = [each for each in flat if each.nbytes >= LARGE_BYTES]
    buckets = _buckets([each for each in flat if 0 < each.nbytes < LARGE_BYTES])
    joined = [_join(bucket) for bucket in buckets]
    ranks.sum_([*large, *joined])
    for bucket, whole in zip(buckets, joined, strict=True):
        torch._foreach_copy_(bucket, _parts(whole, bucket))


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Returns the tensors in buckets of one dtype each."""
    found: list[list[Tensor]] = []
    open_of: dict[torch.dtype, tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        bucket, size = open_of.get(tensor.dtype, ([], BUCKET_BYTES))
        if size >= BUCKET_BYTES:
            bucket, size = [], 0
            found.append(bucket)
        bucket.append(tensor)
        open_of[tensor.dtype] = bucket, size + tensor.nbytes
    return found


def _join(bucket: Sequence[Tensor]) -> Tensor:
    first = bucket[0]
    whole = first.new_zeros(sum(_padded(each) for each in bucket))
    torch._foreach_copy_(_parts(whole, bucket), list(bucket))
    return whole


def _parts(whole: Tensor, bucket: Sequence[Tensor]) -> list[Tensor]:
    parts = whole.split([_padded(each) for each in bucket])
    return [part[: each.numel()] for part, each in zip(parts, bucket, strict=True)]


def _padded(tensor: Tensor) -> int:
    """Returns the number of elements, rounded up to whole 16 bytes: copies move so much at once."""
    unit = _ALIGNMENT_BYTES // tensor.element_size()
    return -(-tensor.numel() // unit) * unit
