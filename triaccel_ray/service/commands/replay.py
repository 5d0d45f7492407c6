"""Explains the decisions of a run from its event log alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from triaccel_ray.config import ControlConfig, check_field
from triaccel_ray.decide import replay
from triaccel_ray.records.codec import encode
from triaccel_ray.records.events import LogError
from triaccel_ray.records.plan import Plan
from triaccel_ray.service.report.tables import TextTable
from triaccel_ray.service.runs.record import RunRecord
from triaccel_ray.service.runs.spec import TUNE_BATCH

_OTHER_VERSION = "under its own configuration that means the log was written by another version, or was changed"


def reasons_table(run: RunRecord, *, max_rows: int) -> TextTable:
    """Returns the reasons of a run's decisions, oldest first, at most `max_rows` of them; one that lasts has one row.

    Raises:
        ValueError: `max_rows` is negative.
    """
    check_field("reasons", max_rows, int, "[0, inf)")
    rows: list[list[str]] = []
    before: dict[tuple[str, str, str], list[str]] = {}
    for tick in run.ticks:
        step = str(tick.observation.step)
        lasting: dict[tuple[str, str, str], list[str]] = {}
        for reason in tick.decision.reasons:
            words = reason.subject, reason.code.value, reason.text
            if (row := before.get(words)) is None:
                row = [step, *words]
                rows.append(row)
            else:
                row[0] = f"{row[0].partition(' ')[0]} to {step}"
            lasting[words] = row
        before = lasting
    hidden = len(rows) - max_rows
    note = f"{hidden} more; --reasons {len(rows)} shows all" if hidden > 0 else ""
    title = f"{run.name}: decisions and their reasons"
    return TextTable(header=("step", "subject", "rule", "reason"), rows=rows[:max_rows], title=title, note=note)


def verdict(run: RunRecord, control: ControlConfig) -> Iterator[str]:
    """Yields, line by line, the result of replaying the run's observations under `control`.

    Raises:
        LogError: the run made no tick.
    """
    if not run.ticks:
        too_short = f"it was shorter than {run.spec.control.every_steps} steps"
        decides = not run.spec.is_baseline and run.spec.method != TUNE_BATCH
        why = too_short if decides else f"method {run.spec.method} decides nothing"
        raise LogError(f"run {run.name} made no tick: {why}")
    result = replay(control, [(tick.observation, tick.decision) for tick in run.ticks])
    is_own = control == run.start.control
    if result.diverged_at is None:
        pairs = enumerate(zip(result.decisions, run.ticks, strict=True))
        differing = [index for index, (replayed, tick) in pairs if replayed != tick.decision]
        if is_own and differing:
            yield f"plans are the same, but at tick {differing[0]} reasons or what was remembered differ from the log"
            yield _OTHER_VERSION
        else:
            under = "its own configuration" if is_own else "the other thresholds"
            yield f"{len(run.ticks)} ticks replayed under {under}: every decision is the same"
        return
    tick, replayed = run.ticks[result.diverged_at], result.decisions[-1]
    yield (
        f"first difference at tick {result.diverged_at} (step {tick.observation.step}); what follows would have been "
        "another run, so the replay ends here"
    )
    if is_own:
        yield _OTHER_VERSION
    yield from _differences(tick.decision.plan, replayed.plan)
    for reason in replayed.reasons:
        yield f"  because {reason.subject}: {reason.text}"


def _differences(recorded: Plan, replayed: Plan) -> Iterator[str]:
    """Yields a line for each entry of the plan that differs."""
    old, new = dict(_entries(encode(recorded))), dict(_entries(encode(replayed)))
    for name in dict.fromkeys([*old, *new]):
        if old.get(name) != new.get(name):
            yield f"  {name}: recorded {old.get(name, 'the default')}, now {new.get(name, 'the default')}"


def _entries(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _entries(value, f"{prefix}{name} of ")
        else:
            yield f"{prefix}{name}", value
