"""Tries precisions on a few samples before they take effect: some layers cannot do without FP32."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from triaccel_ray.apply.compile import loss_in_fp32
from triaccel_ray.config import ControlConfig
from triaccel_ray.control.training import Training
from triaccel_ray.cuda.out_of_memory import first_line
from triaccel_ray.cuda.random_states import preserved_random_states
from triaccel_ray.model.dry_run import needs_gradients
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
"""Relative change of a model's outputs above which a layer needs a higher precision. On CPUs, BF16 changes those of 67
new models by up to 0.05 (NFNet-F0), of a SIREN, whose first layer it moves by radians, by 0.4 to 1.4."""
_MOST_LOSS = 0.1
"""Share of the loss by which a lower precision may raise it. BF16 in place of FP32 raises that of a classifier by
less than 1 %; a layer that needs FP32 loses all that the model has learned."""
_NUM_OF_NEW, _NUM_OF_TRAINED = 8, 32
"""Samples by which a new model and one in training are judged. Logits of many long texts would take more memory than a
step."""
Precisions = Mapping[str, Precision]


def withdraw_imprecise(training: Training, config: ControlConfig) -> None:
    """Withdraws from the layers of a new model the precisions in which one alone changes the outputs: it cannot learn.

    Outputs are compared with those in FP32, in eval mode.
    """
    if not (config.precision.enabled and config.revert_slowdowns):
        return
    trial = _Trial(training, {name: Precision.FP32 for name, _ in training.supported}, _NUM_OF_NEW, is_new=True)
    imprecise = {}
    for level in (Precision.FP16, Precision.BF16):
        lower = {name: level for name, offered in training.supported if level in offered}
        imprecise.update({(name, level): effect.change for name, effect in _harmful(trial, lower).items()})
    training.precision.weights.drop_unused()  # copies in 16 bits: the first steps make them again
    withdraw(training, imprecise)
    for (name, level), change in imprecise.items():
        text = f"{name} in {level} changes the outputs of the new model by {change:.0%}: it is not offered"
        training.faults.append(_fault(FaultKind.PRECISION_REFUSED, 0, text))
    if trial.failure:
        training.faults.append(_fault(FaultKind.PRECISION_UNTRIED, 0, trial.failure))


def withdraw(training: Training, pairs: Collection[tuple[str, Precision]]) -> None:
    """Withdraws these precisions, each of one layer, from `training.supported`, in place of those withdrawn before."""
    before, training.withdrawn = training.withdrawn, frozenset(pairs)
    for index, (name, offered) in enumerate(training.supported):
        own = {*offered, *(level for layer, level in before if layer == name)}
        kept = (level for level in Precision if level in own and (name, level) not in training.withdrawn)
        training.supported[index] = name, tuple(kept)


def without_harm(
    training: Training, config: ControlConfig, before: Plan, wanted: Plan, *, step: int
) -> tuple[Plan, tuple[Fault, ...]]:
    """Returns `wanted`, but with layers as `before` whose lower precision would do harm; a fault names them.

    The variance of gradients falls with the loss, so it falls below any threshold as training succeeds. It does not
    tell whether a layer needs its precision. Loss and outputs for some training samples do. Only with
    `revert_slowdowns`, which says that changes must pay.
    """
    lower = {name: each for name, each in wanted.precision.items() if each.rank < before.precision[name].rank}
    if not (lower and config.revert_slowdowns):
        return wanted, ()
    start = time.perf_counter()
    trial = _Trial(training, before.precision, min(max(wanted.micro_batch_size, 2), _NUM_OF_TRAINED))
    kept = _harmful(trial, lower) if trial.does_harm(together := trial.effect_of(lower)) else {}
    others = {name: level for name, level in lower.items() if name not in kept}
    if trial.does_harm(together) and others and (not kept or trial.does_harm(trial.effect_of(others))):
        kept = dict.fromkeys(lower, together)  # only together do they do harm
    training.steps.pending_ms += 1e3 * (time.perf_counter() - start)
    faults = [_fault(FaultKind.PRECISION_UNTRIED, step, trial.failure)] if trial.failure else []
    if kept:
        names = ", ".join(f"{name} {before.precision[name]} -> {lower[name]}" for name in kept)
        text = f"a lower precision {together.text}, on {trial.num_samples} samples: {names} refused"
        faults.append(_fault(FaultKind.LOWERING_REFUSED, step, text, layers=tuple(kept)))
    precision = {**wanted.precision, **{name: before.precision[name] for name in kept}}
    return replace(wanted, precision=precision), tuple(faults)


def _harmful(trial: _Trial, lower: Precisions) -> dict[str, _Effect]:
    """Returns the layers whose lower precision does harm alone, found by bisection, each with its effect."""
    if not lower or not trial.does_harm(effect := trial.effect_of(lower)):
        return {}
    names = list(lower)
    if len(names) == 1:
        return {names[0]: effect}
    middle = len(names) // 2
    halves = ({name: lower[name] for name in half} for half in (names[:middle], names[middle:]))
    return {name: effect for half in halves for name, effect in _harmful(trial, half).items()}


def _fault(kind: FaultKind, step: int, detail: str, *, layers: tuple[str, ...] = ()) -> Fault:
    return Fault(kind=kind, step=step, phase="precision", detail=detail[:500], layers=layers)


class _Effect(NamedTuple):
    """What a change of precisions does to some samples."""

    loss_before: float
    loss: float
    change: float
    """Relative change of the outputs, |y - y_0| / |y_0|."""

    @property
    def text(self) -> str:
        """The effect, as a part of a sentence."""
        return f"changes the loss from {self.loss_before:.3g} to {self.loss:.3g}, and the outputs by {self.change:.0%}"


class _Trial:
    """Passes the same training samples through the model in different precisions.

    Passes are eager, without augmentation, and draw the same random numbers. Parameters that take gradients, buffers,
    modes and random states are left as they were.
    """

    def __init__(self, training: Training, in_force: Precisions, num_samples: int, *, is_new: bool = False) -> None:
        """Prepares to change precisions from those `in_force`; a model that `is_new` is judged in eval mode."""
        self._training, self._in_force, self._is_new = training, in_force, is_new
        self._indices = training.sampler.source.probe(num_samples)
        self.num_samples = len(self._indices)
        self.failure = ""
        """Why a change could not be tried; empty if all could."""
        self._needs_gradients = False

    def does_harm(self, effect: _Effect) -> bool:
        """Returns whether the outputs change too much or, of a model in training, the loss rises too much."""
        limit = effect.loss_before + _MOST_LOSS * abs(effect.loss_before)
        is_within = effect.loss <= limit and effect.change <= _MOST_CHANGE
        return math.isfinite(effect.loss_before) and not is_within

    def effect_of(self, change: Precisions) -> _Effect:
        """Returns the effect of a change, the mean over the ranks; NaN if it cannot be tried, as for lack of memory."""
        try:
            try:
                values = self._losses_and_change(change)
            except Exception as error:
                if self._needs_gradients or not needs_gradients(error):
                    raise
                self._needs_gradients = True
                values = self._losses_and_change(change)
        except Exception as error:
            self.failure, values = f"not tried on samples: {first_line(error)}", [math.nan] * 3
        finally:
            self._training.precision.set(self._in_force)
        return _Effect(*(fmean(each) for each in zip(*self._training.ranks.gather(values), strict=True)))

    def _losses_and_change(self, change: Precisions) -> list[float]:
        training, sampler = self._training, self._training.sampler
        found: list[tuple[Tensor, list[Tensor]]] = []
        with self._undisturbed():
            inputs, targets = sampler.source.batch(sampler.placed(self._indices), None)
            for precisions in (self._in_force, {**self._in_force, **change}):
                training.precision.set(precisions)
                with preserved_random_states():
                    with training.precision.in_force():
                        outputs = forward(training.model, inputs)
                    # In eval mode, a model may return what the loss does not take.
                    loss = torch.zeros(()) if self._is_new else loss_in_fp32(training.loss, outputs, targets).detach()
                found.append((loss, [each.detach() for each in tensors_in(outputs) if each.is_floating_point()]))
            (loss_before, before), (loss, after) = found
            # Masks may hold infinities, whose difference is NaN.
            moved = [torch.where(one == other, 0.0, one - other) for one, other in zip(before, after, strict=True)]
            return [float(loss_before), float(loss), float(_norm(moved) / _norm(before).clamp(min=1e-30))]

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        training = self._training
        modules = trained_modules(training.model, training.loss)
        with contextlib.ExitStack() as stack:
            stack.enter_context(training.steps.on_stream())
            stack.enter_context(training.memory.outside_window())
            training.statistics.mend()
            stack.enter_context(preserved_random_states())
            stack.callback(restoring_buffers(modules.modules()))
            if self._is_new:
                stack.enter_context(preserved_modes(modules))
                modules.eval()
            stack.enter_context(uncompiled())
            stack.enter_context(without_cudnn())  # which would prepare for shapes that are used once
            stack.enter_context(torch.set_grad_enabled(self._needs_gradients))
            yield


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    norms = [torch.linalg.vector_norm(each, dtype=torch.float32) for each in tensors] or [torch.zeros(())]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total
