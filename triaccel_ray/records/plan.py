"""What was decided: the frozen values that travel from `decide` to `apply`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType


class Precision(StrEnum):
    """A layer's compute precision; weights and their optimizer state are FP32 numbers throughout."""

    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"

    @property
    def rank(self) -> int:
        """Position from lowest (0) to highest (2); a *promotion* raises it."""
        return _RANKS[self]

    @property
    def bytes_per_element(self) -> int:
        """Bytes of one activation element: 2 for FP16 and BF16, 4 for FP32."""
        return 4 if self is Precision.FP32 else 2


_RANKS = MappingProxyType({level: rank for rank, level in enumerate(Precision)})


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the steps until the next tick are computed.

    A step is a function of `batch_size`, `num_micro_batches` and `precision`; `lr_scale` only changes scalars.
    """

    batch_size: int
    """Samples whose gradients are averaged into one optimizer step."""
    precision: Mapping[str, Precision]
    """Layer name -> compute precision, in the order of the layers in the model."""
    lr_scale: Mapping[str, float] = field(default_factory=dict)
    """Layer name -> factor in (0, 1] on the scheduled learning rate; a layer not named has factor 1."""
    batch_lr_scale: float = 1.0
    """Factor on every learning rate that follows the batch size by the configured rule."""
    num_micro_batches: int = 1
    """Parts of nearly equal size in which a batch passes through the model: more than `accumulate` only while the
    smallest batch does not fit, or one of fixed size cannot be captured."""

    @property
    def micro_batch_size(self) -> int:
        """Samples that pass through the model at once."""
        return -(-self.batch_size // self.num_micro_batches)

    def steps_as(self, other: Plan) -> bool:
        """Returns whether a step computes alike under both plans; learning rates aside."""
        return (self.batch_size, self.num_micro_batches, self.precision) == (
            other.batch_size,
            other.num_micro_batches,
            other.precision,
        )

    def needs_less_than(self, other: Plan) -> bool:
        """Returns whether some part of this plan takes less memory than in `other`."""
        return self.micro_batch_size < other.micro_batch_size or any(
            level.bytes_per_element < other.precision[name].bytes_per_element for name, level in self.precision.items()
        )


class ReasonCode(StrEnum):
    """Which rule of the control loop changed something, or refused to."""

    OUT_OF_MEMORY = "out_of_memory"
    CAPTURE_OUT_OF_MEMORY = "capture_out_of_memory"
    APPLY_FAILED = "apply_failed"
    VARIANCE = "variance"
    CURVATURE = "curvature"
    CURVATURE_RELEASED = "curvature_released"
    OVERFLOW = "overflow"
    LR_SCALE = "lr_scale"
    MEMORY_LOW = "memory_low"
    MEMORY_HIGH = "memory_high"
    HELD_CAPPED = "held_capped"
    HELD_UNJUDGED = "held_unjudged"
    SLOWER = "slower"
    HELD_ENLARGED = "held_enlarged"
    HELD_NOISE_SCALE = "held_noise_scale"


@dataclass(frozen=True, kw_only=True)
class Reason:
    """One rule that fired: what it looked at, what it compared with, what came of it."""

    code: ReasonCode
    subject: str
    """The layer's name, `batch`, `precision` or `throughput`."""
    text: str
    """One sentence for a person, with the values."""
    value: float | None = None
    """The quantity compared."""
    threshold: float | None = None
    """What it was compared with."""


class FaultKind(StrEnum):
    """What went wrong on the device, as data that reach the policy at the next tick.

    Rules act on the three that name memory or a plan that failed; the others are recorded for the user.
    """

    OUT_OF_MEMORY = "out_of_memory"
    APPLY_FAILED = "apply_failed"
    CAPTURE_OUT_OF_MEMORY = "capture_out_of_memory"
    """A step found no memory as a CUDA graph, or for its batch beside one: it runs eagerly, slower. A batch
    retreats by a rung where it is elastic, and is made in halves where not."""
    DATA_STREAMED = "data_streamed"
    """Samples given as tensors did not fit on the device: they are read from the host."""
    DATA_NOT_PINNED = "data_not_pinned"
    """Samples that were to stay in the host's memory lie on the device: the host could not pin as much."""
    FUSION_REFUSED = "fusion_refused"
    """Batch normalisation runs apart from what follows it, slower."""
    CAPTURE_FAILED = "capture_failed"
    """A step, its optimizer's part or a measurement could not be captured as a CUDA graph: it runs eagerly, slower."""
    BUDGET_EXCEEDED = "budget_exceeded"
    """On a CPU: the process holds more than its budget, and no smaller batch would change that."""
    PRECISION_REFUSED = "precision_refused"
    """A precision is not offered: the device has no instructions for it, or it gains nothing."""
    NOT_A_LAYER = "not_a_layer"
    """Weights that belong to no layer keep the precision and the learning rate that they have."""
    COMPILED = "compiled"
    """What `torch.compile` makes of the model, or why nothing."""
    ACTIVATIONS_KEPT = "activations_kept"
    """Blocks whose activations were to be checkpointed keep them."""
    CURVATURE_OFF = "curvature_off"
    """Curvature cannot be measured: it is off from here on, and what was measured before stays in force."""
    CURVATURE_FALLBACK = "curvature_fallback"
    """Layers whose curvature takes one pass of the whole model per sample, slower."""
    CURVATURE_WAITS = "curvature_waits"
    """Measurements of curvature wait until their time is within `max_overhead`."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One failure that was survived."""

    kind: FaultKind
    step: int
    """Optimizer step during which it happened."""
    phase: str
    """`forward_backward`, `evaluation`, `curvature`, `optimizer`, `fuse`, `compile`, `capture`, `apply`, and what else
    the kinds name."""
    batch_size: int = 0
    """Batch size in force; for a plan that could not be applied, the one it wanted."""
    micro_batch_size: int = 0
    """Samples that passed at once in the end, or that a capture was to have pass at once; 0 when the phase has no
    batch."""
    detail: str = ""

    @classmethod
    def out_of_memory(
        cls, error: str, *, step: int, phase: str, batch_size: int = 0, micro_batch_size: int = 0
    ) -> Fault:
        """Returns the fault that an out-of-memory error with this message is."""
        return cls(
            kind=FaultKind.OUT_OF_MEMORY,
            step=step,
            phase=phase,
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            detail=error,
        )


@dataclass(frozen=True, kw_only=True)
class Applied:
    """What `apply` reports back: the plan now in force, and what could not be done."""

    plan: Plan
    faults: tuple[Fault, ...] = ()
    evicted: tuple[str, ...] = ()
    """Captured steps dropped since the last tick to make room for others, each by a name for people."""
    adapt_ms: float = 0.0
    """Milliseconds that went into new plans since the last tick: first steps of a new kind, autotuning and compilation
    included, captures, those that failed too."""
