"""Fuses each batch normalization of a model with its residual sum and activation into one module."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from triaccel_ray.apply.fused_gate import Multiply, find_gate, gates_of
from triaccel_ray.apply.fused_norm import FusedNorm, RecomputedInput
from triaccel_ray.apply.trace import INPLACE_OPERATORS, Refusal, Trace, called, is_plain, trace
from triaccel_ray.kernels.batch_norm_act.reference import Activation

_ACTIVATION_MODULES: Mapping[type[nn.Module], Activation] = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.SiLU: "silu",
    nn.Hardswish: "hardswish",
}
_ACTIVATION_FUNCTIONS: Mapping[Any, Activation] = {
    **dict.fromkeys([F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_"], "relu"),
    F.relu6: "relu6",
    F.silu: "silu",
    F.hardswish: "hardswish",
}
_SUMS: Mapping[Any, bool] = {operator.add: False, torch.add: False, operator.iadd: True, "add": False, "add_": True}
"""Functions and methods that add, and whether they write into their first argument."""
_POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
_READERS = (nn.Conv2d, nn.Linear, *_POOLS)
"""Modules that do not modify their input and return a new tensor, never a view."""
_DTYPE_KEEPERS = (*_POOLS, nn.Identity, nn.Flatten)


@dataclass(frozen=True, kw_only=True, eq=False)
class Fusion:
    """A model's forward pass in training mode with fused norms: fewer passes over memory."""

    module: fx.GraphModule
    """Computes what the model does in training mode, from the same parameters, buffers and submodules."""
    norms: tuple[FusedNorm, ...]
    _trace: Trace

    def holds(self) -> bool:
        """Returns whether `module` still computes what the model does; if not, fuse again or run the model.

        It no longer does once a module with batch normalizations or a fused gate gets hooks, or is switched between
        training and evaluation. Norms, activations and layers may change at any time.
        """
        return self._trace.holds()

    @property
    def refused_because(self) -> str:
        """Why memory formats ruled out the fused kernel for a norm; empty if they never did."""
        return next((norm.refused_because for norm in self.norms if norm.refused_because), "")


@dataclass(frozen=True, kw_only=True)
class _Chain:
    """The call of a norm, and the calls after it that can be fused with it."""

    norm: fx.Node
    sum: fx.Node | None
    activation: fx.Node | None

    @property
    def nodes(self) -> list[fx.Node]:
        return [node for node in (self.norm, self.sum, self.activation) if node is not None]

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The norm's input, and the residual if there is a sum."""
        summands = () if self.sum is None else self.sum.args
        return (self.norm.args[0], *(summand for summand in summands if summand is not self.norm))

    def shortened(self) -> _Chain:
        return replace(self, sum=None) if self.activation is None else replace(self, activation=None)


def fuse(model: nn.Module, leaves: Collection[nn.Module], *, recompute: bool = True) -> Fusion | Refusal:
    """Returns `model` with every chain BatchNorm2d [-> residual sum] [-> activation] as one `FusedNorm`, or why not.

    `leaves`, the control loop's layers, are called unchanged, including hooks and replaced forward functions. The model
    is not changed; `trace` says which models are refused. A chain ends at a value that is read twice, and before an
    operation that writes into another tensor. After a sum, it includes no activation but ReLU. If both summands come
    from norms, the later norm takes the sum. Outputs that are read twice are forked if possible: the kernel then adds
    the gradients. An output that is multiplied by a gate made from its mean, as in squeeze-and-excitation, is read by a
    `Pool` and a `Multiply`. With `recompute`, a norm's only reader does not save the output (`RecomputedInput`).
    """
    traced = trace(model, leaves, opened=gates_of(model, leaves))
    if isinstance(traced, Refusal):
        return traced
    rewriting = _Rewriting(model, traced.graph, leaves)
    calls = [rewriting.replace(chain) for chain in list(rewriting.chains())]
    if not calls:
        return Refusal(reason="it calls no BatchNorm2d outside of its layers")
    for call in calls:
        rewriting.fuse_gate(call)
    norms = tuple(rewriting.record_readers(call) for call in list(traced.graph.nodes) if call in calls)
    if recompute:
        rewriting.recompute_inputs(calls)
    return Fusion(module=rewriting.module(), norms=norms, _trace=traced)


class _Rewriting:
    """Rewrites a traced graph, in place, into the fused graph."""

    def __init__(self, model: nn.Module, graph: fx.Graph, leaves: Collection[nn.Module]) -> None:
        self._model, self._graph = model, graph
        self._leaves = {id(module) for module in leaves}
        self._new_modules: dict[str, nn.Module] = {}
        """Name -> new module that replaces calls: `FusedNorm`, `RecomputedInput`, `Pool` or `Multiply`."""

    def chains(self) -> Iterator[_Chain]:
        """Yields the chains, later norms first, because later norms take the sums."""
        nodes = list(self._graph.nodes)
        position = {node: index for index, node in enumerate(nodes)}
        taken: set[fx.Node] = set()
        for norm in reversed(nodes):
            if not self._is_norm(norm):
                continue
            total = self._sum_after(norm, taken)
            activation = self._activation_after(total or norm, relu_only=total is not None)
            chain = _Chain(norm=norm, sum=total, activation=activation)
            while any(
                self._may_write(between) or between.target == norm.target
                for between in nodes[position[norm] + 1 : position[chain.nodes[-1]]]
                if between not in chain.nodes
            ):
                chain = chain.shortened()
            taken.update(chain.nodes)
            yield chain

    def replace(self, chain: _Chain) -> fx.Node:
        """Replaces the chain with one call of a `FusedNorm`, and returns that call."""
        norm, last = self._module(chain.norm), chain.nodes[-1]
        assert isinstance(norm, nn.BatchNorm2d)
        combine = None if chain.sum is None else _callable(chain.sum)
        activate, activation = self._activation(chain.activation)
        fused = FusedNorm(norm, combine, activate, activation)
        fused.keeps_dtype = chain.sum is not None and _SUMS[chain.sum.target]
        call = self._call_after(last, fused, chain.inputs)
        last.replace_all_uses_with(call)
        for node in reversed(chain.nodes):
            self._graph.erase_node(node)
        return call

    def fuse_gate(self, call: fx.Node) -> None:
        """Replaces the mean of a call's value, and its product with a gate made from that, by `Pool` and `Multiply`."""
        gate = find_gate(call, self._module)
        if gate is None:
            return
        mean, pool, product, factor = gate
        pooled = self._call_after(call, pool, (call,))
        fused_mean, x = self._items_of(pooled)
        fused = self._call_after(product, Multiply(), (x, factor))
        for node, replacement in ((product, fused), (mean, fused_mean)):
            node.replace_all_uses_with(replacement)
            self._graph.erase_node(node)

    def record_readers(self, call: fx.Node) -> FusedNorm:
        """Returns the fused norm of a call, with its readers recorded and its output forked if possible."""
        fused = self._new_modules[str(call.target)]
        assert isinstance(fused, FusedNorm)
        following: dict[int, nn.Module] = {}
        fused.has_other_readers = self._collect_readers(call, following)
        fused.following = tuple(following.values())
        readers = list(call.users)
        if len(readers) > 1 and all(self._only_reads(reader, call) for reader in readers):
            fused.forked = True
            first, second = self._items_of(call)
            residual_readers = [reader for reader in readers if call in reader.args[1:]]
            for reader in readers:
                is_alone = reader is (residual_readers or readers)[-1]
                reader.replace_input_with(call, second if is_alone else first)
        return fused

    def recompute_inputs(self, calls: Collection[fx.Node]) -> None:
        """Wraps each convolution that alone reads a norm without residual, so that it does not save its input."""
        for call in calls:
            reader = _only_user(call)
            layer = None if reader is None else self._module(reader)
            if reader is not None and len(call.args) == 1 and type(layer) is nn.Conv2d:
                reader.target = self._add(RecomputedInput(layer))

    def module(self) -> fx.GraphModule:
        """Returns the graph as a module, with the modules that it calls."""
        targets = [str(node.target) for node in self._graph.nodes if node.op in ("call_module", "get_attr")]
        root = {target: self._new_modules.get(target) or operator.attrgetter(target)(self._model) for target in targets}
        self._graph.lint()
        return fx.GraphModule(root, self._graph, type(self._model).__name__)

    def _add(self, module: nn.Module) -> str:
        """Registers a new module, and returns the name by which the graph calls it."""
        name = f"{type(module).__name__.lower()}_{len(self._new_modules)}"
        while hasattr(self._model, name):
            name += "_"
        self._new_modules[name] = module
        return name

    def _call_after(self, node: fx.Node, module: nn.Module, args: tuple[Any, ...]) -> fx.Node:
        with self._graph.inserting_after(node):
            return self._graph.call_module(self._add(module), args)

    def _items_of(self, call: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Returns the nodes of the two values that a call returns."""
        with self._graph.inserting_after(call):
            second = self._graph.call_function(operator.getitem, (call, 1))
            first = self._graph.call_function(operator.getitem, (call, 0))
        return first, second

    def _is_norm(self, node: fx.Node) -> bool:
        module = self._module(node)
        takes_one = len(node.args) == 1 and isinstance(node.args[0], fx.Node) and not node.kwargs
        return type(module) is nn.BatchNorm2d and takes_one and self._is_replaceable(module)

    def _sum_after(self, node: fx.Node, taken: Collection[fx.Node]) -> fx.Node | None:
        """Returns the only reader of `node`, if it adds another value and does not write the sum into that value."""
        total = _only_user(node)
        if total is None or total in taken or total.kwargs or len(total.args) != 2:
            return None
        if total.op not in ("call_function", "call_method") or total.target not in _SUMS:
            return None
        first, second = total.args
        writes_into_other = _SUMS[total.target] and first is not node
        is_sum_of_two = first is not second and isinstance(first, fx.Node) and isinstance(second, fx.Node)
        return total if is_sum_of_two and not writes_into_other else None

    def _activation_after(self, node: fx.Node, *, relu_only: bool) -> fx.Node | None:
        """Returns the only reader of `node`, if it is an activation.

        After a sum, only ReLU is fused. For other activations the kernel saves the residual, while the original code
        saves the sum. Code that then writes into the residual would break the backward pass.
        """
        user = _only_user(node)
        _, activation = self._activation(user)
        if user is None or activation == "none" or (relu_only and activation != "relu"):
            return None
        return user if user.args[:1] == (node,) else None

    def _activation(self, node: fx.Node | None) -> tuple[Callable[[Tensor], Tensor] | None, Activation]:
        """Returns the activation that `node` calls and its name; None and "none" when it calls no known one."""
        if node is None or len(node.args) != 1 or set(node.kwargs) - {"inplace"}:
            return None, "none"
        module = self._module(node)
        if module is not None:
            name = _ACTIVATION_MODULES.get(type(module), "none")
            if name != "none" and self._is_replaceable(module):
                return module, name
        elif node.op in ("call_function", "call_method") and node.target in _ACTIVATION_FUNCTIONS:
            return functools.partial(_callable(node), **node.kwargs), _ACTIVATION_FUNCTIONS[node.target]
        return None, "none"

    def _may_write(self, node: fx.Node) -> bool:
        """Returns whether the call may write into an existing tensor; True for unknown code."""
        if node.op in ("get_attr", "placeholder", "output"):
            return False
        module = self._module(node)
        if module is not None:
            return not type(module).__module__.startswith("torch.nn.") or getattr(module, "inplace", False)
        if node.target in INPLACE_OPERATORS or "out" in node.kwargs:
            return True
        if any(value is True for value in (*node.args, node.kwargs.get("inplace"))):
            return True
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "_")
        origin = "torch" if node.op == "call_method" else str(getattr(node.target, "__module__", "") or "torch")
        known = origin.partition(".")[0] in ("torch", "_operator", "operator", "math")
        return not known or (name.endswith("_") and not name.endswith("__"))

    def _only_reads(self, reader: fx.Node, call: fx.Node) -> bool:
        """Returns whether `reader` neither writes into the value of `call` nor returns a view of it."""
        if [*reader.args, *reader.kwargs.values()].count(call) != 1:
            return False
        module = self._new_modules.get(str(reader.target)) or self._module(reader)
        if module is not None:
            return isinstance(module, FusedNorm) or type(module) in _READERS
        if reader.op == "call_function" and reader.target in (operator.add, torch.add, operator.mul, torch.mul):
            return True
        return reader.target in (operator.iadd, operator.imul) and reader.args[0] is not call

    def _collect_readers(self, node: fx.Node, following: dict[int, nn.Module]) -> bool:
        """Adds the layers that read the value of `node` to `following`; returns whether anything else reads it."""
        has_others = False
        for reader in node.users:
            module = self._new_modules.get(str(reader.target)) or self._module(reader)
            if id(module) in self._leaves and module is not None:
                following[id(module)] = module
            elif isinstance(module, _DTYPE_KEEPERS) or reader.target in (torch.flatten, operator.getitem, "flatten"):
                has_others |= self._collect_readers(reader, following)
            elif not isinstance(module, FusedNorm) or node not in reader.args[1:]:
                has_others = True
        return has_others

    def _module(self, node: fx.Node) -> nn.Module | None:
        """Returns the module of the original model that the node calls, if any."""
        return None if node.target in self._new_modules else called(self._model, node)

    def _is_replaceable(self, module: nn.Module | None) -> bool:
        return module is not None and id(module) not in self._leaves and is_plain(module)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _callable(node: fx.Node) -> Callable[..., Any]:
    """Returns what the node calls, as a function."""
    target = node.target
    if isinstance(target, str):
        return lambda value, *args: getattr(value, target)(*args)
    return target
