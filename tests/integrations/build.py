"""Tiny models, texts and trainers of the tests that put `TriAccelTrainer` beside `Trainer`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Sampler

from tests.build import FP32
from triaccel_ray.config import BatchConfig, ControlConfig, CurvatureConfig, PrecisionConfig
from triaccel_ray.data.sampler import epoch_order

pytest.importorskip("transformers.trainer", reason="needs Hugging Face's transformers", exc_type=ImportError)

from safetensors.torch import load_file
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

__all__ = ["BertForSequenceClassification", "EarlyStoppingCallback", "Trainer", "TrainerCallback", "load_file"]
"""Test files have these from here, where their absence skips them."""

NUM_SAMPLES = 44
AS_IT_IS = ControlConfig(
    precision=PrecisionConfig(enabled=False, initial=FP32),
    batch=BatchConfig(enabled=False),
    curvature=CurvatureConfig(enabled=False),
)
ADAPTING = ControlConfig(
    every_steps=2,
    revert_slowdowns=False,  # time differs from run to run
    precision=PrecisionConfig(tau_low=1e-9, tau_high=1e-5, dwell_ticks=0, patience_ticks=1),
    curvature=CurvatureConfig(every_steps=3, num_samples=4),
)
"""Each size of batch that it does not name follows `per_device_train_batch_size`."""


def bert(*, dropout: float = 0.0, **options: Any) -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    chances = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return BertForSequenceClassification(
        BertConfig(intermediate_size=32, max_position_embeddings=16, num_labels=3, **sizes, **chances, **options)
    )


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=40, max_position_embeddings=16, num_key_value_heads=1, **sizes))


def texts(num_samples: int = NUM_SAMPLES, *, seed: int = 0) -> list[dict[str, Any]]:
    """Texts of ten tokens, labeled by their first."""
    tokens = torch.randint(1, 40, (num_samples, 10), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": ids, "labels": int(ids[0]) % 3} for ids in tokens]


def padded(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch for a language model of texts that are as long as their first token says."""
    ids = torch.stack([item["input_ids"] for item in items])
    mask = torch.arange(ids.shape[1]) < (3 + ids[:, :1] % 8)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


class LoopsOrder(Sampler[int]):
    """Draws the samples in the order in which the loop does."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples, self.seed, self.epoch = num_samples, seed, 0

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        order = epoch_order(self.num_samples, seed=self.seed, epoch=self.epoch)
        self.epoch += 1
        return iter(order.tolist())


class InLoopsOrder(Trainer):
    def _get_train_sampler(self, *_: Any) -> LoopsOrder:
        return LoopsOrder(len(self.train_dataset), self.args.seed)


def summed(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    """A loss function as the Trainer asks for one, which divides by the number that it is given."""
    logits = outputs[0] if isinstance(outputs, tuple) else outputs.logits
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    options = {
        "per_device_train_batch_size": 8,
        "num_train_epochs": 2,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        **changes,
    }
    return TrainingArguments(output_dir=str(folder), **options)


def trainer_of(kind: type[Trainer], folder: Path, model: Any = None, **options: Any) -> Trainer:
    """A trainer of `texts`; `options` are those of the trainer, of its arguments if it does not know them."""
    known = ("control", "on_tick", "callbacks", "compute_metrics", "compute_loss_func", "data_collator")
    own = {name: options.pop(name) for name in known if name in options}
    data = {"train_dataset": options.pop("train_dataset", texts()), "eval_dataset": texts(20, seed=1)}
    return kind(bert() if model is None else model, arguments(folder, **options), **data, **own)


def logged(trainer: Trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]
