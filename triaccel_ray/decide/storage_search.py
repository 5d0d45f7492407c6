"""Finds the cheapest storages of a model's regions whose saved tensors fit into a number of bytes.

A region has up to four storages: 0 keeps, 1 recomputes, 2 offloads, 3 recomputes selectively.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from triaccel_ray.records.plan import Storage
from triaccel_ray.records.signals import MemoryProfile, RegionSignal

_COARSE, _FINE = 32, 1024
"""Numbers of partial plans carried from one region to the next, in a first search and in one bounded by its result."""
ONE_NS = 1 << 20
"""Weight of a nanosecond in the cost of a plan; a changed region weighs 1 and decides between equal times."""

_Point = tuple[int, int, int]
"""A partial plan: bytes held, cost, and the storages of its regions as digits to the base 4."""
_PerStorage = tuple[int, int, int, int]
"""A number for each storage, 0 to 3."""


@dataclass(frozen=True, slots=True)
class Region:
    """A region's costs as integers: bytes and nanoseconds of one pass of the profile's micro-batch."""

    running: int
    """Bytes while its backward pass runs: its saved tensors and the gradients."""
    moved: int
    """Bytes that offloading moves to the host."""
    held: _PerStorage
    """Bytes between the passes in each storage."""
    repeated_ns: _PerStorage
    """What the backward pass computes again in each storage."""
    forward_ns: int
    backward_ns: int
    to_host_ns: int
    to_device_ns: int

    def exposed_ns(self, following: Region, storage: int) -> int:
        """Returns how long compute waits for this region's transfers if it is offloaded and the next one stored so."""
        behind = following.backward_ns + following.repeated_ns[storage]
        return max(self.to_host_ns - following.forward_ns, 0) + max(self.to_device_ns - behind, 0)


END = Region(0, 0, (0, 0, 0, 0), (0, 0, 0, 0), 0, 0, 0, 0)


def region_of(profile: MemoryProfile, signal: RegionSignal, output_bytes: int, selective: Storage) -> Region:
    """Returns a region whose output takes `output_bytes`; storage 3 is `selective`.

    The compiler keeps `selective.kept_share` of the bytes saved beyond the inputs, and repeats what costs least for its
    bytes. So the time grows with the square of the share that is repeated: 0.09, 0.25 and 0.49 of the forward pass.
    Measured on blocks of a ViT and a GPT on an H200: 0.05 and 0.12, 0.24 and 0.44, 0.43 and 0.57.
    """
    saved, held = signal.saved_bytes, signal.held_bytes
    moved = min(signal.offloadable_bytes, saved)
    rates = profile.to_host_bytes_per_ms, profile.to_device_bytes_per_ms
    to_host, to_device = (math.ceil(1e6 * moved / rate) if rate > 0 else 0 for rate in rates)
    forward_ns, repeated = round(1e6 * signal.forward_ms), 1.0 - selective.kept_share
    return Region(
        running=saved + min(2 * max(signal.input_bytes, output_bytes), saved),
        moved=moved,
        held=(saved, held(Storage.RECOMPUTE), held(Storage.OFFLOAD), held(selective)),
        repeated_ns=(0, forward_ns, 0, round(repeated**2 * forward_ns)),
        forward_ns=forward_ns,
        backward_ns=round(1e6 * signal.backward_ms),
        to_host_ns=to_host,
        to_device_ns=to_device,
    )


def segment_of(regions: Sequence[Region]) -> Region:
    """Returns a segment as one region that is kept or recomputed: while one part runs, those before it are saved."""
    taken = list(itertools.accumulate((region.held[0] for region in regions), initial=0))
    forward_ns = sum(region.forward_ns for region in regions)
    return Region(
        running=max(before + region.running for before, region in zip(taken, regions, strict=False)),
        moved=0,
        held=(taken[-1], regions[0].held[1], taken[-1], taken[-1]),
        repeated_ns=(0, forward_ns, 0, 0),
        forward_ns=forward_ns,
        backward_ns=sum(region.backward_ns for region in regions),
        to_host_ns=0,
        to_device_ns=0,
    )


def cheapest_storages(
    regions: Sequence[Region], choices: Sequence[tuple[int, ...]], room: int
) -> tuple[int, list[int]] | None:
    """Returns the cost of the cheapest storages whose peak is at most `room` bytes, and these; None if there are none.

    `choices` has the storages that each region may have.
    """
    coarse = _search(regions, choices, room, _COARSE, math.inf)
    if coarse is None:
        return None
    cost, digits = min(coarse, _search(regions, choices, room, _FINE, coarse[0]) or coarse)
    return cost, [digits >> 2 * place & 3 for place in reversed(range(len(regions)))]


def _search(
    regions: Sequence[Region], choices: Sequence[tuple[int, ...]], room: int, most_points: int, most_cost: float
) -> tuple[int, int] | None:
    """Returns cost and digits of the cheapest storages found within `room` bytes and `most_cost`.

    Dynamic programming in forward order. What is to come depends on a partial plan only through the bytes held and
    whether its last region is offloaded. So for either case it carries their Pareto front, thinned to about
    `most_points`.
    """
    limits = [room]  # on the bytes held before each region, such that the regions to come can still fit
    for region, kinds in zip(reversed(regions), reversed(choices), strict=True):
        limits.append(min(room - region.running, limits[-1] - min(region.held[kind] for kind in kinds)))
    fronts: tuple[list[_Point], list[_Point]] = ([(0, 0, 0)] if limits.pop() >= 0 else [], [])
    before = END
    for region, kinds in zip([*regions, END], [*choices, (0,)], strict=True):
        limit = limits.pop() if limits else room
        pools: tuple[list[_Point], list[_Point]] = ([], [])
        for is_offloaded, front in enumerate(fronts):
            most = room - region.running - (before.moved if is_offloaded else 0)
            for kind in kinds:
                wait_ns = before.exposed_ns(region, kind) if is_offloaded else 0
                cost = ONE_NS * (wait_ns + region.repeated_ns[kind]) + (kind > 0)
                held = region.held[kind]
                bound = min(most, limit - held)
                pools[kind == 2].extend(
                    (taken + held, spent + cost, 4 * digits + kind)
                    for taken, spent, digits in front
                    if taken <= bound and spent <= most_cost - cost
                )
        fronts, before = (_pareto_front(pools[0], most_points), _pareto_front(pools[1], most_points)), region
    return min(((spent, digits // 4) for _, spent, digits in fronts[0]), default=None)


def _pareto_front(points: list[_Point], most: int) -> list[_Point]:
    """Returns the points of which no other holds less and costs no more; of many, at most `most` + 2.

    The range of costs is divided into equal parts, of which each keeps the point that holds least. So thinning loses at
    most one part, a `most`-th of the range. The point that holds least and the one that costs least stay.
    """
    points.sort()
    front: list[_Point] = []
    best = math.inf
    for point in points:
        if point[1] < best:
            best = point[1]
            front.append(point)
    if len(front) <= most:
        return front
    width = (front[0][1] - front[-1][1]) // most + 1
    kept, last = [], -1
    for point in front:
        if point[1] // width != last:
            kept.append(point)
            last = point[1] // width
    return kept if kept[-1] == front[-1] else [*kept, front[-1]]
