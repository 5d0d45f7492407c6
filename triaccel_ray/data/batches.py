"""Reads and collates batches of samples, joins their tensors, and moves them to a device."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

Collate = Callable[[list[Any]], Any]
"""Maps a list of items to a batch: a pair (inputs, targets), or a mapping."""


def read(dataset: Dataset[Any], indices: Sequence[int], seed: int | None, collate: Collate | None = None) -> Any:
    """Returns the samples at `indices` as a batch, collated by `collate`, or as `DataLoader` would.

    With a `seed`, the global generators of Python, PyTorch (CPU) and NumPy are seeded before every sample, from the
    seed and the sample's index. So the result of a random transform depends neither on the process that reads the
    sample nor on what was read before.

    Raises:
        TypeError: an item, without `collate`, is neither an (input, target) pair nor a mapping.
    """
    samples = []
    for index in indices:
        if seed is not None:
            seed_generators(seed, index)
        samples.append(dataset[index])
        if collate is None:
            require_pair(samples[-1], f"item {index} of {type(dataset).__name__}")
    return default_collate(samples) if collate is None else collate(samples)


def seed_generators(seed: int, index: int) -> None:
    """Seeds the global generators of Python, PyTorch (CPU) and NumPy, by a pass's seed and a sample's index."""
    random.seed(f"{seed} {index}")
    word = random.getrandbits(32)
    torch.default_generator.manual_seed(word)  # torch.manual_seed would also touch CUDA, which a worker must not
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(word)


def require_pair(value: Any, what: str) -> None:
    """Checks that `value`, an item or a batch that a `collate_fn` returned, has inputs and targets.

    Raises:
        TypeError: it is neither a pair nor a mapping; the message begins with `what`.
    """
    if isinstance(value, Mapping) or (isinstance(value, tuple | list) and len(value) == 2):
        return
    kind = type(value).__name__ + (f" of {len(value)}" if isinstance(value, tuple | list) else "")
    raise TypeError(
        f"{what} is a {kind}: must be a pair (input, target), or a mapping of names to tensors; give "
        "DatasetSource(dataset, collate_fn=...) a function that makes one of a list of items"
    )


def inputs_and_targets(batch: Any) -> tuple[Any, Any]:
    """Returns a batch's inputs and targets. A mapping is both: model and loss take what they need by name.

    Raises:
        TypeError: a `collate_fn` returned neither a pair nor a mapping.
    """
    require_pair(batch, "what collate_fn returned")
    return (batch, batch) if isinstance(batch, Mapping) else (batch[0], batch[1])


def next_batch_size(num_left: int, wanted: int) -> int:
    """Returns the size of the next batch of an epoch with `num_left` samples left: at most `wanted`, or 3.

    Batch norm cannot train on one sample. If one would be left over, the last two batches share their samples. The
    larger half comes first, so that a schedule never counts fewer batches than were taken.
    """
    if num_left != wanted + 1:
        return min(wanted, num_left)
    return num_left if num_left <= 3 else (num_left + 1) // 2


def map_tree(function: Callable[..., Any], *trees: Any) -> Any:
    """Applies `function` to every leaf, or to corresponding leaves of several trees; returns the tree of results.

    Trees are what `default_collate` makes: mappings, lists, tuples and named tuples of tensors and lists of strings.
    """
    first = trees[0]
    if isinstance(first, Mapping):
        return {key: map_tree(function, *(tree[key] for tree in trees)) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(map_tree(function, *leaves) for leaves in zip(*trees, strict=True)))
    if isinstance(first, list | tuple) and not isinstance(next(iter(first), None), str | bytes):
        return type(first)(map_tree(function, *leaves) for leaves in zip(*trees, strict=True))
    return function(*trees)


def moved(batch: Any, device: torch.device) -> Any:
    """Copies a batch from the host to `device`, asynchronously."""
    if device.type == "cuda":
        batch = map_tree(lambda leaf: leaf.pin_memory() if isinstance(leaf, Tensor) else leaf, batch)
    return joined([batch], device)


def joined(parts: Sequence[Any], device: torch.device) -> Any:
    """Concatenates the parts to one batch on `device`; copies from pinned memory are asynchronous.

    Raises:
        ValueError: the parts differ in type or shape.
    """
    return map_tree(lambda *leaves: _join_leaves(leaves, device), *parts)


def _join_leaves(leaves: Sequence[Any], device: torch.device) -> Any:
    first = leaves[0]
    if not isinstance(first, Tensor):
        return first if len(leaves) == 1 else [sample for leaf in leaves for sample in leaf]
    if len(leaves) == 1:
        return first.to(device, non_blocking=True)
    if any(leaf.shape[1:] != first.shape[1:] or leaf.dtype is not first.dtype for leaf in leaves):
        seen = sorted({f"{leaf.dtype} {list(leaf.shape[1:])}" for leaf in leaves})
        raise ValueError(f"samples of one batch have {' and '.join(seen)}: the data set must return one type and shape")
    whole = torch.empty((sum(map(len, leaves)), *first.shape[1:]), dtype=first.dtype, device=device)
    for place, leaf in zip(whole.split([len(leaf) for leaf in leaves]), leaves, strict=True):
        place.copy_(leaf, non_blocking=True)
    return whole
