"""Splits FP32 weights of layers in BF16 into a BF16 word and the 16 bits that complete it to the FP32 number.

The BF16 word is the parameter itself. There is no FP32 copy and no cast in each pass, and gradients are half as large.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from triaccel_ray.apply.weights import Weights, parameters_of_one
from triaccel_ray.kernels.multi_tensor import have_equal_dense_strides, is_dense
from triaccel_ray.kernels.split_words import join, split
from triaccel_ray.model.layers import Layer

_PIECE_ELEMENTS = 2**18
"""Elements that are split or joined at once: temporaries take about 16 bytes per element."""
_ALIGNMENT = 8
"""The low words begin at a multiple of this many words: 16 bytes, which kernels read at once."""


class SplitWeights(Weights):
    """Splits the weights of layers in BF16, and joins them to FP32 for code other than training steps.

    Both words of a weight share one block of memory, in which it is split and joined in place. So its address stays
    the same, and FP32 exists nowhere else. `refresh` splits before a step. Whatever reads or writes FP32 joins first:
    evaluation, curvature, loading of checkpoints, the optimizer's own step. `model.state_dict()` always holds FP32,
    for split weights in host memory. In-place writes to a split weight are detected by its version counter.

    `companions` holds the low words, int16.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer], optimizer: torch.optim.Optimizer) -> None:
        """Covers weights that `optimizer` updates and that belong to exactly one of `layers`; splits none yet."""
        super().__init__()
        own = parameters_of_one(layers, [p for group in optimizer.param_groups for p in group["params"]])
        self._weights = {name: [p for p in each if p.dim() >= 2 and p.requires_grad] for name, each in own.items()}
        self._words: dict[int, _Words] = {}
        self._dtypes: Mapping[str, torch.dtype] = {}
        split_ids = {id(weight) for weights in self._weights.values() for weight in weights}
        self._hooks: list[RemovableHandle] = [
            optimizer.register_load_state_dict_pre_hook(lambda *_: self.join())  # else loading would cast state to BF16
        ]
        for module in model.modules():
            if any(id(p) in split_ids for p in module._parameters.values()):
                self._hooks.extend(_hooked(module, self._words))

    def set(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Sets the dtype of each layer, by name; joins the weights of layers that leave BF16."""
        self._dtypes = dict(dtypes)
        kept = {id(weight) for weight in self._to_split()}
        for key, words in self._words.items():
            if key not in kept:
                words.join()
        self._update()

    def refresh(self) -> None:
        """Splits the weights of layers in BF16 that are not split, and picks up changes made outside the optimizer."""
        for weight in self._to_split():
            words = self._words.get(id(weight))
            if words is None or not (words.is_split or have_equal_dense_strides(words.low, weight)):
                if not is_dense(weight):
                    continue
                words = self._words[id(weight)] = _Words(weight)
            words.split()
        self._update()

    def accept_step(self, parameters: Iterable[nn.Parameter]) -> None:
        """Notes that a step has raised the versions of `parameters` by one, so that it is no outside write."""
        for parameter in parameters:
            if id(parameter) in self.companions:
                self._words[id(parameter)].version += 1

    def join(self) -> None:
        """Makes all weights FP32 again, until the next `refresh`."""
        for words in self._words.values():
            words.join()
        self._update()

    def release(self) -> None:
        """Makes all weights FP32 permanently, and removes the hooks."""
        self.join()
        self._weights = {name: [] for name in self._weights}
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def gather_gradient(self, parameter: Tensor) -> None:
        """Adds the gradient of a split weight to `sums` in FP32; ignores other parameters."""
        if id(parameter) in self.companions and parameter.grad is not None:
            total = self.sums.get(id(parameter))
            self.sums[id(parameter)] = parameter.grad.float() if total is None else total.add_(parameter.grad)
            parameter.grad = None

    def zero_grad(self) -> None:
        """Drops the gradient sums."""
        self.sums.clear()

    def _to_split(self) -> list[nn.Parameter]:
        return [w for name, dtype in self._dtypes.items() if dtype is torch.bfloat16 for w in self._weights[name]]

    def _update(self) -> None:
        lows = {key: words.low for key, words in self._words.items() if words.is_split}
        if {key: id(low) for key, low in lows.items()} != {key: id(low) for key, low in self.companions.items()}:
            self.companions = lows


class _Words:
    """Memory of a weight, 4 bytes per element: its FP32 numbers, or all high words and then all low words."""

    def __init__(self, weight: nn.Parameter) -> None:
        """Allocates the memory; the weight moves there when it is first split."""
        number = weight.numel()
        low_start = -(-number // _ALIGNMENT) * _ALIGNMENT
        memory = torch.empty(2 * low_start, dtype=torch.int16, device=weight.device)
        self.weight, self.version = weight, weight._version
        """The weight, and its version counter when its low words were last valid."""
        self._flat = memory.view(torch.float32)[:number]
        self._numbers = self._flat.as_strided(weight.shape, weight.stride())
        self._flat_high = memory[:number].view(torch.bfloat16)
        self._flat_low = memory[low_start : low_start + number]
        self._high = self._flat_high.as_strided(weight.shape, weight.stride())
        self.low = self._flat_low.as_strided(weight.shape, weight.stride(), low_start)
        """The low words, int16, in the weight's memory layout."""

    @property
    def is_split(self) -> bool:
        """Whether the weight currently consists of the high words."""
        return self._is_in_own_memory and self.weight.dtype is torch.bfloat16

    @property
    def _is_in_own_memory(self) -> bool:
        return self.weight.data_ptr() == self._flat.data_ptr()

    @torch.no_grad()
    def split(self) -> None:
        """Makes the weight its high words; picks up in-place writes if it is split already."""
        if self.is_split:
            self._detect_writes()
            return
        if not self._is_in_own_memory:
            self._numbers.copy_(self.weight)
        # Compute all words before writing any: they overwrite the FP32 numbers.
        words = [split(piece) for piece in self._flat.split(_PIECE_ELEMENTS)]
        torch.cat([high for high, _ in words], out=self._flat_high)
        torch.cat([low for _, low in words], out=self._flat_low)
        self._set_data(self._high)

    @torch.no_grad()
    def join(self) -> None:
        """Makes the weight FP32."""
        if self.is_split:
            self._flat.copy_(self._joined())
            self._set_data(self._numbers)

    @torch.no_grad()
    def joined(self) -> Tensor:
        """Returns the FP32 numbers of a split weight in host memory: the device may not hold the model twice."""
        return self._joined().cpu().as_strided(self.weight.shape, self.weight.stride())

    def _joined(self) -> Tensor:
        """Returns the FP32 numbers in memory order, [number]."""
        self._detect_writes()
        pieces = zip(self._flat_high.split(_PIECE_ELEMENTS), self._flat_low.split(_PIECE_ELEMENTS), strict=True)
        return torch.cat([join(high, low) for high, low in pieces])

    def _detect_writes(self) -> None:
        if self.weight._version != self.version:
            self.low.zero_()  # they belong to the high words from before the write
            self.version = self.weight._version

    def _set_data(self, values: Tensor) -> None:
        self.weight.grad = None  # it has the other dtype
        self.weight.data = values
        self.version = self.weight._version


def _hooked(module: nn.Module, words: Mapping[int, _Words]) -> list[RemovableHandle]:
    """Hooks `module` to put split weights into a state_dict as FP32, and to join them before it loads one."""

    # Functions: a deep copy of the module shares them. It would copy objects, with all weights.
    def put_joined(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name, parameter in module._parameters.items():
            if id(parameter) in words and words[id(parameter)].is_split:
                state[prefix + name] = words[id(parameter)].joined()

    def join_own(module: nn.Module, *_: Any) -> None:
        for parameter in module._parameters.values():
            if id(parameter) in words:
                words[id(parameter)].join()

    return [module.register_state_dict_post_hook(put_joined), module.register_load_state_dict_pre_hook(join_own)]
