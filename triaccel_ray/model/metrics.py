"""Metrics on held-out samples besides the loss: means over the samples, or functions of these means.

PyTorch is imported inside functions, so that a task can name its metrics without waiting for the import.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from triaccel_ray.config import require
from triaccel_ray.records.goal import RESERVED, Goal

if TYPE_CHECKING:
    from torch import Tensor

Values: TypeAlias = "Callable[[Any, Tensor], Tensor | tuple[Tensor | float, Tensor | float]]"
"""Maps outputs and targets of b samples to a tensor [b, ...] of equally weighted values, or to (sum, weight).

Both are added up on the device over all batches, so that batch sizes do not matter. Neither `.item()` nor
`float()` is needed: each would wait for the device.
"""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric of a model on held-out samples: `of_mean(mean of values(outputs, targets))`."""

    values: Values
    of_mean: Callable[[float], float] = float
    """Maps the mean over all samples to the metric."""
    maximize: bool = True
    """Whether larger values are better."""
    unit: str = ""
    """`%` for percent of the samples, in [0, 100]; empty for a plain number."""

    def goal(self, name: str) -> Goal:
        """Returns the goal of maximizing, or minimizing, this metric under `name`."""
        return Goal(name=name, maximize=self.maximize, unit=self.unit)


def as_metrics(given: Any) -> dict[str, Metric]:
    """Returns the metrics by name; a plain function becomes a `Metric` of its mean, to be maximized.

    Raises:
        TypeError: `given` is not a mapping, or holds something other than metrics and functions.
        ValueError: a name is not an identifier, or is reserved.
    """
    if not isinstance(given, Mapping):
        raise TypeError(
            f"metrics are a {type(given).__name__}: must map names to metrics, e.g. {{'accuracy': ACCURACY}}"
        )
    for name, metric in given.items():
        is_valid = isinstance(name, str) and name.isidentifier() and name not in RESERVED
        rule = f"must be an identifier, and none of {', '.join(sorted(RESERVED))}"
        require(is_valid, "name of a metric", name, rule)
        if not isinstance(metric, Metric) and not callable(metric):
            kind = type(metric).__name__
            raise TypeError(f"metrics[{name!r}] is a {kind}: must be a Metric, or a function(outputs, targets)")
    return {name: each if isinstance(each, Metric) else Metric(values=each) for name, each in given.items()}


def top1(outputs: Any, targets: Any) -> Tensor:
    """Returns whether the largest of outputs [..., C] is the target's class: boolean, in the targets' shape [...].

    Raises:
        TypeError: outputs are not scores of classes, or targets are not classes.
    """
    _require_classes("top1", outputs, targets)
    hits: Tensor = outputs.argmax(dim=-1) == targets
    return hits


def labeled_hits(outputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
    """Returns for how many targets `top1` holds, and the number of targets; those of -100 are ignored.

    Raises:
        TypeError: outputs are not scores of classes, or targets are not classes.
    """
    hits, is_labeled = top1(outputs, targets), targets != -100
    return (hits & is_labeled).sum(), is_labeled.sum()


def token_loss(outputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
    """Returns the sum of the tokens' cross-entropy, in nats, and their number; targets of -100 are ignored.

    Outputs are logits [..., V], targets the tokens [...].

    Raises:
        TypeError: outputs are not logits, or targets are not tokens.
    """
    from torch.nn import functional as F

    _require_classes("token_loss", outputs, targets)
    logits, tokens = outputs.flatten(0, -2).float(), targets.flatten().long()
    return F.cross_entropy(logits, tokens, reduction="sum", ignore_index=-100), (tokens != -100).sum()


def is_classification(outputs: Any, targets: Any) -> bool:
    """Returns whether outputs are scores [b, C] and targets classes [b]."""
    from torch import Tensor

    return isinstance(outputs, Tensor) and outputs.dim() == 2 and _are_classes(outputs, targets)


def _are_classes(outputs: Any, targets: Any) -> bool:
    from torch import Tensor

    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or targets.is_floating_point():
        return False
    return targets.dim() > 0 and targets.shape == outputs.shape[:-1]


def _require_classes(name: str, outputs: Any, targets: Any) -> None:
    from triaccel_ray.model.dry_run import described

    if not _are_classes(outputs, targets):
        raise TypeError(
            f"{name}: outputs {described(outputs)}, targets {described(targets)}: must be scores [..., C] and integer "
            "classes [...]; for other kinds of model name metrics of your own, or none: metrics = {}, objective = "
            "'loss' in a task, metrics={} for evaluate()"
        )


def _exp(nats: float) -> float:
    return math.inf if nats > 709.0 else math.exp(nats)


ACCURACY: Final = Metric(values=labeled_hits, of_mean=lambda share: 100.0 * share, unit="%")
"""Percent of the targets whose class has the largest output; as in the cross-entropy, targets of -100 are ignored."""
PERPLEXITY: Final = Metric(values=token_loss, of_mean=_exp, maximize=False)
"""exp(mean loss per token): the number of equally likely tokens that would have the same loss."""
BITS_PER_BYTE: Final = Metric(values=token_loss, of_mean=lambda nats: nats / math.log(2.0), maximize=False)
"""Mean loss per token in bits, for models whose tokens are bytes. For longer tokens return (sum, number of bytes)."""
