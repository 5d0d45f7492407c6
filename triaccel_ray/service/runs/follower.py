"""The worker of each rank but rank 0, which alone writes to the run's folder."""

from __future__ import annotations

import io

from triaccel_ray.baseline import BaselineLoop
from triaccel_ray.loop import ControlLoop
from triaccel_ray.records.checkpoint import read_checkpoint
from triaccel_ray.service.failures import cause_of
from triaccel_ray.service.runs.building import seed_everything
from triaccel_ray.service.runs.worker import Worker
from triaccel_ray.service.storage.layout import CHECKPOINT


class Follower(Worker):
    """Trains the same loop as rank 0, which has a plain `Worker`.

    It writes nothing: its log is never opened, and its spec keeps no model.
    """

    def resume(self) -> int:
        """Restores the states that rank 0 reads from its files, in its order; the last one is that of the run."""
        while (content := self.ranks.broadcast_bytes(None)) is not None:
            state = read_checkpoint(io.BytesIO(content), self.folder / CHECKPOINT)
            try:
                self._load(state)
            except (RuntimeError, ValueError, KeyError) as error:
                if cause_of(error) != "bug":  # else rank 0 has found the same, and looks for another checkpoint
                    raise
        if self.ranks.any(False):
            self._rebuild_loop()
        self._seed()  # random states in the checkpoint are rank 0's
        return self.loop.sampler.epoch

    def checkpoint(self) -> None:
        """Gives rank 0 what it lacks: the state of this rank's share of the optimizer, if the ranks share it."""
        self.loop.state_dict()

    def _build_loop(self) -> ControlLoop | BaselineLoop:
        self.loop = super()._build_loop()
        self._seed()
        return self.loop

    def _seed(self) -> None:
        """Seeds the generators of this rank: with rank 0's states, it would drop out the same units."""
        key = (self.spec.seed, self.ranks.rank, self.loop.sampler.epoch)
        seed_everything(hash(key) % 2**32)  # a hash of integers is the same in all processes
