"""Chooses among memory plans at a tick, by what they save and what they cost."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from triaccel_ray.config import ControlConfig
from triaccel_ray.decide.calibration import BARRED_SHARE, budget_bytes, bytes_of
from triaccel_ray.decide.memory import SELECTIVE, Measured, MemoryPlan, cheapest_plan, sums_bytes
from triaccel_ray.decide.throughput import expected_cost_ms
from triaccel_ray.records.plan import Storage, compiles_anew
from triaccel_ray.records.signals import MemoryProfile, Observation
from triaccel_ray.records.state import MemoryState, ThroughputState, UnpaidPlan


@dataclass(frozen=True)
class Planner:
    """Chooses memory plans at one tick, by measured costs."""

    config: ControlConfig
    observation: Observation
    profile: MemoryProfile
    measured: Measured
    timings: ThroughputState

    def cheapest(self, state: MemoryState) -> tuple[MemoryPlan | None, MemoryPlan | None]:
        """Returns the plan to try first, and the best one that differs in whether it compiles regions.

        None where there is none. Both fit, and are not barred. Where micro-batches change the results, fewer of them
        are worth a compilation.
        """
        fastest = self._fastest(state, SELECTIVE)
        if fastest is None or not self._compiles(fastest):
            return fastest, None
        known = self._fastest(state, set(self.observation.plan.storage.values()))
        if known is None or (not self.profile.can_split and fastest.num_micro_batches < known.num_micro_batches):
            return fastest, None
        if fastest.prediction.ms is not None and known.prediction.ms is not None:
            difference_ms = self.saved_ms(fastest.prediction.ms) - self.saved_ms(known.prediction.ms)
            if difference_ms > self.cost_ms(self.unpaid(fastest)) - self.cost_ms(self.unpaid(known)):
                return fastest, known
        return known, fastest

    def saved_ms(self, ms: float) -> float:
        """Returns the milliseconds saved on the samples left by steps that take `ms`."""
        before = self.measured.step_ms or 0.0
        return (before - ms) * self.observation.samples_left / self.observation.plan.batch_size

    def cost_ms(self, plan: UnpaidPlan) -> float:
        """Returns what a plan is expected to cost."""
        has_new_sizes = plan.num_micro_batches != self.observation.plan.num_micro_batches
        return expected_cost_ms(self.observation, self.timings, has_new_sizes=has_new_sizes, compiles=plan.compiles)

    def unpaid(self, plan: MemoryPlan) -> UnpaidPlan:
        """Returns a plan's time, number of micro-batches, and whether it compiles regions."""
        ms = plan.prediction.ms or 0.0
        return UnpaidPlan(num_micro_batches=plan.num_micro_batches, ms=ms, compiles=self._compiles(plan))

    def _compiles(self, plan: MemoryPlan) -> bool:
        return compiles_anew(plan.storage, self.observation.plan.storage)

    def _fastest(self, state: MemoryState, selective: Collection[Storage]) -> MemoryPlan | None:
        most_bytes, failed = None, state.failed
        if failed is not None and state.cap_ticks_left:
            sums = sums_bytes(self.profile, failed.num_micro_batches)
            saved = bytes_of(self.profile, failed, self.observation.plan) - sums
            most_bytes = sums + math.floor(BARRED_SHARE * saved)
        return cheapest_plan(
            self.profile,
            self.measured,
            budget_bytes=budget_bytes(self.observation, state),
            changeable=self.observation.regions,
            accumulate=self.config.batch.accumulate,
            most_bytes=most_bytes,
            selective=[each for each in SELECTIVE if each in selective],
        )
