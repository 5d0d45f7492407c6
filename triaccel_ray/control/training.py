"""Builds the training steps of a run from the user's model, optimizer, loss and data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from triaccel_ray.apply.activations import Activations
from triaccel_ray.apply.agreement import Agreement
from triaccel_ray.apply.capture import StepCache
from triaccel_ray.apply.compile import Compilation, is_compiled
from triaccel_ray.apply.divide import divide
from triaccel_ray.apply.fuse import Fusion, fuse
from triaccel_ray.apply.fused_optimizer import without_kernel_because
from triaccel_ray.apply.loss_scale import LossScale
from triaccel_ray.apply.optimizer import LayerwiseOptimizer, watched_parameters
from triaccel_ray.apply.precision import LayerPrecision, fp8_layers, refused_precisions, supported_precisions
from triaccel_ray.apply.reduce import Reduction, SharedGradients
from triaccel_ray.apply.running_statistics import RunningStatistics
from triaccel_ray.apply.split_weights import SplitWeights
from triaccel_ray.apply.step import Step, StepOptions
from triaccel_ray.apply.step_in_backward import StepInBackward, buckets_of
from triaccel_ray.apply.weights import ComputeCopies, Weights, parameters_of_one
from triaccel_ray.config import ControlConfig, check_field, require
from triaccel_ray.control.consensus import joined_ranks
from triaccel_ray.control.update import TrainingUpdate
from triaccel_ray.control.weight_form import CheckedTask, compiles, parameter_signal
from triaccel_ray.cuda.graphs import GraphPool
from triaccel_ray.cuda.out_of_memory import MemoryBudget
from triaccel_ray.cuda.stream_pool import PooledStream
from triaccel_ray.data.sampler import Sampler
from triaccel_ray.data.sources import TensorSource, as_source, delivered
from triaccel_ray.decide.weight_form import decide_form, needs_form
from triaccel_ray.measure.memory import memory_meter
from triaccel_ray.measure.moments import GradientMoments
from triaccel_ray.model.dry_run import require_working
from triaccel_ray.model.gradients import Gradients
from triaccel_ray.model.layers import Loss, find_layers, require_trainable, to_channels_last, weights_outside_layers
from triaccel_ray.model.regions import blocks_to_compile, find_regions, have_numbers_of_their_own, unfused_because
from triaccel_ray.records.plan import Fault, FaultKind, Precision, Storage
from triaccel_ray.records.signals import ParameterSignal

_WITHOUT_KERNEL = {"weights": "fp32", "step_in_backward": False, "optimizer_state": "fp32", "shard_optimizer": False}
"""Setting that needs the optimizer's kernel -> its value without one."""
_Limits = tuple[int | None, int | None]


class Training:
    """Builds and holds everything that the training steps of a run consist of."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        data: Any,
        config: ControlConfig,
        *,
        memory: _Limits,
        epochs: float | None,
        seed: int,
    ) -> None:
        """Takes the arguments of `ControlLoop`; `memory` holds the budget and the headroom in bytes.

        The model's forward functions are wrapped until `remove` is called.
        """
        if epochs is not None:
            check_field("epochs", epochs, float, "(0, 1000000000]")
        self.model, self.loss, self._config = model, loss, config
        self.layers = find_layers(model)
        names = [layer.name for layer in self.layers]
        unknown = sorted(config.precision.initial_layers.keys() - set(names))
        require(
            not unknown, "initial_layers", ", ".join(unknown), f"the model has no such layer, but {', '.join(names)}"
        )
        require_trainable(model, optimizer, self.layers)
        self.device = next(model.parameters()).device
        to_channels_last(model)
        self.ranks = joined_ranks(model, optimizer, config, seed=seed, epochs=epochs)
        self._require_kernel(optimizer)
        self.memory, self.pool = memory_meter(self.device, *memory), GraphPool(self.device)
        try:
            self._build(optimizer, data, memory, epochs=epochs, seed=seed)
        except BaseException:
            self.memory.close()
            raise

    def _build(
        self, optimizer: torch.optim.Optimizer, data: Any, limits: _Limits, *, epochs: float | None, seed: int
    ) -> None:
        """Builds what needs memory: the samples, the parameters in their form, instruments and steps."""
        model, loss, config = self.model, self.loss, self._config
        source, data_on = as_source(data), config.execution.data_on
        # If any rank has a limit: all take part in measuring.
        is_open = needs_form(config) and self.ranks.any(limits != (None, None))
        is_delivered = is_open and not isinstance(source, TensorSource)
        if is_delivered:
            source = delivered(source, self.device, data_on)
        self.parameters: ParameterSignal | None = None
        """What decides the form of the weights, if the settings leave it open."""
        if is_open:
            task = CheckedTask(model=model, optimizer=optimizer, loss=loss, source=source)
            with self._on_stream():
                self.parameters = parameter_signal(task, self.layers, config, limits=limits, ranks=self.ranks)
        form = self._form = decide_form(config, self.parameters)[0]
        self._split_weights = SplitWeights(model, self.layers, optimizer) if form.is_split else None
        buckets = buckets_of(model, watched_parameters(optimizer, self.layers)) if form.steps_in_backward else None
        self.optimizer = LayerwiseOptimizer(
            optimizer,
            self.layers,
            # One rank alone must not release its graphs: capturing them again takes all ranks.
            release_memory=self.make_room if self.ranks.is_alone else self.memory.release,
            split=self._split_weights,
            buckets=buckets,
            in_8_bits=config.optimizer_state == "8bit",
            ranks=self.ranks if form.shares_optimizer else None,
        )
        source = source if is_delivered else delivered(source, self.device, data_on)
        with self._on_stream():
            require_working(model, loss, source)
        self.statistics = RunningStatistics(model)
        self.sampler = Sampler(source, seed=seed, device=self.device, epochs=epochs, ranks=self.ranks)
        self.loss_scale = LossScale(config.loss_scale, self.device)
        self.memory.require_room()
        self.loss_sums = torch.zeros(2, 2, dtype=torch.float64, device=self.device)
        """fp64 [2, 2]: sum of the samples' losses, and their number; of the current epoch, and since the last tick."""
        self.moments = GradientMoments(self.layers, self.optimizer.watched, beta=config.precision.beta, buckets=buckets)
        self.faults: list[Fault] = []
        """Faults found while building the steps: how they are compiled, slower fallbacks, layers left unadapted."""
        self._stepper: StepInBackward | None = None
        in_fp8 = fp8_layers(self.layers, config.precision, self.device)
        self.steps = self._build_steps(buckets)
        is_compiled = self.steps.step.is_compiled
        slow = refused_precisions(config.precision, self.device, is_compiled=is_compiled, in_fp8=in_fp8)
        self.offered = [(each.name, supported_precisions(each, without=slow, in_fp8=in_fp8)) for each in self.layers]
        """Each layer's name, and the precisions that device and compiler have for it."""
        self.supported, self.withheld = list(self.offered), frozenset[tuple[str, Precision]]()
        """The precisions that each layer may compute in, and those of `offered` that `withhold` has taken out."""
        self._note_limitations(slow)

    @property
    def precision(self) -> LayerPrecision:
        """The object that runs each layer in its precision."""
        return self.steps.step.precision

    @property
    def unused_savings(self) -> list[str]:
        """The settings of weights and optimizer that are supported, and would take less memory than those in force."""
        if without_kernel_because(self.optimizer.optimizer):
            return []
        form = self._form
        in_force = {
            "weights = 'split'": form.is_split,
            "optimizer_state = '8bit'": self._config.optimizer_state == "8bit",
            "step_in_backward = True": form.steps_in_backward or not self.ranks.is_alone,
            "shard_optimizer = True": form.shares_optimizer or self.ranks.is_alone,
        }
        return [setting for setting, is_used in in_force.items() if not is_used]

    def make_room(self) -> None:
        """Frees the memory of captured steps, which can be captured again, and the allocator's unused blocks."""
        self.pool.release()
        self.memory.release()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Returns a context in which the model computes in FP32 with its own forward code.

        It uses the stream of the steps: its memory is then reused, and only graphs of this stream share memory.
        """
        with self.steps.on_stream(), self.precision.suspended():
            self.statistics.mend()
            yield

    def remove(self) -> None:
        """Restores the model's own forward functions and frees the graphs' memory; tries each even if one fails."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.memory.close)
            stack.callback(self.statistics.mend)
            stack.callback(self.sampler.close)
            stack.callback(self.precision.remove)
            if self._stepper is not None:
                stack.callback(self._stepper.remove)
            if self.steps.step.compilation is not None:
                stack.callback(self.steps.step.compilation.remove)
            stack.callback(self.make_room)  # called first: weights that are joined need some of the graphs' memory

    def _build_steps(self, buckets: Sequence[Sequence[int]] | None) -> StepCache:
        """Returns the step cache.

        On a GPU, norms are fused if there are enough. A model with few or none, or not traceable, is compiled.
        """
        execution = self._config.execution
        on_gpu = self.device.type == "cuda"
        fusion = self._fuse() if on_gpu and execution.compile != "on" and execution.fuse else None
        weights = self._split_weights or Weights()
        if on_gpu and self._split_weights is None and buckets is None and not is_compiled(self.model):
            weights = ComputeCopies(self.layers, self.optimizer.parameters)
        norms = () if fusion is None else fusion.norms
        precision = LayerPrecision(self.model, self.layers, weights=weights, norms=norms, own_kernels=execution.fuse)
        sums, clip_norm = self.loss_sums, self._config.clip_norm
        update = TrainingUpdate(precision, self.moments, self.optimizer, self.loss_scale, sums, clip_norm, self.ranks)
        watched = self.optimizer.watched
        if buckets is not None:
            parameters = [[watched[index] for index in bucket] for bucket in buckets]
            self._stepper = StepInBackward(parameters, weights, update.begin, update.take)
        peers = Agreement(self.ranks)
        reduction = None if self.ranks.is_alone else self._reduction(precision, peers)
        compilation = self._compile() if compiles(execution, self.device, is_fused=fusion is not None) else None
        step = Step(
            self.model,
            self.loss,
            self.sampler,
            precision,
            MemoryBudget(
                check=self.memory.check,
                release=self.make_room,
                is_exceeded_at_rest=lambda: self.ranks.any(self.memory.is_exceeded_at_rest),
            ),
            StepOptions(
                fusion=fusion,
                compilation=compilation,
                stepper=self._stepper,
                activations=self._activations(fusion, compilation),
                peers=peers,
                reduction=reduction,
            ),
        )
        shared = partial(Gradients, watched) if reduction is None else partial(SharedGradients, reduction)
        new_gradients = shared if self._stepper is None else self._stepper.gradients
        return StepCache(step, update, new_gradients, self.pool, execution)

    def _reduction(self, precision: LayerPrecision, peers: Agreement) -> Reduction:
        watched = self.optimizer.watched
        own = parameters_of_one(self.layers, watched)
        name_of = {id(parameter): name for name, parameters in own.items() for parameter in parameters}
        names = [name_of.get(id(parameter)) for parameter in watched]

        def dtypes() -> list[torch.dtype | None]:
            return [None if name is None else precision.dtypes[name] for name in names]

        return Reduction(watched, list(self.model.parameters()), peers, dtypes)

    def _on_stream(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context on a stream that the steps use again: another one would keep its own workspaces."""
        return PooledStream(self.device).current() if self.device.type == "cuda" else contextlib.nullcontext()

    def _require_kernel(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises ValueError if a setting needs kernels that do not support the optimizer."""
        for name, plain in _WITHOUT_KERNEL.items():
            value = getattr(self._config, name)
            rule = (
                "needs SGD, or Adam or AdamW with fused=True, without dampening, amsgrad, maximize, differentiable, "
                f"step hooks or a learning rate in a tensor; change the optimizer, {type(optimizer).__name__}, or give "
                f"{name}={plain!r}"
            )
            require(value in (plain, "auto") or not without_kernel_because(optimizer), name, value, rule)

    def _compile(self) -> Compilation | None:
        """Returns the compilation of the model, or None if the user has compiled it; notes how and why."""
        if is_compiled(self.model):
            self._note(FaultKind.COMPILED, "compile", "the model is compiled already: it stays as it is")
            return None
        execution, limited = self._config.execution, self.memory.has_budget
        if execution.compile == "on":
            compilation, reason = Compilation(self.model, spares_memory=limited), "as asked"
        else:
            may_free = limited if execution.activations == "auto" else execution.activations != "keep"
            blocks, are_equal, reason = blocks_to_compile(
                self.model, may_free_activations=may_free, num_ranks=self.ranks.world_size
            )
            may_change = self._config.batch.enabled or limited or not self.ranks.is_alone
            any_size = may_change or have_numbers_of_their_own(blocks)
            compilation = Compilation(self.model, blocks, are_equal=are_equal, any_size=any_size, spares_memory=limited)
        self._note(FaultKind.COMPILED, "compile", f"{compilation}: {reason}")
        return compilation

    def _activations(self, fusion: Fusion | None, compilation: Compilation | None) -> Activations:
        """Returns the storage of compiled blocks or model regions; notes if one is asked for without any."""
        if (chosen := self._config.execution.activations) == "keep":
            return Activations({}, self.device)
        regions = find_regions(self.model)
        text = f"the model has no blocks of several layers to {chosen}"
        if compilation is not None and compilation.blocks:
            name_of = {module: name for name, module in self.model.named_modules()}
            regions = {name_of[block]: block for block in compilation.blocks}
        elif regions and (compilation is not None or is_compiled(self.model)):
            regions = {}
            text = "blocks of compiled code keep their activations: give compile='auto', and compile nothing yourself"
        activations = Activations(
            regions,
            self.device,
            fixed=None if chosen == "auto" else Storage(chosen),
            divide=None if fusion is None else partial(divide, self.model, fusion.module, list(regions)),
            are_compiled=compilation is not None and bool(compilation.blocks),
        )
        if activations.regions:
            if self.memory.has_budget:
                activations.request_costs()
            return activations
        if chosen != "auto":
            self._note(FaultKind.ACTIVATIONS_KEPT, "checkpoint", text)
        return Activations({}, self.device)

    def _fuse(self) -> Fusion | None:
        """Returns the model with its norms fused; None if it has none or, with a note, few, or if fusing is refused."""
        if not any(isinstance(module, nn.BatchNorm2d) for module in self.model.modules()):
            return None
        is_auto = self._config.execution.compile == "auto"
        if is_auto and not is_compiled(self.model) and (reason := unfused_because(self.model)):
            self._note(FaultKind.COMPILED, "compile", reason)
            return None
        if not self.model.training:
            self.model.train()
        modules = [module for layer in self.layers for module in layer.modules]
        fused = fuse(self.model, modules, recompute=self._config.execution.recompute)
        if not isinstance(fused, Fusion):
            self._note(FaultKind.FUSION_REFUSED, "fuse", fused.reason)
            return None
        if is_auto:
            text = f"the model is not compiled: fused batch norms ({len(fused.norms)}) are faster"
            self._note(FaultKind.COMPILED, "compile", text)
        return fused

    def _note_limitations(self, slow: Mapping[Precision, str]) -> None:
        """Notes what the loop leaves unchanged, or cannot do as requested."""
        if reason := self.sampler.source.streamed_because:
            self._note(FaultKind.DATA_STREAMED, "data", reason)
        if reason := self.sampler.source.unpinned_because:
            self._note(FaultKind.DATA_NOT_PINNED, "data", reason)
        precision = self._config.precision
        wanted = set(precision.initial_layers.values())
        wanted.update(Precision if precision.enabled else [precision.initial])
        for level, reason in slow.items():
            if level in wanted:
                self._note(FaultKind.PRECISION_REFUSED, "precision", f"{reason}: it is not offered")
        if names := weights_outside_layers(self.model, self.layers):
            text = f"weights beside child layers are no layers, and not adapted: {', '.join(names)}"
            self._note(FaultKind.NOT_A_LAYER, "layers", text[:500])
        if self.device.type == "cuda" and self.optimizer.waits_for_host:
            text = "the host waits at each step for whether gradients are finite: give the optimizer fused=True"
            self._note(FaultKind.CAPTURE_FAILED, "optimizer", text)

    def _note(self, kind: FaultKind, phase: str, detail: str) -> None:
        self.faults.append(Fault(kind=kind, step=0, phase=phase, detail=detail))
