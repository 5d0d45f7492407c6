"""Joins regions to segments that are recomputed as one, of which only the first region's inputs are saved."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from triaccel_ray.records.plan import Storage
from triaccel_ray.records.signals import RegionSignal

_SHARES = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Most bytes that a segment of several regions saves, over those of the region that saves most: while a segment is
recomputed, all of its saved tensors exist."""

Segment = tuple[RegionSignal, ...]


def segmentations(regions: Sequence[RegionSignal], recomputable: Collection[str]) -> list[list[Segment]]:
    """Returns ways to join neighboring regions, shorter segments first; none if no region can join another.

    Regions that cannot are segments of one. Segments save about the same number of bytes each, which is best for
    memory (Chen et al. 2016).
    """
    ways: list[list[Segment]] = []
    most = max((region.saved_bytes for region in regions), default=0)
    for share in _SHARES:
        way: list[Segment] = []
        for region in regions:
            before: Segment = way[-1] if way else ()
            may_join = region.can_join and {region.name, *(each.name for each in before)} <= set(recomputable)
            if before and may_join and sum(each.saved_bytes for each in (*before, region)) <= share * most:
                way[-1] = (*before, region)
            else:
                way.append((region,))
        if len(way) < len(regions) and way not in ways:
            ways.append(way)
    return ways


def merged(segment: Segment) -> RegionSignal:
    """Returns a segment's costs as those of one region, called as its first one."""
    return RegionSignal(
        name=segment[0].name,
        saved_bytes=sum(each.saved_bytes for each in segment),
        input_bytes=segment[0].input_bytes,
        offloadable_bytes=0,
        forward_ms=sum(each.forward_ms for each in segment),
        backward_ms=sum(each.backward_ms for each in segment),
    )


def joined(segments: Sequence[Segment], storage: Mapping[str, Storage]) -> dict[str, Storage]:
    """Returns the storage of all regions, from that of segments by their first region's name."""
    return {
        region.name: Storage.JOIN if index else Storage.RECOMPUTE
        for segment in segments
        if segment[0].name in storage
        for index, region in enumerate(segment)
    }
