"""Translates a `Trainer`'s arguments for the control loop, and refuses those that the loop does not support."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, RandomSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from triaccel_ray.config import BatchConfig, ControlConfig, require_instance
from triaccel_ray.data.sources import DataSource, as_source
from triaccel_ray.model.layers import Loss

_BATCH_SIZE_FIELDS = ("start", "minimum", "maximum", "accumulate", "granularity", "step_up", "step_down")
_METRIC_SCHEDULERS = ("reduce_lr_on_plateau", "greedy")
_UNSUPPORTED_OPTIMIZERS = ("lomo", "layerwise", "schedule_free")
"""Parts of the names of optimizers that step in the backward pass, or need to know when the model is evaluated."""
_UNSUPPORTED_HOOKS = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")


def control_of(control: ControlConfig | None, args: TrainingArguments) -> ControlConfig:
    """Returns `control` with the first batch size and the gradient norm bound of `args`.

    If `control` sets no batch sizes, they range from half of the first to eight times the first, in steps of half.

    Raises:
        TypeError: `control` is not a `ControlConfig`.
        ValueError: `control` sets another batch size or bound than `args`.
    """
    control = ControlConfig() if control is None else require_instance("control", control, ControlConfig)
    parts, norm = args.gradient_accumulation_steps, args.max_grad_norm or None
    batch, size = control.batch, args.train_batch_size * parts
    if control.clip_norm not in (None, norm):
        raise ValueError(
            f"control.clip_norm = {control.clip_norm}, max_grad_norm = {norm}: must be the same; give "
            "TrainingArguments(max_grad_norm=...) alone"
        )
    if all(getattr(batch, name) == getattr(BatchConfig(), name) for name in _BATCH_SIZE_FIELDS):
        batch = batch.around(size, accumulate=parts)
    elif (batch.start, batch.accumulate) != (size, parts):
        raise ValueError(
            f"control.batch.start = {batch.start} in {batch.accumulate} parts, per_device_train_batch_size x "
            f"gradient_accumulation_steps = {size} in {parts} parts: must be the same, the first batch"
        )
    return replace(control, batch=batch, clip_norm=norm)


def source_of(loader: DataLoader[Any]) -> DataSource:
    """Returns the samples of the Trainer's loader.

    Raises:
        ValueError: the loader does not draw each sample once an epoch, in random order.
    """
    sampler = getattr(loader.batch_sampler, "sampler", None)  # the loader's own `sampler` is an unused default
    draws_each_once = isinstance(sampler, RandomSampler) and not sampler.replacement
    if not draws_each_once or len(sampler) != len(loader.dataset):  # type: ignore[arg-type]
        raise ValueError(
            f"train_dataset {type(loader.dataset).__name__} is drawn by {type(sampler).__name__}: the loop draws each "
            "sample once an epoch, in random order; leave train_sampling_strategy out, and give a map-style data set"
        )
    plain = DataLoader(loader.dataset, shuffle=True, collate_fn=loader.collate_fn, num_workers=loader.num_workers)
    return as_source(plain)


def loss_of(trainer: Trainer) -> Loss:
    """Returns the Trainer's `compute_loss` as a function of the model's outputs and the batch."""
    is_users = trainer.compute_loss_func is not None or type(trainer).compute_loss is not Trainer.compute_loss

    def loss(outputs: Any, batch: Any) -> Any:
        # Private: the number that the Trainer gives a user's loss function to divide by.
        num_items = trainer._get_num_items_in_batch([batch], trainer.args.device) if is_users else None
        model = _Precomputed(trainer.model, outputs, batch)
        return trainer.compute_loss(model, {**batch}, num_items_in_batch=num_items)

    return loss


def require_supported(trainer: Trainer) -> None:
    """Checks that the loop supports a Trainer's arguments, callbacks and overridden methods.

    Raises:
        ValueError: it does not support one of them.
    """
    args = trainer.args
    refused = {
        "auto_find_batch_size": (args.auto_find_batch_size, "a batch that does not fit passes in parts anyway"),
        "torch_compile": (args.torch_compile, "give control=ControlConfig(execution=ExecutionConfig(compile='on'))"),
        "dataloader_drop_last": (args.dataloader_drop_last, "an epoch holds each sample once"),
        "torch_empty_cache_steps": (args.torch_empty_cache_steps, "the loop gives memory back where it has to"),
        "include_num_input_tokens_seen": (
            args.include_num_input_tokens_seen not in ("no", False),
            "samples are counted",
        ),
        "lr_scheduler_type": (args.lr_scheduler_type in _METRIC_SCHEDULERS, "choose one that needs no metric"),
        "optim": (any(part in args.optim for part in _UNSUPPORTED_OPTIMIZERS), "choose one with an ordinary step()"),
        "n_gpu": (args.n_gpu > 1, "the loop trains on one device: set CUDA_VISIBLE_DEVICES=0"),
        "world_size": (args.world_size > 1, "the loop trains on one device: start one process"),
    }
    for name, (is_asked_for, way_out) in refused.items():
        if is_asked_for:
            value = getattr(args, name)
            raise ValueError(f"{name} = {getattr(value, 'value', value)}: not under the control loop; {way_out}")
    if trainer.accelerator.mixed_precision != "no":
        raise ValueError(
            f"{trainer.accelerator.mixed_precision} = True: the loop chooses each layer's precision; leave it out, or "
            "give control=ControlConfig(precision=PrecisionConfig(...))"
        )
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or trainer.is_model_parallel:
        raise ValueError("the model is spread out by deepspeed, fsdp or a device_map: the loop trains on one device")
    if type(trainer).training_step is not Trainer.training_step:
        raise ValueError(
            f"{type(trainer).__name__}.training_step is overridden: the loop makes the steps; override compute_loss"
        )
    for callback, hook in itertools.product(trainer.callback_handler.callbacks, _UNSUPPORTED_HOOKS):
        if getattr(type(callback), hook) is not getattr(TrainerCallback, hook):
            raise ValueError(
                f"callback {type(callback).__name__} has {hook}: the loop makes a step as a whole, and never calls it; "
                "use on_step_begin or on_step_end"
            )


class _Precomputed:
    """Stands in for the model when `compute_loss` calls it; returns outputs that are computed already."""

    def __init__(self, model: nn.Module, outputs: Any, batch: dict[str, Any]) -> None:
        self._model, self._outputs, self._batch = model, outputs, batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        for name, value in inputs.items():
            if name != "num_items_in_batch" and value is not self._batch.get(name):
                raise ValueError(
                    f"compute_loss calls the model with {name} other than the batch's: the loop makes one forward "
                    "pass, of the batch as it is; compute what else there is in the model's forward"
                )
        if "labels" in inputs or "labels" not in self._batch:
            return self._outputs
        if isinstance(self._outputs, tuple):
            return self._outputs[1:]  # without the loss, as a model called without labels returns
        return type(self._outputs)(**{name: value for name, value in self._outputs.items() if name != "loss"})
