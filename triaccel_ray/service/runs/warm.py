"""A process that serves trial after trial: what it keeps, so that little time passes between two of them."""

from __future__ import annotations

import atexit
import gc
import importlib

import ray


def keep_libraries() -> None:
    """Loads what the first trial would load, and takes all that is loaded out of the garbage collector's sight.

    A trial collects garbage when it begins and when it ends, so that the next one's memory is measured from zero. To
    look through the 440,000 objects of the libraries takes 0.3 s a time, through those of a trial a millisecond.

    What is there is never collected any more: an actor does this before it builds anything, other processes do nothing.
    """
    if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        return
    importlib.import_module("torch._dynamo")  # which a fused optimizer loads
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # modules that count what they leave behind would find it all
