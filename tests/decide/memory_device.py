"""A simulated device for tests of the memory plan, whose memory other processes take and return."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.decide import build
from tests.decide.build import USUAL, memory_signal, out_of_memory
from triaccel_ray.config import BatchConfig, ControlConfig, CurvatureConfig, PrecisionConfig
from triaccel_ray.decide import Decision
from triaccel_ray.decide.memory import Measured, added_ms, cheapest_plan, modeled_bytes, sums_bytes
from triaccel_ray.records.plan import Plan, recomputing_all
from triaccel_ray.records.signals import LayerSignal, MemoryProfile, RegionSignal

MIB = 2**20
REGIONS = tuple("abcdef")
FIXED = BatchConfig(enabled=False, start=64, minimum=64, oom_cooldown_ticks=5)
CONFIG = ControlConfig(precision=PrecisionConfig(enabled=False), curvature=CurvatureConfig(enabled=False), batch=FIXED)


def profile_of(
    *regions: RegionSignal, bandwidth: float = 55.0 * MIB, micro_batch_size: int = 64, **others: Any
) -> MemoryProfile:
    """A profile with a link to the host that moves `bandwidth` bytes a millisecond either way."""
    rates = dict.fromkeys(("to_host_bytes_per_ms", "to_device_bytes_per_ms"), bandwidth)
    return MemoryProfile(regions=regions, micro_batch_size=micro_batch_size, **{**rates, **others})


def region_of(name: str, *, forward_ms: float, backward_ms: float, **mib: float) -> RegionSignal:
    """A region whose saved, input and offloadable bytes are given in MiB."""
    sizes = {f"{what}_bytes": int(number * MIB) for what, number in mib.items()}
    return RegionSignal(name=name, forward_ms=forward_ms, backward_ms=backward_ms, **sizes)


PROFILE = profile_of(*(
    region_of(name, saved=200 + 40 * i, input=30, offloadable=150 + 40 * i, forward_ms=2.0 + i % 3, backward_ms=4.0)
    for i, name in enumerate(REGIONS)
))  # fmt: skip

ELASTIC = replace(
    CONFIG, batch=BatchConfig(start=128, minimum=64, granularity=32, step_down=32, maximum=128, oom_cooldown_ticks=5)
)


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device on which the model of memory and time holds, up to factors."""

    profile: MemoryProfile = PROFILE
    fixed_bytes: int = 500 * MIB
    total_bytes: int = 4000 * MIB
    taken_bytes: int = 0
    """Memory that other processes hold."""
    bytes_factor: float = 1.0
    """Real bytes of changed storage by the model's."""
    transient_share: float = 0.0
    """Memory that the planner does not know, by the saved bytes of the micro-batch."""
    ms_factor: float = 1.0
    pass_ms: float = 5.0
    names = ("conv",)
    supported = USUAL

    @property
    def available_bytes(self) -> int:
        return self.total_bytes - self.taken_bytes

    def peak_bytes(self, plan: Plan) -> int:
        kept, stored = (modeled_bytes(self.profile, each, plan.micro_batch_size) for each in ({}, plan.storage))
        known = self.fixed_bytes + sums_bytes(self.profile, plan.num_micro_batches)
        known += round(kept - (kept - stored) * self.bytes_factor)
        return known + plan.micro_batch_size * self.transient_bytes_per_sample

    @property
    def transient_bytes_per_sample(self) -> int:
        saved = sum(region.saved_bytes for region in self.profile.regions)
        return round(self.transient_share * saved / self.profile.micro_batch_size)

    def step_ms(self, plan: Plan) -> float:
        plain = sum(region.forward_ms + region.backward_ms for region in self.profile.regions) + 10.0
        added = added_ms(self.profile, plan.storage, plan.batch_size) * self.ms_factor
        return plain + added + self.pass_ms * plan.num_micro_batches

    def passing(self, plan: Plan) -> Plan:
        """The plan if it fits; else with everything recomputed, then in halves until it does."""
        if self.peak_bytes(plan) <= self.available_bytes:
            return plan
        plan = replace(plan, storage=recomputing_all(REGIONS, plan.storage))
        while self.peak_bytes(plan) > self.available_bytes:
            assert plan.micro_batch_size > 1, "out of memory for good"
            plan = replace(plan, num_micro_batches=2 * plan.num_micro_batches)
        return plan

    def run(self, plan: Plan) -> dict[str, Any]:
        passed = self.passing(plan)
        peak, fits = self.peak_bytes(passed), passed is plan
        fault = replace(out_of_memory(plan.batch_size, passed.micro_batch_size), stores_least=True)
        is_plain = not plan.storage and plan.num_micro_batches == 1
        return {
            "memory": memory_signal(peak, self.total_bytes, self.available_bytes - peak),
            "faults": () if fits else (fault,),
            "step_ms": self.step_ms(plan) if fits else None,
            "profile": None if is_plain and fits else self.profile,
        }


class Run(build.Run):
    """The policy in a loop with a device whose changes of plan take 100 ms each."""

    def __init__(self, config: ControlConfig = CONFIG, machine: Device = Device()) -> None:
        super().__init__(config, machine, REGIONS)
        self.adapting_ms = 100.0

    def tick(self, *layers: LayerSignal, **others: object) -> Decision:
        before = self.plan
        seen = {"regions": REGIONS, "adapting_ms": self.adapting_ms, "samples_left": 10**6} | others
        _, decision = self.step(*layers, **seen)
        self.adapting_ms += 100.0 * (not decision.plan.steps_as(before))
        return decision

    def ticks(self, number: int) -> list[Decision]:
        return [self.tick() for _ in range(number)]

    @property
    def num_failures(self) -> int:
        return sum(bool(observation.faults) for observation, _ in self.log)

    def num_changes(self, last: int) -> int:
        return sum(not decision.plan.steps_as(observation.plan) for observation, decision in self.log[-last:])

    def best_ms(self) -> float:
        """Milliseconds of the fastest plan that fits by what is true of the device."""
        plain = replace(self.plan, storage={}, num_micro_batches=1)
        device = self.machine
        measured = Measured(
            plan=plain,
            peak_bytes=device.peak_bytes(plain),
            step_ms=device.step_ms(plain),
            pass_ms=device.pass_ms,
            bytes_per_sample=device.transient_bytes_per_sample,
        )
        budget = int(0.97 * device.available_bytes)
        chosen = cheapest_plan(device.profile, measured, budget_bytes=budget, changeable=REGIONS)
        return chosen.prediction.ms


SMALL = Device(total_bytes=1700 * MIB)


def device_of(seed: int) -> Device:
    chance = random.Random(seed)
    regions = []
    for name in REGIONS:
        saved = chance.randint(50, 500)
        passed, moved = saved * chance.uniform(0.05, 0.6), saved * chance.uniform(0.0, 0.95)
        ms = {"forward_ms": chance.uniform(0.5, 5.0), "backward_ms": chance.uniform(1.0, 10.0)}
        regions.append(region_of(name, saved=saved, input=passed, offloadable=moved, **ms))
    bandwidth = chance.choice([0.0, 20.0, 55.0, 200.0]) * MIB
    profile = profile_of(*regions, bandwidth=bandwidth, can_split=chance.random() < 0.5)
    kept = modeled_bytes(profile, {}, 64)
    profile = replace(profile, regions=tuple(replace(each, can_select=seed % 2 == 0) for each in regions))
    return Device(
        profile=profile,
        total_bytes=500 * MIB + int(kept * 1.2),
        bytes_factor=chance.choice([1.0, 1.0, 0.8, 0.9, 1.1]),
        ms_factor=chance.choice([1.0, 0.8, 1.3]),
        pass_ms=chance.choice([0.0, 0.5, 5.0]),
        transient_share=chance.choice([0.0, 0.05]),
    )


def neighbors(run: Run, seed: int, ticks: int) -> Iterator[Decision]:
    """Memory is taken and returned every few ticks."""
    chance = random.Random(seed)
    device = run.machine
    kept = device.total_bytes - 500 * MIB
    for _ in range(ticks):
        if chance.random() < 0.05:
            run.machine = replace(device, taken_bytes=int(kept * chance.choice([0.0, 0.3, 0.5, 0.7])))
        yield run.tick()
    run.machine = replace(device, taken_bytes=int(kept * 0.4))
