"""Tries lower precisions on a few samples before they take effect: some layers cannot do without FP32."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from statistics import fmean

import torch

from triaccel_ray.apply.compile import loss_in_fp32
from triaccel_ray.config import ControlConfig
from triaccel_ray.control.training import Training
from triaccel_ray.cuda.random_states import preserved_random_states
from triaccel_ray.model.layers import forward, restoring_buffers, trained_modules, uncompiled
from triaccel_ray.records.plan import Fault, FaultKind, Plan, Precision

_NUM_SAMPLES = 32
_TOLERANCE = 0.1
"""Share of the loss by which a lower precision may raise it. BF16 in place of FP32 raises that of a classifier by
less than 1 %; a layer that needs FP32 loses all that the model has learned."""


def without_harm(
    training: Training, config: ControlConfig, before: Plan, wanted: Plan, *, step: int
) -> tuple[Plan, tuple[Fault, ...]]:
    """Returns `wanted`, but with layers as `before` whose lower precision would raise the loss; a fault names them.

    Only with `revert_slowdowns`, which says that changes must pay.

    The variance of gradients falls with the loss, so it falls below any threshold as training succeeds. It does not
    tell whether a layer needs its precision. The loss of some training samples does. Each pass is eager, without
    gradients, and with the same random numbers; parameters, buffers and random states are left as they were.
    """
    lower = {name: each for name, each in wanted.precision.items() if each.rank < before.precision[name].rank}
    if not (lower and config.revert_slowdowns):
        return wanted, ()
    trial = _Trial(training, before, min(wanted.micro_batch_size, _NUM_SAMPLES))
    now, then = trial.losses([{}, lower])
    if not _is_harm(now, then):
        return wanted, ()
    found = dict(zip(lower, trial.losses([{name: each} for name, each in lower.items()]), strict=True))
    # Where only all of them together do harm, none is lowered.
    kept = {name: loss for name, loss in found.items() if _is_harm(now, loss)} or dict.fromkeys(lower, then)
    texts = (f"{name} {before.precision[name]} -> {lower[name]}: {loss:.3g}" for name, loss in kept.items())
    detail = f"a lower precision would raise the loss of {trial.num_samples} samples from {now:.3g}: {', '.join(texts)}"
    fault = Fault(kind=FaultKind.LOWERING_REFUSED, step=step, phase="precision", detail=detail[:500])
    return replace(wanted, precision={**wanted.precision, **{name: before.precision[name] for name in kept}}), (fault,)


def _is_harm(before: float, after: float) -> bool:
    return math.isfinite(before) and not after <= before + _TOLERANCE * abs(before)


class _Trial:
    """Computes the loss of the same training samples in different precisions."""

    def __init__(self, training: Training, plan: Plan, num_samples: int) -> None:
        self._training, self._plan = training, plan
        self._indices = training.sampler.source.probe(num_samples)
        self.num_samples = len(self._indices)

    def losses(self, changes: list[dict[str, Precision]]) -> list[float]:
        """Returns the loss under each change of precisions, the mean over the ranks; NaN if it cannot be computed."""
        training = self._training
        try:
            found = self._own_losses(changes)
        except (RuntimeError, MemoryError):  # as for lack of memory
            found = [math.nan] * len(changes)
        finally:
            training.precision.set(self._plan.precision)
        return [fmean(each) for each in zip(*training.ranks.gather(found), strict=True)]

    def _own_losses(self, changes: list[dict[str, Precision]]) -> list[float]:
        training = self._training
        modules = trained_modules(training.model, training.loss).modules()
        with contextlib.ExitStack() as stack:
            stack.enter_context(training.steps.on_stream())
            stack.enter_context(training.memory.outside_window())
            training.statistics.mend()
            stack.callback(restoring_buffers(modules))
            stack.enter_context(uncompiled())
            stack.enter_context(torch.no_grad())
            sampler = training.sampler
            inputs, targets = sampler.source.batch(sampler.placed(self._indices), None)
            found = []
            for change in changes:
                training.precision.set({**self._plan.precision, **change})
                with preserved_random_states():
                    with training.precision.in_force():
                        outputs = forward(training.model, inputs)
                    found.append(loss_in_fp32(training.loss, outputs, targets))
            return [float(each) for each in found]
