"""Finds the blocks of a model that are compiled, or checkpointed, one by one.

Embeddings are ignored when parameters are counted: they may be larger than all blocks together.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn

from triaccel_ray.model.layers import is_depthwise

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_MIN_MODULES = 3
"""Minimum number of modules in a block: a single layer has nothing to fuse, and nothing inside to free."""
_MAX_KINDS = 2
"""Maximum number of kinds of blocks, such as an encoder's and a decoder's: with more, they count as unequal."""
_MIN_SHARE = 0.8
"""Minimum share of a module's parameters, embeddings aside, that its repeated blocks must own."""

_MAX_SMALL_FILTER = 3 * 3
"""Number of elements up to which the filters of a depthwise convolution are small."""

_MIN_NORMS_PER_LAYER = 1 / 3
"""Minimum `BatchNorm2d` per layer for fused norms. Measured: compiled is faster up to 0.18, fused from 0.6."""

Call = Callable[..., Any]


def unfused_because(model: nn.Module) -> str:
    """Returns why the model's norms are not fused if it can be compiled instead; empty if they are."""
    num_norms = sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    num_layers = sum(any(p.dim() >= 2 for p in module.parameters(recurse=False)) for module in model.modules())
    if num_norms and num_norms >= _MIN_NORMS_PER_LAYER * num_layers:
        return ""
    return f"{num_norms} BatchNorm2d for {num_layers} layers are not fused: the model is faster compiled"


def blocks_to_compile(
    model: nn.Module, *, may_free_activations: bool, num_ranks: int
) -> tuple[tuple[nn.Module, ...], bool, str]:
    """Returns the blocks to compile one by one, empty to compile the whole, whether they are equal, and the reason.

    Activations of regions may be recomputed or offloaded if `may_free_activations`; `num_ranks` processes train.
    """
    if blocks := repeated_blocks(model):
        return blocks, True, "its blocks repeat"
    regions = find_regions(model)
    if may_free_activations:
        reason = "what becomes of their activations can be chosen"
    elif num_ranks > 1:
        reason = "so that gradients are sent during the backward pass"
    elif have_large_depthwise_convolutions(regions):
        reason = "depthwise convolutions larger than 3 x 3 run faster so"
    else:
        return (), False, "it does not consist of equal blocks"
    return tuple(regions.values()), False, reason if regions else "it has no blocks of several layers"


def repeated_blocks(model: nn.Module) -> tuple[nn.Module, ...]:
    """Returns the largest blocks that the model repeats, in module order; empty if it does not consist of such blocks.

    Blocks are alike in class and in parameter shapes, as in a ViT, a GPT or a BERT. Blocks that grow wider from stage
    to stage are left out: each width would be compiled.
    """
    alike: dict[Any, list[nn.Module]] = defaultdict(list)
    for module in filter(_is_block, model.modules()):
        alike[_kind(module)].append(module)
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    num_kinds = 0
    for blocks in alike.values():  # outer modules come before those inside them
        if len(blocks) < 2 or blocks[0] in inside or num_kinds == _MAX_KINDS:
            continue
        num_kinds += 1
        found.extend(blocks)
        inside.update(part for block in blocks for part in block.modules())
    return tuple(found) if _own_most_of(found, model) else ()


def have_numbers_of_their_own(blocks: Iterable[nn.Module]) -> bool:
    """Returns whether blocks of one kind differ in numbers, such as DropPath rates or indices of layers.

    Compiled for static sizes, such blocks share no code.
    """
    numbers_of: dict[Any, list[Any]] = {}
    for block in blocks:
        numbers = [
            (module_name, name, value)
            for module_name, module in block.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, int | float)
        ]
        if numbers_of.setdefault(_kind(block), numbers) != numbers:
            return True
    return False


def _kind(module: nn.Module) -> Any:
    return type(module), tuple(p.shape for p in module.parameters())


def find_regions(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the smallest blocks that a model repeats, disjoint, by qualified name and in module order.

    Blocks are alike in class, whatever their widths: the bottlenecks of a ResNet, the blocks of a ViT. A stage that
    repeats blocks is divided into them. If nothing repeats, the model's children are the regions. Single layers are in
    no region.
    """
    found: dict[nn.Module, str] = {}
    for name, module in model.named_children():
        _collect_regions(name, module, found)
    return {name: module for module, name in found.items()}


def have_large_depthwise_convolutions(regions: Mapping[str, nn.Module]) -> bool:
    """Returns whether any region has a depthwise convolution larger than 3 x 3.

    Such regions run faster if they are compiled one by one, others do not (docs/benchmarks.md).
    """
    parts = (part for region in regions.values() for part in region.modules())
    return any(is_depthwise(part) and math.prod(part.kernel_size) > _MAX_SMALL_FILTER for part in parts)


def _collect_regions(name: str, module: nn.Module, found: dict[nn.Module, str]) -> None:
    if isinstance(module, nn.ModuleList | nn.ModuleDict) or _repeats(module):
        for child_name, child in module.named_children():
            _collect_regions(f"{name}.{child_name}", child, found)
    elif _num_modules(module) >= _MIN_MODULES:
        found.setdefault(module, name)  # a module that is used in several places is one region


def _repeats(module: nn.Module) -> bool:
    """Returns whether most of the module is made of blocks whose class occurs in it several times."""
    alike: defaultdict[type, list[nn.Module]] = defaultdict(list)
    for part in filter(_is_block, module.modules()):
        if part is not module:
            alike[type(part)].append(part)
    repeated = [block for blocks in alike.values() if len(blocks) > 1 for block in blocks]
    return _own_most_of(repeated, module)


def _own_most_of(blocks: Iterable[nn.Module], module: nn.Module) -> bool:
    """Returns whether `blocks` own most parameters of `module`, which holds them; False if there are no blocks."""
    embeddings = {p for part in module.modules() if isinstance(part, nn.Embedding) for p in part.parameters()}
    num_owned = sum(p.numel() for p in {p for block in blocks for p in block.parameters()} - embeddings)
    num_all = sum(p.numel() for p in set(module.parameters()) - embeddings)
    return num_owned > 0 and num_owned >= _MIN_SHARE * num_all


def _is_block(module: nn.Module) -> bool:
    return not isinstance(module, _CONTAINERS) and _num_modules(module) >= _MIN_MODULES


def _num_modules(module: nn.Module) -> int:
    return sum(1 for _ in module.modules())


@contextlib.contextmanager
def wrapped_calls(regions: Mapping[str, nn.Module], around: Call) -> Iterator[None]:
    """Returns a context in which calls of these modules go through `around`; compiled modules stay compiled.

    `around` takes a module's name, its call, and the call's arguments; it returns what the call returns.
    """
    before = [(module, module.__dict__.get("_compiled_call_impl")) for module in regions.values()]
    try:
        for name, module in regions.items():
            # Private: hooks, the public way to intercept a call, cannot replace it.
            inner = module._compiled_call_impl or module._call_impl
            module._compiled_call_impl = partial(around, name, inner)
        yield
    finally:
        for module, own in before:
            module.__dict__.pop("_compiled_call_impl", None)
            if own is not None:
                module._compiled_call_impl = own
