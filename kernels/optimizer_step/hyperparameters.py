"""Hyperparameters of an optimizer step, one value per tensor, in a table on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from triaccel_ray.kernels.multi_tensor import upload


class SgdHyperparameters:
    """Learning rate, weight decay, momentum and Nesterov's flag of each tensor, on the device."""

    NUM_ROWS = 4

    def __init__(self, num_tensors: int, device: torch.device) -> None:
        """Begins with zeros: a step with them changes no parameter."""
        self.table = torch.zeros(self.NUM_ROWS, num_tensors, device=device)
        """fp32 [4, num_tensors]: lr, weight decay, momentum, Nesterov (0 or 1)."""
        self._last: list[list[float]] = []

    def set(
        self,
        *,
        lr: Sequence[float],
        weight_decay: Sequence[float],
        momentum: Sequence[float],
        nesterov: Sequence[bool],
    ) -> None:
        """Uploads the values, one per tensor, when they differ from the last; does not wait for the device.

        Raises:
            ValueError: a sequence has another length than the number of tensors.
        """
        self._last = _upload([lr, weight_decay, momentum, nesterov], self._last, self.table)


class AdamWHyperparameters:
    """Learning rate, weight decay, betas, epsilon and the kind of weight decay of each tensor, on the device."""

    NUM_ROWS = 10

    def __init__(self, num_tensors: int, device: torch.device) -> None:
        """Begins with zeros: to be set before the first step."""
        self.table = torch.zeros(self.NUM_ROWS, num_tensors, device=device)
        """fp32 [10, num_tensors]: lr, weight decay, beta1, 1 - beta1, log beta1, the same of beta2, eps, decoupled.

        What is taken from 1 is taken in fp64: 1 - 0.999 in fp32 is off by 5e-5.
        """
        self._last: list[list[float]] = []

    def set(
        self,
        *,
        lr: Sequence[float],
        weight_decay: Sequence[float],
        beta1: Sequence[float],
        beta2: Sequence[float],
        eps: Sequence[float],
        decoupled: Sequence[bool],
    ) -> None:
        """Uploads the values, one per tensor, when they differ from the last; does not wait for the device.

        `decoupled` weight decay shrinks the parameter (AdamW), the other kind is added to the gradient (Adam).

        Raises:
            ValueError: a sequence has another length than the number of tensors, or a beta is not in [0, 1).
        """
        for beta in (*beta1, *beta2):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"a beta is {beta}: must be in [0, 1)")
        rows = [lr, weight_decay, *_beta_rows(beta1), *_beta_rows(beta2), eps, decoupled]
        self._last = _upload(rows, self._last, self.table)


def _beta_rows(betas: Sequence[float]) -> list[Sequence[float]]:
    return [betas, [1.0 - beta for beta in betas], [math.log(beta) if beta else -math.inf for beta in betas]]


def _upload(rows: Sequence[Sequence[float]], last: list[list[float]], table: Tensor) -> list[list[float]]:
    """Copies the rows into the table if they are not the last ones, and returns them."""
    num_tensors = table.shape[1]
    for row in rows:
        if len(row) != num_tensors:
            raise ValueError(f"{len(row)} values for {num_tensors} tensors: give one for each")
    values = [[float(value) for value in row] for row in rows]
    if values != last:
        upload(torch.tensor(values, dtype=torch.float64).float(), table)
    return values
