"""Detects the loss of a cluster's head: Ray waits for it for a minute, and then ends the process at once."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

from triaccel_ray.cuda.out_of_memory import first_line
from triaccel_ray.service.console import err
from triaccel_ray.service.failures import PreemptedError

INTERVAL_S = 2.0
LOST_AFTER_S = 30.0
"""Silence after which the head counts as lost: half of Ray's limit, which leaves time for records and messages."""
GRACE_S = 8.0
"""Time until a process is ended that cannot be interrupted, because a call of Ray's waits for the head."""
STOPS_WITHIN_S = 1.0
"""Time in which a head stops answering after SIGTERM."""
_SIGNAL = signal.SIGUSR2
"""Ray Tune has its own handlers for SIGINT and SIGUSR1, which wait for trials."""


class HeadLostError(PreemptedError):
    """The head of the cluster no longer answers."""


@contextlib.contextmanager
def watching(address: str) -> Iterator[None]:
    """Interrupts the block once the cluster's head at `address` has not answered for half a minute.

    Acts only in the main thread, the only one that can be interrupted. If the interrupt has no effect, the process
    prints what happened, and ends with exit status 1.

    Raises:
        HeadLostError: the head was lost.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    done, lost = threading.Event(), threading.Event()
    before = signal.signal(_SIGNAL, signal.default_int_handler)  # KeyboardInterrupt leaves Ray's waiting calls
    thread = threading.Thread(target=_watch, args=(address, done, lost), name="head-watch", daemon=True)
    thread.start()
    try:
        yield
    except BaseException as error:  # whatever Ray turned the interrupt into
        if not lost.is_set():
            raise
        raise HeadLostError(_message(address)) from error
    finally:
        done.set()
        thread.join()
        signal.signal(_SIGNAL, before)


def stops_answering(address: str) -> bool:
    """Returns whether the head at `address` does not answer, or stops to within a second."""
    began_s = time.monotonic()
    while not connection_error(address):
        if time.monotonic() - began_s > STOPS_WITHIN_S:
            return False
        time.sleep(0.1)
    return True


def _message(address: str) -> str:
    return (
        f"the head of the cluster at {address} has not answered for {LOST_AFTER_S:.0f} s: it is lost, or cannot be "
        "reached from here; what runs have recorded and saved is kept"
    )


def _watch(address: str, done: threading.Event, lost: threading.Event) -> None:
    silent_since_s: float | None = None  # from the first failed probe: a suspended process probes nothing
    while not done.wait(INTERVAL_S):
        if not connection_error(address):
            silent_since_s = None
            continue
        now_s = time.monotonic()
        silent_since_s = now_s if silent_since_s is None else silent_since_s
        if now_s - silent_since_s >= LOST_AFTER_S:
            lost.set()
            os.kill(os.getpid(), _SIGNAL)
            if not done.wait(GRACE_S):
                err.print(_message(address), style="yellow", soft_wrap=True)
                os._exit(1)
            return


def connection_error(address: str, timeout_s: float = INTERVAL_S) -> str:
    """Returns why nothing listens at `address`, host:port; empty if something does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()
    except (OSError, ValueError, OverflowError) as error:
        return first_line(error)
    return ""
