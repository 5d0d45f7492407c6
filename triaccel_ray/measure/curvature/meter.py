"""The instrument that the control loop keeps: measures one model again and again, at the least cost to the host."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from triaccel_ray.config import CurvatureConfig
from triaccel_ray.cuda.capture_checks import watched
from triaccel_ray.cuda.graphs import GraphPool
from triaccel_ray.cuda.out_of_memory import first_line, is_out_of_memory
from triaccel_ray.cuda.random_states import preserved_random_states
from triaccel_ray.measure.curvature.hessian import BlockPower
from triaccel_ray.measure.curvature.objective import Limits, Objective, measuring
from triaccel_ray.measure.curvature.recording import Recording, method_of
from triaccel_ray.measure.curvature.spectrum import CurvatureEstimate, SpectrumShape
from triaccel_ray.model.layers import Layer, Loss
from triaccel_ray.model.pytree import map_tensors

Results = tuple[tuple[Tensor, ...], SpectrumShape]
_LEAST_BUDGET = 32 * 2**20
"""Below it chunks cost more than they save: the allocator's own segments are as large."""


class Stage(Enum):
    """What the next measurement of the same shapes will be."""

    EXPLORE = "eager; finds out which dimensions are samples, how each layer can be measured"
    WATCH = "eager; finds out what a replay could not do again"
    CAPTURE = "captured, with the memory that other graphs of the pool leave free, and replayed"
    CAPTURE_ALONE = "captured once more after that memory was too little, with no other graph beside it"
    REPLAY = "a replay"
    EAGER = "eager, like all that follow"


class CurvatureMeter:
    """Measures the largest eigenvalues of each layer's diagonal curvature block (Tri-Accel, section 3.2).

    - `hessian`: of the Hessian of the mean loss, largest in magnitude, signed, by the paper's power iteration on
      several vectors at once (`BlockPower`): 20 iterations the first time, 5 from then on, from the last vectors.
    - `ggn`: of the generalised Gauss-Newton block, all k at once, exact for this batch. In piecewise-linear networks
      the same as the Hessian's.
    - `fisher`: of the empirical Fisher block, from one backward pass; with the first two moments of the gradient.

    The model is measured in eval mode without autocast and left as it was found, whether it succeeds or raises; hooks
    that others have put on parameter tensors may see gradients pass. For fisher and ggn on a GPU the forward pass is
    made without TF32 and what follows it with TF32 (`tensor_cores`), whatever PyTorch's flags say.

    On a GPU the first measurement explores, the second is watched, the third is captured as a CUDA graph, which it and
    the later ones replay: the host then neither works nor waits. Where memory for that is too little, all graphs of the
    pool are dropped, it measures eagerly, and captures the next time without others beside it. What cannot be captured
    stays as it is, and `not_captured_because` says why. Everything is found out anew when the shapes of the samples
    change, or when weights move.
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
        capture: bool = True,
    ) -> None:
        """Borrows the model, on `device` like the samples; measures nothing yet.

        Graphs share the memory of `pool` with those of others, captured on the same stream, of which none may run
        during a measurement; None: memory of its own, held until `release`.
        """
        self._model, self._loss, self._device = model, loss, device
        self._pool = pool or GraphPool(device)
        self._pool.on_release(self.release)
        self._may_capture = capture and self._pool.can_capture
        self._name = config.method
        self._method = method_of(layers, config.method, config.top_k)
        self.off_because = ""
        """Why curvature is not measured; empty while it is. `dry_run` and `switch_off` set it."""
        self._num_samples = config.num_samples
        self._largest_chunk: int | None = None
        self._limits: Limits | None = None
        self._signature: Any = None
        self._recording: Recording | None = None
        self.not_captured_because = ""
        """Why measurements are not replayed from a CUDA graph; empty when they are."""
        self._forget()

    @property
    def is_captured(self) -> bool:
        """Whether the next measurement of the same shapes is a replay."""
        return self._stage is Stage.REPLAY

    @property
    def needs_room(self) -> bool:
        """Whether the next measurement of the same shapes needs memory that graphs of others would withhold."""
        return self._stage not in (Stage.CAPTURE, Stage.REPLAY)

    @property
    def stays_eager(self) -> bool:
        """Whether measurements that were to be captured never will; `not_captured_because` says why."""
        return self._may_capture and self._stage is Stage.EAGER

    @property
    def fallbacks(self) -> Mapping[str, str]:
        """Names of the layers that take one pass of the whole model per sample, and why; known after the first."""
        return self._method.fallbacks

    def dry_run(self, inputs: Any, targets: Any) -> None:
        """Measures these few samples for its errors alone, and switches curvature off where there is one.

        Random states are put back. A lack of memory is left to `measure`.
        """
        try:
            objective = self._objective(inputs, targets)
            objective.require_samples(self._name)
            with preserved_random_states(), self._measuring():
                self._measure_apart(objective)
        except Exception as error:  # of the model's code or the loss's, run as training never runs it
            if not is_out_of_memory(error):
                self.switch_off(error)

    def switch_off(self, error: Exception) -> None:
        """Gives up measuring for this reason, and what was kept for it."""
        self.off_because = f"{self._name} cannot be measured: {first_line(error)}"
        self._method.abandon()
        self._forget()

    def measure(
        self, inputs: Any, targets: Any, generator: torch.Generator, *, budget_bytes: int | None = None
    ) -> CurvatureEstimate:
        """Returns the measurement on these samples, still on the device.

        Waits for the device at the first three calls at most, where a capture fails, and where a model itself has the
        host wait.

        Args:
            inputs: the samples along dimension 0 of every tensor.
            targets: likewise.
            generator: draws the starting vectors of the first `hessian` measurement.
            budget_bytes: what the measurement's tensors may take at their peak. Looked at when shapes are new and
                after memory has run out; samples then pass in chunks. None: no bound.

        Raises:
            ValueError: fewer than 2 samples for fisher and ggn, a loss that is no scalar, outputs that ggn refuses
                (`ggn_head`), or inputs and targets that disagree about the number of samples.
            torch.OutOfMemoryError: also what the measurement itself does not survive; `release` makes room.
        """
        signature = self._signature_of(inputs, targets)
        if signature != self._signature:
            self._forget()
            self._signature = signature
        if self._limits is None:
            self._limits = self._limits_within(budget_bytes, self._objective(inputs, targets))
        num_iterations = self._method.begin(generator)
        if self._recording is None:
            objective = self._objective(inputs, targets)
            objective.require_samples(self._name)
            with self._measuring():
                self._capture(objective, num_iterations)
                if self._recording is None:
                    results, shape = self._measure_eagerly(objective, num_iterations)
                    return CurvatureEstimate.of(results, shape, self._method.fallbacks)
        results = self._recording.replay(inputs, targets, num_iterations)
        return CurvatureEstimate.of(results, self._recording.shape, self._method.fallbacks)

    def release(self) -> None:
        """Drops the graphs, so that their memory can be given back; the next measurement captures anew."""
        if self._stage is Stage.REPLAY:
            self._enter(Stage.CAPTURE, "released")

    def state_dict(self) -> dict[str, Any]:
        """Returns why curvature is off, and the vectors from which `hessian` goes on, k n elements a layer."""
        vectors = self._method.vectors
        copies = None if vectors is None else [vector.clone() for vector in vectors]
        return {"vectors": copies, "off_because": self.off_because}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from where `state_dict` was taken."""
        self.off_because = state["off_because"]
        if not isinstance(self._method, BlockPower) or state["vectors"] is None:
            return
        vectors = [vector.to(self._device) for vector in state["vectors"]]
        if self._method.vectors is None:
            self._method.vectors = vectors
        for mine, saved in zip(self._method.vectors, vectors, strict=True):
            mine.copy_(saved)

    def _enter(self, stage: Stage, because: str = "", recording: Recording | None = None) -> None:
        """Goes to another stage; the only place where it changes, and with it the recording and the reason."""
        if self._recording is not None:
            self._pool.synchronize()  # it may be replaying
        self._stage, self._recording, self.not_captured_because = stage, recording, because

    def _forget(self) -> None:
        """Drops what was found out about other shapes; the structure of the model's course holds for all."""
        self._limits = None
        if self._may_capture:
            self._enter(Stage.EXPLORE, "nothing has been measured")
        else:
            self._enter(Stage.EAGER, "capture is off" if self._pool.can_capture else "there is no CUDA device")

    def _capture(self, objective: Objective, num_iterations: int) -> None:
        """Captures the measurement, without making it; does nothing where it is not yet time for that, or it fails."""
        if self._stage not in (Stage.CAPTURE, Stage.CAPTURE_ALONE):
            return
        try:
            inputs, targets = (map_tensors(torch.clone, part) for part in (objective.inputs, objective.targets))
            recording = Recording(self._method, self._objective(inputs, targets), num_iterations, self._pool)
        except Exception as error:  # CUDA, PyTorch and the model's own code may all refuse, each in its way
            reason, is_too_large = first_line(error), is_out_of_memory(error)
        else:
            self._enter(Stage.REPLAY, recording=recording)
            return
        # Outside the handler: the traceback no longer holds the attempt's tensors.
        inputs = targets = None
        self._method.abandon()
        self._pool.release()
        self._enter(Stage.CAPTURE_ALONE if is_too_large else Stage.EAGER, reason)

    def _measure_eagerly(self, objective: Objective, num_iterations: int) -> Results:
        """Measures without a graph, and goes on to the stage that what was seen allows.

        Where memory runs out, the next measurement takes half as many samples at once.
        """
        obstacles: list[str] = []
        is_watched = self._stage is Stage.WATCH
        try:
            with watched(obstacles, self._device) if is_watched else contextlib.nullcontext():
                results = self._run(objective, num_iterations)
        except BaseException as error:
            self._method.abandon()
            if is_out_of_memory(error):
                chunk = objective.limits.chunk_samples or objective.num_samples
                self._largest_chunk, self._limits = max(1, chunk // 2), None
            raise
        obstacle = self._method.not_capturable_because or "; ".join(obstacles)
        if obstacle and self._stage is not Stage.EAGER:
            self._enter(Stage.EAGER, obstacle)
        elif self._stage is Stage.EXPLORE:
            self._enter(Stage.WATCH, "only one measurement has been made")
        elif self._stage is Stage.WATCH:
            self._enter(Stage.CAPTURE, "only two measurements have been made")
        return results

    def _run(self, objective: Objective, num_iterations: int) -> Results:
        """Measures; finds the structure anew if what is known of it no longer works."""
        if not self._prepare_as_before(objective):
            self._method.prepare(objective)
        for _ in range(num_iterations):
            self._method.advance()
        return self._method.finish()

    def _prepare_as_before(self, objective: Objective) -> bool:
        """Prepares by what is known of the model's structure; returns False, knowing nothing, if that fails."""
        if self._method.structure is None:
            return False
        try:
            self._method.prepare(objective)
        except Exception as error:  # what a module raised that worked before, or a StructureChangedError
            if is_out_of_memory(error):
                raise
        else:
            return True
        # What follows runs outside the handler, whose traceback holds the attempt's activations.
        self._method.structure = None
        if self._stage is not Stage.EAGER:
            self._enter(Stage.EXPLORE, "the model has taken another course")
        return False

    def _limits_within(self, budget_bytes: int | None, objective: Objective) -> Limits:
        """Returns how many samples may pass at once."""
        b = objective.num_samples
        if budget_bytes is None or b <= 4:
            size = self._largest_chunk
            return Limits(chunk_samples=None if size is None or size >= b else size)
        peaks = [self._peak_bytes(objective.part(slice(0, count))) for count in (2, 4)]
        return Limits.within(
            max(budget_bytes, _LEAST_BUDGET),
            peaks,
            b,
            most=self._largest_chunk or b,
            kept_bytes=self._method.kept_bytes,
        )

    def _peak_bytes(self, objective: Objective) -> int:
        """Returns the bytes that measuring these samples takes at its peak, by the allocator on a GPU.

        Elsewhere twice what the forward pass keeps: the gradients that the backward pass holds are about as large.
        """
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with self._measuring():
            if self._device.type != "cuda":
                with saved_tensors_hooks(pack, lambda tensor: tensor):
                    objective.value(objective.outputs())
                return 2 * sum(kept.values())
            self._measure_apart(objective)  # libraries take workspaces at their first call
            torch.cuda.reset_peak_memory_stats(self._device)
            before = torch.cuda.memory_allocated(self._device)
            self._measure_apart(objective)
            return torch.cuda.max_memory_allocated(self._device) - before

    def _measure_apart(self, objective: Objective) -> None:
        """Makes a measurement with one iteration at most, of which nothing is kept but the model's structure."""
        vectors, self._method.vectors = self._method.vectors, None
        try:
            num_iterations = self._method.begin(torch.Generator().manual_seed(0))
            self._run(objective, min(num_iterations, 1))
        finally:
            self._method.abandon()
            self._method.vectors = vectors

    def _objective(self, inputs: Any, targets: Any) -> Objective:
        return Objective(
            model=self._model,
            loss=self._loss,
            inputs=inputs,
            targets=targets,
            planned_samples=self._num_samples,
            limits=self._limits or Limits(),
            allow_tf32=self._device.type == "cuda",
        )

    def _measuring(self) -> contextlib.AbstractContextManager[None]:
        return measuring(self._model, strict_fp32=self._name != "hessian")

    def _signature_of(self, inputs: Any, targets: Any) -> Any:
        """Returns what a structure and a recording depend on: shapes, other inputs, and where the weights are."""
        shapes = map_tensors(lambda tensor: (tensor.shape, tensor.dtype), (inputs, targets))
        return shapes, [tensor.data_ptr() for tensor in (*self._model.parameters(), *self._model.buffers())]
