"""A block to compile, and a record of what PyTorch compiles and runs."""

from typing import Any, NamedTuple

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Recording(NamedTuple):
    """What a backend of `torch.compile` has got, which runs the graphs as they are."""

    graphs: list[torch.fx.GraphModule]
    calls: list[int]
    """Index in `graphs` of each call, in order."""

    def backend(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        index = len(self.graphs)
        self.graphs.append(graph)

        def run(*args: Any) -> Any:
            self.calls.append(index)
            return graph.forward(*args)

        return run
