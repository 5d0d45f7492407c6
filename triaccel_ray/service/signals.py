"""Treats termination signals as Ctrl-C, and makes sure that no Ctrl-C is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def as_interrupt(*numbers: signal.Signals, at_once: Callable[[], bool] = bool) -> Iterator[None]:
    """Makes these signals act as Ctrl-C inside the block; a signal that is ignored (nohup) stays ignored.

    If `at_once()` is true on arrival, KeyboardInterrupt is raised even if Ctrl-C has another handler, as in Ray Tune.
    Has no effect outside the main thread, the only one that handles signals.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handled = [number for number in numbers if is_main and signal.getsignal(number) is not signal.SIG_IGN]

    def interrupt(number: int, frame: FrameType | None) -> None:
        handler = signal.getsignal(signal.SIGINT)  # Ray Tune's, while it runs trials
        if not callable(handler) or at_once():  # not callable: SIG_IGN, which shells set for background processes
            raise KeyboardInterrupt
        handler(signal.SIGINT, frame)

    before = {number: signal.signal(number, interrupt) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def deferring_interrupt() -> Iterator[None]:
    """Defers a Ctrl-C that arrives while a process is being started to the end of the block; others act at once.

    Python drops exceptions that leave its fork hooks: a KeyboardInterrupt raised there would be lost, and the lock of
    `logging` would stay held.
    """
    is_pressed = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal is_pressed
        is_pressed = True
        while frame is not None and frame.f_code is not subprocess.Popen.__init__.__code__:
            frame = frame.f_back
        if frame is None:
            raise KeyboardInterrupt

    with _on_ctrl_c(interrupt):
        try:
            yield
        finally:
            if is_pressed:
                raise KeyboardInterrupt


@contextlib.contextmanager
def exiting_on_interrupt() -> Iterator[None]:
    """Makes Ctrl-C end the process at once inside the block, with one line and status 130, unless it is ignored.

    A KeyboardInterrupt would come out of whatever module is being imported, or be lost there.
    """
    with _on_ctrl_c(_leave):
        yield


@contextlib.contextmanager
def _on_ctrl_c(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Makes Ctrl-C call `handler` inside the block, in the main thread and if Python's own handler is installed."""
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
