"""Finds the modules of a model that the control loop treats as layers; checks and calls the model."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # no public class covers all batch normalizations
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase, nn.LocalResponseNorm)


@dataclass(frozen=True, eq=False)
class Layer:
    """A module that owns a weight of two or more dimensions, or several that share one, as tied embeddings do.

    Biases and normalization parameters belong to no layer: their statistics are not watched.
    """

    name: str
    """Qualified name of the first module, as `model.named_modules()` gives it; `model` for the model itself."""
    modules: tuple[nn.Module, ...]
    """The modules that compute with the weight."""
    weights: tuple[nn.Parameter, ...]
    """Trainable parameters of two or more dimensions, the first module's own first."""
    fixed_precision: bool = False
    """True for embeddings, which only look up, and recurrent modules, whose flattened weights a cast would miss."""

    @property
    def num_elements(self) -> int:
        """Number of elements of all weights."""
        return sum(weight.numel() for weight in self.weights)


def batch_norms(model: nn.Module) -> tuple[_BatchNorm, ...]:
    """Returns the batch normalizations of `model`."""
    return tuple(module for module in model.modules() if isinstance(module, _BatchNorm))


def uses_batch_statistics(norm: _BatchNorm) -> bool:
    """Returns whether the outputs for a sample depend on the others of its batch."""
    return norm.training or norm.running_mean is None


def find_layers(model: nn.Module) -> tuple[Layer, ...]:
    """Returns the layers of `model` in module order.

    A container whose children own weights is not a layer. Parameters that it owns itself, such as a class token, stay
    FP32. `nn.MultiheadAttention` and everything below it is one layer, because it reads its children's weights itself.

    Raises:
        TypeError: `model` is not a module.
        ValueError: the model has no trainable weight of two or more dimensions, or an uninitialized parameter.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model = {model!r:.80}: must be a torch.nn.Module, not a {type(model).__name__}")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name} has no shape yet: pass one batch through the model first")
    found: dict[nn.Parameter, Layer] = {}
    in_attention: set[nn.Module] = set()
    for name, module in model.named_modules():
        own, weights = _weights(module, recurse=False), _weights(module, recurse=True)
        is_attention = isinstance(module, nn.MultiheadAttention)
        if (
            module in in_attention
            or isinstance(module, ParametrizationList)
            or not own
            or (len(weights) > len(own) and not is_attention)
        ):
            continue
        if is_attention:
            in_attention.update(module.modules())
        first = found.get(own[0])
        if first is None:
            found[own[0]] = Layer(name=name or "model", modules=(module,), weights=tuple(weights))
        else:
            found[own[0]] = replace(first, modules=(*first.modules, module))
    if not found:
        raise ValueError(
            f"model {type(model).__name__} has no trainable weight of two or more dimensions: there is no layer to "
            "control; check requires_grad"
        )
    return tuple(replace(layer, fixed_precision=_is_fixed(layer.modules)) for layer in found.values())


def _is_fixed(modules: Iterable[nn.Module]) -> bool:
    is_recurrent = any(isinstance(module, nn.RNNBase) for module in modules)
    return is_recurrent or all(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in modules)


def _parametrizations(module: nn.Module) -> list[ParametrizationList]:
    """Returns what computes the module's parametrized weights, such as those of `parametrizations.weight_norm`."""
    return [] if not is_parametrized(module) else [*module.parametrizations.values()]  # type: ignore[operator]


def _weights(module: nn.Module, *, recurse: bool) -> list[nn.Parameter]:
    parts = module.modules() if recurse else [module, *_parametrizations(module)]
    own = [p for part in parts if not isinstance(part, NORMS) for p in part.parameters(recurse=False)]
    return list(dict.fromkeys(p for p in own if p.dim() >= 2 and p.requires_grad))


def weights_outside_layers(model: nn.Module, layers: Sequence[Layer]) -> list[str]:
    """Returns the names of trainable parameters of two or more dimensions that belong to no layer."""
    unwatched = {*_weights(model, recurse=True)} - {weight for layer in layers for weight in layer.weights}
    return [name for name, p in model.named_parameters() if p in unwatched]


def require_trainable(model: nn.Module, optimizer: torch.optim.Optimizer, layers: Sequence[Layer]) -> None:
    """Checks that the loop can train the model with this optimizer.

    Raises:
        TypeError: `optimizer` is not a PyTorch optimizer.
        ValueError: the model is wrapped for several processes, trainable parameters are not FP32, gradients are sparse,
            or the optimizer needs a closure, has no learning rate, updates no layer of the model, or parameters that
            are not the model's.
    """
    _require_plain(model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer = {optimizer!r:.80}: must be a torch.optim.Optimizer, a new one for this model")
    _require_plain_steps(optimizer)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype is not torch.float32:
            way_out = "store pairs, and use torch.view_as_complex" if parameter.is_complex() else "use model.float()"
            raise ValueError(
                f"parameter {name} is {parameter.dtype}: must be torch.float32, the loop chooses what layers compute "
                f"in; {way_out}"
            )
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True and any(True for _ in module.parameters(recurse=False)):
            raise ValueError(f"{type(module).__name__} {name!r} has sparse = True: must be False, for dense gradients")
    updated = {p for group in optimizer.param_groups for p in group["params"]}
    if updated.isdisjoint(weight for layer in layers for weight in layer.weights):
        raise ValueError(
            "the optimizer updates no layer of this model: build it from model.parameters(), after the model has been "
            "moved to its device"
        )
    if num_others := len(updated.difference(model.parameters())):
        raise ValueError(
            f"the optimizer updates {num_others} parameters that are not the model's: make what owns them, such as the "
            "loss, a part of the model; only the model's gradients are zeroed, and only its parameters saved"
        )


def _require_plain(model: nn.Module) -> None:
    """Raises ValueError if the model is wrapped to be spread over processes: the loop itself does this."""
    kinds = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    for kind in ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"):
        if kind in kinds:
            raise ValueError(
                f"model is a {kind}: the loop itself averages gradients over the ranks; give it the plain module inside"
            )


def _require_plain_steps(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError if `optimizer.step()` needs arguments, or a parameter group has no learning rate to scale."""
    name = type(optimizer).__name__
    # The class's own: a scheduler wraps that of the optimizer, in a function of the same signature with `self`.
    _, *arguments = inspect.signature(type(optimizer).step).parameters.values()
    for argument in arguments:
        if argument.default is argument.empty and argument.kind not in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD):
            why = ", which evaluates a batch more than once" if argument.name == "closure" else " in each step"
            raise ValueError(f"optimizer {name} needs a {argument.name}{why}: use another one")
    for index, group in enumerate(optimizer.param_groups):
        if not isinstance(group.get("lr"), Real | Tensor):
            found = f"lr = {group['lr']!r}" if "lr" in group else "no lr"
            raise ValueError(
                f"optimizer {name} has {found} in parameter group {index}: must have a number or a tensor, which the "
                "loop scales; give it lr=, or use another one"
            )


def to_channels_last(model: nn.Module) -> None:
    """Converts a model with 2-d convolutions to channels_last memory, in place; values stay the same.

    Convolutions and the norms and pools between them run faster in it, on a GPU in FP16 and BF16 and on a CPU. The
    fused norm kernels need it.
    """
    if not any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dim() == 4:
            # Not `contiguous`: it keeps the strides of one-channel tensors, and outputs would take these over.
            tensor.data = tensor.data.to(memory_format=torch.channels_last)


Loss = Callable[[Any, Any], Tensor]
"""Maps a model's outputs and the targets to the mean loss over the samples, a scalar. In training, outputs arrive with
their floating-point tensors in FP32."""


def call_own_train(module: nn.Module) -> None:
    """Calls `train` of the outermost modules that override it, such as those that keep norms frozen.

    Other modules keep the mode that the user has given them.
    """
    if type(module).train is nn.Module.train:
        for child in module.children():
            call_own_train(child)
    elif module.training:
        module.train()


def trained_modules(model: nn.Module, loss: Loss) -> nn.ModuleList:
    """Returns the model, and the loss if it is a module: what a step may change besides parameters."""
    return nn.ModuleList(each for each in (model, loss) if isinstance(each, nn.Module))


@contextlib.contextmanager
def preserved_modes(model: nn.Module) -> Iterator[None]:
    """Returns a context that restores each module's training mode, and what the module's own `train` does besides."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        call_own_train(model)


def restoring_buffers(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Returns a function that restores the current buffers of `modules`: the same tensors with the same values."""
    named = [(module, name, b) for module in modules for name, b in module.named_buffers(recurse=False)]
    saved = [(module, name, buffer, buffer.clone()) for module, name, buffer in named]

    def restore() -> None:
        with torch.no_grad():
            for module, name, buffer, values in saved:
                setattr(module, name, buffer.copy_(values))

    return restore


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which compiled modules run their original code.

    It does nothing if `torch._dynamo` is not loaded yet, because loading it takes a second.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


def is_transposed(module: nn.Module) -> bool:
    """Returns whether this is the linear layer of Hugging Face's GPT-2, whose weight is [inputs, outputs]."""
    kind = type(module)
    return (kind.__module__, kind.__qualname__) == ("transformers.pytorch_utils", "Conv1D")


def is_depthwise(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Returns whether `module` is a 2-d convolution with one filter per channel."""
    return isinstance(module, nn.Conv2d) and module.groups == module.in_channels == module.out_channels > 1


@contextlib.contextmanager
def without_cudnn() -> Iterator[None]:
    """Returns a context in which convolutions use PyTorch's own kernels, for passes that run only once.

    cuDNN prepares for each new shape: 0.02 s for a convolution, 1.4 s for a depthwise one (H200).
    """
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


def forward(model: nn.Module, inputs: Any) -> Any:
    """Returns the model's outputs; passes a mapping by name, a tuple or list by position, any other input as it is."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)
