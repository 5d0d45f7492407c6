"""The recipe's learning rate and weight decay, tuned for every method by the same few samples."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from triaccel_ray.trainables.task import Recipe

WIDEST = 4.0
"""The samples lie within this factor of the recipe's values, both ways."""


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
    drawn = [
        RecipeSample(lr=WIDEST ** chance.uniform(-1, 1), weight_decay=WIDEST ** chance.uniform(-1, 1))
        for _ in range(count - 1)
    ]
    return [RecipeSample(), *drawn][:count]
