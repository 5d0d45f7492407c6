"""Captures training steps as CUDA graphs, one per batch size and precision plan, each replayed in one launch."""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from triaccel_ray.apply.agreement import NotCapturableError
from triaccel_ray.apply.compile import first_paragraph, is_compile_error
from triaccel_ray.apply.region_recorder import RegionRecorder
from triaccel_ray.apply.static_batch import StaticBatch
from triaccel_ray.apply.step import Step, StepOutcome
from triaccel_ray.apply.step_in_backward import BucketedGradients
from triaccel_ray.apply.step_kind import StepKind
from triaccel_ray.config import ExecutionConfig
from triaccel_ray.cuda.capture_checks import Obstacle, has_capture_query, overriding_capture_query
from triaccel_ray.cuda.graphs import Graph, GraphPool
from triaccel_ray.cuda.out_of_memory import first_line, is_out_of_memory
from triaccel_ray.cuda.stream_pool import PooledStream
from triaccel_ray.data.sampler import BatchShares
from triaccel_ray.distributed.ranks import digest
from triaccel_ray.model.gradients import Gradients, has_hooks
from triaccel_ray.records.plan import Fault, FaultKind

MAX_GRAPHS = 8
"""Captured steps kept at once. They share one memory pool, so each costs only a few MB for kernel arguments."""


class Update(Protocol):
    """The part of a step after the backward pass: gradient statistics, optimizer step, loss scale."""

    @property
    def is_capturable(self) -> bool:
        """Whether `run` launches only device work, so that a CUDA graph can capture it."""

    def run(self, loss_sum: Tensor, num_samples: int, gradients: Gradients | BucketedGradients) -> None:
        """Updates statistics and parameters from one step's gradients; `loss_sum` is an fp64 scalar."""


class _Captured(NamedTuple):
    """A graph with the tensors that it reads and writes."""

    graph: Graph
    indices: Tensor
    """Input of a graph that gathers its batch on the device."""
    batch: StaticBatch | None
    """Input, in place of `indices`, of a graph whose samples come from the host."""
    loss_sum: Tensor
    gradients: Gradients | BucketedGradients
    recorder: RegionRecorder | None
    """What each replay records; it owns events of the graph."""


class StepCache:
    """Runs training steps: the first of each kind eagerly, later ones as replays of a captured CUDA graph.

    A kind is a batch size, a number of micro-batches, a precision plan and the storage of activations. Learning rates,
    loss scale and counters are read from the device. So a step is captured once, and each replay costs the host one
    launch.

    The first step of a kind runs eagerly, so that libraries choose their kernels. Eager and captured steps never hold
    memory at the same time: an eager step on a GPU drops all graphs, which are captured again at their next use. If a
    step cannot be captured, the model is compiled as a whole in place of its blocks, or else all steps run eagerly. If
    a capture runs out of memory, steps of its kind run eagerly until memory is released. A fault reports each. Python
    state that the forward pass changes is changed at captures but not at replays.
    """

    def __init__(
        self,
        step: Step,
        update: Update,
        new_gradients: Callable[[], Gradients | BucketedGradients],
        pool: GraphPool,
        config: ExecutionConfig,
    ) -> None:
        self.step = step
        self._update, self._new_gradients, self._pool = update, new_gradients, pool
        self._autotune = config.autotune
        self.enabled = config.capture and pool.can_capture
        """Whether steps may be captured."""
        self.tries_capture = self.enabled
        """Whether steps are captured unless something forbids it. Elsewhere, as on a CPU, new plans cost nothing."""
        self._source, self._generator = step.sampler.source, step.sampler.generator
        self._eager_gradients = new_gradients()
        self._stream = PooledStream(self._generator.device) if pool.handle is not None else None
        self._entries: OrderedDict[StepKind, _Captured] = OrderedDict()
        self._is_ready: dict[StepKind, bool] = {}
        """Kind of step that has run eagerly -> whether the next one is captured; False after a step that compiled."""
        self._doubts: dict[StepKind, list[str]] = {}
        """What a captured step of a kind may not repeat."""
        self._unverified: set[StepKind] = set()
        """Kinds whose graph recomputes regions and has not been replayed yet."""
        self._too_large: set[StepKind] = set()
        self._runs_as_captured = False
        """Whether eager steps run the models' code for captured ones, because their eager code waits."""
        self._captured_dependencies: tuple[Any, ...] = ()
        self._is_refusal_reported = False
        self.pending_ms = 0.0
        """Milliseconds spent on new plans since the last `take_cost`."""
        pool.on_release(self._drop_all)

    @property
    def num_captured(self) -> int:
        """Number of graphs held now."""
        return len(self._entries)

    def take_cost(self) -> float:
        """Returns the milliseconds since the last call spent on first steps of a kind, compilation and captures."""
        cost, self.pending_ms = self.pending_ms, 0.0
        return cost

    def run(
        self, indices: Tensor, loss_scale: Tensor, *, step: int, shares: BatchShares | None = None
    ) -> tuple[Fault, ...]:
        """Runs one training step on the samples at `indices`, this rank's share of a batch; returns faults survived.

        Raises:
            torch.OutOfMemoryError, MemoryError: not even a single sample fits.
        """
        num_samples, offset = shares or BatchShares(len(indices))
        stored = tuple(self.step.activations.storage.items())
        key = StepKind(num_samples, self.step.num_parts(num_samples), self.step.precision.key, stored, offset)
        with self.on_stream(), self._autotuning(), overriding_capture_query(self._runs_as_captured):
            if not self.enabled or key in self._too_large:
                return self._run_eagerly(key, indices, loss_scale, step).faults
            if self._entries and self._dependencies() != self._captured_dependencies:
                self._pool.release()
                self._is_ready.clear()
            if key not in self._entries and not self._is_ready.get(key):
                return self._run_first(key, indices, loss_scale, step)
            fault = self._prepare(key, indices, loss_scale, step)
            if fault is not None and self.enabled and key not in self._too_large:  # compiled in another way
                return (fault, *self._run_first(key, indices, loss_scale, step))
            if fault is not None:
                return (fault, *self._run_eagerly(key, indices, loss_scale, step).faults)
            self._entries.move_to_end(key)
            entry, faults = self._entries[key], self._replay(key, len(indices), step)
            if entry.recorder is not None and not entry.recorder.is_read:
                self.step.activations.learn(entry.recorder, is_captured=True)
            if not self._update.is_capturable:
                self._update.run(entry.loss_sum, key.batch_size, entry.gradients)
        return faults

    def _replay(self, key: StepKind, num_own: int, step: int) -> tuple[Fault, ...]:
        """Launches the graph; returns a fault if it recomputes regions with other random numbers than they drew."""
        activations, graph = self.step.activations, self._entries[key].graph
        if not key.storage:
            graph.replay()
            return ()
        kind = self.step.pass_kind(num_own, key.batch_size)
        matches = activations.rng.replay(graph, kind)
        if key not in self._unverified:
            return ()
        self._unverified.discard(key)
        return activations.exclude_random(step) if self.step.peers.ranks.any(not matches) else ()

    def _run_eagerly(
        self, key: StepKind, indices: Tensor, loss_scale: Tensor, step: int, *, watch: bool = False
    ) -> StepOutcome:
        # On any rank, graphs of the curvature measurement included: which steps may be captured again must not differ.
        if self._pool.can_capture and self.step.peers.ranks.any(self._pool.holds_graphs):
            self._pool.release()
        gradients = self._eager_gradients
        gradients.begin(publishes=True)
        outcome = self.step.run(
            indices, loss_scale, step=step, watch=watch, num_samples=key.batch_size, gradients=gradients
        )
        if any(fault.kind is FaultKind.COMPILED for fault in outcome.faults):
            self._is_ready.clear()  # what runs from now on was compiled in this step
        gradients.send()
        gradients.publish()
        self._update.run(outcome.loss_sum, key.batch_size, gradients)
        gradients.drop()
        reason = "" if self.step.fusion is None else self.step.fusion.refused_because
        if not reason or self._is_refusal_reported:
            return outcome
        self._is_refusal_reported = True
        refusal = Fault(kind=FaultKind.FUSION_REFUSED, step=step, phase="fuse", detail=reason)
        return replace(outcome, faults=(*outcome.faults, refusal))

    def _run_first(self, key: StepKind, indices: Tensor, loss_scale: Tensor, step: int) -> tuple[Fault, ...]:
        """Runs the first step of a kind eagerly, and checks whether it can be captured.

        Compilation itself waits for the device. So a step that compiles is not checked, but the next one is.
        """
        before = self._dependencies()
        compiles = self.step.is_compiled and key not in self._is_ready
        with self._timed():
            outcome = self._run_eagerly(key, indices, loss_scale, step, watch=not compiles)
            self.step.zero_grad()
        kinds = {fault.kind for fault in outcome.faults}
        if FaultKind.OUT_OF_MEMORY in kinds:
            return outcome.faults  # the attempt that succeeded was a step of another kind
        self._is_ready[key] = not compiles and FaultKind.COMPILED not in kinds
        if not self._is_ready[key]:
            return outcome.faults
        obstacles = list(outcome.obstacles)
        if self._dependencies() != before:
            obstacles.append(Obstacle("the step puts other tensors in place of parameters or buffers"))
        self._doubts[key] = [obstacle.text for obstacle in obstacles]
        is_certain = any(obstacle.is_certain for obstacle in obstacles)
        if self.step.peers.ranks.any(is_certain):
            text = "; ".join(self._doubts[key]) if is_certain else "the step of another rank cannot be captured"
            return (*outcome.faults, self._give_up(key, text, step))
        if not self._runs_as_captured and self.step.peers.ranks.any(bool(obstacles) and has_capture_query()):
            self._runs_as_captured = True  # that code may not wait, and has to be compiled before it is captured
            self._is_ready.clear()
        return outcome.faults

    def _give_up(self, key: StepKind, why: str, step: int, *, may_compile: bool = True) -> Fault:
        """Compiles the whole model in place of its blocks if that may help, or has steps run eagerly from now on."""
        compilation = self.step.compilation
        if may_compile and not key.storage and compilation is not None and compilation.blocks:
            self.step.compile_whole()  # compiled code between the blocks may avoid the obstacles
            self._is_ready.clear()
            return Fault(kind=FaultKind.COMPILED, step=step, phase="compile", detail=f"{compilation}: {why}")
        self.enabled = self._runs_as_captured = False
        return key.capture_fault(step, why)

    def _prepare(self, key: StepKind, indices: Tensor, loss_scale: Tensor, step: int) -> Fault | None:
        """Captures the step, or copies the samples into its graph's inputs; returns a fault if that fails."""
        is_captured = key in self._entries
        may_fail = not is_captured or self._entries[key].batch is not None  # a batch gathered on the device cannot
        state = self._generator.get_state() if may_fail else None
        try:
            with self.step.peers.agreeing(when=may_fail):  # it may fail on one rank alone
                if is_captured:
                    self._fill(self._entries[key], indices, key.batch_size)
                else:
                    self._capture(key, indices, loss_scale)
            return None
        except Exception as error:  # CUDA, PyTorch and the model's code each raise errors of their own
            is_too_large = is_out_of_memory(error)
            if is_captured and not is_too_large and not isinstance(error, NotCapturableError):
                raise  # an error of the data source
            detail = first_line(error)
            if is_compile_error(error):
                detail = f"the model runs other code while it is captured, not compiled yet: {first_paragraph(error)}"
        # Outside the handler, whose traceback holds the attempt's tensors.
        self.step.zero_grad()
        self._pool.release()
        if state is not None:
            self._generator.set_state(state)  # the eager step draws the same augmentation
        if is_too_large:
            self.step.activations.request_costs()
            self._too_large.add(key)  # until the pool is next released
            return key.capture_fault(step, detail, FaultKind.CAPTURE_OUT_OF_MEMORY)
        return self._give_up(key, "; ".join([*self._doubts.get(key, []), detail]), step, may_compile=not is_captured)

    def _fill(self, entry: _Captured, indices: Tensor, num_samples: int) -> None:
        if entry.batch is None:
            entry.indices.copy_(indices, non_blocking=True)
        else:
            entry.batch.fill(self.step.batches(indices, num_samples))

    def _capture(self, key: StepKind, indices: Tensor, loss_scale: Tensor) -> None:
        """Captures the step on these samples and stores the graph; nothing is executed yet."""
        self.step.zero_grad()
        gradients, weights = self._new_gradients(), self.step.precision.weights
        is_resident = self._source.is_resident
        batch = None if is_resident else StaticBatch(self.step.batches(indices, key.batch_size))
        static_indices = indices.clone()
        loss_sums: list[Tensor] = []

        def work() -> None:
            gradients.begin(publishes=False)
            batches = self.step.batches(static_indices, key.batch_size) if batch is None else iter(batch.parts)
            with self.step.peers.agreeing():
                loss_sums.append(self.step.accumulate(batches, key.batch_size, loss_scale, is_captured=True))
                gradients.collect(weights.companions, weights.sums)
            gradients.pack(weights.companions)
            gradients.send()
            if self._update.is_capturable:
                self._update.run(loss_sums[0], key.batch_size, gradients)

        with self._timed():
            own = self.step.activations.rng.generators(self.step.pass_kind(len(indices), key.batch_size))
            graph = self._pool.capture(work, generators=[self._generator, *own])
        gradients.publish()
        if self._update.is_capturable:
            gradients.drop()
        self.step.zero_grad()
        self._captured_dependencies = self._dependencies()
        if key.storage:
            self._unverified.add(key)
        self._entries[key] = _Captured(graph, static_indices, batch, loss_sums[0], gradients, self.step.recorder)
        if len(self._entries) > MAX_GRAPHS:
            self._pool.synchronize()
            self._entries.popitem(last=False)

    def _dependencies(self) -> tuple[Any, ...]:
        """Returns the state that graphs depend on and that user code may change; a change invalidates all graphs.

        Parameters and buffers, low-precision copies, modes, whether norms fuse and the update is part of a graph.
        """
        model, trained, fusion = self.step.model, self.step.trained, self.step.fusion
        return (
            self.step.precision.weights.generation,
            self._update.is_capturable,
            *((p.data_ptr(), p.requires_grad, has_hooks(p)) for p in model.parameters()),
            *(buffer.data_ptr() for buffer in trained.buffers()),
            *(module.training for module in trained.modules()),
            fusion is not None and fusion.holds(),
        )

    def agree(self) -> None:
        """Releases the graphs of all ranks if one has released its own: a capture takes all ranks."""
        state = [sorted(map(repr, keys)) for keys in (self._entries, self._too_large, self._is_ready)]
        if len(set(self.step.peers.ranks.all_gather_object(digest([self.enabled, state])))) > 1:
            self.enabled = not self.step.peers.ranks.any(not self.enabled)
            self._pool.release()
            self._is_ready.clear()

    def _drop_all(self) -> None:
        self._entries.clear()
        self._too_large.clear()
        self.step.precision.weights.drop_unused()

    def on_stream(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context on the capture stream, ordered between earlier and later work of the outer stream."""
        return contextlib.nullcontext() if self._stream is None else self._stream.current()

    @contextlib.contextmanager
    def _autotuning(self) -> Iterator[None]:
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = before or self._autotune
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Adds the time spent inside to the cost of new plans, even after an error."""
        self._pool.synchronize()
        start = time.perf_counter()
        try:
            yield
            self._pool.synchronize()
        finally:
            self.pending_ms += 1e3 * (time.perf_counter() - start)
