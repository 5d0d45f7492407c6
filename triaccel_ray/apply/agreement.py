"""Makes all ranks fail, retry or fall back in the same step if one of them has to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from triaccel_ray.apply.compile import is_compile_error
from triaccel_ray.cuda.out_of_memory import BudgetExceededError, first_line, is_out_of_memory
from triaccel_ray.distributed.ranks import Ranks


class PeerError(RuntimeError):
    """Another rank has raised an error that ends the run, or the attempt at a capture, on all ranks."""


class PeerOutOfMemoryError(torch.OutOfMemoryError):
    """Another rank ran out of memory in this step: all ranks retreat together."""


class PeerCompileError(RuntimeError):
    """`torch.compile` failed on another rank: all ranks do without it together."""


class NotCapturableError(RuntimeError):
    """A step cannot run as a captured graph on this rank or another: no rank captures from now on."""


_KINDS: tuple[tuple[Callable[[BaseException], bool], type[Exception]], ...] = (
    (lambda error: isinstance(error, BudgetExceededError), BudgetExceededError),
    (is_out_of_memory, PeerOutOfMemoryError),
    (is_compile_error, PeerCompileError),
    (lambda error: isinstance(error, NotCapturableError), NotCapturableError),
    (lambda error: True, PeerError),
)
"""Kinds of errors, the mildest first: how to tell, and what ranks without an error of this kind raise instead."""


class Agreement:
    """Makes an error of one rank an error of the same kind on every rank, at the same place.

    Costs a message between hosts at each place, and nothing if this process is alone. The worst error wins, so that all
    ranks take the same way out. A rank that is lost, or raises elsewhere, ends the others' next message.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = ranks or Ranks()
        self._depth = 0
        self._passing: Exception | None = None
        """An error that all ranks have, while it passes through outer contexts, which need not exchange it again."""

    @contextlib.contextmanager
    def agreeing(self, *, when: bool = True) -> Iterator[None]:
        """Returns a context that raises on all ranks if its block raises on any; of no effect without `when`."""
        if self.ranks.is_alone or not when:
            yield
            return
        self._depth += 1
        own: Exception | None = None
        try:
            yield
        except Exception as error:
            own = error
        finally:
            self._depth -= 1
        agreed = own if own is not None and own is self._passing else self._agreed(own)
        self._passing = agreed if self._depth else None
        try:
            if agreed is not None:
                raise agreed
        finally:
            del own, agreed  # else the error's traceback, which holds this frame, would keep the attempt's tensors

    def _agreed(self, error: Exception | None) -> Exception | None:
        """Returns the error of the worst kind over ranks, this rank's own if it is of this kind."""
        own = 0 if error is None else 1 + next(i for i, (fits, _) in enumerate(_KINDS) if fits(error))
        (worst,) = self.ranks.all_reduce_max([own])
        if not worst:
            return None
        own_text = "" if error is None else f"{type(error).__name__}: {first_line(error)}"
        told = self.ranks.all_gather_object([own, own_text])
        if own == worst:
            return error
        rank, text = next((rank, text) for rank, (kind, text) in enumerate(told) if kind == worst)
        return _KINDS[worst - 1][1](f"rank {rank} raised {text}"[:500])
