"""What is tried on validation samples: fixed settings in place of all that adapts, and factors on the recipe."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from triaccel_ray.apply.precision import supported_precisions, useless_precisions
from triaccel_ray.decide.batch import batch_lr_scale, ladder
from triaccel_ray.model.layers import find_layers
from triaccel_ray.records.plan import Precision
from triaccel_ray.service.runs.methods import FIXED
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.trainables.task import Recipe

WIDEST = 4.0
"""Samples of the recipe lie within this factor of its values, both ways."""


@dataclass(frozen=True, kw_only=True)
class FixedSetting:
    """A precision for all layers and a batch size, from the first step to the last."""

    precision: Precision
    batch_size: int

    @property
    def name(self) -> str:
        """Name of the trial that judges it."""
        return f"{FIXED}-{self.precision.value}-{self.batch_size}"

    def onto(self, spec: RunSpec) -> RunSpec:
        """Returns `spec` as a run of this setting.

        The learning rate follows the batch size by the rule that the elastic batch would follow; AdaScale, which needs
        measurements, becomes the square root.
        """
        control, batch = spec.control, spec.control.batch
        rule = replace(batch, lr_rule="sqrt" if batch.lr_rule == "adascale" else batch.lr_rule)
        lr = spec.recipe.lr * batch_lr_scale(rule, self.batch_size, None)
        fixed = replace(
            control,
            precision=replace(control.precision, initial=self.precision),
            batch=replace(batch, start=self.batch_size),
        )
        return replace(spec, method=FIXED, control=fixed, recipe=replace(spec.recipe, lr=lr))


@dataclass(frozen=True, kw_only=True)
class RecipeSample:
    """Factors on the recipe's learning rate and weight decay."""

    lr: float = 1.0
    weight_decay: float = 1.0

    def onto(self, recipe: Recipe) -> Recipe:
        """Returns `recipe` with both factors applied."""
        return replace(recipe, lr=recipe.lr * self.lr, weight_decay=recipe.weight_decay * self.weight_decay)


def recipe_samples(count: int, seed: int) -> list[RecipeSample]:
    """Returns `count` samples, uniform on a logarithmic scale; the first is the recipe as it is."""
    chance = random.Random(seed)
    samples = [RecipeSample()]
    while len(samples) < count:
        samples.append(RecipeSample(lr=WIDEST ** chance.uniform(-1, 1), weight_decay=WIDEST ** chance.uniform(-1, 1)))
    return samples


def sampled_settings(spec: RunSpec, precisions: Sequence[Precision], count: int) -> list[FixedSetting]:
    """Returns `count` settings of `precisions` and the batch sizes of the ladder, or all where there are fewer.

    The task's own comes first; the others are drawn without repetition, by the seed of `spec`.
    """
    own = (spec.control.precision.initial, spec.control.batch.start)
    grid = list(itertools.product(precisions, ladder(spec.control.batch)))
    others = [pair for pair in grid if pair != own]
    random.Random(spec.seed).shuffle(others)
    chosen = [*([own] if own in grid else []), *others][:count]
    return [FixedSetting(precision=precision, batch_size=size) for precision, size in chosen]


def precisions_where_it_runs(spec: RunSpec, *, num_gpus: float) -> tuple[Precision, ...]:
    """Returns the precisions that the task's layers can compute in, asked of a machine that would train them."""
    task: Any = ray.remote(max_calls=1)(_precisions)  # its process, and with it a CUDA context, ends at once
    found: list[str] = ray.get(task.options(num_cpus=1, num_gpus=num_gpus).remote(spec))
    return tuple(Precision(value) for value in found)


def _precisions(spec: RunSpec) -> list[str]:
    model = spec.load_task().model()
    useless = useless_precisions(spec.torch_device.type, is_compiled=False)
    offered = [supported_precisions(layer, without=useless) for layer in find_layers(model)]
    return [level.value for level in Precision if any(level in each for each in offered)]
