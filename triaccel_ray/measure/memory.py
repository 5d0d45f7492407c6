"""Memory of this process on its device, as the user pays for it, and the cap that enforces a budget."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

import psutil
import pynvml
import torch

from triaccel_ray.cuda.out_of_memory import BudgetExceededError
from triaccel_ray.records.signals import MemorySignal

MIB = 2**20
LAZY_LOADING_BYTES = 96 * MIB
"""Kept free until the first tick for what libraries, kernels and graphs will take outside the allocator."""


class MemoryMeter(ABC):
    """Reads what the process holds on its device, remembers the peaks, and keeps it below `limit_bytes`."""

    name: str
    """The device, for messages."""
    source: str
    """Where `sample` has its figure from, for the record."""
    allocated_peak_bytes = 0
    """Largest the allocator has held since the run began; 0 where there is no such counter."""

    def __init__(self, budget_bytes: int | None, headroom_bytes: int | None = None) -> None:
        """Takes the budget, the whole device when None; `require_room` makes a budget of a headroom, within this one.

        Raises:
            ValueError: the budget is not positive, or larger than the device.
        """
        total, _ = self._total_and_free_bytes()
        if budget_bytes is not None and not 0 < budget_bytes <= total:
            raise ValueError(
                f"memory budget = {mib(budget_bytes)}: must be positive and at most the {mib(total)} of {self.name}"
            )
        self._headroom_bytes, self._most_bytes = headroom_bytes, budget_bytes or total
        self.has_budget, self.limit_bytes = budget_bytes is not None, self._most_bytes
        self.idle_bytes = 0
        """What the process holds without a batch; set by `require_room`."""
        self.window_peak_bytes = self.peak_bytes = 0
        self.sample()

    def sample(self) -> int:
        """Returns what the process holds now, and remembers it in the peaks."""
        return self._remember(self._held_bytes())

    def refresh_peaks(self) -> int:
        """Returns what the process holds now; peaks between two samples, where the system keeps them, count too."""
        used = self.sample()
        self._remember(self._peak_bytes(used))
        return used

    def read(self) -> MemorySignal:
        """Returns the window's figures and begins a new window; to be called between steps."""
        used = self.refresh_peaks()
        self._reset_peak()
        self._adjust(used)
        signal = MemorySignal(
            used_bytes=used,
            window_peak_bytes=self.window_peak_bytes,
            peak_bytes=self.peak_bytes,
            limit_bytes=self.limit_bytes,
            idle_bytes=self.idle_bytes,
            allocated_bytes=self._allocated_bytes(),
            allocated_peak_bytes=self.allocated_peak_bytes,
            free_bytes=self._total_and_free_bytes()[1],
        )
        self.window_peak_bytes = used
        return signal

    def begin_window(self) -> None:
        """Gives freed memory back and forgets the present window's peak: what follows needs less than what was."""
        self.release()
        self._reset_peak()
        self.window_peak_bytes = 0
        self.sample()

    def release(self) -> None:
        """Gives freed memory back to the device."""
        gc.collect()
        self.trim()

    @abstractmethod
    def trim(self) -> None:
        """Gives back what the allocator keeps and nothing uses, without looking for garbage first."""

    @property
    def is_exceeded_at_rest(self) -> bool:
        """Whether the process is beyond its budget without a batch in flight; never where the device enforces it."""
        return False

    def check(self) -> None:
        """Raises BudgetExceededError beyond an explicit budget, where the device does not enforce that itself."""
        return

    def raise_peaks(self, peak_bytes: int, allocated_peak_bytes: int) -> None:
        """Takes over the peaks of the part of the run before a checkpoint."""
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        self.allocated_peak_bytes = max(self.allocated_peak_bytes, allocated_peak_bytes)

    def require_room(self) -> None:
        """Turns a headroom into a budget; raises ValueError where what is held without a batch leaves nothing of it."""
        self.release()
        used = self.idle_bytes = self.sample()
        if self._headroom_bytes is not None:
            self.limit_bytes, self.has_budget = min(used + self._headroom_bytes, self._most_bytes), True
        if used >= self.limit_bytes:
            raise ValueError(
                f"memory budget = {mib(self.limit_bytes)}: the process already holds {mib(used)} on {self.name} with "
                "runtime, model, optimizer and data, before the first batch; give a larger budget or a smaller model"
            )

    @abstractmethod
    def _total_and_free_bytes(self) -> tuple[int, int]:
        """Returns the device's memory, and what of it nobody holds."""

    @abstractmethod
    def _held_bytes(self) -> int: ...

    @abstractmethod
    def _peak_bytes(self, used: int) -> int:
        """Returns the largest that the process has held since `_reset_peak`; it holds `used` bytes now."""

    @abstractmethod
    def _reset_peak(self) -> None:
        """Has the system's own record of the peak begin anew."""

    def _allocated_bytes(self) -> int:
        return 0

    @abstractmethod
    def _adjust(self, used: int) -> None:
        """Corrects what counts as idle, or what the device enforces, by what has been loaded since the last reading."""

    def _remember(self, used: int) -> int:
        self.window_peak_bytes = max(self.window_peak_bytes, used)
        self.peak_bytes = max(self.peak_bytes, used)
        return used


class ResidentMemory(MemoryMeter):
    """On a CPU: the resident set, its peak from the kernel's high-water mark where that can be reset."""

    name, source = "this machine", "resident set"

    def __init__(self, budget_bytes: int | None, headroom_bytes: int | None = None) -> None:
        """Starts a new high-water mark."""
        self._process = psutil.Process()
        self._idle_heap_bytes, self._first_idle_bytes = _heap_bytes(), 0
        self._reset_peak()
        super().__init__(budget_bytes, headroom_bytes)

    def require_room(self) -> None:
        """Turns a headroom into a budget, and notes what the heap holds before any batch."""
        super().require_room()
        self._idle_heap_bytes, self._first_idle_bytes = _heap_bytes(), self.idle_bytes

    @property
    def is_exceeded_at_rest(self) -> bool:
        """Whether the process is beyond its budget without a batch in flight: a smaller one would not help."""
        return self.has_budget and self.sample() > self.limit_bytes

    def check(self) -> None:
        """Raises BudgetExceededError when the resident set is beyond an explicit budget."""
        if not self.has_budget or (used := self.sample()) <= self.limit_bytes:
            return
        mapped = int(getattr(self._process.memory_info(), "shared", 0))  # files and shared memory; Linux alone tells
        raise BudgetExceededError(
            f"the process holds {mib(used)} of a budget of {mib(self.limit_bytes)}: {mib(used - mapped)} anonymous, "
            f"{mib(mapped)} file-backed; before its first batch it held {mib(self.idle_bytes)}"
        )

    def trim(self) -> None:
        """Returns the heap's free pages to the system, where the C library can."""
        if _LIBC is not None:
            _LIBC.malloc_trim(0)

    def _total_and_free_bytes(self) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return int(memory.total), int(memory.available)

    def _held_bytes(self) -> int:
        return int(self._process.memory_info().rss)

    def _peak_bytes(self, used: int) -> int:
        """Returns the kernel's peak of the resident set; `used` where it keeps none."""
        with contextlib.suppress(OSError, IndexError):
            return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
        return used

    def _reset_peak(self) -> None:
        """Lowers the kernel's peak to the present resident set; without the right to, the peak only ever grows."""
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def _adjust(self, used: int) -> None:
        """Counts as idle what the heap holds more than before the first batch; a headroom goes on top.

        It is no batch's: code and buffers that libraries keep for every shape that they have met.
        """
        self.idle_bytes = self._first_idle_bytes + max(_heap_bytes() - self._idle_heap_bytes, 0)
        if self._headroom_bytes is not None:
            self.limit_bytes = min(self.idle_bytes + self._headroom_bytes, self._most_bytes)


class CudaMemory(MemoryMeter):
    """On a GPU: the driver's figure for this process (NVML), CUDA context and graph pools included."""

    def __init__(self, device: torch.device, budget_bytes: int | None, headroom_bytes: int | None = None) -> None:
        """Finds the device in NVML by its UUID, so that CUDA_VISIBLE_DEVICES does not matter, and sets the cap."""
        self._device = device
        properties = torch.cuda.get_device_properties(device)
        self.name = properties.name
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
        torch.zeros(1, device=device)  # creates the context, so that it counts from the first sample on
        self._reset_peak()
        self.source = "nvml process" if self._own_bytes() is not None else "allocator pool, NVML hides processes"
        super().__init__(budget_bytes, headroom_bytes)
        self._enforce()

    def require_room(self) -> None:
        """Turns a headroom into a budget, and keeps `LAZY_LOADING_BYTES` of it free until the first reading."""
        super().require_room()
        self._enforce(reserve_bytes=LAZY_LOADING_BYTES)

    def trim(self) -> None:
        """Gives the allocator's unused blocks back to the driver."""
        torch.cuda.empty_cache()

    def _total_and_free_bytes(self) -> tuple[int, int]:
        memory = pynvml.nvmlDeviceGetMemoryInfo(self._handle)
        return int(memory.total), int(memory.free)

    def _allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def _held_bytes(self) -> int:
        own = self._own_bytes()
        return torch.cuda.memory_reserved(self._device) if own is None else own

    def _own_bytes(self) -> int | None:
        """Returns the driver's figure for this process; None in a container that numbers processes otherwise."""
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        own = [p.usedGpuMemory for p in processes if p.pid == os.getpid() and p.usedGpuMemory]
        return int(own[0]) if own else None

    def _outside_bytes(self, used: int) -> int:
        return max(used - torch.cuda.memory_reserved(self._device), 0)

    def _peak_bytes(self, used: int) -> int:
        """Returns the allocator's largest pool, plus what the process holds outside it.

        The pool is what the driver sees, and it may have been given back between two samples.
        """
        self.allocated_peak_bytes = max(self.allocated_peak_bytes, torch.cuda.max_memory_allocated(self._device))
        return torch.cuda.max_memory_reserved(self._device) + self._outside_bytes(used)

    def _reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def _adjust(self, used: int) -> None:
        """Corrects the cap for libraries and graphs loaded since, which take memory outside the allocator."""
        if self.has_budget and self._outside_bytes(used) < self.limit_bytes:
            self._enforce()

    def _enforce(self, *, reserve_bytes: int = 0) -> None:
        """Limits the allocator to the budget less what the process holds outside it.

        Up to half of what is left, `reserve_bytes` are kept for what will be loaded beside tensors.
        """
        share = 1.0
        if self.has_budget:
            outside = self._outside_bytes(self.sample())
            if self.limit_bytes <= outside:
                raise ValueError(
                    f"memory budget = {mib(self.limit_bytes)}: the CUDA context alone takes {mib(outside)} on "
                    f"{self.name}"
                )
            room = self.limit_bytes - outside
            left = max(room - torch.cuda.memory_reserved(self._device), 0)
            total = torch.cuda.get_device_properties(self._device).total_memory
            share = min((room - min(reserve_bytes, left // 2)) / total, 1.0)
        torch.cuda.set_per_process_memory_fraction(share, self._device)


def memory_meter(
    device: torch.device, budget_bytes: int | None = None, headroom_bytes: int | None = None
) -> MemoryMeter:
    """Returns the meter for `device`; see `MemoryMeter` for the errors."""
    if device.type == "cuda":
        return CudaMemory(device, budget_bytes, headroom_bytes)
    return ResidentMemory(budget_bytes, headroom_bytes)


def mib(num_bytes: int) -> str:
    """Returns an amount for messages, in the unit in which budgets can be told apart."""
    return f"{num_bytes / MIB:.0f} MiB"


def _load_libc() -> ctypes.CDLL | None:
    """Returns glibc where it offers malloc_trim, else None."""
    try:
        libc = ctypes.CDLL(None)
        return libc if hasattr(libc, "malloc_trim") else None
    except OSError:
        return None


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`: arena, ordblks, smblks, hblks, hblkhd, usmblks, fsmblks, uordblks, ..."""

    _fields_: ClassVar = [("values", ctypes.c_size_t * 10)]


_LIBC = _load_libc()


def _heap_bytes() -> int:
    """Returns the bytes that are allocated on the heap, 0 where the C library does not say."""
    if _LIBC is None or not hasattr(_LIBC, "mallinfo2"):
        return 0
    _LIBC.mallinfo2.restype = _Mallinfo
    values = _LIBC.mallinfo2().values
    return int(values[7] + values[4])
