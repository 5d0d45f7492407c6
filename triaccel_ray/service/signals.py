"""Signals by which others end a command, taken as the user's own Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_Handler = Callable[[int, FrameType | None], object]


@contextlib.contextmanager
def as_interrupt(*numbers: signal.Signals) -> Iterator[None]:
    """Has these signals do meanwhile what Ctrl-C does; one that is ignored stays so (nohup).

    Without effect outside the main thread, which alone hears signals.
    """
    is_main = threading.current_thread() is threading.main_thread()
    heard = [number for number in numbers if is_main and signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def never_lost() -> Iterator[None]:
    """Has a Ctrl-C that comes while a process is started take effect at the end of what happens inside; others at once.

    Python drops exceptions that leave its fork hooks: a KeyboardInterrupt raised there would be lost, and the lock of
    `logging` would stay taken.
    """
    pressed = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        while frame is not None and frame.f_code is not subprocess.Popen.__init__.__code__:
            frame = frame.f_back
        if frame is None:
            raise KeyboardInterrupt

    with _on_ctrl_c(interrupt):
        try:
            yield
        finally:
            if pressed:
                raise KeyboardInterrupt


@contextlib.contextmanager
def nothing_begun() -> Iterator[None]:
    """Has Ctrl-C end the process at once meanwhile, with one line and status 130; ignored, it stays so.

    Raised as an exception it would come out of whatever module is being imported, or be lost there.
    """
    with _on_ctrl_c(_leave):
        yield


@contextlib.contextmanager
def _on_ctrl_c(handler: _Handler) -> Iterator[None]:
    """Has Ctrl-C call `handler` meanwhile, where it is this thread's to hear and nobody has changed what it does."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"stopped; nothing had begun\n")
    os._exit(130)


def _interrupt(number: int, frame: FrameType | None) -> None:
    handler = signal.getsignal(signal.SIGINT)  # Tune's, while it runs trials
    if not callable(handler):  # as where a shell has what it starts in the background ignore Ctrl-C
        raise KeyboardInterrupt
    handler(signal.SIGINT, frame)
