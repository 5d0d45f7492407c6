"""One pass of two samples before training: faults of model, loss, targets and data are named before time is spent."""

from __future__ import annotations

import contextlib
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from triaccel_ray.cuda.out_of_memory import is_out_of_memory
from triaccel_ray.cuda.random_states import preserved_random_states
from triaccel_ray.data.sources import DataSource, TensorSource
from triaccel_ray.model.layers import Loss, forward, preserved_modes, restoring_buffers, uncompiled, without_cudnn
from triaccel_ray.model.pytree import map_tensors, tensors_in

OWN_PACKAGE = "triaccel_ray"
MAX_FRAMES = 3
"""Frames of a user's code in a message, two lines each."""
IN_YOUR_CODE = "in your code:"
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]


class UserCodeError(ValueError):
    """A user's model, loss, data or task raised; the message names the function, the error and the user's own lines."""


@contextlib.contextmanager
def blaming(what: str, about: Callable[[], str] = str) -> Iterator[None]:
    """Says that `what`, code of the user's, raised whatever is raised inside; `about` adds what it was called with.

    A message of this product's own, a missing file and a lack of memory stay as they are.

    Raises:
        UserCodeError: in place of any other exception, SystemExit among them.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        told = isinstance(error, FileNotFoundError) or is_out_of_memory(error) or _raised_in(error) == OWN_PACKAGE
        if told or _ends_the_process(error):
            raise
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300].rstrip(": ")
        raise _user_code_error(f"{what} raised {text}{about()}", error) from error


@contextlib.contextmanager
def refusing_exits() -> Iterator[None]:
    """Says that the user's code called `sys.exit`: the end of the process would pass for its loss.

    Raises:
        UserCodeError: in place of its SystemExit.
    """
    try:
        yield
    except SystemExit as error:
        if _ends_the_process(error):
            raise
        text = f"the task's code called sys.exit({error.code!r}): raise an error that says what is wrong"
        raise _user_code_error(text, error) from error


def _user_code_error(text: str, error: BaseException) -> UserCodeError:
    return UserCodeError("\n".join(filter(None, [text, users_lines(error)])))


def users_lines(error: BaseException) -> str:
    """Returns where in the user's own code `error` was raised, the last `MAX_FRAMES` frames; empty without any."""
    frames = [(frame, number) for frame, number in traceback.walk_tb(error.__traceback__) if _is_users(frame)]
    lines = []
    for frame, number in frames[-MAX_FRAMES:]:
        summary = traceback.FrameSummary(frame.f_code.co_filename, number, frame.f_code.co_name)
        lines.append(f'  File "{summary.filename}", line {number}, in {summary.name}')
        lines += [f"    {summary.line}"] if summary.line else []
    return "\n".join([IN_YOUR_CODE, *lines]) if lines else ""


def require_working(
    model: nn.Module, loss: Loss, source: DataSource, judge: Callable[[Any, Any], Any] | None = None
) -> None:
    """Passes two samples of `source` through model and loss, and has `judge` judge them where it is given.

    Random states, buffers and training modes are put back; no gradient is computed, no parameter changes. Of targets
    that are integers in a tensor, the smallest and the largest are tried. A lack of memory is left to training.

    Raises:
        UserCodeError: a function of the user's raised.
        TypeError, ValueError: one of them returned something else than it has to.
    """
    with preserved_random_states(), preserved_modes(model), contextlib.ExitStack() as stack:
        stack.callback(restoring_buffers(model.modules()))
        stack.enter_context(uncompiled())  # compiling for two samples would take longer than the check
        stack.enter_context(without_cudnn())
        try:
            _pass(model, loss, source, judge)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise


def _pass(model: nn.Module, loss: Loss, source: DataSource, judge: Callable[[Any, Any], Any] | None) -> None:
    device = next(model.parameters()).device
    with blaming("the training data"):
        indices = _two_samples(source).to(device if source.is_resident else "cpu")
        inputs, targets = source.batch(indices, torch.Generator(device).manual_seed(0))

    def shapes() -> str:
        is_double = any(tensor.dtype is torch.float64 for tensor in tensors_in(inputs))
        advice = '; parameters are float32: use .float(), of an array .astype("float32")' if is_double else ""
        return f" (inputs {described(inputs)}{advice})"

    model.train()
    with torch.enable_grad():
        with blaming(f"model {type(model).__name__}", shapes):
            outputs = forward(model, inputs)
        if outputs is None:
            raise TypeError(f"model {type(model).__name__} returned None: its forward must return the outputs")
        _require_loss(_loss_of(loss, outputs, targets))
    if judge is None:
        return
    model.eval()
    with torch.no_grad():
        with blaming(f"model {type(model).__name__}, in eval mode,", shapes):
            outputs = forward(model, inputs)
        _loss_of(loss, outputs, targets)
        judge(outputs, targets)


def _loss_of(loss: Loss, outputs: Any, targets: Any) -> Any:
    with blaming("the loss", lambda: seen(outputs, targets)):
        if isinstance(targets, Tensor) and targets.is_cuda:
            # There a class out of range is an assertion on the device, after which the process cannot use it any more.
            try:
                loss(map_tensors(Tensor.cpu, outputs), targets.cpu())
            except IndexError:
                raise
            except Exception:  # weights of the loss's own on the GPU, perhaps: judged there
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


def _two_samples(source: DataSource) -> Tensor:
    """Returns the indices of two samples, of different targets where that costs nothing."""
    targets = source.targets if isinstance(source, TensorSource) else None
    if targets is not None and targets.dim() == 1 and not targets.is_floating_point():
        first, last = int(targets.argmin()), int(targets.argmax())
        if first != last:
            return torch.tensor([first, last])
    return source.probe(2)


def described(value: Any) -> str:
    """Returns kind and shape of a value, for messages."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {', '.join(described(each) for each in value[:4]) or 'nothing'}"
    if isinstance(value, dict):
        return "dict of " + ", ".join(f"{key}: {described(each)}" for key, each in list(value.items())[:4])
    return "None" if value is None else f"a {type(value).__name__}"


def seen(outputs: Any, targets: Any) -> str:
    """Returns kinds and shapes of both, for messages."""
    return f" (outputs {described(outputs)}, targets {described(targets)})"


def _is_users(frame: Any) -> bool:
    path = frame.f_code.co_filename
    is_library = path.startswith((_STANDARD_LIBRARY, "<")) or "site-packages" in path or "dist-packages" in path
    return not is_library and _package(frame) != OWN_PACKAGE


def _raised_in(error: BaseException) -> str:
    """Returns the package whose code raised `error`."""
    return _package([frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1])


def _ends_the_process(error: BaseException) -> bool:
    """Returns whether `error` is how Ray ends a process."""
    return isinstance(error, SystemExit) and _raised_in(error) == "ray"


def _package(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
