"""Blocks to compile, and a backend that records what PyTorch compiles."""

from typing import Any

import torch
from torch import nn

from tests.apply.captured import faults_of

Graphs = list[torch.fx.GraphModule]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def recorded_by(seen: Graphs, ran: list[int] | None = None) -> Any:
    """A backend that appends each graph to `seen`, and runs it as it is; each run appends its index to `ran`."""

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        index = len(seen)
        seen.append(graph)

        def run(*args: Any) -> Any:
            if ran is not None:
                ran.append(index)
            return graph.forward(*args)

        return run

    return backend


def told(ticks: list[Any]) -> list[str]:
    return [f"{fault.kind}: {fault.detail}" for fault in faults_of(ticks)]
