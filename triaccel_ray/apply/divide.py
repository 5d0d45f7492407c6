"""A fused model's graph, divided at its regions: each becomes a module that can be called by itself."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter

from torch import fx, nn
from torch.fx.passes.split_module import split_module

from triaccel_ray.apply.fused_norm import FusedNorm, RecomputedInput
from triaccel_ray.apply.trace import called


@dataclass(frozen=True, kw_only=True, eq=False)
class Divided:
    """What computes the same as the fused graph, region by region."""

    module: fx.GraphModule
    regions: Mapping[str, nn.Module]
    """Name -> the part of `module` that stands for the region; regions that the graph does not hold are left out."""
    spared: Mapping[RecomputedInput, frozenset[str]]
    """Layer that keeps no input of its own -> the regions of the layer and of what it would have computed again."""

    @contextlib.contextmanager
    def keeping_inputs_of(self, recomputed: Collection[str]) -> Iterator[None]:
        """Returns a context in which layers that touch these regions keep their inputs as usual.

        What a checkpoint holds may be unpacked once only: not by a norm and by a layer after it.
        """
        keeping = [layer for layer, touched in self.spared.items() if touched & set(recomputed)]
        try:
            for layer in keeping:
                layer.keeps_input = True
            yield
        finally:
            for layer in keeping:
                layer.keeps_input = False


def divide(model: nn.Module, fused: fx.GraphModule, names: Collection[str]) -> Divided:
    """Returns `fused`, made of `model`, with its regions of these names as modules.

    A region is the stretch of the graph from its first layer to the next region's first: a stretch is contiguous, so
    that it computes the same wherever it begins. Regions that the graph calls in several stretches are left out.
    """
    nodes, region_of = list(fused.graph.nodes), _regions(model, fused, names)
    times = Counter(name for name, _ in itertools.groupby(region_of))
    region_of = [name if times[name] == 1 else "" for name in region_of]
    stretches = itertools.groupby(zip(nodes, region_of, strict=True), key=itemgetter(1))
    parts = [(name, [node for node, _ in group]) for name, group in stretches]
    part_of = {node: part for part, (_, inside) in enumerate(parts) for node in inside}
    parted = split_module(fused, fused, part_of.__getitem__, keep_original_order=True)
    regions = {name: parted.get_submodule(f"submod_{part}") for part, (name, _) in enumerate(parts) if name}
    spared = {
        layer: frozenset(parts[part_of[each]][0] for each in (node, *node.all_input_nodes))
        for node in nodes
        if isinstance(layer := called(fused, node), RecomputedInput)
    }
    return Divided(module=parted, regions=regions, spared=spared)


def _regions(model: nn.Module, fused: fx.GraphModule, names: Collection[str]) -> list[str]:
    """Returns for each node the region that it belongs to, empty outside of them."""
    name_of = {id(module): name for name, module in model.named_modules()}
    found, current = [], ""
    for node in fused.graph.nodes:
        own = called(fused, node)
        if isinstance(own, FusedNorm):
            own = own.norm
        elif isinstance(own, RecomputedInput):
            own = own.layer
        path = name_of.get(id(own))
        if path is not None:  # else a module that fusing made: it belongs to what surrounds it
            current = next((name for name in names if path == name or path.startswith(f"{name}.")), "")
        found.append("" if node.op in ("placeholder", "output") else current)
    return found
