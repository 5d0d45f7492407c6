"""Memory of the whole process on its device, and the cap that enforces a memory budget."""

from __future__ import annotations

import contextlib
import gc
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from types import NoneType

import psutil
import pynvml
import torch

from triaccel_ray.cuda.allocator import cap_memory
from triaccel_ray.cuda.nvml import nvml_handle
from triaccel_ray.cuda.out_of_memory import BudgetExceededError
from triaccel_ray.records.signals import MemorySignal

MIB = 2**20
LIBRARIES_BYTES = 192 * MIB
"""Bytes of a budget kept free until `require_room`, for libraries that the first samples load: 162 MiB on an H200."""
LAZY_LOADING_BYTES = 96 * MIB
"""Bytes kept free from then until the first tick, for libraries, kernels and graphs outside the allocator."""
NEW_PLAN_BYTES = 32 * MIB
"""Bytes kept free after the first tick, for what a new plan loads outside the allocator, such as kernels."""


class MemoryMeter(ABC):
    """Measures the process's memory on its device, tracks the peaks, and keeps it below `limit_bytes`."""

    name: str
    """The device, for messages."""
    source: str
    """Where the figures of `sample` come from, for the log."""
    allocated_peak_bytes = 0
    """Peak bytes of the allocator's tensors since the run began; 0 if the device has no such counter."""

    def __init__(self, budget_bytes: int | None, headroom_bytes: int | None = None) -> None:
        """Sets the budget, the whole device if None; `require_room` turns a headroom into a budget within this one.

        Raises:
            TypeError: one of them is no integer.
            ValueError: the budget is not positive, or larger than the device.
        """
        for name, value in {"memory_budget": budget_bytes, "memory_headroom": headroom_bytes}.items():
            if type(value) not in (int, NoneType):  # a bool is an `int`, too
                raise TypeError(f"{name} = {value!r}: must be an integer number of bytes, such as 2 * 2**30")
        total, _ = self._total_and_free_bytes()
        if budget_bytes is not None and not 0 < budget_bytes <= total:
            raise ValueError(
                f"memory budget = {mib(budget_bytes)}: must be positive and at most the {mib(total)} of {self.name}"
            )
        self._headroom_bytes, self._most_bytes = headroom_bytes, budget_bytes or total
        self.has_budget, self.limit_bytes = budget_bytes is not None, self._most_bytes
        self.idle_bytes = 0
        """Bytes that the process holds without a batch; set by `require_room`."""
        self.window_peak_bytes = self.peak_bytes = 0
        self.sample()

    def sample(self) -> int:
        """Returns the bytes that the process holds now, and updates the peaks with them."""
        return self._remember(self._held_bytes())

    def refresh_peaks(self) -> int:
        """Returns the bytes held now; also updates the peaks with the system's own record of them, if it keeps one."""
        used = self.sample()
        self._remember(self._peak_bytes(used))
        return used

    def read(self) -> MemorySignal:
        """Returns the figures of the current window and starts a new one; call it between steps."""
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

    def bytes_of_step(self) -> int:
        """Returns the peak bytes of tensors so far, less those of the tensors that exist now; 0 on a CPU."""
        self.refresh_peaks()
        return self.allocated_peak_bytes - self._allocated_bytes()

    def begin_window(self) -> None:
        """Releases unused memory and resets the window's peak; call it when the next steps need less memory."""
        self.release()
        self._reset_peak()
        self.window_peak_bytes = 0
        self.sample()

    @contextlib.contextmanager
    def outside_window(self) -> Iterator[None]:
        """Returns a context whose memory counts in the run's peak, but not in the window's, on which plans are based.

        What is still held afterwards counts, and all of it does if the system's own peak cannot be reset.
        """
        self.refresh_peaks()
        before = self.window_peak_bytes
        try:
            yield
        finally:
            self.refresh_peaks()
            self._reset_peak()
            self.window_peak_bytes = before

    def release(self) -> None:
        """Collects garbage, then returns unused memory to the device."""
        gc.collect()
        self.trim()

    @abstractmethod
    def trim(self) -> None:
        """Returns the allocator's unused memory to the device, without collecting garbage first."""

    @property
    def is_exceeded_at_rest(self) -> bool:
        """Whether the process exceeds its budget without a batch in flight; False if the device enforces the budget."""
        return False

    def check(self) -> None:
        """Raises BudgetExceededError if an explicit budget is exceeded and the device does not enforce it itself."""
        return

    def close(self) -> None:
        """Ends the cap on the process, if the device enforces the budget."""
        return

    def raise_peaks(self, peak_bytes: int, allocated_peak_bytes: int) -> None:
        """Includes the peaks of the run before the checkpoint that it resumes from."""
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        self.allocated_peak_bytes = max(self.allocated_peak_bytes, allocated_peak_bytes)

    def require_room(self) -> None:
        """Turns a headroom into a budget; raises ValueError if the process fills the budget before any batch."""
        self.release()
        used = self.idle_bytes = self.sample()
        if self._headroom_bytes is not None:
            self.limit_bytes, self.has_budget = min(used + self._headroom_bytes, self._most_bytes), True
        if used >= self.limit_bytes:
            self.close()
            raise ValueError(
                f"memory budget = {mib(self.limit_bytes)}: the process already holds {mib(used)} on {self.name} with "
                "runtime, model, optimizer and data, before the first batch; give a larger budget or a smaller model"
            )

    @abstractmethod
    def _total_and_free_bytes(self) -> tuple[int, int]:
        """Returns the device's total memory and its free memory."""

    @abstractmethod
    def _held_bytes(self) -> int: ...

    @abstractmethod
    def _peak_bytes(self, used: int) -> int:
        """Returns the most bytes held since `_reset_peak`; `used` are the bytes held now."""

    @abstractmethod
    def _reset_peak(self) -> None:
        """Resets the system's own record of the peak."""

    def _allocated_bytes(self) -> int:
        return 0

    @abstractmethod
    def _adjust(self, used: int) -> None:
        """Corrects the idle memory, or the cap on the device, for code and buffers loaded since the last reading."""

    def _remember(self, used: int) -> int:
        self.window_peak_bytes = max(self.window_peak_bytes, used)
        self.peak_bytes = max(self.peak_bytes, used)
        return used


class ResidentMemory(MemoryMeter):
    """Meter for a CPU: the resident set, with its peak from the kernel's high-water mark."""

    name, source = "this machine", "resident set"

    def __init__(self, budget_bytes: int | None, headroom_bytes: int | None = None) -> None:
        """Resets the high-water mark."""
        self._process = psutil.Process()
        self._idle_heap_bytes, self._first_idle_bytes = _heap_bytes(), 0
        self._reset_peak()
        super().__init__(budget_bytes, headroom_bytes)

    def require_room(self) -> None:
        """Turns a headroom into a budget, and records the size of the heap before any batch."""
        super().require_room()
        self._idle_heap_bytes, self._first_idle_bytes = _heap_bytes(), self.idle_bytes

    @property
    def is_exceeded_at_rest(self) -> bool:
        """Whether the process exceeds its budget without a batch in flight; a smaller batch would not help."""
        return self.has_budget and self.sample() > self.limit_bytes

    def check(self) -> None:
        """Raises BudgetExceededError if the resident set exceeds an explicit budget."""
        if not self.has_budget or (used := self.sample()) <= self.limit_bytes:
            return
        mapped = int(getattr(self._process.memory_info(), "shared", 0))  # files and shared memory; Linux only
        raise BudgetExceededError(
            f"the process holds {mib(used)} of a budget of {mib(self.limit_bytes)}: {mib(used - mapped)} anonymous, "
            f"{mib(mapped)} file-backed; before its first batch it held {mib(self.idle_bytes)}"
        )

    def trim(self) -> None:
        """Returns the heap's free pages to the system, if the C library supports it."""
        if hasattr(psutil, "heap_trim"):
            psutil.heap_trim()

    def _total_and_free_bytes(self) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return int(memory.total), int(memory.available)

    def _held_bytes(self) -> int:
        return int(self._process.memory_info().rss)

    def _peak_bytes(self, used: int) -> int:
        """Returns the kernel's peak of the resident set; `used` if it keeps none."""
        with contextlib.suppress(OSError, IndexError):
            return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
        return used

    def _reset_peak(self) -> None:
        """Lowers the kernel's peak to the current resident set; without permission, the peak only grows."""
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def _adjust(self, used: int) -> None:
        """Sets the idle memory to that before the first batch and the heap's change since, then the limit.

        No batch causes the change: libraries keep code and buffers for each shape, and a batch may reuse freed memory.
        """
        change_bytes = _heap_bytes() - self._idle_heap_bytes
        idle_bytes = max(self._first_idle_bytes + change_bytes, 0)
        self.idle_bytes = min(idle_bytes, used)  # pages never touched are not resident
        if self._headroom_bytes is not None:
            self.limit_bytes = min(self.idle_bytes + self._headroom_bytes, self._most_bytes)


class CudaMemory(MemoryMeter):
    """Meter for a GPU: the driver's figure for this process (NVML), with the CUDA context and graph pools."""

    def __init__(self, device: torch.device, budget_bytes: int | None, headroom_bytes: int | None = None) -> None:
        """Creates the CUDA context, and sets the cap."""
        self._device = device
        self.name, self._handle = torch.cuda.get_device_properties(device).name, nvml_handle(device)
        torch.zeros(1, device=device)  # creates the context, so that the first sample includes it
        self._reset_peak()
        self.source = "nvml process" if self._own_bytes() is not None else "allocator pool, NVML hides processes"
        super().__init__(budget_bytes, headroom_bytes)
        self._enforce(reserve_bytes=LIBRARIES_BYTES)

    def require_room(self) -> None:
        """Turns a headroom into a budget, and keeps `LAZY_LOADING_BYTES` of it free until the first reading."""
        super().require_room()
        self._enforce(reserve_bytes=LAZY_LOADING_BYTES)

    def close(self) -> None:
        """Ends the cap on the process; a cap of the user's stays."""
        cap_memory(self._device, 1.0)

    def trim(self) -> None:
        """Returns the allocator's unused blocks to the driver."""
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
        """Returns the driver's figure for this process; None in a container with process IDs of its own."""
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        own = [p.usedGpuMemory for p in processes if p.pid == os.getpid() and p.usedGpuMemory]
        return int(own[0]) if own else None

    def _outside_bytes(self, used: int) -> int:
        return max(used - torch.cuda.memory_reserved(self._device), 0)

    def _peak_bytes(self, used: int) -> int:
        """Returns the peak of the allocator's reserved memory, which the driver saw, plus what is held outside it."""
        self.allocated_peak_bytes = max(self.allocated_peak_bytes, torch.cuda.max_memory_allocated(self._device))
        return torch.cuda.max_memory_reserved(self._device) + self._outside_bytes(used)

    def _reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def _adjust(self, used: int) -> None:
        """Corrects the cap for libraries and graphs loaded since then, which take memory outside the allocator."""
        if self.has_budget and self._outside_bytes(used) < self.limit_bytes:
            self._enforce(reserve_bytes=NEW_PLAN_BYTES)

    def _enforce(self, *, reserve_bytes: int) -> None:
        """Caps the allocator at the budget minus what the process holds outside it.

        `reserve_bytes`, at most half of the free rest, are kept back for code and buffers loaded outside the allocator.
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
        cap_memory(self._device, share)


def memory_meter(
    device: torch.device, budget_bytes: int | None = None, headroom_bytes: int | None = None
) -> MemoryMeter:
    """Returns the meter for `device`; see `MemoryMeter` for the errors."""
    if device.type == "cuda":
        return CudaMemory(device, budget_bytes, headroom_bytes)
    return ResidentMemory(budget_bytes, headroom_bytes)


def mib(num_bytes: int) -> str:
    """Returns the amount in whole MiB, as text for messages."""
    return f"{num_bytes / MIB:.0f} MiB"


def _heap_bytes() -> int:
    """Returns the bytes allocated on the heap; 0 if the C library does not report them."""
    found = psutil.heap_info() if hasattr(psutil, "heap_info") else None
    return 0 if found is None else int(found.heap_used + found.mmap_used)
