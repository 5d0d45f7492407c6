"""Gradient statistics of a whole model in two launches: one over all chunks, one over the groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from triaccel_ray.kernels.grad_stats.reference import GroupStatistics
from triaccel_ray.kernels.multi_tensor import Chunks, TensorTable, on_device
from triaccel_ray.kernels.multi_tensor_triton import FP16, FP32, load_fp32

INFINITY_BITS = tl.constexpr(0x7F800000)
MAGNITUDE_MASK = tl.constexpr(0x7FFFFFFF)

# Fastest of 2048 to 16384 elements and 1 to 16 warps on an H200. With larger chunks programs wait for the last one.
# With smaller ones they spend more time looking up addresses.
CHUNK_SIZE = 4096
NUM_WARPS = 4
PIECE = 1024
"""Elements read at a time if a chunk is short or its tensor not 16-byte aligned."""
SLOTS_PER_READ = 1024


class GroupReduction:
    """Launches the kernels for tensors of fixed sizes and groups."""

    def __init__(
        self,
        sizes: Sequence[int],
        groups: Sequence[int],
        num_groups: int,
        buckets: Sequence[Sequence[int]],
        device: torch.device,
    ) -> None:
        """Allocates a slot (partial result) per chunk; slots of a group are adjacent."""
        self._device = device
        self._buckets = [Chunks([sizes[index] for index in bucket], device, CHUNK_SIZE) for bucket in buckets]
        group_of_tensor = torch.tensor(groups, dtype=torch.int64)
        group_of_chunk = torch.cat(
            [
                group_of_tensor[torch.tensor(bucket, dtype=torch.int64)[chunks.tensor.long().cpu()]]
                for bucket, chunks in zip(buckets, self._buckets, strict=True)
            ]
        )
        self._num_slots = len(group_of_chunk)
        slot = torch.argsort(torch.argsort(group_of_chunk, stable=True))
        slots_per_group = torch.bincount(group_of_chunk, minlength=num_groups)
        first_slot = torch.nn.functional.pad(slots_per_group.cumsum(0), (1, 0))
        self._slots = slot.int().to(device).split([chunks.num_chunks for chunks in self._buckets])
        self._first_slot = first_slot.int().to(device)  # [num_groups + 1]

        def empty(dtype: torch.dtype) -> Tensor:
            return torch.empty(self._num_slots, dtype=dtype, device=device)

        self._partials = (
            empty(torch.int32),  # elements present
            empty(torch.float64),  # mean
            empty(torch.float32),  # squared deviations from it
            empty(torch.int32),  # bits of the largest magnitude
        )

    def reduce(self, gradients: TensorTable, bucket: int, statistics: GroupStatistics) -> None:
        """Writes the partial results of a bucket's gradients."""
        chunks = self._buckets[bucket]
        if chunks.num_chunks:
            with on_device(self._device):
                _chunk_kernel[(chunks.num_chunks,)](
                    gradients.addresses, gradients.codes,
                    chunks.tensor, chunks.start, chunks.length, self._slots[bucket], *self._partials,
                    statistics.found_so_far,
                    CHUNK=chunks.chunk_size, PIECE=PIECE, num_warps=NUM_WARPS, enable_fp_fusion=True,
                )  # fmt: skip

    def combine(self, statistics: GroupStatistics, *, beta: Tensor, loss_scale: Tensor) -> None:
        """Updates the statistics from the slots; `beta` (fp64) and `loss_scale` (fp32) are scalars on the device."""
        num_groups = len(statistics.average)
        with on_device(self._device):
            _group_kernel[(num_groups + 1,)](
                self._first_slot, *self._partials, beta, loss_scale,
                statistics.average, statistics.count, statistics.found_nonfinite,
                statistics.num_elements, statistics.sum, statistics.sum_squares_about_mean,
                num_groups, self._num_slots, BLOCK=SLOTS_PER_READ, num_warps=4, enable_fp_fusion=True,
            )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["chunk_slot", "found_so_far"])
def _chunk_kernel(
    addresses, codes, chunk_tensor, chunk_start, chunk_length, chunk_slot,
    num_elements, means, squares, largest_bits, found_so_far,
    CHUNK: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Writes the partial statistics of one chunk to its slot; an absent tensor counts as empty."""
    chunk = tl.program_id(0)
    tensor = tl.load(chunk_tensor + chunk)
    start = tl.load(chunk_start + chunk)
    length = tl.load(chunk_length + chunk)
    slot = tl.load(chunk_slot + chunk)
    address = tl.load(addresses + tensor)
    code = tl.load(codes + tensor)
    tl.store(num_elements + slot, tl.where(address == 0, 0, length))
    if address == 0:
        tl.store(means + slot, 0.0)
        tl.store(squares + slot, 0.0)
        tl.store(largest_bits + slot, 0)
    else:
        means += slot
        squares += slot
        largest_bits += slot
        full = (length == CHUNK) & (address % 16 == 0)
        # Each dtype's branch includes the stores: elements returned from a branch would be moved to another layout.
        if code == FP32:
            _reduce(
                address + start * 4, tl.float32, length, full, means, squares, largest_bits,
                found_so_far, CHUNK, PIECE,
            )  # fmt: skip
        elif code == FP16:
            _reduce(
                address + start * 2, tl.float16, length, full, means, squares, largest_bits,
                found_so_far, CHUNK, PIECE,
            )  # fmt: skip
        else:
            _reduce(
                address + start * 2, tl.bfloat16, length, full, means, squares, largest_bits,
                found_so_far, CHUNK, PIECE,
            )  # fmt: skip


@triton.jit
def _reduce(
    address, dtype: tl.constexpr, length, full, mean_to, squares_to, largest_to, found_so_far,
    CHUNK: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Writes a chunk's mean, squared deviations and largest magnitude's bits; sets `found_so_far` if not finite."""
    if full:
        values = load_fp32(address, dtype, tl.arange(0, CHUNK), length, True, 16)
        bits = values.to(tl.int32, bitcast=True) & MAGNITUDE_MASK
        # As integers, magnitudes sort like numbers, with infinity above them and NaN above infinity: one maximum
        # shows whether all are finite.
        largest = tl.max(bits, axis=0)
        rounded_mean = tl.sum(values, axis=0) / length
        deviations = values - rounded_mean
        excess = tl.sum(deviations, axis=0)
        raw_squares = tl.sum(deviations * deviations, axis=0)
    else:
        # Small pieces are read twice: a whole chunk with its mask would need more registers than the case above.
        lanes = tl.arange(0, PIECE)
        sums = tl.zeros((PIECE,), tl.float32)
        worst = tl.zeros((PIECE,), tl.int32)
        for first in range(0, length, PIECE):
            values = load_fp32(address, dtype, first + lanes, length, False, 16)
            bits = values.to(tl.int32, bitcast=True) & MAGNITUDE_MASK
            sums += values
            worst = tl.maximum(worst, bits)
        largest = tl.max(worst, axis=0)
        rounded_mean = tl.sum(sums, axis=0) / length
        sums = tl.zeros((PIECE,), tl.float32)
        squares = tl.zeros((PIECE,), tl.float32)
        for first in range(0, length, PIECE):
            values = load_fp32(address, dtype, first + lanes, length, False, 16)
            deviations = tl.where(first + lanes < length, values - rounded_mean, 0.0)
            sums += deviations
            squares += deviations * deviations
        excess = tl.sum(sums, axis=0)
        raw_squares = tl.sum(squares, axis=0)
    # The sum of the deviations corrects the rounded mean and the squares (the corrected two-pass algorithm).
    tl.store(mean_to, rounded_mean.to(tl.float64) + excess.to(tl.float64) / length)
    tl.store(squares_to, tl.maximum(raw_squares - excess * (excess / length), 0.0))
    tl.store(largest_to, largest)
    if largest >= INFINITY_BITS:
        tl.store(found_so_far, 1.0)


@triton.jit(
    do_not_specialize=["num_groups", "num_slots"],
    do_not_specialize_on_alignment=["beta_at", "loss_scale_at", "average_at", "count_at", "found_at"],
)
def _group_kernel(
    first_slot, num_elements, means, squares, largest_bits,
    beta_at, loss_scale_at, average_at, count_at, found_at,
    group_elements, group_sum, group_squares,
    num_groups, num_slots, BLOCK: tl.constexpr,
):  # fmt: skip
    """Combines the slots of one group; the program after the last group checks all slots for non-finite values."""
    group = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    if group == num_groups:
        worst = tl.zeros((BLOCK,), tl.int32)
        for first in range(0, num_slots, BLOCK):
            worst = tl.maximum(worst, tl.load(largest_bits + first + lanes, mask=first + lanes < num_slots, other=0))
        tl.store(found_at, tl.where(tl.max(worst, axis=0) >= INFINITY_BITS, 1.0, 0.0))
    else:
        # Values that do not depend on the slots are loaded first: they arrive while the slots are summed.
        scale = tl.load(loss_scale_at).to(tl.float64)
        beta = tl.load(beta_at)
        average = tl.load(average_at + group)
        count = tl.load(count_at + group)
        begin = tl.load(first_slot + group)
        end = tl.load(first_slot + group + 1)
        # The first BLOCK slots, which is all of them for most groups, stay in registers between the two sums.
        slots = begin + lanes
        length = tl.load(num_elements + slots, mask=slots < end, other=0)
        chunk_mean = tl.load(means + slots, mask=slots < end, other=0.0)
        chunk_squares = tl.load(squares + slots, mask=slots < end, other=0.0)
        elements = length.to(tl.int64)
        sums = length * chunk_mean
        for first in range(begin + BLOCK, end, BLOCK):
            slots = first + lanes
            more = tl.load(num_elements + slots, mask=slots < end, other=0)
            elements += more
            sums += more * tl.load(means + slots, mask=slots < end, other=0.0)
        total = tl.sum(sums, axis=0)
        size = tl.sum(elements, axis=0)
        mean = total / tl.maximum(size, 1)
        # M2 = sum of M2_c + n_c (mean_c - mean)^2 over the chunks c (Chan et al. 1983), fp64.
        deviations = chunk_squares + length * (chunk_mean - mean) * (chunk_mean - mean)
        for first in range(begin + BLOCK, end, BLOCK):
            slots = first + lanes
            length = tl.load(num_elements + slots, mask=slots < end, other=0)
            offset = tl.load(means + slots, mask=slots < end, other=0.0) - mean
            deviations += tl.load(squares + slots, mask=slots < end, other=0.0) + length * offset * offset
        total_squares = tl.sum(deviations, axis=0)
        tl.store(group_elements + group, size)
        tl.store(group_sum + group, total)
        tl.store(group_squares + group, total_squares)
        variance = total_squares / (tl.maximum(size, 1) * (scale * scale))
        if (size > 0) & (tl.abs(variance) < float("inf")):
            tl.store(average_at + group, beta * average + (1.0 - beta) * variance)
            tl.store(count_at + group, count + 1.0)
