"""Trains a run epoch by epoch, and decides when it writes a checkpoint."""

from __future__ import annotations

import time

from triaccel_ray.model.dry_run import forbidding_exit, users_lines
from triaccel_ray.service.runs.mailbox import Progress
from triaccel_ray.service.runs.worker import Worker
from triaccel_ray.service.storage.training_folder import TrainingFolder

SAVING_SHARE = 0.05
"""Largest share of the time spent on checkpoints; the last checkpoint is always written."""
NEGLIGIBLE_S = 0.25
"""If writing a checkpoint takes at most this many seconds, one is written after every epoch."""


class CheckpointPolicy:
    """Has a worker write checkpoints so often that saving takes a small share of the training time."""

    def __init__(self) -> None:
        self._saved_at, self._saving_s = 0.0, 0.0

    def after_epoch(self, worker: Worker) -> None:
        """Writes a checkpoint if one is due on rank 0, with the help of all ranks; raises as `Worker.checkpoint`."""
        began = time.monotonic()
        interval_s = began - self._saved_at + self._saving_s
        is_due = worker.finished or self._saving_s <= max(NEGLIGIBLE_S, SAVING_SHARE * interval_s)
        if worker.ranks.any(is_due and worker.ranks.rank == 0):
            worker.checkpoint()
            self._saved_at = time.monotonic()
            self._saving_s = self._saved_at - began


def train_epoch(worker: Worker, folder: TrainingFolder, policy: CheckpointPolicy) -> Progress:
    """Trains, saves and uploads the next epoch, if one is left; finishes the run after the last one.

    An error gets the user's own lines as a note: notes reach the driver, the traceback does not.
    """
    try:
        with forbidding_exit():
            if not worker.finished:
                worker.advance()
                policy.after_epoch(worker)
            if worker.finished:
                worker.finish()
    except Exception as error:
        if lines := users_lines(error):
            error.add_note(lines)
        raise
    if worker.finished:
        folder.close()
    folder.push_soon()
    return Progress(epoch=worker.loop.sampler.epoch, performance=worker.performance, finished=worker.finished)
