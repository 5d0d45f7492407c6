"""What the loop cannot do inside Hugging Face's `Trainer` is refused, before anything trains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset, WeightedRandomSampler

from tests.build import same, values
from tests.integrations.build import NUM_SAMPLES, TrainerCallback, arguments, bert, texts, trainer_of
from triaccel_ray.config import BatchConfig, ControlConfig
from triaccel_ray.integrations.transformers import TriAccelTrainer
from triaccel_ray.integrations.transformers_arguments import control_of


class Contrasting(TriAccelTrainer):
    def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Any:
        return model(input_ids=inputs["input_ids"].flip(1), labels=inputs["labels"]).loss


class Weighted(TriAccelTrainer):
    def _get_train_sampler(self, *_: Any) -> WeightedRandomSampler:
        return WeightedRandomSampler([1.0] * NUM_SAMPLES, NUM_SAMPLES)


class Stepping(TriAccelTrainer):
    def training_step(self, *args: Any) -> Any:
        return super().training_step(*args)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(texts())


class Clips(TrainerCallback):
    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Never called."""


def spread_out() -> Any:
    model = bert()
    model.hf_device_map = {"bert": 0, "classifier": 1}  # as from_pretrained(device_map="auto") leaves it
    return model


UNLABELED = [{"input_ids": text["input_ids"]} for text in texts()]
ARGUMENTS: dict[str, Any] = {
    "auto_find_batch_size": True,
    "torch_compile": True,
    "dataloader_drop_last": True,
    "torch_empty_cache_steps": 3,
    "include_num_input_tokens_seen": "all",
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "optim": "schedule_free_adamw",
}
AT_ONCE: tuple[tuple[type[TriAccelTrainer], Any, dict[str, Any], str], ...] = (
    *(
        (
            TriAccelTrainer, bert, {name: value, "eval_strategy": "epoch"},
            f"{name} = {value}: not under the control loop; ",
        )
        for name, value in ARGUMENTS.items()
    ),
    (TriAccelTrainer, bert, {"bf16": True}, "bf16 = True: the loop chooses each layer's precision; leave it out"),
    (TriAccelTrainer, bert, {"control": {"every_steps": 3}}, r"write ControlConfig\(\*\*control\)"),
    (
        TriAccelTrainer, bert, {"control": ControlConfig(clip_norm=2.0)},
        "control.clip_norm = 2.0, max_grad_norm = 1.0: must be the same",
    ),
    (
        TriAccelTrainer, bert, {"control": ControlConfig(batch=BatchConfig(maximum=256))},
        "start = 96 in 1 parts, per_device_train_batch_size x gradient_accumulation_steps = 8 in 1",
    ),
    (TriAccelTrainer, spread_out, {}, "spread out"),
    (Stepping, bert, {}, "Stepping.training_step is overridden: .* override compute_loss"),
    (TriAccelTrainer, bert, {"callbacks": [Clips()]}, "callback Clips has on_pre_optimizer_step"),
)  # fmt: skip
WHEN_IT_TRAINS: tuple[tuple[type[TriAccelTrainer], dict[str, Any], str], ...] = (
    (Contrasting, {}, "compute_loss calls the model with input_ids other than the batch's"),
    (TriAccelTrainer, {"train_dataset": UNLABELED}, "did not return a loss"),
    (TriAccelTrainer, {"train_sampling_strategy": "group_by_length"}, "leave train_sampling_strategy out"),
    (Weighted, {}, "is drawn by WeightedRandomSampler"),
    (TriAccelTrainer, {"train_dataset": Stream(), "max_steps": 4}, "train_dataset Stream .* a map-style data set"),
)


@pytest.mark.parametrize(("kind", "model", "options", "message"), AT_ONCE)
def test_what_the_loop_cannot_do_is_refused_when_the_trainer_is_made(
    kind: Any, model: Any, options: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(TypeError if "write ControlConfig" in message else ValueError, match=message):
        trainer_of(kind, tmp_path, model(), **options)


@pytest.mark.parametrize(("kind", "options", "message"), WHEN_IT_TRAINS)
def test_what_comes_out_later_is_refused_before_anything_trains(
    kind: Any, options: Any, message: str, tmp_path: Path
) -> None:
    trainer = trainer_of(kind, tmp_path, **options)
    before = values(trainer.model)
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert same(values(trainer.model), before)


def test_a_callback_within_a_step_is_refused_whenever_it_is_added(tmp_path: Path) -> None:
    trainer = trainer_of(TriAccelTrainer, tmp_path)
    trainer.add_callback(Clips())
    with pytest.raises(ValueError, match="callback Clips has on_pre_optimizer_step"):
        trainer.train()


def test_batch_sizes_follow_the_first_one_and_its_parts(tmp_path: Path) -> None:
    args = arguments(tmp_path, per_device_train_batch_size=8, gradient_accumulation_steps=4)
    assert control_of(None, args).batch == BatchConfig().around(32, accumulate=4)
