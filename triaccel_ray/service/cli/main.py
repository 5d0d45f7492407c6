"""The command `triaccel`: parses, dispatches, and turns what a user can mend into one message and exit status 2."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence

from triaccel_ray.service.cli.parsing import check, parse
from triaccel_ray.service.cli.specs import Compare, Resume, Run, Search, Ui
from triaccel_ray.service.credentials import hide_credentials, without_passwords
from triaccel_ray.service.signals import nothing_begun

USER_ERRORS = (
    ValueError,
    TypeError,
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    NotADirectoryError,
    IsADirectoryError,
)
"""What the boundary raises for input that a user can mend; anything else is a bug and shows its traceback."""

LOADING: Mapping[type, str] = {
    **dict.fromkeys((Run, Search, Compare, Resume), "loading PyTorch, Ray and MLflow ...\n"),
    Ui: "loading MLflow ...\n",
}
"""Command -> what is said at once, before imports that take seconds."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command; exits with 0 when done, 1 when something is not ready or failed, 2 on bad input."""
    hide_credentials()
    if os.environ.get("RAY_JOB_STOP_SIGNAL") == "SIGINT":
        # What a script starts in the background ignores this signal, and so would the jobs of a head started so.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # Tune's own tables, even when told to be silent
    try:
        with nothing_begun():
            command = parse(arguments)
            check(command)
            sys.stderr.write(LOADING.get(type(command), ""))
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
    """Says what a user can mend, and returns the exit status; None for a bug, of which nothing has been said."""
    if isinstance(error, USER_ERRORS):
        text, status = str(error), 2
    else:
        from triaccel_ray.service.failures import PreemptedError, RunFailedError, is_disk_full

        if isinstance(error, RunFailedError | PreemptedError):
            text, status = str(error), 1
        elif isinstance(error, OSError) and is_disk_full(error):
            text = f"{error}: make room, then go on with `triaccel resume`; nothing that was complete is lost"
            status = 2
        else:
            return None
    from triaccel_ray.service.console import err

    err.print("triaccel:", without_passwords(text), style="red", soft_wrap=True)
    return status
