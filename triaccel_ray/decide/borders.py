"""What a change of precision costs at its borders: which demotions pay, and which layers follow a promotion.

A border lies between two layers, neighbours in module order, that compute in different precisions: the activation is
cast on its way forward, the gradient on its way back. A plan with many borders can be slower than a uniform one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from triaccel_ray.plan import Precision
from triaccel_ray.signals import LayerCost

ROUNDING_MS = 1e-9
"""A gain below this is the rounding of sums."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """One layer at a tick: what it computes in, and what its variance and curvature ask for."""

    name: str
    in_force: Precision
    wanted: Precision
    supported: tuple[Precision, ...] = tuple(Precision)
    cost: LayerCost | None = None
    """None where it is not known: then nothing is refused to the layer, nor asked of it for a neighbour's sake."""

    @property
    def border_ms(self) -> float:
        """Milliseconds of a border at the layer's input, 0 where that is not known."""
        return 0.0 if self.cost is None else self.cost.border_ms

    def knows(self, *levels: Precision) -> bool:
        """Returns whether the time of computing in each of these precisions is known."""
        return self.cost is not None and all(level in self.cost.compute_ms for level in levels)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """How a change of precision in neighbouring layers would change the time of a step."""

    saving_ms: float
    """Milliseconds that the layers themselves would take less; negative when more."""
    border_ms: float
    """Milliseconds of the borders created less those removed."""
    num_layers: int
    """Layers that would change together."""

    @property
    def pays(self) -> bool:
        """Whether the step would become shorter."""
        return self.saving_ms - self.border_ms > ROUNDING_MS


@dataclass(frozen=True, kw_only=True)
class Grant:
    """The precisions of the next interval, in the order of the layers."""

    precision: tuple[Precision, ...]
    refused: Mapping[str, Prediction] = field(default_factory=dict)
    """Layers left above what they wanted, with what it would have brought to grant it to all neighbours that want it
    too."""


def grant(layers: Sequence[Wish]) -> Grant:
    """Returns which wishes are granted: every promotion, and of the demotions those that make a step shorter.

    A promotion is asked for by accuracy and never weighed. A single layer that it leaves between two higher ones is
    promoted with it where that makes a step shorter. Neighbours that want the same lower precision get it together
    when that pays for all of them at once; of what is left, the set of demotions that shortens a step the most is
    found exactly, by dynamic programming along the layers. Afterwards no set of refused demotions would shorten the
    step. With constant wishes every later change shortens it, so that the precisions come to rest.
    """
    levels = [max(layer.in_force, layer.wanted, key=lambda level: level.rank) for layer in layers]
    _promote_islands(layers, levels)
    for index, layer in enumerate(layers):
        if not layer.knows(levels[index], layer.wanted) and _is_above(levels[index], layer.wanted):
            levels[index] = layer.wanted
    _demote_runs(layers, levels)
    _demote_best(layers, levels)
    refused = {layers[index].name: prediction for run, prediction in _predicted_runs(layers, levels) for index in run}
    return Grant(precision=tuple(levels), refused=refused)


def predict(layers: Sequence[Wish], levels: Sequence[Precision], first: int, wanted: Sequence[Precision]) -> Prediction:
    """Returns what it would bring to change `levels[first : first + len(wanted)]` to `wanted`.

    Layers whose precision does not change may have unknown costs.
    """
    after = {first + offset: level for offset, level in enumerate(wanted)}
    saving = border = 0.0
    for index, level in after.items():
        cost = layers[index].cost
        if cost is not None and level is not levels[index]:
            saving += cost.compute_ms[levels[index]] - cost.compute_ms[level]
    for index in range(max(first, 1), min(first + len(wanted) + 1, len(layers))):
        was_border = levels[index - 1] is not levels[index]
        is_border = after.get(index - 1, levels[index - 1]) is not after.get(index, levels[index])
        border += layers[index].border_ms * (is_border - was_border)
    return Prediction(saving_ms=saving, border_ms=border, num_layers=len(wanted))


def _is_above(level: Precision, other: Precision) -> bool:
    return level.rank > other.rank


def _promote_islands(layers: Sequence[Wish], levels: list[Precision]) -> None:
    """Raises single layers between two higher ones, at least one of them raised now, where that pays."""
    raised = [_is_above(level, layer.in_force) for level, layer in zip(levels, layers, strict=True)]
    for index in range(1, len(layers) - 1):
        neighbours = levels[index - 1], levels[index + 1]
        is_island = all(_is_above(level, levels[index]) for level in neighbours)
        if not is_island or not (raised[index - 1] or raised[index + 1]):
            continue
        layer = layers[index]
        targets = [level for level in neighbours if level in layer.supported and layer.knows(levels[index], level)]
        offers = [(predict(layers, levels, index, [level]), level) for level in targets]
        paying = [(offer.saving_ms - offer.border_ms, -level.rank, level) for offer, level in offers if offer.pays]
        if paying:
            levels[index] = max(paying)[2]


def _runs(layers: Sequence[Wish], levels: Sequence[Precision]) -> Iterator[range]:
    """Yields the longest stretches of neighbours that want the same precision, lower than what they have."""

    def wish(index: int) -> Precision | None:
        wanted = layers[index].wanted
        return wanted if _is_above(levels[index], wanted) else None

    for wanted, indices in groupby(range(len(layers)), key=wish):
        if wanted is not None:
            run = list(indices)
            yield range(run[0], run[-1] + 1)


def _predicted_runs(layers: Sequence[Wish], levels: Sequence[Precision]) -> Iterator[tuple[range, Prediction]]:
    for run in _runs(layers, levels):
        yield run, predict(layers, levels, run[0], [layers[index].wanted for index in run])


def _demote_runs(layers: Sequence[Wish], levels: list[Precision]) -> None:
    """Grants runs that pay as a whole; again as long as one does, for each may take away a neighbour's border."""
    granted = True
    while granted:
        granted = False
        for run in list(_runs(layers, levels)):
            wanted = [layers[index].wanted for index in run]
            if predict(layers, levels, run[0], wanted).pays:
                levels[run[0] : run[-1] + 1] = wanted
                granted = True


def _demote_best(layers: Sequence[Wish], levels: list[Precision]) -> None:
    """Grants the set of demotions that shortens a step the most: parts of runs, or runs that pay only together.

    Viterbi's recursion: the shortest time of the layers up to this one, for each precision that this one may have.
    Fewer demotions win a tie.
    """
    if next(_runs(layers, levels), None) is None:
        return
    paths: dict[Precision, tuple[float, int, tuple[Precision, ...]]] = {levels[0]: (0.0, 0, ())}
    for index, layer in enumerate(layers):
        options = [levels[index]] + ([layer.wanted] if _is_above(levels[index], layer.wanted) else [])
        reached = {}
        for option in options:
            change = option is not levels[index]
            own = layer.cost.compute_ms[option] - layer.cost.compute_ms[levels[index]] if change and layer.cost else 0.0
            reached[option] = min(
                (time + own + layer.border_ms * (before is not option and index > 0), num + change, (*path, option))
                for before, (time, num, path) in paths.items()
            )
        paths = reached
    best = min(paths.values())[2]
    changed = [new is not old for new, old in zip(best, levels, strict=True)]
    for is_changed, indices in groupby(range(len(layers)), key=changed.__getitem__):
        stretch = list(indices)
        wanted = best[stretch[0] : stretch[-1] + 1]
        # Stretches share no border: each has to pay for itself, and a tie broken by rounding does not.
        if is_changed and predict(layers, levels, stretch[0], wanted).pays:
            levels[stretch[0] : stretch[-1] + 1] = wanted
