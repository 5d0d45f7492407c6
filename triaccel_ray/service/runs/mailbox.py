"""Messages between the trial of a run and its group of ranks; light to import, for an actor that does nothing else."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from triaccel_ray.service.runs.objective import Performance


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is, after an epoch."""

    epoch: int
    performance: Performance | None
    finished: bool


class Mailbox:
    """An actor beside the trial: takes progress from rank 0, and tells it when the trial wants the next epoch.

    So no epoch is trained before the scheduler has decided on the one before. Calls say nothing of an attempt: ranks
    that are lost, and others in their place, may call at any time.
    """

    def __init__(self) -> None:
        self._progress: asyncio.Queue[Progress | None] = asyncio.Queue()
        self._is_wanted = asyncio.Event()
        self._is_stopped = self._has_begun = False
        self._epoch = 0
        """The last epoch reported."""
        self._num_losses = 0
        """Losses of processes since then."""

    async def may_train(self) -> bool:
        """By rank 0, before an epoch: waits until the trial wants one; returns False if it wants no more."""
        self._has_begun = True
        if not self._is_stopped:
            await self._is_wanted.wait()
        return not self._is_stopped

    async def report(self, progress: Progress) -> None:
        """By rank 0: hands progress to the trial, unless it knows the epoch from before a loss."""
        if progress.epoch > self._epoch or progress.finished:
            self._epoch, self._num_losses = progress.epoch, 0
            self._is_wanted.clear()
            await self._progress.put(progress)

    async def lose(self) -> int:
        """By Ray Train's controller: a process was lost; returns how many since the last epoch."""
        self._num_losses += 1
        return self._num_losses

    async def end(self) -> None:
        """By the trial: the group has ended, so nothing more comes."""
        await self._progress.put(None)

    async def next(self) -> Progress | None:
        """By the trial: has one epoch trained, and returns its progress; None if the group has ended."""
        self._is_wanted.set()
        return await self._progress.get()

    async def stop(self) -> None:
        """By the trial: has the ranks end before the next epoch."""
        self._is_stopped = True
        self._is_wanted.set()

    async def has_begun(self) -> bool:
        """Returns whether rank 0 has asked for an epoch, which it does once the run's log is open."""
        return self._has_begun
