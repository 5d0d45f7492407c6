"""Training, searching and comparing from Python and notebooks, with the options of the command line."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from triaccel_ray.service.cli.keywords import command_of, with_options_of
from triaccel_ray.service.cli.parsing import check
from triaccel_ray.service.cli.specs import Compare, Run, Search

if TYPE_CHECKING:
    from triaccel_ray.service.result import Report
    from triaccel_ray.trainables.task import Task


@with_options_of(Run)
def run(task: str | type[Task] | None = None, **options: Any) -> Report:
    """Trains one job and returns its report.

    Options are those of `triaccel run --help-all`, with underscores: `run("digits", epochs=3, memory_budget="2GiB")`.
    Ctrl-C, or a notebook's stop button, ends it in good order, and the message has the command that resumes it.

    A Ray that the process uses already is used, else one starts on this machine, or `address` names one.

    Args:
        task: the name of a bundled task, `package.module:Class`, or a class that other processes can import; None
            with `from_="NAME"`, which repeats what has this name.
        **options: as `help(run)` lists them. A size may also be a number of bytes.

    Raises:
        TypeError: there is no such option, or the task is neither name nor class.
        ValueError, FileNotFoundError: an option, or something that it names, cannot be used; the message says why.
        RunFailedError: the run has failed; the message has the cause, and where its log and checkpoint are.
    """
    return _carried_out(command_of(Run, task, options))


@with_options_of(Search)
def search(task: str | type[Task] | None = None, **options: Any) -> Report:
    """Finds thresholds on the validation split, against FP32 and AMP, and returns the search's report.

    Options are those of `triaccel search --help-all`: `search("digits", trials=8, epochs=3)`. The rest is as in `run`.

    Raises:
        RunFailedError: a baseline has failed, or every trial. Where some have, messages and the report tell.
    """
    return _carried_out(command_of(Search, task, options))


@with_options_of(Compare)
def compare(task: str | type[Task] | None = None, **options: Any) -> Report:
    """Compares FP32, AMP and Tri-Accel on the test set, over several seeds, and returns the comparison's report.

    Options are those of `triaccel compare --help-all`: `compare("digits", seeds=3, fixed=4)`. The rest is as in `run`.

    Raises:
        RunFailedError: every run has failed. Where some have, messages and the report tell.
    """
    return _carried_out(command_of(Compare, task, options))


def _carried_out(command: Run | Search | Compare) -> Report:
    check(command)
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # Tune's own tables, even when told to be silent
    from triaccel_ray.service.failures import RunsFailedError
    from triaccel_ray.service.launch import carry_out
    from triaccel_ray.service.result import Report

    outcome = carry_out(command)
    if outcome.failures and outcome.num_finished == 0:
        raise RunsFailedError(outcome.failures)
    assert outcome.view is not None  # something new has been trained
    return Report.of(outcome.view)
