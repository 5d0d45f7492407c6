"""`triaccel`, also as `python -m triaccel_ray.service` where the package is on the path but not installed."""

from __future__ import annotations

import signal

from triaccel_ray.service.endings import end_at_once


def main() -> None:
    """Runs the command that was typed; Ctrl-C while it loads, which takes seconds, ends it with one line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell has it ignored
        signal.signal(signal.SIGINT, end_at_once)
    from triaccel_ray.service import cli

    cli.main()


if __name__ == "__main__":
    main()
