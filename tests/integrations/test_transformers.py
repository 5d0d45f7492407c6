"""`TriAccelTrainer` beside `Trainer`: the same arguments, the same training. Models are made of configurations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.build import BF16, same, values
from tests.integrations.build import (
    ADAPTING,
    AS_IT_IS,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    InLoopsOrder,
    Trainer,
    TrainerCallback,
    bert,
    llama,
    load_file,
    logged,
    padded,
    summed,
    texts,
    trainer_of,
)
from triaccel_ray.config import BatchConfig, ControlConfig, PrecisionConfig
from triaccel_ray.integrations.transformers import LOOP_STATE, TriAccelTrainer
from triaccel_ray.records.checkpoint import CheckpointError
from triaccel_ray.records.events import Tick


class Weighing:
    """Overrides `compute_loss` as users do: classes have weights."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        assert model.config.num_labels == 3
        assert "loss" not in outputs
        loss = torch.nn.functional.cross_entropy(outputs["logits"], labels, weight=torch.tensor([1.0, 2.0, 3.0]))
        return (loss, outputs) if return_outputs else loss


class WeighingInOrder(Weighing, InLoopsOrder):
    pass


class WeighingTriAccel(Weighing, TriAccelTrainer):
    pass


PLAIN = (InLoopsOrder, TriAccelTrainer)


def accuracy(judged: Any) -> dict[str, float]:
    return {"accuracy": float((judged.predictions.argmax(-1) == judged.label_ids).mean())}


CASES: dict[str, tuple[dict[str, Any], Any, tuple[type[Trainer], type[Trainer]]]] = {
    "warm-up, weight decay, clipped gradients": (
        {"warmup_steps": 3, "weight_decay": 0.1, "max_grad_norm": 0.1}, bert, PLAIN,
    ),
    "SGD, without a bound, by steps": ({"optim": "sgd", "max_grad_norm": 0.0, "max_steps": 9}, bert, PLAIN),
    "smoothed labels": ({"label_smoothing_factor": 0.2}, bert, PLAIN),
    "a loss function of tuples": ({"compute_loss_func": summed}, lambda: bert(return_dict=False), PLAIN),
    "accumulated gradients": (
        {
            "gradient_accumulation_steps": 3, "per_device_train_batch_size": 4, "num_train_epochs": 3,
            "train_dataset": texts(48), "compute_loss_func": summed,  # of BERT's own loss the Trainer adds up the parts
        },
        bert, PLAIN,
    ),
    "a language model on padded texts": ({"data_collator": padded}, llama, PLAIN),
    "an overridden loss": ({}, bert, (WeighingInOrder, WeighingTriAccel)),
}  # fmt: skip


def both(folder: Path, kinds: tuple[type[Trainer], type[Trainer]] = PLAIN, **options: Any) -> tuple[Trainer, Trainer]:
    """A Trainer and the loop's under the same options, trained where nothing adapts; `model` makes each one's own."""
    make, callbacks = options.pop("model", bert), options.pop("callbacks", list)
    found = []
    for kind, more in zip(kinds, ({}, {"control": AS_IT_IS}), strict=True):
        found.append(trainer_of(kind, folder / kind.__name__, make(), callbacks=callbacks(), **options, **more))
        found[-1].train()
    return found[0], found[1]


def require_same_training(trainer: Trainer, reference: Trainer) -> None:
    for name in ("loss", "learning_rate", "epoch", "step", "eval_loss", "eval_accuracy"):
        assert logged(trainer, name) == pytest.approx(logged(reference, name), rel=1e-4, abs=1e-7), name
    ours, theirs = values(trainer.model), values(reference.model)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_the_trainer_does_where_nothing_adapts(case: str, tmp_path: Path) -> None:
    options, model, kinds = CASES[case]
    judged = {"compute_metrics": accuracy, "eval_strategy": "epoch"} if model is bert and kinds is PLAIN else {}
    reference, trainer = both(tmp_path, kinds, model=model, **judged, **options)
    require_same_training(trainer, reference)
    names, expected = ({name for entry in each.state.log_history for name in entry} for each in (trainer, reference))
    assert names == expected - {"grad_norm"} | {"batch_size", "layers_fp8", "layers_fp16", "layers_bf16", "layers_fp32"}
    assert trainer.state.global_step == reference.state.global_step == len(logged(trainer, "loss")) > 8
    ours, theirs = (logged(each, "train_loss") for each in (trainer, reference))
    assert ours == pytest.approx(theirs, rel=1e-4)
    if judged:
        assert trainer.evaluate()["eval_loss"] == pytest.approx(reference.evaluate()["eval_loss"], rel=1e-4)
        ours, theirs = (each.predict(texts(5, seed=2)).predictions for each in (trainer, reference))
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


def test_the_batch_grows_while_schedule_and_end_keep_to_the_samples(tmp_path: Path) -> None:
    ticks: list[Tick] = []
    options = {"num_train_epochs": 6, "per_device_train_batch_size": 4, "warmup_steps": 11, "learning_rate": 1e-2}
    trainer = trainer_of(TriAccelTrainer, tmp_path, control=replace(ADAPTING, batch=BatchConfig(lr_rule="none")),
                         on_tick=ticks.append, **options)  # fmt: skip
    result = trainer.train()
    sizes, rates = logged(trainer, "batch_size"), logged(trainer, "learning_rate")
    assert sizes[0] == 4
    assert sizes[-1] == ticks[-1].applied.plan.batch_size > 16
    assert result.global_step == trainer.state.max_steps == len(sizes) < 33  # of 66 in batches of 4
    assert trainer.state.epoch == 6.0
    first, num_samples = ticks[0].observation, len(trainer.train_dataset)
    assert first.samples_left == round((6 - first.epoch) * num_samples)
    for rate, epoch in zip(rates[1:], logged(trainer, "epoch"), strict=False):  # warm-up in the first of six epochs
        assert rate == pytest.approx(1e-2 * min(epoch, (6 - epoch) / 5), rel=1e-6)
    assert {entry["layers_fp32"] + entry["layers_bf16"] for entry in trainer.state.log_history if "loss" in entry} == {
        17
    }


def test_max_steps_count_batches_of_the_first_size(tmp_path: Path) -> None:
    trainer = trainer_of(TriAccelTrainer, tmp_path, control=ADAPTING, max_steps=40)
    result = trainer.train()
    assert result.global_step < 30
    assert 40 / 6 <= trainer.state.epoch < 40 / 6 + 1  # the last batch ends with its epoch at the latest


class StopsAndSaves(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = control.should_training_stop = state.global_step == self.step


@pytest.mark.parametrize("stops_after", [11, 13])  # at the end of an epoch, within one
def test_a_resumed_training_equals_an_uninterrupted_one(stops_after: int, tmp_path: Path) -> None:
    def train(folder: str, *callbacks: TrainerCallback, resumes: bool = False) -> Trainer:
        options = {"eval_strategy": "steps", "eval_steps": 3, "per_device_train_batch_size": 4, "num_train_epochs": 3}
        trainer = trainer_of(
            TriAccelTrainer, tmp_path / folder, bert(dropout=0.2), control=ADAPTING, callbacks=[*callbacks], **options
        )
        trainer.train(resume_from_checkpoint=resumes)
        return trainer

    whole = train("whole")
    stopped = train("parts", StopsAndSaves(stops_after))
    assert stopped.state.global_step == stops_after < whole.state.global_step
    saved = {path.name for path in (tmp_path / "parts" / f"checkpoint-{stops_after}").iterdir()}
    assert {LOOP_STATE, "model.safetensors", "trainer_state.json"} <= saved
    assert "optimizer.pt" not in saved
    resumed = train("parts", resumes=True)
    for name in ("loss", "eval_loss", "learning_rate", "batch_size", "layers_fp32", "epoch", "step"):
        assert logged(resumed, name)[:-1] == logged(whole, name)[:-1], name
    assert same(values(resumed.model), values(whole.model))


def test_lean_settings_judge_and_save_fp32_and_resume_alike(tmp_path: Path) -> None:
    precision = PrecisionConfig(enabled=False, initial=BF16, allow_slow_precisions=True)
    control = replace(AS_IT_IS, precision=precision, weights="split", step_in_backward=True, optimizer_state="8bit")
    options = {"control": control, "save_strategy": "epoch", "eval_strategy": "epoch", "optim": "adamw_torch_fused"}
    whole = trainer_of(TriAccelTrainer, tmp_path, bert(dropout=0.1), **options)
    whole.train()
    assert logged(whole, "layers_bf16")[-1] > 10
    assert logged(whole, "eval_loss")[-1] == whole.evaluate()["eval_loss"]  # in FP32, as after training
    saved = load_file(tmp_path / "checkpoint-6" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    resumed = trainer_of(TriAccelTrainer, tmp_path, bert(dropout=0.1), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert same(values(resumed.model), values(whole.model))


def test_a_checkpoint_without_the_loops_state_is_refused(tmp_path: Path) -> None:
    options = {"save_strategy": "epoch", "num_train_epochs": 1, "save_only_model": True}
    trainer_of(TriAccelTrainer, tmp_path, control=AS_IT_IS, **options).train()
    with pytest.raises(CheckpointError, match=f"{LOOP_STATE} does not exist"):
        trainer_of(TriAccelTrainer, tmp_path, control=AS_IT_IS, **options).train(resume_from_checkpoint=True)


def test_early_stopping_and_the_best_model_are_the_trainers(tmp_path: Path) -> None:
    noise = texts()
    for index, item in enumerate(noise):
        item["labels"] = index % 3  # can be learned by heart, and helps no other text
    options = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    options |= {"learning_rate": 1e-2, "num_train_epochs": 20, "train_dataset": noise}
    reference, trainer = both(tmp_path, callbacks=lambda: [EarlyStoppingCallback(early_stopping_patience=2)], **options)
    require_same_training(trainer, reference)
    assert trainer.state.global_step < 20 * 6
    assert Path(trainer.state.best_model_checkpoint).name == Path(reference.state.best_model_checkpoint).name
    best = min(logged(trainer, "eval_loss"))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best, rel=1e-6) == pytest.approx(trainer.state.best_metric)
    kept = [sorted(path.name for path in (tmp_path / kind).iterdir()) for kind in ("InLoopsOrder", "TriAccelTrainer")]
    assert kept[0] == kept[1]


class LeavesEpochs(TrainerCallback):
    """Ends each epoch after two steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop = state.global_step % 2 == 0


class Heard(TrainerCallback):
    """Remembers the events of a training, with the step and the epoch at each."""

    NAMES = (
        *("train_begin", "epoch_begin", "step_begin", "step_end", "log"),
        *("evaluate", "save", "epoch_end", "train_end"),
    )

    def __init__(self) -> None:
        self.events: list[tuple[str, int, Any, bool]] = []
        for name in self.NAMES:
            setattr(
                self, f"on_{name}", lambda args, state, control, name=name, **others: self._hear(name, state, others)
            )

    def _hear(self, name: str, state: Any, others: Any) -> None:
        complete = all(others[each] is not None for each in ("model", "optimizer", "lr_scheduler"))
        self.events.append((name, state.global_step, state.epoch, complete))


@pytest.mark.parametrize("leaves_early", [False, True])
def test_callbacks_hear_the_same_events_and_may_end_an_epoch(leaves_early: bool, tmp_path: Path) -> None:
    heard: list[Heard] = []

    def callbacks() -> list[TrainerCallback]:
        heard.append(Heard())
        return [*([LeavesEpochs()] if leaves_early else []), heard[-1]]

    options = {"eval_strategy": "epoch", "save_strategy": "epoch", "eval_on_start": True, "logging_steps": 4}
    if leaves_early:
        options = {"num_train_epochs": 3, "lr_scheduler_type": "constant"}
    reference, trainer = both(tmp_path, callbacks=callbacks, **options)
    assert logged(trainer, "loss") == pytest.approx(logged(reference, "loss"), rel=1e-4)
    assert [name for name, *_ in heard[1].events] == [name for name, *_ in heard[0].events]
    if not leaves_early:
        assert heard[1].events == heard[0].events
        assert {event for event, *_ in heard[1].events} == set(Heard.NAMES)
        assert all(complete for *_, complete in heard[1].events)


def test_after_training_the_model_is_ones_own_again(tmp_path: Path) -> None:
    trainer = trainer_of(TriAccelTrainer, tmp_path, control=ADAPTING)
    first = trainer.train()
    assert trainer.loop is None
    assert not any("forward" in vars(module) for module in trainer.model.modules())
    trainer.save_model(str(tmp_path / "saved"))
    again = BertForSequenceClassification.from_pretrained(tmp_path / "saved")
    ids = torch.stack([text["input_ids"] for text in texts(4)])
    assert torch.equal(again.eval()(ids).logits, trainer.model.eval()(ids).logits)
    second = trainer.train()
    assert second.training_loss < first.training_loss
    assert logged(trainer, "learning_rate")[0] == pytest.approx(5e-3)  # the schedule begins anew


def test_a_skipped_step_does_not_spoil_the_losses(tmp_path: Path) -> None:
    calls = iter(range(10**6))

    def broken_once(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        factor = float("nan") if next(calls) == 4 else 1.0  # one call is the check before training
        return factor * summed(outputs, labels, num_items_in_batch)

    trainer = trainer_of(TriAccelTrainer, tmp_path, control=AS_IT_IS, compute_loss_func=broken_once)
    result = trainer.train()
    losses = logged(trainer, "loss")
    assert losses[3] == losses[2]
    assert np.isfinite([*losses, result.training_loss]).all()
    assert all(value.isfinite().all() for value in values(trainer.model).values())


@pytest.mark.gpu
def test_on_a_gpu_judging_does_not_disturb_the_captured_steps(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 20, "num_train_epochs": 20, "use_cpu": False}
    trainer = trainer_of(TriAccelTrainer, tmp_path, control=ControlConfig(every_steps=20), **options)
    trainer.train()
    assert trainer.model.device.type == "cuda"
    assert logged(trainer, "loss")[-1] < 0.5 * logged(trainer, "loss")[0]
    assert logged(trainer, "eval_loss")[-1] == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-5)
