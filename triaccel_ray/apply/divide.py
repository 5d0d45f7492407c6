"""Splits a fused graph at the regions of its model, so that each can be recomputed or offloaded by itself."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import fx, nn
from torch.fx.passes.split_module import split_module

from triaccel_ray.apply.fused_norm import FusedNorm, RecomputedInput
from triaccel_ray.apply.trace import called


@dataclass(frozen=True, kw_only=True, eq=False)
class Divided:
    """The fused graph with its regions split off as submodules; computes the same."""

    module: fx.GraphModule
    regions: Mapping[str, nn.Module]
    """Name -> the submodule of `module` that computes the region, or the segment that begins with it. The order is the
    graph's; regions missing from it are left out."""
    before: Mapping[str, str]
    """Region that can join -> the region before it, from which alone its inputs come."""
    spared: Mapping[RecomputedInput, frozenset[str]]
    """Layer that recomputes its input -> the regions of the layer and of the calls that give its inputs."""

    @contextlib.contextmanager
    def keeping_inputs_of(self, recomputed: Collection[str]) -> Iterator[None]:
        """Returns a context in which layers that touch the regions in `recomputed` save their inputs as usual.

        Saved tensors of a checkpoint can be unpacked only once, so a norm and the layer after it cannot both do so.
        """
        keeping = [layer for layer, touched in self.spared.items() if touched & set(recomputed)]
        try:
            for layer in keeping:
                layer.keeps_input = True
            yield
        finally:
            for layer in keeping:
                layer.keeps_input = False


def divide(
    model: nn.Module, fused: fx.GraphModule, names: Collection[str], joined: Collection[str] = frozenset()
) -> Divided:
    """Returns `fused`, the fused graph of `model`, with the regions called `names` split off as submodules.

    A region spans the graph from its first module to the next module outside it. Spans are contiguous, so the result
    is the same wherever they begin. Regions that the graph calls in several spans are left out. Those in `joined`, all
    of them keys of `before`, share a submodule with the region before them.
    """
    nodes, regions = list(fused.graph.nodes), _regions_of_nodes(model, fused, names)
    num_spans = Counter(name for name, _ in itertools.groupby(regions))
    regions = [name if num_spans[name] == 1 else "" for name in regions]
    span_of: dict[fx.Node, int] = {}
    span_names: list[str] = []
    last = ""
    for node, region in zip(nodes, regions, strict=True):
        if not span_names or (region != last and region not in joined):
            span_names.append(region)
        span_of[node], last = len(span_names) - 1, region
    divided = split_module(fused, fused, span_of.__getitem__, keep_original_order=True)
    spared: dict[RecomputedInput, frozenset[str]] = {}
    for node in nodes:
        layer = called(fused, node)
        if isinstance(layer, RecomputedInput):
            spared[layer] = frozenset(span_names[span_of[each]] for each in (node, *node.all_input_nodes))
    submodules = {name: divided.get_submodule(f"submod_{span}") for span, name in enumerate(span_names) if name}
    before = _regions_before(dict(zip(nodes, regions, strict=True)))
    return Divided(module=divided, regions=submodules, before=before, spared=spared)


def _regions_before(regions: Mapping[fx.Node, str]) -> dict[str, str]:
    """Returns region -> the region right before it, for each that gets all its inputs from there."""
    inputs: dict[str, set[str]] = {}
    for node, region in regions.items():
        inputs.setdefault(region, set()).update(regions[each] for each in node.all_input_nodes)
    names = [name for name, _ in itertools.groupby(regions.values())]
    following = ((before, name) for before, name in itertools.pairwise(names) if before and name)
    return {name: before for before, name in following if inputs[name] <= {before, name}}


def _regions_of_nodes(model: nn.Module, fused: fx.GraphModule, names: Collection[str]) -> list[str]:
    """Returns the name of the region that each node belongs to, empty outside all regions."""
    name_of = {id(module): name for name, module in model.named_modules()}
    found, current = [], ""
    for node in fused.graph.nodes:
        own = called(fused, node)
        if isinstance(own, FusedNorm):
            own = own.norm
        elif isinstance(own, RecomputedInput):
            own = own.layer
        path = name_of.get(id(own))
        if path is not None:  # else a module made by fusing: it belongs to the current region
            current = next((name for name in names if path == name or path.startswith(f"{name}.")), "")
        found.append("" if node.op in ("placeholder", "output") else current)
    return found
