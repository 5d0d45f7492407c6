"""Joins regions into segments that are recomputed as one, of which only the first region's inputs are saved."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from triaccel_ray.records.plan import Storage
from triaccel_ray.records.signals import RegionSignal

_LIMITS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Most bytes that a segment of several regions saves, as multiples of those of the region that saves most. All of them
exist at once while the segment is recomputed."""

Segment = tuple[RegionSignal, ...]


def segmentations(regions: Sequence[RegionSignal], recomputable: Collection[str]) -> list[list[Segment]]:
    """Returns ways to split the regions into segments of neighbors, short ones first; none if no region can join.

    Each way fills segments up to a limit on saved bytes, in the order of the regions. (Chen et al. 2016 try several
    limits, too.) A region that cannot join begins a segment.
    """
    ways: list[list[Segment]] = []
    most = max((region.saved_bytes for region in regions), default=0)
    for limit in _LIMITS:
        way: list[Segment] = []
        for region in regions:
            before: Segment = way[-1] if way else ()
            may_join = region.can_join and {region.name, *(each.name for each in before)} <= set(recomputable)
            if before and may_join and sum(each.saved_bytes for each in (*before, region)) <= limit * most:
                way[-1] = (*before, region)
            else:
                way.append((region,))
        if len(way) < len(regions) and way not in ways:
            ways.append(way)
    return ways


def joined(segments: Sequence[Segment], recomputed: Collection[str]) -> dict[str, Storage]:
    """Returns the storage of the regions in segments whose first region is in `recomputed`; others keep theirs."""
    return {
        region.name: Storage.JOIN if index else Storage.RECOMPUTE
        for segment in segments
        if segment[0].name in recomputed
        for index, region in enumerate(segment)
    }
