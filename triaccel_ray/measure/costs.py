"""What each layer's precision, and a border before it, costs in time: every layer run alone, on the device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from triaccel_ray.dtypes import DTYPES
from triaccel_ray.layers import NORMS, SINGLE_DTYPE_NORMS, Layer, forward
from triaccel_ray.out_of_memory import first_line, is_out_of_memory
from triaccel_ray.plan import Fault, Precision
from triaccel_ray.random_states import random_states, set_random_states
from triaccel_ray.signals import LayerCost
from triaccel_ray.structure import map_tensors, tensors_in

NUM_TIMED = 3
"""Timed runs, after those that warm up; the shortest counts: a host that falls behind only ever adds."""
_CYCLES_PER_SECOND = 2e9
"""A GPU's clock, at most about so fast."""
_LONGEST_HEAD_START = 5e-3

Seconds = Callable[[], float]
"""Returns what a run took, once the device has done it."""


@dataclass(frozen=True, kw_only=True)
class CostMeasurement:
    """The layers' costs, or what kept them from being measured."""

    costs: tuple[LayerCost, ...] | None
    """In module order; None after an out-of-memory error."""
    faults: tuple[Fault, ...] = ()


def measure_costs(
    model: nn.Module,
    layers: Sequence[Layer],
    inputs: Any,
    supported: Mapping[str, Sequence[Precision]],
    *,
    step: int = 0,
) -> CostMeasurement:
    """Returns what each layer takes, forward and backward, in each precision it supports, and a border at its input.

    One forward pass over `inputs`, a batch of the size to measure at, shows what each layer is called with. Then every
    call is made again alone, on random values of the same shape and memory format, weights and inputs cast beforehand,
    and differentiated with respect to both. To a layer's time counts that of the norms and of the modules without
    parameters (activations, pooling) called after it, because they compute in its precision; functions that are no
    module are not seen. Several calls add up. The first layer's input needs no gradient, as in training.

    A layer that cannot be run alone in some precision has no figure for it; one that is never called is left out.
    Model, gradients, buffers, training flags and random states are afterwards what they were. The model has to compute
    in FP32 meanwhile (`LayerPrecision.suspended`).

    Args:
        model: the model, on the device that counts.
        layers: its layers.
        inputs: what the model is called with, see `layers.forward`.
        supported: layer name -> the precisions to measure.
        step: for the fault.
    """
    device = next(model.parameters()).device
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    try:
        with on_device, _untouched(model):
            calls = _record(model, layers, inputs)
            stopwatch = _Stopwatch(device)
            pending = [_measure(layer.name, calls[layer.name], supported[layer.name], stopwatch) for layer in layers]
            stopwatch.synchronize()
            return CostMeasurement(costs=tuple(result() for result in pending if result is not None))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        detail = first_line(error)
    return CostMeasurement(costs=None, faults=(Fault.out_of_memory(detail, step=step, phase="costs"),))


@dataclass(eq=False, kw_only=True)
class _Call:
    """One call of a module, seen in the forward pass."""

    module: nn.Module
    is_layer: bool
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    """Positional and named; floating-point tensors on the meta device, with the strides that they had."""
    needs_input_gradient: bool
    times: int = 1

    def like(self, other: _Call) -> bool:
        """Returns whether this is the same call, but for the values."""
        return self.module is other.module and _shapes(self.arguments) == _shapes(other.arguments)


def _shapes(arguments: Any) -> list[tuple[Any, ...]]:
    return [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors_in(arguments)]


def _record(model: nn.Module, layers: Sequence[Layer], inputs: Any) -> dict[str, list[_Call]]:
    """Returns each layer's calls, and those of the modules that follow it, in one forward pass without gradients."""
    calls: dict[str, list[_Call]] = {layer.name: [] for layer in layers}
    owner = {module: layer.name for layer in layers for module in layer.modules}
    inside = {part for module in owner for part in module.modules()}
    input_storages = {tensor.untyped_storage().data_ptr() for tensor in tensors_in([inputs])}
    latest: str | None = None

    def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal latest
        latest = owner.get(module, latest)
        if latest is None:
            return
        fresh = all(tensor.untyped_storage().data_ptr() not in input_storages for tensor in tensors_in([args, kwargs]))
        call = _Call(
            module=module,
            is_layer=module in owner,
            arguments=map_tensors(_shape_of, (args, kwargs)),
            needs_input_gradient=fresh,
        )
        known = next((each for each in calls[latest] if each.like(call)), None)
        if known is None:
            calls[latest].append(call)
        else:
            known.times += 1

    watched = [module for module in model.modules() if module in owner or (module not in inside and _follows(module))]
    handles = [module.register_forward_pre_hook(see, with_kwargs=True) for module in watched]
    try:
        with torch.no_grad():
            forward(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _follows(module: nn.Module) -> bool:
    """Returns whether `module`, no layer, computes in the precision of what it is given."""
    is_leaf = next(module.children(), None) is None
    return is_leaf and (isinstance(module, NORMS) or next(module.parameters(), None) is None)


def _shape_of(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta") if tensor.is_floating_point() else tensor.detach().clone()


def _measure(
    name: str, calls: Sequence[_Call], precisions: Sequence[Precision], stopwatch: _Stopwatch
) -> Callable[[], LayerCost] | None:
    """Returns what gives the layer's cost once the device is done; None for a layer that is never called."""
    own = [call for call in calls if call.is_layer]
    if not own:
        return None
    timed = {call: {level: _time_alone(call, level, stopwatch) for level in precisions} for call in calls}
    # What follows a layer and fails in one precision would tilt the comparison: it is left out in all.
    counted = [call for call in calls if call.is_layer or None not in timed[call].values()]
    border = [(call.times, _time_border(call, stopwatch)) for call in own]

    def result() -> LayerCost:
        compute_ms = {}
        for level in precisions:
            parts = [(call.times, timed[call][level]) for call in counted]
            if all(seconds is not None for _, seconds in parts):
                compute_ms[level] = _milliseconds(parts)
        return LayerCost(name=name, compute_ms=compute_ms, border_ms=_milliseconds(border))

    return result


def _milliseconds(parts: Sequence[tuple[int, Seconds | None]]) -> float:
    total = sum(times * seconds() for times, seconds in parts if seconds is not None)
    return round(1e3 * total, 4)  # 0.1 us: an event's own resolution is coarser, and logs stay short


def _time_alone(call: _Call, level: Precision, stopwatch: _Stopwatch) -> Seconds | None:
    """Returns the time of the call in this precision, forward and backward; None if the module fails alone."""
    try:
        return stopwatch.time(_Alone(call, DTYPES[level], stopwatch.device).run)
    except Exception as error:  # a module of the user's may raise anything when it is called out of its place
        if is_out_of_memory(error):
            raise
        return None


def _time_border(call: _Call, stopwatch: _Stopwatch) -> Seconds:
    """Returns the time of casting the call's inputs from FP32 to 16 bits, and their gradients back."""
    meta = [tensor for tensor in tensors_in(call.arguments) if tensor.is_meta]
    if not meta:
        return lambda: 0.0
    there = [torch.empty_like(t, device=stopwatch.device, dtype=torch.float32).normal_() for t in meta]
    back = [tensor.to(torch.bfloat16) for tensor in there] if call.needs_input_gradient else []

    def run() -> None:
        for tensor in there:
            tensor.to(torch.bfloat16)
        for gradient in back:
            gradient.to(torch.float32)

    return stopwatch.time(run)


class _Arrival(torch.autograd.Function):
    """Lets a tensor appear as the result of a computation, for modules that work in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, values: list[Tensor]) -> Tensor:
        return values[0].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Alone:
    """One call, ready to be made again and again by itself in one precision."""

    def __init__(self, call: _Call, dtype: torch.dtype, device: torch.device) -> None:
        self._call, self._dtype, self._device = call, dtype, device
        self._leaves: list[Tensor] = []
        self._arguments = map_tensors(self._values, call.arguments)
        self._state = {name: buffer.clone() for name, buffer in call.module.named_buffers()}
        for prefix, part in call.module.named_modules():
            # As in a step: norms keep their parameters in FP32, unless they demand one dtype.
            keeps = isinstance(part, NORMS) and not (part is call.module and isinstance(part, SINGLE_DTYPE_NORMS))
            for name, parameter in part.named_parameters(prefix, recurse=False):
                casts = parameter.is_floating_point() and not keeps
                copy = parameter.detach().to(dtype if casts else parameter.dtype)
                self._state[name] = copy.requires_grad_(parameter.requires_grad)
                self._leaves += [copy] if parameter.requires_grad else []
        self._gradients: list[Tensor] | None = None

    def run(self) -> None:
        """Enqueues one forward and backward pass."""
        args, kwargs = map_tensors(self._arrive, self._arguments)
        outputs = functional_call(self._call.module, self._state, args, kwargs)
        differentiable = [tensor for tensor in tensors_in([outputs]) if tensor.requires_grad]
        if self._gradients is None:
            self._gradients = [torch.randn_like(tensor) for tensor in differentiable]
        if differentiable and self._leaves:
            torch.autograd.grad(differentiable, self._leaves, self._gradients, allow_unused=True)

    def _values(self, tensor: Tensor) -> Tensor:
        """Returns random numbers for a shape, a leaf where the gradient is wanted; other tensors as they are."""
        if not tensor.is_meta:
            return tensor
        values = torch.empty_like(tensor, device=self._device, dtype=self._dtype).normal_()
        if self._call.needs_input_gradient:
            self._leaves.append(values.requires_grad_())
        return values

    def _arrive(self, tensor: Tensor) -> Tensor:
        arrived: Tensor = _Arrival.apply(tensor, [tensor.detach()]) if tensor.requires_grad else tensor
        return arrived


class _Stopwatch:
    """Times what is enqueued on the device: by events on a GPU, by the wall clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_cuda = device.type == "cuda"

    def time(self, run: Callable[[], None]) -> Seconds:
        """Returns the shortest time of `run`, to be read after `synchronize`.

        On a GPU the device is kept busy until the runs are enqueued: what is timed is its work, as in a captured step,
        not how fast the host launches.
        """
        run()
        if not self._is_cuda:
            return self._by_the_clock(run)
        began = time.perf_counter()
        run()
        host_seconds = time.perf_counter() - began
        events = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_TIMED + 1)]
        head_start = min(2.0 * NUM_TIMED * host_seconds, _LONGEST_HEAD_START)
        torch.cuda._sleep(int(head_start * _CYCLES_PER_SECOND))
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        pairs = list(pairwise(events))
        return lambda: min(start.elapsed_time(end) for start, end in pairs) / 1e3

    def synchronize(self) -> None:
        """Waits for the device."""
        if self._is_cuda:
            torch.cuda.synchronize(self.device)

    def _by_the_clock(self, run: Callable[[], None]) -> Seconds:
        seconds = []
        for _ in range(NUM_TIMED):
            began = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - began)
        shortest = min(seconds)
        return lambda: shortest


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Puts the model into training mode, and gives back its flags, its buffers and the random states at the end."""
    training = [(module, module.training) for module in model.modules()]
    buffers = [
        (module._buffers, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    states = random_states()
    try:
        model.train()
        yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, saved in buffers:
                owner[name] = buffer.copy_(saved)
        for module, flag in training:
            module.training = flag
        set_random_states(states)
