"""Removes from running statistics what batches with NaN or infinite activations have left there."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # no public class covers batch and instance normalization


class RunningStatistics:
    """The running means and variances of a model's norms, which a step that is skipped must not spoil for good.

    One infinite activation makes an average infinite, and every later one. So `mend` replaces elements that are not
    finite by those of the last call. The device does it alone: no step waits to learn whether it is necessary.
    """

    def __init__(self, model: nn.Module) -> None:
        self._norms = [module for module in model.modules() if isinstance(module, _NormBase)]
        self.keep()

    @torch.no_grad()
    def keep(self) -> None:
        """Remembers the statistics as they are, as after a checkpoint was loaded."""
        self._last = [each.clone() for each in self._tensors()]

    @torch.no_grad()
    def mend(self) -> None:
        """Replaces what is not finite by the statistics last remembered, and remembers the result."""
        tensors = self._tensors()
        if list(map(_place_of, tensors)) != list(map(_place_of, self._last)):  # the user has moved or changed the model
            self.keep()
        elif tensors:
            now, before = (torch.cat([each.reshape(-1) for each in group]) for group in (tensors, self._last))
            mended = torch.where(now.isfinite(), now, before).split([each.numel() for each in tensors])
            self._last = [part.view_as(each) for part, each in zip(mended, tensors, strict=True)]
            torch._foreach_copy_(tensors, self._last)

    def _tensors(self) -> list[Tensor]:
        pairs = ((norm.running_mean, norm.running_var) for norm in self._norms)
        return [each for pair in pairs for each in pair if each is not None]


def _place_of(tensor: Tensor) -> tuple[torch.Size, torch.device]:
    return tensor.shape, tensor.device
