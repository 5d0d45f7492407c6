"""The memory profile of a model: what its regions cost, and how fast the host's link is."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from triaccel_ray.measure.timing import synchronize
from triaccel_ray.model.layers import batch_norms, uses_batch_statistics
from triaccel_ray.records.signals import MemoryProfile, RegionSignal

_LINK_BYTES = (2**26, 2**22)
"""Bytes copied to measure the link, and fewer if memory does not suffice."""
_NUM_COPIES = 3
Costs = Callable[[int], tuple[int, tuple[RegionSignal, ...]]]
"""Batch size -> size of its micro-batches, and the costs of regions in a pass of one; empty if not known."""


class ProfileMeter:
    """Reads the memory profile at ticks, once the costs of regions are known for the micro-batch of now."""

    def __init__(self, model: nn.Module, device: torch.device, costs: Costs) -> None:
        self._model, self._device, self._costs = model, device, costs
        self._bandwidth = 0.0, 0.0

    def read(self, batch_size: int) -> MemoryProfile | None:
        """Returns the profile for batches of this size; None while it is not known, or not needed.

        The first profile measures the bandwidth of the host's link, which waits for the device.
        """
        micro_batch_size, regions = self._costs(batch_size)
        if not regions:
            return None
        if not all(self._bandwidth):
            self._bandwidth = link_bandwidth(self._device)
        to_host, to_device = self._bandwidth
        num_trained = sum(parameter.numel() for parameter in self._model.parameters() if parameter.requires_grad)
        return MemoryProfile(
            regions=regions,
            micro_batch_size=micro_batch_size,
            to_host_bytes_per_ms=to_host,
            to_device_bytes_per_ms=to_device,
            can_split=not any(map(uses_batch_statistics, batch_norms(self._model))),
            accumulation_bytes=4 * num_trained,  # in FP32
        )


def link_bandwidth(device: torch.device) -> tuple[float, float]:
    """Returns bytes per millisecond to pinned host memory and back; 0 on a CPU, or if no memory is free to measure."""
    if device.type != "cuda":
        return 0.0, 0.0
    for num_bytes in _LINK_BYTES:
        try:
            on_host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            on_device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        except RuntimeError:
            continue
        return _bytes_per_ms(on_host, on_device, device), _bytes_per_ms(on_device, on_host, device)
    return 0.0, 0.0


def _bytes_per_ms(target: Tensor, source: Tensor, device: torch.device) -> float:
    began = 0.0
    for index in range(1 + _NUM_COPIES):  # the first one is not timed
        if index == 1:
            synchronize(device)
            began = time.perf_counter()
        target.copy_(source, non_blocking=True)
    synchronize(device)
    return _NUM_COPIES * len(source) / (1e3 * (time.perf_counter() - began))
