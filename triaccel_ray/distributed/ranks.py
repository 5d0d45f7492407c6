"""The processes that train one model together, and the messages between them."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

BROADCAST_BYTES = 64 * 2**20
"""Bytes of tensors that are joined to one broadcast."""
_BEFORE_DIFFERENCE = 40
"""Characters of a message before the place where two values differ."""
_Group: TypeAlias = Any  # `dist.ProcessGroup`, which a PyTorch without torch.distributed lacks


class RanksDifferError(RuntimeError):
    """The ranks of a run have made different decisions, or hold different states: their weights would drift apart."""


class LostRankError(RuntimeError):
    """Communication between ranks has failed, because the process of another, or the connection to it, was lost."""


class Ranks:
    """The ranks of a run: one process each, on one device each.

    Host values travel through a group of the host's own (gloo), so that no rank waits for its device. Every method
    besides the properties is a collective: all ranks call it, in the same order. Alone, each returns at once.

    If another rank is lost, collectives over gloo raise LostRankError; so do those over NCCL once the group is aborted.
    """

    def __init__(self, group: _Group = None, host_group: _Group = None) -> None:
        """Takes the groups for tensors on the device and for host values; without them this process is alone."""
        self._group, self._host_group = group, host_group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)

    @classmethod
    def of_default_group(cls) -> Ranks:
        """Returns the ranks of the default process group; this process alone if none is initialized, or of size 1."""
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return cls()
        group = dist.group.WORLD
        return cls(group, group if dist.get_backend(group) == "gloo" else dist.new_group(backend="gloo"))

    @property
    def is_alone(self) -> bool:
        """Whether there is one rank only."""
        return self._group is None

    def largest_share(self, num_samples: int) -> int:
        """Returns the most samples that one rank has of a batch of `num_samples`; no collective."""
        return -(-num_samples // self.world_size)

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        """Returns the maximum over ranks of each of `values`."""
        if self.is_alone:
            return list(values)
        found = torch.tensor(values, dtype=torch.int64)
        with _naming_lost_ranks():
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._host_group)
        return found.tolist()

    def any(self, condition: bool) -> bool:
        """Returns whether the condition holds on any rank."""
        return self.all_reduce_max([int(condition)])[0] > 0

    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, by rank; JSON must be able to hold them."""
        if self.is_alone:
            return [value]
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        with _naming_lost_ranks():
            dist.all_gather(sizes, torch.tensor([len(own)]), group=self._host_group)
            largest = max(int(size) for size in sizes)
            padded = [torch.zeros(largest, dtype=torch.uint8) for _ in sizes]
            dist.all_gather(padded, torch.cat([own, own.new_zeros(largest - len(own))]), group=self._host_group)
        return [json.loads(bytes(each[: int(size)].tolist())) for each, size in zip(padded, sizes, strict=True)]

    def broadcast_bytes(self, data: bytes | None) -> bytes | None:
        """Returns rank 0's `data` on every rank; that of the others is not read."""
        if self.is_alone:
            return data
        (size,) = self.all_reduce_max([-1 if data is None or self.rank else len(data)])
        if size < 0:
            return None
        flat = torch.empty(size, dtype=torch.uint8)
        if self.rank == 0 and data:
            flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        with _naming_lost_ranks():
            for part in flat.split(BROADCAST_BYTES):
                dist.broadcast(part, group=self._host_group, group_src=0)
        return flat.numpy().tobytes()

    def require_equal(self, what: str, value: Any) -> None:
        """Checks that all ranks give the same value, which JSON can hold; only its hash travels if they do.

        Raises:
            RanksDifferError: they do not; the message has two ranks' values where they differ first.
        """
        if self.is_alone or len(set(self.all_gather_object(digest(value)))) == 1:
            return
        texts = self.all_gather_object(json.dumps(value, sort_keys=True))
        rank, other = next((rank, text) for rank, text in enumerate(texts) if text != texts[0])
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(texts[0], other, strict=False))
        start = max(sum(1 for _ in same) - _BEFORE_DIFFERENCE, 0)
        raise RanksDifferError(
            f"{what} differs between ranks (rank 0: ...{texts[0][start : start + 80]}..., rank {rank}: "
            f"...{other[start : start + 80]}...): the run ends, for their weights would drift apart; give all ranks "
            "the same code, versions and files"
        )

    def require_same_settings(self, settings: Mapping[str, Any]) -> None:
        """Checks that all ranks were given the same settings, which JSON can hold.

        Raises:
            ValueError: they were not; the message has the first setting that differs, with two ranks' values.
        """
        if self.is_alone:
            return
        given = self.all_gather_object({name: [digest(value), _shortened(value)] for name, value in settings.items()})
        for name in given[0]:
            for rank, other in enumerate(given):
                if other.get(name, [None, None])[0] != given[0][name][0]:
                    raise ValueError(
                        f"{name} = {given[0][name][1]} on rank 0 and {other.get(name, [None, 'missing'])[1]} on rank "
                        f"{rank}: must be the same on all ranks"
                    )

    @torch.no_grad()
    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Writes rank 0's values to these tensors on every rank, in few and large messages."""
        if self.is_alone:
            return
        waiting: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            together = waiting.setdefault(tensor.dtype, [])
            together.append(tensor)
            if sum(each.nbytes for each in together) >= BROADCAST_BYTES:
                self._broadcast(waiting.pop(tensor.dtype))
        for together in waiting.values():
            self._broadcast(together)

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        as_bytes = flat.view(torch.uint8)  # any dtype, booleans too
        with self._naming_lost_ranks_on_devices():
            dist.broadcast(as_bytes, group=self._group, group_src=0)  # not src: an aborted group maps no global ranks
        for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(values.view(tensor.shape))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Returns all ranks' tensors, contiguous and of one shape and dtype, as [world_size, *].

        On a GPU the current stream waits for them, as in `start_all_reduce`.
        """
        found = tensor.new_empty(self.world_size, *tensor.shape)
        if self.is_alone:
            return found.copy_(tensor)
        as_bytes = found.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)  # any dtype
        with self._naming_lost_ranks_on_devices():
            dist.all_gather_into_tensor(*as_bytes, group=self._group)
        return found

    def broadcast_from(self, rank: int, tensor: Tensor) -> None:
        """Writes one rank's contiguous tensor on the device to that of every other rank."""
        if not self.is_alone:
            with self._naming_lost_ranks_on_devices():
                dist.broadcast(tensor, group=self._group, group_src=rank)

    def start_all_reduce(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Starts to replace each tensor, contiguous and on the device, by its sum over ranks.

        Returns a function after which the sums may be read: on a GPU the current stream waits for them, the host does
        not. Launches device work only, which a CUDA graph can capture. The sums have the same bits on every rank.
        """
        if self.is_alone:
            return lambda: None
        with self._naming_lost_ranks_on_devices():
            works = self._start_all_reduces(tensors)

        def wait() -> None:
            with self._naming_lost_ranks_on_devices():
                for work in works:
                    if work is not None:
                        work.wait()

        return wait

    def _start_all_reduces(self, tensors: Sequence[Tensor]) -> list[Any]:
        if self._group is self._host_group:
            return [dist.all_reduce(tensor, group=self._group, async_op=True) for tensor in tensors]
        # NCCL sums tensors of one dtype in one kernel, which takes no longer than for one tensor of their total size.
        dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
        return [self._group.allreduce_coalesced([t for t in tensors if t.dtype is dtype]) for dtype in dtypes]

    def _naming_lost_ranks_on_devices(self) -> contextlib.AbstractContextManager[None]:
        """Returns `_naming_lost_ranks` over gloo, `_naming_aborts` over NCCL."""
        return _naming_lost_ranks() if self._group is self._host_group else _naming_aborts()


@contextlib.contextmanager
def _naming_lost_ranks() -> Iterator[None]:
    """Turns an error of gloo into LostRankError: the arguments are right, so a connection has failed."""
    try:
        yield
    except RuntimeError as error:
        raise _lost_rank_error(error) from error


@contextlib.contextmanager
def _naming_aborts() -> Iterator[None]:
    """Turns NCCL's error in a group that Ray Train ends into LostRankError; others are the device's or a capture's.

    PyTorch has no class for it. If it has aborted the group itself, after an error or a timeout, the text says why.
    """
    try:
        yield
    except dist.DistBackendError as error:
        if "communicator was aborted" not in str(error) or "Original reason for failure" in str(error):
            raise
        raise _lost_rank_error(error) from error


def _lost_rank_error(error: Exception) -> LostRankError:
    return LostRankError(f"another rank was lost: {str(error).strip().splitlines()[0]}"[:500])


def digest(value: Any) -> str:
    """Returns a hash, 16 hexadecimal digits, of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _shortened(value: Any) -> str:
    return json.dumps(value, sort_keys=True)[:300]
