"""Frozen values passed from `decide` to `apply`, plans and their reasons, and back: faults and results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

MINIMUM_LOSS_SCALE = 1.0
"""Smallest loss scale: one below 1 would shrink gradients, which avoids overflow in the backward pass only."""
AmpPrecision = Literal["fp16", "bf16"]
"""Precision of the AMP baseline on a GPU: FP16 with a gradient scaler, or BF16 without one."""


class Precision(StrEnum):
    """A layer's compute precision; weights and their optimizer state are FP32 numbers throughout."""

    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"

    @property
    def rank(self) -> int:
        """Position from lowest (0) to highest (3); a *promotion* raises it."""
        return list(Precision).index(self)

    @property
    def bytes_per_element(self) -> int:
        """Bytes of one activation element: 4 for FP32, else 2, for the outputs of layers in FP8 are BF16."""
        return 4 if self is Precision.FP32 else 2


def nearest_supported(wanted: Precision, supported: tuple[Precision, ...]) -> Precision:
    """Returns the lowest supported precision that is not below `wanted`; FP32 when there is none."""
    allowed = [level for level in supported if level.rank >= wanted.rank]
    return min(allowed, key=lambda level: level.rank, default=Precision.FP32)


class Storage(StrEnum):
    """What becomes of the tensors that a region of the model saves for its backward pass."""

    KEEP = "keep"
    """They stay on the device."""
    RECOMPUTE = "recompute"
    """Only the region's inputs are saved; the backward pass computes the rest again (Chen et al. 2016)."""
    OFFLOAD = "offload"
    """They move to pinned host memory and back (AccUDNN; vDNN, Rhu et al. 2016)."""
    JOIN = "join"
    """It is recomputed in one segment with the region before it, which is recomputed too; nothing of it is saved."""
    SELECTIVE_70 = "selective_70"
    """The region is compiled so that it saves its inputs and at most 70 % of the rest. The backward pass computes the
    remainder again, and the compiler chooses what is cheap (selective recomputation, Korthikanti et al. 2022)."""
    SELECTIVE_50 = "selective_50"
    """The same with 50 %."""
    SELECTIVE_30 = "selective_30"
    """The same with 30 %."""

    @property
    def is_recomputed(self) -> bool:
        """Whether the backward pass computes the region again."""
        return self in (Storage.RECOMPUTE, Storage.JOIN)

    @property
    def is_selective(self) -> bool:
        """Whether compiled code computes a part of the region again."""
        return self.value.startswith("selective")

    @property
    def repeats(self) -> bool:
        """Whether the backward pass computes the region again, or a part of it."""
        return self.is_recomputed or self.is_selective

    @property
    def kept_share(self) -> float:
        """Share of what the region's code saves beyond its inputs that it keeps; 1 unless it is selective."""
        return float(self.value.rpartition("_")[2]) / 100 if self.is_selective else 1.0

    @property
    def alone(self) -> Storage:
        """RECOMPUTE for JOIN, else the same."""
        return Storage.RECOMPUTE if self is Storage.JOIN else self


def recomputing_all(regions: Iterable[str], storage: Mapping[str, Storage]) -> dict[str, Storage]:
    """Returns the storage in which all regions are recomputed, in the segments of `storage` if there are any.

    It is not always the least: a long segment may save more at once than its regions alone.
    """
    joined = {name: kind for name, kind in storage.items() if kind is Storage.JOIN}
    return {**dict.fromkeys(regions, Storage.RECOMPUTE), **joined}


@dataclass(frozen=True, kw_only=True)
class WeightForm:
    """How weights are stored, and when the optimizer updates them; constant during a run."""

    is_split: bool = False
    """Whether weights of layers in BF16 are stored as two words."""
    steps_in_backward: bool = False
    """Whether parameters are updated in the backward pass."""
    shares_optimizer: bool = False
    """Whether each of several ranks holds the optimizer's state of a share of the parameters."""


def compiles_anew(new: Mapping[str, Storage], old: Mapping[str, Storage]) -> bool:
    """Returns whether regions have a selective storage in `new` that none has in `old`: they are compiled for it."""
    return any(kind.is_selective for kind in set(new.values()) - set(old.values()))


def largest_micro_batch(batch_size: int, num_micro_batches: int) -> int:
    """Returns the number of samples in the largest of so many micro-batches."""
    return -(-batch_size // num_micro_batches)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How steps are computed until the next tick.

    A step is a function of `batch_size`, `num_micro_batches`, `precision` and `storage`; `lr_scale` only changes
    scalars.
    """

    batch_size: int
    """Samples whose gradients are averaged into one optimizer step."""
    precision: Mapping[str, Precision]
    """Layer name -> compute precision, in the order of the layers in the model."""
    lr_scale: Mapping[str, float] = field(default_factory=dict)
    """Layer name -> factor in (0, 1] on the scheduled learning rate; a layer not named has factor 1."""
    batch_lr_scale: float = 1.0
    """Factor on all learning rates, set from the batch size by the configured rule."""
    num_micro_batches: int = 1
    """Micro-batches of nearly equal size per batch. There are more than `accumulate` only while the smallest batch does
    not fit in memory, or a batch of fixed size cannot be captured."""
    storage: Mapping[str, Storage] = field(default_factory=dict)
    """Region name -> what becomes of its saved tensors; regions not named keep them."""

    @property
    def micro_batch_size(self) -> int:
        """Samples that pass through the model at once."""
        return largest_micro_batch(self.batch_size, self.num_micro_batches)

    def steps_as(self, other: Plan) -> bool:
        """Returns whether steps compute the same under both plans, apart from learning rates."""
        has_same_batch = (self.batch_size, self.num_micro_batches) == (other.batch_size, other.num_micro_batches)
        return has_same_batch and self.precision == other.precision and self.storage == other.storage

    def needs_less_than(self, other: Plan) -> bool:
        """Returns whether the micro-batch, or any layer or region, may take less memory than under `other`."""
        return (
            self.micro_batch_size < other.micro_batch_size
            or any(other.storage.get(name) is not kind for name, kind in self.storage.items())
            or any(
                each.bytes_per_element < other.precision[name].bytes_per_element
                for name, each in self.precision.items()
            )
        )


class ReasonCode(StrEnum):
    """The rule of the control loop that made a change, or refused one."""

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
    MEMORY_PLAN = "memory_plan"
    MEMORY_MISPREDICTED = "memory_mispredicted"
    HELD_CAPPED = "held_capped"
    HELD_UNJUDGED = "held_unjudged"
    HELD_COST = "held_cost"
    SLOWER = "slower"
    HELD_ENLARGED = "held_enlarged"
    HELD_STORAGE = "held_storage"
    HELD_NOISE_SCALE = "held_noise_scale"
    WEIGHT_FORM = "weight_form"


@dataclass(frozen=True, kw_only=True)
class Reason:
    """One rule that fired: its subject, the values it compared, and the outcome."""

    code: ReasonCode
    subject: str
    """The layer's name, `batch`, `precision`, `memory` or `throughput`."""
    text: str
    """One sentence for the user, with the values."""
    value: float | None = None
    """The quantity compared."""
    threshold: float | None = None
    """The value it was compared with."""


class FaultKind(StrEnum):
    """Kinds of faults, which reach the policy as data at the next tick.

    Rules act on those about memory, failed plans, refused layers and curvature; the others are recorded for the user.
    """

    OUT_OF_MEMORY = "out_of_memory"
    APPLY_FAILED = "apply_failed"
    CAPTURE_OUT_OF_MEMORY = "capture_out_of_memory"
    """Memory did not suffice to capture a step as a CUDA graph, or for its batch beside one: it runs eagerly, slower.
    An elastic batch shrinks by one size; a batch of fixed size is split into halves."""
    DATA_STREAMED = "data_streamed"
    """Samples given as tensors did not fit on the device: they are streamed from the host."""
    DATA_NOT_PINNED = "data_not_pinned"
    """Samples meant for host memory are stored on the device: the host could not pin that much memory."""
    FUSION_REFUSED = "fusion_refused"
    """Batch normalization is not fused with the operations that follow it, and runs slower."""
    CAPTURE_FAILED = "capture_failed"
    """A step, its optimizer part or a measurement could not be captured as a CUDA graph: it runs eagerly, slower."""
    BUDGET_EXCEEDED = "budget_exceeded"
    """On a CPU: the process holds more than its budget, and no smaller batch would change that."""
    PRECISION_REFUSED = "precision_refused"
    """A precision is not offered. The device has no instructions for it, it brings no speedup, or it changes the
    outputs of a new model too much."""
    PLAN_REPLACED = "plan_replaced"
    """A resumed run cannot go on with the plan of its checkpoint; step times before it do not count."""
    LOWERING_REFUSED = "lowering_refused"
    """Layers keep their precision, because a lower one raised the loss or changed the outputs."""
    PRECISION_UNCHECKED = "precision_unchecked"
    """A check on samples failed. A precision in which only the model fails is refused; others take effect."""
    NOT_A_LAYER = "not_a_layer"
    """Weights that belong to no layer keep their precision and learning rate."""
    COMPILED = "compiled"
    """How `torch.compile` compiles the model, or why it does not."""
    ACTIVATIONS_KEPT = "activations_kept"
    """Blocks that should be checkpointed keep their activations."""
    CURVATURE_OFF = "curvature_off"
    """Curvature cannot be measured: from now on it is off, and neither precision nor learning rates follow it."""
    CURVATURE_FALLBACK = "curvature_fallback"
    """Curvature of some layers takes one pass of the whole model per sample, and is slower."""
    CURVATURE_WAITS = "curvature_waits"
    """Curvature measurements wait until their time is within `max_overhead`."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault that did not end the training."""

    kind: FaultKind
    step: int
    """Optimizer step during which it happened."""
    phase: str
    """`forward_backward`, `evaluation`, `curvature`, `optimizer`, `fuse`, `compile`, `checkpoint`, `capture`, `apply`,
    `data`, `precision` or `layers`."""
    batch_size: int = 0
    """Batch size at the time; for a plan that could not be applied, the batch size of that plan."""
    micro_batch_size: int = 0
    """Size of the micro-batches that finally fit, or that were to be captured; 0 if the phase has no batch."""
    stores_least: bool = False
    """Whether the attempt that finally fit recomputed every region that can be."""
    layers: tuple[str, ...] = ()
    """Names of the layers it concerns, if a rule acts on them."""
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Applied:
    """Result of applying a plan: the plan now in force, and the faults."""

    plan: Plan
    faults: tuple[Fault, ...] = ()
    adapt_ms: float = 0.0
    """Milliseconds spent on new plans since the last tick: first steps of a new kind, with autotuning and compilation,
    and captures, including failed ones."""
