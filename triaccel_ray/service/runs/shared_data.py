"""A search's samples in Ray's object store: read once, copied once to each machine, memory-mapped by all trials."""

from __future__ import annotations

import pickle
import warnings
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import ray
import torch
from torch import Tensor

from triaccel_ray.config import require
from triaccel_ray.data.sources import TensorSource
from triaccel_ray.service.runs.building import splits_of
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.trainables.task import Purpose, Splits

SharedSplits: TypeAlias = ray.ObjectRef[Splits]
"""Training and validation samples in the object store. `ray.get` returns them; their tensors are zero-copy views."""
_PAGE_BYTES = 4096


class NotSharedError(ValueError):
    """The samples cannot be shared, so each run reads them itself; the message says why."""


def share_splits(spec: RunSpec) -> SharedSplits:
    """Reads the samples of a search on this machine, puts them into the object store, and returns a reference.

    Raises:
        NotSharedError: they are not tensors on the CPU, cannot be pickled, or their files are not on this machine.
        ValueError: the spec is that of a final run: test samples are not shared.
        UserCodeError, TypeError: there is a mistake in the task's own code.
    """
    require(spec.purpose is Purpose.SEARCH, "purpose", spec.purpose.value, "only a search's samples are shared")
    try:
        return put_splits(splits_of(spec.load_task(), spec.purpose))
    except FileNotFoundError as error:
        raise NotSharedError(f"not on this machine: {error}") from error


def put_splits(splits: Splits) -> SharedSplits:
    """Copies samples into the object store; raises NotSharedError as `share_splits`."""
    for name, source in (("train", splits.train), ("held_out", splits.held_out)):
        if not isinstance(source, TensorSource):
            raise NotSharedError(f"{name} is a {type(source).__name__}: only a TensorSource has what can be shared")
    ray.util.register_serializer(Tensor, serializer=_stored, deserializer=_restored)
    try:
        return ray.put(splits)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise NotSharedError(f"something in it cannot be pickled ({error.__cause__ or error})") from error
    finally:
        ray.util.deregister_serializer(Tensor)


def _stored(tensor: Tensor) -> tuple[npt.NDArray[np.uint8], torch.Size, torch.dtype]:
    """Returns a tensor's bytes, shape and dtype; as bytes, any dtype can be stored without a copy."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized:
        raise NotSharedError(f"a {tensor.layout} tensor on {tensor.device}: only dense ones on the CPU can be shared")
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy(), tensor.shape, tensor.dtype


def _restored(stored: tuple[Any, torch.Size, torch.dtype]) -> Tensor:
    """Returns the tensor after touching all pages: one mapped later would count as memory of the first batches."""
    data, shape, dtype = stored
    data[::_PAGE_BYTES].max(initial=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the array is read-only, as `Task.data` documents
        return torch.from_numpy(data).view(dtype).reshape(shape)
