"""What a `Trainer` is given, as the control loop takes it; and what the loop cannot do, refused."""

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

_LADDER = ("start", "minimum", "maximum", "accumulate", "granularity", "step_up", "step_down")
_BY_METRIC = ("reduce_lr_on_plateau", "greedy")
_OTHER_STEPS = ("lomo", "layerwise", "schedule_free")
"""In the names of optimizers that step within the backward pass, or need to know when the model is judged."""
_INSIDE_A_STEP = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")


def control_of(control: ControlConfig | None, args: TrainingArguments) -> ControlConfig:
    """Returns `control` with the first batch and the bound on gradients of `args`.

    Where it names no batch sizes, they go from half of the first one to eight times as many, in steps of half.

    Raises:
        TypeError: it is no `ControlConfig`.
        ValueError: it names another batch or bound than `args`.
    """
    control = ControlConfig() if control is None else require_instance("control", control, ControlConfig)
    parts, norm = args.gradient_accumulation_steps, args.max_grad_norm or None
    batch, size = control.batch, args.train_batch_size * parts
    if control.clip_norm not in (None, norm):
        raise ValueError(
            f"control.clip_norm = {control.clip_norm}, max_grad_norm = {norm}: must be the same; give "
            "TrainingArguments(max_grad_norm=...) alone"
        )
    if all(getattr(batch, name) == getattr(BatchConfig(), name) for name in _LADDER):
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
        ValueError: it chooses samples in a way of its own.
    """
    sampler = getattr(loader.batch_sampler, "sampler", None)  # its own `sampler` is a default that nobody asks
    if not isinstance(sampler, RandomSampler):
        raise ValueError(
            f"train_dataset {type(loader.dataset).__name__} is drawn by {type(sampler).__name__}: the loop draws each "
            "sample once an epoch, in random order; leave train_sampling_strategy out, and give a map-style data set"
        )
    plain = DataLoader(loader.dataset, sampler=sampler, collate_fn=loader.collate_fn, num_workers=loader.num_workers)
    return as_source(plain)  # which knows more ways to choose samples, and refuses them


def loss_of(trainer: Trainer) -> Loss:
    """Returns the Trainer's `compute_loss` as a function of the outputs and their batch."""
    is_users = trainer.compute_loss_func is not None or type(trainer).compute_loss is not Trainer.compute_loss

    def loss(outputs: Any, batch: Any) -> Any:
        # Private: the number by which the Trainer lets a user's function divide.
        num_items = trainer._get_num_items_in_batch([batch], trainer.args.device) if is_users else None
        return trainer.compute_loss(_Computed(trainer.model, outputs, batch), {**batch}, num_items_in_batch=num_items)

    return loss


def require_supported(trainer: Trainer) -> None:
    """Checks that the loop can do what a Trainer's arguments ask for.

    Raises:
        ValueError: it cannot.
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
        "lr_scheduler_type": (args.lr_scheduler_type in _BY_METRIC, "choose one that needs no metric"),
        "optim": (any(part in args.optim for part in _OTHER_STEPS), "choose one with an ordinary step()"),
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
    for callback, hook in itertools.product(trainer.callback_handler.callbacks, _INSIDE_A_STEP):
        if getattr(type(callback), hook) is not getattr(TrainerCallback, hook):
            raise ValueError(
                f"callback {type(callback).__name__} has {hook}: the loop makes a step as a whole, and never calls it; "
                "use on_step_begin or on_step_end"
            )


class _Computed:
    """Stands for a model that has computed its outputs already, for `compute_loss` to call."""

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
            return self._outputs[1:]  # without the loss, as without labels
        return type(self._outputs)(**{name: value for name, value in self._outputs.items() if name != "loss"})
