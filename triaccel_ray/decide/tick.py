"""Rule 7: decides one tick, in the order faults, precision, learning rate, memory plan, batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from triaccel_ray.config import BatchConfig, ControlConfig
from triaccel_ray.decide.batch import BatchDecision, batch_lr_scale, decide_batch, retreat, undo_growth
from triaccel_ray.decide.calibration import remember_plan
from triaccel_ray.decide.curvature import lr_reasons, lr_scale, remember_curvature, smooth_noise
from triaccel_ray.decide.precision import bar_overflowing, bar_refused, decide_precision, keep_precision
from triaccel_ray.decide.storage import decide_storage, growth_hold, plans_memory, stores_least
from triaccel_ray.decide.throughput import Judgement, bar_undone, judge, size_that_pays, watch
from triaccel_ray.decide.weight_form import remember_form
from triaccel_ray.records.plan import Plan, Precision, Reason, ReasonCode
from triaccel_ray.records.signals import Observation
from triaccel_ray.records.state import ControlState, Decision, LayerState


def decide(config: ControlConfig, observation: Observation, state: ControlState) -> Decision:
    """Returns the decision for the next interval, from an observation and the state.

    A change that has slowed steps down is undone before anything else is decided.

    Pure: the same arguments give the same decision, on which replaying a log relies. At most one change per tick
    enlarges memory use: any number of layers promoted together, a faster memory plan, or a larger batch. Reductions are
    not limited. After a plan that could not be applied, precisions stay as they are and nothing is enlarged for one
    tick.
    """
    layers = {name: layer.after_tick() for name, layer in state.layers.items()}
    form, reasons = remember_form(config, observation.parameters, state.form)
    layers, curvature_reasons = remember_curvature(config.curvature, observation, layers)
    reasons += curvature_reasons
    batch_state = state.batch
    judged = judge(config, observation, state.throughput)
    reasons += judged.reasons
    if judged.undo is not None:
        layers, batch_state = bar_undone(config, judged.undo, layers, batch_state)

    before = observation.plan
    precision, layers, changes = _decide_precisions(config, observation, state, layers, judged)
    reasons += changes
    enlarged = observation.apply_fault is not None or any(
        level.bytes_per_element > before.precision[name].bytes_per_element for name, level in precision.items()
    )

    scales = {name: lr_scale(config.curvature, layer) for name, layer in layers.items()}
    reasons += lr_reasons(before.lr_scale, scales, layers)

    noise = smooth_noise(config.batch.noise_smoothing, state.batch.noise, observation.noise)
    batch_state = replace(batch_state, noise=noise)
    keeps_size, plans = stores_least(config, observation), plans_memory(config, observation)
    retreated = retreat(config.batch, observation, batch_state, keeps_size=keeps_size, plans=plans)
    may_change = observation.apply_fault is None and precision == before.precision
    lacks_memory = retreated is not None
    memory = decide_storage(config, observation, state.memory, judged, lacks_memory=lacks_memory, may_change=may_change)
    reasons += memory.reasons
    batch: BatchDecision = (
        retreated
        or undo_growth(before, judged.undo, batch_state)
        or decide_batch(
            config.batch,
            observation,
            batch_state,
            enlarged=enlarged,
            is_unjudged=judged.is_open,
            hold=growth_hold(config, observation, memory),
            choose_size=partial(size_that_pays, config, observation, judged.state),
        )
    )
    plan = Plan(
        batch_size=batch.batch_size,
        num_micro_batches=memory.num_micro_batches or batch.num_micro_batches,
        precision=precision,
        lr_scale=scales,
        batch_lr_scale=batch_lr_scale(config.batch, batch.batch_size, noise),
        storage=memory.storage,
    )
    reasons += [*batch.reasons, *_batch_lr_reasons(config.batch, before, plan)]
    remembered = ControlState(
        layers=layers,
        batch=batch.state,
        memory=remember_plan(observation, judged, plan, memory.state),
        throughput=watch(
            judged.state, observation, plan, is_undo=judged.undo is not None, is_stored_faster=memory.is_faster
        ),
        form=form,
        step=observation.step,
        num_skipped=observation.num_skipped,
    )
    return Decision(plan=plan, state=remembered, reasons=tuple(reasons), remeasures_regions=memory.is_mispredicted)


def _decide_precisions(
    config: ControlConfig,
    observation: Observation,
    state: ControlState,
    layers: Mapping[str, LayerState],
    judged: Judgement,
) -> tuple[dict[str, Precision], dict[str, LayerState], list[Reason]]:
    """Returns each layer's precision and state; precisions stay as they are after a plan that could not be applied."""
    fault = observation.apply_fault
    if fault is not None:
        precision, kept = keep_precision(observation, layers)
        text = f"the last plan failed to apply: {fault.detail}"
        return precision, kept, [Reason(code=ReasonCode.APPLY_FAILED, subject="precision", text=text)]
    layers = bar_refused(config.precision, observation, layers)
    barred, overflows = bar_overflowing(config.precision, observation, state, layers)
    most_ms = config.max_overhead * observation.step * (observation.step_ms or 0.0)
    is_affordable = not config.revert_slowdowns or observation.adapting_ms <= most_ms
    may_lower = is_affordable and not judged.is_open
    precision, updated, changes = decide_precision(config.precision, observation, barred, may_lower=may_lower)
    return precision, updated, overflows + changes


def _batch_lr_reasons(config: BatchConfig, old: Plan, new: Plan) -> list[Reason]:
    if new.batch_lr_scale == old.batch_lr_scale:
        return []
    text = f"rule {config.lr_rule} at batch {new.batch_size}: learning rate times {new.batch_lr_scale:.3g}"
    return [Reason(code=ReasonCode.LR_SCALE, subject="batch", text=text, value=new.batch_size)]
