"""The state that the control loop keeps between ticks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from triaccel_ray.records.plan import Plan, Precision, Reason, Storage, WeightForm
from triaccel_ray.records.signals import NoiseSignal


@dataclass(frozen=True, kw_only=True)
class LayerState:
    """State of one layer."""

    by_variance: Precision
    """Precision chosen by the variance rule, before any promotion by curvature."""
    ticks_since_change: int = 0
    """Ticks since the precision in force last changed."""
    lower_votes: int = 0
    """Consecutive ticks whose variance asked for a lower precision."""
    eigenvalues: tuple[float, ...] | None = None
    """Moving average over measurements, descending; None before the first."""
    measured_once: bool = False
    """Whether the eigenvalues come from a single measurement."""
    held: bool = False
    """Whether curvature holds the layer one precision higher."""
    fp16_bar_ticks: int = 0
    """Ticks for which the layer is still barred from FP16, after it overflowed there at any loss scale."""
    too_slow: Precision | None = None
    """The precision in which steps were last measured to be slower than in the next higher one."""
    slow_bar_ticks: int = 0
    """Ticks for which the layer must still stay above `too_slow`."""
    times_slow: int = 0
    """Number of times a lower precision of the layer was undone because steps were slower."""
    refused_bar_ticks: int = 0
    """Ticks for which the variance rule must still not lower the precision, after a lower one was refused."""
    times_refused: int = 0
    """Number of times a lower precision of the layer was refused."""

    def after_tick(self) -> LayerState:
        """Returns a copy whose bars end one tick sooner."""
        return replace(
            self,
            fp16_bar_ticks=max(self.fp16_bar_ticks - 1, 0),
            slow_bar_ticks=max(self.slow_bar_ticks - 1, 0),
            refused_bar_ticks=max(self.refused_bar_ticks - 1, 0),
        )


@dataclass(frozen=True, kw_only=True)
class BatchState:
    """State of the batch size."""

    ticks_since_change: int = 0
    """Ticks since the batch size last changed."""
    cap: int | None = None
    """Largest size allowed, after memory ran short or a larger batch was slower; None: the configured maximum."""
    cap_ticks_left: int = 0
    """Ticks until the cap is lifted."""
    noise: NoiseSignal | None = None
    """Moving average over measurements, in units of each one's tr Cov; None before the first."""
    times_slow: int = 0
    """Number of times a larger batch was undone because steps were slower."""
    waits_for_storage: bool = False
    """Whether the last tick held the batch for the memory plan: the reason is given once."""
    waits_for_noise: bool = False
    """Whether only the noise scale held the batch at the last tick, though a larger one would pay."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """How a batch was stored under a plan."""

    storage: Mapping[str, Storage]
    """`Plan.storage`."""
    num_micro_batches: int

    @classmethod
    def under(cls, plan: Plan) -> Stored:
        """Returns how the batch is stored under `plan`."""
        return cls(storage=plan.storage, num_micro_batches=plan.num_micro_batches)


@dataclass(frozen=True, kw_only=True)
class PassTiming:
    """A number of micro-batches and the time of its steps without recomputation and transfers."""

    batch_size: int
    num_micro_batches: int
    ms: float
    """Milliseconds of a step of the whole batch."""


@dataclass(frozen=True, kw_only=True)
class UnpaidPlan:
    """A faster memory plan that saved less than it would have cost."""

    num_micro_batches: int
    ms: float
    """Predicted milliseconds of a step of the whole batch."""
    compiles: bool = False
    """Whether regions would be compiled anew."""


@dataclass(frozen=True, kw_only=True)
class PeakReading:
    """A way to store a batch and the memory that it takes."""

    batch_size: int
    stored: Stored
    peak_bytes: int
    """Largest memory of the process; what was attainable if that did not suffice."""


@dataclass(frozen=True, kw_only=True)
class MemoryState:
    """State of the memory plan."""

    predicted_ms: float | None = None
    """Predicted milliseconds of a step under the plan in force; None if it was not predicted."""
    predicted_bytes: int | None = None
    """Predicted peak of the process under the plan in force; None if it was not predicted, or memory ran short."""
    is_compared: bool = False
    """Whether the prediction has been compared with what was measured."""
    failed: Stored | None = None
    """The last plan under which memory ran short, until one that takes as much does not."""
    cap_ticks_left: int = 0
    """Ticks for which plans that take about as much as the failed one stay barred."""
    times_failed: int = 0
    """Number of times in a row that memory ran short: the bar doubles each time."""
    times_short: int = 0
    """Number of times in a row that memory ran short although a plan was predicted to fit: the margin grows."""
    short_at_bytes: int = 0
    """Memory that was attainable when a plan last failed or ran short."""
    hold_ticks: int = 0
    """Ticks for which no faster plan is tried, after one that was slower or could not be applied."""
    times_held: int = 0
    """Number of times that such a plan was undone: the hold doubles each time."""
    other_timing: PassTiming | None = None
    """Another number of micro-batches, timed with the current batch size and precisions."""
    pass_ms: float | None = None
    """Milliseconds that a further micro-batch added when two numbers were last timed; None: unknown."""
    other_peak: PeakReading | None = None
    """The memory of another number of micro-batches, with the current batch size and precisions."""
    examined_bytes: int | None = None
    """Room for saved tensors when the last search found no faster plan; None: the next tick searches again."""
    unpaid: UnpaidPlan | None = None
    """The faster plan that this search held back. Once it pays, because more samples are left or new plans cost less,
    the next tick searches again."""
    other_unpaid: UnpaidPlan | None = None
    """The best plan of the same search that differs in whether regions are compiled anew."""

    @property
    def awaits_comparison(self) -> bool:
        """Whether there is a prediction that has not been compared yet."""
        return self.predicted_bytes is not None and not self.is_compared


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of plan that has yet to be judged by its step times."""

    ms_per_sample: float
    """Step time per sample before the change, in milliseconds."""
    precision: Mapping[str, Precision] = field(default_factory=dict)
    """Name of each layer whose precision was lowered -> its precision before."""
    batch_size: int | None = None
    """Batch size before the change; None if it did not grow."""
    stored: Stored | None = None
    """How the batch was stored before; None if that did not change to save time."""
    num_slower: int = 0
    """Number of intervals since the change that were slower."""
    num_waited: int = 0
    """Number of ticks since the change without a step time."""
    adapting_ms: float = 0.0
    """Milliseconds spent on new plans before the change."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A batch size and its step time per sample."""

    batch_size: int
    ms_per_sample: float


@dataclass(frozen=True, kw_only=True)
class ThroughputState:
    """State of the rules about step times."""

    intervals: tuple[float, ...] = ()
    """Step times per sample in milliseconds of the last intervals under the current plan (`Observation.step_ms`)."""
    change: Change | None = None
    """The change that is not judged yet, if any."""
    slowdown: float = 1.0
    """Factor by which growth has lengthened the time per sample, at least 1. It begins anew if the batch shrinks, or
    precisions, micro-batches or storage change."""
    other_timing: Timing | None = None
    """Another batch size, timed with the current precisions, number of micro-batches and storage."""
    growth_ms: float | None = None
    """Milliseconds that the last larger batch, or faster memory plan with micro-batches of another size, cost in first
    steps, compilation and captures; None before the first."""
    adapting_ms: float = 0.0
    """Milliseconds spent on new plans up to the last tick."""
    first_ms: float = 0.0
    """Of these, those of the first interval that had any."""
    later_ms: float = 0.0
    """The most of these in one later interval without compilation for another storage; 0 before there is one."""
    compile_ms: float | None = None
    """Milliseconds of the last interval that compiled regions for another storage; None before the first."""
    is_compiling: bool = False
    """Whether the plan in force has regions compiled anew, and their cost is not known yet."""


@dataclass(frozen=True, kw_only=True)
class ControlState:
    """The complete state of the rules; JSON-serializable, part of every checkpoint."""

    layers: Mapping[str, LayerState]
    batch: BatchState = field(default_factory=BatchState)
    memory: MemoryState = field(default_factory=MemoryState)
    throughput: ThroughputState = field(default_factory=ThroughputState)
    form: WeightForm | None = None
    """The form of the weights that was last decided; None if the settings decide it."""
    step: int = 0
    """Optimizer steps done at the last tick."""
    num_skipped: int = 0
    """Of these, skipped for a non-finite gradient."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The decision of a tick: the plan, the new state, and the reasons."""

    plan: Plan
    state: ControlState
    reasons: tuple[Reason, ...] = ()
    remeasures_regions: bool = False
    """Whether the costs of regions are measured again: a memory plan's cost was not as predicted."""
