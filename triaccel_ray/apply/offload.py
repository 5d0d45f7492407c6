"""Offloads the saved tensors of regions to pinned host memory, and prefetches them for the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from triaccel_ray.apply.fp8 import E4M3
from triaccel_ray.cuda.out_of_memory import first_line
from triaccel_ray.cuda.stream_pool import PooledStream

MIN_BYTES = 2**20
"""Smallest tensor that is moved: below it, copies cost more launches than they save memory."""
_MAX_SURPLUS = 4
"""A view is moved with its whole memory, up to this multiple of its own size: q, k and v share one projection."""
_CHUNK_BYTES = 2**26
"""Smallest piece of host memory; PyTorch rounds pinned memory up to a power of two."""
_ALIGNMENT = 512
_MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: {shape}, in a "
    "region of the model whose saved tensors are offloaded or measured"
)
Excluding = Callable[[], contextlib.AbstractContextManager[None]]
"""Makes a context whose time does not count as the region's."""


@dataclass(frozen=True, eq=False)
class RegionWeights:
    """Recognizes a region's weights among its saved tensors: they are stored anyway."""

    storages: frozenset[int]
    shapes: frozenset[torch.Size]

    @classmethod
    def of(cls, region: nn.Module) -> RegionWeights:
        """Returns the parameters and buffers of `region` as they are now."""
        tensors = [*region.parameters(), *region.buffers()]
        shapes = {tensor.shape for tensor in tensors if tensor.dim() > 1}
        both = shapes | {torch.Size([*shape[:-2], shape[-1], shape[-2]]) for shape in shapes}
        return cls(frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors), frozenset(both))

    def include(self, tensor: Tensor) -> bool:
        """Returns whether `tensor` is a parameter or a buffer, or by its shape a copy of one in low precision."""
        is_copy = tensor.dtype in (torch.float16, torch.bfloat16, E4M3) and tensor.shape in self.shapes
        return is_copy or tensor.untyped_storage().data_ptr() in self.storages


def movable_bytes(tensor: Tensor, device: torch.device) -> int:
    """Returns the bytes of the memory that is moved to the host with `tensor`; 0 if it stays on the device."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.device.type != device.type or tensor.is_conj() or tensor.is_neg():
        return 0
    own, whole = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
    return whole if own >= MIN_BYTES and whole <= _MAX_SURPLUS * own else 0


class Kept:
    """A saved tensor that stays on the device, and is checked for writes: PyTorch does not check under hooks.

    It is detached: an output that its own node saves would otherwise keep the graph alive in a cycle.
    """

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor.detach(), tensor._version

    def unpack(self) -> Tensor:
        """Returns the tensor.

        Raises:
            RuntimeError: it has been written to.
        """
        _require_version(self._tensor, self._version)
        return self._tensor


def _require_version(tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        raise RuntimeError(_MODIFIED.format(shape=f"{tensor.dtype} {list(tensor.shape)}"))


@dataclass(eq=False)
class _Block:
    """A piece of memory that saved tensors lie in."""

    source: Tensor | None
    """The first tensor saved in it, detached; None once it has left the device."""
    version: int
    num_bytes: int
    host: Tensor | None = None
    """Its copy, uint8."""
    memory: Tensor | None = None
    """Device memory that it has come back to, uint8."""
    is_overwritten: bool = False
    """Whether it was written to while it was copied."""


@dataclass(eq=False)
class _Bundle:
    """The blocks of one call of a region."""

    name: str
    previous: _Bundle | None
    blocks: dict[Any, _Block] = field(default_factory=dict)
    sent: Any = None
    """Event after the copies to the host."""
    is_used: bool = False


@dataclass(frozen=True, eq=False)
class _Moved:
    """A saved tensor as a view of its block."""

    block: _Block
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def unpack(self) -> Tensor:
        block = self.block
        if block.source is not None:
            _require_version(block.source, block.version)
        if block.is_overwritten:
            raise RuntimeError(_MODIFIED.format(shape=f"{self.dtype} {list(self.size)}"))
        held = block.memory if block.source is None else block.source
        assert held is not None
        view = torch.empty(0, dtype=self.dtype, device=held.device)
        return view.set_(held.untyped_storage(), self.offset, self.size, self.stride)


class Arena:
    """Host memory that each pass reuses from its start. It grows and is never freed: captured steps write to it."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._chunks: list[Tensor] = []
        self._chunk = self._offset = 0

    def rewind(self) -> None:
        """Makes all memory available again."""
        self._chunk = self._offset = 0

    def take(self, num_bytes: int, *, grows: bool = True) -> Tensor:
        """Returns unused memory, uint8 [num_bytes]; `grows` is False during capture, when none can be pinned.

        Raises:
            RuntimeError: the host cannot pin that much, or too little is left and `grows` is False.
        """
        while True:
            if self._chunk == len(self._chunks):
                if not grows:
                    raise RuntimeError(f"offloading needs more pinned memory than the step before: {num_bytes} bytes")
                self._grow(num_bytes)
            chunk, begin = self._chunks[self._chunk], self._offset
            if begin + num_bytes <= len(chunk):
                self._offset = begin + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
                return chunk[begin : begin + num_bytes]
            self._chunk, self._offset = self._chunk + 1, 0

    def _grow(self, num_bytes: int) -> None:
        size = max(_CHUNK_BYTES, 1 << (num_bytes - 1).bit_length())
        self._chunks.append(torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned))


class Offloading:
    """Moves the saved tensors of regions to the host after their calls, and back before their backward passes.

    One stream copies in both directions. A region's memory is free on the device once the next region has been called.
    It is prefetched while the next region runs backward (vDNN, Rhu et al. 2016). Events order all uses. Unlike
    `record_stream`, they work in captured steps and free memory at fixed points. On a CPU, tensors are copied within
    the host's memory: of use in tests only.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pooled = PooledStream(device) if device.type == "cuda" else None
        self._stream = None if self._pooled is None else self._pooled.stream
        self.arena = Arena(pinned=self._stream is not None)
        self.unpinned: dict[str, str] = {}
        """Region that kept tensors because the host could not pin memory for them -> the error."""
        self._last: _Bundle | None = None
        self._leaving: _Bundle | None = None
        self._arrived: Any = None
        """Event after the last copies back; those of earlier bundles precede it."""
        self._has_copied = False

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Returns a context for one forward and backward pass."""
        self.arena.rewind()
        self._arrived, self._has_copied = None, False
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # of a capture that is void already
                self._join()
            raise
        else:
            self._join()
        finally:
            self._last = self._leaving = None  # and with them what was fetched and never used

    def run(
        self,
        name: str,
        weights: RegionWeights,
        excluding: Excluding,
        call: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Returns what `call` returns; the tensors that it saves leave with the next `send`."""
        bundle = _Bundle(name, self._last)
        leaving = {} if self._leaving is None else self._leaving.blocks
        near = {key: block for key, block in leaving.items() if block.source is not None}  # else its address is reused

        def pack(tensor: Tensor) -> Kept | _Moved:
            num_bytes = 0 if weights.include(tensor) else movable_bytes(tensor, self._device)
            if not num_bytes:
                return Kept(tensor)
            key = tensor.untyped_storage().data_ptr(), tensor._version
            block = near.get(key) or bundle.blocks.get(key) or _Block(tensor.detach(), tensor._version, num_bytes)
            bundle.blocks[key] = block
            return _Moved(block, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())

        def unpack(packed: Kept | _Moved) -> Tensor:
            if not bundle.is_used:
                self._use(bundle, excluding)
            return packed.unpack()

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            outputs = call(*args, **kwargs)
        self._last = bundle
        return outputs

    def send(self, name: str = "") -> None:
        """Frees the tensors that the previous call sent; sends those that region `name` has just saved, if given.

        Raises:
            RuntimeError: a step is captured that needs more host memory than the steps before it.
        """
        self._settle()
        bundle = self._last
        if bundle is None or bundle.name != name:
            return
        blocks = [block for block in bundle.blocks.values() if block.host is None]
        for block in blocks:
            block.host = self._host_memory(name, block.num_bytes)
        with self._copying():
            for block in blocks:
                if block.host is not None and block.source is not None:
                    block.host.copy_(_bytes_of(block.source), non_blocking=True)
        bundle.sent = self._event()
        self._leaving = bundle

    def _host_memory(self, name: str, num_bytes: int) -> Tensor | None:
        is_captured = self._stream is not None and torch.cuda.is_current_stream_capturing()
        try:
            return self.arena.take(num_bytes, grows=not is_captured)
        except RuntimeError as error:
            if is_captured:
                raise
            self.unpinned[name] = first_line(error)
            return None

    def _settle(self) -> None:
        """Frees device memory that has been copied to the host."""
        bundle, self._leaving = self._leaving, None
        if bundle is None:
            return
        self._wait(bundle.sent)
        for block in bundle.blocks.values():
            if block.source is not None and block.host is not None:
                block.is_overwritten = block.source._version != block.version
                block.source = None

    def _use(self, bundle: _Bundle, excluding: Excluding) -> None:
        """Waits until the tensors of `bundle` are on the device, and starts to prefetch those of the previous one."""
        if self._leaving is not None:
            last, self._leaving = self._leaving, None
            self._wait(last.sent)  # the tensors are still here, and may be freed by the backward pass
        self._fetch(bundle)
        with excluding():
            self._wait(self._arrived)
        bundle.is_used, bundle.blocks = True, {}  # from now on only the tensors in them hold the blocks
        if bundle.previous is not None:
            self._fetch(bundle.previous)

    def _fetch(self, bundle: _Bundle) -> None:
        """Starts to copy back what is not on the device. The bundle holds it until computation has waited for it."""
        blocks = [block for block in bundle.blocks.values() if block.source is None and block.memory is None]
        if not blocks:
            return
        for block in blocks:
            block.memory = torch.empty(block.num_bytes, dtype=torch.uint8, device=self._device)
        with self._copying():
            for block in blocks:
                assert block.memory is not None
                assert block.host is not None
                block.memory.copy_(block.host, non_blocking=True)
        self._arrived = self._event()

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._has_copied = True
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # outside: inside, it would be itself
        with torch.cuda.stream(self._stream):
            yield

    def _event(self) -> Any:
        return None if self._stream is None else self._stream.record_event()

    def _wait(self, event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def _join(self) -> None:
        if self._stream is not None and self._has_copied:  # else a capture would wait for work outside of it
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Returns the whole memory that `tensor` lies in, uint8, without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
