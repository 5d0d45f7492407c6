"""Processes of Ray's whose machine Ray has given up: Ray lets them go on, with all the memory that they hold."""

from __future__ import annotations

import os
import threading

import ray

INTERVAL_S = 2.0


def end_with_parent() -> None:
    """Has an actor's process end soon after the one that started it, the machine's raylet, whatever it is at then.

    Ray 2.60 leaves an actor alone whose raylet was lost. Its run goes on in another process, which may be on this
    machine and want its GPU. Where there is no actor, nothing is done.
    """
    if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        return
    parent = os.getppid()
    threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    pause = threading.Event()
    while os.getppid() == parent:
        pause.wait(INTERVAL_S)
    os._exit(1)  # no exit that could wait: nothing is left to be written, checkpoints and records are whole at any time
