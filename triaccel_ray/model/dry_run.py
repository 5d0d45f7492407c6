"""Runs two samples through model and loss before training, to report errors in the user's code and data early."""

from __future__ import annotations

import contextlib
import math
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from triaccel_ray.cuda.out_of_memory import is_out_of_memory
from triaccel_ray.cuda.random_states import preserved_random_states
from triaccel_ray.data.sources import DataSource, TensorSource
from triaccel_ray.model.layers import (
    Loss,
    forward,
    preserved_modes,
    restoring_buffers,
    trained_modules,
    uncompiled,
    without_cudnn,
)
from triaccel_ray.model.pytree import map_tensors, tensors_in

OWN_PACKAGE = "triaccel_ray"
_TO_FP32 = (
    " (layers return BF16 or FP16, as under torch.autocast: cast the tensor with .float() in the model, or train FP32 "
    "with PrecisionConfig(enabled=False, initial=Precision.FP32), --adapt-precision off --precision fp32. Split words "
    "are BF16 themselves: give weights='fp32' to code that reads them)"
)
MAX_FRAMES = 3
"""Maximum number of frames of user code in a message, two lines each."""
IN_YOUR_CODE = "in your code:"
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]


class UserCodeError(ValueError):
    """A user's model, loss, data or task raised; the message names the function, the error and the user's lines."""


@contextlib.contextmanager
def attributing_errors(what: str, about: Callable[[], str] = str) -> Iterator[None]:
    """Returns a context that attributes exceptions to `what`, user code; `about` describes its arguments.

    Missing files, out-of-memory errors and errors raised by this package's own functions pass through unchanged.

    Raises:
        UserCodeError: in place of any other exception, including SystemExit unless Ray raised it.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        is_a_call = len(list(traceback.walk_tb(error.__traceback__))) == 2  # of the block: its arguments do not fit
        is_own = _raised_in(error) == OWN_PACKAGE and not is_a_call
        if is_own or isinstance(error, FileNotFoundError) or is_out_of_memory(error) or _ends_the_process(error):
            raise
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300].rstrip(": ")
        raise _user_code_error(f"{what} raised {text}{about()}{way_to_fp32(text)}", error) from error


@contextlib.contextmanager
def forbidding_exit() -> Iterator[None]:
    """Returns a context that refuses `sys.exit` in user code: an exit would be mistaken for a lost process.

    Raises:
        UserCodeError: in place of the user's SystemExit.
    """
    try:
        yield
    except SystemExit as error:
        if _ends_the_process(error):
            raise
        text = f"the task's code called sys.exit({error.code!r}): raise an error that says what is wrong"
        raise _user_code_error(text, error) from error


def way_to_fp32(message: str) -> str:
    """Returns how to compute in FP32 if a message of PyTorch's names a 16-bit type, else nothing."""
    return _TO_FP32 if any(name in message for name in ("BFloat16", "Half")) else ""


def _user_code_error(text: str, error: BaseException) -> UserCodeError:
    return UserCodeError("\n".join(filter(None, [text, users_lines(error)])))


def users_lines(error: BaseException) -> str:
    """Returns where in user code `error` was raised, at most the last `MAX_FRAMES` frames; empty if there are none."""
    frames = [(frame, number) for frame, number in traceback.walk_tb(error.__traceback__) if _is_user_code(frame)]
    lines = []
    for frame, number in frames[-MAX_FRAMES:]:
        summary = traceback.FrameSummary(frame.f_code.co_filename, number, frame.f_code.co_name)
        lines.append(f'  File "{summary.filename}", line {number}, in {summary.name}')
        if summary.line:
            lines.append(f"    {summary.line}")
    return "\n".join([IN_YOUR_CODE, *lines]) if lines else ""


def require_working(
    model: nn.Module, loss: Loss, source: DataSource, judge: Callable[[Any, Any], Any] | None = None
) -> None:
    """Passes two samples of `source` through model and loss, and their outputs and targets to `judge`, if given.

    Random states, buffers and training modes are restored; no gradient is computed, no parameter changes. If targets
    are integers in a tensor, the samples have the smallest and the largest. Out-of-memory errors are left to training.

    Raises:
        UserCodeError: a user's function raised.
        TypeError, ValueError: a user's function returned an invalid value.
    """
    with undisturbed(trained_modules(model, loss)):
        try:
            _check_passes(model, loss, source, judge)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise


@contextlib.contextmanager
def undisturbed(modules: nn.Module) -> Iterator[None]:
    """Returns a context for passes of a few samples, which restores random states, training modes and buffers.

    Neither `torch.compile` nor cuDNN prepares for their shapes: that would take longer than the passes.
    """
    with preserved_random_states(), preserved_modes(modules), contextlib.ExitStack() as stack:
        stack.callback(restoring_buffers(modules.modules()))
        stack.enter_context(uncompiled())
        stack.enter_context(without_cudnn())
        yield


def _check_passes(model: nn.Module, loss: Loss, source: DataSource, judge: Callable[[Any, Any], Any] | None) -> None:
    device = next(model.parameters()).device
    with attributing_errors("the training data"):
        indices = two_samples(source).to(device if source.is_resident else "cpu")
        inputs, targets = source.batch(indices, torch.Generator(device).manual_seed(0))

    def shapes() -> str:
        is_double = any(tensor.dtype is torch.float64 for tensor in tensors_in(inputs))
        advice = '; parameters are float32: use .float(), of an array .astype("float32")' if is_double else ""
        return f" (inputs {described(inputs)}{advice})"

    model.train()
    with torch.enable_grad():
        with attributing_errors(f"model {type(model).__name__}", shapes):
            outputs = forward(model, inputs)
        if outputs is None:
            raise TypeError(f"model {type(model).__name__} returned None: its forward must return the outputs")
        value = _loss_of(loss, outputs, targets)
        _require_loss(value)
        _require_mean(loss, outputs, targets, value)
    if judge is None:
        return
    model.eval()

    def evaluated() -> Any:
        with attributing_errors(f"model {type(model).__name__}, in eval mode,", shapes):
            outputs = forward(model, inputs)
        _loss_of(loss, outputs, targets)
        return outputs

    with torch.no_grad():
        try:
            outputs = evaluated()
        except UserCodeError as error:
            if not needs_gradients(error):
                raise
            with torch.enable_grad():
                outputs = map_tensors(Tensor.detach, evaluated())
        judge(outputs, targets)


def needs_gradients(error: Exception) -> bool:
    """Returns whether `error` says that gradients are disabled, which the model or the loss computes itself.

    Models of forces and of differential equations do so, with `torch.autograd.grad`.
    """
    return isinstance(error, RuntimeError | UserCodeError) and "require grad" in str(error)


def _loss_of(loss: Loss, outputs: Any, targets: Any) -> Any:
    with attributing_errors("the loss", lambda: described_pair(outputs, targets)):
        if isinstance(targets, Tensor) and targets.is_cuda:
            # On a GPU, a class out of range fails a device-side assert, after which the process cannot use the device.
            try:
                loss(map_tensors(Tensor.cpu, outputs), targets.cpu())
            except IndexError:
                raise
            except Exception:  # the loss may have weights on the GPU: checked there
                pass
        return loss(outputs, targets)


def _require_loss(value: Any) -> None:
    found = f"the loss returned {described(value)}"
    if not isinstance(value, Tensor):
        way_out = "return the tensor itself, without .item() or float()"
        raise TypeError(f"{found}: must be a scalar tensor with a gradient; {way_out}")
    if value.dim() != 0:
        raise ValueError(f"{found}: must be a scalar, the mean over the samples; end it with .mean()")
    if not value.requires_grad:
        way_out = "compute it from the outputs, without detach(), argmax() or no_grad()"
        raise ValueError(f"{found} without a gradient: must depend on the model's trainable parameters; {way_out}")


@torch.no_grad()
def _require_mean(loss: Loss, outputs: Any, targets: Any, value: Tensor) -> None:
    """Raises ValueError if the loss of two samples is the sum of both, not the mean: steps grow with the batch."""
    if not all(isinstance(each, Tensor) and each.dim() > 0 and len(each) == 2 for each in (outputs, targets)):
        return
    try:
        with warnings.catch_warnings(action="ignore"):  # of a loss that squeezes a single sample
            pairs = [[float(loss(outputs[at], targets[at])) for at in ([i], [i, i])] for i in range(2)]
    except Exception:  # of a loss that compares samples, and takes no single one
        return
    # Twice the same sample: over masked or positive samples alone, a mean over two different ones may be their sum.
    if all(one and math.isclose(two, 2.0 * one, rel_tol=1e-4) for one, two in pairs):
        raise ValueError(
            f"the loss of two samples is {float(value):.4g}, the sum of both: must be the mean over the samples; use "
            "reduction='mean'"
        )


def two_samples(source: DataSource) -> Tensor:
    """Returns the indices of two samples, with different targets if these are cheap to find."""
    targets = source.targets if isinstance(source, TensorSource) else None
    if targets is not None and targets.dim() == 1 and not targets.is_floating_point():
        first, last = int(targets.argmin()), int(targets.argmax())
        if first != last:
            return torch.tensor([first, last])
    return source.probe(2)


def described(value: Any) -> str:
    """Returns a short description of a value, with its type and any shapes, for messages."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {', '.join(described(each) for each in value[:4]) or 'nothing'}"
    if isinstance(value, dict):
        return "dict of " + ", ".join(f"{key}: {described(each)}" for key, each in list(value.items())[:4])
    return "None" if value is None else f"a {type(value).__name__}"


def described_pair(outputs: Any, targets: Any) -> str:
    """Returns a short description of outputs and targets, for messages."""
    return f" (outputs {described(outputs)}, targets {described(targets)})"


def _is_user_code(frame: Any) -> bool:
    path = frame.f_code.co_filename
    is_library = path.startswith((_STANDARD_LIBRARY, "<")) or "site-packages" in path or "dist-packages" in path
    return not is_library and _package_of(frame) != OWN_PACKAGE


def _raised_in(error: BaseException) -> str:
    """Returns the package whose code raised `error`."""
    return _package_of([frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1])


def _ends_the_process(error: BaseException) -> bool:
    """Returns whether `error` is the SystemExit by which Ray ends a process."""
    return isinstance(error, SystemExit) and _raised_in(error) == "ray"


def _package_of(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
