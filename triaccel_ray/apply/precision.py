"""Each layer computes in the precision its plan names; everything between layers follows the data it receives."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from triaccel_ray.apply.copies import ComputeCopies
from triaccel_ray.apply.fused_norm import FusedNorm
from triaccel_ray.dtypes import DTYPES
from triaccel_ray.layers import NORMS, SINGLE_DTYPE_NORMS, Layer
from triaccel_ray.plan import Precision
from triaccel_ray.structure import map_tensors, tensors_in

_NO_COPIES: Mapping[int, Tensor] = MappingProxyType({})
_EMULATED_RATIO = 2.5
"""A precision that takes longer than FP32 by more than this is emulated."""
_SINGLE_DTYPE_FUNCTIONS = frozenset(
    [
        *(torch.cat, torch.concat, torch.concatenate, torch.stack, torch.hstack, torch.vstack, torch.dstack),
        *(torch.column_stack, torch.tensordot, torch.dot, torch.cross, torch.lerp, F.bilinear),
    ]
)


def supported_precisions(layer: Layer, device: torch.device, *, offer_emulated: bool = False) -> tuple[Precision, ...]:
    """Returns what `layer` can compute in on `device`, FP32 always among them.

    What the device merely emulates is left out unless `offer_emulated` says otherwise.
    """
    if layer.fixed_precision:
        return (Precision.FP32,)
    emulated = () if offer_emulated else emulated_precisions(device.type)
    return tuple(level for level in Precision if level not in emulated)


@cache
def emulated_precisions(device_type: str) -> Mapping[Precision, str]:
    """Returns the precisions without instructions of their own on a device, each with how that was found out.

    A GPU is asked. A CPU is timed: forward and backward pass of a small convolution, the best of three, against FP32.
    On an AMD EPYC with BF16 instructions and none for FP16, BF16 took 0.7 times and FP16 77 times as long as FP32.
    """
    if device_type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return {} if has_bf16 else {Precision.BF16: "this GPU has no BF16 instructions"}
    base = _convolution_seconds(torch.float32)
    ratios = {level: _convolution_seconds(DTYPES[level]) / base for level in (Precision.FP16, Precision.BF16)}
    return {
        level: f"a convolution takes {ratio:.1f} times as long in {level.value} as in fp32 on this CPU"
        for level, ratio in ratios.items()
        if ratio > _EMULATED_RATIO
    }


def _convolution_seconds(dtype: torch.dtype) -> float:
    """Returns the least of three times that a convolution takes, forward and backward."""
    images = torch.ones(4, 32, 8, 8, dtype=dtype, requires_grad=True)
    weight = torch.ones(32, 32, 3, 3, dtype=dtype, requires_grad=True)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        torch.autograd.grad(F.conv2d(images, weight, padding=1).float().sum(), (images, weight))
        seconds.append(time.perf_counter() - began)
    return min(seconds)


class LayerPrecision:
    """Casts a layer's inputs and weights on entry, so that it computes, and returns, in its own precision.

    Weights stay FP32 parameters. Where `copies` holds a weight in the layer's precision the layer computes with that,
    and the gradient arrives there; else the cast is part of the graph and the gradient arrives in FP32. Batch
    normalisation and activations take what they are given. Layer, group and RMS normalisation demand one dtype and
    have their parameters cast to that of their input. Operations between layers that multiply matrices (attention
    written out, say) could meet two precisions; they run under `torch.autocast` to the plan's most common low one.
    Functions that autocast leaves with two dtypes, or refuses FP16 beside BF16 (concatenation), get the wider of them.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        *,
        copies: ComputeCopies | None = None,
        norms: Sequence[FusedNorm] = (),
    ) -> None:
        """Wraps the layers' forward functions; `remove` undoes it.

        `norms` are told to write what the layers that read them compute in, so that no cast stands at the border.

        Raises:
            ValueError: the model, or the one that it is a copy of, is wrapped already.
        """
        if any(_is_wrapped(module) for module in model.modules()):
            raise ValueError("model is under the control of another loop: close() that one first")
        self.copies, self._norms = copies, norms
        self._name_of = {module: layer.name for layer in layers for module in layer.modules}
        self._device_type = next(model.parameters()).device.type
        self._glue: torch.dtype | None = None
        self._dtypes: dict[str, torch.dtype] = {layer.name: torch.float32 for layer in layers}
        self._is_set = self._suspended = self.is_removed = False
        self._wrapped: list[tuple[nn.Module, Any]] = []
        for layer in layers:
            for module in layer.modules:
                self._wrap_layer(module, layer.name)
        for module in model.modules():
            if isinstance(module, SINGLE_DTYPE_NORMS):
                self._wrap_norm(module)

    def set(self, precision: Mapping[str, Precision]) -> None:
        """Puts the layers' precisions into force.

        Raises:
            KeyError: a name is not a layer's.
        """
        unknown = sorted(set(precision) - set(self._dtypes))
        if unknown:
            raise KeyError(f"layers {unknown} are not in the model")
        wanted = {**self._dtypes, **{name: DTYPES[level] for name, level in precision.items()}}
        if wanted == self._dtypes and self._is_set:
            return
        self._dtypes, self._is_set = wanted, True
        if self.copies is not None:
            self.copies.set(self._dtypes)
        for norm in self._norms:
            read_in = {self._dtypes[self._name_of[module]] for module in norm.following}
            norm.output_dtype = read_in.pop() if len(read_in) == 1 and not norm.has_other_readers else None
        low = [dtype for dtype in self._dtypes.values() if dtype is not torch.float32]
        # BF16 wins a tie: it cannot overflow.
        self._glue = max((torch.bfloat16, torch.float16), key=low.count) if low else None

    @property
    def copies_in_force(self) -> Mapping[int, Tensor]:
        """Id of a parameter -> the low-precision copy that computes in its place; the same object while it holds."""
        return _NO_COPIES if self.copies is None else self.copies.in_force

    def refresh_copies(self) -> None:
        """Brings the copies up to date with parameters that somebody has changed since the last step."""
        if self.copies is not None:
            self.copies.refresh()

    @property
    def key(self) -> tuple[torch.dtype, ...]:
        """The layers' dtypes in force, in the model's order: what a captured step was captured with."""
        return tuple(self._dtypes.values())

    @property
    def needs_loss_scale(self) -> bool:
        """Whether any layer computes in FP16, whose gradients underflow without a scale."""
        return torch.float16 in self._dtypes.values()

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Returns a context for the forward pass, inside which precisions apply between layers too."""
        enabled = self._glue is not None and not self._suspended
        is_mixed = enabled and len(set(self._dtypes.values())) > 1
        with (
            torch.autocast(self._device_type, dtype=self._glue or torch.bfloat16, enabled=enabled),
            _Promotion() if is_mixed else contextlib.nullcontext(),
        ):
            yield

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Returns a context inside which everything computes in FP32, whatever the plan."""
        before, self._suspended = self._suspended, True
        try:
            yield
        finally:
            self._suspended = before

    def remove(self) -> None:
        """Gives every module its own forward function back."""
        for module, own in self._wrapped:
            del module.__dict__["forward"]
            if own is not None:
                module.__dict__["forward"] = own
        self._wrapped.clear()
        self._suspended = self.is_removed = True  # for deep copies of the model, which keep the wrapping

    def _wrap_layer(self, module: nn.Module, name: str) -> None:
        original = _unbound_forward(module)

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._suspended:
                return original(module, *args, **kwargs)
            dtype = self._dtypes[name]
            with torch.autocast(self._device_type, enabled=False), _parameters_as(module, dtype, self.copies_in_force):
                return original(module, *_cast(args, dtype), **_cast(kwargs, dtype))

        self._install(module, forward)

    def _wrap_norm(self, module: nn.Module) -> None:
        original = _unbound_forward(module)

        def forward(module: nn.Module, input: Tensor) -> Any:  # noqa: A002  # the name that callers may use
            if self._suspended:
                return original(module, input)
            with torch.autocast(self._device_type, enabled=False), _parameters_as(module, input.dtype, {}):
                return original(module, input)

        self._install(module, forward)

    def _install(self, module: nn.Module, forward: Any) -> None:
        self._wrapped.append((module, module.__dict__.get("forward")))
        forward.owner = self
        # Bound to its module, so that a deep copy of the model computes with its own weights.
        module.__dict__["forward"] = MethodType(forward, module)


class _Promotion(TorchFunctionMode):
    """Gives functions that demand one dtype the wider one of what they are given."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SINGLE_DTYPE_FUNCTIONS:
            dtypes = {tensor.dtype for tensor in tensors_in([args, kwargs]) if tensor.is_floating_point()}
            if len(dtypes) > 1:
                widest = torch.float64 if torch.float64 in dtypes else torch.float32
                args, kwargs = _cast(args, widest), _cast(kwargs, widest)
        return func(*args, **kwargs)


def _is_wrapped(module: nn.Module) -> bool:
    owner = getattr(module.__dict__.get("forward"), "owner", None)  # a method has its function's attributes
    return isinstance(owner, LayerPrecision) and not owner.is_removed


def _unbound_forward(module: nn.Module) -> Callable[..., Any]:
    """Returns the module's forward function as one that takes the module first."""
    own = module.__dict__.get("forward")
    if own is None:
        return type(module).forward
    return lambda _, *args, **kwargs: own(*args, **kwargs)


@contextlib.contextmanager
def _parameters_as(module: nn.Module, dtype: torch.dtype, copies: Mapping[int, Any]) -> Iterator[None]:
    """Lets the floating-point parameters of `module` and of the modules below it appear in `dtype`.

    From `copies` (id of a parameter -> its copy) where there is one, else cast. Norms below it are left to themselves,
    unless `module` is the norm.
    """
    if dtype is torch.float32:
        yield
        return
    saved: list[tuple[nn.Module, dict[str, nn.Parameter | None]]] = []
    try:
        for part in module.modules() if module._modules else (module,):
            if part is module or not isinstance(part, NORMS):
                saved.append((part, part._parameters))
                part._parameters = {
                    name: copies[id(p)] if id(p) in copies else _cast(p, dtype) for name, p in part._parameters.items()
                }
        yield
    finally:
        for part, parameters in saved:
            part._parameters = parameters


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)
