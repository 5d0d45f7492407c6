"""Checks precisions on a few samples before they take effect: some layers cannot do without FP32."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from triaccel_ray.apply.compile import loss_in_fp32
from triaccel_ray.config import ControlConfig
from triaccel_ray.control.training import Training
from triaccel_ray.cuda.out_of_memory import first_line, is_out_of_memory
from triaccel_ray.cuda.random_states import preserved_random_states
from triaccel_ray.decide.sensitivity import Effect
from triaccel_ray.model.dry_run import needs_gradients, undisturbed
from triaccel_ray.model.layers import forward, trained_modules
from triaccel_ray.model.pytree import tensors_in
from triaccel_ray.records.plan import Fault, FaultKind, Plan, Precision

_NUM_SAMPLES_NEW, _NUM_SAMPLES_TRAINED = 8, 32
"""Samples on which a new model and one in training are checked. Logits of many long texts would take more memory than a
step."""
_CHUNK_ELEMENTS = 2**24
"""Outputs compared at once: logits of long texts would take several times the memory of a step."""
Precisions = Mapping[str, Precision]


def withhold_sensitive(training: Training, config: ControlConfig) -> None:
    """Withholds from each layer of a new model the precisions that alone change the model's outputs too much.

    Outputs are compared with those in FP32. Faults name the layers. Only if precision adapts, and with
    `revert_slowdowns`. Every rank must call it.
    """
    if not (config.precision.enabled and config.revert_slowdowns):
        return
    check = _Check(training, {name: Precision.FP32 for name, _ in training.offered}, _NUM_SAMPLES_NEW, is_new=True)
    sensitive: set[tuple[str, Precision]] = set()
    for level in (Precision.FP8, Precision.FP16, Precision.BF16):
        lower = {name: level for name, offered in training.offered if level in offered}
        if lower and (found := _harmful(check, lower, check.effect_of(lower))):
            sensitive.update((name, level) for name in found)
            names = ", ".join(f"{name} ({effect.output_change:.0%})" for name, effect in found.items())
            text = f"{level} is not offered to layers where it changes the outputs of the new model: {names}"
            training.faults.append(_fault(FaultKind.PRECISION_REFUSED, 0, text))
    training.precision.weights.drop_unused()  # copies in 16 bits: the first steps make them again
    withhold(training, sensitive)
    training.faults.extend(check.faults(step=0))


def withhold(training: Training, pairs: Collection[tuple[str, Precision]]) -> None:
    """Makes `training.supported` all that is offered but these pairs of a layer's name and a precision."""
    training.withheld = frozenset(pairs)
    # In place: the sensors hold this list, too.
    training.supported[:] = [
        (name, tuple(level for level in offered if (name, level) not in training.withheld))
        for name, offered in training.offered
    ]


def refuse_harmful(
    training: Training, config: ControlConfig, in_force: Plan, wanted: Plan, *, step: int
) -> tuple[Plan, tuple[Fault, ...]]:
    """Returns `wanted` without the lower precisions that raise the loss or change the outputs; a fault names them.

    The variance of gradients falls with the loss, so it falls below any threshold as training succeeds. A low variance
    does not show that a layer can do without its precision. Only with `revert_slowdowns`. Every rank must call it.
    """
    lower = {name: each for name, each in wanted.precision.items() if each.rank < in_force.precision[name].rank}
    if not (lower and config.revert_slowdowns):
        return wanted, ()
    start = time.perf_counter()
    check = _Check(training, in_force.precision, min(max(wanted.micro_batch_size, 2), _NUM_SAMPLES_TRAINED))
    together = check.effect_of(lower)
    kept = set(_harmful(check, lower, together))
    others = {name: level for name, level in lower.items() if name not in kept}
    if together.is_harmful and (not kept or (others and check.effect_of(others).is_harmful)):
        kept = set(lower)  # the rest does harm only together
    training.steps.pending_ms += 1e3 * (time.perf_counter() - start)
    faults = check.faults(step)
    if kept:
        names = ", ".join(f"{name} {in_force.precision[name]} -> {lower[name]}" for name in lower if name in kept)
        text = (
            f"on {check.num_samples} samples, lower precisions change the loss from {together.loss_before:.3g} to "
            f"{together.loss:.3g} and the outputs by {together.output_change:.0%}; refused: {names}"
        )
        faults.append(_fault(FaultKind.LOWERING_REFUSED, step, text, layers=sorted(kept)))
    precision = {name: in_force.precision[name] if name in kept else each for name, each in wanted.precision.items()}
    return replace(wanted, precision=precision), tuple(faults)


def _harmful(check: _Check, lower: Precisions, effect: Effect) -> dict[str, Effect]:
    """Returns the layers whose lower precision does harm alone, each with its effect; `effect` is that of all.

    By bisection: layers of a half that is harmless are not looked at one by one.
    """
    if not effect.is_harmful:
        return {}
    if len(lower) == 1:
        return dict.fromkeys(lower, effect)
    layers, middle = list(lower.items()), len(lower) // 2
    halves = dict(layers[:middle]), dict(layers[middle:])
    return {name: each for half in halves for name, each in _harmful(check, half, check.effect_of(half)).items()}


def _fault(kind: FaultKind, step: int, detail: str, *, layers: Sequence[str] = ()) -> Fault:
    return Fault(kind=kind, step=step, phase="precision", detail=detail[:500], layers=tuple(layers))


class _Check:
    """Passes the same training samples through the model in different precisions.

    Passes are eager, without augmentation, and draw the same random numbers. A new model is in eval mode, because batch
    statistics of so few samples would amplify rounding. Parameters that take gradients, buffers, modes and random
    states are left as they were.
    """

    def __init__(self, training: Training, in_force: Precisions, num_samples: int, *, is_new: bool = False) -> None:
        """Prepares to change precisions from those `in_force`."""
        self._training, self._in_force, self._is_new = training, in_force, is_new
        self._indices = training.sampler.source.probe(num_samples)
        self.num_samples = len(self._indices)
        self._before: tuple[float, list[Tensor]] | None = None
        self._needs_gradients, self._failure = False, ""

    def faults(self, step: int) -> list[Fault]:
        """Returns a fault if an effect could not be computed."""
        return [_fault(FaultKind.PRECISION_UNCHECKED, step, self._failure)] if self._failure else []

    def effect_of(self, change: Precisions) -> Effect:
        """Returns the effect of a change, the mean over the ranks.

        NaN if it cannot be computed, as for lack of memory; infinite if the model fails in these precisions alone.
        """
        try:
            values = self._losses_and_change(change)
        except Exception as error:  # recorded as a fault; training goes on
            if needs_gradients(error) and not self._needs_gradients:
                self._needs_gradients = True
                return self.effect_of(change)
            self._failure, values = f"the check on samples failed: {first_line(error)}", [math.nan] * 3
            if self._before is not None and not is_out_of_memory(error):
                values = [self._before[0], math.inf, math.inf]
        finally:
            self._training.precision.set(self._in_force)
            if self._training.device.type == "cuda":  # or memory cached by the passes would add to that of the graphs
                self._training.memory.trim()
        loss_before, loss, moved = map(fmean, zip(*self._training.ranks.all_gather_object(values), strict=True))
        return Effect(loss_before=loss_before, loss=loss, output_change=moved)

    def _losses_and_change(self, change: Precisions) -> list[float]:
        """Returns the loss before and after, 0 for a new model, and the relative change of the outputs."""
        with self._undisturbed():
            if self._before is None:
                self._before = self._loss_and_outputs({})
            (loss_before, before), (loss, after) = self._before, self._loss_and_outputs(change)
            return [loss_before, loss, _relative_change(before, after)]

    def _loss_and_outputs(self, change: Precisions) -> tuple[float, list[Tensor]]:
        training = self._training
        training.precision.set({**self._in_force, **change})
        with preserved_random_states():
            inputs, targets = training.sampler.source.batch(training.sampler.placed(self._indices), None)
            with training.precision.in_force():
                outputs = forward(training.model, inputs)
            # In eval mode, a model may return what the loss does not take.
            loss = 0.0 if self._is_new else float(loss_in_fp32(training.loss, outputs, targets))
        return loss, [each.detach().float() for each in tensors_in(outputs) if each.is_floating_point()]

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        training = self._training
        modules = trained_modules(training.model, training.loss)
        with training.steps.on_stream(), training.memory.outside_window():
            training.statistics.mend()
            with undisturbed(modules), torch.set_grad_enabled(self._needs_gradients):
                if self._is_new:
                    modules.eval()
                yield


def _relative_change(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """Returns |after - before| / |before| without masked elements, beside which each change would look small.

    Masks are NaN or infinite in both, or low: -1e4 or -1e9, which 16 bits round, or the least number of a format.
    """
    changes, norms = list[Tensor](), list[Tensor]()
    flat = ((one.flatten(), other.flatten()) for one, other in zip(before, after, strict=True))
    parts = (zip(one.split(_CHUNK_ELEMENTS), other.split(_CHUNK_ELEMENTS), strict=True) for one, other in flat)
    for one, other in chain.from_iterable(parts):
        is_lost = (one.isnan() & other.isnan()) | ((one == other) & one.isinf())
        is_low = (one < -5e3) & ((one - other).abs() <= 0.01 * one.abs())
        is_masked = is_lost | is_low | ((one < -1e8) & (other < -1e8))
        changes.append(torch.where(is_masked, 0.0, one - other).norm())
        norms.append(torch.where(is_masked, 0.0, one).norm())
    return float(get_total_norm(changes) / get_total_norm(norms).clamp(min=1e-30))
