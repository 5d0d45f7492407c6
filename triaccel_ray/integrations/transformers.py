"""A subclass of Hugging Face's `Trainer` that trains under a `ControlLoop`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import time
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from triaccel_ray.config import ControlConfig
from triaccel_ray.data.sources import DataSource
from triaccel_ray.integrations.transformers_arguments import control_of, loss_of, require_supported, source_of
from triaccel_ray.loop import ControlLoop
from triaccel_ray.records.checkpoint import load_checkpoint, save_checkpoint
from triaccel_ray.records.events import Tick
from triaccel_ray.records.plan import Precision

LOOP_STATE = "control_loop.pt"  # file in a checkpoint's folder: all that the loop needs to resume, but the model


class TriAccelTrainer(Trainer):  # type: ignore[misc]  # mypy skips transformers
    """A `Trainer` that trains under a `ControlLoop`, with the same arguments and a few more.

    `max_steps`, warm-up and schedule count batches of `per_device_train_batch_size` samples, whatever batch sizes the
    loop uses. `logging_steps`, `eval_steps` and `save_steps` count the loop's steps. Evaluation runs in FP32.
    """

    def __init__(
        self,
        *args: Any,
        control: ControlConfig | None = None,
        memory_budget: int | None = None,
        on_tick: Callable[[Tick], None] | None = None,
        **kwargs: Any,
    ) -> None:
        """Takes the arguments of `Trainer` and three of `ControlLoop`; `control` is the loop's `config`.

        Raises:
            TypeError: `control` is not a `ControlConfig`.
            ValueError: the loop does not support an argument.
        """
        super().__init__(*args, **kwargs)
        self.loop: ControlLoop | None = None
        """The loop that trains, while `train` runs; None otherwise."""
        self._config = control
        self._options: dict[str, Any] = {"memory_budget": memory_budget, "on_tick": on_tick}
        control_of(control, self.args)
        require_supported(self)

    # Private, like the methods it calls: the Trainer has no public method around the steps.
    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        require_supported(self)
        self.accelerator.free_memory()
        self.accelerator.prepare_model(self.model, evaluation_mode=True)  # else evaluation would, and log the time
        config, source = control_of(self._config, self.args), source_of(self.get_train_dataloader())
        per_epoch = -(-len(source) // config.batch.start)
        total = self.args.max_steps if self.args.max_steps > 0 else math.ceil(self.args.num_train_epochs * per_epoch)
        self._init_training_state(total, per_epoch, -(-total // per_epoch), resume_from_checkpoint, trial)
        self.loop = loop = self._new_loop(config, source, total)
        try:
            if resume_from_checkpoint is not None:
                state = load_checkpoint(Path(resume_from_checkpoint) / LOOP_STATE)
                loop.load_state_dict({**state, "model": loop.model.state_dict()})  # loaded by `train`
            ignored, began, none = ignore_keys_for_eval, time(), torch.zeros_like(loop.epoch_loss[0])
            self._tr_loss, self._step_loss, self._total_loss_scalar = none, none.clone(), 0.0
            self._initial_global_step = self._globalstep_last_logged = self.state.global_step
            self.control: Any = self.callback_handler.on_train_begin(self.args, self.state, self.control)
            if self.args.eval_on_start:
                self.evaluate(ignore_keys=ignored)
            report = partial(self._maybe_log_save_evaluate, self._tr_loss, None, self.model, trial, 0, ignored, began)
            while loop.sampler.num_batches(config.batch.start) < total and not self.control.should_training_stop:
                self._train_epoch(loop, total, report)
        finally:
            self.loop = None
            loop.close()
        return self._finalize_training(trial, total * config.batch.start, began)

    def _new_loop(self, config: ControlConfig, source: DataSource, total: int) -> ControlLoop:
        """Returns a new loop, whose schedule ends after `total` batches of the first size."""
        self.lr_scheduler: Any = None if self._created_lr_scheduler else self.lr_scheduler  # an earlier `train` made it
        self.create_optimizer_and_scheduler(total)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        epochs = total / -(-len(source) // config.batch.start)
        options = {"config": config, "schedule": self.lr_scheduler, "epochs": epochs, "seed": seed, **self._options}
        return ControlLoop(self.model, self.optimizer, loss_of(self), source, **options)

    def _train_epoch(self, loop: ControlLoop, total: int, report: Callable[..., None]) -> None:
        """Makes the remaining steps of the current epoch; `report` logs, evaluates and saves when due."""
        events, args, epoch, size = self.callback_handler, self.args, loop.sampler.epoch, loop.config.batch.start
        rate: float | None = None
        self.control = events.on_epoch_begin(args, self.state, self.control)
        while loop.sampler.epoch == epoch and not (self.control.should_epoch_stop or self.control.should_training_stop):
            self.control = events.on_step_begin(args, self.state, self.control)
            rate = self.optimizer.param_groups[0]["lr"] * loop.plan.batch_lr_scale
            before = torch.zeros_like(loop.epoch_loss) if loop.sampler.at_epoch_start else loop.epoch_loss.clone()
            loop.step()
            loss_sum, num_samples = loop.epoch_loss - before
            # On the device: a skipped step has no samples, and counts with the loss of the step before.
            self._step_loss = torch.where(num_samples > 0, loss_sum / num_samples, self._step_loss)
            self._tr_loss += self._step_loss
            done, per_epoch = loop.sampler.num_batches(size), -(-loop.sampler.num_samples // size)
            self.state.global_step += 1
            self.state.epoch = done // per_epoch + done % per_epoch / per_epoch
            # Larger batches need fewer steps, so the total number of steps is not known before the last one.
            self.state.max_steps = self.state.global_step + max(-(-(total - done) * size // loop.plan.batch_size), 0)
            self.control = events.on_step_end(args, self.state, self.control)
            report(learning_rate=rate)
        if self.control.should_epoch_stop:
            loop.sampler.end_epoch()
        self.control = events.on_epoch_end(args, self.state, self.control)
        report(learning_rate=rate)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluates the model as `Trainer` does, in FP32 during training, too."""
        if self.loop is None:
            return super().evaluation_loop(*args, **kwargs)
        with self.loop.suspended():
            result = super().evaluation_loop(*args, **kwargs)
        self.loop.model.train()
        return result

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs as `Trainer` does; adds the batch size and the number of layers in each precision to a training loss."""
        if self.loop is not None and "loss" in logs:
            plan = self.loop.plan
            layers = list(plan.precision.values())
            logs |= {"batch_size": plan.batch_size} | {f"layers_{each.value}": layers.count(each) for each in Precision}
        super().log(logs, start_time)

    # Private: the loop saves this part of a checkpoint in its own format.
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.loop is not None:
            state = {**self.loop.state_dict(), "model": None}  # saved in Hugging Face's own format
            save_checkpoint(Path(output_dir) / LOOP_STATE, state)
