"""Carrying out a plan: all of it, or none."""

from __future__ import annotations

from triaccel_ray.apply.precision import LayerPrecision
from triaccel_ray.apply.step import Step
from triaccel_ray.plan import Applied, Fault, FaultKind, Plan


class Actuators:
    """Puts a plan into force; a plan that fails leaves the one before in force and comes back as a fault."""

    def __init__(self, plan: Plan, precision: LayerPrecision, step: Step) -> None:
        """Applies the first plan; there is nothing to fall back to, so its errors propagate."""
        self._precision, self._step = precision, step
        self._put(plan)
        self.plan = plan
        """The plan in force."""

    def apply(self, plan: Plan, *, step: int) -> Applied:
        """Returns the plan in force afterwards, and the fault if that is still the old one."""
        try:
            self._put(plan)
        except (RuntimeError, KeyError, MemoryError) as error:
            self._put(self.plan)
            fault = Fault(
                kind=FaultKind.APPLY_FAILED,
                step=step,
                phase="apply",
                batch_size=plan.batch_size,
                detail=f"{type(error).__name__}: {error}"[:500],
            )
            return Applied(plan=self.plan, faults=(fault,))
        self.plan = plan
        return Applied(plan=plan)

    def _put(self, plan: Plan) -> None:
        self._precision.set(plan.precision)
        self._step.set_parts(plan.num_micro_batches)
