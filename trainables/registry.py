"""Finds tasks by name."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from triaccel_ray.config import ControlConfig, require, require_instance
from triaccel_ray.model.metrics import Metric, as_metrics
from triaccel_ray.records.goal import LOSS
from triaccel_ray.trainables.task import Recipe, Task

TASKS: Mapping[str, str] = {
    "digits": "triaccel_ray.trainables.digits:Digits",
    "cifar10-resnet18": "triaccel_ray.trainables.cifar:Cifar10ResNet18",
    "cifar10-resnet18-long": "triaccel_ray.trainables.cifar:Cifar10ResNet18Long",
    "cifar10-resnet18-imagenet-stem": "triaccel_ray.trainables.cifar:Cifar10ResNet18ImagenetStem",
    "cifar10-efficientnet-b0": "triaccel_ray.trainables.cifar:Cifar10EfficientNetB0",
    "cifar100-resnet18": "triaccel_ray.trainables.cifar:Cifar100ResNet18",
    "cifar100-resnet18-imagenet-stem": "triaccel_ray.trainables.cifar:Cifar100ResNet18ImagenetStem",
    "cifar100-efficientnet-b0": "triaccel_ray.trainables.cifar:Cifar100EfficientNetB0",
    "text-gpt": "triaccel_ray.trainables.text:TextGpt",
    "text-bert": "triaccel_ray.trainables.bert:TextBert",
    "audio-siren": "triaccel_ray.trainables.audio:AudioSiren",
}
"""Name of a bundled task -> its module, which imports PyTorch, and its class."""

_OWN_FORM = "package.module:Class"


def require_name(name: str) -> None:
    """Checks that `name` is a bundled task, or has the form of a user's own; imports nothing.

    Raises:
        ValueError: it is neither; the message lists the bundled ones.
    """
    if name in TASKS:
        return
    if ":" not in name:
        raise ValueError(
            f"task = {name!r}: no such task{suggestion(name, TASKS) or '.'} Bundled are {', '.join(TASKS)}; a task of "
            f"your own is named {_OWN_FORM}"
        )
    module_name, _, class_name = name.partition(":")
    if module_name.endswith(".py") or not all(part.isidentifier() for part in (*module_name.split("."), class_name)):
        raise ValueError(
            f"task = {name!r}: must be {_OWN_FORM}, with the name by which Python imports the module, not its file: "
            "for ./my_package/my_module.py that is my_package.my_module:MyTask"
        )


def suggestion(name: str, known: Iterable[str]) -> str:
    """Returns the end of a message about a mistyped `name`, with the nearest of the `known` ones; empty without one."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {close[0]}?" if close else ""


def name_of(task: Any) -> str:
    """Returns the name of `task`, a name or a class; for a class it says where other processes import it from.

    Raises:
        TypeError: it is neither.
        ValueError: other processes cannot import the class.
    """
    if isinstance(task, str):
        return task
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise TypeError(f"task = {task!r}: must be a name, such as 'digits', or a class derived from Task")
    module_name, class_name = task.__module__, task.__qualname__
    name = f"{module_name}:{class_name}"
    for bundled, place in TASKS.items():
        if place == name:
            return bundled
    if module_name == "__main__" or "." in class_name:
        where = "in a notebook or script" if module_name == "__main__" else "inside of a function or class"
        raise ValueError(
            f"task = {name!r}: is defined {where}, from where the processes that train cannot import it; save it at "
            f"the top of a module, such as my_tasks.py in the working directory, and give 'my_tasks:{task.__name__}'"
        )
    return name


def load_task(name: str, data_dir: Path | None) -> Task:
    """Returns the task called `name`: a bundled one, or a user's own as `package.module:Class`.

    Raises:
        ValueError: there is no such task, or it is not complete; the message says why.
    """
    require_name(name)
    task_class = _import_class(name)
    try:
        task = task_class(data_dir)
        recipe, control = task.recipe, task.control
    except (Exception, SystemExit) as error:  # any exception means that the user's class is unusable
        raise ValueError(
            f"task = {name!r}: {task_class.__name__}(data_dir) raised {type(error).__name__}: {error}"
            f"{_line_of(error)}; a task must be constructible so"
        ) from error
    require_instance(f"{task_class.__name__}.recipe", recipe, Recipe)
    require_instance(f"{task_class.__name__}.control", control, ControlConfig)
    _require_metrics(task)
    _require_signatures(task)
    return task


def _require_signatures(task: Task) -> None:
    """Checks that the task's methods accept the arguments they are called with.

    Raises:
        TypeError: one does not; the message shows its line, and the parameters it must take.
    """
    for name in ("model", "data", "loss", "optimizer"):
        method = getattr(task, name)
        parameters = list(inspect.signature(getattr(Task, name)).parameters)[1:]  # without self
        by_name = {"recipe": None} if name == "loss" else {}
        try:
            inspect.signature(method).bind(*(each for each in parameters if each not in by_name), **by_name)
        except TypeError as error:
            code = getattr(method, "__code__", None)
            line = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
            raise TypeError(
                f"{type(task).__name__}.{name}{line} takes {inspect.signature(method)}: must take "
                f"({', '.join(parameters)}); {error}"
            ) from error


def _require_metrics(task: Task) -> None:
    """Checks that the task's metrics are of class `Metric`, and that its objective is one of them or the loss.

    Raises:
        TypeError, ValueError: they are not.
    """
    name = type(task).__name__
    for metric in as_metrics(task.metrics):
        require_instance(f"{name}.metrics[{metric!r}]", task.metrics[metric], Metric)
    rule = f"must be one of {name}.metrics, {', '.join(task.metrics) or 'which has none'}, or {LOSS}"
    require(task.objective in (*task.metrics, LOSS), f"{name}.objective", task.objective, rule)


def _import_class(name: str) -> type[Task]:
    """Returns the class of a bundled task, or of `package.module:Class`, which must be a complete task."""
    module_name, _, class_name = TASKS.get(name, name).partition(":")
    module = _import_module(name, module_name)
    found = getattr(module, class_name, None)
    if found is None:
        tasks = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, Task)]
        offered = ", ".join(each.__name__ for each in tasks if each.__module__ == module_name) or "none"
        raise ValueError(f"task = {name!r}: {module_name} has no {class_name}; the tasks defined there: {offered}")
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise ValueError(f"task = {name!r}: {class_name} must be a subclass of triaccel_ray.Task")
    if inspect.isabstract(found):
        absent = ", ".join(sorted(found.__abstractmethods__))
        raise ValueError(f"task = {name!r}: {class_name} must define the method(s) {absent}")
    return found


def _import_module(name: str, module_name: str) -> ModuleType:
    """Returns the module; that of a user's own task is looked for in the working directory too, as by `python -m`."""
    if name not in TASKS and {"", os.getcwd()}.isdisjoint(sys.path):
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"task = {name!r}: there is no module {error.name}, neither in {os.getcwd()} nor installed"
            ) from error
        raise ValueError(f"task = {name!r}: {module_name} imports {error.name}, which is not installed") from error
    except (Exception, SystemExit) as error:  # any exception means that the user's file is unusable
        raise ValueError(
            f"task = {name!r}: importing {module_name} raised {type(error).__name__}: {error}{_line_of(error)}"
        ) from error


def _line_of(error: BaseException) -> str:
    """Returns where the error was raised, as ` (file:line)`; empty if the error says so itself."""
    frames = traceback.extract_tb(error.__traceback__)
    return "" if isinstance(error, SyntaxError) or not frames else f" ({frames[-1].filename}:{frames[-1].lineno})"
