from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.service.build import SimulatedRun
from triaccel_ray.records.events import Start, Tick, read_events
from triaccel_ray.records.plan import Applied, Fault, FaultKind
from triaccel_ray.service.report.notes import run_notes
from triaccel_ray.service.runs.record import RunRecord
from triaccel_ray.service.runs.spec import RunSpec, run_spec


@pytest.fixture
def run(tmp_path: Path) -> RunRecord:
    simulated = SimulatedRun(tmp_path)
    simulated.complete(epochs=1)
    records = [event.record for event in read_events(simulated.path)]
    spec: RunSpec = run_spec("digits", data_dir=None, recipe={}, method="triaccel")
    start = next(record for record in records if isinstance(record, Start))
    ticks = tuple(record for record in records if isinstance(record, Tick))
    return RunRecord(folder=tmp_path, spec=spec, start=start, ticks=ticks, epochs=(), end=None)


def with_faults(run: RunRecord, *faults: Fault) -> RunRecord:
    first = replace(run.ticks[0], observation=replace(run.ticks[0].observation, faults=faults))
    rest = [replace(tick, observation=replace(tick.observation, faults=())) for tick in run.ticks[1:]]
    return replace(run, ticks=(first, *rest))


def test_a_run_without_faults_and_captures_has_none(run: RunRecord) -> None:
    assert list(run_notes(with_faults(run))) == []


def test_times_of_a_shared_gpu_are_marked(run: RunRecord) -> None:
    shared = replace(with_faults(run), spec=replace(run.spec, trials_per_gpu=3))
    assert list(run_notes(shared)) == [
        "times and scores are those of GPUs shared by 3 runs each, not of a GPU of one's own"
    ]


def test_what_adapting_took_is_added_up(run: RunRecord) -> None:
    quiet = with_faults(run)
    applied = Applied(plan=quiet.ticks[0].applied.plan, adapt_ms=1250.0, evicted=("batch 96", "batch 64"))
    ticks = tuple(replace(tick, applied=applied) for tick in quiet.ticks[:2])
    (note,) = run_notes(replace(quiet, ticks=ticks))
    assert note.startswith("adapting took 2.5 s of the run")
    assert note.endswith("4 captured steps were dropped")


def test_out_of_memory_errors_are_counted_and_slow_steps_explained_once(run: RunRecord) -> None:
    fault = Fault(kind=FaultKind.OUT_OF_MEMORY, step=1, phase="forward_backward", batch_size=96, micro_batch_size=48)
    slow = Fault(kind=FaultKind.CAPTURE_FAILED, step=1, phase="capture", detail="the step waits for the device")
    curvature = Fault(kind=FaultKind.CAPTURE_FAILED, step=1, phase="curvature", detail="layer rnn is recurrent")
    unfused = Fault(kind=FaultKind.FUSION_REFUSED, step=0, phase="fuse", detail="it calls no BatchNorm2d")
    large, larger = (
        Fault(kind=FaultKind.CAPTURE_OUT_OF_MEMORY, step=1, phase="capture", batch_size=size, detail=f"{size} MiB free")
        for size in (96, 128)
    )
    streamed = Fault(kind=FaultKind.DATA_STREAMED, step=0, phase="data", detail="CUDA out of memory")
    faults = fault, fault, slow, slow, curvature, unfused, larger, large, larger, streamed
    assert list(run_notes(with_faults(run, *faults))) == [
        "2 times memory ran out; no sample was lost",
        "3 times a step of batch 96, 128 found no memory as a CUDA graph and ran eagerly",
        "the data set did not fit on the GPU and was read from the host: CUDA out of memory",
        "steps ran eagerly, without CUDA graphs: the step waits for the device",
        "curvature was measured without CUDA graphs: layer rnn is recurrent",
        "batch normalisation ran apart from what follows it: it calls no BatchNorm2d",
    ]
