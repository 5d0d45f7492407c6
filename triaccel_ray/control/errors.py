"""Errors that end a training: gradients that stay NaN or infinite, and what PyTorch raises, with a way out."""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Callable, Iterator

import torch

from triaccel_ray.apply.agreement import PeerOutOfMemoryError
from triaccel_ray.config import ControlConfig
from triaccel_ray.control.training import Training
from triaccel_ray.cuda.out_of_memory import first_line, is_out_of_memory
from triaccel_ray.measure.memory import LAZY_LOADING_BYTES, MIB, mib
from triaccel_ray.model.dry_run import way_to_fp32
from triaccel_ray.records.plan import Precision
from triaccel_ray.records.signals import Observation

_MIN_MARGIN = 1.1
"""Factor on the batch's peak without a budget: under a cap, the allocator's memory is more fragmented."""


class NonFiniteGradientsError(RuntimeError):
    """Training has diverged: too many consecutive steps had NaN or infinite gradients (`max_skipped_steps`)."""


class BudgetTooSmallError(torch.OutOfMemoryError):
    """The first step does not fit in the memory budget of one GPU; the message names the least one that suffices."""


def require_finite(config: ControlConfig, observation: Observation) -> None:
    """Raises an error if gradients stay NaN or infinite, except in FP16, whose overflows the loss scale handles."""
    most, num_skipped = config.max_skipped_steps, observation.num_skipped_in_row
    if num_skipped >= most and Precision.FP16 not in observation.plan.precision.values():
        raise NonFiniteGradientsError(
            f"the gradients of the last {num_skipped} steps were NaN or infinite, up to step {observation.step}: "
            "none of these steps was made. Lower the learning rate, set clip_norm, or look for log(0) and 0/0 in "
            f"model and loss; max_skipped_steps = {most} says how many may follow one another"
        )


@contextlib.contextmanager
def explaining_errors(training: Training, repeat_step: Callable[[], object] | None = None) -> Iterator[None]:
    """Adds advice to an error of the step inside, if memory has run out or code rejects 16-bit tensors.

    `repeat_step` repeats the first step without the budget, to find the least one that suffices. None: any later step.

    Raises:
        BudgetTooSmallError: the first step does not fit in the budget, and the least one that suffices is known.
        torch.OutOfMemoryError, MemoryError: memory has run out in any other way.
    """
    try:
        yield
    except (RuntimeError, MemoryError, TypeError) as error:
        memory = training.memory
        if not is_out_of_memory(error):
            is_low = any(dtype is not torch.float32 for dtype in training.precision.key)
            if is_low and (advice := way_to_fp32(str(error))):
                error.args = (f"{error}{advice}",)
            raise
        if isinstance(error, PeerOutOfMemoryError):
            raise
        least = _least_bytes(training, error, repeat_step)
        wanted = "Give more memory" if least is None else f"Give a memory budget of {mib(least)} or more"
        advice = ", or set ".join(filter(None, [wanted, " or ".join(training.unused_savings)]))
        text = (
            "memory ran out, and smaller micro-batches could not help. The "
            f"{'memory budget' if memory.has_budget else 'memory'} of {memory.name} is {mib(memory.limit_bytes)}, of "
            f"which the process held {mib(memory.idle_bytes)} before the first batch. {advice}. It was: "
            f"{first_line(error)}"
        )
        if least is not None:
            raise BudgetTooSmallError(text) from error
        raise (MemoryError(text) if type(error) is MemoryError else torch.OutOfMemoryError(text)) from error


def _least_bytes(training: Training, error: BaseException, repeat_step: Callable[[], object] | None) -> int | None:
    """Returns the least memory budget with which the first step fits on a GPU, in bytes, whole MiB; None if unknown.

    Makes that step once without the budget: it exceeds it meanwhile, and weights and optimizer have made one step then.
    """
    memory = training.memory
    is_alone_on_gpu = training.ranks.is_alone and training.device.type == "cuda"
    if repeat_step is None or not memory.has_budget or not is_alone_on_gpu:
        return None
    traceback.clear_frames(error.__traceback__)  # they hold the attempt's tensors
    memory.close()
    memory.begin_window()  # releases what they held; nothing is captured before the first step
    try:
        repeat_step()
    except Exception:  # whatever stops it: the first error is the one to explain
        return None
    finally:
        peak = memory.read().window_peak_bytes  # puts the budget in force again
    batch_bytes = max(peak - memory.idle_bytes, 0)
    least = memory.idle_bytes + math.ceil(_MIN_MARGIN * batch_bytes) + LAZY_LOADING_BYTES
    least += training.sampler.source.streamed_bytes  # a larger budget has them on the device
    return -(-least // MIB) * MIB
