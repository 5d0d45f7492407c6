"""Training methods and their descriptions, without importing torch, so that `--help` is fast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

FIXED: Final = "fixed"
"""Name of the method with fixed settings, and of a comparison's row for the best of these."""
PROBE: Final = "probe"
"""Name of the method that only searches use."""
BASELINES: Final = ("fp32", "amp", "amp-best")
"""Methods without this product's engine."""
IN_FP32: Final = ("fp32", "engine-fp32", "dynamic-batch")
"""Methods whose layers all compute in FP32."""
TUNE_BATCH: Final = "tune-batch"
"""Name of the method that times batch sizes; `triaccel tune-batch` alone uses it."""
METHODS: Mapping[str, str] = {
    "fp32": "FP32, as a tutorial writes it",
    "amp": "automatic mixed precision, as a tutorial writes it",
    "amp-best": "automatic mixed precision, as an expert writes it: BF16, torch.compile, channels_last",
    "engine-fp32": "FP32 for all layers, on this product's engine",
    "engine-amp": "one low precision for all layers, on this product's engine",
    "dynamic-batch": "FP32 with the elastic batch size alone",
    "dynamic-precision": "precision per layer alone",
    "dynamic-both": "precision per layer and elastic batch size, without curvature",
    "triaccel": "the full control loop",
    "paper": "the control loop by the paper's printed rules: no smoothing, no dwell time, nothing undone",
    "fixed": "one precision and batch size on this product's engine, nothing adapted",
    "tune-batch": "the time of a step at each batch size, nothing adapted",
    "probe": "one low precision, statistics and curvature recorded, batch size and precision kept",
}
"""Name of a training method -> its description."""
