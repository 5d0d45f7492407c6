"""The policy: pure functions from observation and state to decision. Standard library only, no clock, no randomness."""

from triaccel_ray.decide.initial import initial_decision
from triaccel_ray.decide.replay import Replay, replay
from triaccel_ray.decide.tick import decide
from triaccel_ray.records.state import BatchState, ControlState, Decision, LayerState

__all__ = [
    "BatchState",
    "ControlState",
    "Decision",
    "LayerState",
    "Replay",
    "decide",
    "initial_decision",
    "replay",
]
