"""Worker processes that outlive a test and form process groups of any size."""

from __future__ import annotations

import datetime
import queue
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed

SECONDS = 300
"""Longest time that a job may take, on a machine that is busy with other work."""


class WorkerPool:
    """Runs functions on ranks; each rank is a process."""

    def __init__(self, size: int, backend: str = "gloo") -> None:
        self._size, self._backend = size, backend
        self._folder = tempfile.TemporaryDirectory()
        self._num_jobs = 0
        self._has_tried_again = False
        self._start()

    def _start(self) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self._jobs = [context.Queue() for _ in range(self._size)]
        self._results = context.Queue()
        self._processes = [
            context.Process(target=_work, args=(rank, self._backend, jobs, self._results), daemon=True)
            for rank, jobs in enumerate(self._jobs)
        ]
        for process in self._processes:
            process.start()

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Returns what `function(rank, *args)` returns on each rank of a group; one rank has no group.

        The other ranks may wait for one that fails, so new processes replace them all. Where Gloo's connections break
        while a group forms, as they rarely do on a busy machine, the new ones try again, once.
        """
        self._num_jobs += 1
        store = Path(self._folder.name) / str(self._num_jobs)
        for jobs in self._jobs[:world_size]:
            jobs.put((world_size, str(store), function, args))
        found: dict[int, Any] = {}
        while len(found) < world_size:
            try:
                rank, result, error = self._results.get(timeout=SECONDS)
            except queue.Empty:
                rank, result, error = -1, None, f"only ranks {sorted(found)} of {world_size} have ended"
            if error:
                self._kill()
                self._start()
                if "connectFullMesh failed" in error and not self._has_tried_again:
                    self._has_tried_again = True
                    return self.run(world_size, function, *args)
                raise AssertionError(error)
            found[rank] = result
        return [found[rank] for rank in range(world_size)]

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def close(self) -> None:
        """Ends the processes."""
        self._kill()
        self._folder.cleanup()


def _work(rank: int, backend: str, jobs: Any, results: Any) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    while True:
        world_size, store, function, args = jobs.get()
        result, error = None, ""
        try:
            if world_size > 1:
                distributed.init_process_group(
                    backend,
                    init_method=f"file://{store}",
                    rank=rank,
                    world_size=world_size,
                    timeout=datetime.timedelta(seconds=SECONDS),
                )
            result = function(rank, *args)
        except BaseException:
            error = f"on rank {rank}:\n{traceback.format_exc()}"
        finally:
            if distributed.is_initialized():
                distributed.destroy_process_group()
        results.put((rank, result, error))
