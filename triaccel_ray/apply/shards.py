"""Shares the optimizer among the ranks: each holds the state of some parameters, and steps these alone.

Stage 1 of ZeRO (Rajbhandari et al. 2020, section 5.1), with whole parameters as units. Gradients are summed on every
rank, not scattered: each layer's statistics need all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from triaccel_ray.config import require
from triaccel_ray.distributed.ranks import Ranks
from triaccel_ray.kernels.multi_tensor import is_dense

_UNIT = torch.int16  # the largest that divides the memory of weights in any dtype, and of low words
MESSAGE_UNITS = 16 * 2**20
"""Units of two bytes that a rank sends at once: the messages must take little memory beside the state that is saved."""


class Shards:
    """Says which rank owns each parameter of an optimizer, and keeps the other ranks up to date."""

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: Ranks) -> None:
        """Gives each of `parameters` to the rank with the fewest elements so far, the largest first.

        Raises:
            ValueError: a parameter is not dense: there are gaps in its memory.
        """
        rule = "dense parameters alone can be exchanged; give shard_optimizer=False"
        require(all(map(is_dense, parameters)), "shard_optimizer", True, rule)
        self._parameters, self._ranks = tuple(parameters), ranks
        self._owner_of: dict[int, int] = {}
        sizes = [0] * ranks.world_size
        for parameter in sorted(parameters, key=lambda parameter: -parameter.numel()):
            owner = self._owner_of[id(parameter)] = sizes.index(min(sizes))
            sizes[owner] += parameter.numel()

    def owns(self, parameter: nn.Parameter) -> bool:
        """Returns whether this rank steps the parameter."""
        return self._owner_of[id(parameter)] == self._ranks.rank

    @torch.no_grad()
    def exchange(self, companions: Mapping[int, Tensor]) -> None:
        """Copies what the owners have stepped to the other ranks; device work alone, which a graph can capture.

        `companions` maps ids of parameters to tensors beside them. Low words of split weights are sent, too. Each rank
        derives low-precision copies from its parameters.
        """
        sent: list[list[Tensor]] = [[] for _ in range(self._ranks.world_size)]
        copies: list[tuple[Tensor, Tensor]] = []
        for parameter in self._parameters:
            weight, owner = parameter.data, self._owner_of[id(parameter)]  # kernels raise no version counters either
            sent[owner].append(_units_of(weight))
            companion = companions.get(id(parameter))
            if companion is not None and not companion.is_floating_point():
                sent[owner].append(_units_of(companion))
            elif companion is not None and owner != self._ranks.rank:
                copies.append((companion.data, weight))
        for pieces_of in _messages(sent):
            message = torch.zeros(max(map(_length, pieces_of)), dtype=_UNIT, device=self._parameters[0].device)
            _copy(_parts(message, pieces_of[self._ranks.rank]), pieces_of[self._ranks.rank])
            for sender, row in enumerate(self._ranks.all_gather(message)):
                if sender != self._ranks.rank:
                    _copy(pieces_of[sender], _parts(row, pieces_of[sender]))
        _copy([copy for copy, _ in copies], [weight for _, weight in copies])

    def whole(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns an optimizer's `state_dict` with the state of all parameters on rank 0, in host memory; a collective.

        `state` is this rank's; the other ranks get theirs back.
        """
        own, is_first = state["state"], self._ranks.rank == 0
        kinds_of = self._ranks.all_gather_object({str(index): _kinds(values) for index, values in own.items()})
        found: dict[int, dict[str, Any]] = {}
        for index, parameter in enumerate(self._parameters):
            owner = self._owner_of[id(parameter)]
            for name, (shape, dtype, value) in kinds_of[owner].get(str(index), {}).items():
                if dtype is not None:
                    empty = torch.empty(shape, dtype=getattr(torch, dtype), device=parameter.device)
                    tensor = empty.copy_(own[index][name]) if owner == self._ranks.rank else empty
                    self._ranks.broadcast_from(owner, tensor)
                    value = tensor.cpu() if is_first else None
                found.setdefault(index, {})[name] = value
        return {**state, "state": found if is_first else own}

    def part(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns an optimizer's whole `state_dict` without the state of parameters that other ranks own."""
        own = {index: values for index, values in state["state"].items() if self.owns(self._parameters[index])}
        return {**state, "state": own}


def _kinds(values: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns [shape, dtype, None] of each tensor, and [None, None, value] of other values, such as step counts."""
    return {
        name: [list(value.shape), str(value.dtype).removeprefix("torch."), None]
        if isinstance(value, Tensor)
        else [None, None, value]
        for name, value in values.items()
    }


def _messages(sent: Sequence[Sequence[Tensor]]) -> list[list[list[Tensor]]]:
    """Cuts what each rank sends, by rank, into messages of at most `MESSAGE_UNITS`: message -> rank -> pieces."""
    found: list[list[list[Tensor]]] = []
    for rank, tensors in enumerate(sent):
        number, room = 0, MESSAGE_UNITS
        for rest in tensors:
            while len(rest):
                if not room:
                    number, room = number + 1, MESSAGE_UNITS
                if number == len(found):
                    found.append([[] for _ in sent])
                piece, rest = rest[:room], rest[room:]
                found[number][rank].append(piece)
                room -= len(piece)
    return found


def _units_of(tensor: Tensor) -> Tensor:
    """Returns the memory of a dense tensor, in one dimension."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(_UNIT)


def _length(pieces: Sequence[Tensor]) -> int:
    return sum(map(len, pieces))


def _parts(message: Tensor, pieces: Sequence[Tensor]) -> list[Tensor]:
    """Returns the parts of a message that hold `pieces`."""
    return list(message[: _length(pieces)].split([len(piece) for piece in pieces]))


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))
