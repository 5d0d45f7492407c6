"""The worker processes in which runs train: how they end, and what they load ahead."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import threading
import time

_PARENT_INTERVAL_S = 2.0


def end_with_parent() -> None:
    """Starts a watchdog that ends this process soon after its parent, the machine's raylet.

    Ray 2.60 leaves an actor running when its raylet is lost. The run resumes in another process, which may be on this
    machine and need its GPU.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_INTERVAL_S)
        os._exit(1)  # skips cleanup, which could block: checkpoints and records are always whole

    threading.Thread(target=watch, name="parent-watchdog", daemon=True).start()


def preload() -> None:
    """Imports what the first trial would import, and exempts all loaded objects from garbage collection.

    A trial collects garbage when it begins and ends, so that the next one's memory is measured from zero. Scanning the
    libraries' 440,000 objects takes 0.3 s each time, scanning a trial's own a millisecond.
    """
    importlib.import_module("torch._dynamo")  # which a fused optimizer imports
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else modules that count leaked objects would report them all
