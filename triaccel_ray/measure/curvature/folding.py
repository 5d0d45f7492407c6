"""Batch normalisation with fixed statistics, as the affine map that it is: cheap to differentiate, once or twice."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class FoldedNorms(TorchFunctionMode):
    """Has `F.batch_norm` in evaluation mode computed as x scale + shift, one multiply-add.

    The same function up to rounding. Its gradient with respect to x needs the scale alone, where PyTorch's own keeps x:
    in a network of convolutions, norms and ReLU that halves what a backward pass has to keep. Its second derivative is
    nothing, where PyTorch's is written for training mode. Gradients with respect to the norm's own weight and bias,
    which belong to no layer, are not formed.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Returns what `func` does."""
        return (_batch_norm if func is F.batch_norm else func)(*args, **(kwargs or {}))


def _batch_norm(
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training or mean is None or var is None:
        return F.batch_norm(x, mean, var, weight, bias, training, momentum, eps)
    with torch.no_grad():
        scale = torch.rsqrt(var + eps) * (1.0 if weight is None else weight)
        shift = -mean * scale + (0.0 if bias is None else bias)
    shape = (1, -1, *(1,) * (x.dim() - 2))
    return torch.addcmul(shift.view(shape), x, scale.view(shape))
