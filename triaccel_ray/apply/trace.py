"""Traces a model's forward pass into a graph of calls, or says why a graph would not compute the same."""

from __future__ import annotations

import contextlib
import inspect
import operator
import random
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from triaccel_ray.cuda.out_of_memory import first_line
from triaccel_ray.model.layers import preserved_modes

INPLACE_OPERATORS: frozenset[Callable[..., Any]] = frozenset(
    [
        *(operator.iadd, operator.isub, operator.imul, operator.imatmul, operator.itruediv, operator.ifloordiv),
        *(operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor),
        *(operator.ilshift, operator.irshift),
    ]
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """The reason why a model cannot be traced or fused, and runs unchanged."""

    reason: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """The calls of a model's forward pass, valid while `holds()` returns True."""

    graph: fx.Graph
    opened: tuple[tuple[nn.Module, bool], ...]
    """Modules that were traced into, and whether each was in training mode."""

    def holds(self) -> bool:
        """Returns whether training modes and hooks are the same as when the model was traced."""
        return all(module.training is mode and is_plain(module) for module, mode in self.opened)


def called(root: nn.Module, node: fx.Node) -> nn.Module | None:
    """Returns the module of `root` that the node calls; None if it calls no module."""
    return root.get_submodule(str(node.target)) if node.op == "call_module" else None


class _UntraceableError(Exception):
    """Aborts tracing; the message says why."""


def is_plain(module: nn.Module) -> bool:
    """Returns whether `module` has no hooks and no forward function besides its class's."""
    return "forward" not in module.__dict__ and not any(getattr(module, name) for name in _HOOKS)


def trace(model: nn.Module, leaves: Collection[nn.Module], opened: Collection[nn.Module] = ()) -> Trace | Refusal:
    """Returns a graph of the calls that `model` makes in training mode, or why a graph would not compute the same.

    Refuses data-dependent control flow, hooks on the model itself, and optional or variable arguments. Refuses forward
    passes that switch gradients, autocast or saved-tensor hooks, create tensors, draw random numbers or set attributes.

    Traces into plain containers that hold a `torch.nn.BatchNorm2d`, into `torch.nn.Sequential`, `torch.nn.Identity`
    and the modules in `opened`; every other module is one call. A model in evaluation mode is traced in training mode;
    submodules in evaluation mode inside a model in training mode stay so. The model itself is left unchanged.
    """
    if reason := _refused_from_outside(model):
        return Refusal(reason=reason)
    tracer = _Tracer(leaves, opened)
    try:
        with preserved_modes(model):
            if not model.training:
                model.train()
            with _unchanged(model):
                graph = tracer.trace(model)
            return Trace(graph=graph, opened=tuple((part, part.training) for part in (model, *tracer.opened)))
    except _UntraceableError as error:
        return Refusal(reason=str(error))
    except Exception as error:  # the model's code runs on proxies for tensors: it may raise anything
        return Refusal(reason=f"its forward pass cannot be traced: {type(error).__name__}: {first_line(error)}")


def _refused_from_outside(model: nn.Module) -> str | None:
    if not is_plain(model):
        return "the model itself has hooks, or a forward function of its own beside its class's"
    if type(model).__module__.startswith("torch.") and type(model) is not nn.Sequential:
        return f"the model is a {type(model).__name__} of PyTorch itself: a module of your own around it is traced"
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            return f"its forward function takes {parameter}"
        if parameter.default is not parameter.empty:
            return f"its forward function has an optional parameter, {parameter.name}"
    return None


class _Tracer(fx.Tracer):
    """Refuses operations that `torch.fx` would silently leave out of a graph."""

    proxy_buffer_attributes = True

    def __init__(self, leaves: Collection[nn.Module], opened: Collection[nn.Module]) -> None:
        super().__init__()
        self._leaves = {id(module) for module in leaves}
        self._to_open = {id(module) for module in opened}
        self._surroundings = _surroundings()
        self.opened: list[nn.Module] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if id(m) in self._leaves or not is_plain(m):
            return True
        if type(m) in (nn.Sequential, nn.Identity) or id(m) in self._to_open:
            return False
        own_code = not type(m).__module__.startswith("torch.")
        return not (own_code and any(type(part) is nn.BatchNorm2d for part in m.modules()))

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self.is_leaf_module(m, ""):
            self.opened.append(m)
        return super().call_module(m, forward, args, kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _surroundings() != self._surroundings:
            raise _UntraceableError("its forward pass switches gradients, autocast or saved-tensor hooks on or off")
        return super().create_node(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        if type(a) is _Proxy:
            return a.node
        if isinstance(a, dict) and type(a) is not dict:
            raise _UntraceableError(f"its forward pass makes a {type(a).__name__}")
        return super().create_arg(a)


class _Proxy(fx.Proxy):
    """A tensor proxy that records `x += y` as an in-place call, and refuses type checks in the model's code."""

    @property  # type: ignore[misc]  # isinstance reads it
    def __class__(self) -> type:
        caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        if caller in ("torch", __name__.partition(".")[0]) or caller in sys.stdlib_module_names:
            return type(self)
        raise _UntraceableError("its forward pass checks the type of a tensor")


def _in_place(function: Callable[..., Any]) -> Callable[[_Proxy, Any], Any]:
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


for _function in INPLACE_OPERATORS:
    setattr(_Proxy, f"__{_function.__name__}__", _in_place(_function))


def _surroundings() -> tuple[Any, ...]:
    """Returns the gradient, inference, autocast and saved-tensor hook settings, which graphs do not record."""
    autocast = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")]
    saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, saved_tensor_hooks


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Returns a context that restores the attributes of modules and the random states.

    Raises:
        _UntraceableError: the forward pass changed one of these, which the graph would not do.
    """
    attributes = {module: _attributes(module) for module in model.modules()}
    randomness, torch_randomness = random.getstate(), torch.get_rng_state()
    try:
        yield
    finally:
        drew = randomness != random.getstate() or not torch.equal(torch_randomness, torch.get_rng_state())
        random.setstate(randomness)
        torch.set_rng_state(torch_randomness)
        found = [_restore(module, before) for module, before in attributes.items()]
        changes = [change for change in found if change]
    if drew:
        raise _UntraceableError("its forward pass draws random numbers outside of what it calls")
    if changes:
        raise _UntraceableError(f"its forward pass {changes[0]}")


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Returns the module's attributes, each with a shallow copy if it is a container, else None."""
    return {
        name: (value, value.copy() if isinstance(value, dict | list | set) else None)
        for name, value in module.__dict__.items()
    }


def _restore(module: nn.Module, before: dict[str, tuple[Any, Any]]) -> str:
    """Restores the module's attributes; returns what the forward pass did to them, empty if nothing."""
    now, kind = module.__dict__, type(module).__name__
    names = [*before, *(now.keys() - before)]
    assigned = [name for name in names if name not in before or name not in now or now[name] is not before[name][0]]
    changed = [name for name, (value, copy) in before.items() if copy is not None and _items(value) != _items(copy)]
    verb = "assigns" if assigned and assigned[0] in now else "deletes"
    if assigned or changed:
        now.clear()
        for name, (value, copy) in before.items():
            now[name] = value
            if isinstance(value, list):
                value[:] = copy
            elif copy is not None:
                value.clear()
                value.update(copy)
    if any(name.startswith("_tensor_constant") for name in assigned):  # torch.fx stores them so
        return "makes tensors of its own"
    if assigned:
        return f"{verb} {assigned[0]} of {kind}"
    return f"changes a list, a dict or a set of the model's: {changed[0]} of {kind}" if changed else ""


def _items(container: Any) -> Any:
    """Returns a value that stays equal as long as the container holds the same objects."""
    if isinstance(container, dict):
        return list(container), [id(item) for item in container.values()]
    return {id(item) for item in container} if isinstance(container, set) else [id(item) for item in container]
