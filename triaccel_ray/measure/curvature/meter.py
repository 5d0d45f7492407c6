"""The instrument that the control loop keeps: measures one model again and again, at the least cost to the host."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from triaccel_ray.config import CurvatureConfig
from triaccel_ray.cuda.capture_checks import watched
from triaccel_ray.cuda.graphs import GraphPool
from triaccel_ray.cuda.out_of_memory import first_line, is_out_of_memory
from triaccel_ray.cuda.random_states import preserved_random_states
from triaccel_ray.measure.curvature.gram import GramMethod
from triaccel_ray.measure.curvature.hessian import BlockPower
from triaccel_ray.measure.curvature.objective import Limits, Method, Objective, measuring
from triaccel_ray.measure.curvature.spectrum import CurvatureEstimate
from triaccel_ray.measure.timing import synchronize
from triaccel_ray.model.layers import Layer, Loss, without_cudnn
from triaccel_ray.model.pytree import map_tensors, tensors_in

_LEAST_BUDGET = 32 * 2**20
"""Below it chunks cost more than they save: the allocator's own segments are as large."""
_LEAST_BLOCK = 8 * 2**20
"""Bytes below which a block of per-sample gradients costs more time than it saves memory."""


class Stage(Enum):
    """What the next measurement of the same shapes will be."""

    EXPLORE = auto()
    """Eager; finds out which dimensions are samples, how each layer can be measured."""
    WATCH = auto()
    """Eager; finds out what a replay could not do again."""
    CAPTURE = auto()
    """Captured, with the memory that other graphs of the pool leave free, and replayed."""
    CAPTURE_ALONE = auto()
    """Captured once more after that memory was too little, with no other graph beside it."""
    REPLAY = auto()
    EAGER = auto()
    """Eager, like all that follow."""


@dataclass(frozen=True, kw_only=True)
class _Probe:
    """A measurement of a few samples."""

    num_bytes: int
    """That tensors took at their peak."""
    seconds: float | None = None
    num_passes: int = 1


class _Recording:
    """A captured measurement; it reads the model's weights where they are, so that it sees them change."""

    def __init__(self, measure: Callable[[Any, Any], CurvatureEstimate], samples: Any, pool: GraphPool) -> None:
        """Captures `measure` with copies of the samples; see `GraphPool.capture` for what it raises."""
        static = map_tensors(torch.clone, samples)
        self._tensors = tensors_in(static)
        estimates: list[CurvatureEstimate] = []
        self._graph = pool.capture(lambda: estimates.append(measure(*static)))
        self._estimate = estimates[0]

    def replay(self, samples: Any) -> CurvatureEstimate:
        """Returns the measurement of other samples, in memory of its own: the graph's may be shared."""
        for static, given in zip(self._tensors, tensors_in(samples), strict=True):
            static.copy_(given, non_blocking=True)
        self._graph.replay()
        matrices, noise = self._estimate.matrices, self._estimate.noise
        return replace(self._estimate, matrices=matrices.clone(), noise=None if noise is None else noise.clone())


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
        self._name, self._num_samples = config.method, config.num_samples
        self._method: Method = (
            BlockPower(layers, config.top_k)
            if config.method == "hessian"
            else GramMethod(layers, config.method, config.top_k)
        )
        self.fallbacks: Mapping[str, str] = {}
        """Names of the layers that take one pass of the whole model per sample, and why; known after the first."""
        self.off_because = ""
        """Why curvature is not measured; empty while it is. `dry_run` and `switch_off` set it."""
        self.not_captured_because = ""
        """What keeps measurements from being replayed from a CUDA graph; empty where nothing has been found."""
        self._bytes_of_two = 0
        """Tensors that two samples take at their peak, as `dry_run` saw it on a GPU; 0 where it was not called."""
        self._largest_chunk: int | None = None
        self._limits: Limits | None = None
        self._signature: Any = None
        self._recording: _Recording | None = None
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

    def dry_run(self, inputs: Any, targets: Any) -> None:
        """Measures these few samples for its errors alone, and switches curvature off where there is one.

        Random states are put back. A lack of memory is left to `measure`.
        """
        objective = self._objective(inputs, targets)
        try:
            objective.require_samples(self._name)
            with preserved_random_states(), self._peak_of_tensors() as peak:
                self._measure_apart(objective)
            self._bytes_of_two = peak[0] * 2 // objective.num_samples
        except Exception as error:  # of the model's code or the loss's, run as training never runs it
            if not is_out_of_memory(error):
                self.switch_off(error)

    def switch_off(self, error: Exception) -> None:
        """Gives up measuring for this reason, and what was kept for it."""
        self.off_because = f"{self._name} cannot be measured: {first_line(error)}"
        self._forget()

    def prepare(self, inputs: Any, targets: Any, *, budget_bytes: int | None = None) -> float | None:
        """Decides how samples of these shapes pass within the budget; returns how many seconds measuring them takes.

        Takes the arguments of `measure`, and raises what that raises. None: nothing was to be decided, or nobody knows.
        """
        shapes = map_tensors(lambda tensor: (tensor.shape, tensor.dtype), (inputs, targets))
        # A graph reads the weights where they are.
        signature = shapes, [tensor.data_ptr() for tensor in (*self._model.parameters(), *self._model.buffers())]
        if signature != self._signature:
            self._forget()
            self._signature = signature
        if self._limits is not None:
            return None
        objective = self._objective(inputs, targets)
        objective.require_samples(self._name)
        self._limits, probe = self._limits_within(budget_bytes, objective)
        if probe is None or probe.seconds is None:
            return None
        objective = replace(objective, limits=self._limits)
        return probe.seconds * self._method.num_passes(objective) / probe.num_passes

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
        self.prepare(inputs, targets, budget_bytes=budget_bytes)
        if self._stage in (Stage.CAPTURE, Stage.CAPTURE_ALONE):
            self._capture((inputs, targets), generator)
        if self._recording is not None:
            return self._recording.replay((inputs, targets))
        estimate = self._measure_eagerly(self._objective(inputs, targets), generator)
        self.fallbacks = estimate.fallbacks
        return estimate

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
        if state["vectors"] is not None:
            self._method.vectors = [vector.to(self._device) for vector in state["vectors"]]
            self._forget()  # a graph would go on from the vectors that were there before

    def _enter(self, stage: Stage, because: str = "", recording: _Recording | None = None) -> None:
        """Goes to another stage; the only place where it changes, and with it the recording and the reason."""
        if self._recording is not None:
            self._pool.synchronize()  # it may be replaying
        self._stage, self._recording, self.not_captured_because = stage, recording, because

    def _forget(self) -> None:
        """Drops what was found out about other shapes; the structure of the model's course holds for all."""
        self._limits = None
        if self._may_capture:
            self._enter(Stage.EXPLORE)
        else:
            self._enter(Stage.EAGER, "capture is off" if self._pool.can_capture else "there is no CUDA device")

    def _capture(self, samples: tuple[Any, Any], generator: torch.Generator) -> None:
        """Captures the measurement, without making it; where it fails, the next stage is an eager one."""

        def measure(inputs: Any, targets: Any) -> CurvatureEstimate:
            return self._method.measure(self._objective(inputs, targets), generator)

        try:
            with self._measuring():
                recording = _Recording(measure, samples, self._pool)
        except Exception as error:  # CUDA, PyTorch and the model's own code may all refuse, each in its way
            reason, is_too_large = first_line(error), is_out_of_memory(error)
        else:
            self._enter(Stage.REPLAY, recording=recording)
            return
        # Outside the handler: the traceback no longer holds the attempt's tensors.
        self._pool.release()
        self._enter(Stage.CAPTURE_ALONE if is_too_large else Stage.EAGER, reason)

    def _measure_eagerly(self, objective: Objective, generator: torch.Generator) -> CurvatureEstimate:
        """Measures without a graph, and goes on to the stage that what was seen allows.

        Where memory runs out, the next measurement takes half as many samples at once.
        """
        obstacles: list[str] = []
        is_watched = self._stage is Stage.WATCH
        try:
            with watched(obstacles, self._device) if is_watched else contextlib.nullcontext():
                estimate = self._run(objective, generator)
        except BaseException as error:
            if is_out_of_memory(error):
                chunk = objective.limits.chunk_samples or objective.num_samples
                self._largest_chunk, self._limits = max(1, chunk // 2), None
            raise
        obstacle = self._method.not_capturable_because or "; ".join(obstacles)
        if obstacle and self._stage is not Stage.EAGER:
            self._enter(Stage.EAGER, obstacle)
        elif self._stage in (Stage.EXPLORE, Stage.WATCH):
            self._enter(Stage.WATCH if self._stage is Stage.EXPLORE else Stage.CAPTURE)
        return estimate

    def _run(
        self, objective: Objective, generator: torch.Generator, num_iterations: int | None = None
    ) -> CurvatureEstimate:
        """Measures; finds the structure anew if what is known of it no longer works."""
        with self._measuring():
            if self._method.structure is not None:
                try:
                    return self._method.measure(objective, generator, num_iterations)
                except Exception as error:  # what a module raised that worked before, or a StructureChangedError
                    if is_out_of_memory(error):
                        raise
                # What follows runs outside the handler, whose traceback holds the attempt's activations.
                self._method.structure = None
                if self._stage is not Stage.EAGER:
                    self._enter(Stage.EXPLORE)
            return self._method.measure(objective, generator, num_iterations)

    def _limits_within(self, budget_bytes: int | None, objective: Objective) -> tuple[Limits, _Probe | None]:
        """Returns how many samples pass at once within the budget, and the measurement of a few that says so.

        Extrapolated from the peaks of two and of four; of one alone, where four would not fit.
        """
        b = objective.num_samples
        most = min(self._largest_chunk or b, b)
        if budget_bytes is None or b <= 4:
            return Limits(chunk_samples=most if most < b else None), None
        budget = max(budget_bytes, _LEAST_BUDGET)
        block = min(max(budget // 8, _LEAST_BLOCK), Limits.block_bytes)
        if 2 * self._bytes_of_two > budget:
            probe = self._probe(objective.part(slice(0, 1)))
            per_sample, fixed = float(probe.num_bytes), 0.0
        else:
            few, probe = (self._probe(objective.part(slice(0, count))) for count in (2, 4))
            per_sample = max((probe.num_bytes - few.num_bytes) / 2, 1.0)
            fixed = max(few.num_bytes - 2 * per_sample, 0.0)
        if fixed + b * per_sample <= budget and most == b:
            return Limits(block_bytes=block), probe
        kept = self._method.kept_bytes or budget // 3
        fitting = max(1, min(most, int((budget - kept - fixed) / per_sample)))
        num_chunks = -(-b // fitting)
        limits = Limits(chunk_samples=-(-b // num_chunks), kept_bytes=max(kept, block), block_bytes=block)
        return limits, probe

    def _probe(self, objective: Objective) -> _Probe:
        """Returns what measuring these samples takes at its peak, by the allocator and the clock on a GPU.

        Elsewhere twice what the forward pass keeps: the gradients that the backward pass holds are about as large.
        """
        if self._device.type != "cuda":
            kept: dict[int, int] = {}

            def pack(tensor: Tensor) -> Tensor:
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                return tensor

            with self._measuring(), saved_tensors_hooks(pack, lambda tensor: tensor):
                objective.value(objective.outputs())
            return _Probe(num_bytes=2 * sum(kept.values()))
        self._measure_apart(objective)  # libraries take workspaces at their first call
        synchronize(self._device)
        began = time.perf_counter()
        with self._peak_of_tensors() as peak:
            self._measure_apart(objective)
        synchronize(self._device)
        seconds = time.perf_counter() - began
        return _Probe(num_bytes=peak[0], seconds=seconds, num_passes=self._method.num_passes(objective, 1))

    @contextlib.contextmanager
    def _peak_of_tensors(self) -> Iterator[list[int]]:
        """Returns a context that gives the bytes which tensors made inside take at their peak; 0 without a GPU."""
        peak = [0]
        if self._device.type != "cuda":
            yield peak
            return
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        yield peak
        peak[0] = torch.cuda.max_memory_allocated(self._device) - before

    def _measure_apart(self, objective: Objective) -> None:
        """Makes a measurement with one iteration, of which nothing is kept but the model's structure and fallbacks."""
        vectors, self._method.vectors = self._method.vectors, None
        try:
            with without_cudnn():
                self.fallbacks = self._run(objective, torch.Generator().manual_seed(0), 1).fallbacks
        finally:
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
