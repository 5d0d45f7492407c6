"""Applies a plan completely, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from triaccel_ray.apply.capture import StepCache
from triaccel_ray.cuda.graphs import GraphPool
from triaccel_ray.records.codec import decode, encode
from triaccel_ray.records.plan import Applied, Fault, FaultKind, Plan, Precision, Storage, nearest_supported


class Actuators:
    """Applies plans; if a plan fails, the one before it stays in force and a fault is returned."""

    def __init__(self, plan: Plan, cache: StepCache, pool: GraphPool) -> None:
        self._cache, self._pool = cache, pool
        self._put_in_force(plan)
        self.plan = plan
        """The plan in force."""
        self._adapting_ms = 0.0

    @property
    def adapting_ms(self) -> float:
        """Milliseconds spent on new plans since the run began; 0 where no step is captured."""
        return self._adapting_ms + self._cache.pending_ms if self._cache.tries_capture else 0.0

    def apply(self, plan: Plan, *, step: int) -> Applied:
        """Applies `plan`; returns the plan then in force, a fault if that is still the old one, and the cost."""
        faults: tuple[Fault, ...] = ()
        try:
            with self._cache.step.peers.agreeing():
                self._put_in_force(plan)
            if plan.needs_less_than(self.plan):
                self._pool.release()  # captured steps of the larger plan would keep its memory
            self.plan = plan
        except (RuntimeError, KeyError, MemoryError) as error:
            self._put_in_force(self.plan)
            detail = f"{type(error).__name__}: {error}"[:500]
            kind = FaultKind.APPLY_FAILED
            faults = (Fault(kind=kind, step=step, phase="apply", batch_size=plan.batch_size, detail=detail),)
        milliseconds = self._cache.take_cost()
        self._adapting_ms += milliseconds
        return Applied(plan=self.plan, faults=faults, adapt_ms=milliseconds)

    def measure_regions_again(self) -> None:
        """Has the next steps measure the costs of regions; drops captured steps, whose replays would record nothing."""
        if self._cache.step.activations.measure_costs_again():
            self._pool.release()

    def state_dict(self) -> dict[str, Any]:
        """Returns the plan, its cost, and what changes if a batch does not fit: number of micro-batches and storage."""
        step = self._cache.step
        return {
            "plan": encode(self.plan),
            "adapting_ms": self.adapting_ms,
            "micro_batches": [step.num_micro_batches, step.min_micro_batch_size],
            "storage": encode(step.activations.storage),
            "region_costs": step.activations.costs_state(),
        }

    def load_state_dict(
        self,
        state: dict[str, Any],
        supported: Mapping[str, tuple[Precision, ...]],
        *,
        adapts_precision: bool,
        adapts_batch: bool,
    ) -> None:
        """Restores and applies what `state_dict` returned; a precision not `supported` becomes the next higher one.

        Regions with selective storage that are no longer compiled keep all their tensors.

        Without `adapts_precision`, the plan in force decides precisions. Only FP16 gives way to those of the state:
        layers may have overflowed in it. Without `adapts_batch`, a larger batch than the one in force returns to that.
        """
        plan = decode(Plan, state["plan"])
        wanted = dict(plan.precision)
        if not adapts_precision:
            wanted |= {name: level for name, level in self.plan.precision.items() if level is not Precision.FP16}
        precision = {name: nearest_supported(level, supported[name]) for name, level in wanted.items()}
        micro_batches, own = state["micro_batches"], self.plan
        if plan.batch_size > own.batch_size and not adapts_batch:
            plan = replace(
                plan,
                batch_size=own.batch_size,
                batch_lr_scale=own.batch_lr_scale,
                num_micro_batches=own.num_micro_batches,
            )
            micro_batches = [own.num_micro_batches, own.micro_batch_size]
        activations = self._cache.step.activations
        stored = plan.storage.items()
        possible = {name: each for name, each in stored if activations.can_select or not each.is_selective}
        self.plan = replace(plan, precision=precision, storage=possible)
        self._put_in_force(self.plan)
        self._cache.step.set_num_micro_batches(*micro_batches)
        activations.set({name: Storage(each) for name, each in state["storage"].items()})
        if activations.costs is not None:
            activations.costs.load_state_dict(state.get("region_costs", []))
        self._adapting_ms = state["adapting_ms"]

    def _put_in_force(self, plan: Plan) -> None:
        self._cache.step.precision.set(plan.precision)
        self._cache.step.activations.set(plan.storage)
        self._cache.step.set_num_micro_batches(plan.num_micro_batches, plan.micro_batch_size)
