"""The regions of a model: blocks that keep their inputs alone where activations are checkpointed."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
MINIMAL_MODULES = 3
"""A block holds at least so many modules: one layer by itself has nothing to fuse, and nothing inside to free."""
_MINIMAL_SHARE = 0.8
"""Of a module's parameters, embeddings aside, that the blocks it repeats must own."""

Call = Callable[..., Any]
Around = Callable[[str, Call, tuple[Any, ...], dict[str, Any]], Any]
"""Stands for a region's calls: takes its name, the call, and the arguments; returns what the call returns."""


def find_regions(model: nn.Module) -> dict[str, nn.Module]:
    """Returns disjoint blocks by their qualified names, in module order: the smallest that a model repeats.

    Blocks are alike in class, whatever their widths: the bottlenecks of a ResNet, the blocks of a ViT. A stage that
    repeats blocks is divided into them. Where nothing repeats, the model's children are the regions. Single layers
    belong to none.
    """
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, module in model.named_children():
        _collect(name, module, found)
    return dict(found.values())


def _collect(name: str, module: nn.Module, found: dict[int, tuple[str, nn.Module]]) -> None:
    if isinstance(module, nn.ModuleList | nn.ModuleDict) or _repeats(module):
        for child_name, child in module.named_children():
            _collect(f"{name}.{child_name}", child, found)
    elif _num_modules(module) >= MINIMAL_MODULES:
        found.setdefault(id(module), (name, module))  # one that is called in several places is one region


def _repeats(module: nn.Module) -> bool:
    """Returns whether most of the module is made of blocks whose class occurs in it several times."""
    alike: defaultdict[type, list[nn.Module]] = defaultdict(list)
    for part in module.modules():
        if part is not module and not isinstance(part, CONTAINERS) and _num_modules(part) >= MINIMAL_MODULES:
            alike[type(part)].append(part)
    repeated = [block for blocks in alike.values() if len(blocks) > 1 for block in blocks]
    looked_up = {id(p) for part in module.modules() if isinstance(part, nn.Embedding) for p in part.parameters()}
    sizes = {id(p): p.numel() for p in module.parameters() if id(p) not in looked_up}
    owned = {id(p) for block in repeated for p in block.parameters()}
    return bool(repeated) and sum(sizes.get(key, 0) for key in owned) >= _MINIMAL_SHARE * sum(sizes.values())


def _num_modules(module: nn.Module) -> int:
    return sum(1 for _ in module.modules())


@contextlib.contextmanager
def interposed(regions: Mapping[str, nn.Module], around: Around) -> Iterator[None]:
    """Returns a context in which `around` stands for the calls of these modules; compiled ones stay compiled."""
    before = [(module, module.__dict__.get("_compiled_call_impl")) for module in regions.values()]
    try:
        for name, module in regions.items():
            # Modules have no public place for this beside hooks, which cannot replace a call.
            inner = module._compiled_call_impl or module._call_impl
            module._compiled_call_impl = partial(_call, around, name, inner)
        yield
    finally:
        for module, own in before:
            module.__dict__.pop("_compiled_call_impl", None)
            if own is not None:
                module._compiled_call_impl = own


def _call(around: Around, name: str, inner: Call, *args: Any, **kwargs: Any) -> Any:
    return around(name, inner, args, kwargs)
