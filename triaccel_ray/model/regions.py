"""The blocks of a model, of which each is compiled by itself, or keeps nothing but its inputs.

Embeddings are left out of account where parameters are compared: they may be larger than all blocks together.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_MINIMAL_MODULES = 3
"""A block holds at least so many modules: one layer by itself has nothing to fuse, and nothing inside to free."""
_MAXIMAL_KINDS = 2
"""Kinds of blocks, an encoder's and a decoder's, say: beyond that compiling the whole model takes less time."""
_MINIMAL_SHARE = 0.8
"""Of a module's parameters, embeddings aside, that the blocks it repeats must own."""

Call = Callable[..., Any]


def repeated_blocks(model: nn.Module) -> tuple[nn.Module, ...]:
    """Returns the largest blocks of which the model is a repetition, in module order; none where it is not.

    Blocks are alike in class and in the shapes of their parameters: those of a ViT, a GPT or a BERT. Blocks that grow
    wider from stage to stage would each be compiled anew, which takes longer than the whole model (ConvNeXt-T on an
    H200 machine: 53 s against 41 s).
    """
    alike: dict[Any, list[nn.Module]] = defaultdict(list)
    for module in filter(_is_block, model.modules()):
        alike[type(module), tuple(p.shape for p in module.parameters())].append(module)
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    num_kinds = 0
    for blocks in alike.values():  # outer modules come before those inside them
        if len(blocks) < 2 or blocks[0] in inside or num_kinds == _MAXIMAL_KINDS:
            continue
        num_kinds += 1
        found.extend(blocks)
        inside.update(part for block in blocks for part in block.modules())
    return tuple(found) if _make_up(found, model) else ()


def find_regions(model: nn.Module) -> dict[str, nn.Module]:
    """Returns disjoint blocks by their qualified names, in module order: the smallest that a model repeats.

    Blocks are alike in class, whatever their widths: the bottlenecks of a ResNet, the blocks of a ViT. A stage that
    repeats blocks is divided into them. Where nothing repeats, the model's children are the regions. Single layers
    belong to none.
    """
    found: dict[nn.Module, str] = {}
    for name, module in model.named_children():
        _collect(name, module, found)
    return {name: module for module, name in found.items()}


def _collect(name: str, module: nn.Module, found: dict[nn.Module, str]) -> None:
    if isinstance(module, nn.ModuleList | nn.ModuleDict) or _repeats(module):
        for child_name, child in module.named_children():
            _collect(f"{name}.{child_name}", child, found)
    elif _num_modules(module) >= _MINIMAL_MODULES:
        found.setdefault(module, name)  # one that is called in several places is one region


def _repeats(module: nn.Module) -> bool:
    """Returns whether most of the module is made of blocks whose class occurs in it several times."""
    alike: defaultdict[type, list[nn.Module]] = defaultdict(list)
    for part in filter(_is_block, module.modules()):
        if part is not module:
            alike[type(part)].append(part)
    return _make_up([block for blocks in alike.values() if len(blocks) > 1 for block in blocks], module)


def _make_up(blocks: Iterable[nn.Module], module: nn.Module) -> bool:
    """Returns whether `blocks`, if there are any, own most parameters of the module that holds them."""
    looked_up = {p for part in module.modules() if isinstance(part, nn.Embedding) for p in part.parameters()}
    owned = {p for block in blocks for p in block.parameters()} - looked_up
    num_owned, num_all = (sum(p.numel() for p in some) for some in (owned, set(module.parameters()) - looked_up))
    return num_owned > 0 and num_owned >= _MINIMAL_SHARE * num_all


def _is_block(module: nn.Module) -> bool:
    return not isinstance(module, _CONTAINERS) and _num_modules(module) >= _MINIMAL_MODULES


def _num_modules(module: nn.Module) -> int:
    return sum(1 for _ in module.modules())


@contextlib.contextmanager
def interposed(regions: Mapping[str, nn.Module], around: Call) -> Iterator[None]:
    """Returns a context in which `around` stands for the calls of these modules; compiled ones stay compiled.

    It takes a module's name, its call, and the call's arguments; it returns what the call returns.
    """
    before = [(module, module.__dict__.get("_compiled_call_impl")) for module in regions.values()]
    try:
        for name, module in regions.items():
            # Modules have no public place for this beside hooks, which cannot replace a call.
            inner = module._compiled_call_impl or module._call_impl
            module._compiled_call_impl = partial(around, name, inner)
        yield
    finally:
        for module, own in before:
            module.__dict__.pop("_compiled_call_impl", None)
            if own is not None:
                module._compiled_call_impl = own
