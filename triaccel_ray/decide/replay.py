"""Replays a log: checks its decisions, and finds out where other thresholds would have decided otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from triaccel_ray.config import ControlConfig
from triaccel_ray.decide.initial import initial_decision
from triaccel_ray.decide.tick import decide
from triaccel_ray.records.signals import Observation
from triaccel_ray.records.state import Decision


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The decisions of a configuration on the observations of a log."""

    decisions: tuple[Decision, ...]
    """One per tick, up to and including the first that differs from the log."""
    diverged_at: int | None
    """Index into the log of the first tick whose plan differs; None when all agree.

    After that tick the recorded observations are no longer what this configuration would have seen. A configuration
    that starts with another batch size or precision than the log differs at 0, with its initial plan as the decision.
    """


def replay(config: ControlConfig, log: Sequence[tuple[Observation, Decision]]) -> Replay:
    """Returns the decisions that `config` makes on the log's observations, valid up to the first divergence.

    The configuration that wrote the log reproduces every decision exactly, including state and reasons. Only plans are
    compared, because another configuration may differ in state and reasons while the run stays the same. A log of a
    resumed run that lacks the first ticks is taken up after its first one.
    """
    if not log:
        return Replay(decisions=(), diverged_at=None)
    first, decided = log[0]
    decisions: list[Decision] = []
    if first.tick > 0:
        decisions, state = [decided], decided.state
    else:
        state = initial_decision(config, [(layer.name, layer.supported) for layer in first.layers]).state
        initial = {name: layer.by_variance for name, layer in state.layers.items()}
        batch = config.batch
        plan = replace(first.plan, batch_size=batch.start, num_micro_batches=batch.accumulate, precision=initial)
        if plan != first.plan:
            return Replay(decisions=(Decision(plan=plan, state=state),), diverged_at=0)
    for index, (observation, recorded) in enumerate(log[len(decisions) :], len(decisions)):
        decision = decide(config, observation, state)
        decisions.append(decision)
        if decision.plan != recorded.plan:
            return Replay(decisions=tuple(decisions), diverged_at=index)
        state = decision.state
    return Replay(decisions=tuple(decisions), diverged_at=None)
