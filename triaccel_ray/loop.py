"""The control loop, which adapts precision, learning rate and batch size during training (Tri-Accel, section 3.4)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from triaccel_ray.apply.actuators import Actuators
from triaccel_ray.apply.evaluate import Evaluation, Metrics, evaluate, evaluation_batch_size
from triaccel_ray.config import ControlConfig, require_instance
from triaccel_ray.control.consensus import agreed_observation, require_same_steps
from triaccel_ray.control.curvature import ScheduledCurvature
from triaccel_ray.control.epochs import EpochLoop, EpochProgress, EpochStats, LossBuffers, SampleSchedule, Schedule
from triaccel_ray.control.errors import NonFiniteGradientsError as NonFiniteGradientsError
from triaccel_ray.control.errors import explaining_errors, require_finite
from triaccel_ray.control.pending_tick import RECORD_AFTER, FaultLogger, PendingTick
from triaccel_ray.control.sensitivity import refuse_harmful, withhold, withhold_sensitive
from triaccel_ray.control.training import Training
from triaccel_ray.data.iterable import IterableSource
from triaccel_ray.data.sources import default_config
from triaccel_ray.decide import ControlState, decide, initial_decision
from triaccel_ray.measure.profile import ProfileMeter
from triaccel_ray.measure.sensors import Sensors
from triaccel_ray.measure.timing import StepTimer
from triaccel_ray.model.layers import Loss
from triaccel_ray.records.codec import decode, encode
from triaccel_ray.records.events import Tick
from triaccel_ray.records.plan import Fault, FaultKind, Plan, Precision


class ControlLoop(EpochLoop):
    """Trains a model while adapting its precision, learning rate and batch size.

    On each rank of an initialized `torch.distributed` group, it trains data-parallel. Every method is a collective,
    except `close` and, with `shard_optimizer=False`, `state_dict`. Close it before the group is destroyed: captured
    steps hold the communicator.
    """

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
        epochs: float | None = None,
        seed: int = 0,
        on_tick: Callable[[Tick], None] | None = None,
    ) -> None:
        """Prepares the training of `model` on the device of its parameters.

        Args:
            model: any module; its layers are found by `find_layers`.
            optimizer: any PyTorch optimizer over the model's parameters that needs no closure. Fused ones skip
                overflows without a host synchronization.
            loss: maps (outputs, targets) to the mean loss; outputs arrive in FP32.
            data: the training samples: an (inputs, targets) pair of tensors or arrays, a map-style or iterable data
                set, a `DataLoader`, or a `DataSource`.
            config: thresholds and intervals. None: the defaults, with a `DataLoader`'s batch size as the initial one.
            schedule: function of the epochs trained (fractional) that returns a factor on the learning rates; or a
                PyTorch scheduler of this optimizer. The loop steps a scheduler as if all batches had `batch.start`
                samples. A scheduler that you step yourself, once per epoch, also works.
            memory_budget: bytes this process may hold on the device; None: the whole device.
            memory_headroom: bytes beyond what the process holds before its first batch; a budget bounds the total.
            epochs: length of the whole run in epochs. A larger batch must save more until then than it costs. None:
                unknown; as many samples as have been trained are assumed to follow.
            seed: seed of the sample order, the augmentation and the samples for curvature.
            on_tick: called once with each tick, in order; on every rank, so record on one. With `EventLog.append`, the
                ticks go to an event log for `triaccel report` and `triaccel replay`. The loop begins an empty log with
                a start record that holds the configuration, and `close` writes the last record. None: the logger
                `triaccel_ray` reports faults, each once, such as steps that could not be captured.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: the model has no layer, the loop cannot train it (`require_trainable`), two samples cannot pass
                through model and loss (`require_working`), the scheduler ends before the run, or the budget leaves no
                memory for a batch.
        """
        self.config = default_config(data) if config is None else require_instance("config", config, ControlConfig)
        self._schedule = SampleSchedule(schedule, optimizer, batch_size=self.config.batch.start)
        self._training = training = Training(
            model, optimizer, loss, data, self.config, memory=(memory_budget, memory_headroom), epochs=epochs, seed=seed
        )
        self.model, self.device, self.sampler, self._ranks = model, training.device, training.sampler, training.ranks
        if not isinstance(self.sampler.source, IterableSource):
            batch = self.config.batch
            maximum = min(batch.maximum, max(self.sampler.num_samples, batch.start))
            self.config = replace(self.config, batch=replace(batch, maximum=maximum))
        self.optimizer, self.loss_scale, self.memory = training.optimizer, training.loss_scale, training.memory
        self.num_steps = self.num_ticks = 0
        """Optimizer steps done, including skipped ones, and ticks done."""
        try:
            self._schedule.require_enough_steps(self.sampler.num_samples, epochs)
            self._epoch, self.timer = EpochProgress(self.device, training.loss_sums[0]), StepTimer(self.device)
            step = training.steps.step
            withhold_sensitive(training, self.config)
            profile = ProfileMeter(model, self.device, step.region_costs)
            self.sensors = Sensors(
                training.supported, training.moments, self.memory, self.timer, training.loss_sums[1], profile
            )
            self.sensors.record_faults(training.faults)
            require_same_steps(self._ranks, training.steps, training.supported)
            first = initial_decision(self.config, training.supported, step.activations.regions)
            self._curvature = ScheduledCurvature(training, self.sensors, self.config, seed=seed)
            self.curvature = self._curvature.meter
            self._curvature.start()  # before the plan: layers in 16 bits then have no copies that take memory yet
            self.state, self._actuators = first.state, Actuators(first.plan, training.steps, training.pool)
            if on_tick is None and self._ranks.rank == 0:
                on_tick = FaultLogger()
            self._pending = PendingTick(on_tick, self.config, decides_late=self.device.type == "cuda")
        except BaseException:
            training.remove()
            raise

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._actuators.plan

    @property
    def num_skipped(self) -> int:
        """Number of steps skipped so far for a NaN or infinite gradient; waits for the device."""
        return int(self.loss_scale.state.num_skipped.item())

    def step(self) -> None:
        """Performs one optimizer step, then the tick and the curvature measurement if they are due.

        On a GPU, a tick decides after three more steps have been launched, so that the device does not wait. Its
        decision takes effect with the step after these, or with the next epoch's first step if that comes sooner.
        """
        self._train()
        self.num_steps += 1
        is_epoch_over = self.sampler.at_epoch_start
        if is_epoch_over or self.num_steps == self._pending.decide_at:
            self._decide()
        if self.num_steps % self.config.every_steps == RECORD_AFTER:
            self._pending.record()
        if self._curvature.is_due(self.num_steps):
            self._curvature.measure(self.num_steps, is_awaited=self.state.batch.waits_for_noise)
        if self.num_steps % self.config.every_steps == 0:
            self._decide()
            self._observe()
            if is_epoch_over or not self._pending.decides_late:
                self._decide()

    def tick(self) -> Tick:
        """Runs a tick now: measures, decides and applies the decision. Returns the tick's record.

        On a GPU, the record is written a few steps later, or at the end of the epoch: the device has work by then.
        """
        self._decide()
        self._observe()
        tick = self._decide()
        assert tick is not None
        return tick

    def _train(self) -> None:
        """Performs one optimizer step under the current plan."""
        plan, timer, precision = self.plan, self.timer, self._training.precision
        if self.sampler.at_epoch_start:
            self._epoch.begin()
            timer.interrupt()
        if not self.model.training:
            self.model.train()
        precision.weights.refresh()
        lr_factor = self._schedule.factor(self.sampler.position) * plan.batch_lr_scale
        self.optimizer.set_rates(lr_factor, plan.lr_scale, precision.weights.companions)
        scale = self.loss_scale.factor(precision.needs_loss_scale)
        indices = self.sampler.take(plan.batch_size)
        timer.begin()
        shares = self.sampler.last_batch
        run = partial(self._training.steps.run, indices, scale, step=self.num_steps, shares=shares)
        with explaining_errors(self._training, None if self.num_steps else run):
            faults = run()
        timer.end(counts=shares.num_samples == plan.batch_size)
        self._schedule.advance(self.sampler)
        self.sensors.record_faults(faults)
        self.sensors.record_faults(self.optimizer.take_faults(step=self.num_steps, batch_size=plan.batch_size))
        self._epoch.num_steps += 1

    def _observe(self) -> None:
        """Starts reading the observation for the next decision."""
        self._training.statistics.mend()
        scale = self.loss_scale.read(self._training.precision.needs_loss_scale)
        step, tick, epoch = self.num_steps, self.num_ticks, self.sampler.position
        self._pending.observing(self.sensors.read(self.plan, scale, step=step, tick=tick, epoch=epoch), step=step)

    def _decide(self) -> Tick | None:
        """Decides on the last observation, applies the decision and returns the tick; None if that is already done.

        Faults since the observation count, too: a batch that did not fit meanwhile must not grow now.
        """
        seen = self._pending.take_observation()
        if seen is None:
            return None
        faults = (*seen.faults, *self.sensors.take_faults())
        step = self._training.steps.step
        observation = replace(
            seen,
            faults=faults,
            regions=tuple(step.activations.regions),
            adapting_ms=self._actuators.adapting_ms,
            is_compiled=step.is_compiled,
            samples_left=self.sampler.samples_left,
            parameters=self._training.parameters,
        )
        observation = agreed_observation(self._ranks, observation)
        require_finite(self.config, observation)
        decision = decide(self.config, observation, self.state)
        self._ranks.require_equal(f"the decision of tick {self.num_ticks}", encode(decision))
        if not self._ranks.is_alone:
            self._ranks.require_equal(f"the learning rate of tick {self.num_ticks}", self.optimizer.rates)
        plan, refusals = refuse_harmful(self._training, self.config, self.plan, decision.plan, step=self.num_steps)
        applied = self._actuators.apply(plan, step=self.num_steps)
        applied = replace(applied, faults=(*applied.faults, *refusals))
        if decision.remeasures_regions:
            self._actuators.measure_regions_again()
        self.sensors.begin_interval(observation.plan, applied)
        self.state = decision.state
        self.num_ticks += 1
        tick = Tick(observation=observation, decision=decision, applied=applied)
        self._pending.decided(tick)
        return tick

    def train_epoch(self) -> EpochStats:
        """Trains for the rest of the current epoch and returns the epoch's statistics."""
        stats = super().train_epoch()
        self._pending.record()
        return stats

    def evaluate(self, data: Any, metrics: Metrics | None = None, *, is_last: bool = False) -> Evaluation:
        """Returns mean loss and metrics on `data`, computed in FP32 and eval mode, each sample drawn once.

        Without `metrics`, a classifier is judged by its accuracy, any other model by its loss alone.

        Batches have the training batch size, on a GPU a fraction of it (`evaluation_batch_size`). `is_last` says that
        no training step follows: the captured graphs are released first, and batches may take half of their memory.
        """
        largest = step_bytes = 0
        if is_last:
            self._training.pool.release()
            largest, step_bytes = self.plan.batch_size, self.memory.bytes_of_step()
        on_gpu = self.device.type == "cuda"
        batch_size = evaluation_batch_size(self.plan.batch_size, on_gpu=on_gpu, beside_graphs=not is_last)
        with self.suspended():
            result = evaluate(
                self.model, self._training.loss, data, metrics, device=self.device, batch_size=batch_size,
                step=self.num_steps, release_memory=self._training.make_room, ranks=self._ranks,
                largest=largest, step_bytes=step_bytes,
            )  # fmt: skip
        self._training.steps.agree()
        self.sensors.record_faults(result.faults)
        return result

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Returns a context in which the model computes in FP32 with its own forward code, to evaluate it.

        Memory that it takes does not count in the window's peak, so it does not shrink the batch.
        """
        with self.memory.outside_window():
            try:
                with self._training.suspended():
                    yield
            finally:
                self.timer.interrupt()
                if self.device.type == "cuda":  # a CPU would map the same pages again in the next step
                    self.memory.trim()  # or memory cached by evaluation would add to that of the graphs

    def close(self) -> None:
        """Makes and records a pending decision, and restores the model's own forward functions.

        Each part is attempted even if another fails: after a device error, reading from the device raises again.
        """
        with contextlib.ExitStack() as stack, contextlib.suppress(NonFiniteGradientsError):
            stack.callback(self._training.remove)
            stack.callback(self._pending.close)
            if self._ranks.is_alone:  # of several, one may have failed: it would wait for the others
                self._decide()

    def state_dict(self) -> dict[str, Any]:
        """Returns everything a resumed run needs to equal an uninterrupted one.

        Model and optimizer are not copied, as in PyTorch: save the state, or `copy.deepcopy` it, before the next step.
        """
        self._training.statistics.mend()
        return {
            **super().state_dict(),
            **self._actuators.state_dict(),
            "control": encode(self.state),
            "timer": self.timer.state_dict(),
            "withheld": sorted([name, level.value] for name, level in self._training.withheld),
            "counters": [self.num_steps, self.num_ticks, self._epoch.num_steps],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state that `state_dict` returned.

        Raises:
            ValueError, RuntimeError: the state belongs to another model or data set.
        """
        super().load_state_dict(state)
        self._training.statistics.keep()
        withhold(self._training, {(name, Precision(level)) for name, level in state["withheld"]})
        self.state = decode(ControlState, state["control"])
        adapts, adapts_batch = self.config.precision.enabled, self.config.batch.enabled
        self._actuators.load_state_dict(
            state, dict(self._training.supported), adapts_precision=adapts, adapts_batch=adapts_batch
        )
        self.num_steps, self.num_ticks, self._epoch.num_steps = state["counters"]
        self.timer.load_state_dict(state.get("timer", {}))  # checkpoints of older versions have none
        stored = decode(Plan, state["plan"])
        if not self.plan.steps_as(stored):  # then observation and timer are those of another plan
            self._pending.load_state_dict(None)
            self.timer.restart()
            levels = ((name, stored.precision[name], level) for name, level in self.plan.precision.items())
            moved = ", ".join(f"{name} {before} -> {level}" for name, before, level in levels if level is not before)
            text = f"the resumed run takes other {f'precisions: {moved}' if moved else 'batch sizes or storage'}"
            fault = Fault(kind=FaultKind.PLAN_REPLACED, step=self.num_steps, phase="resume", detail=text[:500])
            self.sensors.record_faults([fault])
        self._ranks.require_equal("the checkpoint", [*state["counters"], *state["micro_batches"], state["control"]])

    def _parts(self) -> dict[str, Any]:
        return {
            "sampler": self.sampler,  # first, because it rejects the state of another data set
            "model": self.model,
            "loss": LossBuffers(self._training.loss),
            "optimizer": self.optimizer,
            "schedule": self._schedule,
            "loss_scale": self.loss_scale,
            "sensors": self.sensors,
            "curvature": self._curvature,
            "undecided": self._pending,
        }
