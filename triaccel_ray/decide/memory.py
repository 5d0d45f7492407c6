"""The model of memory and time: predicts what a plan of storage costs, and finds the cheapest plan that fits.

The regions' saved tensors are kept, recomputed or offloaded. They are recomputed alone or in segments of several
regions (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"), or in part, where the compiler chooses
what is cheap (Korthikanti et al. 2022). They are offloaded to the host and prefetched one region ahead (AccUDNN, Guo
et al. 2018). AccUDNN's performance model chooses what to swap. Here recomputation and micro-batches compete with it,
and measurements calibrate the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from triaccel_ray.decide.segments import joined, segmentations
from triaccel_ray.decide.storage_search import END, ONE_NS, Region, cheapest_storages, region_of, segment_of
from triaccel_ray.records.plan import Plan, Storage, largest_micro_batch
from triaccel_ray.records.signals import MemoryProfile, RegionSignal

KEEP, RECOMPUTE, OFFLOAD, JOIN, *SELECTIVE = Storage
UNDIVIDED_SHARE = 1.25
"""Where micro-batches change the results, fewer of them are preferred up to this multiple of the fastest plan's time.
Batch normalization then takes its statistics from the parts, which is worth a quarter of a step's time, not its double:
micro-batches compete with recomputation and offloading."""
UNTIMED_PASS_SHARE = 0.1
"""Share of an undivided step that a further micro-batch is assumed to add before two numbers were timed. On an H200 it
added 0.14 (ConvNeXt, 16 of 64 samples), 0.21 (GPT, 1 of 4) and 0.49 (BERT, 16 of 32). It is below these, because a
share that is too high is never corrected: no micro-batch is tried then."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements under the plan in force, by which predictions are calibrated."""

    plan: Plan
    peak_bytes: int
    """Largest memory of the process under `plan`."""
    step_ms: float | None = None
    """Milliseconds of a step of the whole batch; None if not timed."""
    pass_ms: float | None = None
    """Milliseconds that each further micro-batch adds to a step of the same batch; None until two numbers were timed:
    `UNTIMED_PASS_SHARE` is assumed."""
    bytes_per_sample: int = 0
    """Bytes that each further sample of a micro-batch adds to the peak beyond the model's; 0 until two sizes were
    measured."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a plan is predicted to cost."""

    ms: float | None
    """Milliseconds of a step of the whole batch; None if steps under the plan in force were not timed."""
    peak_bytes: int
    """Largest memory of the process."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Storage and number of micro-batches, with their predicted cost."""

    storage: Mapping[str, Storage]
    """Only the regions that do not keep their tensors."""
    num_micro_batches: int
    prediction: Prediction


def modeled_bytes(profile: MemoryProfile, storage: Mapping[str, Storage], micro_batch_size: int) -> int:
    """Returns the largest number of bytes that the regions' saved tensors take at once.

        max over i of  sum_{j<i} held(j) + saved_bytes(i) + gradients(i) + moving(i)

    held(j) are the bytes of region j between the passes: saved_bytes; input_bytes if it is recomputed; what stays if it
    is offloaded; input_bytes and a share of the rest if it is recomputed in part (`RegionSignal.held_bytes`).
    moving(i) are offloadable_bytes(i-1) if region i-1 is offloaded, else 0: its copy is under way while region i runs,
    in either pass. A segment runs as one region that saves what its regions save, and holds the inputs of the first.
    Bytes are proportional to the micro-batch size.

    gradients(i) = min(2 * max(input_bytes(i), input_bytes(i+1)), saved_bytes(i)) stands for the gradients of the
    region's input and output. The output is the input of the next region. The backward pass holds two tensors of the
    larger size at once. The bound is for regions that cannot be recomputed, whose input_bytes are their saved_bytes.
    """
    return -(-_peak_bytes(profile, storage) * micro_batch_size // profile.micro_batch_size)


def _peak_bytes(profile: MemoryProfile, storage: Mapping[str, Storage]) -> int:
    """Returns `modeled_bytes` of the profile's own micro-batch.

    A joined region adds nothing to what is held. While it runs, what the regions before it in its segment save exists.
    If it cannot join, or the region before it is not recomputed, it is recomputed alone.
    """
    held = taken = peak = moving = moving_after = kind_before = 0
    for signal, region, kind in zip(profile.regions, _regions(profile, storage), _kinds(profile, storage), strict=True):
        is_joined = storage.get(signal.name) is JOIN and signal.can_join and kind_before == 1
        if not is_joined:  # else `taken` and `moving` are those of the segment
            taken, moving = held, moving_after
            held += region.held[kind]
            moving_after = region.moved if kind == 2 else 0
        peak = max(peak, taken + region.running + moving)
        taken += region.held[0]
        kind_before = kind
    return peak


def sums_bytes(profile: MemoryProfile, num_micro_batches: int) -> int:
    """Returns the bytes of the gradients' sums over so many micro-batches."""
    return profile.accumulation_bytes if num_micro_batches > 1 else 0


def added_ms(profile: MemoryProfile, storage: Mapping[str, Storage], batch_size: int) -> float:
    """Returns the milliseconds that recomputation and transfers add to a step of `batch_size` samples.

    A recomputed region adds its forward pass, in a segment or alone, or a share of it (`region_of`). The copy of an
    offloaded region i to the host starts with the forward pass of region i+1, and region i+2 waits for it. The copy
    back starts with the backward pass of region i+1, and that of region i waits for it. So each copy is exposed by what
    it takes longer than region i+1, and copies never queue. Times are proportional to samples: the number of
    micro-batches does not change their sum.
    """
    return _per_batch(profile, _added_ns(_regions(profile, storage), _kinds(profile, storage)), batch_size)


def predict(
    profile: MemoryProfile, measured: Measured, storage: Mapping[str, Storage], num_micro_batches: int
) -> Prediction:
    """Returns the predicted cost of a plan: what is measured under the plan in force, plus the model's difference."""
    old = measured.plan
    now = modeled_bytes(profile, old.storage, old.micro_batch_size)
    new = modeled_bytes(profile, storage, largest_micro_batch(old.batch_size, num_micro_batches))
    new += _beyond_model_bytes(profile, measured, num_micro_batches)
    ms = measured.step_ms
    if ms is not None:
        ms += _expected_pass_ms(profile, measured) * (num_micro_batches - old.num_micro_batches)
        ms += added_ms(profile, storage, old.batch_size) - added_ms(profile, old.storage, old.batch_size)
        ms = max(ms, 0.0)
    return Prediction(ms=ms, peak_bytes=measured.peak_bytes + new - now)


def cheapest_plan(
    profile: MemoryProfile,
    measured: Measured,
    *,
    budget_bytes: int,
    changeable: Collection[str],
    accumulate: int = 1,
    most_bytes: int | None = None,
    selective: Sequence[Storage] = SELECTIVE,
) -> MemoryPlan | None:
    """Returns the fastest plan by `predict` whose predicted peak fits; None if none fits.

    Of plans that are equally fast it returns one with the fewest micro-batches, then the fewest changed regions. If
    micro-batches would change the results, plans may take `UNDIVIDED_SHARE` times as long as the fastest. Of these, it
    returns the fastest of those with the fewest micro-batches.

    Args:
        profile: costs of the regions.
        measured: calibration; its plan gives the batch size.
        budget_bytes: limit on the predicted peak.
        changeable: names of the regions that may be recomputed or offloaded.
        accumulate: least number of micro-batches.
        most_bytes: limit on the sum of `modeled_bytes` and `sums_bytes`, which bars plans that failed; None: no limit.
        selective: selective storages to choose from; a plan has one of them at most, since each takes a compilation.
    """
    plan = measured.plan
    room = budget_bytes - measured.peak_bytes + modeled_bytes(profile, plan.storage, plan.micro_batch_size)
    choices = _choices(profile, changeable)
    pass_ms = _expected_pass_ms(profile, measured)
    base_ms = _plain_ms(profile, measured) - pass_ms * plan.num_micro_batches
    share = 1.0 if profile.can_split else UNDIVIDED_SHARE
    found: list[tuple[float, int, dict[str, Storage]]] = []
    for parts in _numbers_of_parts(profile, plan, accumulate):
        least_ms = max(base_ms, 0.0) + pass_ms * parts
        if found and (least_ms >= min(ms for ms, _, _ in found) or found[0][0] <= share * least_ms):
            break  # more parts are slower, or not faster by enough
        bound = room - _beyond_model_bytes(profile, measured, parts)
        bound = bound if most_bytes is None else min(bound, most_bytes - sums_bytes(profile, parts))
        per_profile = bound * profile.micro_batch_size // largest_micro_batch(plan.batch_size, parts)
        storage = _cheapest_storage(profile, choices, per_profile, selective)
        if storage is None:
            continue
        storage_ms = added_ms(profile, storage, plan.batch_size)
        found.append((least_ms + storage_ms, parts, storage))
        if storage_ms == 0.0:
            break  # more parts would save no more
    if not found:
        return None
    fastest_ms = min(ms for ms, _, _ in found)
    _, parts, storage = next(each for each in found if each[0] <= share * fastest_ms)
    return MemoryPlan(storage=storage, num_micro_batches=parts, prediction=predict(profile, measured, storage, parts))


def least_plan(profile: MemoryProfile, measured: Measured, *, changeable: Collection[str]) -> MemoryPlan:
    """Returns a plan of nearly the least predicted peak with the micro-batches in force: all that reduces it.

    It is the best one of recomputing every region, alone or in segments, and of storing each in its smallest form.
    """
    plan, regions, choices = measured.plan, _regions(profile), _choices(profile, changeable)
    ways: list[dict[str, Storage]] = []
    for allowed in ((0, 1), (0, 1, 2)):
        kinds = [
            min(set(each) & set(allowed), key=lambda kind, region=region: (region.held[kind], kind))  # type: ignore[misc]
            for region, each in zip(regions, choices, strict=True)
        ]
        ways.append(_storage_of(profile.regions, kinds))
    recomputable = _recomputable(profile, choices)
    ways += [joined(segments, recomputable) for segments in segmentations(profile.regions, recomputable)]
    plans = []
    for storage in ways:
        prediction = predict(profile, measured, storage, plan.num_micro_batches)
        plans.append(MemoryPlan(storage=storage, num_micro_batches=plan.num_micro_batches, prediction=prediction))
    return min(plans, key=lambda each: each.prediction.peak_bytes)


def _cheapest_storage(
    profile: MemoryProfile, choices: Sequence[tuple[int, ...]], room: int, selective: Sequence[Storage]
) -> dict[str, Storage] | None:
    """Returns the storage of the profile's micro-batch that adds least time within `room` bytes; None if none fits.

    First the regions alone, without selective storage and with each kind of it, then in segments: of regions that are
    kept or recomputed together, and not offloaded.
    """
    found: list[dict[str, Storage]] = []
    plain = [tuple(kind for kind in kinds if kind != 3) for kinds in choices]
    for each in (KEEP, *(selective if plain != list(choices) else ())):
        regions = _regions(profile, {region.name: each for region in profile.regions})
        alone = cheapest_storages(regions, plain if each is KEEP else choices, room)
        if alone is not None:
            found.append(_storage_of(profile.regions, alone[1], each))
            if alone[0] < ONE_NS:
                return found[-1]
    recomputable, regions = _recomputable(profile, choices), _regions(profile)
    for segments in segmentations(profile.regions, recomputable):
        firsts = [segment[0] for segment in segments]
        kinds = [(0, 1) if first.name in recomputable else (0,) for first in firsts]
        remaining = iter(regions)
        as_regions = [segment_of([next(remaining) for _ in segment]) for segment in segments]
        if cheapest := cheapest_storages(as_regions, kinds, room):
            found.append(joined(segments, _storage_of(firsts, cheapest[1])))
    return min(found, key=lambda each: (added_ms(profile, each, profile.micro_batch_size), len(each)), default=None)


def _plain_ms(profile: MemoryProfile, measured: Measured) -> float:
    """Returns the milliseconds of a step of the plan in force without recomputation and transfers.

    If no step was timed, those of the profile's passes.
    """
    plan = measured.plan
    if measured.step_ms is None:
        plain_ns = sum(region.forward_ns + region.backward_ns for region in _regions(profile))
        return _per_batch(profile, plain_ns, plan.batch_size)
    return max(measured.step_ms - added_ms(profile, plan.storage, plan.batch_size), 0.0)


def _expected_pass_ms(profile: MemoryProfile, measured: Measured) -> float:
    """Returns what a further micro-batch adds to a step; until that is timed, a share of the undivided step."""
    if measured.pass_ms is not None:
        return measured.pass_ms
    further = measured.plan.num_micro_batches - 1
    return _plain_ms(profile, measured) * UNTIMED_PASS_SHARE / (1.0 + UNTIMED_PASS_SHARE * further)


def _beyond_model_bytes(profile: MemoryProfile, measured: Measured, num_micro_batches: int) -> int:
    """Returns what another number of micro-batches adds to the peak beyond the model: sums, and what was measured."""
    plan = measured.plan
    further_samples = largest_micro_batch(plan.batch_size, num_micro_batches) - plan.micro_batch_size
    sums = sums_bytes(profile, num_micro_batches) - sums_bytes(profile, plan.num_micro_batches)
    return sums + measured.bytes_per_sample * further_samples


def _regions(profile: MemoryProfile, storage: Mapping[str, Storage] | None = None) -> list[Region]:
    """Returns the regions' costs; storage 3 of a region is that of `storage`, if it is selective."""
    chosen = storage or {}
    outputs = [*(each.input_bytes for each in profile.regions[1:]), 0]
    return [
        region_of(profile, each, output, chosen.get(each.name, KEEP))
        for each, output in zip(profile.regions, outputs, strict=True)
    ]


def _kinds(profile: MemoryProfile, storage: Mapping[str, Storage]) -> list[int]:
    order = {KEEP: 0, RECOMPUTE: 1, OFFLOAD: 2, JOIN: 1}
    return [order.get(storage.get(region.name, KEEP), 3 if region.can_select else 0) for region in profile.regions]


def _storage_of(regions: Sequence[RegionSignal], kinds: Sequence[int], selective: Storage = KEEP) -> dict[str, Storage]:
    named = zip(regions, kinds, strict=True)
    return {region.name: (KEEP, RECOMPUTE, OFFLOAD, selective)[kind] for region, kind in named if kind}


def _choices(profile: MemoryProfile, changeable: Collection[str]) -> list[tuple[int, ...]]:
    """Returns each region's storages that could pay."""
    has_link = min(profile.to_host_bytes_per_ms, profile.to_device_bytes_per_ms) > 0
    choices: list[tuple[int, ...]] = []
    for region in profile.regions:
        recompute = () if region.input_bytes >= region.saved_bytes else (1, 3) if region.can_select else (1,)
        offload = (2,) if has_link and region.offloadable_bytes > 0 else ()
        choices.append((0, *recompute, *offload) if region.name in changeable else (0,))
    return choices


def _recomputable(profile: MemoryProfile, choices: Sequence[tuple[int, ...]]) -> list[str]:
    return [region.name for region, kinds in zip(profile.regions, choices, strict=True) if 1 in kinds]


def _numbers_of_parts(profile: MemoryProfile, plan: Plan, accumulate: int) -> list[int]:
    """Returns the numbers of micro-batches to choose from: the one in force, and `accumulate` times powers of two.

    Where micro-batches change the results, by batch normalization, each holds at least two samples.
    """
    most = plan.batch_size if profile.can_split else plan.batch_size // 2
    doubled = (accumulate << power for power in range(plan.batch_size.bit_length()))
    return sorted({plan.num_micro_batches, *(parts for parts in doubled if parts <= most)})


def _added_ns(regions: Sequence[Region], kinds: Sequence[int]) -> int:
    total = sum(region.repeated_ns[kind] for region, kind in zip(regions, kinds, strict=True))
    for (region, kind), (following, next_kind) in itertools.pairwise(zip([*regions, END], [*kinds, 0], strict=True)):
        total += region.exposed_ns(following, next_kind) if kind == 2 else 0
    return total


def _per_batch(profile: MemoryProfile, nanoseconds: int, batch_size: int) -> float:
    return 1e-6 * nanoseconds * batch_size / profile.micro_batch_size
