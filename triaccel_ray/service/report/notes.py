"""What a user should know of a run besides its figures: what adapting cost, and what ran slower than it might."""

from __future__ import annotations

from collections.abc import Iterator

from triaccel_ray.records.plan import FaultKind
from triaccel_ray.service.runs.record import RunRecord
from triaccel_ray.service.runs.spec import RunSpec

_SLOWER = {
    (FaultKind.DATA_STREAMED, "data"): "the data set did not fit on the GPU and was read from the host",
    (FaultKind.CAPTURE_FAILED, "capture"): "steps ran eagerly, without CUDA graphs",
    (FaultKind.CAPTURE_FAILED, "optimizer"): "the optimizer stepped by itself, without its kernel",
    (FaultKind.CAPTURE_FAILED, "curvature"): "curvature was measured without CUDA graphs",
    (FaultKind.CURVATURE_OFF, "curvature"): "curvature was switched off",
    (FaultKind.CURVATURE_WAITS, "curvature"): "curvature was measured later than asked for",
    (FaultKind.CURVATURE_FALLBACK, "curvature"): "curvature took one pass of the model per sample",
    (FaultKind.FUSION_REFUSED, "fuse"): "batch normalisation ran apart from what follows it",
}


def sharing_note(spec: RunSpec) -> str:
    """Returns whose timings these are where GPUs are shared; empty where each run has one to itself."""
    if spec.trials_per_gpu == 1:
        return ""
    return f"times and scores are those of GPUs shared by {spec.trials_per_gpu} runs each, not of a GPU of one's own"


def run_notes(run: RunRecord) -> Iterator[str]:
    """Yields one sentence each: on sharing, adapting, memory that ran out, and what ran slower than it might."""
    if note := sharing_note(run.spec):
        yield note
    seconds = sum(tick.applied.adapt_ms for tick in run.ticks) / 1e3
    if seconds > 0:
        num_dropped = sum(len(tick.applied.evicted) for tick in run.ticks)
        yield (
            f"adapting took {seconds:.1f} s of the run: first steps of new plans, compilation, captures; "
            f"{num_dropped} captured steps were dropped"
        )
    faults = [fault for tick in run.ticks for fault in tick.observation.faults]
    num_out_of_memory = sum(fault.kind is FaultKind.OUT_OF_MEMORY for fault in faults)
    if num_out_of_memory:
        yield f"{num_out_of_memory} times memory ran out; no sample was lost"
    not_captured = [fault.batch_size for fault in faults if fault.kind is FaultKind.CAPTURE_OUT_OF_MEMORY]
    if not_captured:
        sizes = ", ".join(map(str, sorted(set(not_captured))))
        yield f"{len(not_captured)} times a step of batch {sizes} found no memory as a CUDA graph and ran eagerly"
    for which, text in _SLOWER.items():
        reasons = dict.fromkeys(fault.detail for fault in faults if (fault.kind, fault.phase) == which)
        yield from (f"{text}: {reason}" for reason in reasons)
