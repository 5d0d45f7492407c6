"""The kind of a training step, by which its captured graph is found."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triaccel_ray.records.plan import Fault, FaultKind, Storage, largest_micro_batch


@dataclass(frozen=True)
class StepKind:
    """Identifies a captured step; all its other inputs are read from the device at each replay."""

    batch_size: int
    num_micro_batches: int
    dtypes: tuple[torch.dtype, ...]
    """Of the layers."""
    storage: tuple[tuple[str, Storage], ...] = ()
    """Of the regions that do not keep what they save."""
    offset: int = 0
    """See `BatchShares`: ranks have equal kinds, though their shares of the batch may differ."""

    def capture_fault(self, step: int, detail: str, kind: FaultKind = FaultKind.CAPTURE_FAILED) -> Fault:
        """Returns the fault of a step of this kind that was not captured."""
        return Fault(
            kind=kind,
            step=step,
            phase="capture",
            batch_size=self.batch_size,
            micro_batch_size=largest_micro_batch(self.batch_size, self.num_micro_batches),
            detail=detail[:500],
        )
