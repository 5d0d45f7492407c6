"""A search's samples in Ray's object store: read once, copied once to every machine, mapped by all of its trials."""

from __future__ import annotations

import io
import pickle
import warnings
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import ray
import torch
from ray.cloudpickle import CloudPickler
from torch import Tensor

from triaccel_ray.config import require
from triaccel_ray.data.sources import TensorSource
from triaccel_ray.service.runs.building import splits_of
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.trainables.task import Purpose, Splits

_PAGE_BYTES = 4096


class NotSharedError(ValueError):
    """The samples stay where they are, and each run reads them itself; the message says why."""


class SharedSplits:
    """Training and validation samples in the object store; what travels to a trial is a reference."""

    def __init__(self, splits: Splits) -> None:
        """Copies the samples into the store.

        Raises:
            NotSharedError: they are not held in tensors on the CPU, or something that they hold cannot travel.
        """
        for name, source in (("train", splits.train), ("held_out", splits.held_out)):
            if not isinstance(source, TensorSource):
                raise NotSharedError(f"{name} is a {type(source).__name__}: only a TensorSource has what can be shared")
        self._reference = ray.put(_take_apart(splits))

    def get(self) -> Splits:
        """Returns the samples; their tensors are the store's own memory, which all trials of a machine read.

        All of it is touched: what a page-wise mapping brings in later would pass for the memory of the first batches.
        """
        parts: _Parts = ray.get(self._reference)
        for tensor in parts.tensors:
            tensor.data[::_PAGE_BYTES].max(initial=0)
        return cast(Splits, _Joiner(parts).load())


def share_splits(spec: RunSpec) -> SharedSplits:
    """Returns the samples for the runs of a search, read here and put into the object store.

    Raises:
        NotSharedError: they cannot be shared, or their files are not on this machine.
        ValueError: the spec is that of a final run: test samples are not shared.
        UserCodeError, TypeError: there is a mistake in the task's own code.
    """
    require(spec.purpose is Purpose.SEARCH, "purpose", spec.purpose.value, "only a search's samples are shared")
    task = spec.load_task()
    try:
        splits = splits_of(task, spec.purpose)
    except FileNotFoundError as error:
        raise NotSharedError(f"not on this machine: {error}") from error
    return SharedSplits(splits)


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """A tensor as the object store takes it without a copy: bytes, whatever the type."""

    data: npt.NDArray[np.uint8]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the array cannot be written to, as the task's documentation says
            return torch.from_numpy(self.data).view(self.dtype).reshape(self.shape)


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """Splits with numbers in place of their tensors, and the tensors."""

    rest: bytes
    tensors: tuple[_Stored, ...]


class _Parter(CloudPickler):
    """Pickles everything but tensors."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)  # type: ignore[no-untyped-call]  # Ray's copy has no annotations
        self.tensors: list[_Stored] = []

    def persistent_id(self, value: Any) -> int | None:
        """Returns the number of a tensor, None for what is not one."""
        if type(value) is not Tensor:
            return None
        if value.device.type != "cpu" or value.layout is not torch.strided or value.is_quantized:
            raise NotSharedError(f"a {value.layout} tensor on {value.device}: only dense ones on the CPU can be shared")
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        self.tensors.append(_Stored(data=data, shape=tuple(value.shape), dtype=value.dtype))
        return len(self.tensors) - 1


class _Joiner(pickle.Unpickler):
    """Puts the tensors back."""

    def __init__(self, parts: _Parts) -> None:
        super().__init__(io.BytesIO(parts.rest))
        self._tensors = parts.tensors

    def persistent_load(self, number: int) -> Tensor:
        """Returns the tensor of that number."""
        return self._tensors[number].tensor()


def _take_apart(splits: Splits) -> _Parts:
    file = io.BytesIO()
    parter = _Parter(file)
    try:
        parter.dump(splits)  # type: ignore[no-untyped-call]  # likewise
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise NotSharedError(f"something in it cannot travel ({error})") from error
    return _Parts(rest=file.getvalue(), tensors=tuple(parter.tensors))
