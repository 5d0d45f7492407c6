"""The specification of a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from triaccel_ray.config import check_fields, knob, require
from triaccel_ray.service.runs.spec import BASELINES, FIXED, METHODS, PROBE, TUNE_BATCH, RunSpec

ABLATION: Mapping[str, str] = {
    "fp32": "standard (fp32)",
    "dynamic-batch": "+ dynamic batch",
    "dynamic-precision": "+ dynamic precision",
    "dynamic-both": "+ both",
    "triaccel": "+ curvature (triaccel)",
}
"""Method of the ablation -> name of its row, in the order of the paper's Table 2, whose "standard" is FP32."""


@dataclass(frozen=True, kw_only=True)
class ComparisonSpec:
    """Settings of one comparison."""

    base: RunSpec
    """Settings shared by all runs."""
    methods: tuple[str, ...] = ("fp32", "amp", "engine-amp", "triaccel")
    """Methods to compare; `triaccel run --help` explains them."""
    num_seeds: int = knob(3, "[1, 1000]", option="seeds")
    """Runs of each method; seeds count from 0."""
    ablation: bool = False
    """Add a table of ablations: FP32, dynamic-batch, dynamic-precision, dynamic-both, triaccel."""
    num_fixed: int = knob(0, "[0, inf)", option="fixed")
    """Fixed settings to try on validation samples: pairs of precision and batch size. The best becomes the row
    `best fixed`. Give as many as the search had trials."""

    def __post_init__(self) -> None:
        check_fields(self)
        known = [name for name in METHODS if name not in (FIXED, PROBE, TUNE_BATCH)]
        is_set = len(set(self.methods)) == len(self.methods) > 0
        require(is_set, "methods", ",".join(self.methods), f"must be one or more, each once, of {', '.join(known)}")
        for method in self.methods:
            rule = f"must be one of {', '.join(known)}; --fixed N adds the best of N fixed settings"
            require(method in known, "method", method, rule)
        alone = [method for method in self.all_methods if method in BASELINES]
        rule = f"must be left out for methods that train in one process, or give --methods without {', '.join(alone)}"
        require(not (alone and self.base.is_distributed), "gpus", self.base.gpus, rule)

    @property
    def table_1(self) -> tuple[str, ...]:
        """The methods of the first table."""
        return (*self.methods, *([FIXED] if self.num_fixed else []))

    @property
    def all_methods(self) -> tuple[str, ...]:
        """Every method that is trained, once."""
        return tuple(dict.fromkeys((*self.table_1, *(ABLATION if self.ablation else ()))))
