"""Signals by which others end a command, taken as the user's own Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def as_interrupt(*numbers: signal.Signals) -> Iterator[None]:
    """Has these signals do meanwhile what Ctrl-C does; one that is ignored stays so (nohup).

    Without effect outside the main thread, which alone hears signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_at_once(number: int, frame: FrameType | None) -> None:
    """Ends a process that still loads: any module being imported could catch an exception, or report it."""
    os.write(2, b"\ninterrupted: nothing had begun\n")
    os._exit(130)


def _interrupt(number: int, frame: FrameType | None) -> None:
    handler = signal.getsignal(signal.SIGINT)  # Tune's, while it runs trials
    if not callable(handler):  # as where a shell has what it starts in the background ignore Ctrl-C
        raise KeyboardInterrupt
    handler(signal.SIGINT, frame)
