"""How a matrix of rows (pixels) and channels is divided among programs: a rule, no trial runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of the programs of one kind of kernel."""

    tile: int
    """Elements that a program holds at a time."""
    num_warps: int
    per_multiprocessor: int
    """Programs wanted for each multiprocessor."""
    num_stages: int
    """Tiles on their way from memory, 1 for none beside the one that is waited for."""


# Measured on an H200 over the norms of ResNet-18 and EfficientNet-B0. Reductions and exponentials leave few registers,
# so they fetch ahead through shared memory; the others keep more loads in flight with more warps.
REDUCING = Shape(tile=2048, num_warps=4, per_multiprocessor=4, num_stages=3)
APPLYING = Shape(tile=2048, num_warps=8, per_multiprocessor=4, num_stages=1)
APPLYING_EXPONENTIALS = Shape(tile=2048, num_warps=4, per_multiprocessor=8, num_stages=3)


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """A grid of programs: of a block of channels, program i of n takes tiles i, i + n, i + 2 n, ... of the rows."""

    block_rows: int
    block_channels: int
    num_channel_blocks: int
    num_parts: int
    """Programs among which the rows are divided, none of them without a tile."""

    @property
    def grid(self) -> tuple[int, int]:
        """Programs along channels, the fastest, and rows."""
        return self.num_channel_blocks, self.num_parts


def tiling(num_rows: int, num_channels: int, shape: Shape, num_multiprocessors: int) -> Tiling:
    """Returns the division for a matrix [num_rows, num_channels] on a device with so many multiprocessors."""
    block_channels = block_channels_for(num_channels)
    block_rows = shape.tile // block_channels
    num_channel_blocks = _ceil(num_channels, block_channels)
    num_tiles = _ceil(num_rows, block_rows)
    wanted = max(1, shape.per_multiprocessor * num_multiprocessors // num_channel_blocks)
    return Tiling(
        block_rows=block_rows,
        block_channels=block_channels,
        num_channel_blocks=num_channel_blocks,
        num_parts=min(num_tiles, wanted),
    )


def block_channels_for(num_channels: int) -> int:
    """Returns how many channels a program covers.

    32 are 64 bytes of a pixel in half precision, as much as memory moves at least. More would leave lanes idle for 96
    or 144 channels, and lengthen the table of partial results, for 2% more speed on large maps of 64.
    """
    return 16 if num_channels <= 16 else 32


def _ceil(value: int, divisor: int) -> int:
    return -(-value // divisor)
