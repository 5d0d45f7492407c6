"""Frozen values that carry measurements from `measure` to `decide`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from triaccel_ray.records.plan import Fault, FaultKind, Plan, Precision, Storage


@dataclass(frozen=True, kw_only=True)
class LayerSignal:
    """One layer's statistics at a tick."""

    name: str
    variance: float | None = None
    """v_l(t): bias-corrected moving average of Var over the elements of the layer's unscaled weight gradient;
    None before the first finite gradient."""
    eigenvalues: tuple[float, ...] | None = None
    """Up to k largest eigenvalues of the layer's curvature block, descending; None when not measured since the last
    tick."""
    supported: tuple[Precision, ...] = (Precision.FP16, Precision.BF16, Precision.FP32)
    """Precisions in which this layer can compute on this device; FP32 is always among them."""


@dataclass(frozen=True, kw_only=True)
class MemorySignal:
    """Memory of this process on its device, in bytes."""

    used_bytes: int
    """Memory that the process holds now, as seen by the driver (NVML) or the operating system (resident set)."""
    window_peak_bytes: int
    """Largest `used_bytes` since the last tick, evaluations left out: MemUsage(t)."""
    peak_bytes: int
    """Largest `used_bytes` since the run began."""
    limit_bytes: int
    """MemMax: the budget, or the device's total memory without one."""
    allocated_bytes: int = 0
    """Memory of live tensors, as counted by the allocator; 0 if the device has no such counter."""
    allocated_peak_bytes: int = 0
    """Largest `allocated_bytes` since the run began, the figure that the paper reports."""
    idle_bytes: int = 0
    """Memory held before the first batch, with model and libraries loaded: no batch size changes it."""
    free_bytes: int | None = None
    """Memory of the device that no process holds; None if unknown."""

    @property
    def attainable_bytes(self) -> int:
        """The limit, or less if other processes leave less."""
        if self.free_bytes is None:
            return self.limit_bytes
        return min(self.limit_bytes, self.used_bytes + self.free_bytes)

    def share(self, *, counts_idle: bool = False) -> float:
        """Returns MemUsage / MemMax, both counted above the memory of the idle process, or from zero.

        By default both count above the idle process, so that thresholds apply to the memory of batches. The CUDA
        context and the Python runtime do not shift them; the paper's allocator figures exclude both, too.
        """
        idle = 0 if counts_idle else self.idle_bytes
        return max(self.window_peak_bytes - idle, 0) / max(self.attainable_bytes - idle, 1)


@dataclass(frozen=True, kw_only=True)
class NoiseSignal:
    """First two moments of the per-sample gradient g_i over all layers, from one curvature measurement."""

    mean_square_norm: float
    """|E g|^2, estimated without the bias tr(Cov)/b."""
    trace_covariance: float
    """tr Cov[g_i]."""


EXCESS_SHARE = 0.08
"""Share of the bytes saved beyond the inputs that selective code may keep in addition to what it was compiled for.

Measured on blocks of a GPT, a ViT and BERT on an H200: 0.03 to 0.09. Of a Swin and a ConvNeXt: 0 or less.
"""


@dataclass(frozen=True, kw_only=True)
class RegionSignal:
    """What a region of the model costs in one pass of a micro-batch, forward and backward."""

    name: str
    saved_bytes: int
    """Bytes that its backward pass needs, inputs included: device memory held between the passes if kept."""
    input_bytes: int
    """Bytes of the tensors that it gets: held if it is recomputed."""
    offloadable_bytes: int
    """Bytes of `saved_bytes` that offloading moves to the host; weights and small tensors stay. 0: it cannot."""
    forward_ms: float
    """Milliseconds of its forward pass, which recomputing adds to the backward pass."""
    backward_ms: float
    """Milliseconds of its backward pass, without recomputation and transfers."""
    can_join: bool = False
    """Whether it can be recomputed in one segment with the region before it."""
    can_select: bool = False
    """Whether its code is compiled, so that the compiler can choose what is computed again."""

    def held_bytes(self, storage: Storage) -> int:
        """Returns the bytes of device memory that it holds between its passes; as if kept where `storage` cannot be."""
        saved, inputs = self.saved_bytes, min(self.input_bytes, self.saved_bytes)
        if storage.is_recomputed:  # alone if it cannot join
            return 0 if storage is Storage.JOIN and self.can_join else inputs
        if storage is Storage.OFFLOAD:
            return saved - min(self.offloadable_bytes, saved)
        share = min(storage.kept_share + EXCESS_SHARE, 1.0) if self.can_select else 1.0
        return saved - math.floor((1.0 - share) * (saved - inputs))


@dataclass(frozen=True, kw_only=True)
class MemoryProfile:
    """Costs of a model's regions, from which the memory and the time of other plans are predicted."""

    regions: tuple[RegionSignal, ...]
    """In the order of the forward pass."""
    micro_batch_size: int
    """Number of samples that the regions were measured with."""
    to_host_bytes_per_ms: float = 0.0
    """Bandwidth from the device to pinned host memory; 0: nothing can be offloaded."""
    to_device_bytes_per_ms: float = 0.0
    """Bandwidth from pinned host memory to the device."""
    can_split: bool = True
    """Whether micro-batches compute the same as the whole batch: not with batch normalization."""
    accumulation_bytes: int = 0
    """Bytes of the FP32 sums of gradients if a batch has several micro-batches, at most."""


@dataclass(frozen=True, kw_only=True)
class ParameterSignal:
    """What parameters, their gradients and the first step take of the device's memory; constant during a run."""

    num_elements: int
    """Elements that the optimizer updates."""
    num_in_bf16: int
    """Of these, elements of weights that can be split: their layers start in BF16."""
    bucket_elements: int
    """Elements of the largest bucket, whose gradients exist at once if parameters are updated in the backward pass."""
    model_bytes: int
    """Bytes of all parameters and buffers."""
    state_bytes: int
    """Bytes of the optimizer's state."""
    saved_bytes: int
    """Bytes that the backward pass of the first batch needs, extrapolated from two samples in FP32. It is an upper
    bound: BF16 and compiled code save less."""
    data_bytes: int = 0
    """Bytes of the samples stored on the device."""
    budget_bytes: int | None = None
    """Limit on the memory of the process; None: no such limit."""
    headroom_bytes: int | None = None
    """Limit on its memory beyond model, optimizer and data; None: no such limit."""
    keeps_copies: bool = False
    """Whether FP32 weights have copies in BF16 beside them, which get gradients in BF16."""
    may_use_fp16: bool = False
    """Whether a layer may compute in FP16 during the run."""
    num_ranks: int = 1
    shared_state_bytes: int | None = None
    """Bytes of a rank's share of the optimizer's state; None in older logs: `state_bytes`, if it was shared."""
    unsupported_because: str = ""
    """Why weights of this model can be neither split nor updated in the backward pass, nor the optimizer be shared;
    empty if they can."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """All measured inputs of the rules. Replaying the same observations reproduces every decision."""

    step: int
    """Optimizer steps done."""
    tick: int
    """Ticks done before this one."""
    epoch: float
    """Passes over the training set, fractional."""
    plan: Plan
    """The plan in force when this was measured."""
    layers: tuple[LayerSignal, ...]
    memory: MemorySignal
    loss: float | None = None
    """Mean training loss since the last tick; None when no step was made."""
    step_ms: float | None = None
    """Median milliseconds of a step of a whole batch under the current plan since the last reading; the shortest on a
    CPU with several threads. None if too few were timed. Ticks, measurements, evaluations and a plan's first steps do
    not count."""
    loss_scale: float = 1.0
    num_skipped: int = 0
    """Optimizer steps skipped for a non-finite gradient since the run began."""
    num_skipped_in_row: int = 0
    """Of these, skipped since the last step that was not."""
    adapting_ms: float = 0.0
    """Milliseconds spent on new plans since the run began: first steps, compilation, captures, checks of precisions. 0
    where no step is captured, as on a CPU."""
    is_compiled: bool = False
    """Whether the model is compiled by `torch.compile`, which may compile it anew for other sizes."""
    samples_left: int = 0
    """Samples until the end of the run; as many as it has trained if its length is unknown."""
    noise: NoiseSignal | None = None
    """None when not measured since the last tick."""
    regions: tuple[str, ...] = ()
    """Names of the regions whose storage can change, in forward order; constant during a run."""
    profile: MemoryProfile | None = None
    """Costs of the model's regions; None while they are not needed, or not measured."""
    parameters: ParameterSignal | None = None
    """None unless the settings leave open how weights are stored, or when they are updated."""
    faults: tuple[Fault, ...] = ()
    """Faults since the last decision, oldest first; some may have occurred after the other values were measured."""

    @property
    def refused_layers(self) -> frozenset[str]:
        """Names of the layers that kept their precision when the last plan was applied."""
        refusals = (fault for fault in self.faults if fault.kind is FaultKind.LOWERING_REFUSED)
        return frozenset(name for fault in refusals for name in fault.layers)

    @property
    def apply_fault(self) -> Fault | None:
        """The fault of a plan that could not be applied since the last decision, or None."""
        return next((fault for fault in self.faults if fault.kind is FaultKind.APPLY_FAILED), None)
