"""The command `triaccel`: parses, dispatches, and reports mistakes of the user as one message and exit status 2."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from triaccel_ray.service.cli.arguments import Resume, TrainingCommand, Ui
from triaccel_ray.service.cli.parsing import check, parse
from triaccel_ray.service.credentials import without_passwords
from triaccel_ray.service.signals import exiting_on_interrupt

USER_ERRORS = (
    ValueError,
    TypeError,
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    NotADirectoryError,
    IsADirectoryError,
)
"""Exceptions for mistakes that a user can fix; an unexpected exception is a bug and shows its traceback."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command; exits with 0 on success, 1 if something is not ready or failed, 2 on bad input."""
    if os.environ.get("RAY_JOB_STOP_SIGNAL") == "SIGINT":
        # If a script started the cluster's head in the background, its jobs inherit that SIGINT is ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with exiting_on_interrupt():
            command = parse(arguments)
            check(command)
            if isinstance(command, TrainingCommand | Resume | Ui):  # before the imports, which take seconds
                sys.stderr.write("loading PyTorch, Ray and MLflow ...\n")
                sys.stderr.flush()
            from triaccel_ray.service.cli.execute import execute
        sys.exit(execute(command))
    except KeyboardInterrupt as interrupt:
        sys.stderr.write(f"{str(interrupt) or 'stopped'}\n")
        sys.exit(130)
    except Exception as error:
        status = None if os.environ.get("TRIACCEL_TRACEBACK") else _explain(error)
        if status is None:
            raise
        sys.exit(status)


def _explain(error: Exception) -> int | None:
    """Prints an error that a user can fix and returns the exit status; prints nothing and returns None for a bug."""
    text, status = str(error), 2
    if not isinstance(error, USER_ERRORS):
        from triaccel_ray.service.failures import RunFailedError, is_disk_full

        if isinstance(error, RunFailedError):
            from triaccel_ray.control.errors import BudgetTooSmallError

            status = 2 if isinstance(error.__cause__, BudgetTooSmallError) else 1
        elif isinstance(error, OSError) and is_disk_full(error):
            text = f"{error}: make room, then go on with `triaccel resume`; nothing that was complete is lost"
        else:
            return None
    from triaccel_ray.service.console import err

    err.print("triaccel:", without_passwords(text), style="red", soft_wrap=True)
    return status
