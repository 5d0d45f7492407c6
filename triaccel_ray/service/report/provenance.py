"""Text of reports: provenance of the results, failed or missing runs, and notes on a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime

from triaccel_ray.records.events import read_events
from triaccel_ray.service.cli.options import RUN_SETTINGS, settings_of_run
from triaccel_ray.service.report.tables import TO_TARGET, TextTable, joined
from triaccel_ray.service.runs.environment import COMMIT
from triaccel_ray.service.runs.record import OWN_CODE, RunRecord
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.storage.layout import ERROR, EVENTS

_VERSIONS = ("triaccel-ray", "torch", "triton", "python")


def about(spec: RunSpec, runs: Sequence[RunRecord], facts: Mapping[str, str], command: str) -> TextTable:
    """Returns where a result comes from: date, hardware, versions, commit, the command to repeat it, and every option.

    `spec` is what the runs have in common; `facts` are further rows. If runs differ, each distinct value is listed. Of
    a user's own code, the options are those of the control loop alone.
    """
    infos = [run.start.info for run in runs]
    begun = sorted(next(read_events(run.folder / EVENTS)).time_ms for run in runs)
    rows = {
        "task": spec.task,
        **facts,
        "begun": f"{datetime.fromtimestamp(begun[0] / 1000, UTC):%Y-%m-%d %H:%M} UTC" if begun else "",
        "hardware": _distinct(
            f"{info['hardware']} (host {info.get('host', 'unknown')})" for info in infos if "hardware" in info
        ),
        "versions": _distinct(
            ", ".join(f"{name} {info[name]}" for name in _VERSIONS if name in info) for info in infos
        ),
        "commit": _distinct(info.get(COMMIT, "") for info in infos),
        "to repeat": command,
    }
    for name, value in settings_of_run(spec).items():
        if name not in rows and (spec.task != OWN_CODE or RUN_SETTINGS[name].path[0] == "control"):
            rows[name] = str(value)
    return TextTable(header=("", ""), rows=[pair for pair in rows.items() if pair[1]], title="Provenance and settings")


def troubles(
    runs: Mapping[str, RunRecord], missing: Sequence[str] = (), damaged: Mapping[str, str] | None = None
) -> str:
    """Returns a line for each run that failed, was interrupted, is damaged or is missing; it says why."""
    found = {name: "; ".join(_troubles_of(run)) for name, run in runs.items()}
    found |= {name: f"is left out: {problem}" for name, problem in (damaged or {}).items()}
    found |= dict.fromkeys(missing, "is missing: it was asked for and has not begun")
    return "\n".join(f"{name} {said}" for name, said in found.items() if said)


def sharing_note(spec: RunSpec) -> str:
    """Returns a note that timings come from shared GPUs; empty if each run had a GPU to itself."""
    if spec.trials_per_gpu == 1:
        return ""
    return f"times and scores are those of GPUs shared by {spec.trials_per_gpu} runs each, not of a GPU of one's own"


def run_notes(run: RunRecord) -> Iterator[str]:
    """Yields a line each on GPU sharing, ranks, target, time spent adapting, and each kind of fault."""
    if note := sharing_note(run.spec):
        yield note
    if ranks := run.spec.ranks_text:
        yield f"trained by {ranks} together; seconds and memory are those of rank 0"
    if run.spec.target is not None:
        costs = (f"{value:.4g} {TO_TARGET[name]}" for name, value in run.to_target.items())
        yield f"target {run.start.goal.named(run.spec.target)}: {', '.join(costs) or 'not reached'}"
    seconds = sum(tick.applied.adapt_ms for tick in run.ticks) / 1e3
    if seconds > 0:
        yield f"adapting took {seconds:.1f} s of the run: first steps of new plans, compilation, captures"
    faults = [fault for tick in run.ticks for fault in tick.observation.faults]
    faults += [fault for each in run.throughputs for fault in each.faults]
    counts = Counter((fault.kind.value, fault.phase, fault.detail) for fault in faults)
    for (kind, phase, detail), count in counts.items():
        times = f", {count} times" if count > 1 else ""
        yield f"{kind} ({phase}{times}): {detail}".removesuffix(": ")


def _troubles_of(run: RunRecord) -> Iterator[str]:
    epoch = f" after epoch {run.epochs[-1].epoch}" if run.epochs else " before its first epoch ended"
    if run.end is None:
        yield f"is unfinished{epoch}: it still trains, or its process was lost"
    elif run.end.status == "failed":
        trace = f" (traceback: {run.folder / ERROR})" if (run.folder / ERROR).exists() else ""
        yield f"{run.status}{epoch}: {run.end.message or 'no message was recorded'}{trace}"
    for each in run.interruptions:
        yield f"was interrupted ({each.cause}): {each.message}"


def _distinct(values: Iterable[str]) -> str:
    return joined(*dict.fromkeys(values))
