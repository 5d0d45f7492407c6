"""Runs each layer in the precision that the plan gives it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from triaccel_ray.apply import fp8
from triaccel_ray.apply.depthwise import forward_of
from triaccel_ray.apply.fused_norm import FusedNorm
from triaccel_ray.apply.weights import Weights, showing
from triaccel_ray.config import PrecisionConfig
from triaccel_ray.model.layers import Layer, uncompiled
from triaccel_ray.model.pytree import cast_floating, tensors_in, widened
from triaccel_ray.records.plan import Precision

DTYPES: Mapping[Precision, torch.dtype] = MappingProxyType(
    {
        Precision.FP8: fp8.E4M3,
        Precision.FP16: torch.float16,
        Precision.BF16: torch.bfloat16,
        Precision.FP32: torch.float32,
    }
)
"""Precision -> the dtype that a layer computes in."""
_SINGLE_DTYPE_FUNCTIONS = frozenset(
    [
        *(torch.cat, torch.concat, torch.concatenate, torch.stack, torch.hstack, torch.vstack, torch.dstack),
        *(torch.column_stack, torch.tensordot, torch.dot, torch.cross, torch.lerp, F.bilinear),
    ]
)


def supported_precisions(
    layer: Layer, *, without: Collection[Precision] = (), in_fp8: Collection[str] = ()
) -> tuple[Precision, ...]:
    """Returns the precisions that `layer` can compute in, FP32 among them, except those in `without`.

    FP8 is among them if `in_fp8` has the layer's name.
    """
    if layer.fixed_precision:
        return (Precision.FP32,)
    unsupported = {*without} if layer.name in in_fp8 else {*without, Precision.FP8}
    return tuple(level for level in Precision if level not in unsupported)


def fp8_layers(layers: Sequence[Layer], config: PrecisionConfig, device: torch.device) -> frozenset[str]:
    """Returns the names of layers that FP8 may be offered to, if the settings ask for it; call it before wrapping."""
    if not (config.fp8 and fp8.has_fp8(device)):
        return frozenset()
    wide_only = not config.allow_slow_precisions
    return frozenset(layer.name for layer in layers if fp8.fits_fp8(layer, wide_only=wide_only))


def refused_precisions(
    config: PrecisionConfig, device: torch.device, *, is_compiled: bool, in_fp8: Collection[str]
) -> dict[Precision, str]:
    """Returns the precisions that are offered to no layer, each with the reason; `in_fp8` is that of `fp8_layers`."""
    refused: dict[Precision, str] = {}
    if not config.allow_slow_precisions:
        refused.update(precisions_without_benefit(device.type, is_compiled=is_compiled))
    if not config.fp8:
        return refused
    if not fp8.has_fp8(device):
        refused[Precision.FP8] = "this device has no FP8 instructions"
    elif not in_fp8:
        least = fp8.ALIGNMENT if config.allow_slow_precisions else fp8.MIN_WIDTH
        text = f"fp8 needs a linear layer with at least {least} inputs and outputs, in multiples of {fp8.ALIGNMENT}"
        refused[Precision.FP8] = text
    elif not (config.allow_slow_precisions or (is_compiled and device.type == "cuda")):
        refused[Precision.FP8] = "only code compiled for a GPU is faster in fp8"
    return refused


def precisions_without_benefit(device_type: str, *, is_compiled: bool) -> Mapping[Precision, str]:
    """Returns the precisions that gain nothing, each with the reason.

    On a CPU, PyTorch's convolutions in FP16 take 77 times as long as in FP32 (AMD EPYC, without FP16 instructions), or
    330 times (Intel Xeon, with them). A private operator reports BF16, and nothing else does. On a GPU, compiled code
    takes as long in FP16 as in BF16 (ViT-S on an H200: 9.0 and 8.9 ms a step). But FP16 needs a loss scale, and each
    new plan takes seconds to compile.
    """
    if device_type == "cuda":
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            return {Precision.BF16: "this GPU has no BF16 instructions"}
        return {Precision.FP16: "compiled code is no faster in fp16 than in bf16"} if is_compiled else {}
    found = {Precision.FP16: "PyTorch has no fast FP16 on a CPU"}
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        found[Precision.BF16] = "this CPU has no BF16 instructions"
    return found


class _Region:
    """A layer's compute dtype; None: as its own code says. Compiled code is specialized on it, and shared if equal."""

    __slots__ = ("dtype",)

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None


class LayerPrecision:
    """Runs each layer's forward function under `torch.autocast` to its dtype, without it in FP32, and FP8 by `fp8`.

    Between layers, autocast's own policy applies, with the plan's most common low dtype. Embeddings, norms and residual
    sums are FP32 as under `torch.amp`; batch normalization follows its input. Functions for which autocast refuses to
    mix FP16 and BF16 (concatenation) get FP32.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        *,
        weights: Weights | None = None,
        norms: Sequence[FusedNorm] = (),
        own_kernels: bool = True,
    ) -> None:
        """Wraps the layers' forward functions; `remove` undoes it.

        `weights` stores the parameters: by default in FP32, cast in each pass, so that gradients arrive in FP32.
        `norms` write their outputs in the dtype of the layers that read them, so that no cast is needed. With
        `own_kernels`, depthwise convolutions on a GPU use Triton kernels.

        Raises:
            ValueError: the model, or the model that it is a copy of, is wrapped already.
        """
        if any(_is_wrapped(module) for module in model.modules()):
            raise ValueError("model is under the control of another loop: close() that one first")
        self.weights, self._norms = weights or Weights(), norms
        self._name_of = {module: layer.name for layer in layers for module in layer.modules}
        self._device_type = next(model.parameters()).device.type
        self._autocast_dtype: torch.dtype | None = None
        self._compute_dtypes: dict[str, torch.dtype] = {}
        self.dtypes: Mapping[str, torch.dtype] = {}
        """Name of a layer -> the dtype that its weights are cast to, and its outputs have: BF16 in FP8."""
        self._regions = {layer.name: _Region() for layer in layers}
        self._is_suspended = self.is_removed = False
        self._wrapped: list[tuple[nn.Module, Any]] = []
        for module, name in self._name_of.items():
            self._wrap(module, self._regions[name], own_kernels)
        self.set(dict.fromkeys(self._regions, Precision.FP32))

    def set(self, precision: Mapping[str, Precision]) -> None:
        """Sets the precisions of layers, by name.

        Raises:
            KeyError: the model has no layer of that name.
        """
        unknown = sorted(set(precision) - set(self._regions))
        if unknown:
            raise KeyError(f"layers {unknown} are not in the model")
        wanted = {**self._compute_dtypes, **{name: DTYPES[level] for name, level in precision.items()}}
        if wanted == self._compute_dtypes:
            return
        self._compute_dtypes = wanted
        self._update_regions()
        self.dtypes = {name: torch.bfloat16 if dtype is fp8.E4M3 else dtype for name, dtype in wanted.items()}
        self.weights.set(self.dtypes)
        for norm in self._norms:
            read_in = {self.dtypes[self._name_of[module]] for module in norm.following}
            norm.output_dtype = read_in.pop() if len(read_in) == 1 and not norm.has_other_readers else None
        low = [dtype for dtype in self.dtypes.values() if dtype is not torch.float32]
        # BF16 wins a tie: it cannot overflow.
        self._autocast_dtype = max((torch.bfloat16, torch.float16), key=low.count) if low else None

    @property
    def key(self) -> tuple[torch.dtype, ...]:
        """The layers' present dtypes, in the model's order; a captured step is valid for one key only."""
        return tuple(self._compute_dtypes.values())

    @property
    def needs_loss_scale(self) -> bool:
        """Whether any layer computes in FP16, whose gradients underflow without a scale."""
        return torch.float16 in self._compute_dtypes.values()

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Returns a context for the forward pass, in which autocast also applies between layers."""
        enabled = self._autocast_dtype is not None and not self._is_suspended
        dtype = self._autocast_dtype or torch.bfloat16
        with torch.autocast(self._device_type, dtype=dtype, enabled=enabled), self.promoting():
            yield

    def promoting(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context of `in_force` without autocast: functions that require a single dtype accept several."""
        refuses = not self._is_suspended and {torch.float16, torch.bfloat16} <= set(self.dtypes.values())
        return _Promotion() if refuses else contextlib.nullcontext()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Returns a context inside which the model computes in FP32 and uncompiled, whatever the plan."""
        before = self._is_suspended
        self._is_suspended = True
        self._update_regions()
        self.weights.join()
        try:
            with uncompiled():
                yield
        finally:
            self._is_suspended = before
            self._update_regions()

    def remove(self) -> None:
        """Restores every module's original forward function."""
        for module, own in self._wrapped:
            del module.__dict__["forward"]
            if own is not None:
                module.__dict__["forward"] = own
        self._wrapped.clear()
        self.weights.release()
        self._is_suspended = self.is_removed = True  # read by deep copies of the model, which stay wrapped
        self._update_regions()

    def _update_regions(self) -> None:
        for name, dtype in self._compute_dtypes.items():
            self._regions[name].dtype = None if self._is_suspended else dtype

    def _wrap(self, module: nn.Module, region: _Region, own_kernels: bool) -> None:
        own = module.__dict__.get("forward")
        original: Callable[..., Any] = type(module).forward if own is None else lambda _, *a, **kw: own(*a, **kw)
        computed = forward_of(module) if own_kernels and own is None else original
        device_type, shown = self._device_type, self.weights.shown_by(module)

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if region.dtype is None:
                return original(module, *args, **kwargs)
            if region.dtype is torch.float32:
                with torch.autocast(device_type, enabled=False):
                    return computed(module, *widened(args), **widened(kwargs))
            if region.dtype is fp8.E4M3:
                with torch.autocast(device_type, enabled=False), showing(shown):
                    return fp8.linear(module, *args, **kwargs)  # type: ignore[arg-type]  # only `nn.Linear` is offered FP8
            # Uncached: autocast's cache does not distinguish FP16 casts of a weight from BF16 casts.
            with torch.autocast(device_type, dtype=region.dtype, cache_enabled=False), showing(shown):
                return computed(module, *args, **kwargs)

        forward.owner = self  # type: ignore[attr-defined]  # functions take attributes
        self._wrapped.append((module, own))
        # Bound to its module, so that a deep copy of the model computes with its own weights.
        module.__dict__["forward"] = MethodType(forward, module)


class _Promotion(TorchFunctionMode):
    """Casts arguments of several dtypes to FP32, or FP64, for functions that require a single dtype."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SINGLE_DTYPE_FUNCTIONS:
            dtypes = {tensor.dtype for tensor in tensors_in([args, kwargs]) if tensor.is_floating_point()}
            if len(dtypes) > 1:
                widest = torch.float64 if torch.float64 in dtypes else torch.float32
                args, kwargs = cast_floating(args, widest), cast_floating(kwargs, widest)
        return func(*args, **kwargs)


def _is_wrapped(module: nn.Module) -> bool:
    owner = getattr(module.__dict__.get("forward"), "owner", None)  # a method has its function's attributes
    return isinstance(owner, LayerPrecision) and not owner.is_removed
