"""Tries precisions on a few samples before they take effect: some layers cannot do without FP32."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from triaccel_ray.apply.compile import loss_in_fp32
from triaccel_ray.config import ControlConfig
from triaccel_ray.control.training import Training
from triaccel_ray.cuda.random_states import preserved_random_states
from triaccel_ray.model.layers import (
    forward,
    preserved_modes,
    restoring_buffers,
    trained_modules,
    uncompiled,
    without_cudnn,
)
from triaccel_ray.model.pytree import tensors_in
from triaccel_ray.records.plan import Fault, FaultKind, Plan, Precision

_MOST_CHANGE = 0.1
"""Relative change of a new model's outputs above which a layer needs a higher precision. On CPUs, BF16 changes
those of 67 architectures by up to 0.05 (NFNet-F0), of a SIREN, whose first layer it moves by radians, by 0.4 to 1.4."""
_NUM_OF_NEW = 8
"""Samples by which a new model is judged: logits of many long texts would take more memory than a step."""
_NUM_SAMPLES = 32
_TOLERANCE = 0.1
"""Share of the loss by which a lower precision may raise it. BF16 in place of FP32 raises that of a classifier by
less than 1 %; a layer that needs FP32 loses all that the model has learned."""
Precisions = Mapping[str, Precision]


def withdraw_imprecise(training: Training, config: ControlConfig, first: Plan) -> None:
    """Withdraws from `training.supported` the precisions in which a layer alone changes the outputs of a new model.

    Such a model does not learn in these precisions. Outputs are those of a few samples, in eval mode.
    """
    if not (config.precision.enabled and config.revert_slowdowns):
        return
    trial = _Trial(training, dict.fromkeys(first.precision, Precision.FP32), _NUM_OF_NEW)
    change = trial.changes_of_outputs([first.precision])[0]
    training.precision.weights.drop_unused()  # copies in 16 bits, which the first steps make again
    if not change > _MOST_CHANGE:
        return
    pairs = [(name, each) for name, levels in training.supported for each in levels if each is not Precision.FP32]
    changes = zip(pairs, trial.changes_of_outputs([dict([pair]) for pair in pairs]), strict=True)
    imprecise = {pair: change for pair, change in changes if change > _MOST_CHANGE}
    for (name, level), change in imprecise.items():
        text = f"{name} in {level} changes the outputs of the new model by {change:.0%}: it is not offered"
        training.faults.append(Fault(kind=FaultKind.PRECISION_REFUSED, step=0, phase="precision", detail=text))
    training.supported = [
        (name, tuple(each for each in levels if (name, each) not in imprecise)) for name, levels in training.supported
    ]


def without_harm(
    training: Training, config: ControlConfig, before: Plan, wanted: Plan, *, step: int
) -> tuple[Plan, tuple[Fault, ...]]:
    """Returns `wanted`, but with layers as `before` whose lower precision would raise the loss; a fault names them.

    The variance of gradients falls with the loss, so it falls below any threshold as training succeeds. It does not
    tell whether a layer needs its precision. The loss of some training samples does. Only with `revert_slowdowns`,
    which says that changes must pay.
    """
    lower = {name: each for name, each in wanted.precision.items() if each.rank < before.precision[name].rank}
    if not (lower and config.revert_slowdowns):
        return wanted, ()
    trial = _Trial(training, before.precision, min(wanted.micro_batch_size, _NUM_SAMPLES))
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


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    norms = [torch.linalg.vector_norm(each, dtype=torch.float32) for each in tensors]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def _is_harm(before: float, after: float) -> bool:
    return math.isfinite(before) and not after <= before + _TOLERANCE * abs(before)


class _Trial:
    """Passes the same training samples through the model in different precisions.

    Passes are eager, without gradients and augmentation, and draw the same random numbers. Parameters, buffers, modes
    and random states are left as they were.
    """

    def __init__(self, training: Training, in_force: Precisions, num_samples: int) -> None:
        """Prepares to change precisions from those `in_force`."""
        self._training, self._in_force = training, in_force
        self._indices = training.sampler.source.probe(num_samples)
        self.num_samples = len(self._indices)

    def losses(self, changes: Sequence[Precisions]) -> list[float]:
        """Returns the loss under each change of precisions, in training mode; NaN if it cannot be computed."""
        loss = self._training.loss
        return self._measured(changes, lambda outputs, targets: loss_in_fp32(loss, outputs, targets))

    def changes_of_outputs(self, changes: Sequence[Precisions]) -> list[float]:
        """Returns the relative change of the outputs in eval mode, sqrt(sum |y - y_0|^2 / sum |y_0|^2); or NaN."""
        outputs_before: list[Tensor] = []

        def change(outputs: Any, _: Any) -> Tensor:
            own = [each for each in tensors_in(outputs) if each.is_floating_point()]
            if not outputs_before:
                outputs_before.extend(own)
            moved = _norm([one - other for one, other in zip(outputs_before, own, strict=True)])
            return moved / _norm(outputs_before)

        return self._measured([{}, *changes], change, is_training=False)[1:]

    def _measured(
        self, changes: Sequence[Precisions], measure: Callable[[Any, Any], Tensor], *, is_training: bool = True
    ) -> list[float]:
        """Returns `measure(outputs, targets)` under each change of precisions, the mean over the ranks."""
        training = self._training
        try:
            with self._undisturbed(is_training=is_training):
                sampler = training.sampler
                inputs, targets = sampler.source.batch(sampler.placed(self._indices), None)
                found = []
                for change in changes:
                    training.precision.set({**self._in_force, **change})
                    with preserved_random_states():
                        with training.precision.in_force():
                            outputs = forward(training.model, inputs)
                        found.append(measure(outputs, targets))
                values = [float(each) for each in found]
        except Exception:  # as for lack of memory: training finds out whether it is worse than that
            values = [math.nan] * len(changes)
        finally:
            training.precision.set(self._in_force)
        return [fmean(each) for each in zip(*training.ranks.gather(values), strict=True)]

    @contextlib.contextmanager
    def _undisturbed(self, *, is_training: bool) -> Iterator[None]:
        training = self._training
        modules = trained_modules(training.model, training.loss)
        with contextlib.ExitStack() as stack:
            stack.enter_context(training.steps.on_stream())
            stack.enter_context(training.memory.outside_window())
            training.statistics.mend()
            stack.callback(restoring_buffers(modules.modules()))
            if not is_training:
                stack.enter_context(preserved_modes(modules))
                modules.eval()
            stack.enter_context(uncompiled())
            stack.enter_context(without_cudnn())  # which would prepare for shapes that are used once
            stack.enter_context(torch.no_grad())
            yield
