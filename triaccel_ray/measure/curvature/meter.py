"""Repeated curvature measurement of one model, captured as a CUDA graph so that the host does little work."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

from triaccel_ray.config import CurvatureConfig
from triaccel_ray.cuda.allocator import peak_of_tensors
from triaccel_ray.cuda.capture_checks import Obstacle, watched
from triaccel_ray.cuda.graphs import GraphPool
from triaccel_ray.cuda.out_of_memory import first_line, is_out_of_memory
from triaccel_ray.cuda.random_states import preserved_random_states
from triaccel_ray.measure.budget import Limits, Probe, limits_within, predicted_seconds
from triaccel_ray.measure.curvature.gram import GramMethod
from triaccel_ray.measure.curvature.hessian import BlockPower
from triaccel_ray.measure.curvature.objective import Method, Objective, measuring
from triaccel_ray.measure.curvature.spectrum import CurvatureEstimate
from triaccel_ray.measure.timing import synchronize
from triaccel_ray.model.layers import Layer, Loss, without_cudnn
from triaccel_ray.model.pytree import clone_tensors, copy_tensors, map_tensors

_MAX_CAPTURED_PASSES = 64
"""Most passes of the model in one CUDA graph; each adds a few thousand kernels."""


class Stage(Enum):
    """How the next measurement of samples of the same shapes runs."""

    EXPLORE = auto()
    """Eager; finds the batch dimensions and how each layer can be measured."""
    WATCH = auto()
    """Eager; looks for operations that a replay could not repeat, such as synchronization with the host."""
    CAPTURE = auto()
    """Captured in the memory that the pool's other graphs leave free, then replayed."""
    CAPTURE_ALONE = auto()
    """Captured with no other graph in the pool, after `CAPTURE` has run out of memory."""
    REPLAY = auto()
    EAGER = auto()
    """Eager, as are all later measurements of these shapes."""


class _Recording:
    """A measurement captured as a CUDA graph; it reads the weights in place, so that replays see their updates."""

    def __init__(self, measure: Callable[[Any, Any], CurvatureEstimate], samples: Any, pool: GraphPool) -> None:
        """Captures `measure` on copies of the samples; raises what `GraphPool.capture` raises."""
        self._samples = static = clone_tensors(samples)
        estimates: list[CurvatureEstimate] = []
        self._graph = pool.capture(lambda: estimates.append(measure(*static)))
        self._estimate = estimates[0]

    def replay(self, samples: Any) -> CurvatureEstimate:
        """Returns the measurement of new samples, copied out of the graph's memory, which other graphs may share."""
        copy_tensors(self._samples, samples)
        self._graph.replay()
        matrices, noise = self._estimate.matrices, self._estimate.noise
        return replace(self._estimate, matrices=matrices.clone(), noise=None if noise is None else noise.clone())


class CurvatureMeter:
    """Measures the largest eigenvalues of each layer's curvature block (Tri-Accel, section 3.2).

    - `hessian`: eigenvalues of the mean loss's Hessian, the largest in magnitude, signed. Uses the paper's power
      iteration on several vectors at once (`BlockPower`): 20 iterations at first, then 5 from the last vectors.
    - `ggn`: eigenvalues of the generalized Gauss-Newton block, all k at once, exact for this batch. In piecewise-linear
      networks they equal the Hessian's.
    - `fisher`: eigenvalues of the empirical Fisher block, and the gradient's first two moments, from one backward pass.

    The model is measured in eval mode without autocast, and restored afterwards. Hooks on parameter tensors may fire.
    For fisher and ggn on a GPU, all after the forward pass uses TF32 (`tensor_cores`), whatever PyTorch's flags say.

    On a GPU the first measurement explores the model, and the second checks whether it can be captured. The third
    captures a CUDA graph, which later ones replay (`Stage`). All of it starts over when shapes change or weights move.
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
        """Keeps a reference to the model, which is on `device` like the samples; measures nothing yet.

        Graphs share the memory of `pool` with other graphs captured on the same stream, none of which may run during a
        measurement. None creates a pool of its own, whose memory is held until `release`.
        """
        self._model, self._loss, self._device = model, loss, device
        self._pool = pool or GraphPool(device)
        self._pool.on_release(self.release)
        self._may_capture = capture and self._pool.can_capture
        self._name, self._num_samples = config.method, config.num_samples
        self._method: Method = (
            BlockPower(layers, config.top_k)
            if config.method == "hessian"
            else GramMethod(layers, config.method, config.top_k)
        )
        self.fallbacks: Mapping[str, str] = {}
        """Layer name -> why it takes one pass of the whole model per sample; known after the first measurement."""
        self.off_because = ""
        """Why curvature is not measured; empty while it is. `dry_run` and `switch_off` set it."""
        self.not_captured_because = ""
        """Why measurements cannot be replayed from a CUDA graph; empty while no reason is known."""
        self._bytes_of_two = 0
        """Peak bytes of the dry run on a GPU, which explores the model with two samples; 0 if not called."""
        self._doubts: list[str] = []  # what a captured measurement may not repeat, as found by the watched one
        self._largest_chunk: int | None = None
        self._limits: Limits | None = None
        self._signature: Any = None
        self._recording: _Recording | None = None
        self._forget()

    @property
    def is_captured(self) -> bool:
        """Whether the next measurement of the same shapes replays a CUDA graph."""
        return self._stage is Stage.REPLAY

    @property
    def needs_room(self) -> bool:
        """Whether the next measurement of the same shapes needs the memory that other graphs of the pool hold."""
        return self._stage not in (Stage.CAPTURE, Stage.REPLAY)

    @property
    def stays_eager(self) -> bool:
        """Whether capture is enabled but impossible; `not_captured_because` says why."""
        return self._may_capture and self._stage is Stage.EAGER

    def dry_run(self, inputs: Any, targets: Any) -> None:
        """Measures a few samples one by one, or else together; turns curvature off if both fail, but not for memory."""
        objective = self._objective(inputs, targets)
        for limits in (Limits(chunk_samples=1, kept_bytes=sys.maxsize), objective.limits):
            try:
                objective.require_samples(self._name)
                with preserved_random_states(), peak_of_tensors(self._device) as peak:
                    self._measure_apart(replace(objective, limits=limits))
                self._bytes_of_two = peak[0]
                return
            except Exception as error:  # from the model or the loss, which run here as they never do in training
                if is_out_of_memory(error):
                    self._bytes_of_two = sys.maxsize
                    return
                if limits is objective.limits:
                    self.switch_off(error)

    def switch_off(self, error: Exception) -> None:
        """Turns curvature off because of `error`, and drops the captured graph."""
        self.off_because = f"{self._name} cannot be measured: {first_line(error)}"
        self._forget()

    def prepare(self, inputs: Any, targets: Any, *, budget_bytes: int | None = None) -> float | None:
        """Sets chunk sizes that fit samples of these shapes into the budget; returns the estimated seconds to measure.

        Takes and raises what `measure` does. Returns None if the sizes are set already, or if nothing was probed.
        """
        shapes = map_tensors(lambda tensor: (tensor.shape, tensor.dtype), (inputs, targets))
        # A graph reads the weights at the addresses that they had when it was captured.
        signature = shapes, [tensor.data_ptr() for tensor in (*self._model.parameters(), *self._model.buffers())]
        if signature != self._signature:
            self._forget()
            self._signature = signature
        if self._limits is not None:
            return None
        objective = self._objective(inputs, targets)
        objective.require_samples(self._name)
        try:
            self._limits, probes = limits_within(
                budget_bytes,
                lambda size, limits: self._probe(replace(objective.part(slice(0, size)), limits=limits)),
                bytes_of_two=self._bytes_of_two,
                num_samples=objective.num_samples,
                most_samples=min(self._largest_chunk or objective.num_samples, objective.num_samples),
                kept_bytes=self._method.kept_bytes,
            )
        except Exception as error:
            if is_out_of_memory(error):
                self._bytes_of_two = sys.maxsize
            raise
        if not probes:
            return None
        objective = replace(objective, limits=self._limits)
        at_once, num_passes = objective.parts()[0].num_samples, self._method.num_passes(objective)
        return predicted_seconds(probes, samples_at_once=at_once, num_passes=num_passes)

    def measure(
        self, inputs: Any, targets: Any, generator: torch.Generator, *, budget_bytes: int | None = None
    ) -> CurvatureEstimate:
        """Returns the measurement on these samples, still on the device.

        Waits for the device in the first three calls at most, after a failed capture, and if the model synchronizes.

        Args:
            inputs: the samples along dimension 0 of every tensor.
            targets: likewise.
            generator: draws the starting vectors of the first `hessian` measurement.
            budget_bytes: peak bytes that the measurement's tensors may take; samples pass in chunks to stay within
                it. Used when shapes are new and after memory has run out. None: no bound.

        Raises:
            ValueError: fewer than 2 samples for fisher and ggn, a loss that is no scalar, outputs that `ggn_head`
                refuses, or inputs and targets of different numbers of samples.
            torch.OutOfMemoryError: of an eager measurement; `release` makes room.
        """
        self.prepare(inputs, targets, budget_bytes=budget_bytes)
        if self._stage in (Stage.CAPTURE, Stage.CAPTURE_ALONE):
            self._capture((inputs, targets), generator)
        if self._recording is not None:
            return self._recording.replay((inputs, targets))
        estimate = self._measure_eagerly(self._objective(inputs, targets), generator)
        self.fallbacks = estimate.fallbacks
        return estimate

    def release(self) -> None:
        """Drops the captured graph, so that its memory can be freed; the next measurement captures again."""
        if self._stage is Stage.REPLAY:
            self._enter(Stage.CAPTURE, "released")

    def state_dict(self) -> dict[str, Any]:
        """Returns why curvature is off, and the starting vectors of the next `hessian` measurement (`BlockPower`)."""
        vectors = self._method.vectors
        copies = None if vectors is None else [vector.clone() for vector in vectors]
        return {"vectors": copies, "off_because": self.off_because}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned; what cannot be measured here stays off."""
        self.off_because = self.off_because or state["off_because"]
        if state["vectors"] is not None:
            self._method.vectors = [vector.to(self._device) for vector in state["vectors"]]
            self._forget()  # a graph would start from the vectors that these replace

    def _enter(self, stage: Stage, because: str = "", recording: _Recording | None = None) -> None:
        """Changes the stage, the recording and the reason; nothing else changes them."""
        if self._recording is not None:
            self._pool.synchronize()  # it may be replaying
        self._stage, self._recording, self.not_captured_because = stage, recording, because

    def _forget(self) -> None:
        """Drops the limits and the graph of the last shapes; the structure of the model holds for all shapes."""
        self._limits = None
        if self._may_capture:
            self._enter(Stage.EXPLORE)
        else:
            self._enter(Stage.EAGER, "capture is off" if self._pool.can_capture else "there is no CUDA device")

    def _capture(self, samples: tuple[Any, Any], generator: torch.Generator) -> None:
        """Captures the measurement without running it; if that fails, the caller has to measure eagerly."""

        def measure(inputs: Any, targets: Any) -> CurvatureEstimate:
            return self._method.measure(self._objective(inputs, targets), generator)

        try:
            with self._measuring():
                recording = _Recording(measure, samples, self._pool)
        except Exception as error:  # CUDA, PyTorch and the model may each raise errors of their own
            is_too_large = is_out_of_memory(error)
            reason = "; ".join([*([] if is_too_large else self._doubts), first_line(error)])
        else:
            self._enter(Stage.REPLAY, recording=recording)
            return
        # Outside the handler: the traceback no longer holds the attempt's tensors.
        self._pool.release()
        self._enter(Stage.CAPTURE_ALONE if is_too_large else Stage.EAGER, reason)

    def _measure_eagerly(self, objective: Objective, generator: torch.Generator) -> CurvatureEstimate:
        """Measures without a graph, then moves to the next stage, or to `EAGER` if an obstacle to capture was found.

        If memory runs out, the next measurement passes half as many samples at once.
        """
        found: list[Obstacle] = []
        is_watched = self._stage is Stage.WATCH
        try:
            with watched(found, self._device) if is_watched else contextlib.nullcontext():
                estimate = self._run(objective, generator)
        except BaseException as error:
            if is_out_of_memory(error):
                chunk = objective.limits.chunk_samples or objective.num_samples
                self._largest_chunk, self._limits = max(1, chunk // 2), None
            raise
        if is_watched:
            self._doubts = [obstacle.text for obstacle in found]
        obstacles = [obstacle.text for obstacle in found if obstacle.is_certain]
        num_passes = self._method.num_passes(objective)
        if num_passes > _MAX_CAPTURED_PASSES:
            obstacles.append(f"a graph of {num_passes} passes of the model would take too much memory")
        obstacle = self._method.not_capturable_because or "; ".join(obstacles)
        if obstacle and self._stage is not Stage.EAGER:
            self._enter(Stage.EAGER, obstacle)
        elif self._stage in (Stage.EXPLORE, Stage.WATCH):
            self._enter(Stage.WATCH if self._stage is Stage.EXPLORE else Stage.CAPTURE)
        return estimate

    def _run(
        self, objective: Objective, generator: torch.Generator, num_iterations: int | None = None
    ) -> CurvatureEstimate:
        """Measures; explores the model again if its known structure no longer works."""
        with self._measuring():
            if self._method.structure is not None:
                try:
                    return self._method.measure(objective, generator, num_iterations)
                except Exception as error:  # StructureChangedError, or from a module that worked before
                    if is_out_of_memory(error):
                        raise
                # Measured again outside the handler, whose traceback holds the attempt's activations.
                self._method.structure = None
                if self._stage is not Stage.EAGER:
                    self._enter(Stage.EXPLORE)
            return self._method.measure(objective, generator, num_iterations)

    def _probe(self, objective: Objective) -> Probe:
        """Returns the peak memory and the time of measuring these samples on a GPU, under the objective's limits."""
        self._measure_apart(objective)  # warm-up: libraries allocate workspaces at their first call
        synchronize(self._device)
        began = time.perf_counter()
        with peak_of_tensors(self._device) as peak:
            self._measure_apart(objective)
        synchronize(self._device)
        seconds, num_passes = time.perf_counter() - began, self._method.num_passes(objective, 1)
        at_once = objective.parts()[0].num_samples
        return Probe(num_samples=at_once, num_bytes=peak[0], seconds=seconds, num_passes=num_passes)

    def _measure_apart(self, objective: Objective) -> None:
        """Makes a measurement of one iteration that keeps only the model's structure and fallbacks."""
        vectors, self._method.vectors = self._method.vectors, None
        try:
            with without_cudnn():
                self.fallbacks = self._run(objective, torch.Generator().manual_seed(0), 1).fallbacks
        finally:
            self._method.vectors = vectors

    def _objective(self, inputs: Any, targets: Any) -> Objective:
        return Objective(
            model=self._model, loss=self._loss, inputs=inputs, targets=targets, planned_samples=self._num_samples,
            limits=self._limits or Limits(), allow_tf32=self._device.type == "cuda",
        )  # fmt: skip

    def _measuring(self) -> contextlib.AbstractContextManager[None]:
        return measuring(self._model, self._loss, strict_fp32=self._name != "hessian")
