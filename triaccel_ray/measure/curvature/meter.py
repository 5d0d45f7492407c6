"""The instrument that the control loop keeps: measures one model again and again, at the least cost to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from triaccel_ray.config import CurvatureConfig
from triaccel_ray.graphs import GraphPool
from triaccel_ray.layers import Layer, Loss
from triaccel_ray.measure.curvature.block_power import BlockPower
from triaccel_ray.measure.curvature.estimate import CurvatureEstimate
from triaccel_ray.measure.curvature.gram_method import GramMethod
from triaccel_ray.measure.curvature.objective import Objective, measuring
from triaccel_ray.measure.curvature.replay import Method, Recording, no_waiting
from triaccel_ray.measure.curvature.spectrum import SpectrumShape
from triaccel_ray.out_of_memory import first_line, is_out_of_memory
from triaccel_ray.structure import map_tensors


class CurvatureMeter:
    """Measures the largest eigenvalues of each layer's curvature block, as `top_eigenvalues` does.

    The first measurement finds out how: which dimensions are samples, how each layer can be measured. On a GPU the
    second finds out whether the host ever waits, and the third is captured as a CUDA graph, which it and the later ones
    replay: the host then neither works nor waits. A graph that is captured without a measurement beside it takes the
    memory that other graphs of the pool leave free, which an eager measurement could not. What cannot be captured stays
    as it is, and `not_captured_because` says why. Everything is found out anew when the shapes of the samples change,
    or when weights move.

    Two things differ from `top_eigenvalues`. For fisher and ggn on a GPU, what follows the forward pass uses TF32 (see
    `tensor_cores`), whatever PyTorch's flags say; they are as before afterwards. And `hessian` is a block iteration,
    all k vectors at once, which goes on from the vectors of the measurement before: 20 iterations the first time, 5
    from then on.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        layers: Sequence[Layer],
        config: CurvatureConfig,
        *,
        device: torch.device,
        pool: GraphPool | None = None,
    ) -> None:
        """Borrows the model; measures nothing yet.

        Args:
            model: its parameters on `device`; forward functions put on its modules count as they are at the capture.
            loss: maps (outputs, targets) to the mean over samples, a scalar.
            layers: whose blocks to measure; at least one.
            config: which method, and how many eigenvalues.
            device: where samples and parameters are.
            pool: memory to share with other graphs, captured on the same stream, of which none may run during a
                measurement; None: memory of its own, held until `release`.
        """
        self._model, self._loss, self._device = model, loss, device
        self._pool = pool or GraphPool(device)
        if pool is not None:
            pool.on_release(self.release)
        self._name = config.method
        self._method: GramMethod | BlockPower
        if config.method == "hessian":
            self._method = BlockPower(layers, config.top_k)
        else:
            self._method = GramMethod(layers, config.method, config.top_k)
        self._signature: Any = None
        self._recording: Recording | None = None
        self._has_measured = self._is_checked = False
        self._tries_capture = device.type == "cuda"
        self.not_captured_because = "nothing has been measured" if self._tries_capture else "there is no CUDA device"
        """Why measurements are not replayed from a CUDA graph; empty when they are."""

    @property
    def is_captured(self) -> bool:
        """Whether the next measurement of the same shapes is a replay."""
        return self._recording is not None

    @property
    def is_eager_next(self) -> bool:
        """Whether the next measurement of the same shapes needs memory of its own, beside that of captured graphs."""
        return self._recording is None and not self._is_checked

    @property
    def stays_eager(self) -> bool:
        """Whether, on a GPU, measurements will never be captured; `not_captured_because` says why."""
        return self._device.type == "cuda" and not self._tries_capture

    def measure(self, inputs: Any, targets: Any, generator: torch.Generator) -> CurvatureEstimate:
        """Returns the measurement on these samples, still on the device.

        Waits for the device at the first three calls at most, and where a model itself has the host wait.

        Args:
            inputs: the samples along dimension 0 of every tensor, on the device.
            targets: likewise.
            generator: draws the starting vectors of the first `hessian` measurement.

        Raises:
            ValueError: as `top_eigenvalues`.
            torch.OutOfMemoryError: also what the measurement itself does not survive; `release` makes room.
        """
        signature = self._signature_of(inputs, targets)
        if signature != self._signature:
            self._forget()
            self._signature = signature
        num_iterations = self._method.begin(generator)
        if self._recording is not None:
            return self._estimate(self._recording.replay(inputs, targets, num_iterations), self._recording.shape)
        objective = self._objective(inputs, targets)
        objective.require_samples(self._name)
        with measuring(self._model, strict_fp32=self._name != "hessian"):
            recording = self._capture(objective, num_iterations) if self._is_checked else None
            if recording is not None:
                self._recording = recording
                results, shape = recording.replay(inputs, targets, num_iterations), recording.shape
            elif self._has_measured and self._tries_capture:
                results, shape = self._check(objective, num_iterations)
            else:
                results, shape = self._run(objective, num_iterations)
        self._has_measured = True
        return self._estimate(results, shape)

    def release(self) -> None:
        """Drops the graphs, so that their memory can be given back; the next measurement captures anew."""
        self._recording = None
        if self._tries_capture:
            self.not_captured_because = "released"

    def state_dict(self) -> dict[str, Any]:
        """Returns the vectors from which `hessian` goes on, k n elements a layer; nothing for the other methods."""
        vectors = self._method.vectors if isinstance(self._method, BlockPower) else None
        return {"vectors": None if vectors is None else [vector.clone() for vector in vectors]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from where `state_dict` was taken."""
        if not isinstance(self._method, BlockPower) or state["vectors"] is None:
            return
        vectors = [vector.to(self._device) for vector in state["vectors"]]
        if self._method.vectors is None:
            self._method.vectors = vectors
        for mine, saved in zip(self._method.vectors, vectors, strict=True):
            mine.copy_(saved)

    def _objective(self, inputs: Any, targets: Any) -> Objective:
        return Objective(
            model=self._model, loss=self._loss, inputs=inputs, targets=targets, allow_tf32=self._device.type == "cuda"
        )

    def _run(self, objective: Objective, num_iterations: int) -> tuple[tuple[Tensor, ...], SpectrumShape]:
        """Measures without a graph; finds the structure anew if what is known of it no longer works."""
        method: Method = self._method
        try:
            method.prepare(objective)
        except Exception as error:  # what a module raised that worked before, or a StructureChangedError
            if is_out_of_memory(error):
                raise
            if not isinstance(self._method, GramMethod) or self._method.structure is None:
                raise
            self._method.structure = None
            method.prepare(objective)
        for _ in range(num_iterations):
            method.advance()
        if self._tries_capture and method.fallback_layers:
            self._stay_eager(f"layers {', '.join(method.fallback_layers)} take one pass of the model per sample")
        return method.finish()

    def _check(self, objective: Objective, num_iterations: int) -> tuple[tuple[Tensor, ...], SpectrumShape]:
        """Measures once more without a graph, and finds out whether the host ever waits."""
        try:
            with no_waiting():
                measured = self._run(objective, num_iterations)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            self._stay_eager(first_line(error))
            return self._run(objective, num_iterations)
        self._is_checked = self._tries_capture
        return measured

    def _capture(self, objective: Objective, num_iterations: int) -> Recording | None:
        """Returns the captured measurement, not yet made; None, and why, if that cannot be."""
        static = self._objective(
            map_tensors(torch.clone, objective.inputs), map_tensors(torch.clone, objective.targets)
        )
        try:
            recording = Recording(self._method, static, num_iterations, self._pool.handle)
        except Exception as error:  # CUDA, PyTorch and the model's own code may all refuse, each in its way
            self._method.abandon()
            if is_out_of_memory(error):
                self.not_captured_because = first_line(error)  # there may be room the next time
            else:
                self._stay_eager(first_line(error))
            return None
        self.not_captured_because = ""
        return recording

    def _estimate(self, results: tuple[Tensor, ...], shape: SpectrumShape) -> CurvatureEstimate:
        return CurvatureEstimate.of(results, shape, self._method.fallback_layers)

    def _stay_eager(self, reason: str) -> None:
        self._tries_capture = self._is_checked = False
        self.not_captured_because = reason

    def _forget(self) -> None:
        """Drops what was found out about other shapes."""
        self._recording, self._has_measured, self._is_checked = None, False, False
        if isinstance(self._method, GramMethod):
            self._method.structure = None

    def _signature_of(self, inputs: Any, targets: Any) -> Any:
        """Returns what a structure and a recording depend on: shapes, other inputs, and where the weights are."""
        shapes = map_tensors(lambda tensor: (tensor.shape, tensor.dtype), (inputs, targets))
        return shapes, [tensor.data_ptr() for tensor in (*self._model.parameters(), *self._model.buffers())]
