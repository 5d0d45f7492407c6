"""The control loop: an ordinary model, optimizer and data source trained under one policy (Tri-Accel, section 3.4)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from triaccel_ray.apply.actuators import Actuators
from triaccel_ray.apply.evaluate import Evaluation, Metrics, evaluate, judged_at_once
from triaccel_ray.apply.loss_scale import LossScale
from triaccel_ray.apply.optimizer import LayerwiseOptimizer
from triaccel_ray.apply.precision import supported_precisions, useless_precisions
from triaccel_ray.config import ControlConfig, require_instance
from triaccel_ray.control.curvature_rounds import CurvatureRounds
from triaccel_ray.control.epochs import EpochStats, SampleSchedule, Schedule, mean_loss
from triaccel_ray.control.pending_tick import PendingTick
from triaccel_ray.control.steps import StepParts, build_steps
from triaccel_ray.cuda.capture_checks import watching_forward
from triaccel_ray.cuda.graphs import GraphPool
from triaccel_ray.cuda.random_states import random_states, set_random_states
from triaccel_ray.cuda.stream_pool import LentStream
from triaccel_ray.data.sampler import Sampler
from triaccel_ray.data.sources import as_source, default_config, delivered
from triaccel_ray.decide import ControlState, decide, initial_decision
from triaccel_ray.measure.curvature import CurvatureMeter
from triaccel_ray.measure.memory import memory_meter
from triaccel_ray.measure.moments import GradientMoments
from triaccel_ray.measure.sensors import Sensors
from triaccel_ray.measure.timing import EpochClock, StepTimer
from triaccel_ray.model.dry_run import require_working
from triaccel_ray.model.layers import Loss, find_layers, lay_out, require_trainable, unwatched_weights
from triaccel_ray.records.codec import decode, encode
from triaccel_ray.records.events import EventLog, Start, Tick
from triaccel_ray.records.plan import Fault, FaultKind, Plan, Precision
from triaccel_ray.records.signals import Observation


class NonFiniteGradientsError(RuntimeError):
    """The training has diverged: no step was made for a while."""


class ControlLoop:
    """Trains `model` and adapts precision, learning rate and batch size as it goes."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        data: Any,
        *,
        config: ControlConfig | None = None,
        schedule: Schedule | None = None,
        memory_budget: int | None = None,
        memory_headroom: int | None = None,
        seed: int = 0,
        on_tick: Callable[[Tick], None] | None = None,
    ) -> None:
        """Takes over the training of `model` on the device where its parameters are.

        Args:
            model: any module; its layers are found by `find_layers`.
            optimizer: any PyTorch optimizer over the model's parameters that needs no closure. Fused ones skip an
                overflow without asking the host.
            loss: maps (outputs, targets) to the mean loss; outputs arrive in FP32.
            data: the training samples: an (inputs, targets) pair of tensors or arrays, a data set, map-style or
                iterable, a `DataLoader`, or a `DataSource`.
            config: thresholds and intervals; the defaults when None, with a `DataLoader`'s batch size as the first.
            schedule: function of the epochs trained, fractional, that returns a factor on the learning rates; or a
                scheduler of PyTorch's for this optimizer, which the loop advances by samples, an epoch's steps at
                `batch.start` each epoch. One that you step yourself, once an epoch, works as well.
            memory_budget: bytes this process may hold on the device; the whole device when None.
            memory_headroom: bytes on top of what the process holds before its first batch; a budget is a bound on it.
            seed: of the order of the samples, the augmentation and the curvature's samples.
            on_tick: called with each tick, in order, each once; `EventLog.append` keeps them, after a start record
                with the configuration if the log is empty: `triaccel report` and `triaccel replay` read it.

        Raises:
            TypeError: an argument is of the wrong kind.
            ValueError: the model has no layer, the loop cannot train it (`require_trainable`), two samples cannot pass
                through model and loss (`require_working`), or the budget leaves nothing to compute with.
        """
        self.config = default_config(data) if config is None else require_instance("config", config, ControlConfig)
        self._layers = find_layers(model)
        require_trainable(model, optimizer, self._layers)
        self.device = next(model.parameters()).device
        self.model, self._loss = model, loss
        self._schedule = SampleSchedule(schedule, optimizer, batch_size=self.config.batch.start)
        lay_out(model)
        self.memory = memory_meter(self.device, memory_budget, memory_headroom)
        self._pool = GraphPool(self.device)
        self.optimizer = LayerwiseOptimizer(optimizer, self._layers, release_memory=self._make_room)
        source = delivered(as_source(data), self.device, self.config.execution.data_on)
        # On a stream that the steps use again: another one would keep workspaces of its own.
        stream = LentStream(self.device).current() if self.device.type == "cuda" else contextlib.nullcontext()
        with stream, watching_forward(model) as waits:
            require_working(model, loss, source)
        self.sampler = Sampler(source, seed=seed, device=self.device)
        self.loss_scale = LossScale(self.config.loss_scale, self.device)
        self.memory.require_room()

        # Every step adds its loss to both: of the epoch, and since the last tick.
        losses = torch.zeros(2, 2, dtype=torch.float64, device=self.device)
        self._epoch_loss = losses[0]
        moments = GradientMoments(self._layers, self.optimizer.watched, beta=self.config.precision.beta)
        self._steps, faults = build_steps(
            StepParts(
                model=model,
                loss=loss,
                layers=self._layers,
                sampler=self.sampler,
                optimizer=self.optimizer,
                moments=moments,
                loss_scale=self.loss_scale,
                loss_sums=losses,
                memory=self.memory,
                make_room=self._make_room,
                pool=self._pool,
                batch_varies=self.config.batch.enabled,
                waits=waits,
                clip_norm=self.config.clip_norm,
            ),
            self.config.execution,
        )
        self._epoch_steps, self._adapting_ms = 0, 0.0
        self.num_steps = 0
        """Optimizer steps done, skipped ones included."""
        try:
            self._set_up(faults, moments, losses[1], on_tick, seed)
        except BaseException:
            self._give_model_back()
            raise

    def _set_up(
        self,
        faults: tuple[Fault, ...],
        moments: GradientMoments,
        losses: Tensor,
        on_tick: Callable[[Tick], None] | None,
        seed: int,
    ) -> None:
        """Prepares what decides: the first plan, the sensors, curvature. The model is wrapped already."""
        self._precision = self._steps.step.precision
        useless = useless_precisions(self.device.type, is_compiled=self._steps.step.is_compiled)
        offered = {} if self.config.precision.offer_useless else useless
        named = [(layer.name, supported_precisions(layer, without=offered)) for layer in self._layers]
        first = initial_decision(self.config, named)
        self.state: ControlState = first.state
        self.timer = StepTimer(self.device)
        self.sensors = Sensors(named, moments, self.memory, self.timer, losses)
        if reason := self.sampler.source.streamed_because:
            faults += (Fault(kind=FaultKind.DATA_STREAMED, step=0, phase="data", detail=reason),)
        wanted = set(Precision) if self.config.precision.enabled else {self.config.precision.initial}
        wanted |= set(self.config.precision.initial_layers.values())
        faults += tuple(
            Fault(kind=FaultKind.PRECISION_REFUSED, step=0, phase="precision", detail=f"{reason}: it is not offered")
            for level, reason in useless.items()
            if level in wanted and not self.config.precision.offer_useless
        )
        if names := unwatched_weights(self.model, self._layers):
            text = f"weights beside child layers are no layers, and not adapted: {', '.join(names)}"
            faults += (Fault(kind=FaultKind.NOT_A_LAYER, step=0, phase="layers", detail=text[:500]),)
        if self.device.type == "cuda" and self.optimizer.waits_for_host:
            self._record_slower(
                "optimizer",
                "the host waits at each step for whether gradients are finite: give the optimizer fused=True",
            )
        self.sensors.record_faults(faults)
        self.curvature = CurvatureMeter(
            self.model,
            self._loss,
            self._layers,
            self.config.curvature,
            device=self.device,
            pool=self._pool,
            capture=self._steps.enabled,
        )
        self._curvature_rounds = CurvatureRounds(
            self.curvature,
            self.sensors,
            self.sampler,
            self._steps,
            self.memory,
            self._pool,
            config=self.config,
            device=self.device,
            make_room=self._make_room,
            seed=seed,
        )
        self._actuators = Actuators(first.plan, self._steps, self._pool)
        self._clock = EpochClock(self.device)
        self.num_ticks = 0
        self._curvature_rounds.try_out()
        log = getattr(on_tick, "__self__", None)
        if isinstance(log, EventLog) and log.num_records == 0:
            log.append(Start(control=self.config))
        self._pending = PendingTick(on_tick, decides_late=self.device.type == "cuda")

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._actuators.plan

    @property
    def num_skipped(self) -> int:
        """Steps skipped for a NaN or infinite gradient so far; waits for the device."""
        return int(self.loss_scale.num_skipped.item())

    @property
    def epoch_seconds_so_far(self) -> float:
        """Seconds that the present epoch has taken, without waiting for the device."""
        return self._clock.glance()

    @property
    def epoch_loss(self) -> Tensor:
        """The losses of the present epoch's samples so far, summed, and their number: fp64 [2] that steps write to."""
        return self._epoch_loss

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Returns a context inside which the model computes in FP32, as its own code has it, for judging it."""
        # On the stream of the steps, whose memory is then used again.
        with self._steps.on_stream(), self._precision.suspended():
            try:
                yield
            finally:
                self.timer.interrupt()
                if self.device.type == "cuda":  # a CPU would map the same pages anew in the next step
                    self.memory.trim()  # else what evaluation leaves would stand beside the graphs

    def step(self) -> None:
        """Makes one optimizer step, and the tick and the curvature measurement that fall due after it.

        On a GPU a tick decides once the next three steps are under way, so that the device need not wait: what it
        decides holds from the step after these, or from the next epoch's first.
        """
        plan, epoch = self.plan, self.sampler.position
        if self.sampler.at_epoch_start:
            self._epoch_loss.zero_()
            self._epoch_steps = 0
            self.timer.interrupt()
        if not self.model.training:
            self.model.train()
        self._precision.refresh_copies()
        copies = self._precision.copies_in_force
        obstacle = self.optimizer.set_rates(self._schedule.factor(epoch) * plan.batch_lr_scale, plan.lr_scale, copies)
        if obstacle is not None:
            self._record_slower("optimizer", obstacle)
        scale = self.loss_scale.factor(self._precision.needs_loss_scale)
        indices = self.sampler.take(plan.batch_size)
        self.timer.begin()
        self.sensors.record_faults(self._steps.run(indices, scale, step=self.num_steps))
        self.timer.end(counts=len(indices) == plan.batch_size)
        self._schedule.advance(self.sampler)
        if self.optimizer.survived:
            self._record_optimizer_faults()
        self.num_steps += 1
        self._epoch_steps += 1
        if self._pending.is_decision_due(self.num_steps) or self.sampler.at_epoch_start:
            self._decide()
        if self._pending.is_record_due(self.num_steps % self.config.every_steps):
            self._pending.record()
        if self._curvature_rounds.is_due(self.num_steps):
            self._curvature_rounds.measure(self.num_steps)
            self.timer.interrupt()
        if self.num_steps % self.config.every_steps == 0:
            self._decide()
            self._observe()
            if not self._pending.decides_late or self.sampler.at_epoch_start:
                self._decide()

    def tick(self) -> Tick:
        """Measures, decides, applies, records; returns the record.

        On a GPU the record is written a few steps later, or at the end of the epoch: the device has work by then.
        """
        self._decide()
        self._observe()
        tick = self._decide()
        assert tick is not None
        return tick

    def _observe(self) -> None:
        """Begins to read what the next decision rests on."""
        reading = self.sensors.read(
            plan=self.plan,
            step=self.num_steps,
            tick=self.num_ticks,
            epoch=self.sampler.position,
            loss_scale=self.loss_scale.factor(self._precision.needs_loss_scale),
            num_skipped=self.loss_scale.num_skipped,
            num_skipped_in_row=self.loss_scale.num_skipped_in_row,
        )
        self._pending.observing(reading.observation, step=self.num_steps)

    def _decide(self) -> Tick | None:
        """Decides on what was last observed, and applies that; None if it has been done.

        What was survived since counts too: a batch that did not fit meanwhile is no reason to grow it now.
        """
        observation = self._pending.take_observation()
        if observation is None:
            return None
        faults = (*observation.faults, *self.sensors.take_faults())
        observation = replace(observation, faults=faults, adapting_ms=self._adapting_ms)
        self._require_finite(observation)
        decision = decide(self.config, observation, self.state)
        applied = self._actuators.apply(decision.plan, step=self.num_steps)
        self.state = decision.state
        if not applied.plan.steps_as(observation.plan):
            self.timer.restart()
        if applied.plan.needs_less_than(observation.plan):
            # Else the allocator's pool would look as full as before, and the batch would shrink at every tick.
            self.memory.begin_window()
        self.sensors.record_faults(applied.faults)
        self._adapting_ms += applied.adapt_ms
        self.num_ticks += 1
        self.timer.interrupt()
        tick = Tick(observation=observation, decision=decision, applied=applied)
        self._pending.decided(tick)
        return tick

    def train_epoch(self) -> EpochStats:
        """Makes the steps that are left of the present epoch and returns what they amount to."""
        epoch = self.sampler.epoch
        self._clock.start()
        while self.sampler.epoch == epoch:
            self.step()
        seconds = self._clock.finish()
        self._pending.record()
        return EpochStats(
            epoch=self.sampler.epoch,
            loss=mean_loss(self._epoch_loss),
            num_steps=self._epoch_steps,
            num_samples=self.sampler.num_samples,
            seconds=seconds,
        )

    def evaluate(self, data: Any, metrics: Metrics | None = None, *, is_last: bool = False) -> Evaluation:
        """Returns mean loss and metrics on `data`, computed in FP32 and eval mode, each sample drawn once.

        Without `metrics` a classifier is judged by its accuracy, any other model by its loss alone.

        In batches of the size that trains, on a GPU in parts of it (`judged_at_once`). `is_last` says that no step
        follows: the captured graphs then give back their memory first.
        """
        if is_last:
            self._pool.release()
        on_gpu = self.device.type == "cuda"
        with self.suspended():
            result = evaluate(
                self.model,
                self._loss,
                data,
                metrics,
                device=self.device,
                batch_size=judged_at_once(self.plan.batch_size, on_gpu=on_gpu, beside_graphs=not is_last),
                step=self.num_steps,
                release_memory=self._make_room,
            )
        self.sensors.record_faults(result.faults)
        return result

    def close(self) -> None:
        """Makes and records the decision that is due, and gives the model its own forward functions back.

        All of it is tried, whatever becomes of the rest: after an error of the device, reading from it raises again.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self._give_model_back)
            stack.callback(self._pending.record)
            with contextlib.suppress(NonFiniteGradientsError):
                self._decide()

    def _give_model_back(self) -> None:
        """Gives the model its own forward functions back, and the graphs' memory to the device."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.sampler.close)
            stack.callback(self._pool.release)
            stack.callback(self._steps.step.precision.remove)
            if self._steps.step.compilation is not None:
                stack.callback(self._steps.step.compilation.remove)

    def state_dict(self) -> dict[str, Any]:
        """Returns everything a resumed run needs to equal an uninterrupted one."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.optimizer.state_dict(),
            "sampler": self.sampler.state_dict(),
            "schedule": self._schedule.state_dict(),
            "loss_scale": self.loss_scale.state_dict(),
            "sensors": self.sensors.state_dict(),
            "curvature": self._curvature_rounds.state_dict(),
            "control": encode(self.state),
            "undecided": self._pending.state(),
            "plan": encode(self.plan),
            "micro_batches": [self._steps.step.num_micro_batches, self._steps.step.at_once],
            "counters": [self.num_steps, self.num_ticks, self._epoch_steps, self._adapting_ms],
            "epoch_loss": self._epoch_loss.clone(),
            "epoch_seconds": self._clock.seconds(),
            "memory_peaks": [self.memory.peak_bytes, self.memory.allocated_peak_bytes],
            "random": random_states(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from where `state_dict` was taken.

        Raises:
            ValueError, RuntimeError: the state belongs to another model or data set.
        """
        self.sampler.load_state_dict(state["sampler"])  # first, because it refuses another data set
        self.model.load_state_dict(state["model"])
        self.optimizer.optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        self.loss_scale.load_state_dict(state["loss_scale"])
        self.sensors.load_state_dict(state["sensors"])
        self._curvature_rounds.load_state_dict(state["curvature"])
        self.state = decode(ControlState, state["control"])
        self._pending.restore(state["undecided"])
        self._actuators = Actuators(decode(Plan, state["plan"]), self._steps, self._pool)
        self._steps.step.set_num_micro_batches(*state["micro_batches"])
        self.num_steps, self.num_ticks, self._epoch_steps, self._adapting_ms = state["counters"]
        self._epoch_loss.copy_(state["epoch_loss"])
        self._clock.restore(state["epoch_seconds"])
        self.timer.interrupt()
        self.timer.restart()
        self.memory.raise_peaks(*state["memory_peaks"])
        set_random_states(state["random"])

    def _require_finite(self, observation: Observation) -> None:
        """Ends a training whose gradients are no longer finite. FP16 may overflow: it is left to the loss scale.

        Raises:
            NonFiniteGradientsError: `max_skipped_steps` steps in a row were skipped.
        """
        num_skipped, limit = observation.num_skipped_in_row, self.config.max_skipped_steps
        if num_skipped >= limit and Precision.FP16 not in observation.plan.precision.values():
            raise NonFiniteGradientsError(
                f"the gradients of the last {num_skipped} steps were NaN or infinite, up to step {observation.step}: "
                "none of these steps was made. Lower the learning rate, set clip_norm, or look for log(0) and 0/0 in "
                f"model and loss; max_skipped_steps = {limit} says how many may follow one another"
            )

    def _make_room(self) -> None:
        """Gives back what can be had again: captured steps, and what the allocator keeps."""
        self._pool.release()
        self.memory.release()

    def _record_slower(self, phase: str, reason: str) -> None:
        """Records that something runs beside the captured steps which could have been captured but for this reason."""
        fault = Fault(kind=FaultKind.CAPTURE_FAILED, step=self.num_steps, phase=phase, detail=reason)
        self.sensors.record_faults([fault])

    def _record_optimizer_faults(self) -> None:
        for detail in self.optimizer.survived:
            fault = Fault.out_of_memory(detail, step=self.num_steps, phase="optimizer", batch_size=self.plan.batch_size)
            self.sensors.record_faults([fault])
        self.optimizer.survived.clear()
