"""How weights are stored and when they are updated, where the settings leave it open: the plain form if it fits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from triaccel_ray.config import ControlConfig
from triaccel_ray.decide.batch import GIB
from triaccel_ray.decide.calibration import BUDGET_SHARE
from triaccel_ray.records.plan import Reason, ReasonCode, WeightForm
from triaccel_ray.records.signals import ParameterSignal

PROCESS_BYTES = 512 * 2**20
"""What a process holds without model and data: a CUDA context with its libraries, or Python with PyTorch."""
_FIELDS = {"weights": "is_split", "step_in_backward": "steps_in_backward", "shard_optimizer": "shares_optimizer"}
"""Setting -> field of the form; in the order in which they are used."""
_TEXTS = {
    "weights": ("weights stay FP32", "weights are split"),
    "step_in_backward": (
        "parameters are updated after the backward pass",
        "parameters are updated in the backward pass",
    ),
    "shard_optimizer": (
        "each rank holds the optimizer's whole state",
        "ranks share the optimizer's state",
    ),
}
"""Setting -> text for the plain form, and for the other."""


def needs_form(config: ControlConfig) -> bool:
    """Returns whether the settings leave the form open."""
    return any(getattr(config, name) == "auto" for name in _FIELDS)


def decide_form(config: ControlConfig, signal: ParameterSignal | None) -> tuple[WeightForm, list[Reason]]:
    """Returns the form of the weights, and under a memory budget a reason for each setting that is `auto`.

    The plain form is kept if a step needs at most what the memory budget leaves it, or without a budget. Else weights
    are split, and if that does not suffice, parameters are also updated in the backward pass. Neither makes steps
    longer. Steps of a GPT with 303 million parameters take 24.3 ms in the plain form and 24.4 ms split (H100), 23.6
    ms with both (H200). So an upper bound of what a step saves suffices: a lean form without need costs nothing. Last,
    ranks share the optimizer's state, which costs messages. If no form fits, the one that needs least is chosen, and
    memory plans make up for the rest. A setting other than `auto` stays as it is.

    This is decided once, before the first step, and not at the tick where memory first runs short. The form is part of
    compiled code, captured steps, optimizer and gradient statistics, which would all be built again. On an H200,
    compiling the blocks alone takes 15 s (ViT-S) to 75 s (ConvNeXt-T). All inputs follow from settings, model and
    samples, so a resumed run decides the same.
    """
    given = {field: getattr(config, name) in (True, "split") for name, field in _FIELDS.items()}
    forms = [WeightForm(**given)]
    if signal is None or room_bytes(signal, forms[0]) is None:
        return forms[0], []
    refused, before = {}, {}
    for name in _open_settings(config, signal):
        if obstacle := _obstacle(name, config, signal):
            refused[name] = obstacle
        else:
            before[name] = forms[-1]
            forms.append(replace(forms[-1], **{_FIELDS[name]: True}))
    form = next((each for each in forms if _excess_bytes(signal, each) <= 0), None)
    form = form or min(forms, key=lambda each: _excess_bytes(signal, each))
    reasons = []
    for name in _open_settings(config, signal):
        is_lean = getattr(form, _FIELDS[name])
        compared = before[name] if is_lean else form
        needed, room = needed_bytes(signal, compared), max(room_bytes(signal, compared) or 0, 0)
        text = f"{_TEXTS[name][is_lean]}: {refused.get(name) or _comparison(needed, room, is_lean=is_lean)}"
        value, threshold = (None, None) if name in refused else (needed, room)
        code = ReasonCode.WEIGHT_FORM
        reasons.append(Reason(code=code, subject="memory", text=text, value=value, threshold=threshold))
    return form, reasons


def remember_form(
    config: ControlConfig, signal: ParameterSignal | None, before: WeightForm | None
) -> tuple[WeightForm | None, list[Reason]]:
    """Returns the form to remember, and the reasons if it has changed: at the first tick, or after a resumption."""
    if signal is None:
        return before, []
    form, reasons = decide_form(config, signal)
    return form, [] if form == before else reasons


def room_bytes(signal: ParameterSignal, form: WeightForm) -> int | None:
    """Returns what the memory budget leaves for gradients and saved tensors, if anything; None without a budget."""
    rooms = []
    if signal.budget_bytes is not None:
        shared = signal.shared_state_bytes
        state = shared if form.shares_optimizer and shared is not None else signal.state_bytes
        held = PROCESS_BYTES + signal.data_bytes + signal.model_bytes + state
        rooms.append(math.floor(BUDGET_SHARE * signal.budget_bytes) - held)
    if signal.headroom_bytes is not None:
        rooms.append(math.floor(BUDGET_SHARE * signal.headroom_bytes))
    return min(rooms) if rooms else None


def needed_bytes(signal: ParameterSignal, form: WeightForm) -> int:
    """Returns what a step needs at most, beyond parameters and optimizer state.

    FP32 weights of layers in BF16 are cast in each pass, or have copies, in 2 bytes an element. Gradients take 2 bytes
    for split weights and for copies, else 4. In the backward pass, those of one bucket exist at once.
    """
    low = signal.num_in_bf16
    casts = 0 if form.is_split else 2 * low
    has_low_gradients = form.is_split or (signal.keeps_copies and not form.steps_in_backward)
    gradients = 4 * signal.num_elements - (2 * low if has_low_gradients else 0)
    if form.steps_in_backward:
        gradients = min(gradients, 4 * signal.bucket_elements)
    return casts + gradients + signal.saved_bytes


def _excess_bytes(signal: ParameterSignal, form: WeightForm) -> int:
    """Returns by how much a step's needs exceed the room for them; less than 0 if some is left."""
    room = room_bytes(signal, form)
    return 0 if room is None else needed_bytes(signal, form) - room


def _open_settings(config: ControlConfig, signal: ParameterSignal) -> Iterator[str]:
    """Yields the settings that are `auto`; a single rank has nothing to share."""
    is_shared = signal.num_ranks > 1
    return (name for name in _FIELDS if getattr(config, name) == "auto" and (is_shared or name != "shard_optimizer"))


def _obstacle(name: str, config: ControlConfig, signal: ParameterSignal) -> str:
    """Returns why the setting keeps the plain form whatever the budget; empty if nothing speaks against the other."""
    is_split = name == "weights"
    if signal.unsupported_because:
        return signal.unsupported_because
    if name == "shard_optimizer":
        return "" if signal.headroom_bytes is None else "memory_headroom does not count it"
    if config.batch.accumulate > 1:
        return f"sums of the gradients of {config.batch.accumulate} micro-batches take as much"
    if is_split:
        return "" if signal.num_in_bf16 else "no layer with weights of its own computes in BF16"
    if signal.may_use_fp16:
        return "layers may compute in FP16, where an overflow would be found after some are updated"
    if config.clip_norm is not None:
        return f"clip_norm = {config.clip_norm:g} would use the norm of the step before"
    if signal.num_ranks > 1:
        return f"the gradients of {signal.num_ranks} ranks are summed first"
    return ""


def _comparison(needed: int, room: int, *, is_lean: bool) -> str:
    text = f"a step {'would need' if is_lean else 'needs'} up to {needed / GIB:.2f} GiB"
    text += f", and the memory budget leaves it {room / GIB:.2f} GiB"
    return text if is_lean or needed <= room else f"{text}, but it would need no less"
