"""Carrying out a plan: all of it, or none."""

from __future__ import annotations

from typing import Any

from triaccel_ray.apply.capture import StepCache
from triaccel_ray.cuda.graphs import GraphPool
from triaccel_ray.records.codec import decode, encode
from triaccel_ray.records.plan import Applied, Fault, FaultKind, Plan


class Actuators:
    """Puts a plan into force; a plan that fails leaves the one before in force and comes back as a fault."""

    def __init__(self, plan: Plan, cache: StepCache, pool: GraphPool) -> None:
        self._cache, self._pool = cache, pool
        self._put(plan)
        self.plan = plan
        """The plan in force."""
        self.adapting_ms = 0.0
        """Milliseconds that new plans have taken since the run began."""

    def apply(self, plan: Plan, *, step: int) -> Applied:
        """Returns the plan in force afterwards, the fault if that is still the old one, and what plans have cost."""
        faults: tuple[Fault, ...] = ()
        try:
            self._put(plan)
            if plan.needs_less_than(self.plan):
                self._pool.release()  # captured steps of the larger plan would go on holding its memory
            self.plan = plan
        except (RuntimeError, KeyError, MemoryError) as error:
            self._put(self.plan)
            detail, size = f"{type(error).__name__}: {error}"[:500], plan.batch_size
            faults = (Fault(kind=FaultKind.APPLY_FAILED, step=step, phase="apply", batch_size=size, detail=detail),)
        milliseconds, evicted = self._cache.take_cost()
        self.adapting_ms += milliseconds
        return Applied(plan=self.plan, faults=faults, evicted=evicted, adapt_ms=milliseconds)

    def state_dict(self) -> dict[str, Any]:
        """Returns the plan in force, and in how many parts steps pass: more, after one that did not fit."""
        step = self._cache.step
        return {"plan": encode(self.plan), "micro_batches": [step.num_micro_batches, step.min_micro_batch_size]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts into force what `state_dict` returned."""
        self.plan = decode(Plan, state["plan"])
        self._put(self.plan)
        self._cache.step.set_num_micro_batches(*state["micro_batches"])

    def _put(self, plan: Plan) -> None:
        self._cache.step.precision.set(plan.precision)
        self._cache.step.set_num_micro_batches(plan.num_micro_batches, plan.micro_batch_size)
