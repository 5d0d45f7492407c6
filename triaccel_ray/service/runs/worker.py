"""One run on one device: a plain class that knows neither Ray nor MLflow."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from triaccel_ray.apply.evaluate import Evaluation
from triaccel_ray.baseline import BaselineLoop
from triaccel_ray.config import ControlConfig, require
from triaccel_ray.cuda.allocator import use_lean_memory
from triaccel_ray.data.sources import DataSource
from triaccel_ray.distributed.ranks import Ranks
from triaccel_ray.loop import ControlLoop
from triaccel_ray.measure.score import BYTES_PER_GB, EpochTimes, efficiency_score
from triaccel_ray.model.dry_run import forbidding_exit, users_lines
from triaccel_ray.records.checkpoint import CheckpointError, OtherFormatError, load_checkpoint, save_checkpoint
from triaccel_ray.records.codec import decode, encode
from triaccel_ray.records.events import End, Epoch, LogError, Tick
from triaccel_ray.records.goal import LOSS
from triaccel_ray.service.failures import (
    NonFiniteLossError,
    cause_of,
    failure_record,
    reporting_full_disk,
    require_finite_result,
    write_traceback,
)
from triaccel_ray.service.runs.building import build_loop, fitted_control, samples_of, seed_everything
from triaccel_ray.service.runs.environment import cap_memory_share, start_record
from triaccel_ray.service.runs.mailbox import Progress
from triaccel_ray.service.runs.objective import Performance
from triaccel_ray.service.runs.record import JOULES, ONE_VIEW, RunLog, is_spec_of, joules_after, performance_of
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.runs.trained_model import TrainedModel
from triaccel_ray.service.storage.layout import CHECKPOINT, ERROR, PREVIOUS, REPLACED
from triaccel_ray.service.storage.training_folder import TrainingFolder
from triaccel_ray.trainables.task import Purpose, Splits


class Worker:
    """Trains one run epoch by epoch, writes its event log, saves and restores it.

    What writes raises DiskFullError if there is no room, and TakenOverError if another process has taken over the run.
    """

    def __init__(self, spec: RunSpec, folder: Path, splits: Splits | None = None) -> None:
        """Builds model, data and loop; everything the run writes goes below `folder`.

        `splits` are the task's samples for `spec.purpose`, if they are loaded already.

        Raises:
            ValueError, FileNotFoundError: the spec cannot be carried out; the message says why.
        """
        self.spec, self.folder, self.log = spec, folder, RunLog(folder, spec)
        self.device = spec.torch_device
        # Both before the first tensor: existing ones would stay as they are, and the cap must hold for the model, too.
        if spec.lean_memory and not spec.is_baseline:
            use_lean_memory(self.device)
        self._budget_bytes = cap_memory_share(self.device, spec.trials_per_gpu, spec.memory_budget_bytes)
        if self.device.type == "cpu":
            torch.set_num_threads(1)  # waiting for threads on busy cores costs more than they gain
        seed_everything(spec.seed)
        self.ranks = Ranks.of_default_group()
        self._task = spec.load_task()
        rule = f"the run is judged by {spec.goal.name}: begin a new one"
        require(self._task.goal == spec.goal, "objective of the task", self._task.objective, rule)
        self._splits, self._at_end = samples_of(spec, self._task, splits)
        self._control = fitted_control(spec, len(self._splits.train))
        self.loop = self._build_loop(self._control)
        self._times = EpochTimes()
        self._trained_model = TrainedModel(spec, folder, self.log.confirm)
        self._one_view: Mapping[str, float] = {}
        self._saved_at, self._saving_s = 0.0, 0.0
        self.last: Epoch | None = None
        """The last epoch's record."""

    @property
    def performance(self) -> Performance | None:
        """The figures after the last epoch, on the validation samples; None if no epoch was evaluated on them."""
        return None if self.last is None else performance_of(self.last, self.spec.goal)

    @property
    def has_begun(self) -> bool:
        """Whether the run's log has been opened."""
        return self.log.is_open

    @property
    def finished(self) -> bool:
        """Whether all epochs are done."""
        return self.loop.sampler.epoch >= self.spec.recipe.epochs

    def resume(self) -> int:
        """Resumes from the newest intact checkpoint, or starts if there is none; returns the number of epochs done.

        It first sets a damaged log aside, and fences off a process that still writes the log. If all checkpoints are
        damaged, the run starts over, and its log is kept as REPLACED. The new log says what happened.

        Raises:
            CheckpointError: the checkpoint belongs to a run with other settings, or another version has written it.
        """
        self.log.take_over()
        for torn in self.folder.glob(".*.pt.*.partial"):
            torn.unlink()  # left by a process that was lost while it wrote
        notes, size = list[str](), self.ranks.world_size
        num_kept: int | None = None
        for path in (self.folder / CHECKPOINT, self.folder / PREVIOUS):
            if num_kept is None and path.exists():
                num_kept, damage = self._restore(path)
                if damage:
                    notes.append(damage)
        self.ranks.broadcast_bytes(None)
        if self.ranks.any(num_kept is None and bool(notes)):
            self._rebuild_loop()
        if num_kept is None:
            if self.log.keep_replaced():
                notes.append(f"no checkpoint can be read, and what was recorded is in {REPLACED}")
            self.log.open()
            self.log.append(start_record(self.spec, self._control, self.loop.memory, size))
        (self.folder / ERROR).unlink(missing_ok=True)  # an interruption is about to be recorded in its place
        epoch = self.loop.sampler.epoch
        notes.insert(0, f"goes on after epoch {epoch}" if epoch else "begins again")
        self.log.record_interruption(num_kept or 1, world_size=size, epoch=epoch, notes=notes)
        return epoch

    def train_epoch(self, folder: TrainingFolder) -> Progress:
        """Trains, saves and uploads the next epoch, if one is left; finishes the run after the last one.

        An error gets the user's own lines as a note: notes reach the driver, the traceback does not.
        """
        try:
            with forbidding_exit():
                if not self.finished:
                    self.advance()
                    self._save_if_due()
                if self.finished:
                    self.finish()
        except Exception as error:
            if lines := users_lines(error):
                error.add_note(lines)
            raise
        folder.close() if self.finished else folder.push_soon()
        return Progress(epoch=self.loop.sampler.epoch, performance=self.performance, finished=self.finished)

    def advance(self) -> None:
        """Trains one epoch, and evaluates it on the validation samples, never on test samples.

        Raises:
            NonFiniteLossError: the training loss or the metric is not finite, or the validation loss and a value in
                the model are not.
            torch.OutOfMemoryError, MemoryError: not even one sample fits.
        """
        plan, began = self.loop.plan, time.thread_time()
        stats = self.loop.train_epoch()
        # On a CPU the processor time of the one thread: other processes on its core do not lengthen it.
        compute_seconds = time.thread_time() - began if self.device.type == "cpu" else stats.seconds
        if not math.isfinite(stats.loss):
            raise NonFiniteLossError(f"the training loss of epoch {stats.epoch} is {stats.loss}{self._way_out()}")
        evaluation = self._evaluate(self._splits.held_out) if self.spec.validates else None
        self._times.add(stats.epoch, stats.seconds, compute_seconds, has_changed_plan=not self.loop.plan.steps_as(plan))
        typical_seconds, memory = self._times.typical, self.loop.memory
        memory.refresh_peaks()
        record = Epoch(
            epoch=stats.epoch,
            step=self.loop.num_steps,
            train_loss=stats.loss,
            held_out_loss=None if evaluation is None else evaluation.loss,
            held_out_metrics={} if evaluation is None else evaluation.metrics,
            seconds=stats.seconds,
            images_per_second=stats.num_samples / stats.seconds,
            batch_size=self.loop.plan.batch_size,
            peak_bytes=memory.peak_bytes,
            allocated_peak_bytes=memory.allocated_peak_bytes,
            num_skipped=self.loop.num_skipped,
            score=None if evaluation is None else self._score(evaluation.metrics, evaluation.loss, typical_seconds),
            typical_seconds=typical_seconds,
            joules=joules_after(self.last, stats.joules, self.spec),
        )
        self.log.append(record)
        self.last = record
        self._trained_model.after_epoch(record, self.loop.model)

    def finish(self) -> dict[str, float]:
        """Evaluates the finished run (a final run once on the test set), ends the log, and returns the results.

        Raises:
            NonFiniteLossError: the metric is not finite, or the loss on the test samples and a value in the model.
        """
        last = self.last
        assert last is not None  # a recipe has at least one epoch
        metrics, loss = last.held_out_metrics, last.held_out_loss
        if loss is None or self.spec.purpose is Purpose.FINAL:
            evaluation = self._evaluate(self._at_end)
            metrics, loss = evaluation.metrics, evaluation.loss
        memory = self.loop.memory
        memory.refresh_peaks()
        # Trials are judged by typical seconds, other runs by the mean, as in the paper.
        seconds = self._times.typical if self.spec.purpose is Purpose.SEARCH else self._times.mean
        results = {
            **metrics,
            **{f"{ONE_VIEW}{name}": value for name, value in self._one_view.items()},
            LOSS: loss,
            "seconds_per_epoch": seconds,
            "peak_gb": memory.peak_bytes / BYTES_PER_GB,
            "allocated_peak_gb": memory.allocated_peak_bytes / BYTES_PER_GB,
            "score": self._score(metrics, loss, seconds),
            "idle_gb": memory.idle_bytes / BYTES_PER_GB,
            "limit_gb": memory.limit_bytes / BYTES_PER_GB,
            "epochs": float(last.epoch),
            **({} if last.joules is None else {JOULES: last.joules}),
        }
        kept_epoch = self._trained_model.finish(last, self.loop.model)
        self.log.append(End(status="finished", results=results, kept_epoch=kept_epoch))
        return results

    def stop(self) -> None:
        """Ends the log of a run that is stopped on purpose; may be called from another thread during training."""
        self.log.append(End(status="stopped"))

    def fail(self, error: Exception) -> None:
        """Ends the log of a run that failed with `error`, and writes the traceback beside it."""
        write_traceback(self.folder, error)
        self.log.append(failure_record(error))

    def close(self) -> None:
        """Frees model, data and memory, and closes the log."""
        del self._splits, self._at_end
        try:
            self._drop_loop()
        finally:  # after a device error it raises again, and the log must be whole all the same
            self.log.close()

    def _save_if_due(self) -> None:
        """Writes a checkpoint if one is due on rank 0, with the help of all ranks; raises as `checkpoint`.

        Saving takes at most a twentieth of the time, unless it takes 0.25 s or less. The last epoch is always saved.
        """
        began = time.monotonic()
        interval_s = began - self._saved_at + self._saving_s
        is_due = self.finished or self._saving_s <= max(0.25, 0.05 * interval_s)
        if self.ranks.any(is_due and self.ranks.rank == 0):
            self.checkpoint()
            self._saved_at = time.monotonic()
            self._saving_s = self._saved_at - began

    def checkpoint(self) -> None:
        """Writes the checkpoint that `resume` restores, and keeps the previous one.

        Does nothing once the log has ended: `stop`, from another thread, may have ended it before the epoch was logged.
        If it raises, the previous checkpoint stays.
        """
        loop = self.loop.state_dict()  # a collective, if ranks share the optimizer
        # On the disk: a checkpoint must never count records that a power cut can lose. It does not count an end record
        # that is written from here on.
        synced = self.log.synced()
        if synced is None:
            return
        num_records, checksum = synced
        state = {
            "spec": json.dumps(encode(self.spec)),
            "loop": loop,
            "num_records": num_records,
            "log_checksum": checksum,
            "epoch_times": self._times.state_dict(),
            "last": None if self.last is None else encode(self.last),
            "trained_model": self._trained_model.state_dict(self.last),
        }
        with reporting_full_disk(self.folder):
            path, previous = self.folder / CHECKPOINT, self.folder / PREVIOUS
            save_checkpoint(path, state, previous=previous, confirm=self.log.confirm)

    def _restore(self, path: Path) -> tuple[int | None, str]:
        """Restores the checkpoint at `path`: cuts the event log back to it, and rewrites the best weights from it.

        Returns the number of records kept; or None, and why the checkpoint is damaged or does not belong to this log.
        One that is intact, but of another run or version, or has no room, raises.
        """
        try:
            state = load_checkpoint(path)
        except OtherFormatError:
            raise  # it is not damaged, so the run must not start over
        except CheckpointError as error:
            return None, str(error)
        if not is_spec_of(self.spec, state["spec"]):
            raise CheckpointError(f"checkpoint {path} belongs to a run with other settings: resume that one instead")
        if not self.ranks.is_alone:  # other machines may lack the file
            self.ranks.broadcast_bytes(path.read_bytes())
        try:
            self._load(state)
            # Last, because it cuts the log back: a state that does not fit must not lose records.
            self.log.open(keep=state["num_records"], checksum=state["log_checksum"])
        except (LogError, RuntimeError, ValueError, KeyError) as error:
            if cause_of(error) != "bug":  # no room on the disk or the device: the checkpoint is intact
                raise
            return None, f"checkpoint {path} does not fit its run: {error}"
        self._trained_model.load_state_dict(state.get("trained_model"), self.loop.model)
        return state["num_records"], ""

    def _load(self, state: Mapping[str, Any]) -> None:
        self.loop.load_state_dict(state["loop"])
        self._times.load_state_dict(state["epoch_times"])
        self.last = None if state["last"] is None else decode(Epoch, state["last"])

    def _build_loop(self, control: ControlConfig) -> ControlLoop | BaselineLoop:
        return build_loop(self.spec, self._task, self._splits, control, self._budget_bytes, self._on_tick)

    def _on_tick(self, tick: Tick) -> None:
        self.log.append(tick)

    def _rebuild_loop(self) -> None:
        self._drop_loop()  # first: its memory would count as the next one's
        self.loop = self._build_loop(self._control)
        self._times, self.last = EpochTimes(), None

    def _drop_loop(self) -> None:
        """Frees the memory of model, optimizer and captured steps."""
        if not hasattr(self, "loop"):
            return  # building its successor failed
        loop, memory = self.loop, self.loop.memory
        del self.loop
        try:
            loop.close()
        finally:
            del loop
            memory.release()

    def _evaluate(self, samples: DataSource) -> Evaluation:
        evaluation = self.loop.evaluate(samples, self._task.metrics, is_last=self.finished)
        require_finite_result(evaluation, self.loop.model, self.spec.goal, self._way_out())
        self._one_view = evaluation.one_view
        return evaluation

    def _way_out(self) -> str:
        in_fp16 = self.spec.method == "amp" and self.spec.recipe.amp == "fp16" and self.device.type == "cuda"
        return ": FP16 may be too narrow for this model, try --amp bf16" if in_fp16 else ""

    def _score(self, metrics: Mapping[str, float], loss: float, seconds: float) -> float:
        value = {**metrics, LOSS: loss}[self.spec.goal.name]
        peak_gb = self.loop.memory.peak_bytes / BYTES_PER_GB
        return efficiency_score(value, seconds, peak_gb, self.spec.goal)
