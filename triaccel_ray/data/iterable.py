"""Iterable data sets as a source, with batches of any size and resumable passes."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from triaccel_ray.cuda.random_states import preserved_random_states
from triaccel_ray.data.batches import Collate, inputs_and_targets, moved, require_pair, seed_generators
from triaccel_ray.data.data_source import DataSource
from triaccel_ray.data.prefetch import item_loader, iterate

NUM_KEPT = 128
"""Samples of the first pass that are kept for measurements."""
_END: Any = object()
"""What an exhausted iterator returns in place of a sample."""


class IterableSource(DataSource):
    """An iterable data set: samples come in its own order, and an epoch ends when they do.

    Items, `collate_fn` and the seeding of random transforms are as in `DatasetSource`. Before each pass the data set's
    `set_epoch(epoch)` is called, if it has one. A run can be resumed within an epoch if the data set has `state_dict`
    and `load_state_dict`; otherwise only between epochs. The state must count a sample before it is yielded.
    Measurements beside the training step, such as curvature, use the first 128 samples.
    """

    def __init__(self, dataset: Iterable[Any], *, num_workers: int = 0, collate_fn: Collate | None = None) -> None:
        """Wraps `dataset`, read in this process, or by `num_workers` processes that each iterate over a copy of it.

        With several workers, the data set must split its samples by `torch.utils.data.get_worker_info()`.

        Raises:
            TypeError: the data set can be iterated over only once, or has workers but is no `IterableDataset`.
        """
        name = type(dataset).__name__
        if isinstance(dataset, Iterator) and not isinstance(dataset, IterableDataset):
            raise TypeError(
                f"{name} can be iterated over once: must give its samples in each epoch; write a class with an "
                "__iter__ that returns a new one"
            )
        if num_workers and not isinstance(dataset, IterableDataset):
            raise TypeError(f"num_workers = {num_workers} for {name}: must be 0; derive it from IterableDataset")
        self._dataset: Any = dataset
        self._num_workers, self._collate, self._name = num_workers, collate_fn, name
        has_state = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        self._is_resumable = has_state and not num_workers
        self._first_state = self._state() if self._is_resumable else None
        self._reset_on(torch.device("cpu"))

    def _reset_on(self, device: torch.device) -> None:
        self._device, self._seed = device, 0
        self._pass: tuple[int, int] | None = None
        """Epoch and seed of the current pass."""
        self._iterator: Iterator[Any] = iter(())
        self._is_exhausted = True
        self._probed: list[Any] = []
        self._buffer: deque[Any] = deque()
        self._start = 0
        """Position in the pass of the first sample in the buffer."""
        self._states: deque[tuple[int, Any]] = deque()
        """Positions of samples, and the data set's states before them; None for its beginning."""

    @property
    def expected_samples(self) -> int:
        """Samples of a pass by the data set's `__len__`; 0 if it has none, or one that knows no length."""
        try:
            return len(self._dataset)
        except (TypeError, NotImplementedError):  # that of `ChainDataset` adds up lengths, which its parts may lack
            return 0

    def __len__(self) -> int:
        """Raises TypeError: the length is known only at the end of a pass."""
        raise TypeError(
            f"{self._name} is iterable, of no known length: must be a map-style data set here, with __len__ and "
            "__getitem__; a ControlLoop of your own trains on it, and evaluates on it"
        )

    def announce(self, order: Tensor, *, seed: int, follows: bool) -> None:
        """Stores the `seed` of the next pass; the order is the data set's own."""
        self._seed = seed

    def set_epoch(self, epoch: int) -> None:
        """Begins the pass of this epoch, unless it is under way."""
        if self._pass != (epoch, self._seed):
            self._begin(epoch, start=0, state=None)

    def reach(self, cursor: int, wanted: int) -> int:
        """Returns how many samples this pass has from position `cursor` on, at most `wanted`.

        Raises:
            ValueError: the pass has no sample at all.
        """
        if self._pass is None:
            self.set_epoch(0)
        assert self._pass is not None
        epoch, seed = self._pass
        self._read_until(cursor + wanted, seed)
        while self._buffer and self._start < cursor:
            self._buffer.popleft()
            self._start += 1
        while len(self._states) > 1 and self._states[1][0] <= cursor:
            self._states.popleft()
        if not self._buffer and self._start == 0:
            raise ValueError(
                f"{self._name} gave no sample in epoch {epoch}: must give all of them in each; its __iter__ "
                "has to begin anew whenever it is called"
            )
        return min(wanted, len(self._buffer))

    def _read_until(self, end: int, seed: int) -> None:
        """Fills the buffer up to position `end` of the pass, or until the data set is exhausted."""
        position = self._start + len(self._buffer)
        if position >= end:
            return
        if self._is_resumable and position > self._states[-1][0]:
            self._states.append((position, self._state()))
        with preserved_random_states(cuda=False):  # dropout draws from the same generators
            for index in range(position, end):
                seed_generators(seed, index)
                sample = next(self._iterator, _END)
                if sample is _END:
                    self._is_exhausted = True
                    return
                self._buffer.append(sample)

    def probe(self, num_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Returns indices of samples kept from the first pass, always the same: -1, -2, and so on."""
        if not self._probed:
            self.set_epoch(0)
        return -1 - torch.arange(min(num_samples, len(self._probed)))

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> tuple[Any, Any]:
        """Returns the collated samples at `indices`, which `reach` or `probe` must have made available."""
        positions = indices.tolist()
        samples = [self._probed[-1 - each] if each < 0 else self._buffer[each - self._start] for each in positions]
        if self._collate is None:
            for position, sample in zip(positions, samples, strict=True):
                require_pair(sample, f"item {position} of {self._name}")
        batch = default_collate(samples) if self._collate is None else self._collate(samples)
        return inputs_and_targets(moved(batch, self._device))

    def state_at(self, cursor: int) -> list[Any] | None:
        """Returns what `resume` needs: a sample's position, and the data set's state there; None at the beginning.

        Raises:
            ValueError: the data set has no state to save.
        """
        if cursor == 0:
            return None
        if self._is_resumable:
            passed = [saved for saved in self._states if saved[0] <= cursor]
            return list(passed[-1])
        reason = f"is read by {self._num_workers} processes" if self._num_workers else "has no state_dict"
        raise ValueError(
            f"{self._name} {reason}: a position within an epoch cannot be saved, here after {cursor} samples; save "
            "between epochs, or give it state_dict() and load_state_dict(), and num_workers=0"
        )

    def resume(self, epoch: int, cursor: int, state: list[Any] | None) -> None:
        """Continues the pass of `epoch` at `cursor`, from `state_at`; without a state the next pass starts over.

        Raises:
            ValueError: the data set cannot load the state, or has fewer samples.
        """
        if state is None:
            self.close()
            return
        if not self._is_resumable:
            raise ValueError(
                f"{self._name} has no load_state_dict, or is read by processes of its own: cannot go on after {cursor} "
                "samples of an epoch; give it one, and num_workers=0"
            )
        start, dataset_state = state
        self._begin(epoch, start=start, state=dataset_state)
        if self.reach(cursor, 1) == 0:
            raise ValueError(
                f"{self._name} has no sample after {cursor} in epoch {epoch}, where the checkpoint had some"
            )

    def to(self, device: torch.device) -> Self:
        """Returns the same data set, from its beginning, with batches delivered on `device`."""
        same = copy.copy(self)
        same._reset_on(device)
        return same

    def close(self) -> None:
        """Ends the current pass and its worker processes."""
        self._iterator, self._pass, self._start = iter(()), None, 0
        self._buffer.clear()
        self._states.clear()

    def _state(self) -> Any:
        return copy.deepcopy(self._dataset.state_dict())

    def _begin(self, epoch: int, *, start: int, state: Any) -> None:
        """Begins a pass at position `start`, where the data set has `state`; None at its beginning."""
        if state is None and not self._is_exhausted:
            state = self._first_state  # else some would continue where they stopped
        self.close()
        self._is_exhausted = False
        self._pass, self._start = (epoch, self._seed), start
        self._states.append((start, state))
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        if state is not None:
            self._dataset.load_state_dict(state)
        self._iterator = self._new_iterator()
        if not self._probed:
            self.reach(start, NUM_KEPT)
            self._probed = list(self._buffer)

    def _new_iterator(self) -> Iterator[Any]:
        if not self._num_workers:
            return iter(self._dataset)
        generator = torch.Generator().manual_seed(self._seed)
        return iterate(item_loader(self._dataset, self._num_workers, generator=generator))
