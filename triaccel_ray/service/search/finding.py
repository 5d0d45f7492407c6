"""What a search has found, as the value that can be kept as a task's default."""

from __future__ import annotations

from datetime import UTC, datetime

from triaccel_ray.records.events import read_events
from triaccel_ray.search_spaces.tuned import Result, TunedThresholds
from triaccel_ray.service.cli.options import to_repeat
from triaccel_ray.service.runs.record import RunRecord
from triaccel_ray.service.search.search import SearchRecord, best_trial
from triaccel_ray.service.storage.layout import EVENTS

FOUND = "found.json"


def found_in(record: SearchRecord) -> TunedThresholds | None:
    """Returns the best thresholds of a search; None while no trial that ran to its end is within the margin."""
    best, amp = best_trial(record), record.baselines.get("amp")
    if best is None or amp is None or record.prepared is None:
        return None
    control, searched = best.spec.control, record.spec.optional
    batch, curvature = control.batch, control.curvature
    steps = {"step_up": batch.step_up, "step_down": batch.step_down}
    info = best.start.info
    return TunedThresholds(
        task=best.spec.task,
        metric=best.spec.goal.name,
        command=to_repeat("search", record.folder),
        date=_day(best),
        hardware=info.get("hardware", "unknown"),
        versions={name: info[name] for name in ("triaccel-ray", "torch", "triton", "python") if name in info},
        num_trials=len(record.trials),
        num_finished=sum(run.status == "finished" for run in record.trials),
        headroom_bytes=record.prepared.headroom_bytes,
        precision={"tau_low": control.precision.tau_low, "tau_high": control.precision.tau_high},
        batch={"rho_low": batch.rho_low, "rho_high": batch.rho_high, **(steps if "batch_steps" in searched else {})},
        curvature={name: getattr(curvature, name) for name in ("alpha", "tau_curv") if name in searched},
        every_steps=control.every_steps if "t_ctrl" in searched else None,
        amp=_result(amp),
        best=_result(best),
        trials_per_gpu=best.spec.trials_per_gpu,
    )


def _result(run: RunRecord) -> Result:
    figures = run.figures
    assert figures is not None  # of a finished run on validation samples
    return Result(
        metric=figures.metric, seconds_per_epoch=figures.seconds, peak_gb=figures.peak_gb, score=figures.score
    )


def _day(run: RunRecord) -> str:
    first = next(read_events(run.folder / EVENTS))
    return datetime.fromtimestamp(first.time_ms / 1000, UTC).date().isoformat()
