"""SGD and AdamW steps over all tensors of a model at once, controlled by scalars on the device."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from triaccel_ray.kernels.multi_tensor import Chunks, TensorTable, upload
from triaccel_ray.kernels.optimizer_step import reference
from triaccel_ray.kernels.optimizer_step.reference import Scalars

__all__ = ["AdamWStep", "SgdStep"]


class _Step(ABC):
    """Base class of the optimizer steps.

    Optimizer state is fp32, or uint8 in the format of `eight_bits`; step counts are fp32. Gradients are fp32, fp16 or
    bf16, and may differ in dtype. All tensors of one index must have the same dense strides, in any order of dimensions
    (`have_equal_dense_strides`). A tensor whose parameter or gradient is absent is not changed. A parameter is fp32,
    and its companion, if present, a copy in fp32, fp16 or bf16 that receives the rounded new value. Or it is bf16 and
    its companion int16: the high and low words of fp32 numbers (`split_words`), stepped exactly like fp32 parameters.

    No method waits for the device. Steps can be captured in a CUDA graph, whose replays read the current tables,
    hyperparameters and scalars. Step once before a capture, with empty tables if necessary, to compile the kernels.
    """

    _NUM_ROWS: ClassVar[int]

    def __init__(self, sizes: Sequence[int], device: torch.device, *, kernel: bool | None = None) -> None:
        """Prepares for tensors of `sizes` elements; hyperparameters are 0 and must be set before the first step.

        `kernel` selects the Triton kernels: by default on a GPU; on a CPU they need Triton's interpreter.
        """
        device = torch.device(device)
        self._num_tensors = len(sizes)
        self._chunks: Chunks | None = None
        self.rows = torch.zeros(self._NUM_ROWS, len(sizes), device=device)
        """Hyperparameters, fp32: a row for each of them, a column for each tensor."""
        self._last: list[list[float]] = []
        if device.type == "cuda" if kernel is None else kernel:
            from triaccel_ray.kernels.optimizer_step.triton import CHUNK_SIZE  # imports triton

            self._chunks = Chunks(sizes, device, CHUNK_SIZE)

    @torch.no_grad()
    def step(
        self,
        parameters: TensorTable,
        gradients: TensorTable,
        states: Sequence[TensorTable],
        companions: TensorTable,
        *,
        lr_factor: Tensor,
        loss_scale: Tensor,
        found_nonfinite: Tensor,
    ) -> None:
        """Updates parameters, states and companions with lr = the tensor's lr x `lr_factor`.

        Gradients carry the factor `loss_scale`; if `found_nonfinite` is not 0, nothing is written. The three are fp32
        scalars on the device.

        Raises:
            ValueError: a table has the wrong number of tensors, a state is neither fp32 nor uint8, or a parameter is
                neither fp32 nor the high word of a split one.
        """
        tables = [parameters, gradients, *states, companions]
        for table in tables:
            if table.num_tensors != self._num_tensors:
                raise ValueError(f"a table of {table.num_tensors} tensors: must be of {self._num_tensors}")
        words = {torch.bfloat16} if torch.int16 in companions.dtypes else set()
        kept = frozenset().union(*(state.dtypes for state in states)) - {torch.uint8} | (parameters.dtypes - words)
        if not kept <= {torch.float32}:
            names = ", ".join(sorted(map(str, kept)))
            raise ValueError(f"parameters or optimizer state are {names}: must be torch.float32")
        by = Scalars(lr_factor, loss_scale, found_nonfinite)
        if self._chunks is None or self._chunks.num_chunks:
            self._run(self._chunks, tables, by)

    @abstractmethod
    def _run(self, chunks: Chunks | None, tables: Sequence[TensorTable], by: Scalars) -> None:
        """Launches the kernels on the chunks; computes the reference if `chunks` is None."""

    def _upload(self, rows: Sequence[Sequence[float]]) -> None:
        """Copies the rows to the device if they have changed."""
        values = [[float(value) for value in row] for row in rows]
        if values != self._last:
            upload(torch.tensor(values, dtype=torch.float64).float(), self.rows)
            self._last = values


class SgdStep(_Step):
    """torch.optim.SGD (dampening 0) with momentum, Nesterov and L2 weight decay, each with its own value per tensor.

    The only state is the momentum buffers, initially zeros; those of tensors without momentum are absent.
    """

    _NUM_ROWS = 4

    def set(
        self,
        *,
        lr: Sequence[float],
        weight_decay: Sequence[float],
        momentum: Sequence[float],
        nesterov: Sequence[bool],
    ) -> None:
        """Uploads the values, one per tensor, if they have changed; does not wait for the device."""
        self._upload([lr, weight_decay, momentum, nesterov])

    def _run(self, chunks: Chunks | None, tables: Sequence[TensorTable], by: Scalars) -> None:
        if chunks is None:
            reference.sgd(*(table.tensors for table in tables), rows=self.rows, by=by)
            return
        from triaccel_ray.kernels.optimizer_step.triton import launch_sgd

        launch_sgd(chunks, tables, rows=self.rows, by=by)


class AdamWStep(_Step):
    """torch.optim.AdamW, or Adam (L2 weight decay), by a flag per tensor; betas and eps per tensor; no amsgrad.

    States are exp_avg, exp_avg_sq and the step counts: one fp32 scalar per parameter, on the device, as `state["step"]`
    is in PyTorch's capturable and fused implementations. Skipped steps do not count. A tensor whose state is absent is
    not changed.
    """

    _NUM_ROWS = 10

    def __init__(self, sizes: Sequence[int], device: torch.device, *, kernel: bool | None = None) -> None:
        """Prepares for tensors of `sizes` elements; `kernel` as for `SgdStep`."""
        super().__init__(sizes, device, kernel=kernel)
        self._corrections = torch.empty(2, len(sizes), device=device)

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
        """Uploads the values, one per tensor, if they have changed; does not wait for the device.

        `decoupled` weight decay shrinks the parameter (AdamW); otherwise it is added to the gradient (Adam).
        """
        self._upload([lr, weight_decay, *_beta_rows(beta1), *_beta_rows(beta2), eps, decoupled])

    def _run(self, chunks: Chunks | None, tables: Sequence[TensorTable], by: Scalars) -> None:
        if chunks is None:
            reference.adamw(*(table.tensors for table in tables), rows=self.rows, by=by)
            return
        from triaccel_ray.kernels.optimizer_step.triton import launch_adamw

        launch_adamw(chunks, tables, rows=self.rows, corrections=self._corrections, by=by)


def _beta_rows(betas: Sequence[float]) -> list[Sequence[float]]:
    """Returns beta, 1 - beta and log beta, computed in fp64: 1 - 0.999 in fp32 is off by 5e-5."""
    return [betas, [1.0 - beta for beta in betas], [math.log(beta) if beta else -math.inf for beta in betas]]
