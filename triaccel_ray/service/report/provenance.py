"""Where results come from: when, on what, by which command and settings; and which runs failed or are missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from triaccel_ray.records.events import parse_event
from triaccel_ray.service.report.report import Section
from triaccel_ray.service.runs.environment import COMMIT
from triaccel_ray.service.runs.record import RunRecord
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.storage.layout import ERROR, EVENTS
from triaccel_ray.service.units import format_bytes

_VERSIONS = ("triaccel-ray", "torch", "triton", "python")


def about(spec: RunSpec, runs: Sequence[RunRecord], facts: Mapping[str, str], command: str) -> list[Section]:
    """Returns the top of a page: date, hardware, versions, commit, settings, and the command that does it again.

    `spec` is what the runs have in common, `facts` what is said of them besides; where runs differ, all is named.
    """
    infos = [run.start.info for run in runs]
    versions = [", ".join(f"{name} {info[name]}" for name in _VERSIONS if name in info) for info in infos]
    hosts = [f" (host {info['host']})" if "host" in info else "" for info in infos]
    hardware = [f"{info['hardware']}{host}" for info, host in zip(infos, hosts, strict=True) if "hardware" in info]
    package = [f"none recorded: triaccel-ray {info['triaccel-ray']}" for info in infos if "triaccel-ray" in info]
    commits = [info[COMMIT] for info in infos if COMMIT in info]
    rows = {
        "task": spec.task,
        **facts,
        "date": _span(runs),
        "hardware": _distinct(hardware),
        "versions": _distinct(versions),
        "commit": _distinct(commits or package),
        "settings": _settings(spec, runs),
        "to repeat": command,
    }
    return [Section(about=[(name, value) for name, value in rows.items() if value])]


def troubles(
    runs: Mapping[str, RunRecord], missing: Sequence[str] = (), damaged: Mapping[str, str] | None = None
) -> list[Section]:
    """Returns a section on what failed, was interrupted or is not there; none where all is well."""
    rows = [*_failures(runs), *_interruptions(runs)]
    rows += [[name, "is left out", problem] for name, problem in (damaged or {}).items()]
    rows += [[name, "is missing", "it was asked for and has not begun"] for name in missing]
    if not rows:
        return []
    title, header = "Failures, interruptions and missing runs", ("run", "what", "why")
    return [Section(title=title, header=header, rows=rows, has_sentences=True)]


def _failures(runs: Mapping[str, RunRecord]) -> Iterator[list[str]]:
    for name, run in runs.items():
        epoch = f" after epoch {run.epochs[-1].epoch}" if run.epochs else " before its first epoch ended"
        if run.end is None:
            yield [name, f"is unfinished{epoch}", "it still trains, or its process was lost"]
        elif run.end.status == "failed":
            trace = f" (traceback: {run.folder / ERROR})" if (run.folder / ERROR).exists() else ""
            yield [name, f"{run.status}{epoch}", f"{run.end.message or 'no message was recorded'}{trace}"]


def _interruptions(runs: Mapping[str, RunRecord]) -> Iterator[list[str]]:
    for name, run in runs.items():
        yield from ([name, f"was interrupted ({each.cause})", each.message] for each in run.interruptions)


def _span(runs: Sequence[RunRecord]) -> str:
    """Returns when the first of the runs began and how long all of them took together, in UTC."""
    times = []
    for run in runs:
        path = run.folder / EVENTS
        lines = path.read_bytes().rpartition(b"\n")[0].split(b"\n")
        times += [parse_event(line, str(path)).time_ms for line in (lines[0], lines[-1])]
    if not times:
        return ""
    begin = datetime.fromtimestamp(min(times) / 1e3, UTC)
    seconds = round((max(times) - min(times)) / 1e3)
    parts = ((seconds // 3600, "h"), (seconds // 60 % 60, "min"), (seconds % 60, "s"))
    lasted = " ".join(f"{count} {unit}" for count, unit in parts if count) or "0 s"
    return f"{begin:%Y-%m-%d %H:%M} UTC, within {lasted}"


def _settings(spec: RunSpec, runs: Sequence[RunRecord]) -> str:
    recipe, batch = spec.recipe, spec.method_control.batch
    # Of a search the trials have a limit of their own, and what baselines might hold is of no interest.
    limited = [run for run in runs if run.spec.method not in ("fp32", "amp", "probe")] or runs
    limits = [value for run in limited if isinstance(value := run.start.parameters.get("memory_limit_bytes"), int)]
    memory = " to ".join(dict.fromkeys(format_bytes(end) for end in (min(limits), max(limits)))) if limits else ""
    ladder = f", elastic from {batch.minimum} to {batch.maximum}" if batch.enabled else ""
    return "; ".join(
        filter(
            None,
            (
                f"{recipe.epochs} epochs, {recipe.warmup_epochs:g} of them warm-up",
                f"learning rate {recipe.lr:.4g}, weight decay {recipe.weight_decay:.4g}",
                f"batch {batch.start}{ladder}",
                f"memory limit {memory}" if memory else "",
                f"judged on {'test' if spec.purpose.value == 'final' else 'validation'} samples",
            ),
        )
    )


def _distinct(values: Sequence[str]) -> str:
    """Returns the values that differ, each once."""
    return "; ".join(dict.fromkeys(filter(None, values)))
