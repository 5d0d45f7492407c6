"""When FP16 cannot hold what a layer computes, whatever the loss scale: out of it, and out it stays for a while."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from triaccel_ray.config import MINIMUM_LOSS_SCALE, PrecisionConfig
from triaccel_ray.records.plan import Precision, Reason, ReasonCode
from triaccel_ray.records.signals import Observation
from triaccel_ray.records.state import ControlState, LayerState


def bar_overflowing(
    config: PrecisionConfig, observation: Observation, state: ControlState, layers: Mapping[str, LayerState]
) -> tuple[dict[str, LayerState], list[Reason]]:
    """Returns the layers' states, those in FP16 barred from it when more than half of the interval's steps overflowed.

    While the loss scale can still fall it is given the time to. At its minimum an overflow comes from the forward pass
    itself: such steps are skipped for ever, and no scale helps. Which layer it was is not known, so all FP16 layers go.
    """
    barred = [name for name, level in observation.plan.precision.items() if level is Precision.FP16]
    num_steps, num_skipped = observation.step - state.step, observation.num_skipped - state.num_skipped
    if not barred or observation.loss_scale > MINIMUM_LOSS_SCALE or not 2 * num_skipped > num_steps > 0:
        return dict(layers), []
    ticks = config.overflow_bar_ticks
    out = {
        name: replace(layers[name], by_variance=Precision.BF16, lower_votes=0, fp16_bar_ticks=ticks) for name in barred
    }
    text = (
        f"{num_skipped} of {num_steps} steps overflowed at loss scale {observation.loss_scale:.3g}: "
        f"{len(barred)} layers leave fp16 for {ticks} ticks"
    )
    threshold = num_steps / 2
    reason = Reason(
        code=ReasonCode.OVERFLOW, subject="precision", text=text, value=float(num_skipped), threshold=threshold
    )
    return {**layers, **out}, [reason]
