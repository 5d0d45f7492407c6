"""Lists of tensors for one kernel launch: tables of their addresses, and their division into chunks for programs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

DTYPE_CODES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3, torch.int16: 4, torch.uint8: 5}
"""Dtype -> code that kernels branch on to read a tensor; 0 means absent. int16 is for low words (`split_words`), uint8
for optimizer state (`eight_bits`)."""


class Chunks:
    """Cuts tensors of fixed sizes into chunks of at most `chunk_size` elements, one per program.

    A tensor smaller than that is one chunk, an empty one none. Chunks never cross a tensor's end, so a program handles
    one dtype and one set of hyperparameters.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device, chunk_size: int) -> None:
        """Creates the tables for `sizes` (elements per tensor) on `device`.

        The chunk size is a power of two, at least 16: a program's vectors and the 16-byte alignment of its first
        element need that.
        """
        size = torch.tensor(list(sizes), dtype=torch.int64)
        chunks_per_tensor = (size + chunk_size - 1) // chunk_size
        tensor = torch.repeat_interleave(torch.arange(len(size)), chunks_per_tensor)
        first_chunk = chunks_per_tensor.cumsum(0) - chunks_per_tensor
        start = (torch.arange(len(tensor)) - first_chunk[tensor]) * chunk_size
        length = (size[tensor] - start).clamp(max=chunk_size)
        # Programs start in this order. Short chunks are not read in wide vectors and may take longer. They come first,
        # so that the launch does not wait for them at the end.
        order = torch.argsort((length == chunk_size).int(), stable=True)
        self.chunk_size = chunk_size
        self.num_chunks = len(tensor)
        self.tensor = tensor[order].int().to(device)
        """Index of each chunk's tensor, int32 [num_chunks]."""
        self.start = start[order].to(device)
        """Index of each chunk's first element in its tensor, int64 [num_chunks]; a multiple of `chunk_size`."""
        self.length = length[order].int().to(device)
        """Number of elements of each chunk, int32 [num_chunks]; full chunks come last."""


class TensorTable:
    """Table of a list of tensors for kernels to read: an address and a dtype code per tensor, 0 for an absent one.

    A captured CUDA graph reads the table at each replay, so the tensors may be set after the capture.
    """

    def __init__(self, num_tensors: int, device: torch.device, *, sizes: Sequence[int] | None = None) -> None:
        """Begins with every tensor absent; `sizes` are the element counts that `point_to` accepts (None: any)."""
        self.num_tensors, self.device = num_tensors, torch.device(device)
        self._sizes = None if sizes is None else list(sizes)
        # One buffer, one upload. The codes begin at a multiple of 16 bytes for any number of tensors, since Triton
        # recompiles a kernel for a pointer of another alignment.
        self._codes_at = num_tensors + num_tensors % 2
        self._packed = torch.zeros(self._codes_at + (num_tensors + 1) // 2, dtype=torch.int64, device=self.device)
        self._addresses = self._packed[:num_tensors]
        self._codes = self._packed[self._codes_at :].view(torch.int32)[:num_tensors]
        self.dtypes: frozenset[torch.dtype] = frozenset()
        """The dtypes among the current tensors."""
        self._tensors: tuple[Tensor | None, ...] = (None,) * num_tensors
        self._named = self._uploaded = [0] * num_tensors, [0] * num_tensors

    @property
    def addresses(self) -> Tensor:
        """Device addresses, int64 [num_tensors]; 0 if absent."""
        self._upload_on_cpu()
        return self._addresses

    @property
    def codes(self) -> Tensor:
        """Values of `DTYPE_CODES`, int32 [num_tensors]; 0 if absent."""
        self._upload_on_cpu()
        return self._codes

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The current tensors; on a CPU only.

        Raises:
            RuntimeError: the table is on another device, where it keeps no references.
        """
        if self.device.type != "cpu":
            raise RuntimeError(f"a table on {self.device} keeps no reference to its tensors")
        return self._tensors

    def point_to(self, tensors: Sequence[Tensor | None], *, upload: bool = True) -> None:
        """Sets the tensors (None: absent), without waiting for the device and without a copy if nothing changed.

        On a GPU the caller keeps their memory alive as long as kernels, or replays of a captured graph, read the table.
        Without `upload`, as during the capture of a graph, kernels see them once `upload_named` has been called.

        Raises:
            ValueError: the number of tensors is wrong, or one has another size, dtype or device than this table takes,
                or elements that do not fill one contiguous range of memory.
        """
        if len(tensors) != self.num_tensors:
            raise ValueError(f"{len(tensors)} tensors for a table of {self.num_tensors}")
        for index, tensor in enumerate(tensors):
            if tensor is not None:
                self._check(index, tensor)
        self.dtypes = frozenset(tensor.dtype for tensor in tensors if tensor is not None)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        self._named = addresses, [0 if tensor is None else DTYPE_CODES[tensor.dtype] for tensor in tensors]
        if self.device.type == "cpu":
            self._tensors = tuple(tensors)
        elif upload:
            self.upload_named()

    def upload_named(self) -> None:
        """Uploads the tensors' addresses and codes if the device does not have them yet."""
        if self._named == self._uploaded:
            return
        addresses, codes = self._uploaded = self._named
        packed = torch.zeros(self._packed.shape, dtype=torch.int64)
        packed[: self.num_tensors] = torch.tensor(addresses, dtype=torch.int64)
        packed[self._codes_at :].view(torch.int32)[: self.num_tensors] = torch.tensor(codes, dtype=torch.int32)
        upload(packed, self._packed)

    def forget(self) -> None:
        """Releases the tensors on a CPU; on a GPU, where none are held, kernels still read the addresses."""
        self._tensors = (None,) * self.num_tensors

    def _upload_on_cpu(self) -> None:
        if self.device.type == "cpu":  # only Triton's interpreter reads the table there, through these properties
            self.upload_named()

    def _check(self, index: int, tensor: Tensor) -> None:
        if tensor.dtype not in DTYPE_CODES:
            names = ", ".join(sorted(map(str, DTYPE_CODES)))
            raise ValueError(f"tensor {index} is {tensor.dtype}: this table takes {names}")
        if tensor.device != self._packed.device:
            raise ValueError(f"tensor {index} is on {tensor.device}: this table is on {self._packed.device}")
        if self._sizes is not None and tensor.numel() != self._sizes[index]:
            raise ValueError(f"tensor {index} has {tensor.numel()} elements: must have {self._sizes[index]}")
        if not is_dense(tensor):
            raise ValueError(
                f"tensor {index} of shape {tuple(tensor.shape)} and strides {tensor.stride()} does not fill one "
                "stretch of memory: pass a contiguous (or channels_last) one"
            )


def is_dense(tensor: Tensor) -> bool:
    """Returns whether the elements fill one range of memory without overlap, in any order of the dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(_strides(tensor)):
        if stride != expected:
            return False
        expected *= size
    return True


def have_equal_dense_strides(*tensors: Tensor) -> bool:
    """Returns whether all are dense with equal strides, so that elementwise kernels may ignore their shape.

    Strides of dimensions of size 1 do not count.
    """
    first, *others = tensors
    return is_dense(first) and all(
        other.shape == first.shape and _strides(other) == _strides(first) for other in others
    )


def _strides(tensor: Tensor) -> list[tuple[int, int]]:
    return [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]


def upload(values: Tensor, destination: Tensor) -> None:
    """Copies `values` from the host into `destination`, without waiting if that is on a GPU.

    Pinned memory is allocated anew each time: PyTorch reuses it only after the copy that reads it is done.
    """
    if destination.device.type == "cuda":
        values = values.pin_memory()
    destination.copy_(values, non_blocking=True)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Returns a context in which kernels launch on `device`."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
