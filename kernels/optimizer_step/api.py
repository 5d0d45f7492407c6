"""SGD and AdamW steps over all tensors of a model at once, steered by scalars that live on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from triaccel_ray.kernels.multi_tensor import Chunks, TensorTable
from triaccel_ray.kernels.optimizer_step import reference
from triaccel_ray.kernels.optimizer_step.hyperparameters import AdamWHyperparameters, SgdHyperparameters
from triaccel_ray.kernels.optimizer_step.reference import Scalars

__all__ = ["AdamWHyperparameters", "AdamWStep", "SgdHyperparameters", "SgdStep"]


class _Step:
    """What the steps have in common.

    Parameters and optimizer state are fp32; gradients and copies fp32, fp16 or bf16, tensor by tensor; all tensors of
    one index have the same dense strides (`have_equal_dense_strides`), whatever they are. A tensor whose parameter or
    gradient is absent stays untouched. A copy, where present, receives the new value of its parameter, rounded.

    Nothing waits for the device, and steps can be captured in a CUDA graph, whose replays read tables, hyperparameters
    and scalars anew; step once before a capture, with empty tables if need be: the kernels are compiled then.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device, *, kernel: bool | None = None) -> None:
        """Prepares tensors of `sizes` elements.

        `kernel` runs the Triton kernels: by default on a GPU; on a CPU they need Triton's interpreter.
        """
        self._num_tensors = len(sizes)
        self._chunks: Chunks | None = None
        device = torch.device(device)
        runs_kernel = device.type == "cuda" if kernel is None else kernel
        if runs_kernel:
            from triaccel_ray.kernels.optimizer_step.triton import CHUNK_SIZE  # imports triton

            self._chunks = Chunks(sizes, device, CHUNK_SIZE)

    def _check(self, fp32: Sequence[TensorTable], any_dtype: Sequence[TensorTable], scalars: Scalars) -> None:
        for table in (*fp32, *any_dtype):
            if table.num_tensors != self._num_tensors:
                raise ValueError(f"a table of {table.num_tensors} tensors: must be of {self._num_tensors}")
        for table in fp32:
            if not table.dtypes <= {torch.float32}:
                names = ", ".join(sorted(map(str, table.dtypes)))
                raise ValueError(f"parameters or optimizer state are {names}: must be torch.float32")
        for name, scalar in vars(scalars).items():
            if scalar.dtype is not torch.float32 or scalar.numel() != 1:
                raise ValueError(f"{name} is {scalar.dtype} {list(scalar.shape)}: must be one float32")


class SgdStep(_Step):
    """torch.optim.SGD (dampening 0): momentum, Nesterov, L2 weight decay, each with its own value per tensor."""

    @torch.no_grad()
    def step(
        self,
        parameters: TensorTable,
        gradients: TensorTable,
        momenta: TensorTable,
        copies: TensorTable,
        hyperparameters: SgdHyperparameters,
        *,
        lr_factor: Tensor,
        loss_scale: Tensor,
        found_nonfinite: Tensor,
    ) -> None:
        """Updates parameters, momenta and copies with lr = the tensor's lr x `lr_factor`.

        `momenta` begin as zeros; absent ones belong to tensors without momentum. Gradients carry the factor
        `loss_scale`; where `found_nonfinite` is not 0, nothing is written. The three are fp32 scalars on the device.

        Raises:
            ValueError: a table of another number of tensors, parameters or momenta that are not fp32, or a scalar that
                is not one fp32 number.
        """
        by = Scalars(lr_factor, loss_scale, found_nonfinite)
        self._check([parameters, momenta], [gradients, copies], by)
        if self._chunks is None:
            reference.sgd(
                parameters.tensors, gradients.tensors, momenta.tensors, copies.tensors, hyperparameters.table, by
            )
        elif self._chunks.num_chunks:
            from triaccel_ray.kernels.optimizer_step.triton import launch_sgd

            launch_sgd(self._chunks, parameters, gradients, momenta, copies, hyperparameters.table, by)


class AdamWStep(_Step):
    """torch.optim.AdamW, or Adam (L2 weight decay), by a flag per tensor; betas and eps per tensor; no amsgrad."""

    def __init__(self, sizes: Sequence[int], device: torch.device, *, kernel: bool | None = None) -> None:
        """Prepares tensors of `sizes` elements; `kernel` as for `SgdStep`."""
        super().__init__(sizes, device, kernel=kernel)
        self._corrections = torch.empty(2, len(sizes), device=device)

    @torch.no_grad()
    def step(
        self,
        parameters: TensorTable,
        gradients: TensorTable,
        moments: tuple[TensorTable, TensorTable],
        steps: TensorTable,
        copies: TensorTable,
        hyperparameters: AdamWHyperparameters,
        *,
        lr_factor: Tensor,
        loss_scale: Tensor,
        found_nonfinite: Tensor,
    ) -> None:
        """Updates parameters, moments (exp_avg, exp_avg_sq), step counts and copies; the rest as `SgdStep.step`.

        `steps` names one fp32 scalar per parameter, on the device, as PyTorch's capturable and fused implementations
        keep them in `state["step"]`; they count the steps made, not those skipped. A tensor whose state is absent stays
        untouched.

        Raises:
            ValueError: as `SgdStep.step`.
        """
        by = Scalars(lr_factor, loss_scale, found_nonfinite)
        self._check([parameters, *moments, steps], [gradients, copies], by)
        if self._chunks is None:
            first, second = moments
            reference.adamw(
                parameters.tensors, gradients.tensors, (first.tensors, second.tensors), steps.tensors, copies.tensors,
                hyperparameters.table, by,
            )  # fmt: skip
        elif self._chunks.num_chunks:
            from triaccel_ray.kernels.optimizer_step.triton import launch_adamw

            launch_adamw(
                self._chunks, parameters, gradients, moments, steps, copies, hyperparameters.table,
                self._corrections, by,
            )  # fmt: skip
